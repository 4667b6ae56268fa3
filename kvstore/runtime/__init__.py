"""The only layer that imports mlx and mlx_lm.

To teach kvstore a cache class of your own, write a :class:`KindHandler` and call
:func:`register_kind`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.runtime.registry import KindHandler, Placement, Source, register_kind

__all__ = ["KindHandler", "Placement", "Source", "register_kind"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: whoever wants a submodule that needs no mlx should not pay for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kvstore.runtime.registry"), name)

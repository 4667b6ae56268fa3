"""The only layer that imports mlx and mlx_lm.

To teach kvstore a cache class of your own, write a :class:`KindHandler` and call
:func:`register_kind`. To drop positions from a cache, call :func:`drop_positions`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.runtime.registry import KindHandler, Placement, Source, register_kind
    from kvstore.runtime.sparse import SparseKVCache, SparseQuantizedKVCache, drop_positions

__all__ = [
    "KindHandler", "Placement", "Source", "SparseKVCache", "SparseQuantizedKVCache", "drop_positions", "register_kind",
]  # fmt: skip

_SPARSE = ("SparseKVCache", "SparseQuantizedKVCache", "drop_positions")


def __getattr__(name: str) -> Any:
    """Import a public name on first use: whoever wants a submodule that needs no mlx should not pay for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "sparse" if name in _SPARSE else "registry"
    return getattr(import_module(f"kvstore.runtime.{home}"), name)

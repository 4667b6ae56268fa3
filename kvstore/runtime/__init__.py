"""The only layer that imports mlx and mlx_lm.

To teach kvstore a cache class of your own, write a :class:`KindHandler` and call
:func:`register_kind`. To drop positions from a cache, call :func:`drop_positions`; to
take one sequence out of a batch, :func:`extract_sequence`; to keep a model's caches
together with those of its draft model, :func:`put_pair`, :func:`match_pair` and
:func:`load_pair`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.runtime.batch import extract_sequence
    from kvstore.runtime.pairs import PairHit, RestoredPair, load_pair, match_pair, pair_of, put_pair
    from kvstore.runtime.registry import KindHandler, Placement, Source, register_kind
    from kvstore.runtime.sparse import SparseKVCache, SparseQuantizedKVCache, drop_positions

__all__ = [
    "KindHandler", "PairHit", "Placement", "RestoredPair", "Source", "SparseKVCache", "SparseQuantizedKVCache",
    "drop_positions", "extract_sequence", "load_pair", "match_pair", "pair_of", "put_pair", "register_kind",
]  # fmt: skip

_HOMES = {
    "batch": ("extract_sequence",),
    "pairs": ("PairHit", "RestoredPair", "load_pair", "match_pair", "pair_of", "put_pair"),
    "registry": ("KindHandler", "Placement", "Source", "register_kind"),
    "sparse": ("SparseKVCache", "SparseQuantizedKVCache", "drop_positions"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: whoever wants a submodule that needs no mlx should not pay for it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kvstore.runtime.{_HOME[name]}"), name)

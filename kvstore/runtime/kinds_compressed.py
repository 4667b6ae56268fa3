"""The cache of models that compress what lies behind their window: one object for each layer, in its model's module.

It has no way back from its own ``state``, which lacks the window's size; its attributes
are read and set. Facts about the class are those of mlx_lm 0.32.2,
``mlx_lm/models/deepseek_v41.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import mlx.core as mx

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord, Scalar
from kvstore.runtime.registry import KindHandler, Placement, Source

__all__ = ["builtin"]

_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType({
    "window": "window", "compressed": "compress_kv", "index": "index_k", "pending.kv": "pending_kv",
    "pending.gate": "pending_gate",
})  # fmt: skip


def builtin() -> Iterator[tuple[type, KindHandler]]:
    """The class, where the installed mlx_lm has its model."""
    try:
        from mlx_lm.models.deepseek_v41 import LayerCache
    except ImportError:
        return
    yield LayerCache, _Compressed(LayerCache)


class _Compressed(KindHandler):
    kind: ClassVar[str] = "kv-compressed"

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        return {"offset": cache.offset, "max_size": cache.window_size}

    def sources(self, cache: Any, where: str) -> dict[str, Source]:
        arrays = {role: getattr(cache, name) for role, name in _ATTRIBUTES.items()}
        found = {role: Source(array) for role, array in arrays.items() if array is not None}
        for role, source in found.items():
            array = source.array
            if not isinstance(array, mx.array) or array.ndim != 3:
                raise fail("CACHE_INCONSISTENT", f"{where}.{role}", expected="[1, rows, size]", found=str(array)[:80])
            if array.shape[0] != 1:
                raise fail(
                    "CACHE_BATCHED", f"{where}.{role}", expected="a batch of 1", found=array.shape[0],
                    fix="Put each sequence by itself: kvstore.runtime.extract_sequence takes one out.",
                )  # fmt: skip
        if bool(found) != bool(cache.offset):
            raise fail("CACHE_INCONSISTENT", f"{where}.offset", expected="0 without arrays", found=cache.offset)
        return found

    def place(self, record: LayerRecord) -> Placement:
        del record
        return Placement(None)

    def restore(self, record: LayerRecord, arrays: Mapping[str, mx.array], children: Sequence[Any]) -> Any:
        del children
        cache = self.cls(record.integer("max_size"))
        cache.offset = record.offset
        for role, name in _ATTRIBUTES.items():
            setattr(cache, name, arrays.get(role))
        return cache

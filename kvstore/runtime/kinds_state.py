"""Handlers of kinds without a token axis: recurrent state, and lists of caches.

A state has no offset: how many tokens it has read is the caller's word, and receipts
call it asserted. It can be restored at its own position only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord, Scalar
from kvstore.runtime.registry import KindHandler, Placement, Source

__all__ = ["builtin"]


def builtin() -> Iterator[tuple[type, KindHandler]]:
    """The classes of the installed mlx_lm, with their handlers."""
    from mlx_lm.models import cache as module

    yield module.ArraysCache, _State(module.ArraysCache)
    yield module.CacheList, _List(module.CacheList)


class _State(KindHandler):
    """Ordered slots, each an array or absent; left padding and lengths of the one sequence, where set."""

    kind: ClassVar[str] = "state"

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        return {
            "slots": len(cache.cache),
            "left_padding": _integers(getattr(cache, "left_padding", None), "left_padding"),
            "lengths": _integers(getattr(cache, "lengths", None), "lengths"),
        }

    def sources(self, cache: Any, where: str) -> dict[str, Source]:
        found = {f"slot.{i}": Source(array) for i, array in enumerate(cache.cache) if array is not None}
        for role, source in found.items():
            array = source.array
            if not isinstance(array, mx.array) or array.ndim == 0:
                raise fail("CACHE_INCONSISTENT", f"{where}.{role}", expected="an array", found=type(array).__name__)
            if array.shape[0] != 1:
                raise fail(
                    "CACHE_BATCHED", f"{where}.{role}", expected="a batch of 1", found=array.shape[0],
                    fix="Put each sequence by itself: kvstore.runtime.extract_sequence takes one out.",
                )  # fmt: skip
        return found

    def place(self, record: LayerRecord) -> Placement:
        del record
        return Placement(None)

    def restore(self, record: LayerRecord, arrays: Mapping[str, mx.array], children: Sequence[Any]) -> Any:
        del children
        cache = self.cls(record.integer("slots"))
        for index in range(record.integer("slots")):
            cache.cache[index] = arrays.get(f"slot.{index}")
        for name in ("left_padding", "lengths"):
            value = record.scalars[name]
            if isinstance(value, tuple):
                setattr(cache, name, mx.array(value))
        return cache


class _List(KindHandler):
    """Several caches of one layer, in order."""

    kind: ClassVar[str] = "list"

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        del cache
        return {}

    def sources(self, cache: Any, where: str) -> dict[str, Source]:
        del cache, where
        return {}

    def children(self, cache: Any) -> Sequence[Any]:
        return tuple(cache.caches)

    def restore(self, record: LayerRecord, arrays: Mapping[str, mx.array], children: Sequence[Any]) -> Any:
        del record, arrays
        return self.cls(*children)


def _integers(value: mx.array | None, name: str) -> tuple[int, ...] | None:
    """One integer for each sequence; a handful of bytes, so it may be evaluated even while probing."""
    if value is None:
        return None
    if value.size != 1:
        raise fail(
            "CACHE_BATCHED", name, expected="one sequence", found=f"{value.size} values",
            fix="Put each sequence by itself: kvstore.runtime.extract_sequence takes one out.",
        )  # fmt: skip
    number = value.item()
    return (number,) if isinstance(number, int) else None

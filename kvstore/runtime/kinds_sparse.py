"""Handlers of the sparse kinds: rows that a lossy method kept, and where they stood."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import mlx.core as mx

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord
from kvstore.runtime.kinds_kv import KeysValues, Quantized, first_rows
from kvstore.runtime.registry import KindHandler, Source
from kvstore.runtime.rows import Ranges

__all__ = ["builtin"]


def builtin() -> Iterator[tuple[type, KindHandler]]:
    """Our own classes, with their handlers."""
    from kvstore.runtime.sparse import SparseKVCache, SparseQuantizedKVCache

    yield SparseKVCache, _Sparse(SparseKVCache)
    yield SparseQuantizedKVCache, _SparseQuantized(SparseQuantizedKVCache)


class _Rows(KeysValues):
    """What both share: the stored rows are the first ``rows`` of the buffers, whatever the offset is."""

    def sources(self, cache: Any, where: str) -> dict[str, Source]:
        found = super().sources(cache, where)
        if found and cache.positions is not None:
            ranges = next(iter(found.values())).ranges
            if cache.positions.ndim != 2 or cache.positions.shape[1] < cache.rows:
                raise fail(
                    "CACHE_INCONSISTENT", f"{where}.positions", expected=f"[heads or 1, at least {cache.rows}]",
                    found=list(cache.positions.shape),
                )  # fmt: skip
            found["positions"] = Source(cache.positions, 1, ranges)
        return found

    def ranges(self, cache: Any, rows: int, where: str) -> Ranges:
        if cache.rows > cache.offset:
            raise fail(
                "CACHE_INCONSISTENT", f"{where}: stored rows", expected=f"at most {cache.offset}", found=cache.rows
            )
        return first_rows(cache.rows, rows, where) if cache.rows else ()

    def fill(self, cache: Any, record: LayerRecord, arrays: Mapping[str, mx.array]) -> None:
        super().fill(cache, record, arrays)
        cache.rows = record.rows
        cache.positions = arrays.get("positions")


class _Sparse(_Rows):
    kind: ClassVar[str] = "kv-sparse"


class _SparseQuantized(_Rows, Quantized):
    kind: ClassVar[str] = "kv-sparse-quantized"

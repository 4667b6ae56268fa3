"""Handlers of the token-axis kinds: plain, quantized, rotating, chunked, concatenated.

What is *logical state* is decided here. Buffers have head room and may hold tokens that
were trimmed; neither leaves the process. Facts about the classes are those of mlx_lm
0.32.2, ``mlx_lm/models/cache.py``; attributes are read, never ``state``, whose shape
changed between releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import mlx.core as mx

from kvstore.errors import KVStoreError, fail
from kvstore.format.layers import LayerRecord, Scalar
from kvstore.runtime.registry import KindHandler, Placement, Source
from kvstore.runtime.rows import Ranges, Rows

__all__ = ["CUT_MARK", "Chunked", "KeysValues", "Quantized", "builtin", "first_rows"]

_PARTS: Final = ("words", "scales", "biases")
CUT_MARK: Final = "_kvstore_cut_at"
"""Attribute of a ring that was restored one token back: the offset at which its oldest row is a hole."""


def builtin() -> Iterator[tuple[type, KindHandler]]:
    """The classes of the installed mlx_lm, with their handlers."""
    from mlx_lm.models import cache as module

    for name, make in (
        ("KVCache", _Plain), ("QuantizedKVCache", Quantized), ("RotatingKVCache", _Rotating),
        ("ConcatenateKVCache", _Concatenated), ("ChunkedKVCache", _chunked),
    ):  # fmt: skip
        cls = getattr(module, name, None)
        if cls is not None:
            yield cls, make(cls)


def _chunked(cls: type) -> Chunked:
    from kvstore.runtime.older_mlx_lm import ChunkedByBuffer, trims_by_buffer  # rests on this module

    return ChunkedByBuffer(cls) if trims_by_buffer(cls) else Chunked(cls)


class KeysValues(KindHandler):
    """What all five share: ``keys`` and ``values`` of ``[1, heads, rows, size]`` and an ``offset``."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        """The offset."""
        return {"offset": cache.offset}

    def sources(self, cache: Any, where: str) -> dict[str, Source]:
        """The arrays of :meth:`arrays`, proved to agree, with the rows of :meth:`ranges`."""
        _check_offset(cache, where)
        if (cache.keys is None) != (cache.values is None):
            raise fail("CACHE_INCONSISTENT", f"{where}: keys and values", expected="both or neither", found="one")
        if cache.keys is None:
            if cache.offset:
                raise fail("CACHE_INCONSISTENT", f"{where} has no arrays", expected="offset 0", found=cache.offset)
            return {}
        arrays = self.arrays(cache, where)
        rows = _check_shapes(arrays, where)
        if not cache.offset:
            return {}  # trimmed to nothing: the state of a cache that was never written
        ranges = self.ranges(cache, rows, where)
        return {role: Source(array, 2, ranges) for role, array in arrays.items()}

    def arrays(self, cache: Any, where: str) -> dict[str, mx.array]:
        """The arrays by role."""
        del where
        return {"k": cache.keys, "v": cache.values}

    def ranges(self, cache: Any, rows: int, where: str) -> Ranges:
        """The stored rows of buffers with ``rows`` rows."""
        return first_rows(cache.offset, rows, where)

    def restore(self, record: LayerRecord, arrays: Mapping[str, mx.array], children: Sequence[Any]) -> Any:
        """An object of :meth:`make`, given the arrays by :meth:`fill`."""
        del children
        cache = self.make(record)
        if arrays:
            self.fill(cache, record, arrays)
        return cache

    def make(self, record: LayerRecord) -> Any:
        """An empty object with the record's configuration."""
        del record
        return self.cls()

    def fill(self, cache: Any, record: LayerRecord, arrays: Mapping[str, mx.array]) -> None:
        """Hand the arrays and the position to the object."""
        cache.keys, cache.values, cache.offset = arrays["k"], arrays["v"], record.offset


class _Plain(KeysValues):
    kind: ClassVar[str] = "kv"


class Quantized(KeysValues):
    """Packed words, scales, and in some modes biases, for keys and for values."""

    kind: ClassVar[str] = "kv-quantized"

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        """Offset, bits, group size, mode."""
        mode = getattr(cache, "mode", "affine")
        return {"offset": cache.offset, "bits": cache.bits, "group_size": cache.group_size, "mode": mode}

    def arrays(self, cache: Any, where: str) -> dict[str, mx.array]:
        """Two or three for each side, by the mode."""
        found: dict[str, mx.array] = {}
        for side, parts in (("k", cache.keys), ("v", cache.values)):
            if not isinstance(parts, (list, tuple)) or not 2 <= len(parts) <= len(_PARTS):
                raise fail("CACHE_INCONSISTENT", f"{where}.{side}", expected=_PARTS, found=type(parts).__name__)
            found.update({f"{side}.{part}": array for part, array in zip(_PARTS, parts, strict=False)})
        return found

    def make(self, record: LayerRecord) -> Any:
        """An empty object; SIGNATURE_MISMATCH where the class lacks the mode."""
        cache = self.cls(group_size=record.integer("group_size"), bits=record.integer("bits"))
        if getattr(cache, "mode", "affine") != record.scalars["mode"]:
            raise fail(
                "SIGNATURE_MISMATCH", f"{self.cls.__qualname__} has no such quantization mode",
                expected=getattr(cache, "mode", "affine"), found=record.scalars["mode"],
            )  # fmt: skip
        return cache

    def fill(self, cache: Any, record: LayerRecord, arrays: Mapping[str, mx.array]) -> None:
        """Hand the arrays over as the class keeps them: a tuple for each side."""
        sides = [tuple(arrays[f"{side}.{part}"] for part in _PARTS if f"{side}.{part}" in arrays) for side in "kv"]
        cache.keys, cache.values = sides
        cache.offset = record.offset


class _Rotating(KeysValues):
    """A window of ``max_size`` rows, the first ``keep`` of them pinned.

    Stored order is temporal: pinned rows, then the oldest to the newest. Three states are valid:

    * a buffer in temporal order (``_idx`` at its end). After a multi-token update it may be longer than the window;
      the rows beyond it are dropped unread by whichever update comes next, so they are no state;
    * a full ring that was written in place: ``_idx`` is the place of the next row. Order changes float sums, so the
      place is kept as ``ring_index`` and each row comes back where it was;
    * a buffer with head room, not yet full.
    """

    kind: ClassVar[str] = "kv-rotating"

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        common = {"offset": cache.offset, "max_size": cache.max_size, "keep": cache.keep}
        if cache.keys is None or not cache.offset:
            return {**common, "ring_index": 0}
        rows = cache.keys.shape[2]
        in_ring = cache.offset > cache.max_size == rows > cache._idx  # noqa: SLF001 - the class has no other name for it
        return {**common, "ring_index": cache._idx if in_ring else min(cache._idx, cache.max_size)}  # noqa: SLF001

    def ranges(self, cache: Any, rows: int, where: str) -> Ranges:
        size, keep, index, offset = cache.max_size, cache.keep, cache._idx, cache.offset  # noqa: SLF001
        if getattr(cache, CUT_MARK, None) == offset and offset:
            raise _hole(where)
        if index == rows and offset >= rows and (rows >= size or rows == offset):
            return ((0, rows),) if rows <= size else _merge((0, keep), (rows - size + keep, rows))
        if keep <= index < rows == size < offset:
            return _merge((0, keep), (index, rows), (keep, index))
        if index == offset < rows <= size:
            return ((0, index),)
        raise fail(
            "CACHE_INCONSISTENT", f"{where}: the ring is in a state that it cannot have reached",
            expected="index at the end, in a full ring, or at the offset",
            found=f"{rows} rows, index {index}, offset {offset}, max_size {size}, keep {keep}",
        )  # fmt: skip

    def require_whole(self, cache: Any, rows: Mapping[str, Rows], where: str) -> None:
        # The mark is an attribute that is lost when the ring goes through a batch, a file or its state; the hole stays.
        if cache.offset < cache.max_size or cache.keep or not rows:
            return
        if not any(each.read(0, 1).any() for each in rows.values()):
            raise _hole(where)

    def place(self, record: LayerRecord) -> Placement:
        rows, size, keep = record.rows, record.integer("max_size"), record.integer("keep")
        ring = record.integer("ring_index")
        if ring < rows:
            return Placement(rows, _merge((0, keep), (ring, rows), (keep, ring)))
        return Placement(min(size, (rows // self.step + 1) * self.step), ((0, rows),))

    def make(self, record: LayerRecord) -> Any:
        return self.cls(max_size=record.integer("max_size"), keep=record.integer("keep"))

    def fill(self, cache: Any, record: LayerRecord, arrays: Mapping[str, mx.array]) -> None:
        super().fill(cache, record, arrays)
        cache._idx = record.integer("ring_index")  # noqa: SLF001


class Chunked(KeysValues):
    """The last rows, from ``start`` on; when it is read again, all but a chunk of them go."""

    kind: ClassVar[str] = "kv-chunked"

    def scalars(self, cache: Any) -> dict[str, Scalar]:
        """Offset, chunk size, and the position of the first row."""
        start = cache.start_position if cache.keys is not None and cache.offset else 0
        return {"offset": cache.offset, "chunk_size": cache.chunk_size, "start": start}

    def ranges(self, cache: Any, rows: int, where: str) -> Ranges:
        """Those that are not head room."""
        return first_rows(cache.offset - cache.start_position, rows, where)

    def make(self, record: LayerRecord) -> Any:
        """An empty object with the chunk size."""
        return self.cls(chunk_size=record.integer("chunk_size"))

    def fill(self, cache: Any, record: LayerRecord, arrays: Mapping[str, mx.array]) -> None:
        """Hand over the first row's position, too."""
        super().fill(cache, record, arrays)
        cache.start_position = record.integer("start")


class _Concatenated(KeysValues):
    """Its next update joins onto *all* rows, trimmed ones too, and sets the offset to their number: all are state."""

    kind: ClassVar[str] = "kv-concatenated"

    def ranges(self, cache: Any, rows: int, where: str) -> Ranges:
        first_rows(cache.offset, rows, where)
        return ((0, rows),)

    def place(self, record: LayerRecord) -> Placement:
        return Placement(record.rows, ((0, record.rows),))


def _hole(where: str) -> KVStoreError:
    return fail(
        "CACHE_INCONSISTENT", f"{where} was restored one token back, and its oldest row is not there",
        expected="at least one token evaluated since", found="none", fix="Evaluate the next token, then put.",
    )  # fmt: skip


def _check_offset(cache: Any, where: str) -> None:
    if type(cache.offset) is not int or cache.offset < 0:
        raise fail("CACHE_INCONSISTENT", f"{where}.offset", expected="a count of tokens", found=repr(cache.offset)[:80])


def _check_shapes(arrays: Mapping[str, mx.array], where: str) -> int:
    """The number of rows of the buffers, once it is proved that they agree."""
    first = next(iter(arrays.values()))
    for role, array in arrays.items():
        if not isinstance(array, mx.array) or array.ndim != 4:
            found = list(array.shape) if isinstance(array, mx.array) else type(array).__name__
            raise fail("CACHE_INCONSISTENT", f"{where}.{role}", expected="[1, heads, rows, size]", found=found)
        if array.shape[0] != 1:
            raise fail(
                "CACHE_BATCHED", f"{where}.{role}", expected="a batch of 1", found=array.shape[0],
                fix="Put each sequence by itself: kvstore.runtime.extract_sequence takes one out.",
            )  # fmt: skip
        if array.shape[1:3] != first.shape[1:3]:
            expected = f"{first.shape[1]} heads, {first.shape[2]} rows"
            raise fail("CACHE_INCONSISTENT", f"{where}.{role}", expected=expected, found=list(array.shape))
    return int(first.shape[2])


def first_rows(count: int, rows: int, where: str) -> Ranges:
    """The first ``count`` rows of a buffer, which must hold them."""
    if not 0 <= count <= rows:
        raise fail("CACHE_INCONSISTENT", f"{where} rows", expected=f"at least {count}, for its offset", found=rows)
    return ((0, count),)


def _merge(*ranges: tuple[int, int]) -> Ranges:
    """Ranges without the empty ones, neighbours joined, so that fewer segments span a seam."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)

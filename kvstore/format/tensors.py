"""Canonical payloads: tensors as unsigned integers, their bytes and their digest.

A :class:`Payload` holds views, never copies: a slice of a live cache stays a slice, and
is walked in pieces of at most 1 MiB when it is hashed or encoded. Elements are unsigned
integers of the dtype's width, because bits are what is stored: NaN payloads, −0 and
subnormals pass through untouched, and numpy has no bfloat16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from kvstore.errors import fail
from kvstore.format.boxes import Box, box_shape, boxes, read_box
from kvstore.format.digest import Digest
from kvstore.format.filters import scratch
from kvstore.format.tensor_header import (
    DTYPE_SIZES,
    PlacedTensor,
    TensorSpec,
    canonical_order,
    check_specs,
    encode_tensor_header,
    parse_dtype,
    parse_tensor_header,
    payload_size,
)
from kvstore.limits import MAX_CHUNK_BYTES

__all__ = [
    "DTYPE_SIZES", "Payload", "PlacedTensor", "Seal", "TensorSpec", "UintArray", "canonical_order",
    "encode_tensor_header", "parse_dtype", "parse_tensor_header", "payload_from_bytes", "payload_size", "uint_dtype",
]  # fmt: skip

UintArray: TypeAlias = "np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]"
_UINTS: Final = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_DIRECT_BYTES: Final = 256 * 1024
"""Contiguous tensors of at least this size are hashed in place; smaller ones are gathered, to spare calls."""
_CACHED_TENSORS: Final = 1024


def uint_dtype(dtype: str) -> np.dtype[Any]:
    """The little-endian unsigned numpy dtype that carries a safetensors dtype's bits."""
    return _UINTS[DTYPE_SIZES[dtype]]


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What a payload was when it was hashed; see :mod:`kvstore.format.seal`.

    Attributes:
        digest: Its digest.
        prints: Fingerprints of its data, box after box.
    """

    digest: Digest
    prints: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Tensors in canonical order with their data.

    Attributes:
        specs: The tensors, in canonical order.
        arrays: For each spec its data: unsigned integers of the dtype's width, of the spec's shape, possibly strided.
        header: The canonical tensor header.
        seal: What the data was when it was hashed, if anybody has; whoever encodes it checks that it still is.
        data: The tensors' bytes, where they lie one after another in memory; the arrays are views of them.
    """

    specs: tuple[TensorSpec, ...]
    arrays: tuple[UintArray, ...]
    header: bytes
    seal: Seal | None = None
    data: UintArray | None = None

    @classmethod
    def make(cls, tensors: Mapping[str, tuple[str, UintArray]]) -> Payload:
        """Build a payload from ``name -> (dtype, data)``; the data is not copied.

        Raises:
            InvalidError: ST_HEADER_INVALID or ST_SHAPE_OVERFLOW.
            UnsupportedError: DTYPE_UNSUPPORTED.
            UsageError: USAGE, where an array's elements are not unsigned integers of the dtype's width.
        """
        found = tuple((name, dtype, array.shape) for name, (dtype, array) in tensors.items())
        specs, header = (_described if len(found) <= _CACHED_TENSORS else _describe)(found)
        arrays = tuple(tensors[spec.name][1] for spec in specs)
        for spec, array in zip(specs, arrays, strict=True):
            wanted = uint_dtype(spec.dtype)
            if array.dtype != wanted:
                raise fail("USAGE", f"the array of tensor {spec.name!r}", expected=str(wanted), found=str(array.dtype))
        return cls(specs, arrays, header)

    @property
    def size(self) -> int:
        """Bytes of the payload: header and data."""
        return len(self.header) + sum(spec.nbytes for spec in self.specs)

    def digest(self) -> Digest:
        """SHA-256 of the payload's canonical bytes."""
        hasher = hashlib.sha256(self.header)
        for rows in self.runs() if self.data is None else (self.data,):
            hasher.update(rows.reshape(-1).data)
        return Digest(f"sha256:{hasher.hexdigest()}")

    def copied(self, room: UintArray) -> Payload:
        """A copy whose data lies together in ``room``, bytes of at least this payload's size.

        Its memory is not the live cache's, so whatever is read of it, and when, is one state.
        """
        data = room[: self.size - len(self.header)]
        arrays, at = [], 0
        for array in self.arrays:
            copy = data[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(copy, array)
            arrays.append(copy)
            at += array.nbytes
        return Payload(self.specs, tuple(arrays), self.header, None, data)

    def to_bytes(self) -> bytes:
        """The whole payload in memory."""
        result = bytearray(self.header)
        for rows in self.runs():
            result += rows.reshape(-1).data
        return bytes(result)

    def runs(self) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The data in order: neighbouring boxes of one size, ``[boxes, bytes of a box]``, at most 1 MiB together.

        A run lies in this thread's scratch and is valid until the next one is asked for.
        """
        gathered = scratch("runs", (MAX_CHUNK_BYTES,), np.uint8)
        used = width = 0
        for array in self.arrays:
            direct = array.flags.c_contiguous and array.nbytes >= _DIRECT_BYTES
            for box, nbytes in _cut(array):
                if used and (direct or nbytes != width or used + nbytes > MAX_CHUNK_BYTES):
                    yield gathered[:used].reshape(-1, width)
                    used = 0
                if direct:
                    begin = array.itemsize * (0 if box is None else _first(array.shape, box))
                    yield array.reshape(-1).view(np.uint8)[begin : begin + nbytes].reshape(1, -1)
                    continue
                # A run holds boxes of one size only, so each begins at a multiple of its width.
                room, width = gathered[used : used + nbytes].view(array.dtype), nbytes
                if box is None:
                    np.copyto(room.reshape(array.shape), array)
                else:
                    read_box(array, box, room.reshape(box.shape))
                used += nbytes
        if used:
            yield gathered[:used].reshape(-1, width)


def _cut(array: UintArray) -> Iterator[tuple[Box | None, int]]:
    """The boxes of an array with their bytes; None for one box that is the whole."""
    if 0 < array.nbytes <= MAX_CHUNK_BYTES:
        yield None, array.nbytes
        return
    for box in boxes(box_shape(array.shape), MAX_CHUNK_BYTES // array.itemsize):
        yield box, box.size * array.itemsize


def _first(shape: tuple[int, ...], box: Box) -> int:
    """Number of the box's first element in C order."""
    _, rows, cols = box_shape(shape)
    outer, row, col = box.start
    return (outer * rows + row) * cols + col


def _describe(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> tuple[tuple[TensorSpec, ...], bytes]:
    """Specs in canonical order and their header."""
    specs = tuple(TensorSpec(*tensor) for tensor in tensors)
    check_specs(specs)
    ordered = canonical_order(specs)
    return ordered, encode_tensor_header(ordered)


# The segments of a cache have the same tensors, but for the last one.
_described = lru_cache(maxsize=64)(_describe)


def payload_from_bytes(data: bytes | bytearray | memoryview) -> Payload:
    """A payload over canonical bytes: views into ``data``, nothing copied.

    Raises:
        InvalidError: ST_HEADER_INVALID, ST_OFFSETS_INVALID, ST_SHAPE_OVERFLOW or ST_NOT_CANONICAL.
        UnsupportedError: DTYPE_UNSUPPORTED.
    """
    view = memoryview(data).cast("B")
    placed = parse_tensor_header(view, len(view))
    arrays = tuple(
        np.frombuffer(view[item.offset : item.offset + item.spec.nbytes], uint_dtype(item.spec.dtype)).reshape(
            item.spec.shape
        )
        for item in placed
    )
    header = bytes(view[: len(view) - sum(array.nbytes for array in arrays)])
    return Payload(tuple(item.spec for item in placed), arrays, header)

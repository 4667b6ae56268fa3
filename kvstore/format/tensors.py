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
from typing import Any, Final, TypeAlias

import numpy as np

from kvstore.errors import fail
from kvstore.format.boxes import box_shape, boxes, read_box
from kvstore.format.digest import Digest
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
    "DTYPE_SIZES", "Payload", "PlacedTensor", "TensorSpec", "UintArray", "canonical_order", "encode_tensor_header",
    "parse_dtype", "parse_tensor_header", "payload_from_bytes", "payload_size", "uint_dtype",
]  # fmt: skip

UintArray: TypeAlias = "np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]"
_UINTS: Final = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_DIRECT_BYTES: Final = 256 * 1024
"""Contiguous tensors of at least this size are hashed in place; smaller ones are gathered, to spare calls."""


def uint_dtype(dtype: str) -> np.dtype[Any]:
    """The little-endian unsigned numpy dtype that carries a safetensors dtype's bits."""
    return _UINTS[DTYPE_SIZES[dtype]]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Tensors in canonical order with their data.

    Attributes:
        specs: The tensors, in canonical order.
        arrays: For each spec its data: unsigned integers of the dtype's width, of the spec's shape, possibly strided.
        header: The canonical tensor header.
    """

    specs: tuple[TensorSpec, ...]
    arrays: tuple[UintArray, ...]
    header: bytes

    @classmethod
    def make(cls, tensors: Mapping[str, tuple[str, UintArray]]) -> Payload:
        """Build a payload from ``name -> (dtype, data)``; the data is not copied.

        Raises:
            InvalidError: ST_HEADER_INVALID or ST_SHAPE_OVERFLOW.
            UnsupportedError: DTYPE_UNSUPPORTED.
            UsageError: USAGE, where an array's elements are not unsigned integers of the dtype's width.
        """
        specs = canonical_specs(tensors)
        arrays = tuple(tensors[spec.name][1] for spec in specs)
        for spec, array in zip(specs, arrays, strict=True):
            wanted = uint_dtype(spec.dtype)
            if array.dtype != wanted:
                raise fail("USAGE", f"the array of tensor {spec.name!r}", expected=str(wanted), found=str(array.dtype))
        return cls(specs, arrays, encode_tensor_header(specs))

    @property
    def size(self) -> int:
        """Bytes of the payload: header and data."""
        return len(self.header) + sum(spec.nbytes for spec in self.specs)

    def digest(self) -> Digest:
        """SHA-256 of the payload's canonical bytes."""
        hasher = hashlib.sha256(self.header)
        for piece in self._pieces():
            hasher.update(piece)
        return Digest(f"sha256:{hasher.hexdigest()}")

    def to_bytes(self) -> bytes:
        """The whole payload in memory."""
        result = bytearray(self.header)
        for piece in self._pieces():
            result += piece
        return bytes(result)

    def _pieces(self) -> Iterator[memoryview]:
        """The data in order. A piece is valid until the next one is asked for."""
        scratch = np.empty(MAX_CHUNK_BYTES, np.uint8)
        used = 0
        for array in self.arrays:
            if array.flags.c_contiguous and array.nbytes >= _DIRECT_BYTES:
                yield scratch[:used].data
                used = 0
                yield array.reshape(-1).view(np.uint8).data
                continue
            for box in boxes(box_shape(array.shape), MAX_CHUNK_BYTES // array.itemsize):
                nbytes = box.size * array.itemsize
                # Widths only fall in canonical order, so the view below is always aligned.
                if used + nbytes > len(scratch):
                    yield scratch[:used].data
                    used = 0
                read_box(array, box, scratch[used : used + nbytes].view(array.dtype).reshape(box.shape))
                used += nbytes
        yield scratch[:used].data


def canonical_specs(tensors: Mapping[str, tuple[str, UintArray]]) -> tuple[TensorSpec, ...]:
    """The specs of named arrays, checked and in canonical order. Raises as :meth:`Payload.make`."""
    specs = tuple(TensorSpec(name, dtype, tuple(array.shape)) for name, (dtype, array) in tensors.items())
    check_specs(specs)
    return canonical_order(specs)


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

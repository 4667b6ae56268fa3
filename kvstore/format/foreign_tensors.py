"""The header of a safetensors file that someone else wrote: any order, any padding, metadata allowed.

Other readers trust the offsets. Here every tensor must have exactly the bytes that its
dtype and shape ask for, and all together must cover the data without hole or overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.json import unique_pairs
from kvstore.format.layers import TensorRecord
from kvstore.format.tensors import DTYPE_SIZES
from kvstore.limits import MAX_DIM, MAX_RANK, MAX_TENSOR_HEADER_BYTES

__all__ = [
    "LENGTH_BYTES", "ForeignHeader", "ForeignTensor", "emit_foreign_header", "header_length", "parse_foreign_header",
]  # fmt: skip

LENGTH_BYTES: Final = 8
_ALIGN: Final = 8
_METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor, and where its data lies, in bytes from the end of the header."""

    name: str
    record: TensorRecord
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ForeignHeader:
    """Tensors in the order of their data, and the file's metadata."""

    tensors: tuple[ForeignTensor, ...]
    metadata: Mapping[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of all data."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def records(self) -> dict[str, TensorRecord]:
        """Dtype and shape by name."""
        return {tensor.name: tensor.record for tensor in self.tensors}


def header_length(first: bytes) -> int:
    """The header's length, from the first eight bytes of a file. Raises CACHE_FILE_INVALID."""
    size = int.from_bytes(first, "little")
    if len(first) != LENGTH_BYTES or not 2 <= size <= MAX_TENSOR_HEADER_BYTES:
        raise _invalid("it is no safetensors file: the header's length", f"2 to {MAX_TENSOR_HEADER_BYTES}", size)
    return size


def parse_foreign_header(data: bytes) -> ForeignHeader:
    """Parse the JSON after the length.

    Raises:
        InvalidError: CACHE_FILE_INVALID.
        UnsupportedError: DTYPE_UNSUPPORTED.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the header is not JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise _invalid("the header", "an object", type(value).__name__)
    metadata = value.pop(_METADATA, None)
    texts = {} if metadata is None else metadata
    if not (isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())):
        raise _invalid("metadata", "texts by name", type(texts).__name__)
    tensors = sorted((_tensor(name, entry) for name, entry in value.items()), key=lambda t: (t.begin, t.end, t.name))
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            raise _invalid(f"offsets of tensor {tensor.name!r}", f"data that goes on at byte {end}", tensor.begin)
        end = tensor.end
    return ForeignHeader(tuple(tensors), texts)


def emit_foreign_header(tensors: Sequence[tuple[str, TensorRecord]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file whose data follows in the order of ``tensors``."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, record in tensors:
        begin, end = end, end + prod(record.shape) * DTYPE_SIZES[record.dtype]
        header[name] = {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": [begin, end]}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % _ALIGN)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _tensor(name: str, entry: Any) -> ForeignTensor:
    if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
        raise _invalid(f"tensor {name!r}", "dtype, shape, data_offsets", str(entry)[:120])
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and dtype in DTYPE_SIZES):
        raise fail("DTYPE_UNSUPPORTED", f"tensor {name!r}", expected=sorted(DTYPE_SIZES), found=dtype)
    if not (isinstance(shape, list) and len(shape) <= MAX_RANK and all(_is_extent(n) for n in shape)):
        raise _invalid(f"shape of tensor {name!r}", f"at most {MAX_RANK} extents", str(shape)[:120])
    if not (isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)):
        raise _invalid(f"offsets of tensor {name!r}", "two integers", str(span)[:120])
    size = prod(shape) * DTYPE_SIZES[dtype]
    if span[0] < 0 or span[1] - span[0] != size:
        raise _invalid(f"bytes of tensor {name!r}", size, span[1] - span[0])
    return ForeignTensor(name, TensorRecord(dtype, tuple(shape)), span[0], span[1])


def _is_extent(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_DIM


def _invalid(what: str, expected: Any = None, found: Any = None) -> KVStoreError:
    return fail("CACHE_FILE_INVALID", f"cache file: {what}", expected=expected, found=found, fix="Write it again.")

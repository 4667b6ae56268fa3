"""The tensor header of a payload: specs, canonical order, and the header's bytes.

A payload is a safetensors file in the one form that the reference writer gives without
``__metadata__``: tensors by descending dtype rank, then by name; a compact JSON header
padded with spaces to a multiple of eight; data without holes. Equal tensors therefore
have equal payload bytes, and a payload's size follows from its specs alone.

Reading is strict: the header is taken apart, and then built again from what was found.
Whatever differs is refused, so that no two readers can disagree about one payload.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from math import prod
from types import MappingProxyType
from typing import Any, Final

from kvstore.errors import fail
from kvstore.limits import (
    MAX_DIM,
    MAX_NAME_CHARS,
    MAX_PAYLOAD_BYTES,
    MAX_RANK,
    MAX_TENSOR_HEADER_BYTES,
    MAX_TENSORS_PER_PAYLOAD,
)

__all__ = [
    "DTYPE_SIZES", "PlacedTensor", "TensorSpec", "canonical_order", "check_specs", "encode_tensor_header",
    "parse_dtype", "parse_tensor_header", "payload_size",
]  # fmt: skip

_BY_RANK: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
DTYPE_SIZES: Final[Mapping[str, int]] = MappingProxyType(_BY_RANK)
"""Bytes per element by safetensors dtype name, in ascending rank of the reference writer."""

_RANK: Final = {name: -rank for rank, name in enumerate(DTYPE_SIZES)}
_LENGTH_BYTES: Final = 8
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, safetensors dtype and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and where its data begins, in bytes from the start of the payload."""

    spec: TensorSpec
    offset: int


def parse_dtype(value: Any, where: str) -> str:
    """Check a safetensors dtype name.

    Raises:
        InvalidError: FIELD_TYPE.
        UnsupportedError: DTYPE_UNSUPPORTED.
    """
    if not isinstance(value, str):
        raise fail("FIELD_TYPE", where, expected="text", found=type(value).__name__)
    if value not in DTYPE_SIZES:
        raise fail("DTYPE_UNSUPPORTED", where, expected=f"one of {', '.join(DTYPE_SIZES)}", found=value)
    return value


def canonical_order(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specs by descending dtype rank, then by name (code points), as the reference writer orders them."""
    return tuple(sorted(specs, key=lambda spec: (_RANK[spec.dtype], spec.name)))


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Refuse specs that no payload can hold.

    Raises:
        InvalidError: ST_HEADER_INVALID (names, ranks, counts) or ST_SHAPE_OVERFLOW.
        UnsupportedError: DTYPE_UNSUPPORTED.
    """
    if len(specs) > MAX_TENSORS_PER_PAYLOAD:
        raise _invalid("a payload has too many tensors", f"at most {MAX_TENSORS_PER_PAYLOAD}", len(specs))
    names: set[str] = set()
    total = 0
    for spec in specs:
        _check_spec(spec)
        if spec.name in names:
            raise _invalid(f"tensor {spec.name!r} stands twice")
        names.add(spec.name)
        total += spec.nbytes
    if total > MAX_PAYLOAD_BYTES:
        limit = f"at most {MAX_PAYLOAD_BYTES}"
        raise fail("ST_SHAPE_OVERFLOW", "the bytes of all tensors", expected=limit, found=total)


def encode_tensor_header(specs: Iterable[TensorSpec]) -> bytes:
    """The canonical header of these tensors: eight bytes of length, then padded JSON.

    Raises:
        InvalidError: ST_HEADER_INVALID or ST_SHAPE_OVERFLOW.
        UnsupportedError: DTYPE_UNSUPPORTED.
    """
    ordered = tuple(specs)
    check_specs(ordered)
    return _build_header(canonical_order(ordered))


def payload_size(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the payload that holds these tensors; its data isn't needed. Raises as :func:`encode_tensor_header`."""
    ordered = tuple(specs)
    return len(encode_tensor_header(ordered)) + sum(spec.nbytes for spec in ordered)


def parse_tensor_header(data: memoryview, size: int) -> tuple[PlacedTensor, ...]:
    """Read the header of a payload and prove that it is canonical.

    Args:
        data: The payload, or as much of its start as holds the header.
        size: Bytes of the whole payload.

    Raises:
        InvalidError: ST_HEADER_INVALID, ST_OFFSETS_INVALID, ST_SHAPE_OVERFLOW or ST_NOT_CANONICAL.
        UnsupportedError: DTYPE_UNSUPPORTED.
    """
    text = _header_text(data.cast("B"), size)
    entries = [_parse_entry(name, value) for name, value in _parse_json(text).items()]
    specs = [spec for spec, _, _ in entries]
    check_specs(specs)
    start = _LENGTH_BYTES + len(text)
    _check_offsets(entries, size - start)
    if _build_header(canonical_order(specs))[_LENGTH_BYTES:] != text:
        raise fail(
            "ST_NOT_CANONICAL", "the tensor header is not its own canonical form",
            fix="Write the payload as the safetensors package does, without __metadata__ (SPEC.md, Payload).",
        )  # fmt: skip
    return tuple(PlacedTensor(spec, start + begin) for spec, begin, _ in entries)


def _invalid(what: str, expected: Any = None, found: Any = None) -> Exception:
    return fail("ST_HEADER_INVALID", what, expected=expected, found=found)


def _check_spec(spec: TensorSpec) -> None:
    name = spec.name
    if not 0 < len(name) <= MAX_NAME_CHARS or name == "__metadata__":
        raise _invalid("a tensor's name", f"1 to {MAX_NAME_CHARS} characters, not __metadata__", name)
    if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
        raise _invalid("a tensor's name holds half of a surrogate pair")
    parse_dtype(spec.dtype, f"the dtype of tensor {name!r}")
    if len(spec.shape) > MAX_RANK:
        raise _invalid(f"the rank of tensor {name!r}", f"at most {MAX_RANK}", len(spec.shape))
    if min(spec.shape, default=0) < 0:
        raise _invalid(f"the shape of tensor {name!r}", "extents of at least 0", list(spec.shape))
    if max(spec.shape, default=0) > MAX_DIM or spec.nbytes > MAX_PAYLOAD_BYTES:
        raise fail(
            "ST_SHAPE_OVERFLOW", f"tensor {name!r} is too large",
            expected=f"extents up to {MAX_DIM}, {MAX_PAYLOAD_BYTES} bytes in all", found=list(spec.shape),
        )  # fmt: skip


def _build_header(ordered: Iterable[TensorSpec]) -> bytes:
    items = []
    begin = 0
    for spec in ordered:
        end = begin + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        name = encode_basestring(spec.name)
        items.append(f'{name}:{{"dtype":"{spec.dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}')
        begin = end
    text = ("{" + ",".join(items) + "}").encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > MAX_TENSOR_HEADER_BYTES:
        raise _invalid("the tensor header is too long", f"at most {MAX_TENSOR_HEADER_BYTES} bytes", len(text))
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _header_text(data: memoryview, size: int) -> bytes:
    if len(data) < _LENGTH_BYTES or size < _LENGTH_BYTES:
        raise _invalid("the payload is too short for a tensor header", f"{_LENGTH_BYTES} bytes", min(len(data), size))
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    room = min(MAX_TENSOR_HEADER_BYTES, size - _LENGTH_BYTES, len(data) - _LENGTH_BYTES)
    if length > room:
        raise _invalid("the length of the tensor header", f"at most {room}", length)
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise _invalid("the first byte of the tensor header", "{", repr(text[:1]))
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the tensor header is not JSON in UTF-8 ({type(error).__name__})") from None
    if "__metadata__" in value:
        raise fail("ST_NOT_CANONICAL", "the tensor header holds __metadata__", fix="Keep metadata in the manifest.")
    return dict(value)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _invalid("the tensor header has the same key twice in one object")
    return result


def _parse_entry(name: str, value: Any) -> tuple[TensorSpec, int, int]:
    where = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _invalid(f"{where} in the header", "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise _invalid(f"the dtype of {where}", "text", type(dtype).__name__)
    for field, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise _invalid(f"the {field} of {where}", "a list of integers of at least 0")
    if len(offsets) != 2:
        raise _invalid(f"the data_offsets of {where}", "two integers", len(offsets))
    return TensorSpec(name, dtype, tuple(shape)), offsets[0], offsets[1]


def _check_offsets(entries: Iterable[tuple[TensorSpec, int, int]], data_size: int) -> None:
    """Data in the header's order: each tensor begins where the last one ended, the last one ends the payload."""
    position = 0
    for spec, begin, end in sorted(entries, key=lambda entry: (entry[1], entry[2])):
        wanted = [position, position + spec.nbytes]
        if [begin, end] != wanted:
            what = f"the offsets of tensor {spec.name!r}"
            raise fail("ST_OFFSETS_INVALID", what, expected=wanted, found=[begin, end])
        position = end
    if position != data_size:
        raise fail("ST_OFFSETS_INVALID", "the end of the last tensor", expected=data_size, found=position)

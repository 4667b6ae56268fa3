"""Canonical payloads: the reference writer's bytes, and nothing else accepted."""

from __future__ import annotations

import ctypes
import hashlib
import json
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.tensors import (
    DTYPE_SIZES,
    Payload,
    TensorSpec,
    canonical_order,
    encode_tensor_header,
    parse_dtype,
    parse_tensor_header,
    payload_from_bytes,
    payload_size,
    uint_dtype,
)
from kvstore.limits import MAX_CHUNK_BYTES, MAX_DIM, MAX_RANK
from tests.format.payloads import bits, payloads, strided

REFERENCE_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32", "C64": "complex64", "F64": "float64",
    "U64": "uint64", "I64": "int64",
}  # fmt: skip


def reference_bytes(payload: Payload) -> bytes:
    """What the safetensors package writes for the same tensors, given in reverse order."""
    arrays = [np.ascontiguousarray(array) for array in payload.arrays]
    room = ctypes.create_string_buffer(8)
    tensors = {
        spec.name: safetensors.TensorSpec(
            dtype=REFERENCE_DTYPES[spec.dtype], shape=list(spec.shape), data_len=array.nbytes,
            data_ptr=array.ctypes.data if array.nbytes else ctypes.addressof(room),
        )
        for spec, array in reversed(list(zip(payload.specs, arrays, strict=True)))
    }  # fmt: skip
    return bytes(safetensors.serialize(tensors))


@given(payloads())
def test_bytes_are_those_of_the_reference_writer(payload: Payload) -> None:
    data = reference_bytes(payload)
    assert payload.to_bytes() == data
    assert payload.size == payload_size(payload.specs) == len(data)
    assert payload.digest() == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_every_dtype_ranks_as_in_the_reference_writer() -> None:
    payload = Payload.make({dtype.lower(): (dtype, bits(dtype, (2,), 1)) for dtype in DTYPE_SIZES})
    assert payload.to_bytes() == reference_bytes(payload)
    assert [spec.dtype for spec in payload.specs] == list(DTYPE_SIZES)[::-1]


@given(payloads())
def test_parsing_gives_back_the_same_payload_without_a_copy(payload: Payload) -> None:
    data = payload.to_bytes()
    parsed = payload_from_bytes(data)
    assert parsed.specs == payload.specs
    assert parsed.header == payload.header
    for got, wanted in zip(parsed.arrays, payload.arrays, strict=True):
        assert np.array_equal(got, wanted)
        assert got.size == 0 or np.shares_memory(got, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("how", range(4))
def test_a_large_strided_tensor_is_hashed_in_pieces(how: int) -> None:
    array = strided(bits("BF16", (1, 3, 4099, 65), 7), how)
    payload = Payload.make({"a": ("BF16", array), "b": ("U8", bits("U8", (5,), 1))})
    assert array.nbytes > MAX_CHUNK_BYTES
    assert payload.digest() == f"sha256:{hashlib.sha256(payload.to_bytes()).hexdigest()}"
    assert payload.to_bytes() == reference_bytes(payload)


def test_order_is_by_rank_then_name() -> None:
    specs = [TensorSpec("b", "U8", (1,)), TensorSpec("é", "F32", (1,)), TensorSpec("z", "F32", (1,))]
    assert [spec.name for spec in canonical_order(specs)] == ["z", "é", "b"]


def header(document: Any, *, pad: bool = True) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8) if pad else b""
    return len(text).to_bytes(8, "little") + text


def entry(begin: int = 0, end: int = 4, dtype: Any = "U8", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


GOOD = header({"a": entry()}) + b"\1\2\3\4"
TEXT = GOOD[8:-4]
NEST = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ST_HEADER_INVALID"),
    "seven bytes": (GOOD[:7], "ST_HEADER_INVALID"),
    "length past the end": ((len(TEXT) + 5).to_bytes(8, "little") + GOOD[8:], "ST_HEADER_INVALID"),
    "length of 2^64-1": (b"\xff" * 8 + GOOD[8:], "ST_HEADER_INVALID"),
    "leading space": (header(b" " + TEXT) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "byte order mark": (header(b"\xef\xbb\xbf" + TEXT) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "not utf-8": (header(TEXT.replace(b'"a"', b'"\xff"')) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "not json": (header(b"{") + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "nested": (header(NEST), "ST_HEADER_INVALID"),
    "huge number": (header(TEXT.replace(b"[4]", b"[" + b"9" * 5000 + b"]")), "ST_HEADER_INVALID"),
    "duplicate tensor": (header(TEXT.rstrip()[:-1] + b"," + TEXT.rstrip()[1:]) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "duplicate field": (header(TEXT.replace(b'"shape"', b'"dtype":"U8","shape"')) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "metadata": (header({"__metadata__": {}, "a": entry()}) + b"\1\2\3\4", "ST_NOT_CANONICAL"),
    "null metadata": (header({"__metadata__": None, "a": entry()}) + b"\1\2\3\4", "ST_NOT_CANONICAL"),
    "extra field": (header({"a": {**entry(), "x": 1}}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "no shape": (header({"a": {"dtype": "U8", "data_offsets": [0, 4]}}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "entry is a list": (header({"a": [1]}), "ST_HEADER_INVALID"),
    "dtype is a number": (header({"a": entry(dtype=8)}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "dtype unknown": (header({"a": entry(dtype="F8_E4M3")}) + b"\1\2\3\4", "DTYPE_UNSUPPORTED"),
    "float extent": (header({"a": entry(shape=[4.0])}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "boolean extent": (header({"a": entry(0, 1, shape=[True])}) + b"\1", "ST_HEADER_INVALID"),
    "negative extents": (header({"a": entry(shape=[-1, -4])}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "shape is text": (header({"a": entry(shape="4")}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "rank": (header({"a": entry(0, 1, shape=[1] * (MAX_RANK + 1))}) + b"\1", "ST_HEADER_INVALID"),
    "extent": (header({"a": entry(0, 0, shape=[MAX_DIM + 1, 0])}), "ST_SHAPE_OVERFLOW"),
    "product wraps": (header({"a": entry(0, 0, "U64", [2**31 - 1] * 3)}), "ST_SHAPE_OVERFLOW"),
    "sum": (header({c: entry(0, 0, "U8", [2**31 - 1, 500]) for c in "ab"}), "ST_SHAPE_OVERFLOW"),
    "three offsets": (header({"a": {**entry(), "data_offsets": [0, 4, 4]}}) + b"\1\2\3\4", "ST_HEADER_INVALID"),
    "end before begin": (header({"a": entry(4, 0)}) + b"\1\2\3\4", "ST_OFFSETS_INVALID"),
    "offset near 2^64": (header({"a": entry(2**64 - 8, 2**64 - 4)}) + b"\1\2\3\4", "ST_OFFSETS_INVALID"),
    "range too long": (header({"a": entry(0, 5)}) + b"\1\2\3\4\5", "ST_OFFSETS_INVALID"),
    "hole before": (header({"a": entry(1, 5)}) + b"\0\1\2\3\4", "ST_OFFSETS_INVALID"),
    "hole between": (header({"a": entry(), "b": entry(5, 9)}) + bytes(9), "ST_OFFSETS_INVALID"),
    "overlap": (header({"a": entry(), "b": entry(3, 7)}) + bytes(7), "ST_OFFSETS_INVALID"),
    "trailing byte": (GOOD + b"\0", "ST_OFFSETS_INVALID"),
    "data cut short": (GOOD[:-1], "ST_OFFSETS_INVALID"),
    "data in another order": (header({"a": entry(4, 8), "b": entry(0, 4)}) + bytes(8), "ST_NOT_CANONICAL"),
    "header in another order": (header({"b": entry(4, 8), "a": entry(0, 4)}) + bytes(8), "ST_NOT_CANONICAL"),
    "fields in another order": (
        header({"a": {"shape": [4], "dtype": "U8", "data_offsets": [0, 4]}}) + bytes(4), "ST_NOT_CANONICAL",
    ),
    "spaces": (header(json.dumps({"a": entry()}).encode()) + bytes(4), "ST_NOT_CANONICAL"),
    "no padding": (header({"a": entry()}, pad=False) + bytes(4), "ST_NOT_CANONICAL"),
    "too much padding": (header(TEXT + b" " * 8) + bytes(4), "ST_NOT_CANONICAL"),
    "padding with tabs": (header(TEXT.replace(b" ", b"\t")) + bytes(4), "ST_NOT_CANONICAL"),
    "needless escape": (header(TEXT.replace(b'"a"', b'"\\u0061"')) + bytes(4), "ST_NOT_CANONICAL"),
    "leading zero": (header(TEXT.replace(b"[4]", b"[04]")) + bytes(4), "ST_HEADER_INVALID"),
    "empty name": (header({"": entry()}) + bytes(4), "ST_HEADER_INVALID"),
    "long name": (header({"a" * 256: entry()}) + bytes(4), "ST_HEADER_INVALID"),
    "lone surrogate": (header(TEXT.replace(b'"a"', b'"\\ud800"')) + bytes(4), "ST_HEADER_INVALID"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_canonical_is_refused(name: str) -> None:
    data, code = REFUSED[name]
    with pytest.raises(KVStoreError) as caught:
        payload_from_bytes(data)
    assert caught.value.code == code


def test_the_form_that_the_refused_ones_are_made_from_is_good() -> None:
    (array,) = payload_from_bytes(GOOD).arrays
    assert array.tolist() == [1, 2, 3, 4]


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_changes_what_it_says(at: int, flip: int) -> None:
    data = bytearray(GOOD)
    data[at] ^= flip
    try:
        payload = payload_from_bytes(data)
    except KVStoreError:
        return
    assert payload.to_bytes() == data


@given(st.binary(max_size=80))
def test_any_header_is_parsed_or_refused(text: bytes) -> None:
    data = header(b"{" + text)
    try:
        placed = parse_tensor_header(memoryview(data), len(data))
    except KVStoreError:
        return
    assert encode_tensor_header(item.spec for item in placed) == data


def test_a_header_is_read_without_its_data() -> None:
    size = payload_size([TensorSpec("a", "F32", (1000, 1000))])
    data = encode_tensor_header([TensorSpec("a", "F32", (1000, 1000))])
    (placed,) = parse_tensor_header(memoryview(data), size)
    assert (placed.offset, placed.spec.nbytes) == (len(data), 4_000_000)


@pytest.mark.parametrize(("value", "code"), [(["F32"], "FIELD_TYPE"), ("F4", "DTYPE_UNSUPPORTED")])
def test_unknown_dtypes_are_refused(value: Any, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_dtype(value, "here")
    assert caught.value.code == code


@pytest.mark.parametrize("dtype", ["<f2", "<i2", ">u2", "<u4"])
def test_arrays_must_be_unsigned_and_of_the_dtypes_width(dtype: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        Payload.make({"a": ("BF16", np.zeros(2, dtype))})
    assert caught.value.code == "USAGE"


def test_uint_dtypes_have_the_width_of_the_dtype() -> None:
    assert {name: uint_dtype(name).itemsize for name in DTYPE_SIZES} == dict(DTYPE_SIZES)

"""The JSON profile: one value, one byte form, and a code for everything else."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidError
from kvstore.format.json import canonical_bytes, number_text, parse_canonical
from kvstore.limits import MAX_EXACT_INT, MAX_JSON_DEPTH
from tests.strategies import json_values

LIMIT = 1 << 20

REFUSED = {
    "empty": (b"", "JSON_SYNTAX"),
    "too long": (b'"' + b"a" * LIMIT + b'"', "DOC_TOO_LARGE"),
    "byte order mark": (b"\xef\xbb\xbf{}", "JSON_BOM"),
    "latin-1": (b'"\xe9"', "JSON_NOT_UTF8"),
    "overlong utf-8": (b'"\xc0\xaf"', "JSON_NOT_UTF8"),
    "surrogate in utf-8": (b'"\xed\xa0\x80"', "JSON_NOT_UTF8"),
    "utf-16": ("{}".encode("utf-16-le"), "JSON_SYNTAX"),
    "two documents": (b"{}{}", "JSON_SYNTAX"),
    "trailing comma": (b"[1,]", "JSON_SYNTAX"),
    "single quotes": (b"{'a':1}", "JSON_SYNTAX"),
    "comment": (b"{}//", "JSON_SYNTAX"),
    "raw control character": (b'"\x01"', "JSON_SYNTAX"),
    "leading zero": (b"01", "JSON_SYNTAX"),
    "plus sign": (b"+1", "JSON_SYNTAX"),
    "string without an end": (b'"abc', "JSON_SYNTAX"),
    "backslash at the end": (b'"abc\\', "JSON_SYNTAX"),
    "many quotes without an end": (b'"' + b'\\"' * 300_000, "JSON_SYNTAX"),
    "depth 17": (b"[" * 17 + b"]" * 17, "JSON_TOO_DEEP"),
    "bomb": (b"[" * 500_000, "JSON_TOO_DEEP"),
    "bomb of objects": (b'{"a":' * 100_000, "JSON_TOO_DEEP"),
    "duplicate key": (b'{"a":1,"a":1}', "JSON_DUPLICATE_KEY"),
    "duplicate key by escape": (b'{"a":1,"\\u0061":2}', "JSON_DUPLICATE_KEY"),
    "duplicate key below": (b'{"a":[{"b":1,"b":2}]}', "JSON_DUPLICATE_KEY"),
    "fraction": (b"1.5", "JSON_FLOAT"),
    "integral fraction": (b"1.0", "JSON_FLOAT"),
    "exponent": (b"1e3", "JSON_FLOAT"),
    "overflow to infinity": (b"1e400", "JSON_FLOAT"),
    "NaN": (b"NaN", "JSON_NON_FINITE"),
    "Infinity": (b"[Infinity]", "JSON_NON_FINITE"),
    "-Infinity": (b"-Infinity", "JSON_NON_FINITE"),
    "2^53": (b"9007199254740992", "JSON_NUMBER_RANGE"),
    "-2^53": (b"-9007199254740992", "JSON_NUMBER_RANGE"),
    "thousand digits": (b"1" * 1000, "JSON_NUMBER_RANGE"),
    "lone surrogate": (b'"\\ud800"', "JSON_LONE_SURROGATE"),
    "low surrogate first": (b'["\\udc00\\ud800"]', "JSON_LONE_SURROGATE"),
    "key outside ASCII": ('{"é":1}'.encode(), "JSON_KEY_NOT_ASCII"),
    "key outside ASCII by escape": (b'{"\\u00e9":1}', "JSON_KEY_NOT_ASCII"),
    "space": (b'{"a": 1}', "JSON_NOT_CANONICAL"),
    "newline at the end": (b"{}\n", "JSON_NOT_CANONICAL"),
    "unsorted keys": (b'{"b":1,"a":2}', "JSON_NOT_CANONICAL"),
    "needless escape": (b'"\\u0061"', "JSON_NOT_CANONICAL"),
    "escaped solidus": (b'"\\/"', "JSON_NOT_CANONICAL"),
    "long form of newline": (b'"\\u000a"', "JSON_NOT_CANONICAL"),
    "upper-case escape": (b'"\\u001F"', "JSON_NOT_CANONICAL"),
    "escaped pair": (b'"\\ud83d\\ude00"', "JSON_NOT_CANONICAL"),
    "minus zero": (b"-0", "JSON_NOT_CANONICAL"),
}


@pytest.mark.parametrize(("data", "code"), REFUSED.values(), ids=REFUSED)
def test_refused(data: bytes, code: str) -> None:
    with pytest.raises(InvalidError) as caught:
        parse_canonical(data, LIMIT)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "data",
    [
        b"{}", b"[]", b"null", b"true", b'""', b"0", b"-1", b"9007199254740991", b'{"a":"[{\\"]}"}',
        '"Å \u2028 😀 \x7f"'.encode(), b'"\\b\\f\\n\\r\\t\\u001f\\"\\\\/"', b"[" * 16 + b"]" * 16,
    ],
)  # fmt: skip
def test_accepted_and_given_back(data: bytes) -> None:
    assert canonical_bytes(parse_canonical(data, LIMIT)) == data
    assert rfc8785.dumps(json.loads(data)) == data


def test_any_buffer_is_read() -> None:
    data = b'{"a":[1]}'
    assert parse_canonical(bytearray(data), LIMIT) == parse_canonical(memoryview(data), LIMIT) == {"a": [1]}


def test_the_limit_itself_is_allowed() -> None:
    assert parse_canonical(b'"ab"', 4) == "ab"


@given(json_values)
def test_canonical_form_is_rfc_8785(value: Any) -> None:
    data = canonical_bytes(value)
    assert data == rfc8785.dumps(value)
    assert parse_canonical(data, LIMIT) == value


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_what_is_accepted_is_canonical(data: bytes) -> None:
    with suppress(InvalidError):
        assert rfc8785.dumps(parse_canonical(data, LIMIT)) == data


WRITE_REFUSED: dict[str, tuple[Any, str]] = {
    "float": ([1.5], "JSON_FLOAT"),
    "NaN": (math.nan, "JSON_FLOAT"),
    "large": ({"a": MAX_EXACT_INT + 1}, "JSON_NUMBER_RANGE"),
    "small": (-MAX_EXACT_INT - 1, "JSON_NUMBER_RANGE"),
    "key": ({"ü": 1}, "JSON_KEY_NOT_ASCII"),
    "surrogate": (["\ud800"], "JSON_LONE_SURROGATE"),
}


@pytest.mark.parametrize(("value", "code"), WRITE_REFUSED.values(), ids=WRITE_REFUSED)
def test_a_writer_refuses_what_a_reader_would(value: Any, code: str) -> None:
    with pytest.raises(InvalidError) as caught:
        canonical_bytes(value)
    assert caught.value.code == code


def test_a_writer_refuses_depth() -> None:
    value: Any = 1
    for _ in range(MAX_JSON_DEPTH):
        value = [value]
    canonical_bytes(value)
    with pytest.raises(InvalidError) as caught:
        canonical_bytes([value])
    assert caught.value.code == "JSON_TOO_DEEP"


@given(st.integers(0, 2**64 - 1))
def test_number_text_is_ecmascript(bits: int) -> None:
    value = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    if math.isfinite(value):
        assert number_text(value).encode() == rfc8785.dumps(value)
        assert float(number_text(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_number_text_of_usual_floats(value: float) -> None:
    assert number_text(value).encode() == rfc8785.dumps(value)


NUMBERS = {
    -0.0: "0", 1.0: "1", 1e21: "1e+21", 1e20: "100000000000000000000", 1e-6: "0.000001", 1e-7: "1e-7",
    0.1: "0.1", 1e6: "1000000", 123.456: "123.456", 5e-324: "5e-324", -2.5e-9: "-2.5e-9",
    1.7976931348623157e308: "1.7976931348623157e+308",
}  # fmt: skip


@pytest.mark.parametrize(("value", "text"), NUMBERS.items())
def test_number_text_table(value: float, text: str) -> None:
    assert number_text(value) == text


def test_number_text_of_integers_is_exact() -> None:
    assert number_text(2**70) == str(2**70)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_text_refuses(value: float) -> None:
    with pytest.raises(InvalidError) as caught:
        number_text(value)
    assert caught.value.code == "JSON_NON_FINITE"

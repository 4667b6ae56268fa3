"""The JSON profile: RFC 8785 restricted so that one value has one byte form.

UTF-8 without a byte order mark, no duplicate keys, ASCII keys, no floats, integers
within ±(2^53 − 1), nesting of at most 16, canonical bytes required on read. Within
these bounds sorted keys and compact separators *are* RFC 8785, which a property test
holds against the ``rfc8785`` package. A document that is not its own canonical form is
refused, so no two parsers can disagree about one.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeAlias

from kvstore.errors import KVStoreError, fail
from kvstore.limits import MAX_EXACT_INT, MAX_JSON_DEPTH

__all__ = [
    "Json", "bracket_depth", "canonical_bytes", "canonicalize", "number_text", "parse_canonical", "unique_pairs",
]  # fmt: skip

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"

_BOM = b"\xef\xbb\xbf"
# A string without an end is taken whole, else every quote in it would be tried as a start (quadratic time).
_OPEN_OR_CLOSE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_KEPT = b'[]{}"\\'
_DROPPED = bytes(set(range(256)).difference(_KEPT))
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")


def canonical_bytes(value: Json) -> bytes:
    """The one byte form of ``value``; raises if the value is outside the profile."""
    _check(value, 1)
    return _dump(value, "a string")


def parse_canonical(data: bytes | bytearray | memoryview, limit: int, what: str = "document") -> Any:
    """Parse a document and prove that it is canonical.

    Args:
        data: The document's bytes.
        limit: Largest number of bytes allowed.
        what: Name of the document in messages.

    Raises:
        InvalidError: DOC_TOO_LARGE or one of the JSON_* codes.
    """
    value, canonical = _parse(data, limit, what)
    if canonical != data:
        raise fail(
            "JSON_NOT_CANONICAL", f"{what} is not its own canonical form",
            fix="Sort keys, drop spaces and needless escapes (SPEC.md, JSON profile).",
        )  # fmt: skip
    return value


def canonicalize(data: bytes, limit: int, what: str = "document") -> bytes:
    """The canonical form of a JSON text that keeps all rules of the profile but that of being canonical.

    Raises:
        InvalidError: DOC_TOO_LARGE or one of the JSON_* codes other than JSON_NOT_CANONICAL.
    """
    return _parse(data, limit, what)[1]


def _parse(data: bytes | bytearray | memoryview, limit: int, what: str) -> tuple[Any, bytes]:
    """The value and its canonical bytes."""
    if len(data) > limit:
        raise fail("DOC_TOO_LARGE", f"{what} has too many bytes", expected=f"at most {limit}", found=len(data))
    raw = bytes(data)
    if raw.startswith(_BOM):
        raise fail("JSON_BOM", f"{what} begins with a byte order mark", fix="Write UTF-8 without one.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise fail("JSON_NOT_UTF8", f"{what} is not UTF-8 at byte {error.start}") from None
    if bracket_depth(raw, MAX_JSON_DEPTH) > MAX_JSON_DEPTH:
        raise fail("JSON_TOO_DEEP", f"{what} is nested too deeply", expected=f"at most {MAX_JSON_DEPTH} levels")
    try:
        value = json.loads(
            text, object_pairs_hook=_pairs, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
    except json.JSONDecodeError as error:
        raise fail("JSON_SYNTAX", f"{what} is not JSON at character {error.pos}: {error.msg}") from None
    except KVStoreError as error:
        raise type(error)(error.code, f"{what}: {error.message}", error.detail) from None
    return value, _dump(value, what)


def number_text(value: float) -> str:
    """A number as the shortest ECMAScript text, for use as a JSON string.

    Integral values are written as integers. Raises for NaN and infinities.
    """
    if isinstance(value, int):
        return str(int(value))
    if value != value or value in (float("inf"), float("-inf")):
        raise fail("JSON_NON_FINITE", "a number is not finite", found=str(value))
    return _ecma(value)


def _ecma(value: float) -> str:
    """ECMA-262 Number::toString. Python's repr gives the same shortest digits."""
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        return sign + digits + "0" * (point - count)
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    rest = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{rest}e{'+' if point > 0 else '-'}{abs(point - 1)}"


def _dump(value: Json, what: str) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise fail(
            "JSON_LONE_SURROGATE", f"{what} holds half of a surrogate pair", fix="Write valid Unicode text."
        ) from None


def _check(value: Json, depth: int) -> None:
    """Refuse on write what a reader would refuse, and what is no JSON at all."""
    if type(value) is str:
        return
    if isinstance(value, float):
        raise fail("JSON_FLOAT", "a number is a float", found=value, fix="Write fractions as text.")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_EXACT_INT:
        raise fail("JSON_NUMBER_RANGE", "an integer is too large", expected="at most 2^53-1", found=value)
    if isinstance(value, (dict, list, tuple)) and depth > MAX_JSON_DEPTH:
        raise fail("JSON_TOO_DEEP", "nesting is too deep", expected=f"at most {MAX_JSON_DEPTH}", found=depth)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_key(key)
            _check(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(item, depth + 1)
    elif value is not None and not isinstance(value, (str, int)):
        raise fail("USAGE", "a value", expected="a JSON value", found=type(value).__name__)


def _check_key(key: str) -> None:
    if not isinstance(key, str):
        raise fail("USAGE", "a key", expected="text", found=repr(key)[:80])
    if not key.isascii():
        raise fail("JSON_KEY_NOT_ASCII", "a key has a character outside ASCII", found=key)


def bracket_depth(raw: bytes, limit: int) -> int:
    """The levels of arrays and objects, counted up to one more than ``limit``: before a recursive parser sees them."""
    # Nearly always no text has a bracket, a quote or a backslash in it: then nothing but pairs of brackets is left.
    pairs = raw.translate(_AS_ARRAYS, _DROPPED).replace(b'""', b"")
    for depth in range(limit + 1):
        if not pairs:
            return depth
        pairs = pairs.replace(b"[]", b"")
    return _exact_depth(raw, limit)


def _exact_depth(raw: bytes, limit: int) -> int:
    depth = deepest = 0
    for match in _OPEN_OR_CLOSE.finditer(raw):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
            if depth > limit:
                break
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise fail("JSON_DUPLICATE_KEY", f"key {key!r} stands twice in one object")
        _check_key(key)
        result[key] = value
    return result


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For foreign JSON, which our profile does not bind: an object, with a ValueError where a key stands twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _integer(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > MAX_EXACT_INT:
        raise fail("JSON_NUMBER_RANGE", "an integer is too large", expected="at most 2^53-1", found=text[:40])
    return int(text)


def _float(text: str) -> NoReturn:
    raise fail("JSON_FLOAT", "a number has a fraction or an exponent", found=text[:40])


def _constant(text: str) -> NoReturn:
    raise fail("JSON_NON_FINITE", "a number is not finite", found=text)

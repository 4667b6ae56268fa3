"""Recipes, prefix inputs and requests: JSON that is no document of the format.

Numbers may be of any kind and keys of any characters, since what is wrong in them is for the
task to say. What no two parsers would read alike is refused here: keys that stand twice, halves
of surrogate pairs, words that are no numbers, and nesting that a parser might not survive.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from kvstore.errors import fail
from kvstore.format.json import bracket_depth

__all__ = ["INPUT_DEPTH", "parse_input"]

INPUT_DEPTH: Final = 64
"""Levels of arrays and objects in an input."""


def parse_input(data: bytes) -> Any:
    """The value of an input.

    Raises:
        InvalidError: JSON_BOM, JSON_NOT_UTF8, JSON_TOO_DEEP, JSON_SYNTAX, JSON_DUPLICATE_KEY, JSON_NON_FINITE or
            JSON_LONE_SURROGATE.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise fail("JSON_BOM", "an input begins with a byte order mark")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise fail("JSON_NOT_UTF8", f"an input is not UTF-8 at byte {error.start}") from None
    if bracket_depth(data, INPUT_DEPTH) > INPUT_DEPTH:
        raise fail("JSON_TOO_DEEP", "an input is nested too deeply", expected=f"at most {INPUT_DEPTH} levels")
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_int=_integer, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise fail("JSON_SYNTAX", f"an input is not JSON at character {error.pos}: {error.msg}") from None
    _check_texts(value)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise fail("JSON_DUPLICATE_KEY", "a key stands twice in one object of an input")
    return result


def _integer(text: str) -> float | int:
    """An integer; one that no field could hold as a float, since reading thousands of digits takes long."""
    return int(text) if len(text) < 32 else float(text)


def _constant(text: str) -> NoReturn:
    raise fail("JSON_NON_FINITE", "a number in an input is not finite", found=text)


def _check_texts(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise fail("JSON_LONE_SURROGATE", "a text of an input holds half of a surrogate pair") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key)
            _check_texts(item)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item)

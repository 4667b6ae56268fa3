"""Typed access to parsed JSON: the right code, and the path of the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import InvalidError
from kvstore.format.fields import Fields


def fields(value: Any, known: tuple[str, ...] | None = None) -> Fields:
    return Fields(value, "top", known)


LOWER = re.compile("[a-z]+")

REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "not an object": (lambda: fields([1]), "FIELD_TYPE", "top"),
    "unknown": (lambda: fields({"a": 1, "b": 2}, ("a",)), "FIELD_UNKNOWN", "top.b"),
    "missing": (lambda: fields({}).get("a"), "FIELD_MISSING", "top.a"),
    "boolean as integer": (lambda: fields({"a": True}).integer("a"), "FIELD_TYPE", "top.a"),
    "text as integer": (lambda: fields({"a": "1"}).integer("a"), "FIELD_TYPE", "top.a"),
    "null as integer": (lambda: fields({"a": None}).integer("a"), "FIELD_TYPE", "top.a"),
    "below": (lambda: fields({"a": 1}).integer("a", low=2), "FIELD_RANGE", "top.a"),
    "above": (lambda: fields({"a": 3}).integer("a", high=2), "FIELD_RANGE", "top.a"),
    "integer as text": (lambda: fields({"a": 1}).text("a"), "FIELD_TYPE", "top.a"),
    "too long": (lambda: fields({"a": "x" * 256}).text("a"), "FIELD_RANGE", "top.a"),
    "grammar": (lambda: fields({"a": "A"}).text("a", grammar=LOWER), "FIELD_FORMAT", "top.a"),
    "grammar, newline": (lambda: fields({"a": "a\n"}).text("a", grammar=LOWER), "FIELD_FORMAT", "top.a"),
    "text as array": (lambda: fields({"a": "abc"}).items("a", limit=9), "FIELD_TYPE", "top.a"),
    "too many": (lambda: fields({"a": [1, 2]}).items("a", limit=1), "LIMIT_EXCEEDED", "top.a"),
    "item": (lambda: fields({"a": [1, "x"]}).integers("a", limit=2), "FIELD_TYPE", "top.a[1]"),
    "digest": (lambda: fields({"a": "x"}).digest("a"), "FIELD_FORMAT", "top.a"),
    "null inside nullable": (
        lambda: (lambda f: f.nullable("a", f.integer))(fields({"a": "x"})), "FIELD_TYPE", "top.a"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("read", "code", "path"), REFUSED.values(), ids=REFUSED)
def test_refused(read: Callable[[], Any], code: str, path: str) -> None:
    with pytest.raises(InvalidError) as caught:
        read()
    assert caught.value.code == code
    assert path in caught.value.message


def test_read() -> None:
    read = fields({"i": 2, "l": [1, 2], "n": None, "t": "é" * 255}, ("i", "l", "n", "t", "absent"))
    assert read.integer("i", low=2, high=2) == 2
    assert read.integers("l", limit=2) == (1, 2)
    assert read.nullable("n", read.text) is None
    assert read.nullable("i", read.integer) == 2
    assert read.text("t") == "é" * 255
    assert read.has("i")
    assert not read.has("absent")


def test_the_top_has_no_dot() -> None:
    with pytest.raises(InvalidError, match=r"^a is absent$"):
        Fields({}, "", None).get("a")

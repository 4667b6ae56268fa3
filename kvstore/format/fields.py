"""Reading typed fields out of parsed JSON, with the path in every message.

:class:`Fields` wraps one JSON object. It refuses unknown fields at once (fail closed)
unless told that the document is monotonic, as receipts are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from kvstore.errors import fail
from kvstore.format.digest import Digest, parse_digest
from kvstore.limits import MAX_EXACT_INT, MAX_NAME_CHARS

__all__ = ["NAME", "Fields", "expect_array", "expect_object"]

T = TypeVar("T")

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._/-]*", re.ASCII)
"""Grammar of names that the format gives meaning to."""


class Fields:
    """One JSON object on its way into a frozen dataclass."""

    __slots__ = ("_value", "where")

    def __init__(self, value: Any, where: str, known: Iterable[str] | None) -> None:
        """Wrap ``value``; ``known`` None accepts further fields (receipts only).

        Raises:
            InvalidError: FIELD_TYPE or FIELD_UNKNOWN.
        """
        self._value: Mapping[str, Any] = expect_object(value, where)
        self.where = where
        if known is not None:
            unknown = sorted(set(self._value) - set(known))
            if unknown:
                raise fail(
                    "FIELD_UNKNOWN", f"{self.path(unknown[0])} is not a field of this version",
                    fix="Upgrade kvstore, or ask the writer for format v1.", field=unknown[0],
                )  # fmt: skip

    def path(self, name: str) -> str:
        """The dotted path of a field, for messages."""
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str) -> Any:
        """The raw value; FIELD_MISSING where the field is absent."""
        if name not in self._value:
            raise fail("FIELD_MISSING", f"{self.path(name)} is absent", field=name)
        return self._value[name]

    def has(self, name: str) -> bool:
        """Whether the field is present."""
        return name in self._value

    def integer(self, name: str, *, low: int = 0, high: int = MAX_EXACT_INT) -> int:
        """An integer in ``low`` … ``high``, bounds included."""
        return expect_integer(self.get(name), self.path(name), low=low, high=high)

    def text(self, name: str, *, grammar: re.Pattern[str] | None = None, limit: int | None = MAX_NAME_CHARS) -> str:
        """A text of at most ``limit`` characters that matches ``grammar`` whole; None for one of a closed list."""
        return expect_text(self.get(name), self.path(name), grammar=grammar, limit=limit)

    def digest(self, name: str) -> Digest:
        """A digest."""
        return parse_digest(self.get(name), self.path(name))

    def require_media_type(self, expected: str) -> None:
        """The field ``media_type`` says that this is the expected document. Raises MEDIA_TYPE_UNKNOWN."""
        found = self.text("media_type", limit=None)
        if found != expected:
            raise fail("MEDIA_TYPE_UNKNOWN", self.path("media_type"), expected=expected, found=found)

    def require_no_features(self, code: str, what: str) -> None:
        """The field ``features`` is empty: this release has none. Raises ``code``."""
        features = self.items("features", limit=256)
        if features:
            raise fail(
                code, what, expected="none that this release lacks", found=[str(item)[:64] for item, _ in features],
                fix="Upgrade kvstore.",
            )  # fmt: skip

    def nullable(self, name: str, read: Callable[[str], T]) -> T | None:
        """What ``read(name)`` gives, or None where the value is null."""
        return None if self.get(name) is None else read(name)

    def items(self, name: str, *, limit: int) -> list[tuple[Any, str]]:
        """The elements of an array of at most ``limit``, each with its path."""
        value = expect_array(self.get(name), self.path(name))
        if len(value) > limit:
            raise fail("LIMIT_EXCEEDED", self.path(name), expected=f"at most {limit} items", found=len(value))
        return [(item, f"{self.path(name)}[{i}]") for i, item in enumerate(value)]

    def integers(self, name: str, *, limit: int, low: int = 0, high: int = MAX_EXACT_INT) -> tuple[int, ...]:
        """An array of integers."""
        return tuple(expect_integer(v, where, low=low, high=high) for v, where in self.items(name, limit=limit))


def expect_object(value: Any, where: str) -> dict[str, Any]:
    """The value if it is a JSON object."""
    if not isinstance(value, dict):
        raise fail("FIELD_TYPE", where or "document", expected="object", found=type(value).__name__)
    return value


def expect_array(value: Any, where: str) -> list[Any]:
    """The value if it is a JSON array."""
    if not isinstance(value, list):
        raise fail("FIELD_TYPE", where, expected="array", found=type(value).__name__)
    return value


def expect_integer(value: Any, where: str, *, low: int, high: int) -> int:
    """The value if it is an integer (never a boolean) within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail("FIELD_TYPE", where, expected="integer", found=type(value).__name__)
    if not low <= value <= high:
        raise fail("FIELD_RANGE", where, expected=f"{low} to {high}", found=value)
    return value


def expect_text(value: Any, where: str, *, grammar: re.Pattern[str] | None, limit: int | None) -> str:
    """The value if it is a text within its limit and grammar."""
    if not isinstance(value, str):
        raise fail("FIELD_TYPE", where, expected="text", found=type(value).__name__)
    if limit is not None and len(value) > limit:
        raise fail("FIELD_RANGE", where, expected=f"at most {limit} characters", found=len(value))
    if grammar is not None and grammar.fullmatch(value) is None:
        raise fail("FIELD_FORMAT", where, expected=grammar.pattern, found=value)
    return value

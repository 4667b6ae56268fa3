"""The one exception tree, and how an error is made.

::

    KVStoreError                    exit 1   something unforeseen inside kvstore
    ├── UsageError                  exit 2   the call itself is wrong
    ├── NotFoundError               exit 3   no such entry, label, or prefix
    ├── InvalidError                exit 4   a document, payload or cache breaks the rules
    ├── IntegrityError              exit 5   bytes are missing or are not what their name says
    ├── IncompatibleError           exit 6   the entry is sound but belongs to another model or prefix
    ├── UnsupportedError            exit 7   a version, feature or kind that this release does not know
    ├── BusyError                   exit 8   another process holds the store, or uses the entry
    ├── SpaceError                  exit 9   no space, over budget, or more than the device can hold
    ├── StoreError                  exit 10  no usable store there
    └── CancelledError              exit 130 the caller stopped the operation

Every error is made by :func:`fail`, so each carries ``code`` (stable, listed in
``kvstore.codes``), ``phase`` (the step of SPEC.md's reading order that found it),
``exit_code`` (of the class) and ``detail`` (data for programs; holds ``expected``
and ``found`` where there are two sides). The message says what was expected, what
was found and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvstore.codes import CODES

__all__ = [
    "BusyError", "CancelledError", "IncompatibleError", "IntegrityError", "InvalidError",
    "KVStoreError", "NotFoundError", "SpaceError", "StoreError", "UnsupportedError",
    "UsageError", "fail", "require_choice",
]  # fmt: skip


class KVStoreError(Exception):
    """Base of every error that kvstore raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, code: str, message: str, detail: dict[str, Any]) -> None:
        """Hold the code, its phase and the data; use :func:`fail` to make one."""
        super().__init__(message)
        self.code = code
        self.phase = CODES[code].phase
        self.message = message
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by parts, so that errors cross process pools whole."""
        return (type(self), (self.code, self.message, self.detail))

    def to_json(self) -> dict[str, Any]:
        """The error as the document that ``--json`` prints."""
        return {
            "code": self.code, "phase": self.phase, "exit_code": self.exit_code,
            "message": self.message, "detail": self.detail,
        }  # fmt: skip


class UsageError(KVStoreError):
    """The call itself is wrong."""

    exit_code = 2


class NotFoundError(KVStoreError):
    """No such entry, label, or prefix."""

    exit_code = 3


class InvalidError(KVStoreError):
    """A document, a payload or a live cache breaks the format's rules."""

    exit_code = 4


class IntegrityError(KVStoreError):
    """Bytes are missing or are not what their name says."""

    exit_code = 5


class IncompatibleError(KVStoreError):
    """The entry is sound but belongs to another model, tokenizer or prefix."""

    exit_code = 6


class UnsupportedError(KVStoreError):
    """A version, feature, kind or dtype that this release does not know."""

    exit_code = 7


class BusyError(KVStoreError):
    """Another process holds the store's write lock for too long, or uses an entry that is to be removed."""

    exit_code = 8


class SpaceError(KVStoreError):
    """No space on disk, over the budget, or more than the device can hold."""

    exit_code = 9


class StoreError(KVStoreError):
    """There is no usable store at that place."""

    exit_code = 10


class CancelledError(KVStoreError):
    """The caller stopped the operation; nothing was left behind."""

    exit_code = 130


_CLASSES: dict[str, type[KVStoreError]] = {
    cls.__name__: cls
    for cls in (
        KVStoreError, UsageError, NotFoundError, InvalidError, IntegrityError, IncompatibleError,
        UnsupportedError, BusyError, SpaceError, StoreError, CancelledError,
    )
}  # fmt: skip


def fail(
    code: str, what: str, /, *, expected: Any = None, found: Any = None, fix: str = "", **detail: Any
) -> KVStoreError:
    """Make the error for ``code``; the caller raises it.

    Args:
        code: A name in ``kvstore.codes.CODES``; its class and phase follow from it.
        what: What is wrong, and where, without a full stop.
        expected: The value that would have been right, or words for it; None where there is no such thing.
        found: The value that was there.
        fix: One sentence on what to do.
        **detail: Further data for programs (JSON values).
    """
    message = what
    if expected is not None or found is not None:
        message += f": expected {_words(expected)}, found {_show(found)}"
        detail = {**detail, "expected": expected, "found": found}
    if fix:
        message += f". {fix}"
    return _CLASSES[CODES[code].error](code, message, detail)


def require_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a word that is none of ``choices``: one that is misspelt must not pass for a default.

    Raises:
        UsageError: USAGE.
    """
    if not isinstance(value, str) or value not in choices:
        raise fail("USAGE", what, expected=list(choices), found=value if isinstance(value, str) else repr(value)[:80])


def _words(expected: Any) -> str:
    """What was expected: a text with spaces in it describes a value and is none, so it bears no quotes."""
    return expected if isinstance(expected, str) and " " in expected and len(expected) <= 200 else _show(expected)


def _show(value: Any) -> str:
    """A value in a message: short, quoted if text, never a page of it."""
    text = "nothing" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."

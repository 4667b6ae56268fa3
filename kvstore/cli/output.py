r"""What a verb says, and where: decided once, here.

Standard output carries the result and nothing else: with ``--json`` one document with a
``type`` field, described by ``schemas/cli-output.v1.schema.json``. Progress, messages,
warnings and errors go to standard error. With ``--json`` the only thing written there is
the error document (and, with ``-vv``, a traceback before it). Sizes in documents are
integers of bytes; times are RFC 3339 in UTC.

Names, labels and messages of others may hold anything, also what a terminal takes for a
command: such characters are written as ``\u001b``, in documents and in text alike.

A result that cannot be written is an error; a message that cannot is not.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import click

from kvstore.errors import KVStoreError, fail

__all__ = [
    "Output", "Progress", "human_bytes", "human_count", "human_seconds", "plain", "table", "unwritable",
    "write_message",
]  # fmt: skip

_REDRAW_SECONDS: Final = 0.1
_BAR_CELLS: Final = 24
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")
# Beyond the first 32: controls again, marks that turn a line around or end it, and halves of characters.
_UNSHOWN: Final = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT: Final = re.compile(f"[\x00-\x08\n-\x1f{_UNSHOWN}]")
_IN_JSON: Final = re.compile(f"[{_UNSHOWN}]")


class Output:
    """Where results, messages and progress go.

    Args:
        as_json: Write one JSON document instead of text.
        quiet: No messages and no progress.
        verbose: 0, 1 (more messages) or 2 (tracebacks).
        progress: ``auto`` or ``never``.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: int = 0, progress: str = "auto") -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.progress_mode = progress

    def result(self, kind: str, document: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Write the result: the document under ``type`` ``kind``, or the lines for people."""
        if self.as_json:
            _write_result(_json({"type": kind, **document}, sys.stdout, indent=2))
        elif lines:
            _write_result("".join(plain(line) + "\n" for line in lines))

    def raw(self, data: bytes) -> None:
        """Write bytes to standard output exactly as they are."""
        with _writing():
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def say(self, text: str, *, level: int = 0) -> None:
        """A message on standard error; ``level`` 1 needs ``-v``."""
        if not (self.quiet or self.as_json) and self.verbose >= level:
            write_message(plain(text) + "\n")

    def error(self, document: Mapping[str, Any], text: str, hint: str = "") -> None:
        """The error, as a document or as text, on standard error; the hint is a line of its own."""
        if self.as_json:
            write_message(_json({"type": "error", "error": document}, sys.stderr))
        else:
            head = click.style("error:", fg="red", bold=True) if colored() else "error:"
            write_message(f"{head} {plain(text)}\n" + (f"{plain(hint)}\n" if hint else ""))

    @contextmanager
    def progress(self, label: str, *, total: int, unit: str) -> Iterator[Progress]:
        """A progress bar on standard error: drawn only on a terminal, and never with ``--json`` or ``-q``."""
        drawn = self.progress_mode == "auto" and not (self.quiet or self.as_json) and sys.stderr.isatty()
        bar = Progress(label, total=total, unit=unit, drawn=drawn)
        try:
            yield bar
        finally:
            bar.close()


class Progress:
    """A bar with a rate. Counts time even where it is not drawn, so that results can name the rate."""

    def __init__(self, label: str, *, total: int, unit: str, drawn: bool) -> None:
        self.label, self.total, self.unit = label, total, unit
        self._drawn = drawn
        self._started = time.monotonic()
        self._done = 0
        self._last_drawn = 0.0
        self._width = 0

    @property
    def seconds(self) -> float:
        """Seconds since the bar began."""
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Units per second so far."""
        return self._done / self.seconds if self.seconds > 0 else 0.0

    def update(self, done: int, total: int | None = None) -> None:
        """Show that ``done`` of ``total`` units are done."""
        self._done = done
        self.total = self.total if total is None else total
        now = time.monotonic()
        if self._drawn and (now - self._last_drawn >= _REDRAW_SECONDS or done >= self.total):
            self._last_drawn = now
            self._draw(self.line())

    def line(self) -> str:
        """The bar as text."""
        share = min(1.0, self._done / self.total) if self.total else 1.0
        filled = int(share * _BAR_CELLS)
        bar = "█" * filled + "░" * (_BAR_CELLS - filled)
        left = (self.total - self._done) / self.rate if self._done else None
        rest = "" if left is None or left <= 0 else f", {human_seconds(left)} left"
        if self.unit == "bytes":
            amount = f"{human_bytes(self._done)} of {human_bytes(self.total)}, {human_bytes(round(self.rate))}/s"
        else:
            amount = f"{self._done}/{self.total} {self.unit}, {self.rate:.1f} {self.unit}/s"
        return f"{self.label} {bar} {amount}{rest}"

    def close(self) -> None:
        """End the line."""
        if self._width:
            write_message("\n")
            self._width = 0

    def _draw(self, text: str) -> None:
        write_message("\r" + text.ljust(self._width))
        self._width = len(text)


def colored() -> bool:
    """Whether messages may be coloured: standard error is a terminal and NO_COLOR is not set."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def human_bytes(count: int) -> str:
    """A size for people, in decimal units: ``1.5 MB``."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1000
        if value < 999.5 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def human_seconds(seconds: float) -> str:
    """A time for people: ``12 s``, ``3:05 min``, ``1:10 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02} h"


def human_count(count: int, noun: str, plural: str | None = None) -> str:
    """``1 entry``, ``2 entries``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows in aligned columns under a header; columns in ``right`` are right-aligned."""
    cells = [[plain(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in cells
    ]  # fmt: skip


def plain(text: str) -> str:
    """Text of others as one line that does nothing to a terminal."""
    return _IN_TEXT.sub(_escape, text)


def write_message(text: str) -> None:
    """Write to standard error; where that cannot be done there is nobody to tell."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        _give_up(sys.stderr, 2)


def unwritable(error: Exception) -> KVStoreError:
    """The typed error for a result that could not be written; also keeps the interpreter from trying again at exit."""
    _give_up(sys.stdout, 1)
    return fail("STORE_IO", f"standard output cannot be written: {getattr(error, 'strerror', None) or error}")


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _json(document: Mapping[str, Any], stream: Any, indent: int | None = None) -> str:
    ascii_only = str(getattr(stream, "encoding", "")).lower().replace("-", "") != "utf8"
    return _IN_JSON.sub(_escape, json.dumps(document, indent=indent, ensure_ascii=ascii_only)) + "\n"


def _write_result(text: str) -> None:
    """Write and flush, so that a closed reader or a full disk is noticed here and not at exit."""
    encoding = sys.stdout.encoding or "utf-8"
    with _writing():
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(error) from error


def _give_up(stream: Any, fd: int) -> None:
    """Let the descriptor lead to nowhere: what its stream still holds is written at exit, and that must not fail."""
    with suppress(OSError, ValueError, AttributeError):
        if stream.fileno() == fd:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            os.close(null)

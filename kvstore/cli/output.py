"""What a verb says, and where: decided once, here.

Standard output carries the result and nothing else: with ``--json`` one document with a
``type`` field, described by ``schemas/cli-output.v1.schema.json``. Progress, messages,
warnings and errors go to standard error. With ``--json`` the only thing written there is
the error document (and, with ``-vv``, a traceback before it). Sizes in documents are
integers of bytes; times are RFC 3339 in UTC.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

__all__ = ["Output", "Progress", "human_bytes", "human_count", "human_seconds", "table"]

_REDRAW_SECONDS: Final = 0.1
_BAR_CELLS: Final = 24
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")


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
            _write(sys.stdout, json.dumps({"type": kind, **document}, indent=2, ensure_ascii=False) + "\n")
        elif lines:
            _write(sys.stdout, "\n".join(lines) + "\n")

    def raw(self, data: bytes) -> None:
        """Write bytes to standard output exactly as they are."""
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def say(self, text: str, *, level: int = 0) -> None:
        """A message on standard error; ``level`` 1 needs ``-v``."""
        if not (self.quiet or self.as_json) and self.verbose >= level:
            _write(sys.stderr, text + "\n")

    def error(self, document: Mapping[str, Any], text: str) -> None:
        """The error, as a document or as text, on standard error."""
        if self.as_json:
            _write(sys.stderr, json.dumps({"type": "error", "error": document}, ensure_ascii=False) + "\n")
        else:
            head = click.style("error:", fg="red", bold=True) if colored() else "error:"
            _write(sys.stderr, f"{head} {text}\n")

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
            _write(sys.stderr, "\n")
            self._width = 0

    def _draw(self, text: str) -> None:
        _write(sys.stderr, "\r" + text.ljust(self._width))
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
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in cells
    ]  # fmt: skip


def _write(stream: Any, text: str) -> None:
    """Write and flush, so that a closed reader is noticed here and not at exit."""
    stream.write(text)
    stream.flush()

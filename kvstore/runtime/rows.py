"""Stored rows of one tensor as strided numpy views over one live buffer.

A cache object rarely holds its rows as the format stores them: buffers have head room,
and a ring begins anywhere. :class:`Rows` keeps the views that, one after another, are
the rows in temporal order. A segment that lies within one view is handed out as a view;
only one that spans a seam of the ring is copied, 256 rows at a time, never the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Ranges", "Rows"]

Ranges = tuple[tuple[int, int], ...]
"""Rows of a buffer, ``start`` to ``stop``, in the order in which the format stores them."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One tensor's rows in stored order.

    Attributes:
        buffer: Unsigned integers; the whole live buffer, head room included.
        axis: The axis that runs over tokens, or None for a snapshot.
        ranges: Which rows of the buffer are stored, in which order; empty for a snapshot.
    """

    buffer: np.ndarray[Any, Any]
    axis: int | None
    ranges: Ranges

    @property
    def count(self) -> int:
        """Stored rows; 0 for a snapshot."""
        return sum(stop - start for start, stop in self.ranges)

    def read(self, first: int, count: int) -> np.ndarray[Any, Any]:
        """``count`` stored rows from ``first``: a view where they lie together, else a copy. A snapshot comes whole."""
        if self.axis is None:
            return self.buffer
        if len(self.ranges) == 1:  # nearly always, and a cache has thousands of such reads
            (start, stop), = self.ranges
            return _cut(self.buffer, self.axis, start + first, max(0, min(count, stop - start - first)))
        parts = [view for _, view in self._parts(first, count)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)

    def window(self, first: int, count: int) -> np.ndarray[Any, Any] | None:
        """A writable view of the places of these stored rows, or None where they do not lie together."""
        if self.axis is None:
            return self.buffer
        if len(self.ranges) == 1:
            (start, stop), = self.ranges
            return _cut(self.buffer, self.axis, start + first, count) if first + count <= stop - start else None
        parts = [view for _, view in self._parts(first, count)]
        whole = len(parts) == 1 and parts[0].shape[self.axis] == count
        return parts[0] if whole else None

    def write(self, first: int, rows: np.ndarray[Any, Any]) -> None:
        """Copy ``rows``, stored rows from ``first`` on, to their places; rows beyond :attr:`count` are dropped."""
        if self.axis is None:
            np.copyto(self.buffer, rows)
            return
        for at, view in self._parts(first, rows.shape[self.axis]):
            np.copyto(view, _cut(rows, self.axis, at - first, view.shape[self.axis]))

    def clear_rest(self) -> None:
        """Zero every row of the buffer that is not a stored row: head room must not show old memory."""
        if self.axis is None:
            return
        end = 0
        for start, stop in sorted(self.ranges):
            _cut(self.buffer, self.axis, end, start - end)[...] = 0
            end = stop
        _cut(self.buffer, self.axis, end, self.buffer.shape[self.axis] - end)[...] = 0

    def _parts(self, first: int, count: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Views that hold stored rows ``first`` … ``first + count``, each with its first stored row.

        At least one, so that no rows at all are still an array of the right shape.
        """
        assert self.axis is not None  # noqa: S101 - callers have answered for snapshots
        at, found = 0, False
        for start, stop in self.ranges:
            low, high = max(first, at), min(first + count, at + stop - start)
            if low < high:
                found = True
                yield low, _cut(self.buffer, self.axis, start + low - at, high - low)
            at += stop - start
        if not found:
            yield first, _cut(self.buffer, self.axis, 0, 0)


def _cut(array: np.ndarray[Any, Any], axis: int, start: int, count: int) -> np.ndarray[Any, Any]:
    return array[(slice(None),) * axis + (slice(start, start + count),)]

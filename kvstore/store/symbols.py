"""A prefix as the tree compares it: big-endian ids, and a mark where a media item starts.

The tree's answer to "how much do two prefixes have in common" is decided here, without a
database: ids agree one by one, and a media item that starts inside the common part must
be the same on both sides, whole: place, length, kind, digest and processor.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

import numpy as np

from kvstore.format.json import canonical_bytes
from kvstore.format.prefix import MediaItem, TokenIds
from kvstore.limits import MAX_TOKENS

__all__ = ["ID_BYTES", "Symbols", "head", "split_media"]

ID_BYTES: Final = 4
"""Bytes of an id, and of a mark's position."""
_MARK_BYTES: Final = ID_BYTES + 32


class Symbols:
    """One prefix: ids and marks by position."""

    __slots__ = ("_marks", "_starts", "data", "size")

    def __init__(self, ids: TokenIds, media: Sequence[MediaItem] = ()) -> None:
        """Take ids and media items in ascending order."""
        self.size = int(ids.size)
        self.data = ids.astype(">u4").tobytes()
        self._marks = [_mark(item) for item in media]
        self._starts = [item.start for item in media]

    def token(self, at: int) -> int:
        """The id at a position."""
        return int.from_bytes(self.data[at * ID_BYTES : (at + 1) * ID_BYTES], "big")

    def ids(self, start: int, end: int) -> bytes:
        """The ids of a span."""
        return self.data[start * ID_BYTES : end * ID_BYTES]

    def media(self, start: int, end: int) -> bytes | None:
        """The marks of a span, or None where there are none."""
        return b"".join(self._marks[bisect_left(self._starts, start) : bisect_left(self._starts, end)]) or None

    def head(self, at: int) -> bytes:
        """What tells the child that goes on here from its siblings."""
        return head(self.ids(at, at + 1), at, self.media(at, at + 1))

    def next_mark(self, at: int) -> int:
        """First position from ``at`` on where a media item starts; the size if there is none."""
        index = bisect_left(self._starts, at)
        return self._starts[index] if index < len(self._starts) else self.size

    def common(self, start: int, ids: bytes, media: bytes | None) -> int:
        """How many positions from ``start`` on agree with these ids and marks."""
        mine = self.data[start * ID_BYTES : start * ID_BYTES + len(ids)]
        count = len(mine) // ID_BYTES
        if mine != ids[: len(mine)]:
            differ = np.frombuffer(mine, "<u4") != np.frombuffer(ids, "<u4", count)
            count = int(np.argmax(differ))
        ours = self.media(start, start + count)
        return count if ours == media else min(count, _first_difference(_starts(ours), _starts(media)) - start)


def head(ids: bytes, start: int, media: bytes | None) -> bytes:
    """A node's ``head``: its first id, and the mark that lies there."""
    first = ids[:ID_BYTES]
    if media is not None and int.from_bytes(media[:ID_BYTES], "big") == start:
        return first + media[ID_BYTES:_MARK_BYTES]
    return first


def split_media(media: bytes | None, at: int) -> tuple[bytes | None, bytes | None]:
    """Marks before position ``at``, and from there on."""
    marks = _starts(media)
    return (
        b"".join(mark for mark in marks if int.from_bytes(mark[:ID_BYTES], "big") < at) or None,
        b"".join(mark for mark in marks if int.from_bytes(mark[:ID_BYTES], "big") >= at) or None,
    )


def _mark(item: MediaItem) -> bytes:
    return item.start.to_bytes(ID_BYTES, "big") + hashlib.sha256(canonical_bytes(item.to_json())).digest()


def _starts(media: bytes | None) -> list[bytes]:
    return [] if media is None else [media[i : i + _MARK_BYTES] for i in range(0, len(media), _MARK_BYTES)]


def _first_difference(ours: list[bytes], theirs: list[bytes]) -> int:
    """Position of the first mark that only one side has."""
    for a, b in zip_longest(ours, theirs):
        if a != b:
            return min(int.from_bytes(mark[:ID_BYTES], "big") for mark in (a, b) if mark is not None)
    return MAX_TOKENS

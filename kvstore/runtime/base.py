"""What a cache was before: so that a put need not hash again what has not changed.

A payload's SHA-256 names it in the store, and taking it is most of the work of a put
that writes little. So a load, and a put that has a base, keep for each segment a second,
faster digest of the same canonical bytes, its *mark* (:mod:`kvstore.format.seal`), several
times as fast as SHA-256 with hardware support. It is compared with the live bytes at the
next put, because the caller may have changed the arrays meanwhile. It never leaves memory
and never names anything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.format.digest import Digest
from kvstore.format.groups import PayloadRef, Segment, segments
from kvstore.format.manifest import Manifest

__all__ = ["Base", "Bases", "Place", "place_of"]

_MOST_SEGMENTS: Final = 1 << 18
"""Segments that are remembered for all entries together: about 64 MiB, or 64 million tokens of one group."""

Place = tuple[tuple[str, ...], Segment]
"""A group's layer paths, and a segment with ``first`` left out of account unless it is 0 rows or kept ones."""


def place_of(paths: Sequence[str], segment: Segment, *, keep: int) -> Place:
    """Where a segment lies, the same for a window that has moved on."""
    return tuple(paths), Segment(segment.start, segment.rows, 0 if segment.first < keep else keep)


@dataclass(frozen=True, slots=True)
class Base:
    """Segments of one entry: the payload that each of them was, and that payload's mark."""

    marks: Mapping[Place, tuple[PayloadRef, bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, marks: Mapping[PayloadRef, bytes]) -> Base:
        """What is known of an entry's segments."""
        return cls({
            place_of(group.layers, segment, keep=group.span.keep): (ref, marks[ref])
            for group in manifest.groups
            for segment, ref in zip(segments(group.span), group.payloads, strict=True)
            if ref in marks
        })  # fmt: skip

    def ref(self, place: Place, mark: bytes) -> PayloadRef | None:
        """The payload that was there, if it had this mark."""
        known = self.marks.get(place)
        return known[0] if known is not None and known[1] == mark else None


class Bases:
    """What this process knows of entries that it loaded or put, the last used ones; shared between threads."""

    def __init__(self) -> None:
        """Know nothing."""
        self._known: OrderedDict[Digest, Base] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, entry_id: Digest, base: Base) -> None:
        """Remember an entry; what has not been used for longest is forgotten."""
        with self._lock:
            known = self._known.pop(entry_id, Base())
            self._known[entry_id] = Base({**known.marks, **base.marks})
            while len(self._known) > 1 and sum(len(item.marks) for item in self._known.values()) > _MOST_SEGMENTS:
                self._known.popitem(last=False)

    def get(self, entry_id: Digest) -> Base:
        """What is known of an entry; maybe nothing."""
        with self._lock:
            if entry_id in self._known:
                self._known.move_to_end(entry_id)
            return self._known.get(entry_id, Base())

"""What a cache was before: so that a put need not hash again what has not changed.

A payload's SHA-256 names it in the store, and taking it is most of the work of a put
that writes little. So a load, and a put that has a base, keep for each segment a second,
faster digest of the same canonical bytes: XXH3 with 128 bits, seven times as fast as
SHA-256 with hardware support, and seeded anew in each process. It is compared with the
live bytes at the next put, because the caller may have changed the arrays meanwhile. It
never leaves memory and never names anything.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash

from kvstore.format.digest import Digest
from kvstore.format.groups import PayloadRef, Segment, segments
from kvstore.format.manifest import Manifest
from kvstore.format.tensors import Payload, UintArray

__all__ = ["Base", "Bases", "Place", "fingerprint", "place_of"]

_SEED: Final = secrets.randbits(64)
_MOST_SEGMENTS: Final = 1 << 18
"""Segments that are remembered for all entries together: about 64 MiB, or 64 million tokens of one group."""

_GATHERED_BYTES: Final = 4096

Place = tuple[tuple[str, ...], Segment]
"""A group's layer paths, and a segment with ``first`` left out of account unless it is 0 rows or kept ones."""


def fingerprint(payload: Payload) -> bytes:
    """16 bytes over the payload's canonical bytes; equal ones mean an equal payload, within this process."""
    hasher = xxhash.xxh3_128(payload.header, seed=_SEED)
    for array in payload.arrays:
        _feed(hasher.update, array)
    return hasher.digest()


def _feed(update: Callable[[Any], object], array: UintArray) -> None:
    """Give the elements in order, in pieces that lie together in memory: gathering costs more than hashing does."""
    if array.flags.c_contiguous:
        update(array)
    elif array.nbytes > _GATHERED_BYTES:
        for part in array:
            _feed(update, part)
    else:
        update(np.ascontiguousarray(array))


def place_of(paths: Sequence[str], segment: Segment, *, keep: int) -> Place:
    """Where a segment lies, the same for a window that has moved on."""
    return tuple(paths), Segment(segment.start, segment.rows, 0 if segment.first < keep else keep)


@dataclass(frozen=True, slots=True)
class Base:
    """Segments of one entry: the payload that each of them was, and that payload's fingerprint."""

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

    def ref(self, place: Place, payload: Payload) -> tuple[PayloadRef | None, bytes]:
        """The reference of a payload, where it is still what it was, and its fingerprint."""
        mark = fingerprint(payload)
        known = self.marks.get(place)
        return (known[0] if known is not None and known[1] == mark else None), mark


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

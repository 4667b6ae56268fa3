"""Payloads that are encoded as they are named, before the manifest that will name them exists.

A put of a new cache hashes every payload and encodes it. Both are done here from one copy
of the payload, while it is in the processor's cache: so the live arrays are read once, and
digest and object are of the same bytes whatever becomes of the arrays meanwhile.

Where the first payload turns out to be stored, most others probably are as well: from then
on nothing is encoded ahead, and payloads are hashed only. What was encoded for nothing goes
with the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvstore.format.digest import Digest
from kvstore.format.object import Choice, Codec, ObjectParts, Plan
from kvstore.format.tensors import Payload, UintArray
from kvstore.store.locations import find_locations
from kvstore.store.objects import Staged
from kvstore.store.opening import Opened
from kvstore.store.parallel import Stop
from kvstore.store.schema import LIVE
from kvstore.store.temp import Session

__all__ = ["Staging"]

_LARGEST: Final = 32 * 2**20
"""Payloads above this size are left to the put itself, which needs no copy of them."""


class Staging:
    """A session of temporary files, and the objects that are in it.

    Attributes:
        session: Where the files are.
        staged: The objects by their payloads.
        stop: Ends the work early.
        needed: Whether payloads are still encoded ahead.
    """

    def __init__(
        self, opened: Opened, session: Session, *, namespace: str, codec: Codec,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """Encode payloads of a namespace into ``session``, which the caller closes."""
        self.session = session
        self.staged: dict[Digest, Staged] = {}
        self.stop = Stop(cancelled)
        self.needed = True
        self._opened = opened
        self._namespace = namespace
        self._codec: Codec = codec
        self._choice = Choice()
        self._asked = False
        self._rooms: list[UintArray] = []

    def plans(self, payload: Payload) -> Sequence[Plan] | None:
        """How a payload shall be encoded, for :meth:`encode`; None where it shall not be, ahead.

        Called on one thread, for payloads in their order: what is chosen for the first holds for others like it.
        """
        if not self.needed or payload.size > _LARGEST:
            return None
        return self._choice.plans(payload) if self._codec == "small" else ()

    @contextmanager
    def copied(self, payload: Payload) -> Iterator[Payload]:
        """A copy of a payload, to be marked and encoded; may be called from several threads."""
        room = self._room(payload.size)
        yield payload.copied(room)
        self._rooms.append(room)

    def encode(self, copy: Payload, plans: Sequence[Plan]) -> Digest:
        """The payload's digest; its object is staged, unless the store seems to hold what is put.

        May be called from several threads.

        Raises:
            StoreError, SpaceError: of the file system.
            CancelledError: CANCELLED.
        """
        digest = copy.digest()
        if self._is_needed(digest):
            parts = ObjectParts(
                copy, digest=digest, namespace=self._namespace, codec=self._codec, plans=plans,
                checkpoint=self.stop.checkpoint,
            )  # fmt: skip
            self.staged[digest] = self._opened.objects.stage(self.session, digest, parts)
        return digest

    def _room(self, size: int) -> UintArray:
        """Memory that an earlier payload had, where it is large enough: fresh pages would have to be cleared."""
        try:
            room = self._rooms.pop()
        except IndexError:
            room = np.empty(size, np.uint8)
        return room if room.size >= size else np.empty(size, np.uint8)

    def _is_needed(self, digest: Digest) -> bool:
        if not self._asked:
            self._asked = True
            with self._opened.index.read() as connection:
                location = find_locations(connection, self._namespace, [digest]).get(digest)
            self.needed = location is None or location.state != LIVE
        return self.needed

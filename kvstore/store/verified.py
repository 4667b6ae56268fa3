"""Which object files have had their stored digest checked, so that it is done once."""

from __future__ import annotations

import threading
from typing import Final

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.store.index import Index, once
from kvstore.store.schema import objects

__all__ = ["Verified"]

_BATCH: Final = 512


class Verified:
    """Identities of checked files: in memory at once, in the index in batches, best effort."""

    def __init__(self, index: Index) -> None:
        """Start with nothing noted."""
        self._index = index
        self._lock = threading.Lock()
        self._known: dict[int, str] = {}
        self._pending: dict[int, str] = {}

    def knows(self, object_key: int, identity: str) -> bool:
        """Whether this process has checked that file."""
        return self._known.get(object_key) == identity

    def note(self, object_key: int, identity: str) -> None:
        """Remember that the file was checked and found right."""
        with self._lock:
            self._known[object_key] = identity
            self._pending[object_key] = identity
            full = len(self._pending) >= _BATCH
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what was noted into the index; where that is not possible, it is checked again some day."""
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending or self._index.read_only or not self._index.present():
            return
        rows = [{"key": key, "identity": identity} for key, identity in sorted(pending.items())]
        query = objects.update().where(objects.c.object_key == sa.bindparam("key"))
        try:
            # A note is not worth waiting for another writer.
            with self._index.write(once(), durable=False) as connection:
                connection.execute(query.values(verified=sa.bindparam("identity")), rows)
        except KVStoreError:
            return

"""What an old index alone knew, read as far as it can be read: labels, pins, leases, times, annotations, removals.

Somebody may have changed it, tables and all: a row that is none of ours is passed over, the others count.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.store.entries import annotate_entry, check_annotation, label_entry
from kvstore.store.naming import entry_key
from kvstore.store.objects import ObjectName
from kvstore.store.schema import DOOMED, entries, leases

__all__ = ["Salvage", "salvage", "storable"]


_DIGEST_BYTES: Final = 32


@dataclass(slots=True)
class Salvage:
    """Facts by entry id.

    Attributes:
        times: Created, accessed (microseconds), pinned.
        labels: Label to entry and time of setting.
        annotations: Name to value.
        leases: Owner to entry, time of taking and end.
        doomed: Paths of documents whose entries were removed, and which may be there still.
        doomed_objects: The same of objects: namespace, name, bytes of the payload.
    """

    times: dict[Digest, tuple[int, int, int]] = field(default_factory=dict)
    labels: dict[str, tuple[Digest, int]] = field(default_factory=dict)
    annotations: dict[Digest, dict[str, Json]] = field(default_factory=dict)
    leases: dict[str, tuple[Digest, int, int]] = field(default_factory=dict)
    doomed: set[str] = field(default_factory=set)
    doomed_objects: list[tuple[str, ObjectName, int]] = field(default_factory=list)

    def restore_entry(self, connection: sa.Connection, entry_id: Digest) -> None:
        """Give an entry of the new index its times, pin and annotations back."""
        if entry_id in self.times:
            created_at, accessed_at, pinned = self.times[entry_id]
            change = entries.update().where(entries.c.entry_id == entry_id)
            connection.execute(change.values(created_at=created_at, accessed_at=accessed_at, pinned=pinned))
        annotate_entry(connection, entry_id, storable(self.annotations.get(entry_id, {})))

    def is_doomed(self, path: str, entry_id: Digest) -> bool:
        """Whether this document of an entry was removed, and only its file has not gone yet."""
        return path in self.doomed and entry_id not in self.times

    def restore_labels(self, connection: sa.Connection) -> None:
        """Set the labels whose entries are there."""
        for name, (entry_id, set_at) in sorted(self.labels.items()):
            with suppress(KVStoreError):
                label_entry(connection, name, entry_id, set_at)

    def restore_leases(self, connection: sa.Connection) -> None:
        """Let the leases go on whose entries are there; those that have ended go with the next sweep."""
        for owner, (entry_id, taken_at, expires_at) in sorted(self.leases.items()):
            with suppress(KVStoreError):
                connection.execute(leases.insert().values(
                    owner=owner, entry_key=entry_key(connection, entry_id), taken_at=taken_at, expires_at=expires_at
                ))  # fmt: skip


def storable(facts: Mapping[str, Json]) -> dict[str, Json]:
    """Those of somebody's annotations that may be stored; the others are dropped, not their entry."""
    found = {}
    for name, value in facts.items():
        with suppress(KVStoreError):
            check_annotation(name, value)
            found[name] = value
    return found


def salvage(old: sqlite3.Connection | None) -> Salvage:
    """Read what a damaged index still gives; nothing where there is none."""
    found = Salvage()
    if old is None:
        return found
    old.text_factory = _text
    for entry_id, created_at, accessed_at, pinned in _rows(
        old, "SELECT entry_id, created_at, accessed_at, pinned FROM entries", bytes, int, int, int
    ):
        found.times[_digest(entry_id)] = (created_at, accessed_at, pinned)
    query = "SELECT name, entry_id, set_at FROM labels JOIN entries USING (entry_key)"
    for name, entry_id, set_at in _rows(old, query, str, bytes, int):
        found.labels[name] = (_digest(entry_id), set_at)
    query = "SELECT name, entry_id, value FROM annotations JOIN entries USING (entry_key)"
    for name, entry_id, value in _rows(old, query, str, bytes, str):
        with suppress(ValueError, RecursionError):
            found.annotations.setdefault(_digest(entry_id), {})[name] = json.loads(value)
    query = "SELECT owner, entry_id, taken_at, expires_at FROM leases JOIN entries USING (entry_key)"
    for owner, entry_id, taken_at, expires_at in _rows(old, query, str, bytes, int, int):
        found.leases[owner] = (_digest(entry_id), taken_at, expires_at)
    query = "SELECT state, namespace, payload, stored, raw_size FROM objects"
    for state, namespace, payload, stored, raw_size in _rows(old, query, str, str, bytes, bytes, int):
        if state == DOOMED and len(payload) == len(stored) == _DIGEST_BYTES:
            found.doomed_objects.append((namespace, ObjectName(_digest(payload), _digest(stored)), raw_size))
    found.doomed = {path for (path,) in _rows(old, "SELECT path FROM doomed_files", str)}
    return found


def _rows(old: sqlite3.Connection, query: str, *types: type) -> Iterator[tuple[Any, ...]]:
    """The rows of these types, up to where the table cannot be read."""
    with suppress(sqlite3.Error):
        for row in old.execute(query):
            if all(type(value) is kind for value, kind in zip(row, types, strict=True)):
                yield row


def _text(raw: bytes) -> str | None:
    """Text of the index; None, which no column of ours holds, where it is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _digest(raw: bytes) -> Digest:
    return Digest(f"sha256:{raw.hex()}")

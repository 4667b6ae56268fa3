"""The publishing transaction of a put: files to their names, then rows, then the commit.

Under the write lock no other put publishes and no collection removes, so what is seen
here stays true until the commit. If anything fails before the commit, the files that
were moved are removed again while the lock is still held. A commit that fails may have
succeeded all the same: then the lock is taken again, and files that rows name stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.format.digest import Digest
from kvstore.format.groups import PayloadRef
from kvstore.format.receipt import Receipt
from kvstore.limits import MAX_MANIFEST_BYTES
from kvstore.store.clock import now_micros
from kvstore.store.damage import heal_entries
from kvstore.store.documents import Documents
from kvstore.store.entries import add_notes, annotate_entry, label_entry
from kvstore.store.fs import os_errors
from kvstore.store.index import once
from kvstore.store.locations import Location, find_locations
from kvstore.store.objects import ObjectName, Staged, stored_digest
from kvstore.store.opening import Opened
from kvstore.store.prepared import Prepared
from kvstore.store.put import Put
from kvstore.store.rows import Choice, write_entry, write_objects
from kvstore.store.schema import DOOMED, LIVE, doomed_files, entries, receipts
from kvstore.store.temp import Session

__all__ = ["Outcome", "commit", "survey"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the transaction did; sizes in bytes."""

    created: bool
    receipt: Receipt
    stored_bytes: int
    objects_written: int
    objects_reused: int


class _Moves:
    """Files that were moved to their names, to be taken back if the rows do not follow."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._objects: list[ObjectName] = []
        self._documents: list[tuple[Documents, Digest]] = []
        self._folders: set[Path] = set()

    def object(self, staged: Staged) -> None:
        self._opened.objects.publish(staged)
        self._objects.append(staged.name)

    def document(self, documents: Documents, path: Path, digest: Digest, data: bytes) -> None:
        """Publish a document, unless it is there: a file that a row may refer to is never written again."""
        # Whoever put it there may have died before it was flushed.
        self._folders |= documents.folders(digest)
        found = documents.read(digest, len(data))
        if found == data:
            return
        documents.publish(path, digest)
        if found is None:
            self._documents.append((documents, digest))

    def flush(self) -> None:
        self._opened.sync(self._folders | self._opened.objects.folders(self._objects))

    def take_back(self) -> None:
        while self._objects:
            self._opened.objects.remove(self._objects.pop())
        while self._documents:
            documents, digest = self._documents.pop()
            documents.remove(digest)

    def take_back_unnamed(self, namespace: str) -> None:
        """After a commit that failed, without the lock and perhaps not for good: its rows say what may be removed."""
        if not self._objects and not self._documents:
            return
        with suppress(KVStoreError), self._opened.index.write(once()) as connection:
            rows = find_locations(connection, namespace, [name.payload for name in self._objects])
            named = {location.name for location in rows.values()}
            self._objects = [name for name in self._objects if name not in named]
            self._documents = [pair for pair in self._documents if not _has_row(connection, pair[1])]
            self.take_back()


_IS_NAMED: Final = Prepared(
    sa.union_all(
        sa.select(sa.literal_column("1")).where(entries.c.entry_id == sa.bindparam("digest")),
        sa.select(sa.literal_column("1")).where(receipts.c.digest == sa.bindparam("digest")),
    )
)


def _has_row(connection: sa.Connection, digest: Digest) -> bool:
    """Whether a manifest or a receipt is named by a row."""
    return _IS_NAMED.first(connection, digest=digest) is not None


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Manifest and receipt as temporary files, flushed together with the objects."""

    manifest: Path
    receipt: Receipt
    receipt_path: Path


_DAMAGED: Final = Prepared(sa.select(entries.c.damaged).where(entries.c.entry_id == sa.bindparam("entry_id")))


def _usable_size(opened: Opened, location: Location | None) -> int | None:
    """The size of a payload's file that can be used as it lies there, live or doomed; None where there is none.

    One of another size than its row states can be used as well if it has the digest in its name: that proves the
    bytes, and the row does not. One of the same size is not read, or a conversation would read all of itself at every
    turn: damage of that kind is found by the next load, and healed by the next put.
    """
    if location is None or location.state not in (LIVE, DOOMED):
        return None
    found = opened.objects.identify(location.name)
    if found is None:
        return None
    size = found[1]
    return size if size == location.stored_size or _is_as_named(opened, location.name) else None


def _is_as_named(opened: Opened, name: ObjectName) -> bool:
    stored = opened.objects.open(name)
    if stored is None:
        return False
    try:
        return stored_digest(stored) == name.stored
    finally:
        stored.close()


def survey(opened: Opened, put: Put) -> tuple[list[PayloadRef], bool]:
    """Payloads that must be encoded, and whether the entry is there whole, so that there is nothing to write."""
    with opened.index.read() as connection:
        damaged = _DAMAGED.first(connection, entry_id=put.entry_id)
        known = find_locations(connection, put.manifest.namespace, [ref.digest for ref in put.refs])
    sizes = {ref.digest: _usable_size(opened, known.get(ref.digest)) for ref in put.refs}
    absent = [ref for ref in put.refs if sizes[ref.digest] is None]
    as_noted = all(item.state == LIVE and item.stored_size == sizes[item.name.payload] for item in known.values())
    if absent or damaged != (0,) or not as_noted:
        return absent, False
    return absent, opened.manifests.read(put.entry_id, MAX_MANIFEST_BYTES) == put.manifest.data


def commit(
    opened: Opened, session: Session, put: Put, staged: Mapping[Digest, Staged], checkpoint: Callable[[], None]
) -> Outcome | None:
    """Publish a put whose objects are staged.

    Args:
        checkpoint: Called while waiting for the lock; raises to give up.

    Returns:
        What was done, or None where a payload that was there has gone: stage it and call again.
    """
    drafts = _draft(opened, session, put, len(staged), sum(item.size for item in staged.values()))
    moves = _Moves(opened)
    try:
        with opened.index.write(checkpoint) as connection:
            choice = _choose(opened, connection, put, staged)
            if choice is None:
                return None
            written = sum(item.size for item, _ in choice.published)
            if len(choice.published) != drafts.receipt.facts["objects_written"]:
                # Another put was faster with some of them; rare enough to pay for it under the lock.
                drafts = _draft(opened, session, put, len(choice.published), written)
            created = _publish(opened, connection, put, choice, drafts, moves)
    except BaseException:
        moves.take_back_unnamed(put.manifest.namespace)
        raise
    reused = len(choice.used) + len(choice.raised)
    return Outcome(created, drafts.receipt, written, len(choice.published), reused)


def _publish(
    opened: Opened, connection: sa.Connection, put: Put, choice: Choice, drafts: _Drafts, moves: _Moves
) -> bool:
    """Files, then rows; tells whether the entry is new. What fails here is taken back while the lock is held."""
    try:
        _move(opened, put, choice, drafts, moves)
        return _record(opened, connection, put, choice, drafts.receipt)
    except BaseException:
        moves.take_back()
        raise


def _draft(opened: Opened, session: Session, put: Put, written: int, stored_bytes: int) -> _Drafts:
    receipt = put.receipt(now_micros(), stored_bytes=stored_bytes, written=written, reused=len(put.refs) - written)
    drafts = _Drafts(
        opened.manifests.stage(session, put.entry_id, put.manifest.data), receipt,
        opened.receipts.stage(session, receipt.digest, receipt.data),
    )  # fmt: skip
    with os_errors("flushing an entry", writing=True):
        session.sync()
    return drafts


def _choose(
    opened: Opened, connection: sa.Connection, put: Put, staged: Mapping[Digest, Staged]
) -> Choice | None:
    known = find_locations(connection, put.manifest.namespace, [ref.digest for ref in put.refs])
    choice = Choice()
    for ref in put.refs:
        location = known.get(ref.digest)
        size = _usable_size(opened, location)
        if location is not None and size is not None:
            (choice.raised if location.state == DOOMED else choice.used).append(replace(location, stored_size=size))
            choice.resized |= size != location.stored_size
        elif ref.digest in staged:
            choice.published.append((staged[ref.digest], location))
        else:
            return None
    return choice


def _move(opened: Opened, put: Put, choice: Choice, drafts: _Drafts, moves: _Moves) -> None:
    """Publish objects, then manifest and receipt; what a row named before is removed or set aside first."""
    for staged, location in choice.published:
        if location is not None and location.name != staged.name and location.state == DOOMED:
            # Doomed means that its file may go at any time, and that this was committed.
            opened.objects.remove(location.name)
        elif location is not None and opened.objects.identify(location.name) is not None:
            opened.objects.set_aside(location.name, {"code": "STORED_SIZE_MISMATCH", "expected": location.stored_size})
        moves.object(staged)
    moves.document(opened.manifests, drafts.manifest, put.entry_id, put.manifest.data)
    moves.document(opened.receipts, drafts.receipt_path, drafts.receipt.digest, drafts.receipt.data)
    moves.flush()


_ADD_RECEIPT: Final = Prepared(receipts.insert())
_SPARE: Final = Prepared(doomed_files.delete().where(doomed_files.c.path == sa.bindparam("spared")))


def _record(opened: Opened, connection: sa.Connection, put: Put, choice: Choice, receipt: Receipt) -> bool:
    """Write the rows; tells whether the entry is new."""
    now = now_micros()
    keys, healed = write_objects(connection, put, choice, now)
    new = write_entry(connection, put, keys, now)
    if healed or new is None:
        heal_entries(connection, healed, put.entry_id)
    if put.label is not None:
        label_entry(connection, put.label, put.entry_id, now)
    if new is None:
        annotate_entry(connection, put.entry_id, put.annotations)
    else:
        add_notes(connection, new, put.annotations)
    _ADD_RECEIPT(
        connection, digest=receipt.digest, subject=receipt.subject, type=receipt.type, made_at=receipt.made_at
    )
    _SPARE(connection, spared=opened.manifests.relative(put.entry_id))
    _SPARE(connection, spared=opened.receipts.relative(receipt.digest))
    return new is not None

"""Removing entries in two transactions: rows first, then the files that nothing needs any more.

The first takes the entries' rows away and dooms the objects that only they referred to,
and its commit is durable before any file goes. The second, under the lock again, unlinks
what is *still* doomed: a put in between may have raised it. A crash between the two
leaves doomed rows, which the next sweep finishes; never a live row without its file.
An entry that somebody has leased is not removed, except by force.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from kvstore.format.digest import Digest
from kvstore.store.fs import os_errors, remove_file
from kvstore.store.leases import drop_stale, refuse_leased
from kvstore.store.locations import batches
from kvstore.store.naming import entry_key
from kvstore.store.objects import ObjectName
from kvstore.store.opening import Opened
from kvstore.store.schema import DOOMED, doomed_files, entries, objects, receipts, refs
from kvstore.store.tree import remove_entry

__all__ = ["Removed", "doom_entries", "remove_entries", "sweep_doomed"]

_SWEPT_AT_ONCE: Final = 256
"""Files unlinked in one transaction: others wait for the lock meanwhile."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed: entries, objects that nothing else needed, and those objects' bytes."""

    entries: int
    objects: int
    stored_bytes: int


def remove_entries(opened: Opened, entry_ids: Iterable[Digest], *, force: bool = False) -> Removed:
    """Remove entries with their labels, annotations and receipts; all of them or none.

    Args:
        force: Also what is leased: whoever works from it meets a typed error, or encodes it again.

    Raises:
        NotFoundError: NOT_FOUND.
        BusyError: ENTRY_LEASED; STORE_BUSY.
        StoreError: of the store.
    """
    removed = doom_entries(opened, entry_ids, force=force)
    sweep_doomed(opened)
    return removed


def doom_entries(opened: Opened, entry_ids: Iterable[Digest], *, force: bool = False) -> Removed:
    """The first step alone: the entries are gone, their files may go. Raises as :func:`remove_entries`."""
    wanted = list(dict.fromkeys(entry_ids))
    opened.index.refuse_read_only()
    if not wanted:
        return Removed(0, 0, 0)
    with opened.index.write() as connection:
        keys = [entry_key(connection, entry_id) for entry_id in wanted]
        drop_stale(opened, connection)
        if not force:
            refuse_leased(opened, connection, keys)
        for entry_id in wanted:
            remove_entry(connection, entry_id)
        _doom_documents(opened, connection, wanted)
        doomed = [found for key in keys for found in _drop(connection, key)]
    return Removed(len(wanted), len(doomed), sum(doomed))


def sweep_doomed(opened: Opened) -> int:
    """Unlink what is doomed; returns the number of objects."""
    total = 0
    while True:
        with opened.index.read() as connection:
            if not _anything(connection):
                return total
        with opened.index.write() as connection:
            total += _sweep_objects(opened, connection)
            _sweep_documents(opened, connection)


def _drop(connection: sa.Connection, key: int) -> Sequence[int]:
    """Delete one entry's row and doom what it alone referred to; gives the stored sizes."""
    mine = sa.select(refs.c.object_key).where(refs.c.entry_key == key)
    other = refs.alias()
    shared = sa.exists().where(other.c.object_key == objects.c.object_key, other.c.entry_key != key)
    doomed = connection.execute(
        objects.update()
        .where(objects.c.object_key.in_(mine), ~shared)
        .values(state=DOOMED, verified=None)
        .returning(objects.c.stored_size)
    ).scalars().all()  # fmt: skip
    connection.execute(entries.delete().where(entries.c.entry_key == key))
    return doomed


def _doom_documents(opened: Opened, connection: sa.Connection, entry_ids: Sequence[Digest]) -> None:
    paths = {opened.manifests.relative(entry_id) for entry_id in entry_ids}
    for part in batches(entry_ids):
        about = receipts.c.subject.in_(part)
        digests = connection.execute(sa.select(receipts.c.digest).where(about)).scalars()
        paths.update(opened.receipts.relative(digest) for digest in digests)
        connection.execute(receipts.delete().where(about))
    for batch in batches(sorted(paths)):
        connection.execute(doomed_files.delete().where(doomed_files.c.path.in_(batch)))
    connection.execute(doomed_files.insert(), [{"path": path} for path in sorted(paths)])


def _anything(connection: sa.Connection) -> bool:
    query = sa.union_all(
        sa.select(sa.literal(1)).where(sa.exists().where(objects.c.state == sa.literal_column(f"'{DOOMED}'"))),
        sa.select(sa.literal(1)).where(sa.exists().select_from(doomed_files)),
    )
    return connection.execute(query).first() is not None


def _sweep_objects(opened: Opened, connection: sa.Connection) -> int:
    query = sa.select(objects.c.object_key, objects.c.payload, objects.c.stored).where(objects.c.state == DOOMED)
    rows = connection.execute(query.limit(_SWEPT_AT_ONCE)).all()
    for _, payload, stored in rows:
        opened.objects.remove(ObjectName(payload, stored))
    for part in batches([row.object_key for row in rows]):
        connection.execute(objects.delete().where(objects.c.object_key.in_(part)))
    return len(rows)


def _sweep_documents(opened: Opened, connection: sa.Connection) -> None:
    paths = connection.execute(sa.select(doomed_files.c.path).limit(_SWEPT_AT_ONCE)).scalars().all()
    with os_errors("removing a document", writing=True):
        for path in paths:
            # A row that somebody has edited must not lead to any other file.
            if opened.manifests.owns(path) or opened.receipts.owns(path):
                remove_file(opened.paths.root / path)
    for part in batches(paths):
        connection.execute(doomed_files.delete().where(doomed_files.c.path.in_(part)))

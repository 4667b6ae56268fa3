"""What happens to an object that was proved wrong or found missing, and how it is healed.

A file is set aside only when its stored digest, size or payload digest is proved wrong;
an error of the operating system proves nothing. Entries that need such an object are
flagged, so that match passes over them at once. A later put of the same payload heals
object and entries. All of this is best effort: a reader that cannot write only reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.format.digest import Digest
from kvstore.store.objects import ObjectName
from kvstore.store.opening import Opened
from kvstore.store.schema import LIVE, MISSING, QUARANTINED, entries, objects, refs
from kvstore.store.tree import refile_entry

__all__ = ["flag_entry", "heal_entries", "mark_missing", "quarantine"]


def quarantine(opened: Opened, namespace: str, name: ObjectName, identity: str, error: KVStoreError) -> bool:
    """Set an object's file aside, unless it was replaced since it was read; tells whether that was done.

    Args:
        identity: Of the file whose bytes were proved wrong.
        error: The proof.
    """
    reason = {"code": error.code, "message": error.message, "namespace": namespace, "detail": error.detail}

    def act() -> bool:
        found = opened.objects.identify(name)
        if found is None or found[0] != identity:
            return False
        opened.objects.set_aside(name, reason)
        return True

    return _mark(opened, namespace, name, QUARANTINED, act)


def mark_missing(opened: Opened, namespace: str, name: ObjectName) -> bool:
    """Note that a live object's file is not there; tells whether that was done."""
    return _mark(opened, namespace, name, MISSING, lambda: opened.objects.identify(name) is None)


def flag_entry(opened: Opened, entry_id: Digest) -> None:
    """Flag one entry whose manifest is wrong or missing."""
    if opened.read_only:
        return
    try:
        with opened.index.write() as connection:
            _flag(connection, entries.c.entry_id == entry_id)
    except KVStoreError:
        return


def heal_entries(connection: sa.Connection, object_keys: Iterable[int], entry_id: Digest) -> None:
    """Clear the flag of entries whose objects are all live again.

    Args:
        connection: In the transaction that made ``object_keys`` live.
        object_keys: Objects that were not live before.
        entry_id: The entry that is being put, whose manifest has just been written.
    """
    keys = list(object_keys)
    if not keys and not connection.execute(
        sa.select(entries.c.entry_key).where(entries.c.entry_id == entry_id, entries.c.damaged == 1)
    ).first():  # fmt: skip
        return
    broken = sa.select(refs.c.entry_key).join(objects, objects.c.object_key == refs.c.object_key).where(
        objects.c.state != LIVE, refs.c.entry_key == entries.c.entry_key
    ).correlate(entries)  # fmt: skip
    query = sa.select(entries.c.entry_id).where(entries.c.damaged == 1, ~sa.exists(broken))
    for (healed,) in connection.execute(query).all():
        connection.execute(entries.update().where(entries.c.entry_id == healed).values(damaged=0))
        refile_entry(connection, healed)


def _mark(opened: Opened, namespace: str, name: ObjectName, state: str, act: Callable[[], bool]) -> bool:
    """Under the lock: if the row still names this file and ``act`` agrees, change its state and flag its entries."""
    opened.locations.forget(namespace, name.payload)
    if opened.read_only:
        return False
    query = sa.select(objects.c.object_key).where(
        objects.c.namespace == namespace, objects.c.payload == name.payload, objects.c.stored == name.stored,
        objects.c.state.in_((LIVE, MISSING)),
    )  # fmt: skip
    try:
        with opened.index.write() as connection:
            key = connection.execute(query).scalar()
            if key is None or not act():
                return False
            connection.execute(
                objects.update().where(objects.c.object_key == key).values(state=state, verified=None)
            )
            _flag(connection, entries.c.entry_key.in_(sa.select(refs.c.entry_key).where(refs.c.object_key == key)))
    except KVStoreError:
        return False
    return True


def _flag(connection: sa.Connection, which: sa.ColumnElement[bool]) -> None:
    query = sa.select(entries.c.entry_id).where(which, entries.c.damaged == 0)
    for (entry_id,) in connection.execute(query).all():
        connection.execute(entries.update().where(entries.c.entry_id == entry_id).values(damaged=1))
        refile_entry(connection, entry_id)

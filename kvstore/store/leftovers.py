"""Files in a store that no row refers to: harmless, but they take space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import sqlalchemy as sa

from kvstore.format.digest import Digest
from kvstore.store.documents import Documents
from kvstore.store.findings import Finding
from kvstore.store.leases import count_stale
from kvstore.store.locations import batches
from kvstore.store.objects import ObjectName
from kvstore.store.opening import Opened
from kvstore.store.schema import DOOMED, doomed_files, entries, objects, receipts
from kvstore.store.temp import garbage_sessions

__all__ = ["find_leftovers"]

T = TypeVar("T")


def find_leftovers(opened: Opened) -> list[Finding]:
    """Orphans, foreign files, unfinished removals and dead temporary files, as notices."""
    files = list(opened.objects.paths())
    names = [name for _, name in files if name is not None]
    orphans = _orphans(opened, names, _known_objects, lambda name: opened.objects.identify(name) is not None)
    return [
        *(Finding.make("ORPHAN_OBJECT", f"objects/{name.path}", "no row refers to this object") for name in orphans),
        *(_foreign(f"objects/{path}") for path, name in files if name is None),
        *_documents(opened, opened.manifests, "ORPHAN_MANIFEST", _known_manifests),
        *_documents(opened, opened.receipts, "ORPHAN_RECEIPT", _known_receipts),
        *_unfinished(opened),
        *(
            Finding.make("TEMP_LEFT", f"tmp/{path.name}", "a process died while it was writing")
            for path in garbage_sessions(opened.paths.tmp)
        ),
    ]


def _documents(
    opened: Opened, documents: Documents, code: str, rows: Callable[[sa.Connection, list[Digest]], set[Digest]]
) -> list[Finding]:
    files = list(documents.files())

    def known(connection: sa.Connection, digests: list[Digest]) -> set[Digest]:
        # What is still to be removed is reported as that.
        paths = [documents.relative(digest) for digest in digests]
        query = sa.select(doomed_files.c.path).where(doomed_files.c.path.in_(paths))
        doomed = set(connection.execute(query).scalars())
        return rows(connection, digests) | {d for d in digests if documents.relative(d) in doomed}

    there = [digest for _, digest in files if digest is not None]
    orphans = _orphans(opened, there, known, lambda digest: documents.path(digest).exists())
    foreign = [path.relative_to(opened.paths.root).as_posix() for path, digest in files if digest is None]
    return [
        *(_foreign(path) for path in foreign),
        *(Finding.make(code, documents.relative(digest), "no row refers to this file") for digest in orphans),
    ]


def _orphans(
    opened: Opened, there: list[T], known: Callable[[sa.Connection, list[T]], set[T]], exists: Callable[[T], bool]
) -> list[T]:
    """What has a file but no row.

    A put moves files into place before it commits, so a suspect is looked at again when no put is
    in the middle of that.
    """
    with opened.index.read() as connection:
        suspects = _without(connection, there, known)
    if not suspects:
        return []
    with _quiet(opened) as connection:
        return [item for item in _without(connection, suspects, known) if exists(item)]


@contextmanager
def _quiet(opened: Opened) -> Iterator[sa.Connection]:
    """A moment under the write lock; without it where the store cannot be written."""
    if opened.read_only:
        with opened.index.read() as connection:
            yield connection
        return
    with opened.index.write() as connection:
        yield connection


def _without(connection: sa.Connection, there: list[T], known: Callable[[sa.Connection, list[T]], set[T]]) -> list[T]:
    found: set[T] = set()
    for part in batches(there):
        found |= known(connection, list(part))
    return [item for item in there if item not in found]


def _known_objects(connection: sa.Connection, names: list[ObjectName]) -> set[ObjectName]:
    query = sa.select(objects.c.payload, objects.c.stored)
    rows = connection.execute(query.where(objects.c.payload.in_({name.payload for name in names})))
    return {ObjectName(payload, stored) for payload, stored in rows}


def _known_manifests(connection: sa.Connection, digests: list[Digest]) -> set[Digest]:
    return set(connection.execute(sa.select(entries.c.entry_id).where(entries.c.entry_id.in_(digests))).scalars())


def _known_receipts(connection: sa.Connection, digests: list[Digest]) -> set[Digest]:
    return set(connection.execute(sa.select(receipts.c.digest).where(receipts.c.digest.in_(digests))).scalars())


def _unfinished(opened: Opened) -> list[Finding]:
    with opened.index.read() as connection:
        count = sa.select(sa.func.count())
        left = connection.execute(count.where(objects.c.state == DOOMED)).scalar_one()
        left += connection.execute(count.select_from(doomed_files)).scalar_one()
        stale = count_stale(opened, connection)
    return [
        *([Finding.make("DOOMED_LEFT", "index.sqlite", f"{left} files are still to be removed")] if left else []),
        *([Finding.make("LEASE_LEFT", "index.sqlite", f"{stale} leases of ended processes")] if stale else []),
    ]


def _foreign(path: str) -> Finding:
    return Finding.make("FOREIGN_FILE", path, "this is not a file of the store")

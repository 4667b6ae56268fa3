"""Checking a store: index against files both ways, digests of what is stored, and, deep, of what it decodes to.

Nothing is locked while files are read. What looks wrong is looked at again before it is
reported, because puts and removals go on meanwhile. A file that is proved wrong is set
aside as any reader would; nothing else is changed: repairing is another command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.format.compat import entry_signature_digest
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.groups import PayloadRef
from kvstore.format.manifest import Manifest
from kvstore.format.receipt import parse_receipt
from kvstore.limits import MAX_RECEIPT_BYTES
from kvstore.store.findings import Finding, Report
from kvstore.store.leftovers import find_leftovers
from kvstore.store.locations import batches, locations_of_entry
from kvstore.store.naming import entry_key
from kvstore.store.opening import Opened
from kvstore.store.parallel import Stop, map_parallel
from kvstore.store.read import check_object, read_manifest, read_token_ids
from kvstore.store.schema import DOOMED, entries, objects, receipts, refs
from kvstore.store.tree_check import check_offers, check_place

__all__ = ["verify"]


def verify(
    opened: Opened, entry_ids: Iterable[Digest] | None = None, *, deep: bool = False,
    progress: Callable[[int, int], None] | None = None, cancelled: Callable[[], bool] | None = None,
) -> Report:  # fmt: skip
    """Check the whole store, or some entries and what they need.

    Args:
        entry_ids: Only these; then files that nothing refers to are not looked for.
        deep: Also decode every payload, check its digest, and the token ids against the prefix digest.
        progress: Called with stored bytes read and to be read.
        cancelled: Asked between steps.

    Raises:
        NotFoundError: NOT_FOUND, for an id that is not there.
        CancelledError: CANCELLED.
        StoreError, BusyError: where the store cannot be read at all.
    """
    report, stop = Report(deep), Stop(cancelled)
    report.findings.extend(_check_index(opened))
    wanted = _entry_ids(opened, entry_ids)
    for entry_id in wanted:
        stop.checkpoint()
        report.findings.extend(_check_entry(opened, entry_id, deep=deep))
        report.entries += 1
    _check_objects(opened, None if entry_ids is None else wanted, report, stop, progress)
    _check_receipts(opened, None if entry_ids is None else wanted, report)
    if entry_ids is None:
        report.findings.extend(find_leftovers(opened))
    opened.verified.flush()
    return report


def _check_index(opened: Opened) -> list[Finding]:
    """SQLite's own check of the file and of references between tables, and what the prefix tree offers."""
    with opened.index.read() as connection:
        found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check(20)") if row[0] != "ok"]
        dangling = connection.exec_driver_sql("PRAGMA foreign_key_check")
        found += [f"a row of {row[0]} refers to nothing" for row in dangling]
        if not found:
            found += check_offers(connection)
        if connection.exec_driver_sql("SELECT 1 FROM annotations WHERE NOT json_valid(value)").first():
            found.append("an annotation is not JSON")
    return [Finding.make("STORE_CORRUPT", opened.paths.index.name, message) for message in found]


def _entry_ids(opened: Opened, entry_ids: Iterable[Digest] | None) -> list[Digest]:
    with opened.index.read() as connection:
        if entry_ids is None:
            return list(connection.execute(sa.select(entries.c.entry_id).order_by(entries.c.entry_key)).scalars())
        wanted = list(dict.fromkeys(entry_ids))
        for entry_id in wanted:
            entry_key(connection, entry_id)
        return wanted


def _check_entry(opened: Opened, entry_id: Digest, *, deep: bool) -> list[Finding]:
    try:
        manifest = read_manifest(opened, entry_id)
        findings = _compare(opened, manifest)
        if deep:
            read_token_ids(opened, manifest)
    except KVStoreError as error:
        if error.code == "NOT_FOUND":
            # Removed since the list was made.
            return []
        return [Finding.of_error(error, entry_id, (entry_id,))]
    return findings


def _compare(opened: Opened, manifest: Manifest) -> list[Finding]:
    """The entry's rows against its manifest."""
    expected: dict[str, Any] = {
        "model_digest": manifest.model.digest, "namespace": manifest.namespace, "token_count": manifest.token_count,
        "lowest_cut": manifest.lowest_cut, "signature": entry_signature_digest(manifest),
        "method": manifest.method_name, "prefix_digest": manifest.prefix.digest,
    }  # fmt: skip
    needed = {ref.digest for ref in manifest.all_payloads()}
    with opened.index.read() as connection:
        row = connection.execute(entries.select().where(entries.c.entry_id == manifest.entry_id)).mappings().first()
        held = {location.name.payload for location in locations_of_entry(connection, manifest.entry_id)[0]}
        misplaced = check_place(connection, manifest)
    if row is None:
        return []
    wrong = [name for name, value in expected.items() if row[name] != value]
    wrong += ["refs"] if held != needed else []
    messages = [*(f"{name} is not what the manifest says" for name in wrong), *misplaced]
    return [
        Finding.make("INDEX_MISMATCH", manifest.entry_id, message, (manifest.entry_id,)) for message in messages
    ]


class _Item(NamedTuple):
    """One row to be checked."""

    object_key: int
    namespace: str
    payload: Digest
    raw_size: int
    stored_size: int


def _check_objects(
    opened: Opened, wanted: Sequence[Digest] | None, report: Report, stop: Stop,
    progress: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    items = _items(opened, wanted)
    total, done = sum(item.stored_size for item in items), 0

    def work(item: _Item) -> tuple[int, KVStoreError | None]:
        try:
            ref = PayloadRef(item.payload, item.raw_size)
            return check_object(opened, ref, item.namespace, deep=report.deep), None
        except KVStoreError as error:
            return 0, error

    with closing(map_parallel(work, items, stop=stop)) as results:
        for item, (size, error) in zip(items, results, strict=True):
            report.objects += 1
            report.bytes_read += size
            done += item.stored_size
            if error is not None:
                report.findings.extend(_still_wrong(opened, item, error))
            if progress is not None:
                progress(done, total)


def _items(opened: Opened, wanted: Sequence[Digest] | None) -> list[_Item]:
    columns = (
        objects.c.object_key, objects.c.namespace, objects.c.payload, objects.c.raw_size, objects.c.stored_size
    )  # fmt: skip
    query = sa.select(*columns).where(objects.c.state != DOOMED).order_by(objects.c.object_key)
    with opened.index.read() as connection:
        if wanted is None:
            return [_Item(*row) for row in connection.execute(query)]
        needed = sa.select(refs.c.object_key).join(entries, entries.c.entry_key == refs.c.entry_key)
        found: dict[int, _Item] = {}
        for part in batches(wanted):
            rows = connection.execute(query.where(objects.c.object_key.in_(needed.where(entries.c.entry_id.in_(part)))))
            found.update((row.object_key, _Item(*row)) for row in rows)
    return list(found.values())


def _still_wrong(opened: Opened, item: _Item, error: KVStoreError) -> list[Finding]:
    """The finding, unless the object has been removed or replaced since, with the entries that it harms."""
    query = sa.select(entries.c.entry_id).join(refs, refs.c.entry_key == entries.c.entry_key)
    with opened.index.read() as connection:
        state = connection.execute(sa.select(objects.c.state).where(objects.c.object_key == item.object_key)).scalar()
        harmed = connection.execute(query.where(refs.c.object_key == item.object_key)).scalars().all()
    if state is None or state == DOOMED:
        return []
    return [Finding.of_error(error, item.payload, tuple(harmed))]


def _check_receipts(opened: Opened, wanted: Sequence[Digest] | None, report: Report) -> None:
    query = sa.select(receipts.c.digest, receipts.c.subject)
    with opened.index.read() as connection:
        if wanted is None:
            rows = connection.execute(query).all()
        else:
            rows = [
                row for part in batches(wanted)
                for row in connection.execute(query.where(receipts.c.subject.in_(part)))
            ]  # fmt: skip
    for digest, _ in rows:
        report.receipts += 1
        report.findings.extend(_check_receipt(opened, digest))


def _check_receipt(opened: Opened, digest: Digest) -> list[Finding]:
    data = opened.receipts.read(digest, MAX_RECEIPT_BYTES)
    path = opened.receipts.relative(digest)
    if data is None:
        with opened.index.read() as connection:
            there = connection.execute(receipts.select().where(receipts.c.digest == digest)).first()
        return [] if there is None else [Finding.make("RECEIPT_MISSING", path, "a receipt's file is not there")]
    try:
        if sha256_digest(data) == digest:
            parse_receipt(data)
            return []
    except KVStoreError as error:
        return [Finding.make("RECEIPT_CORRUPT", path, error.message)]
    return [Finding.make("RECEIPT_CORRUPT", path, "a receipt's bytes do not have the digest of its name")]

"""Entries as the index knows them: lists, labels, annotations, receipts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.json import Json, canonical_bytes
from kvstore.format.receipt import Receipt, parse_receipt
from kvstore.limits import MAX_NAME_CHARS, MAX_RECEIPT_BYTES
from kvstore.store.clock import now_micros
from kvstore.store.index import once
from kvstore.store.locations import batches
from kvstore.store.naming import entry_key, parse_label
from kvstore.store.opening import Opened
from kvstore.store.prepared import Prepared
from kvstore.store.schema import entries, labels, notes, objects, receipts, refs

__all__ = [
    "EntryInfo", "add_notes", "add_receipt", "annotate_entry", "check_annotation", "check_annotations", "entry_infos",
    "label_entry", "read_receipts", "remove_label", "touch",
]  # fmt: skip

_ADD_NOTE: Final = Prepared(notes.insert())
_USED: Final = sa.select(entries.c.accessed_at).where(entries.c.entry_id == sa.bindparam("entry"))
_USE: Final = (
    entries.update().where(entries.c.entry_id == sa.bindparam("entry")).values(accessed_at=sa.bindparam("now"))
)
_TOUCH_EVERY: Final = 3600 * 1_000_000
"""Microseconds: access times are coarse, so that readers seldom write."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry in a list.

    Attributes:
        raw_bytes: Of all its payloads.
        stored_bytes: Of all its objects, shared ones counted in full.
        created_at, accessed_at: Microseconds since 1970, UTC; access is coarse.
        damaged: Whether an object or the manifest was found wrong or missing.
    """

    entry_id: Digest
    model_digest: Digest
    namespace: str
    token_count: int
    lowest_cut: int
    signature: Digest
    method: str | None
    prefix_digest: Digest
    raw_bytes: int
    stored_bytes: int
    created_at: int
    accessed_at: int
    pinned: bool
    damaged: bool
    labels: tuple[str, ...]
    annotations: Mapping[str, Json]

    def to_json(self) -> dict[str, Json]:
        """The JSON object; times as microseconds."""
        return {
            "accessed_at": self.accessed_at, "annotations": dict(self.annotations), "created_at": self.created_at,
            "damaged": self.damaged, "entry_id": self.entry_id, "labels": list(self.labels),
            "lowest_cut": self.lowest_cut, "method": self.method, "model_digest": self.model_digest,
            "namespace": self.namespace, "pinned": self.pinned, "prefix_digest": self.prefix_digest,
            "raw_bytes": self.raw_bytes, "signature": self.signature, "stored_bytes": self.stored_bytes,
            "token_count": self.token_count,
        }  # fmt: skip


def entry_infos(
    connection: sa.Connection, *, entry_ids: Iterable[Digest] | None = None, model: Digest | None = None,
    namespace: str | None = None, limit: int | None = None,
) -> list[EntryInfo]:  # fmt: skip
    """Entries by the time when they were made or used last, newest first.

    Args:
        entry_ids: Only these; unknown ones are passed over.
        model: Only entries of this model digest.
        namespace: Only entries in this namespace.
        limit: At most so many.
    """
    query = sa.select(entries).order_by(entries.c.accessed_at.desc(), entries.c.entry_key.desc()).limit(limit)
    if model is not None:
        query = query.where(entries.c.model_digest == model)
    if namespace is not None:
        query = query.where(entries.c.namespace == namespace)
    if entry_ids is None:
        rows = list(connection.execute(query))
    else:
        rows = [
            row for part in batches(list(entry_ids))
            for row in connection.execute(query.where(entries.c.entry_id.in_(part)))
        ]  # fmt: skip
    return _with_details(connection, rows)


def _with_details(connection: sa.Connection, rows: list[sa.Row[Any]]) -> list[EntryInfo]:
    stored: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    facts: dict[int, dict[str, Json]] = {}
    for part in batches([row.entry_key for row in rows]):
        sizes = sa.select(refs.c.entry_key, sa.func.sum(objects.c.stored_size)).join(
            objects, objects.c.object_key == refs.c.object_key
        ).where(refs.c.entry_key.in_(part)).group_by(refs.c.entry_key)  # fmt: skip
        stored.update((key, int(size)) for key, size in connection.execute(sizes))
        query = sa.select(labels.c.entry_key, labels.c.name).where(labels.c.entry_key.in_(part))
        for key, name in connection.execute(query.order_by(labels.c.name)):
            names.setdefault(key, []).append(name)
        for key, name, value in connection.execute(notes.select().where(notes.c.entry_key.in_(part))):
            with suppress(ValueError, TypeError, RecursionError):
                # Written as JSON; what somebody else has made of a row must not hide the entry.
                facts.setdefault(key, {})[name] = json.loads(value)
    return [
        EntryInfo(
            entry_id=row.entry_id, model_digest=row.model_digest, namespace=row.namespace,
            token_count=row.token_count, lowest_cut=row.lowest_cut, signature=row.signature, method=row.method,
            prefix_digest=row.prefix_digest, raw_bytes=row.raw_bytes, stored_bytes=stored.get(row.entry_key, 0),
            created_at=row.created_at, accessed_at=row.accessed_at, pinned=bool(row.pinned),
            damaged=bool(row.damaged), labels=tuple(names.get(row.entry_key, ())),
            annotations=facts.get(row.entry_key, {}),
        )
        for row in rows
    ]  # fmt: skip


def label_entry(connection: sa.Connection, name: str, entry_id: Digest, now: int) -> None:
    """Let a label mean this entry; it may have meant another. Raises LABEL_INVALID, NOT_FOUND."""
    key = entry_key(connection, entry_id)
    connection.execute(labels.delete().where(labels.c.name == parse_label(name)))
    connection.execute(labels.insert().values(name=name, entry_key=key, set_at=now))


def remove_label(connection: sa.Connection, name: str) -> None:
    """Forget a label. Raises NOT_FOUND."""
    if not connection.execute(labels.delete().where(labels.c.name == name)).rowcount:
        raise fail("NOT_FOUND", f"there is no label {name!r}", ref=name)


def annotate_entry(connection: sa.Connection, entry_id: Digest, facts: Mapping[str, Json]) -> None:
    """Set annotations by name; None removes one.

    Raises:
        NotFoundError: NOT_FOUND.
        UsageError, InvalidError: as :func:`check_annotations`.
    """
    check_annotations(facts)
    if not facts:
        return
    key = entry_key(connection, entry_id)
    for name in sorted(facts):
        connection.execute(notes.delete().where(notes.c.entry_key == key, notes.c.name == name))
    add_notes(connection, key, facts)


def add_notes(connection: sa.Connection, key: int, facts: Mapping[str, Json]) -> None:
    """Give an entry annotations that it does not have; raises as :func:`annotate_entry`."""
    texts = {name: check_annotation(name, value) for name, value in sorted(facts.items())}
    for name, text in texts.items():
        if facts[name] is not None:
            _ADD_NOTE(connection, entry_key=key, name=name, value=text)


def check_annotations(facts: Mapping[str, Json]) -> None:
    """Refuse facts that are no annotations, before anything is done for them.

    Raises:
        UsageError: USAGE for what is not JSON, as a name that is no text.
        InvalidError: as :func:`check_annotation`.
    """
    if not isinstance(facts, Mapping) or not all(isinstance(name, str) for name in facts):
        raise fail("USAGE", "annotations", expected="JSON values by names", found=repr(facts)[:80])
    for name, value in facts.items():
        check_annotation(name, value)


def check_annotation(name: str, value: Json) -> str:
    """The value as the index holds it.

    Raises:
        InvalidError: FIELD_RANGE, or JSON_* for a value outside the JSON profile.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise fail("FIELD_RANGE", "an annotation's name", expected=f"1 to {MAX_NAME_CHARS} characters", found=name)
    return canonical_bytes(value).decode()


def touch(opened: Opened, entry_id: Digest) -> None:
    """Note that an entry was used, or put again: once an hour, where nobody else is writing and there is room."""
    now = now_micros()
    (read, last), opened.last_read = opened.last_read, (None, None)
    if read != entry_id:
        with opened.index.read() as connection:
            last = connection.execute(_USED, {"entry": entry_id}).scalar()
    if last is None or now - last < _TOUCH_EVERY or opened.read_only:
        return
    with suppress(KVStoreError), opened.index.write(once()) as connection:
        connection.execute(_USE, {"entry": entry_id, "now": now})


def add_receipt(opened: Opened, receipt: Receipt) -> None:
    """Keep a receipt about an entry, or about something outside the store. Adding it twice changes nothing."""
    with opened.session() as session:
        path = opened.receipts.stage(session, receipt.digest, receipt.data)
        session.sync()
        with opened.index.write() as connection:
            if connection.execute(receipts.select().where(receipts.c.digest == receipt.digest)).first():
                return
            opened.receipts.publish(path, receipt.digest)
            opened.sync(opened.receipts.folders(receipt.digest))
            connection.execute(receipts.insert().values(
                digest=receipt.digest, subject=receipt.subject, type=receipt.type, made_at=receipt.made_at
            ))  # fmt: skip


def read_receipts(opened: Opened, subject: Digest) -> list[Receipt]:
    """The receipts about an entry, oldest first; one whose file is gone or altered is passed over."""
    query = sa.select(receipts.c.digest).where(receipts.c.subject == subject)
    with opened.index.read() as connection:
        digests = connection.execute(query.order_by(receipts.c.made_at, receipts.c.digest)).scalars().all()
    found = ((digest, opened.receipts.read(digest, MAX_RECEIPT_BYTES)) for digest in digests)
    return [parse_receipt(data) for digest, data in found if data is not None and sha256_digest(data) == digest]

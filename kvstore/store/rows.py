"""The rows of one entry: its objects, itself, its references, its place in the tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import sqlalchemy as sa

from kvstore.format.compat import signature, signature_digest
from kvstore.store.locations import Location, batches, find_locations
from kvstore.store.objects import Staged
from kvstore.store.put import Put
from kvstore.store.schema import LIVE, entries, objects, refs
from kvstore.store.tree import add_entry

__all__ = ["Choice", "write_entry", "write_objects"]


@dataclass(slots=True)
class Choice:
    """What becomes of each payload of an entry.

    Attributes:
        used: Live, taken as it is.
        raised: Doomed, made live again.
        published: Written now, with the row that there was, if any.
    """

    used: list[Location] = field(default_factory=list)
    raised: list[Location] = field(default_factory=list)
    published: list[tuple[Staged, Location | None]] = field(default_factory=list)


def write_objects(connection: sa.Connection, put: Put, choice: Choice, now: int) -> list[int]:
    """Write the object rows, in the order of their payloads.

    Args:
        now: Microseconds since 1970, UTC.

    Returns:
        Keys of rows that were there and had no usable file before.
    """
    for part in batches([location.key for location in choice.raised]):
        connection.execute(objects.update().where(objects.c.object_key.in_(part)).values(state=LIVE))
    new, healed, sizes = [], [], {ref.digest: ref.size for ref in put.refs}
    for staged, location in sorted(choice.published, key=lambda pair: pair[0].name):
        values = {"stored": staged.name.stored, "stored_size": staged.size, "state": LIVE, "verified": None}
        if location is None:
            payload = staged.name.payload
            new.append({
                "namespace": put.manifest.namespace, "payload": payload, "raw_size": sizes[payload],
                "created_at": now, **values,
            })  # fmt: skip
        else:
            connection.execute(objects.update().where(objects.c.object_key == location.key).values(values))
            healed.append(location.key)
    if new:
        connection.execute(objects.insert(), new)
    return healed


def write_entry(connection: sa.Connection, put: Put, now: int) -> bool:
    """Write the entry's row, its references and its place in the tree; tells whether it is new."""
    manifest = put.manifest
    if connection.execute(sa.select(entries.c.entry_key).where(entries.c.entry_id == put.entry_id)).first():
        return False
    method = None if manifest.method is None else manifest.method.name
    inserted = connection.execute(entries.insert().values(
        entry_id=put.entry_id, model_digest=manifest.model.digest, namespace=manifest.namespace,
        token_count=manifest.token_count, lowest_cut=manifest.lowest_cut,
        signature=signature_digest(signature(manifest.layers), method), method=method,
        prefix_digest=manifest.prefix.digest, raw_bytes=put.raw_bytes, created_at=now, accessed_at=now,
    ))  # fmt: skip
    (key,) = inserted.inserted_primary_key or (None,)
    known = find_locations(connection, manifest.namespace, [ref.digest for ref in put.refs])
    connection.execute(
        refs.insert(), [{"entry_key": key, "object_key": known[ref.digest].key} for ref in put.refs]
    )
    add_entry(connection, entry_id=put.entry_id, ids=put.token_ids, media=manifest.prefix.media)
    return True

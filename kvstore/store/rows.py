"""The rows of one entry: its objects, itself, its references, its place in the tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from kvstore.format.compat import entry_signature_digest
from kvstore.store.locations import Location
from kvstore.store.objects import Staged
from kvstore.store.prepared import Prepared
from kvstore.store.put import Put
from kvstore.store.schema import LIVE, entries, objects, refs
from kvstore.store.tree import Filed, file_entry

__all__ = ["Choice", "write_entry", "write_objects"]


@dataclass(slots=True)
class Choice:
    """What becomes of each payload of an entry.

    Attributes:
        used: Live, taken as it is.
        raised: Doomed, made live again.
        published: Written now, with the row that there was, if any.
        resized: Whether rows of the used or raised ones state another size than their files have.
    """

    used: list[Location] = field(default_factory=list)
    raised: list[Location] = field(default_factory=list)
    published: list[tuple[Staged, Location | None]] = field(default_factory=list)
    resized: bool = False


_ADD_OBJECT: Final = Prepared(objects.insert().returning(objects.c.object_key))
_RAISE: Final = objects.update().where(objects.c.object_key == sa.bindparam("key")).values(state=LIVE)
_RESIZE: Final = objects.update().where(objects.c.object_key == sa.bindparam("key")).values(
    stored_size=sa.bindparam("size")
)  # fmt: skip
_REPLACE: Final = objects.update().where(objects.c.object_key == sa.bindparam("key")).values(
    stored=sa.bindparam("to"), stored_size=sa.bindparam("size"), state=LIVE, verified=None
)  # fmt: skip
_THERE: Final = Prepared(sa.select(entries.c.entry_key).where(entries.c.entry_id == sa.bindparam("entry_id")))
_ADD_ENTRY: Final = Prepared(entries.insert().returning(entries.c.entry_key))
_ADD_REF: Final = Prepared(refs.insert())


def write_objects(connection: sa.Connection, put: Put, choice: Choice, now: int) -> tuple[list[int], list[int]]:
    """Write the object rows, in the order of their payloads.

    Args:
        now: Microseconds since 1970, UTC.

    Returns:
        Keys of all the entry's objects, and of those whose row was there without a usable file.
    """
    sizes = {ref.digest: ref.size for ref in put.refs}
    published = sorted(choice.published, key=lambda pair: pair[0].name)
    new = [
        {
            "namespace": put.manifest.namespace, "payload": staged.name.payload, "stored": staged.name.stored,
            "raw_size": sizes[staged.name.payload], "stored_size": staged.size, "state": LIVE, "verified": None,
            "created_at": now,
        }
        for staged, location in published if location is None
    ]  # fmt: skip
    healed = [
        {"key": location.key, "to": staged.name.stored, "size": staged.size}
        for staged, location in published if location is not None
    ]  # fmt: skip
    kept = (*choice.used, *choice.raised)
    keys = [location.key for location in kept]
    if choice.resized:
        connection.execute(_RESIZE, [{"key": location.key, "size": location.stored_size} for location in kept])
    if choice.raised:
        connection.execute(_RAISE, [{"key": location.key} for location in choice.raised])
    if healed:
        connection.execute(_REPLACE, healed)
    for row in new:
        keys += _ADD_OBJECT(connection, **row)[0]
    again = [location.key for _, location in published if location is not None]
    return keys + again, again


def write_entry(connection: sa.Connection, put: Put, object_keys: list[int], now: int) -> int | None:
    """Write the entry's row, its references and its place in the tree; gives its key, or None where it is not new."""
    manifest = put.manifest
    if _THERE(connection, entry_id=put.entry_id):
        return None
    method, shape = manifest.method_name, entry_signature_digest(manifest)
    ((key,),) = _ADD_ENTRY(
        connection, entry_id=put.entry_id, model_digest=manifest.model.digest, namespace=manifest.namespace,
        token_count=manifest.token_count, lowest_cut=manifest.lowest_cut, signature=shape, method=method,
        prefix_digest=manifest.prefix.digest, raw_bytes=put.raw_bytes, created_at=now, accessed_at=now,
    )  # fmt: skip
    for object_key in sorted(object_keys):
        _ADD_REF(connection, entry_key=key, object_key=object_key)
    filed = Filed(key, manifest.model.digest, manifest.namespace, manifest.lowest_cut, shape, method)
    file_entry(connection, filed, put.token_ids, manifest.prefix.media)
    return int(key)

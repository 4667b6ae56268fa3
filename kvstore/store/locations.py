"""Where payloads lie: rows of the object table, remembered while that is safe.

A remembered location can only be out of date, never wrong: what stands under an
object's name is what the name says, or nothing. A reader that finds nothing asks the
index again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from kvstore.format.digest import Digest
from kvstore.store.objects import ObjectName
from kvstore.store.prepared import Prepared
from kvstore.store.schema import LIVE, entries, objects, refs

__all__ = ["Location", "Locations", "batches", "find_locations", "locations_of_entry"]

_BATCH: Final = 500
_MOST: Final = 200_000


T = TypeVar("T")


def batches(items: Sequence[T], size: int = _BATCH) -> Iterator[Sequence[T]]:
    """Slices of at most ``size``: a statement has a limited number of parameters."""
    return (items[at : at + size] for at in range(0, len(items), size))


@dataclass(frozen=True, slots=True)
class Location:
    """One row of the object table."""

    key: int
    name: ObjectName
    raw_size: int
    stored_size: int
    state: str
    verified: str | None


class Locations:
    """A bounded memory of locations by namespace and payload."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[tuple[str, Digest], Location] = {}

    def get(self, namespace: str, payload: Digest) -> Location | None:
        """The remembered location."""
        return self._known.get((namespace, payload))

    def put(self, namespace: str, found: Iterable[Location]) -> None:
        """Remember live locations."""
        if len(self._known) > _MOST:
            self._known.clear()
        self._known.update({(namespace, item.name.payload): item for item in found if item.state == LIVE})

    def forget(self, namespace: str, payload: Digest) -> None:
        """Forget one."""
        self._known.pop((namespace, payload), None)


_COLUMNS: Final = (
    objects.c.object_key, objects.c.payload, objects.c.stored, objects.c.raw_size, objects.c.stored_size,
    objects.c.state, objects.c.verified,
)  # fmt: skip


_FIND: Final = Prepared(
    sa.select(*_COLUMNS).where(
        objects.c.namespace == sa.bindparam("namespace"), objects.c.payload == sa.bindparam("payload")
    )
)
_OF_ENTRY: Final = Prepared(
    sa.select(*_COLUMNS, entries.c.accessed_at)
    .select_from(objects.join(refs, refs.c.object_key == objects.c.object_key))
    .join(entries, entries.c.entry_key == refs.c.entry_key)
    .where(entries.c.entry_id == sa.bindparam("entry_id"))
)


def find_locations(
    connection: sa.Connection, namespace: str, payloads: Iterable[Digest]
) -> dict[Digest, Location]:
    """The rows of these payloads, whatever their state."""
    rows = {item: _FIND.first(connection, namespace=namespace, payload=item) for item in sorted(set(payloads))}
    return {item: _location(row) for item, row in rows.items() if row is not None}


def locations_of_entry(connection: sa.Connection, entry_id: Digest) -> tuple[list[Location], int | None]:
    """The rows of every object that an entry refers to; when the entry was used, or None where no row is found."""
    rows = _OF_ENTRY(connection, entry_id=entry_id)
    return [_location(row[:-1]) for row in rows], rows[0][-1] if rows else None


def _location(row: Sequence[Any]) -> Location:
    key, payload, stored, raw_size, stored_size, state, verified = row
    return Location(key, ObjectName(payload, stored), raw_size, stored_size, state, verified)

"""Leases: an entry that somebody is working from is not removed under them.

A lease is a row that names an entry, a time, and an owner: a locked session in ``tmp/``,
named by boot, process and random, as every operation has one for its files. It holds
while its time has not passed *and* the session's lock is held. The kernel drops that
lock with the process, so what a killed process leased is free at once, whatever process
ids other containers see; the time bounds the rest (a process that hangs, a forked child
that keeps the descriptor, a file system without locks).

Removal by name and collection ask :func:`holders` under the write lock. A lease is no
part of any promise about bytes: without one a load still fails whole, and a put encodes
again what has gone. So its commits need not survive a power cut, which nobody's lease
does, and are not flushed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

import sqlalchemy as sa

from kvstore.errors import KVStoreError, NotFoundError, fail
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.store.clock import micros_text, now_micros
from kvstore.store.index import once
from kvstore.store.locations import batches
from kvstore.store.opening import Opened
from kvstore.store.schema import BigKey, entries, leases
from kvstore.store.temp import Session, is_live

__all__ = [
    "LEASE_SECONDS", "Holder", "Lease", "count_stale", "drop_stale", "holders", "refreshing", "refuse_leased",
    "take_lease", "while_leased",
]  # fmt: skip

LEASE_SECONDS: Final = 600.0
"""How long a lease holds if nobody renews it."""
_LONGEST: Final = 7 * 86400.0
_MICROS: Final = 1_000_000
_OWNER: Final = re.compile(r"[0-9A-Za-z]{1,16}-([0-9]{1,19})-[0-9a-f]{16}", re.ASCII)
"""Boot, process and random, as :class:`kvstore.store.temp.Session` names its directory."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A lease as others see it; times are microseconds since 1970, UTC.

    Attributes:
        pid: The owner's process id, as it is called where it runs.
    """

    entry_id: Digest
    pid: int
    taken_at: int
    expires_at: int

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "entry_id": self.entry_id, "expires_at": micros_text(self.expires_at), "pid": self.pid,
            "taken_at": micros_text(self.taken_at),
        }  # fmt: skip

    @property
    def message(self) -> str:
        """In words."""
        return f"entry {self.entry_id} is in use by process {self.pid}, at most until {micros_text(self.expires_at)}"


class Lease:
    """One held lease; a context manager that releases it. May be used from several threads."""

    def __init__(self, opened: Opened, entry_id: Digest, session: Session, seconds: float, expires_at: int) -> None:
        """Hold what :func:`take_lease` has taken."""
        self.entry_id = entry_id
        self.seconds = seconds
        self.expires_at = expires_at
        self._opened = opened
        self._session: Session | None = session
        self._half = time.monotonic() + seconds / 2
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Let its time begin anew, also where it had passed.

        Raises:
            NotFoundError: NOT_FOUND where the entry was removed by force, or after the time had passed.
            UsageError: USAGE after the release.
            StoreError, SpaceError, BusyError: of the store.
        """
        with self._lock:
            if self._session is None:
                raise fail("USAGE", f"the lease of entry {self.entry_id} was released", fix="Take another.")
            self.expires_at = _write(self._opened, self.entry_id, self._session, self.seconds, (_EXTEND, _INSERT))
            self._half = time.monotonic() + self.seconds / 2

    def refresh(self) -> None:
        """Renew it where half of its time has passed; never fails, and costs nothing before that."""
        if time.monotonic() >= self._half:
            with suppress(KVStoreError):
                self.renew()

    def release(self) -> None:
        """Give it up; never fails, and does nothing the second time."""
        with self._lock:
            session, self._session = self._session, None
        if session is None:
            return
        try:
            # A row that cannot be deleted now means nothing without its session, and goes with the next sweep.
            with suppress(KVStoreError), self._opened.index.write(once(), durable=False) as connection:
                connection.execute(_DELETE, {"who": session.path.name, "now": now_micros()})
        finally:
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def take_lease(
    opened: Opened, entry_id: Digest, *, seconds: float = LEASE_SECONDS, patient: bool = True
) -> Lease:
    """Protect an entry from removal, for a time that can be renewed.

    Args:
        seconds: How long it holds, if it is neither renewed nor released.
        patient: Wait for other writers as long as a put does; otherwise half a second at most.

    Raises:
        NotFoundError: NOT_FOUND.
        UsageError: USAGE for a time that is none.
        StoreError, SpaceError, BusyError: of the store; STORE_READ_ONLY where nothing can be written.
    """
    if not 0 < seconds <= _LONGEST:
        raise fail("USAGE", "the seconds of a lease", expected=f"more than 0, at most {_LONGEST:.0f}", found=seconds)
    opened.index.refuse_read_only()
    session = opened.session()
    try:
        until = _write(opened, entry_id, session, seconds, (_INSERT,), patient=patient)
        return Lease(opened, entry_id, session, seconds, until)
    except BaseException:
        session.close()
        raise


@contextmanager
def while_leased(opened: Opened, entry_id: Digest) -> Iterator[Lease | None]:
    """The body under a lease if one can be had at once: not in a store that is read-only, full or busy.

    Raises:
        NotFoundError: NOT_FOUND.
    """
    lease = None
    try:
        lease = take_lease(opened, entry_id, patient=False)
    except NotFoundError:
        raise
    except KVStoreError:
        pass
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


def refreshing(lease: Lease | None, progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """A progress function that keeps a lease alive beside whatever else it does."""

    def report(done: int, total: int) -> None:
        if lease is not None:
            lease.refresh()
        if progress is not None:
            progress(done, total)

    return report


def holders(opened: Opened, connection: sa.Connection, keys: Iterable[int] | None = None) -> list[Holder]:
    """The leases that hold now, the one that ends first first; of these entries, by key, or of all."""
    query = _HELD.where(leases.c.expires_at > now_micros())
    parts = [query] if keys is None else [query.where(leases.c.entry_key.in_(part)) for part in batches(list(keys))]
    rows = [row for part in parts for row in connection.execute(part) if _lives(opened, row.owner)]
    found = [Holder(row.entry_id, _pid(row.owner), row.taken_at, row.expires_at) for row in rows]
    return sorted(found, key=lambda holder: (holder.expires_at, holder.entry_id))


def refuse_leased(opened: Opened, connection: sa.Connection, keys: Iterable[int]) -> None:
    """Refuse to go on where one of these entries is leased; call it under the write lock.

    Raises:
        BusyError: ENTRY_LEASED.
    """
    held = holders(opened, connection, keys)
    if held:
        others = f", and {len(held) - 1} more" if len(held) > 1 else ""
        raise fail(
            "ENTRY_LEASED", held[-1].message + others, fix="Try again when it has ended, or remove it by force.",
            leases=[holder.to_json() for holder in held],
        )  # fmt: skip


def drop_stale(opened: Opened, connection: sa.Connection) -> int:
    """Delete the rows of leases that hold no more; gives their number. Call it under the write lock."""
    stale = _stale(opened, connection)
    for part in batches(stale):
        connection.execute(leases.delete().where(leases.c.owner.in_(part)))
    return len(stale)


def count_stale(opened: Opened, connection: sa.Connection) -> int:
    """Rows of leases that hold no more."""
    return len(_stale(opened, connection))


def _stale(opened: Opened, connection: sa.Connection) -> list[str]:
    rows, now = connection.execute(sa.select(leases.c.owner, leases.c.expires_at)).all(), now_micros()
    return [row.owner for row in rows if row.expires_at <= now or not _lives(opened, row.owner)]


def _write(
    opened: Opened, entry_id: Digest, session: Session, seconds: float, ways: Sequence[sa.Executable], *,
    patient: bool = True,
) -> int:  # fmt: skip
    """Write the row of a session's lease in the first way that finds one to write; gives its end."""
    now = now_micros()
    until = now + int(seconds * _MICROS)
    values = {"who": session.path.name, "entry": entry_id, "now": now, "until": until}
    with opened.index.write(None if patient else once(), durable=False) as connection:
        if any(connection.execute(way, values).rowcount for way in ways):
            return until
    raise fail("NOT_FOUND", f"there is no entry {entry_id}", ref=entry_id)


def _lives(opened: Opened, owner: str) -> bool:
    # A row that somebody has edited must not lead out of the store.
    return _OWNER.fullmatch(owner) is not None and is_live(opened.paths.tmp / owner)


def _pid(owner: str) -> int:
    found = _OWNER.fullmatch(owner)
    return 0 if found is None else int(found[1])


_HELD: Final = sa.select(entries.c.entry_id, leases.c.owner, leases.c.taken_at, leases.c.expires_at).join(
    leases, leases.c.entry_key == entries.c.entry_key
)
_NEW: Final = sa.select(
    sa.bindparam("who", type_=sa.Text), entries.c.entry_key, sa.bindparam("now", type_=BigKey),
    sa.bindparam("until", type_=BigKey),
).where(entries.c.entry_id == sa.bindparam("entry"))  # fmt: skip
_INSERT: Final = leases.insert().from_select(["owner", "entry_key", "taken_at", "expires_at"], _NEW)
_EXTEND: Final = (
    leases.update().where(leases.c.owner == sa.bindparam("who")).values(expires_at=sa.bindparam("until"))
)
_DELETE: Final = leases.delete().where(
    sa.or_(leases.c.expires_at <= sa.bindparam("now"), leases.c.owner == sa.bindparam("who"))
)

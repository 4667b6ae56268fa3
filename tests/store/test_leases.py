"""Leases: what is leased is not removed, and what a killed process leased is free at once."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from kvstore.errors import BusyError, KVStoreError
from kvstore.store.entry_store import EntryStore
from kvstore.store.leases import drop_stale
from kvstore.store.rebuild import rebuild_index
from kvstore.store.schema import leases
from kvstore.store.sqlite_file import SCHEMA_VERSION, make_file
from tests.builders import make_entry
from tests.store.kit import ROOT, clean, code_of, put, read_back

MADE, OTHER = make_entry(1, 300), make_entry(2, 300)

HOLDER = """
import sys
from kvstore.store.entry_store import EntryStore
with EntryStore.open(sys.argv[1]) as store:
    lease = store.lease(sys.argv[2])
    print("held", flush=True)
    sys.stdin.readline()
    lease.release()
    print("released", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(tmp_path: Path) -> EntryStore:
    store = EntryStore.open(tmp_path)
    put(store, MADE)
    put(store, OTHER)
    return store


def holder(root: Path, entry_id: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root), entry_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def rows(store: EntryStore) -> int:
    with store._opened.index.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(leases)).scalar_one())


def test_what_is_leased_is_not_removed_and_neither_is_anything_with_it(store: EntryStore) -> None:
    with store.lease(MADE.entry_id) as lease:
        with pytest.raises(BusyError) as refused:
            store.remove([OTHER.entry_id, MADE.entry_id])
        assert (refused.value.code, refused.value.exit_code) == ("ENTRY_LEASED", 8)
        assert refused.value.detail["leases"] == [holder.to_json() for holder in store.holders()]
        assert f"process {os.getpid()}" in refused.value.message
        assert len(store.entries()) == 2
        (held,) = store.holders([MADE.entry_id])
        assert (held.entry_id, held.pid, held.expires_at) == (MADE.entry_id, os.getpid(), lease.expires_at)
        assert store.holders([OTHER.entry_id]) == []
        assert store.stats().leases == 1
        store.remove([OTHER.entry_id])
    assert store.holders() == []
    assert store.remove([MADE.entry_id]).entries == 1
    clean(store)


def test_two_leases_of_one_entry_hold_until_the_last_is_released(store: EntryStore) -> None:
    first, second = store.lease(MADE.entry_id), store.lease(MADE.entry_id)
    first.release()
    first.release()
    assert code_of(store.remove, [MADE.entry_id]) == "ENTRY_LEASED"
    assert code_of(first.renew) == "USAGE"
    second.release()
    store.remove([MADE.entry_id])


def test_force_removes_it_and_the_owner_hears_of_it(store: EntryStore) -> None:
    with store.lease(MADE.entry_id) as lease:
        store.remove([MADE.entry_id], force=True)
        assert code_of(lease.renew) == "NOT_FOUND"
        lease.refresh()
        assert store.holders() == []
        put(store, MADE)
        assert store.holders() == []
        lease.renew()
        assert code_of(store.remove, [MADE.entry_id]) == "ENTRY_LEASED"
    clean(store)


def test_time_ends_a_lease_and_a_renewal_begins_it_anew(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_800_000_000_000_000]
    monkeypatch.setattr("kvstore.store.leases.now_micros", lambda: now[0])
    lease = store.lease(MADE.entry_id, seconds=10)
    now[0] += 9_999_999
    assert len(store.holders()) == 1
    now[0] += 1
    assert store.holders() == []
    lease.renew()
    assert [held.expires_at for held in store.holders()] == [now[0] + 10_000_000]
    now[0] += 10_000_000
    store.lease(OTHER.entry_id, seconds=10).release()
    assert rows(store) == 0, "whoever releases a lease sweeps those whose time has passed"
    lease.renew()
    assert code_of(store.remove, [MADE.entry_id]) == "ENTRY_LEASED"
    now[0] += 10_000_000
    store.remove([MADE.entry_id])
    lease.release()
    assert not list((store.root / "tmp").iterdir())


def test_refresh_writes_only_after_half_of_the_time(store: EntryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.lease(MADE.entry_id, seconds=100) as lease:
        until = lease.expires_at
        lease.refresh()
        assert lease.expires_at == until
        monkeypatch.setattr(lease, "_half", 0.0)
        lease.refresh()
        assert lease.expires_at > until
        assert store.holders()[0].expires_at == lease.expires_at


def test_a_killed_owner_holds_nothing(store: EntryStore) -> None:
    process = holder(store.root, MADE.entry_id)
    assert code_of(store.remove, [MADE.entry_id]) == "ENTRY_LEASED"
    assert [held.pid for held in store.holders()] == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert store.holders() == []
    assert rows(store) == 1
    found = store.verify()
    assert found.ok
    assert "LEASE_LEFT" in {finding.code for finding in found.findings}
    store.remove([MADE.entry_id])
    assert rows(store) == 0


def test_an_owner_that_releases_holds_nothing_though_it_lives(store: EntryStore) -> None:
    process = holder(store.root, MADE.entry_id)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "released\n"
    store.remove([MADE.entry_id])
    process.communicate("\n")
    assert process.returncode == 0


def test_a_lease_outlives_a_rebuild_of_the_index_and_that_of_a_dead_owner_does_not_count(store: EntryStore) -> None:
    process = holder(store.root, MADE.entry_id)
    try:
        with store.lease(OTHER.entry_id) as mine:
            (store.root / "manifests" / MADE.entry_id[7:9] / f"{MADE.entry_id[7:]}.json").rename(store.root / "away")
            rebuild_index(store.root)
            assert [held.entry_id for held in store.holders()] == [OTHER.entry_id], "its entry was left out"
            assert code_of(store.remove, [OTHER.entry_id]) == "ENTRY_LEASED"
            mine.renew()
            process.send_signal(signal.SIGKILL)
            process.communicate()
            rebuild_index(store.root)
            assert [held.pid for held in store.holders()] == [os.getpid()]
        store.remove([OTHER.entry_id])
    finally:
        process.kill()
        process.communicate()


def test_no_lease_of_what_is_not_there_or_for_no_time(store: EntryStore) -> None:
    store.remove([OTHER.entry_id])
    assert code_of(store.lease, OTHER.entry_id) == "NOT_FOUND"
    with pytest.raises(KVStoreError), store.while_leased(OTHER.entry_id):
        pytest.fail("there is nothing to lease")
    for seconds in (0, -1, 1e9, float("nan")):
        assert code_of(store.lease, MADE.entry_id, seconds=seconds) == "USAGE"
    assert not list((store.root / "tmp").iterdir())


def test_where_no_lease_can_be_had_the_work_goes_on_without_one(store: EntryStore) -> None:
    with EntryStore.open(store.root, read_only=True) as reader:
        assert code_of(reader.lease, MADE.entry_id) == "STORE_READ_ONLY"
        with reader.while_leased(MADE.entry_id) as lease:
            assert lease is None
            read_back(reader, MADE)
    held, done = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with EntryStore.open(store.root) as other, other._opened.index.write():
            held.set()
            done.wait()

    thread = threading.Thread(target=hold_the_lock)
    thread.start()
    held.wait()
    with store.while_leased(MADE.entry_id) as lease:
        assert lease is None
        read_back(store, MADE)
    done.set()
    thread.join()
    with store.while_leased(MADE.entry_id) as lease:
        assert lease is not None
    clean(store)


def test_a_row_that_somebody_has_edited_leads_nowhere(store: EntryStore) -> None:
    with store._opened.index.write() as connection:
        key = connection.exec_driver_sql("SELECT min(entry_key) FROM entries").scalar()
        for owner in ("../..", "..", "x", "", f"{'9' * 5000}-1"):
            connection.execute(leases.insert().values(owner=owner, entry_key=key, taken_at=0, expires_at=2**62))
    assert store.holders() == []
    with store._opened.index.write() as connection:
        assert drop_stale(store._opened, connection) == 5


def test_an_index_without_leases_is_brought_up_to_date(tmp_path: Path) -> None:
    """One of the first release: the same tables but for the one that came with version 2."""
    with EntryStore.open(tmp_path) as store:
        put(store, MADE)
    make_file(tmp_path / "fresh", tmp_path / "temporary")
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection:
        connection.executescript("DROP TABLE leases; PRAGMA user_version = 1")
    with EntryStore.open(tmp_path) as store, store.lease(MADE.entry_id):
        assert code_of(store.remove, [MADE.entry_id]) == "ENTRY_LEASED"
    found = [shape(tmp_path / name) for name in ("fresh", "index.sqlite")]
    assert found[0] == found[1]
    assert ("user_version", SCHEMA_VERSION) in found[0]


def shape(path: Path) -> set[tuple[str, object]]:
    with closing(sqlite3.connect(path)) as connection:
        found: set[tuple[str, object]] = {
            (name, "".join(str(sql).split())) for name, sql in connection.execute("SELECT name, sql FROM sqlite_schema")
        }
        return found | {("user_version", connection.execute("PRAGMA user_version").fetchone()[0])}

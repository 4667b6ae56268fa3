"""The index is made by one process at a time, and whoever dies while it is replaced loses nothing."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.store import index_swap, rebuild, sqlite_file
from kvstore.store.config import Paths
from kvstore.store.entry_store import EntryStore
from kvstore.store.fs import publish_new
from kvstore.store.opening import ensure_index
from kvstore.store.rebuild import rebuild_index
from tests.builders import MadeEntry, make_entry
from tests.store.kit import child, clean, code_of, put, read_back


def lose_index(root: Path, *, log: bool = True) -> None:
    for suffix in ("", "-wal", "-shm") if log else ("",):
        Path(f"{root / 'index.sqlite'}{suffix}").unlink(missing_ok=True)


def held(root: Path, *made: MadeEntry) -> None:
    with EntryStore.open(root) as store:
        assert {info.entry_id for info in store.entries()} == {entry.entry_id for entry in made}
        for entry in made:
            read_back(store, entry)
        clean(store)


@pytest.mark.parametrize("lost", [True, False])
def test_a_put_during_a_rebuild_is_in_the_new_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    before, during = make_entry(1, 300), make_entry(2, 300)
    with EntryStore.open(tmp_path) as store:
        put(store, before)
    if lost:
        lose_index(tmp_path)
    filled, go_on, fill = threading.Event(), threading.Event(), rebuild._fill

    def waiting(*args: object) -> object:
        result = fill(*args)  # type: ignore[arg-type]
        # All files have been listed: what comes now is not among them.
        filled.set()
        assert go_on.wait(30)
        return result

    monkeypatch.setattr(rebuild, "_fill", waiting)
    rebuilder = threading.Thread(target=rebuild_index, args=(tmp_path,))
    rebuilder.start()
    assert filled.wait(30)
    monkeypatch.undo()

    def write() -> None:
        with EntryStore.open(tmp_path) as store:
            while True:
                try:
                    put(store, during)
                    return
                except KVStoreError as error:
                    # It may have waited for the lock of the index that was replaced.
                    if error.code != "STORE_BUSY":
                        raise

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.5)
    assert writer.is_alive()
    go_on.set()
    rebuilder.join(30)
    writer.join(30)
    held(tmp_path, before, during)


_DIE = """
import os, sys
from pathlib import Path
from kvstore.store import index_swap
from kvstore.store.rebuild import rebuild_index
left = int(sys.argv[2])
def dying(name, function):
    def call(*args):
        global left
        if not left:
            os._exit(9)
        left -= 1
        return function(*args)
    return call
index_swap.publish_new = dying("publish", index_swap.publish_new)
index_swap.make_dir = dying("make_dir", index_swap.make_dir)
Path.replace = dying("replace", Path.replace)
# A connection that is open keeps the log from being folded in.
import sqlite3
reader = sqlite3.connect(Path(sys.argv[1]) / "index.sqlite")
reader.execute("BEGIN").execute("SELECT count(*) FROM entries").fetchall()
rebuild_index(Path(sys.argv[1]))
"""


def test_whoever_dies_while_the_index_is_replaced_loses_nothing(tmp_path: Path) -> None:
    made, steps = [make_entry(1, 300), make_entry(2, 300)], 0
    while True:
        root = tmp_path / str(steps)
        with EntryStore.open(root) as store:
            for entry in made:
                put(store, entry)
            store.set_label("kept", made[0].entry_id)
            store.annotate(made[1].entry_id, {"note": "mine"})
        status = int(child(
            "import subprocess, sys; print(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)",
            _DIE, root, steps,
        ))  # fmt: skip
        held(root, *made)
        with EntryStore.open(root) as store:
            assert store.labels() == {"kept": made[0].entry_id}
            assert store.info(made[1].entry_id).annotations["note"] == "mine"
        rebuild_index(root)
        assert not list(root.glob("index.sqlite.old*"))
        if status == 0:
            break
        assert status == 9
        steps += 1
    assert steps >= 6


def test_a_log_that_was_left_alone_is_not_taken_for_the_new_files(tmp_path: Path) -> None:
    made = make_entry(1, 300)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
        log = Path(f"{tmp_path / 'index.sqlite'}-wal").read_bytes()
    assert len(log) > 8192
    lose_index(tmp_path)
    for manifest in (tmp_path / "manifests").glob("*/*"):
        manifest.unlink()
    Path(f"{tmp_path / 'index.sqlite'}-wal").write_bytes(log)
    with EntryStore.open(tmp_path) as store:
        assert store.entries() == []
        assert {finding.severity for finding in store.verify().findings} == {"notice"}
        put(store, made)
        clean(store)


_CHURN = """
import sys, time
from pathlib import Path
from kvstore.errors import KVStoreError
from kvstore.store.entry_store import EntryStore
from tests.builders import make_entry
from tests.store.kit import put
root, seed = Path(sys.argv[1]), int(sys.argv[2])
for number in range(6):
    made = make_entry(seed * 100 + number, 64, layers=1)
    while True:
        try:
            with EntryStore.open(root) as store:
                put(store, made)
            break
        except KVStoreError as error:
            # The file can go at any moment of a put: that is an error, never an acknowledged put that is lost.
            if error.code not in ("STORE_BUSY", "STORE_IO", "STORE_UNREADABLE"):
                raise
    print(made.entry_id, flush=True)
    if number % 2 == seed % 2:
        (root / "index.sqlite").unlink(missing_ok=True)
"""


def test_acknowledged_puts_outlive_an_index_that_is_deleted_again_and_again(tmp_path: Path) -> None:
    found: list[str] = []
    workers = [
        threading.Thread(target=lambda seed=seed: found.extend(child(_CHURN, tmp_path, seed).split()))
        for seed in range(1, 5)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 24
    rebuild_index(tmp_path)
    with EntryStore.open(tmp_path) as store:
        assert {info.entry_id for info in store.entries()} == set(found)


def test_who_waits_too_long_is_told_so(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def enter() -> None:
        with index_swap.index_lock(Paths(tmp_path), timeout=0.05):
            pass

    try:
        assert code_of(enter) == "STORE_BUSY"
    finally:
        os.close(fd)
    enter()


@pytest.mark.parametrize("folder", ["manifests", "manifests/{shard}", "objects/{shard}", "receipts"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, folder: str) -> None:
    made = make_entry(1, 300)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
    lose_index(tmp_path)
    above = tmp_path / folder.split("/")[0]
    path = tmp_path / folder.format(shard=next(above.iterdir()).name)
    for place in (tmp_path, *tmp_path.rglob("*")):
        place.chmod(0o777)
    path.chmod(0)
    code = (
        "import sys\nfrom tests.store.kit import code_of\nfrom pathlib import Path\n"
        "from kvstore.store.entry_store import EntryStore\nprint(code_of(EntryStore.open, Path(sys.argv[1])))"
    )
    for place in tmp_path.parents[:-1]:
        place.chmod(0o755)
    assert child(code, tmp_path, unprivileged=True).strip() in ("STORE_UNREADABLE", "STORE_READ_ONLY")
    path.chmod(0o700)
    held(tmp_path, made)


def test_an_index_that_is_there_is_not_made(tmp_path: Path) -> None:
    made = make_entry(1, 300)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
    before = (tmp_path / "index.sqlite").stat().st_ino
    ensure_index(Paths(tmp_path))
    assert (tmp_path / "index.sqlite").stat().st_ino == before


def test_who_opens_a_store_waits_no_longer_than_it_said(tmp_path: Path) -> None:
    with EntryStore.open(tmp_path) as store:
        put(store, make_entry(1, 100))
    lose_index(tmp_path)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        for read_only in (False, True):
            assert code_of(EntryStore.open, tmp_path, read_only=read_only, lock_timeout=0.05) == "STORE_BUSY"
    finally:
        os.close(fd)


def test_readers_wait_while_the_index_is_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is free for a moment then, which is neither damage nor a volume that is gone."""
    made = make_entry(1, 100)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
    seen: list[object] = []

    def opening() -> None:
        with EntryStore.open(tmp_path, read_only=True) as other:
            seen.append(len(other.entries()))

    with EntryStore.open(tmp_path, read_only=True) as held_open:
        readers = [threading.Thread(target=opening), threading.Thread(target=lambda: seen.append(held_open.entries()))]

        def slow(*args: Path) -> bool:
            assert not (tmp_path / "index.sqlite").exists()
            for reader in readers:
                reader.start()
            readers[0].join(0.5)
            assert seen == []
            return publish_new(*args)

        monkeypatch.setattr(index_swap, "publish_new", slow)
        rebuild_index(tmp_path)
        for reader in readers:
            reader.join(30)
    assert len(seen) == 2


_REBUILD = """
import sys
from pathlib import Path
from kvstore.store.rebuild import rebuild_index
rebuild_index(Path(sys.argv[1]))
"""


def test_a_connection_never_has_the_log_of_another_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite opens the log by its name, which an exchange may have given to the new index since the file was opened."""
    made = [make_entry(number, 300, layers=1) for number in range(1, 62)]
    with EntryStore.open(tmp_path) as store:
        for number, entry in enumerate(made[:-1]):
            put(store, entry, label=f"label-{number}")
        # The new index has other pages than the old one.
        store.remove([entry.entry_id for entry in made[:50]])
    exchanged: list[bool] = []
    configure = sqlite_file._configure

    def late(connection: sqlite3.Connection, *, full: bool) -> None:
        # The file is open and its log is not.
        if not exchanged:
            exchanged.append(True)
            child(_REBUILD, tmp_path)
        configure(connection, full=full)

    with EntryStore.open(tmp_path) as store:
        store._opened.index.close()
        monkeypatch.setattr(sqlite_file, "_configure", late)
        put(store, made[-1])
    assert exchanged
    held(tmp_path, *made[50:])
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

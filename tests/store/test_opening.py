"""Opening: what is accepted, made, refused, and what can still be read when nothing can be written."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.store.config import Paths, default_root, open_config
from kvstore.store.entry_store import EntryStore
from kvstore.store.opening import _open_frozen
from kvstore.store.rebuild import rebuild_index
from tests.builders import make_entry
from tests.store.kit import child, clean, code_of, files, put, read_back


def made_store(root: Path, seed: int = 1) -> None:
    with EntryStore.open(root) as store:
        put(store, make_entry(seed, 300))


def change_config(root: Path, **changes: object) -> None:
    path = root / "kvstore.json"
    document = {**json.loads(path.read_bytes()), **changes}
    path.unlink()
    path.write_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def execute(index: Path, *statements: str) -> None:
    connection = sqlite3.connect(index, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_an_absent_or_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    for root in (tmp_path / "a" / "b", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with EntryStore.open(root) as store:
            assert store.entries() == []
            assert not store.read_only
            identity = store.store_id
        assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
        with EntryStore.open(root, create=False) as store:
            assert store.store_id == identity


def test_a_half_made_store_is_completed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (root / ".kvstore-99-abc").write_bytes(b"")
    (root / "CACHEDIR.TAG").write_bytes(b"")
    with EntryStore.open(root):
        pass
    shutil.rmtree(root / "objects")
    (root / "index.sqlite").unlink()
    with EntryStore.open(root) as store:
        put(store, make_entry(1, 20))
        clean(store)


def test_there_is_nothing_to_open(tmp_path: Path) -> None:
    assert code_of(EntryStore.open, tmp_path / "none", create=False) == "STORE_MISSING"
    assert code_of(EntryStore.open, tmp_path / "none", read_only=True) == "STORE_MISSING"
    assert not (tmp_path / "none").exists()


def test_somebody_elses_directory_or_file_is_left_alone(tmp_path: Path) -> None:
    home, file, database = tmp_path / "home", tmp_path / "file", tmp_path / "other.sqlite"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    file.write_bytes(b"x")
    execute(database, "CREATE TABLE t (a)")
    before = files(tmp_path)
    for path in (home, file, database, file / "below"):
        assert code_of(EntryStore.open, path) == "STORE_NOT_OURS"
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"layout_version": 2}, "STORE_VERSION_UNSUPPORTED"),
        ({"features": ["keyed-digests"]}, "STORE_VERSION_UNSUPPORTED"),
        ({"compression": 1}, "STORE_VERSION_UNSUPPORTED"),
        ({"media_type": "application/json"}, "STORE_NOT_OURS"),
        ({"store_id": "../x"}, "STORE_NOT_OURS"),
    ],
)
def test_another_kind_of_store_is_refused(tmp_path: Path, changes: dict[str, object], code: str) -> None:
    made_store(tmp_path / "s")
    change_config(tmp_path / "s", **changes)
    before = files(tmp_path)
    assert code_of(EntryStore.open, tmp_path / "s") == code
    assert code_of(EntryStore.open, tmp_path / "s", read_only=True) == code
    assert files(tmp_path) == before


def test_a_marker_that_is_not_json_is_refused(tmp_path: Path) -> None:
    made_store(tmp_path / "s")
    (tmp_path / "s" / "kvstore.json").unlink()
    (tmp_path / "s" / "kvstore.json").write_bytes(b"")
    assert code_of(EntryStore.open, tmp_path / "s") == "STORE_NOT_OURS"


def test_a_foreign_database_in_the_place_of_the_index_is_refused(tmp_path: Path) -> None:
    made_store(tmp_path)
    index = tmp_path / "index.sqlite"
    index.unlink()
    execute(index, "CREATE TABLE t (a)")
    before = index.read_bytes()
    assert code_of(EntryStore.open, tmp_path) == "STORE_NOT_OURS"
    assert index.read_bytes() == before


def test_a_newer_index_is_refused(tmp_path: Path) -> None:
    made_store(tmp_path)
    execute(tmp_path / "index.sqlite", "PRAGMA user_version = 1000")
    assert code_of(EntryStore.open, tmp_path) == "STORE_VERSION_UNSUPPORTED"
    assert code_of(EntryStore.open, tmp_path, read_only=True) == "STORE_VERSION_UNSUPPORTED"


@pytest.mark.parametrize("data", [b"", b"not a database at all, whatever it may once have been" * 100])
def test_a_damaged_index_is_said_to_be_damaged(tmp_path: Path, data: bytes) -> None:
    made_store(tmp_path)
    (tmp_path / "index.sqlite").write_bytes(data)
    assert code_of(EntryStore.open, tmp_path) == "STORE_CORRUPT"


def test_a_damaged_page_is_a_typed_error(tmp_path: Path) -> None:
    made_store(tmp_path)
    index = tmp_path / "index.sqlite"
    data = bytearray(index.read_bytes())
    data[8192:] = os.urandom(len(data) - 8192)
    index.write_bytes(data)
    with EntryStore.open(tmp_path) as store:
        assert code_of(store.entries) == "STORE_CORRUPT"
        assert code_of(put, store, make_entry(2, 20)) == "STORE_CORRUPT"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_another_writer_makes_it_busy_not_hang(tmp_path: Path) -> None:
    made_store(tmp_path)
    holder = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with EntryStore.open(tmp_path, lock_timeout=0.05) as store:
        assert code_of(put, store, make_entry(2, 20)) == "STORE_BUSY"
        assert len(store.entries()) == 1
        holder.execute("ROLLBACK")
        put(store, make_entry(2, 20))
        clean(store)
    holder.close()


def test_a_put_that_waits_for_the_lock_can_be_cancelled(tmp_path: Path) -> None:
    made_store(tmp_path)
    holder = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    made, staged = make_entry(2, 20), [False]
    with EntryStore.open(tmp_path) as store:

        def progress(done: int, total: int) -> None:
            staged[0] = done == total

        assert code_of(put, store, made, progress=progress, cancelled=lambda: staged[0]) == "CANCELLED"
        assert list((tmp_path / "tmp").iterdir()) == []
    holder.close()


def test_opened_for_reading_nothing_is_written(tmp_path: Path) -> None:
    made = make_entry(1, 300)
    made_store(tmp_path)
    before = files(tmp_path)
    with EntryStore.open(tmp_path, read_only=True) as store:
        assert store.read_only
        read_back(store, made)
        assert store.match(made.manifest.model.digest, "default", made.token_ids).entry_id == made.entry_id
        for refused in (
            lambda: put(store, make_entry(2, 20)), lambda: store.remove([made.entry_id]),
            lambda: store.set_label("x", made.entry_id), lambda: store.annotate(made.entry_id, {"a": 1}),
        ):  # fmt: skip
            assert code_of(refused) == "STORE_READ_ONLY"
        store.touch(made.entry_id)
        assert store.verify(deep=True).ok
    assert files(tmp_path) == before


READ_ALL = """
import sys
from kvstore.store.entry_store import EntryStore
from kvstore.store.rebuild import rebuild_index
from tests.builders import make_entry
from tests.store.kit import code_of, put, read_back
with EntryStore.open(sys.argv[1]) as store:
    assert store.read_only
    for seed in map(int, sys.argv[2:]):
        made = make_entry(seed, 300)
        read_back(store, made)
        assert store.match(made.manifest.model.digest, "default", made.token_ids).entry_id == made.entry_id
    assert code_of(put, store, make_entry(9, 20)) == "STORE_READ_ONLY"
    assert store.verify(deep=True).ok
print("read")
"""


def open_to_all(root: Path, *, writable: bool = False) -> None:
    """Let any user read the tree; the folders above it too."""
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for parent in list(root.parents)[:-1]:
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o055 != 0o055:
            parent.chmod(parent.stat().st_mode | 0o055)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_a_store_of_another_user_can_be_read(tmp_path: Path) -> None:
    made_store(tmp_path)
    open_to_all(tmp_path)
    assert child(READ_ALL, tmp_path, 1, unprivileged=True) == "read\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_rows_that_are_only_in_the_write_ahead_log_are_read_too(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    with EntryStore.open(source) as store:
        put(store, make_entry(1, 300))
        put(store, make_entry(2, 300))
        # What a killed writer leaves, moved to a medium that cannot be written.
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*-shm"))
    assert (copy / "index.sqlite-wal").stat().st_size > 0
    open_to_all(copy)
    assert child(READ_ALL, copy, 1, 2, unprivileged=True) == "read\n"
    assert list(copy.glob("*-shm")) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_a_store_that_may_not_be_read(tmp_path: Path) -> None:
    made_store(tmp_path / "s")
    open_to_all(tmp_path)
    (tmp_path / "s").chmod(0o700)
    script = """
import sys
from kvstore.store.entry_store import EntryStore
from kvstore.store.rebuild import rebuild_index
from tests.store.kit import code_of
print(code_of(EntryStore.open, sys.argv[1]))
"""
    assert child(script, tmp_path / "s", unprivileged=True) == "STORE_UNREADABLE\n"
    (tmp_path / "s").chmod(0o755)
    (tmp_path / "s" / "index.sqlite").chmod(0o600)
    assert child(script, tmp_path / "s", unprivileged=True) == "STORE_UNREADABLE\n"
    tmp_path.chmod(0o755)
    assert child(script, tmp_path / "s2", unprivileged=True) == "STORE_READ_ONLY\n"


def test_an_unreadable_object_is_neither_damage_nor_deleted(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs to become another user")
    made_store(tmp_path)
    open_to_all(tmp_path)
    for path in (tmp_path / "objects").rglob("*.kvo"):
        path.chmod(0o000)
    before = files(tmp_path)
    script = READ_ALL.replace("read_back(store, made)", "print(code_of(read_back, store, made))")
    script = script.split("    assert code_of")[0]
    assert child(script, tmp_path, 1, unprivileged=True) == "STORE_UNREADABLE\n"
    assert files(tmp_path) == before
    with EntryStore.open(tmp_path) as store:
        assert not store.entries()[0].damaged
        read_back(store, make_entry(1, 300))


@pytest.mark.skipif(shutil.which("mount") is None or os.getuid() != 0, reason="needs to mount")
def test_a_store_on_a_medium_that_cannot_be_written(tmp_path: Path) -> None:
    mounted = tmp_path / "m"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", mounted], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        made_store(mounted / "s")
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        with EntryStore.open(mounted / "s") as store:
            assert store.read_only
            read_back(store, make_entry(1, 300))
            assert code_of(put, store, make_entry(2, 20)) == "STORE_READ_ONLY"
        assert code_of(EntryStore.open, mounted / "other") == "STORE_READ_ONLY"
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_volume_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs to mount")
    mounted = tmp_path / "m"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", mounted], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    made = make_entry(1, 300)
    with EntryStore.open(mounted / "s") as store:
        put(store, made)
        subprocess.run(["umount", "-l", mounted], check=True)
        assert code_of(store.entries) == "STORE_MISSING"
        assert code_of(put, store, made) == "STORE_MISSING"
    assert list(mounted.iterdir()) == []


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == tmp_path / ".cache" / "kvstore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root() == tmp_path / ".cache" / "kvstore"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_root() == tmp_path / "x" / "kvstore"
    with EntryStore.open() as store:
        assert store.root == tmp_path / "x" / "kvstore"


def test_every_connection_is_durable_and_strict(tmp_path: Path) -> None:
    with EntryStore.open(tmp_path) as store, store._opened.index.read() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in (
                "journal_mode", "synchronous", "foreign_keys", "page_size", "application_id", "secure_delete",
                "trusted_schema",
            )
        }  # fmt: skip
    # Removal unlinks files after the commit that doomed them, so that commit must be durable: synchronous FULL is 2.
    assert found == {
        "journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "page_size": 8192, "application_id": 0x4B565354,
        "secure_delete": 1, "trusted_schema": 0,
    }  # fmt: skip


NO_PATHS = {"nul": "a\0b", "half a character": "x\ud800", "home": "~nosuchuserhere/s", "long": "y" * 300}


@pytest.mark.parametrize("name", NO_PATHS.values(), ids=list(NO_PATHS))
def test_a_path_that_no_store_can_have(tmp_path: Path, name: str) -> None:
    path = Path(name) if name.startswith("~") else tmp_path / name
    for call in (EntryStore.open, rebuild_index):
        assert code_of(call, path) == "USAGE"
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    made, root = make_entry(1, 100), Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff?#%41"))
    try:
        root.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    with EntryStore.open(root) as store:
        put(store, made)
    with EntryStore.open(root, read_only=True) as store:
        read_back(store, made)
    rebuild_index(root)
    assert {path.name for path in root.iterdir()} >= {"index.sqlite", "objects"}
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize("version", [0, -1, -(2**31)])
def test_an_index_of_no_version_is_damaged_and_can_be_made_anew(tmp_path: Path, version: int) -> None:
    made = make_entry(1, 100)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
    execute(tmp_path / "index.sqlite", f"PRAGMA user_version={version}")
    assert code_of(EntryStore.open, tmp_path) == "STORE_CORRUPT"
    rebuild_index(tmp_path)
    with EntryStore.open(tmp_path) as store:
        read_back(store, made)


def test_an_index_that_is_not_of_the_version_that_it_states(tmp_path: Path) -> None:
    made = make_entry(1, 100)
    with EntryStore.open(tmp_path) as store:
        put(store, made, label="kept")
    execute(tmp_path / "index.sqlite", "PRAGMA user_version=1")
    assert code_of(EntryStore.open, tmp_path) == "STORE_CORRUPT"
    rebuild_index(tmp_path)
    with EntryStore.open(tmp_path) as store:
        assert store.labels() == {"kept": made.entry_id}
        read_back(store, made)


def test_another_programs_database_may_be_moved_away(tmp_path: Path) -> None:
    made = make_entry(1, 100)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
    index = tmp_path / "index.sqlite"
    execute(index, "PRAGMA application_id=7")
    with pytest.raises(KVStoreError, match="Move it away"):
        EntryStore.open(tmp_path)
    index.rename(tmp_path / "other")
    with EntryStore.open(tmp_path) as store:
        read_back(store, made)


def test_a_copy_of_an_index_that_is_refused_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EntryStore.open(tmp_path / "s") as store:
        put(store, make_entry(1, 100))
        shutil.copytree(tmp_path / "s", tmp_path / "copy")
    execute(tmp_path / "copy" / "index.sqlite", "PRAGMA user_version=99")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "copy" / "index.sqlite-wal").write_bytes(b"any")
    paths = Paths(tmp_path / "copy")
    assert code_of(_open_frozen, paths, open_config(paths.root, create=False)) == "STORE_VERSION_UNSUPPORTED"
    (tmp_path / "copy" / "index.sqlite").unlink()
    (tmp_path / "copy" / "index.sqlite").mkdir()
    assert code_of(_open_frozen, paths, open_config(paths.root, create=False)).startswith("STORE_")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_closing_does_not_wait_for_another_writer(tmp_path: Path) -> None:
    made = make_entry(1, 100)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
    reader = EntryStore.open(tmp_path, lock_timeout=600)
    read_back(reader, made)
    with EntryStore.open(tmp_path) as other, other._opened.index.write():
        closing = threading.Thread(target=reader.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


def test_a_store_that_several_threads_use_while_its_index_is_made_anew(tmp_path: Path) -> None:
    made = make_entry(1, 100)
    errors: list[BaseException] = []
    with EntryStore.open(tmp_path) as store:
        put(store, made)

        def use() -> None:
            try:
                for _ in range(200):
                    assert [info.entry_id for info in store.entries()] == [made.entry_id]
            except KVStoreError as error:
                if error.code not in ("STORE_BUSY", "STORE_IO", "STORE_UNREADABLE"):
                    errors.append(error)
            except BaseException as error:
                errors.append(error)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            users = [threading.Thread(target=use) for _ in range(4)]
            for user in users:
                user.start()
            for _ in range(10):
                rebuild_index(tmp_path)
            for user in users:
                user.join()
        finally:
            sys.setswitchinterval(before)
    assert errors == []

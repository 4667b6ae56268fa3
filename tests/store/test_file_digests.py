"""Digests of files, and that a remembered one is never that of an older content."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import InvalidError
from kvstore.store.file_digests import FileDigests, default_memory, stamp_of

OLD_NS = 1_500_000_000 * 10**9


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def age(path: Path) -> None:
    """Give the file an old modification time; its change time is now, so the memory must be told otherwise."""
    os.utime(path, ns=(OLD_NS, OLD_NS))


def aged_memory(memory: Path, path: Path, digest: str) -> None:
    """A memory as it would be had ``path`` been digested long after it was written."""
    document = {"files": {os.path.realpath(path): [digest, *stamp_of(path)]}, "version": 1}
    memory.write_text(json.dumps(document))


def test_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    contents = {tmp_path / f"{size}": os.urandom(size) for size in (0, 1, 4096, 4 * 2**20 - 1, 4 * 2**20 + 1)}
    for path, data in contents.items():
        path.write_bytes(data)
    facts = FileDigests(tmp_path / "memory.json").digest_all(contents)
    assert {path: fact.digest for path, fact in facts.items()} == {p: sha256(d) for p, d in contents.items()}
    assert list(facts) == list(contents)
    assert all(fact.stamp == stamp_of(path) for path, fact in facts.items())


def test_a_change_through_a_mapping_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second write to a page that was not yet on the disk left all times as they were."""
    path, memory = tmp_path / "file", tmp_path / "memory.json"

    def read() -> str:
        with monkeypatch.context() as patch:
            patch.setattr("kvstore.store.file_digests.time.time_ns", lambda: time.time() * 1e9 + 3e9)
            return FileDigests(memory).digest_all([path])[path].digest

    if not written_twice(path, os.fsync):
        pytest.skip("this file system takes no note of writes through a mapping")
    assert written_twice(path, lambda _: read())
    assert memory.exists()
    assert read() == sha256(path.read_bytes())


def written_twice(path: Path, between: Callable[[int], object]) -> bool:
    """Whether the second of two writes through a mapping is seen by the file's times."""
    path.write_bytes(bytes(8192))
    os.sync()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] = 1
        between(file.fileno())
        before = stamp_of(path)
        time.sleep(0.05)  # longer than a tick of the file system's clock
        mapped[0] = 2
        return stamp_of(path) != before


def test_a_fresh_file_is_not_remembered(tmp_path: Path) -> None:
    """Within the resolution of the file system's clock a second change would go unseen."""
    path, memory = tmp_path / "file", tmp_path / "memory.json"
    path.write_bytes(b"one")
    age(path)
    assert FileDigests(memory).digest_all([path])[path].digest == sha256(b"one")
    assert not memory.exists()


def test_an_old_file_is_remembered_and_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = tmp_path / "file", tmp_path / "inner" / "memory.json"
    path.write_bytes(b"one")
    later = stamp_of(path).ctime_ns + 3 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.store.file_digests.time.time_ns", lambda: later)
        FileDigests(memory).digest_all([path])
    assert json.loads(memory.read_text())["files"][str(path)][0] == sha256(b"one")
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    # Proof that it is the memory that answers: it is told a lie, and only a rehash finds out.
    aged_memory(memory, path, sha256(b"a lie"))
    assert FileDigests(memory).digest_all([path])[path].digest == sha256(b"a lie")
    assert FileDigests(memory).digest_all([path], rehash=True)[path].digest == sha256(b"one")


@pytest.mark.parametrize("change", ["size", "mtime", "inode", "ctime"])
def test_a_changed_file_is_read_again(tmp_path: Path, change: str) -> None:
    path, memory = tmp_path / "file", tmp_path / "memory.json"
    path.write_bytes(b"one")
    age(path)
    aged_memory(memory, path, sha256(b"one"))
    if change == "inode":
        other = tmp_path / "other"
        other.write_bytes(b"two")
        age(other)
        other.replace(path)
    else:
        path.write_bytes(b"three" if change == "size" else b"two")
        if change != "mtime":
            age(path)
    assert FileDigests(memory).digest_all([path])[path].digest == sha256(path.read_bytes())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"version": 2, "files": {}}', '{"version": 1}', '{"version": 1, "files": []}',
             *('{"version": 1, "files": {"/x": ["sha256:DIGEST", 1, 2, 3, ODD]}}'.replace("DIGEST", "0" * 64)
               .replace("ODD", odd) for odd in ("Infinity", "NaN", "1e400", "[]", "[" * 100_000)),
             '{"version": 1, "files": {"/x": ["md5:1", 1, 2, 3, 4]}}', '{"version": 1, "files": {"/x": []}}'],
    ids=range(14),
)  # fmt: skip
def test_a_damaged_memory_is_no_memory(tmp_path: Path, text: str) -> None:
    path, memory = tmp_path / "file", tmp_path / "memory.json"
    path.write_bytes(b"one")
    memory.write_text(text)
    assert FileDigests(memory).digest_all([path])[path].digest == sha256(b"one")


def test_a_memory_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    later = stamp_of(path).ctime_ns + 3 * 10**9
    monkeypatch.setattr("kvstore.store.file_digests.time.time_ns", lambda: later)
    assert FileDigests(path / "below a file" / "memory.json").digest_all([path])[path].digest == sha256(b"one")
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A pipe-fed writer appends as long as the reader reads."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (8 * 2**20))
    done = threading.Event()

    def append() -> None:
        with path.open("ab", buffering=0) as file:
            while not done.is_set():
                file.write(b"y")
                time.sleep(0.0005)

    writer = threading.Thread(target=append)
    writer.start()
    while path.stat().st_size == 8 * 2**20:
        time.sleep(0.001)
    try:
        with pytest.raises(InvalidError) as caught:
            FileDigests(tmp_path / "memory.json").digest_all([path])
    finally:
        done.set()
        writer.join()
    assert caught.value.code == "MODEL_FOLDER_INVALID"
    assert "changed while it was read" in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "dangling", "loop"])
def test_unreadable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(InvalidError) as caught:
        FileDigests(tmp_path / "memory.json").digest_all([path])
    assert caught.value.code == "MODEL_FOLDER_INVALID"
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("place", ["models--a--b/blobs", "models--a--b/other", "datasets--a--b/blobs", "blobs"])
def test_a_name_that_is_a_digest_is_not_believed(tmp_path: Path, place: str) -> None:
    blobs, snapshot = tmp_path / place, tmp_path / "models--a--b" / "snapshots" / "r"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256(b"what the name says").hexdigest()
    blob.write_bytes(b"what is there")
    (snapshot / "model.safetensors").symlink_to(blob)
    found = FileDigests(tmp_path / "memory.json").digest_all([snapshot / "model.safetensors"])
    assert [fact.digest for fact in found.values()] == [sha256(b"what is there")]


def test_the_memory_is_beside_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_memory() == tmp_path / "kvstore-digests.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not absolute")
    assert default_memory() == Path.home() / ".cache" / "kvstore-digests.json"

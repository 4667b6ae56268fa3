"""Entries out of a store and into another; every fixture that a reader must refuse is refused by an import."""

from __future__ import annotations

import os
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.files import load_bundle
from kvstore.conformance.index import Case, load_index
from kvstore.conformance.reader import read_bundle
from kvstore.errors import CancelledError, KVStoreError
from kvstore.format.bundle import receipt_name
from kvstore.format.digest import sha256_digest
from kvstore.format.receipt import Receipt
from kvstore.store.entry_store import EntryStore
from tests.builders import MadeEntry, make_entry
from tests.conformance.contexts import context_for
from tests.store.kit import clean, code_of, files, flip, object_file, put, read_back

INDEX = load_index()
READ = [case for case in INDEX.cases if case.role == "reader" and case.features in ((), ("tar",))]
WITHOUT_A_MODEL = ("container", "json", "schema", "semantic", "integrity", "payload")
REFUSED = [case for case in READ if case.expect.get("phase") in WITHOUT_A_MODEL]
TAKEN = [case for case in READ if case.expect["verdict"] == "accept" and case.id != "bundle/no-token-ids"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "other") as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path_factory.mktemp("shared") / "store") as opened:
        yield opened


def receipt_about(made: MadeEntry, **changes: Any) -> Receipt:
    plain: dict[str, Any] = {
        "type": "load", "subject": made.entry_id, "made_at": "2026-01-02T03:04:05Z",
        "producer": {"name": "x", "version": "1"}, "libraries": {}, "device": None, "checks": {}, "facts": {},
    }  # fmt: skip
    return Receipt(**{**plain, **changes})


@pytest.mark.parametrize("archive", [False, True])
def test_a_round_trip(store: EntryStore, other: EntryStore, tmp_path: Path, archive: bool) -> None:
    made = make_entry(1, 600)
    put(store, made)
    done = store.export_bundle(made.entry_id, tmp_path / "bundle", archive=archive)
    assert (done.path, done.receipts) == (tmp_path / "bundle", 1)
    taken = other.import_bundle(tmp_path / "bundle", label="there")
    assert (taken.written.created, taken.receipts, taken.receipts_left_out) == (True, 1, 0)
    read_back(other, made, "always")
    clean(other)
    assert other.labels() == {"there": made.entry_id}
    assert store.receipts(made.entry_id)[0] in other.receipts(made.entry_id)
    before = files(other.root)
    again = other.import_bundle(tmp_path / "bundle")
    assert (again.written.created, again.written.objects_written, files(other.root)) == (False, 0, before)


@pytest.mark.parametrize("archive", [False, True])
def test_anybody_can_read_what_is_exported(store: EntryStore, tmp_path: Path, archive: bool) -> None:
    made = make_entry(2, 300, namespace="tenant-1", method="drop/half")
    put(store, made)
    store.export_bundle(made.entry_id, tmp_path / "bundle", archive=archive, receipts=False)
    result = read_bundle(load_bundle(tmp_path / "bundle"), context_for(made.manifest))
    assert (result.verdict, result.entry, result.token_count) == ("accept", made.entry_id, 300)


def test_an_archive_says_nothing_of_the_machine(store: EntryStore, tmp_path: Path) -> None:
    made = make_entry(3)
    put(store, made)
    for name in ("a.tar", "b.tar"):
        store.export_bundle(made.entry_id, tmp_path / name, archive=True)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "r:") as archive:
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode) for m in archive} == {(0, 0, "", "", 0, 0o600)}


def test_nothing_is_overwritten_and_nothing_half_written(store: EntryStore, tmp_path: Path) -> None:
    made = make_entry(4)
    put(store, made)
    (tmp_path / "there").mkdir()
    assert code_of(store.export_bundle, made.entry_id, tmp_path / "there") == "USAGE"
    flip(object_file(store, made))
    for archive in (False, True):
        assert code_of(store.export_bundle, made.entry_id, tmp_path / "new", archive=archive) in (
            "STORED_DIGEST_MISMATCH", "QUARANTINED",
        )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "there"]


def test_a_bundle_is_for_its_owner_alone(store: EntryStore, tmp_path: Path) -> None:
    made = make_entry(5)
    put(store, made)
    store.export_bundle(made.entry_id, tmp_path / "bundle")
    modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in (tmp_path / "bundle").rglob("*")}
    assert modes == {True: 0o700, False: 0o600}


def test_receipts_that_are_not_what_they_say_are_left_out(store: EntryStore, other: EntryStore, tmp_path: Path) -> None:
    made, stranger = make_entry(6), make_entry(7)
    put(store, made)
    store.export_bundle(made.entry_id, tmp_path / "bundle", receipts=False)
    folder = tmp_path / "bundle" / "receipts"
    folder.mkdir()
    good, foreign = receipt_about(made), receipt_about(stranger)
    unnamed = receipt_about(made, type="verify")
    for digest, data in (
        (good.digest, good.data), (foreign.digest, foreign.data), (sha256_digest(b"x"), unnamed.data),
        (sha256_digest(b"{}"), b"{}"),
    ):  # fmt: skip
        (tmp_path / "bundle" / receipt_name(digest)).write_bytes(data)
    taken = other.import_bundle(tmp_path / "bundle")
    assert (taken.receipts, taken.receipts_left_out) == (1, 3)
    assert {receipt.type for receipt in other.receipts(made.entry_id)} == {"write", "load"}
    assert other.receipts(stranger.entry_id) == []


def test_an_import_that_is_stopped_leaves_nothing(store: EntryStore, other: EntryStore, tmp_path: Path) -> None:
    made = make_entry(8)
    put(store, made)
    store.export_bundle(made.entry_id, tmp_path / "bundle")
    before = files(other.root)
    with pytest.raises(CancelledError):
        other.import_bundle(tmp_path / "bundle", cancelled=lambda: True)
    assert files(other.root) == before
    assert other.entries() == []


def test_what_is_no_bundle(store: EntryStore, tmp_path: Path) -> None:
    (tmp_path / "empty.tar").touch()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "layout.json")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "objects").symlink_to(tmp_path)
    assert code_of(store.import_bundle, tmp_path / "none") == "USAGE"
    assert code_of(store.import_bundle, tmp_path / "empty.tar") == "BUNDLE_LAYOUT_INVALID"
    assert code_of(store.import_bundle, tmp_path / "pipe") == "PATH_UNSAFE"
    assert code_of(store.import_bundle, tmp_path / "linked") == "PATH_UNSAFE"


def test_token_ids_are_needed(store: EntryStore) -> None:
    assert code_of(store.import_bundle, INDEX.path("cases/bundle/no-token-ids")) == "OBJECT_MISSING"


@pytest.mark.parametrize("case", REFUSED, ids=[case.id for case in REFUSED])
def test_what_a_reader_refuses_is_not_taken_in(shared: EntryStore, case: Case) -> None:
    before = files(shared.root)
    with pytest.raises(KVStoreError) as caught:
        shared.import_bundle(INDEX.path(case.input))
    assert (caught.value.phase, caught.value.code) == (case.expect["phase"], case.expect["code"])
    assert files(shared.root) == before


def test_what_a_reader_accepts_is_taken_in(store: EntryStore) -> None:
    """All at once: an entry that several cases share is there once."""
    for case in TAKEN:
        assert store.import_bundle(INDEX.path(case.input)).written.entry_id == case.expect["entry"], case.id
    assert {info.entry_id for info in store.entries()} == {case.expect["entry"] for case in TAKEN}
    clean(store)


LONG = "x" * 256
NO_PATHS = {
    "too long": (LONG, "STORE_IO"), "in too long": (LONG + "/b", "STORE_IO"), "deep": ("x/" * 3000 + "b", "STORE_IO"),
    "nul": ("a\0b", "USAGE"), "half a pair": ("a\ud800", "USAGE"), "nothing but nul": ("\0", "USAGE"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "code"), NO_PATHS.values(), ids=NO_PATHS)
def test_paths_that_no_file_can_have(store: EntryStore, tmp_path: Path, name: str, code: str) -> None:
    made = make_entry(9)
    put(store, made)
    (tmp_path / "x").touch()
    # Newer Pythons say of such a path that nothing is there.
    assert code_of(store.import_bundle, tmp_path / name) in (code, "USAGE")
    for archive in (False, True):
        assert code_of(store.export_bundle, made.entry_id, tmp_path / name, archive=archive) == code
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "x"]


@pytest.mark.parametrize("archive", [False, True])
def test_a_name_as_long_as_names_can_be(store: EntryStore, other: EntryStore, tmp_path: Path, archive: bool) -> None:
    made = make_entry(9)
    put(store, made)
    path = tmp_path / "b".ljust(255, "x")
    assert store.export_bundle(made.entry_id, path, archive=archive).path == path
    assert other.import_bundle(path).written.entry_id == made.entry_id


def test_files_of_holes_are_not_read_to_their_end(store: EntryStore, other: EntryStore, tmp_path: Path) -> None:
    """They state any size and cost nobody anything."""
    made = make_entry(10)
    put(store, made)
    for name in ("layout.json", "manifest.json", "object"):
        path = tmp_path / name
        store.export_bundle(made.entry_id, path)
        file = max((path / "objects").iterdir()) if name == "object" else path / name
        os.truncate(file, 2**40)
        tracemalloc.start()
        try:
            wanted = "DEVICE_MEMORY_SHORT" if name == "object" else "DOC_TOO_LARGE"
            assert code_of(other.import_bundle, path) == wanted
            assert tracemalloc.get_traced_memory()[1] < 256 * 2**20
        finally:
            tracemalloc.stop()
    path = tmp_path / "receipt"
    store.export_bundle(made.entry_id, path)
    (receipt,) = (path / "receipts").iterdir()
    os.truncate(receipt, 2**40)
    assert other.import_bundle(path).receipts_left_out == 1

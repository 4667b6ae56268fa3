"""Checking a store and making its index again."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.format.digest import sha256_digest
from kvstore.format.object import encode_object
from kvstore.store.entry_store import EntryStore
from kvstore.store.findings import FINDINGS
from kvstore.store.rebuild import rebuild_index
from kvstore.store.remove import doom_entries, sweep_doomed
from kvstore.store.temp import boot_id
from tests.builders import MadeEntry, make_entry
from tests.store.kit import clean, code_of, files, flip, object_file, overwrite, put, read_back


@pytest.fixture
def made() -> list[MadeEntry]:
    return [make_entry(1, 600), make_entry(2, 300), make_entry(1, 700)]


@pytest.fixture
def store(tmp_path: Path, made: list[MadeEntry]) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        for number, entry in enumerate(made):
            put(opened, entry, label=f"label {number}", annotations={"number": number})
        yield opened


def codes(store: EntryStore, **options: object) -> list[tuple[str, str]]:
    report = store.verify(**options)  # type: ignore[arg-type]
    return sorted((finding.code, finding.severity) for finding in report.findings)


def manifest_file(store: EntryStore, entry: MadeEntry) -> Path:
    return store.root / "manifests" / entry.entry_id[7:9] / f"{entry.entry_id[7:]}.json"


def test_a_sound_store(store: EntryStore) -> None:
    seen: list[tuple[int, int]] = []
    before = files(store.root)
    report = store.verify(deep=True, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.findings == []
    stored = sum(path.stat().st_size for path in (store.root / "objects").rglob("*.kvo"))
    assert (report.entries, report.receipts, report.bytes_read) == (3, 3, stored)
    assert report.objects == store.stats().objects == len(seen)
    assert seen[-1] == (stored, stored)
    assert files(store.root) == before
    json.dumps(report.to_json())


def test_one_entry_alone(store: EntryStore, made: list[MadeEntry]) -> None:
    flip(object_file(store, made[0]))
    report = store.verify([made[1].entry_id])
    assert (report.entries, report.objects, report.receipts, report.ok) == (1, 5, 1, True)
    assert not store.verify([made[0].entry_id]).ok
    assert code_of(store.verify, [sha256_digest(b"x")]) == "NOT_FOUND"


def test_wrong_and_missing_files_name_the_entries_that_they_harm(store: EntryStore, made: list[MadeEntry]) -> None:
    flip(object_file(store, made[0], 0))
    object_file(store, made[1], 0).unlink()
    report = store.verify()
    assert not report.ok
    found = {finding.code: finding for finding in report.findings}
    assert found.keys() == {"STORED_DIGEST_MISMATCH", "OBJECT_MISSING"}
    assert set(found["STORED_DIGEST_MISMATCH"].entries) == {made[0].entry_id, made[2].entry_id}
    assert found["STORED_DIGEST_MISMATCH"].subject == made[0].manifest.payloads()[0].digest
    assert set(found["OBJECT_MISSING"].entries) == {made[1].entry_id}
    # The second check knows it already; putting again heals all of it.
    assert codes(store) == [("OBJECT_MISSING", "error"), ("QUARANTINED", "error")]
    for entry in made:
        put(store, entry)
    clean(store)


def test_only_a_deep_check_sees_through_an_object_that_lies(store: EntryStore, made: list[MadeEntry]) -> None:
    ref, other = made[1].manifest.payloads()[0], made[0].manifest.payloads()[0]
    lie = encode_object(made[0].payloads[other.digest], digest=ref.digest)
    path = object_file(store, made[1])
    path.unlink()
    path.with_name(f"{ref.digest[7:]}.{lie.stored_digest[7:]}.kvo").write_bytes(b"".join(lie.parts))
    with store._opened.index.write() as connection:
        connection.exec_driver_sql(
            "UPDATE objects SET stored = ?, stored_size = ? WHERE payload = ?",
            (bytes.fromhex(lie.stored_digest[7:]), lie.size, bytes.fromhex(ref.digest[7:])),
        )
    assert codes(store) == []
    assert codes(store, deep=True) == [("PAYLOAD_DIGEST_MISMATCH", "error")]


def test_manifests_and_receipts(store: EntryStore, made: list[MadeEntry]) -> None:
    overwrite(manifest_file(store, made[0]), b"{}")
    manifest_file(store, made[1]).unlink()
    first, second = (store.receipts(entry.entry_id)[0].digest for entry in made[:2])
    for digest, change in ((first, b"{}"), (second, None)):
        path = store.root / "receipts" / digest[7:9] / f"{digest[7:]}.json"
        path.unlink()
        if change is not None:
            path.write_bytes(change)
    assert codes(store) == [
        ("MANIFEST_DIGEST_MISMATCH", "error"), ("OBJECT_MISSING", "error"), ("RECEIPT_CORRUPT", "error"),
        ("RECEIPT_MISSING", "error"),
    ]  # fmt: skip


def test_rows_that_contradict_the_manifest(store: EntryStore, made: list[MadeEntry]) -> None:
    with store._opened.index.write() as connection:
        connection.exec_driver_sql("UPDATE entries SET token_count = 1 WHERE entry_key = 1")
        connection.exec_driver_sql("DELETE FROM refs WHERE entry_key = 2 AND object_key % 2 = 0")
    report = store.verify()
    assert {(f.code, f.subject) for f in report.findings} == {
        ("INDEX_MISMATCH", made[0].entry_id), ("INDEX_MISMATCH", made[1].entry_id)
    }  # fmt: skip
    rebuild_index(store.root)
    clean(store)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tree_reach SET entry_key = 3 - entry_key",
        "UPDATE tree_leaves SET node = (SELECT max(node) FROM tree_nodes) WHERE entry_key = 1",
        "UPDATE tree_leaves SET lowest_cut = lowest_cut + 1 WHERE entry_key = 1",
        "UPDATE tree_nodes SET ids = zeroblob(length(ids)) WHERE node = 2",
        "UPDATE tree_nodes SET head = x'00' WHERE node = 2",
        "UPDATE tree_nodes SET digest = randomblob(32) WHERE digest IS NOT NULL AND node > 1",
        "UPDATE tree_nodes SET parent = node WHERE node = 3",
        "UPDATE tree_nodes SET media = zeroblob(36) WHERE node = 3",
        "UPDATE tree_roots SET namespace = 'other'",
        "UPDATE tree_classes SET damaged = 1",
        "DELETE FROM tree_leaves WHERE entry_key = 1",
        "DELETE FROM tree_nodes WHERE node = 3",
        "DELETE FROM tree_reach WHERE node = 3",
        "INSERT INTO tree_nodes (node, parent, head, end, ids) VALUES (99, 1, x'00', 1, x'00000000')",
        "DELETE FROM refs WHERE entry_key = 1",
        "UPDATE annotations SET value = 'no JSON'",
    ],
)
def test_rows_that_lead_astray_are_found(store: EntryStore, made: list[MadeEntry], statement: str) -> None:
    """A match goes by these rows alone, so a check must see what a load would only refuse."""
    store.annotate(made[0].entry_id, {"name": 1})
    clean(store)
    with store._opened.index.write() as connection:
        assert connection.exec_driver_sql(statement).rowcount
    for entry in made[:2]:
        store.match(entry.manifest.model.digest, entry.manifest.namespace, entry.token_ids)
    report = store.verify()
    assert not report.ok
    assert {f.code for f in report.findings} <= {"INDEX_MISMATCH", "STORE_CORRUPT"}
    store.entries()
    store.manifest(made[0].entry_id)
    rebuild_index(store.root)
    clean(store)


def test_receipts_of_others_decide_nothing(store: EntryStore, made: list[MadeEntry]) -> None:
    """No time and no annotation in a receipt keeps an entry out of a new index."""
    first = store.receipts(made[0].entry_id)[0]
    wrong = [
        replace(first, made_at="2026-02-30T25:00:60Z"), replace(first, facts={"annotations": {"": 1, "n" * 256: 2}}),
        replace(first, facts={"annotations": {"good": 1}}, made_at="0001-01-01T00:00:00Z"),
    ]  # fmt: skip
    for receipt in wrong:
        store.add_receipt(receipt)
    (store.root / "index.sqlite").unlink()
    with EntryStore.open(store.root) as again:
        assert {entry.entry_id for entry in again.entries()} == {entry.entry_id for entry in made}
        assert again.info(made[0].entry_id).annotations == {"good": 1, "number": 0}
        # The first of them is no receipt: there is no such time.
        assert len(again.receipts(made[0].entry_id)) == 3
        assert [finding.code for finding in again.verify(deep=True).findings] == ["ORPHAN_RECEIPT"]


def test_an_altered_receipt_hides_nothing(store: EntryStore, made: list[MadeEntry]) -> None:
    (receipt,) = store.receipts(made[0].entry_id)
    overwrite(store._opened.receipts.path(receipt.digest), receipt.data.replace(b"T", b"U"))
    assert store.receipts(made[0].entry_id) == []
    overwrite(store._opened.receipts.path(receipt.digest), b"{")
    assert store.receipts(made[0].entry_id) == []
    assert codes(store) == [("RECEIPT_CORRUPT", "error")]


def test_what_nothing_refers_to_is_a_notice(store: EntryStore, made: list[MadeEntry]) -> None:
    for kind, suffix in (("objects", ".kvo"), ("manifests", ".json"), ("receipts", ".json")):
        (store.root / kind / "ab").mkdir(exist_ok=True)
        name = "ab" + "0" * 62
        name = f"{name}.{name}" if kind == "objects" else name
        (store.root / kind / "ab" / (name + suffix)).write_bytes(b"x")
    (store.root / "objects" / "ab" / "photo.jpg").write_bytes(b"x")
    (store.root / "manifests" / "cd.json").write_bytes(b"x")
    (store.root / "tmp" / f"{boot_id()}-999999999-abc").mkdir()
    with store._opened.index.write() as connection:
        connection.exec_driver_sql("INSERT INTO doomed_files VALUES ('manifests/00/x.json')")
    report = store.verify()
    assert report.ok
    assert sorted(finding.code for finding in report.findings) == [
        "DOOMED_LEFT", "FOREIGN_FILE", "FOREIGN_FILE", "ORPHAN_MANIFEST", "ORPHAN_OBJECT", "ORPHAN_RECEIPT",
        "TEMP_LEFT",
    ]  # fmt: skip
    assert all(finding.action for finding in report.findings)
    for entry in made:
        read_back(store, entry)


def test_every_finding_has_a_severity_and_an_action() -> None:
    assert {severity for severity, _ in FINDINGS.values()} == {"error", "notice"}
    assert all(action.endswith(".") for _, action in FINDINGS.values())


def test_a_check_can_be_cancelled(store: EntryStore) -> None:
    assert code_of(store.verify, cancelled=lambda: True) == "CANCELLED"


def test_a_check_holds_no_lock(store: EntryStore) -> None:
    """While objects are read, another process can write."""
    added: list[bool] = []

    def progress(done: int, total: int) -> None:
        if not added:
            with EntryStore.open(store.root, lock_timeout=0.2) as other:
                added.append(put(other, make_entry(9, 20)).created)

    assert store.verify(progress=progress).ok
    assert added == [True]


def lose(store: EntryStore) -> None:
    for path in store.root.glob("index.sqlite*"):
        path.unlink()


def test_the_index_is_made_again_from_the_files(tmp_path: Path, made: list[MadeEntry]) -> None:
    with EntryStore.open(tmp_path) as store:
        for number, entry in enumerate(made):
            put(store, entry, label="l", annotations={"number": number})
        before = store.entries()
        lose(store)
    with EntryStore.open(tmp_path) as store:
        after = store.entries()
        assert [(i.entry_id, i.annotations, i.raw_bytes) for i in after] == [
            (i.entry_id, i.annotations, i.raw_bytes) for i in before
        ]
        # Labels are the index's own.
        assert store.labels() == {}
        for entry in made:
            read_back(store, entry, "always")
            found = store.match(entry.manifest.model.digest, "default", entry.token_ids, limit=entry.token_ids.size)
            assert (found.entry_id, found.token_count) == (entry.entry_id, entry.token_ids.size)
        clean(store)


def test_a_readable_index_hands_on_what_it_alone_knows(store: EntryStore, made: list[MadeEntry]) -> None:
    store.annotate(made[0].entry_id, {"number": None, "new": 1})
    with store._opened.index.write() as connection:
        connection.exec_driver_sql("UPDATE entries SET pinned = 1, accessed_at = 5 WHERE entry_key = 1")
    before, labels = store.entries(), store.labels()
    result = rebuild_index(store.root)
    assert (result.entries, result.receipts, result.skipped) == (3, 3, [])
    assert (store.entries(), store.labels()) == (before, labels)
    clean(store)
    assert put(store, make_entry(8, 20)).created


@pytest.mark.parametrize("damage", ["noise", "empty", "half"])
def test_a_damaged_index_is_set_aside_and_made_again(tmp_path: Path, made: list[MadeEntry], damage: str) -> None:
    with EntryStore.open(tmp_path) as store:
        for entry in made:
            put(store, entry)
    index = tmp_path / "index.sqlite"
    data = index.read_bytes()
    index.write_bytes({"noise": b"noise" * 9999, "empty": b"", "half": data[: len(data) // 2]}[damage])
    result = rebuild_index(tmp_path)
    assert result.entries == 3
    assert len(list((tmp_path / "quarantine").glob("*-index.sqlite"))) == 1
    with EntryStore.open(tmp_path) as store:
        clean(store)
        for entry in made:
            read_back(store, entry)


def test_another_programs_database_is_not_replaced(tmp_path: Path) -> None:
    with EntryStore.open(tmp_path):
        pass
    index = tmp_path / "index.sqlite"
    index.unlink()
    connection = sqlite3.connect(index)
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    before = index.read_bytes()
    assert code_of(rebuild_index, tmp_path) == "STORE_NOT_OURS"
    assert index.read_bytes() == before


def test_entries_that_lost_something_are_left_out_and_named(tmp_path: Path, made: list[MadeEntry]) -> None:
    with EntryStore.open(tmp_path) as store:
        for entry in made:
            put(store, entry)
        object_file(store, made[1]).unlink()
        overwrite(manifest_file(store, made[2]), b"{}")
        lose(store)
    result = rebuild_index(tmp_path)
    assert result.entries == 1
    assert {(entry_id, code) for entry_id, code, _ in result.skipped} == {
        (made[1].entry_id, "OBJECT_MISSING"), (made[2].entry_id, "MANIFEST_DIGEST_MISMATCH"),
    }  # fmt: skip
    with EntryStore.open(tmp_path) as store:
        read_back(store, made[0])
        assert store.verify(deep=True).ok
        put(store, made[1])
        put(store, made[2])
        # The old encoding of a shared object is the same file, so nothing is left over.
        clean(store)


def test_objects_of_two_namespaces_stay_apart_in_a_new_index(tmp_path: Path) -> None:
    ours, theirs = make_entry(5, 300), make_entry(5, 300, namespace="other")
    with EntryStore.open(tmp_path) as store:
        put(store, ours)
        put(store, theirs)
        lose(store)
    with EntryStore.open(tmp_path) as store:
        read_back(store, ours, "always")
        read_back(store, theirs, "always")
        assert store.stats().objects == 10
        clean(store)


def test_a_store_that_is_open_elsewhere_goes_on_with_the_new_index(store: EntryStore, made: list[MadeEntry]) -> None:
    with EntryStore.open(store.root) as other:
        read_back(other, made[0])
        rebuild_index(store.root)
        put(other, make_entry(7, 20))
        put(store, make_entry(8, 20))
    assert len(store.entries()) == 5
    clean(store)
    with EntryStore.open(store.root) as again:
        assert len(again.entries()) == 5


def test_a_copied_store_is_a_store(tmp_path: Path, store: EntryStore, made: list[MadeEntry]) -> None:
    shutil.copytree(store.root, tmp_path / "copy")
    with EntryStore.open(tmp_path / "copy") as copy:
        for entry in made:
            read_back(copy, entry)
        clean(copy)


def test_what_was_removed_does_not_come_back_with_a_new_index(store: EntryStore, made: list[MadeEntry]) -> None:
    """Its rows are gone for good before its files are: a process may die in between."""
    removed, *others = [entry.entry_id for entry in made]
    doom_entries(store._opened, [removed])
    rebuild_index(store.root)
    assert {info.entry_id for info in store.entries()} == set(others)
    assert code_of(store.info, removed) == "NOT_FOUND"
    assert store.receipts(removed) == []
    sweep_doomed(store._opened)
    assert not list((store.root / "manifests").rglob(f"{removed[7:]}.json"))
    assert len(list((store.root / "receipts").rglob("*.json"))) == len(others)
    clean(store)


@pytest.mark.parametrize("target", ["/nonexistent/file", "itself"])
def test_a_link_that_leads_nowhere_does_not_keep_the_index_from_being_made(
    store: EntryStore, made: list[MadeEntry], target: str
) -> None:
    name = f"{'ab' * 32}.json"
    link = store.root / "manifests" / "ab" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(name if target == "itself" else target)
    result = rebuild_index(store.root)
    assert result.entries == len(made)
    assert [digest for digest, _, _ in result.skipped] == [f"sha256:{'ab' * 32}"]
    lose(store)
    assert len(store.entries()) == len(made)


def test_a_note_of_removal_does_not_take_an_entry_that_is_there(store: EntryStore, made: list[MadeEntry]) -> None:
    with store._opened.index.write() as connection:
        for entry in made:
            path = store._opened.manifests.relative(entry.entry_id)
            connection.exec_driver_sql("INSERT INTO doomed_files VALUES (?)", (path,))
    rebuild_index(store.root)
    assert {info.entry_id for info in store.entries()} == {entry.entry_id for entry in made}
    assert sweep_doomed(store._opened) == 0
    for entry in made:
        read_back(store, entry)

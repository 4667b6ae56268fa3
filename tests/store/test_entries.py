"""Lists, references, labels, annotations, receipts, removal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.format.digest import sha256_digest
from kvstore.format.receipt import Receipt
from kvstore.store.clock import micros_text, text_micros
from kvstore.store.entry_store import EntryStore
from kvstore.store.remove import doom_entries, sweep_doomed
from tests.builders import make_entry, make_model
from tests.store.kit import clean, code_of, files, object_file, put, read_back


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


def test_an_entry_in_the_list(store: EntryStore) -> None:
    made = make_entry(1, 300, method="drop/half")
    written = put(store, made, label="b", annotations={"n": 1, "gone": 2})
    store.set_label("a", made.entry_id)
    store.annotate(made.entry_id, {"gone": None, "list": [1, {"k": "v"}]})
    (info,) = store.entries()
    assert info == store.info(made.entry_id)
    assert (info.labels, info.annotations) == (("a", "b"), {"n": 1, "list": [1, {"k": "v"}]})
    assert (info.token_count, info.lowest_cut) == (300, made.manifest.lowest_cut)
    assert (info.method, info.signature) == ("drop/half", made.signature)
    assert (info.raw_bytes, info.stored_bytes) == (written.raw_bytes, written.stored_bytes)
    assert (info.model_digest, info.prefix_digest) == (made.manifest.model.digest, made.manifest.prefix.digest)
    assert (info.pinned, info.damaged) == (False, False)
    assert info.to_json()["entry_id"] == made.entry_id


def test_lists_are_filtered_and_newest_first(store: EntryStore) -> None:
    made = [make_entry(1, 20), make_entry(2, 20, model="other"), make_entry(3, 20, namespace="n")]
    for entry in made:
        put(store, entry)
    ids = [entry.entry_id for entry in made]
    assert [info.entry_id for info in store.entries()] == ids[::-1]
    assert [info.entry_id for info in store.entries(limit=1)] == ids[2:]
    assert [info.entry_id for info in store.entries(model=make_model("other").digest)] == [ids[1]]
    assert [info.entry_id for info in store.entries(namespace="n")] == [ids[2]]
    assert store.entries(namespace="none") == []


def test_references(store: EntryStore) -> None:
    made = make_entry(1, 20)
    put(store, made, label="talk")
    text = made.entry_id.removeprefix("sha256:")
    for ref in (made.entry_id, text, text[:8], text[:9], f"sha256:{text[:13]}", "talk"):
        assert store.resolve(ref) == made.entry_id
    for ref in ("f" * 8 if text[0] != "f" else "0" * 8, text[:7], "talks", "", "sha256:", "../x"):
        assert code_of(store.resolve, ref) == "NOT_FOUND"


def test_an_ambiguous_prefix_lists_the_candidates(store: EntryStore) -> None:
    first, second = make_entry(1, 20), make_entry(2, 20)
    put(store, first)
    put(store, second)
    twin = bytes.fromhex(first.entry_id[7:])[:6] + bytes(26)
    with store._opened.index.write() as connection:
        connection.exec_driver_sql(
            "UPDATE entries SET entry_id = ? WHERE entry_id = ?", (twin, bytes.fromhex(second.entry_id[7:]))
        )
    assert code_of(store.resolve, first.entry_id[7:15]) == "REF_AMBIGUOUS"
    assert store.resolve(first.entry_id[7:40]) == first.entry_id


def test_a_label_moves_and_goes(store: EntryStore) -> None:
    first, second = make_entry(1, 20), make_entry(2, 20)
    put(store, first, label="l")
    put(store, second, label="l")
    assert store.labels() == {"l": second.entry_id}
    # Putting what is there already still sets the label.
    assert not put(store, first, label="l").created
    assert store.labels() == {"l": first.entry_id}
    store.remove_label("l")
    assert store.labels() == {}
    assert code_of(store.remove_label, "l") == "NOT_FOUND"
    assert code_of(store.set_label, "l", sha256_digest(b"")) == "NOT_FOUND"
    assert code_of(store.set_label, "deadbeef", first.entry_id) == "LABEL_INVALID"


def test_annotations_are_checked(store: EntryStore) -> None:
    made = make_entry(1, 20)
    put(store, made)
    assert code_of(store.annotate, made.entry_id, {"a": 1.5}) == "JSON_FLOAT"
    assert code_of(store.annotate, made.entry_id, {"": 1}) == "FIELD_RANGE"
    assert code_of(store.annotate, sha256_digest(b""), {"a": 1}) == "NOT_FOUND"
    assert store.info(made.entry_id).annotations == {}


def receipt(subject: str, kind: str = "load") -> Receipt:
    return Receipt(
        type=kind, subject=sha256_digest(subject.encode()), made_at="2026-01-01T00:00:00Z",
        producer={"name": "t", "version": "1"}, libraries={}, device=None, checks={}, facts={"n": 1},
    )  # fmt: skip


def test_receipts_are_kept_once_with_or_without_an_entry(store: EntryStore) -> None:
    outside = receipt("fixtures", "conformance")
    store.add_receipt(outside)
    before = files(store.root)
    store.add_receipt(outside)
    assert files(store.root) == before
    assert store.receipts(outside.subject) == [outside]
    assert store.receipts(sha256_digest(b"none")) == []
    clean(store)


def test_removal_takes_what_nothing_else_needs(store: EntryStore) -> None:
    start = files(store.root)
    short, long, other = (make_entry(seed, n, layers=1) for seed, n in ((1, 512), (1, 700), (2, 300)))
    put(store, short, label="s", annotations={"a": 1})
    put(store, long, label="l")
    put(store, other)
    removed = store.remove([short.entry_id])
    # The two full blocks belong to the longer one too; only the token ids go.
    assert (removed.entries, removed.objects) == (1, 1)
    assert store.labels() == {"l": long.entry_id}
    assert store.receipts(short.entry_id) == []
    assert code_of(store.manifest, short.entry_id) == "NOT_FOUND"
    read_back(store, long)
    clean(store)
    assert store.match(short.manifest.model.digest, "default", short.token_ids).entry_id == long.entry_id
    removed = store.remove([long.entry_id, other.entry_id])
    assert (removed.entries, removed.objects) == (2, 7)
    assert files(store.root) == start
    assert store.stats().to_json() == {
        "damaged_entries": 0, "entries": 0, "leases": 0, "objects": 0, "raw_bytes": 0, "stored_bytes": 0
    }  # fmt: skip
    clean(store)


def test_removal_is_all_or_nothing(store: EntryStore) -> None:
    made = make_entry(1, 20)
    put(store, made)
    assert code_of(store.remove, [made.entry_id, sha256_digest(b"x")]) == "NOT_FOUND"
    read_back(store, made)
    assert store.remove([made.entry_id, made.entry_id]).entries == 1
    assert store.remove([]).entries == 0


def test_an_edited_row_leads_to_no_file_of_others(store: EntryStore, tmp_path: Path) -> None:
    made, kept = make_entry(1, 300), make_entry(2, 300)
    put(store, made)
    put(store, kept)
    other = tmp_path / "other.json"
    other.write_text("{}")
    with store._opened.index.write() as connection:
        for path in ("kvstore.json", "../other.json", str(other), "manifests", "objects", "CACHEDIR.TAG"):
            connection.exec_driver_sql("INSERT INTO doomed_files VALUES (?)", (path,))
    store.remove([made.entry_id])
    assert other.read_text() == "{}"
    with EntryStore.open(store.root) as again:
        read_back(again, kept)
        clean(again)


def test_use_is_noted_only_where_that_costs_nothing(tmp_path: Path) -> None:
    """A restore has succeeded already: neither a writer nor a full disk may turn it into a failure."""
    made = make_entry(1, 20)
    with EntryStore.open(tmp_path / "store") as store:
        put(store, made)
        with store._opened.index.write() as connection:
            connection.exec_driver_sql("UPDATE entries SET accessed_at = 7")
            store.touch(made.entry_id)
        assert store.info(made.entry_id).accessed_at == 7
        store.touch(made.entry_id)
        assert store.info(made.entry_id).accessed_at > 7


def test_times_that_no_calendar_has_are_shown_all_the_same() -> None:
    assert micros_text(2**62) == "9999-12-31T23:59:59.999999Z"
    assert micros_text(-1) == "1970-01-01T00:00:00.000000Z"
    assert text_micros("2016-12-31T23:59:60Z") == text_micros("2016-12-31T23:59:59Z")
    assert text_micros("2026-02-30T00:00:00Z") == 0


def test_removal_goes_on_where_files_are_gone_already(store: EntryStore) -> None:
    made = make_entry(1, 300)
    put(store, made)
    for path in (*(store.root / "objects").rglob("*.kvo"), *(store.root / "manifests").rglob("*.json")):
        path.unlink()
    assert store.remove([made.entry_id]).entries == 1
    clean(store)


def test_an_entry_that_was_removed_can_be_put_again(store: EntryStore) -> None:
    made = make_entry(1, 300)
    put(store, made)
    store.remove([made.entry_id])
    assert put(store, made).created
    read_back(store, made)
    clean(store)


def test_a_put_between_the_two_steps_of_a_removal_keeps_what_it_needs(store: EntryStore) -> None:
    made, gone = make_entry(1, 300), make_entry(2, 300)
    put(store, made)
    put(store, gone)
    assert doom_entries(store._opened, [made.entry_id, gone.entry_id]).objects == 10
    assert code_of(store.manifest, made.entry_id) == "NOT_FOUND"
    # Raised from the dead: nothing is encoded again.
    written = put(store, made)
    assert (written.created, written.objects_written, written.objects_reused) == (True, 0, 5)
    assert sweep_doomed(store._opened) == 5
    read_back(store, made, "always")
    clean(store)
    assert len(list((store.root / "objects").rglob("*.kvo"))) == 5


@pytest.mark.parametrize("codec", ["small", "fast"])
def test_a_put_after_a_removal_that_died_in_its_second_step(store: EntryStore, codec: str) -> None:
    """Files are unlinked, but the commit that drops their rows never came."""
    made = make_entry(1, 300)
    put(store, made)
    doom_entries(store._opened, [made.entry_id])
    for number in (0, 1):
        object_file(store, made, number).unlink()
    assert store.live_payloads("default", [ref.digest for ref in made.manifest.payloads()]) == set()
    written = put(store, made, codec=codec)
    assert (written.created, written.objects_written, written.objects_reused) == (True, 2, 3)
    read_back(store, made, "always")
    assert sweep_doomed(store._opened) == 0
    clean(store)


def test_a_removal_that_died_between_its_steps_is_finished_later(store: EntryStore) -> None:
    made, other = make_entry(1, 300), make_entry(2, 300)
    put(store, made)
    put(store, other)
    doom_entries(store._opened, [made.entry_id])
    report = store.verify()
    assert report.ok
    assert {finding.code for finding in report.findings} == {"DOOMED_LEFT"}
    assert not store.match(made.manifest.model.digest, "default", made.token_ids)
    store.remove([other.entry_id])
    assert not any((store.root / "objects").rglob("*.kvo"))
    clean(store)


def test_access_times_are_coarse(store: EntryStore) -> None:
    made = make_entry(1, 20)
    put(store, made)
    first = store.info(made.entry_id).accessed_at
    store.touch(made.entry_id)
    assert store.info(made.entry_id).accessed_at == first
    with store._opened.index.write() as connection:
        connection.exec_driver_sql("UPDATE entries SET accessed_at = accessed_at - 7200000000")
    store.touch(made.entry_id)
    assert store.info(made.entry_id).accessed_at >= first
    store.touch(sha256_digest(b"none"))


def test_a_put_of_what_is_there_is_a_use(store: EntryStore) -> None:
    first, second = make_entry(1, 20), make_entry(2, 20)
    for made in (first, second):
        put(store, made)
    with store._opened.index.write() as connection:
        connection.exec_driver_sql("UPDATE entries SET accessed_at = accessed_at - 7200000000")
    assert not put(store, first).created
    assert [info.entry_id for info in store.entries()] == [first.entry_id, second.entry_id]


def test_totals(store: EntryStore) -> None:
    first, second = put(store, make_entry(1, 512, layers=1)), put(store, make_entry(1, 700, layers=1))
    totals = store.stats()
    assert (totals.entries, totals.objects) == (2, 5)
    assert totals.raw_bytes == first.raw_bytes + second.raw_bytes
    on_disk = sum(path.stat().st_size for path in (store.root / "objects").rglob("*.kvo"))
    assert totals.stored_bytes == first.stored_bytes + second.stored_bytes == on_disk

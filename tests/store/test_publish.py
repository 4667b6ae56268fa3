"""Putting entries: what is written, what is shared, what is refused, what is left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import KVStoreError, fail
from kvstore.format.groups import PayloadRef
from kvstore.format.seal import seal
from kvstore.format.tensors import Payload
from kvstore.store.entry_store import EntryStore
from kvstore.store.put import Put
from tests.builders import MadeEntry, make_entry
from tests.store.kit import clean, code_of, files, object_file, overwrite, put, read_back


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 512, 513])
def test_an_entry_comes_back_to_the_bit(store: EntryStore, tokens: int) -> None:
    made = make_entry(1, tokens)
    written = put(store, made)
    assert written.created
    assert written.entry_id == made.entry_id
    read_back(store, made)
    read_back(store, made, "always")
    clean(store)


def test_both_codecs_make_the_same_entry(tmp_path: Path) -> None:
    made = make_entry(2, 300)
    for codec in ("small", "fast"):
        with EntryStore.open(tmp_path / codec) as store:
            assert put(store, made, codec=codec).entry_id == made.entry_id
            read_back(store, made, "always")


def test_put_twice_writes_nothing_and_asks_for_nothing(store: EntryStore) -> None:
    made = make_entry(3, 600)
    first = put(store, made)
    before = files(store.root)
    made.asked.clear()
    again = put(store, made)
    assert not again.created
    assert (again.objects_written, again.stored_bytes) == (0, 0)
    assert again.objects_reused == first.objects_written
    assert made.asked == []
    assert files(store.root) == before


def test_a_longer_entry_shares_the_blocks_of_the_shorter_one(store: EntryStore) -> None:
    short, long = make_entry(4, 512, layers=1), make_entry(4, 700, layers=1)
    put(store, short)
    written = put(store, long)
    # The last block and the token ids.
    assert (written.objects_written, written.objects_reused) == (2, 2)
    assert len(long.asked) == 1
    read_back(store, short)
    read_back(store, long)
    clean(store)


def test_namespaces_never_share_objects(store: EntryStore) -> None:
    ours, theirs = make_entry(5, 256), make_entry(5, 256, namespace="other")
    put(store, ours)
    assert put(store, theirs).objects_reused == 0
    payload = ours.manifest.payloads()[0].digest
    assert theirs.manifest.payloads()[0].digest == payload
    assert store.live_payloads("other", [payload]) == {payload}
    store.remove([ours.entry_id])
    assert store.live_payloads("default", [payload]) == set()
    read_back(store, theirs)
    clean(store)


def test_the_receipt_says_what_was_done(store: EntryStore) -> None:
    made = make_entry(6, 300)
    device = {"backend": "cpu"}
    written = put(store, made, label="talk", annotations={"document": 7}, libraries={"x": "1"}, device=device)
    (receipt,) = store.receipts(made.entry_id)
    assert receipt == written.receipt
    assert (receipt.type, receipt.subject, receipt.device) == ("write", made.entry_id, device)
    assert receipt.facts["label"] == "talk"
    assert receipt.facts["annotations"] == {"document": 7}
    assert receipt.facts["objects_written"] == written.objects_written == 5
    assert receipt.facts["stored_bytes"] == sum(p.stat().st_size for p in (store.root / "objects").rglob("*.kvo"))
    assert receipt.facts["token_count"] == 300
    assert receipt.facts["lowest_cut"] == made.manifest.lowest_cut


def test_stored_files_are_private_and_read_only(store: EntryStore) -> None:
    put(store, make_entry(7, 20))
    assert store.root.stat().st_mode & 0o777 == 0o700
    kept = [p for name in ("objects", "manifests", "receipts") for p in (store.root / name).rglob("*") if p.is_file()]
    assert kept
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o400}


def test_progress_counts_payload_bytes(store: EntryStore) -> None:
    made = make_entry(8, 600)
    seen: list[tuple[int, int]] = []
    written = put(store, made, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (written.raw_bytes, written.raw_bytes)
    assert seen == sorted(seen)
    assert len(seen) == written.objects_written


def test_a_put_that_is_cancelled_leaves_nothing(store: EntryStore) -> None:
    made, before = make_entry(9, 2000), files(store.root)
    done = [0]

    def progress(now: int, total: int) -> None:
        done[0] = now

    assert code_of(put, store, made, progress=progress, cancelled=lambda: done[0] > 0) == "CANCELLED"
    assert done[0] > 0
    assert files(store.root) == before
    assert store.entries() == []
    clean(store)


def test_an_error_in_the_source_leaves_nothing_and_is_not_changed(store: EntryStore) -> None:
    made, before = make_entry(10, 2000), files(store.root)

    def source(ref: PayloadRef) -> Payload:
        if len(made.asked) == 4:
            raise LookupError("gone")
        return made.source(ref)

    with pytest.raises(LookupError, match="gone"):
        store.publish(made.manifest, source, token_ids=made.token_ids)
    assert files(store.root) == before
    clean(store)


def test_a_payload_that_changed_since_it_was_named_is_refused(store: EntryStore) -> None:
    made, before = make_entry(11, 300), files(store.root)
    array = next(iter(made.payloads.values())).arrays[0]
    array[..., 0] ^= np.uint16(1)
    assert code_of(put, store, made) == "PAYLOAD_DIGEST_MISMATCH"
    assert files(store.root) == before


@pytest.mark.parametrize("codec", ["small", "fast"])
@pytest.mark.parametrize("head_dim", [16, 512])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_payload_that_changes_at_some_step_of_a_put_is_never_stored_under_the_old_digest(
    tmp_path: Path, codec: str, head_dim: int, sealed: bool
) -> None:
    """Arrays that are hashed where they are, and ones that are gathered; a change at each question whether to go on."""
    found = set()
    for step in range(40):
        made = make_entry(17, 300, layers=1, head_dim=head_dim)
        ref = made.manifest.payloads()[0]
        if sealed:
            made.payloads[ref.digest] = replace(made.payloads[ref.digest], seal=seal(made.payloads[ref.digest]))
        questions = count()

        def change(
            made: MadeEntry = made, ref: PayloadRef = ref, questions: Iterator[int] = questions, step: int = step
        ) -> bool:
            if next(questions) == step:
                made.payloads[ref.digest].arrays[0][..., 0] ^= np.uint16(1)
            return False

        with EntryStore.open(tmp_path / str(step)) as store:
            try:
                put(store, made, codec=codec, cancelled=change)
                found.add("stored")
            except KVStoreError as error:
                found.add(error.code)
            clean(store)
        if next(questions) <= step:
            break
    assert found == {"PAYLOAD_DIGEST_MISMATCH", "stored"}


def test_token_ids_that_change_during_a_put_are_stored_as_they_were(store: EntryStore) -> None:
    made = make_entry(15, 600)
    buffer = np.array(made.token_ids)

    def source(ref: PayloadRef) -> Payload:
        buffer[:] = 0
        return made.source(ref)

    store.publish(made.manifest, source, token_ids=buffer)
    assert not buffer.any()
    read_back(store, made, "always")
    clean(store)


def test_a_put_holds_its_ids_alone() -> None:
    made = make_entry(16, 20)
    buffer = np.array(made.token_ids)
    put_of = Put(made.manifest, buffer)
    assert not np.shares_memory(put_of.token_ids, buffer)
    assert not put_of.token_ids.flags.writeable


def test_token_ids_must_be_those_of_the_manifest(store: EntryStore) -> None:
    made = make_entry(12, 300)
    changed = replace(made, token_ids=made.token_ids ^ np.uint32(1))
    assert code_of(put, store, changed) == "PREFIX_CHAIN_MISMATCH"
    assert code_of(put, store, replace(made, token_ids=made.token_ids[:-1])) == "TOKEN_COUNT_MISMATCH"
    outside = [*made.token_ids.tolist()[:-1], 1 << 32]
    assert code_of(store.publish, made.manifest, made.source, token_ids=outside) == "TOKEN_ID_RANGE"
    assert store.entries() == []


def test_a_manifest_that_no_reader_would_accept_is_refused(store: EntryStore) -> None:
    made = make_entry(13, 300)
    broken = replace(made, manifest=replace(made.manifest, groups=made.manifest.groups[:1]))
    assert code_of(put, store, broken) == "GROUP_INVALID"


@pytest.mark.parametrize("name", ["", " x", "x ", "a\nb", "0123abcd", "sha256:ab", "x" * 256])
def test_a_label_must_be_a_name(store: EntryStore, name: str) -> None:
    before = files(store.root)
    assert code_of(put, store, make_entry(14, 20), label=name) == "LABEL_INVALID"
    assert files(store.root) == before


def test_a_put_heals_objects_that_were_lost(store: EntryStore) -> None:
    made = make_entry(15, 600)
    put(store, made)
    object_file(store, made, 0).unlink()
    overwrite(object_file(store, made, 1), b"short")
    written = put(store, made)
    assert not written.created
    assert written.objects_written == 2
    read_back(store, made, "always")
    clean(store)
    assert len(list((store.root / "quarantine").glob("*.kvo"))) == 1


@pytest.mark.parametrize("size", [-1, 0, 1, 2**62])
def test_a_put_uses_a_sound_object_whatever_size_its_row_states(
    store: EntryStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Its name proves its bytes; nothing is set aside, and the row is put right."""
    made = make_entry(15, 600)
    put(store, made)
    before = files(store.root)
    with store._opened.index.write() as connection:
        connection.exec_driver_sql(f"UPDATE objects SET stored_size = {size}")

    def full(*args: object) -> None:
        raise fail("NO_SPACE", "the volume is full")

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.store.commit._record", full)
        assert code_of(put, store, made) == "NO_SPACE"
    assert files(store.root) == before
    assert put(store, made).objects_written == 0
    read_back(store, made, "always")
    clean(store)
    assert not list((store.root / "quarantine").glob("*"))


def test_a_put_writes_a_lost_or_changed_manifest_again(store: EntryStore) -> None:
    made = make_entry(16, 20)
    put(store, made)
    path = store.root / "manifests" / made.entry_id[7:9] / f"{made.entry_id[7:]}.json"
    for replacement in (None, b"{}"):
        path.unlink()
        if replacement is not None:
            path.write_bytes(replacement)
        assert code_of(store.manifest, made.entry_id) in ("OBJECT_MISSING", "MANIFEST_DIGEST_MISMATCH")
        assert store.info(made.entry_id).damaged
        assert not put(store, made).created
        assert not store.info(made.entry_id).damaged
        read_back(store, made)
    clean(store)


def test_the_folder_of_a_manifest_that_is_written_again_is_flushed(
    store: EntryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the row says that all is well: else a power cut could bring the changed one back."""
    made = make_entry(16, 20)
    put(store, made)
    path = store.root / "manifests" / made.entry_id[7:9] / f"{made.entry_id[7:]}.json"
    overwrite(path, b"{}")
    assert code_of(store.manifest, made.entry_id) == "MANIFEST_DIGEST_MISMATCH"
    flushed: set[Path] = set()
    monkeypatch.setattr(store._opened, "sync", flushed.update)
    put(store, made)
    assert path.parent in flushed


def test_the_folder_of_a_manifest_that_a_dead_put_left_is_flushed(
    store: EntryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_entry(16, 20)
    path = store.root / "manifests" / made.entry_id[7:9] / f"{made.entry_id[7:]}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(made.manifest.data)
    flushed: set[Path] = set()
    monkeypatch.setattr(store._opened, "sync", flushed.update)
    assert put(store, made).created
    assert path.parent in flushed


def test_a_store_deleted_while_open_begins_anew(store: EntryStore) -> None:
    first, second = make_entry(17, 300), make_entry(18, 300)
    put(store, first)
    identity = store.store_id
    shutil.rmtree(store.root)
    assert store.entries() == []
    assert not store.match(first.manifest.model.digest, "default", first.token_ids)
    assert put(store, first).created
    shutil.rmtree(store.root)
    assert put(store, second).created
    read_back(store, second)
    clean(store)
    with EntryStore.open(store.root, create=False) as other:
        assert other.store_id == identity
        assert [info.entry_id for info in other.entries()] == [second.entry_id]


def test_two_open_stores_see_each_others_puts_after_a_deletion(store: EntryStore) -> None:
    made = make_entry(19, 300)
    with EntryStore.open(store.root) as other:
        put(other, made)
        shutil.rmtree(store.root)
        put(store, made)
        read_back(other, made)
        put(other, make_entry(20, 300))
    assert len(store.entries()) == 2
    clean(store)

"""Reading: wrong bytes are never given out, and only what is proved wrong is set aside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.format.digest import Digest, sha256_digest
from kvstore.store.entry_store import EntryStore
from kvstore.store.objects import parse_object_name
from kvstore.store.rebuild import rebuild_index
from tests.builders import MadeEntry, make_entry
from tests.store.kit import child, clean, code_of, files, flip, object_file, overwrite, put, read_back


@pytest.fixture
def made() -> MadeEntry:
    return make_entry(1, 600)


@pytest.fixture
def store(tmp_path: Path, made: MadeEntry) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        put(opened, made)
        yield opened


def hit(store: EntryStore, made: MadeEntry) -> Digest | None:
    return store.match(made.manifest.model.digest, made.manifest.namespace, made.token_ids).entry_id


def test_an_altered_object_is_set_aside_and_its_entries_match_no_more(store: EntryStore, made: MadeEntry) -> None:
    other = make_entry(2, 600)
    put(store, other)
    path = object_file(store, made)
    flip(path)
    wrong = path.read_bytes()
    assert hit(store, made) == made.entry_id
    assert code_of(read_back, store, made) == "STORED_DIGEST_MISMATCH"
    assert code_of(read_back, store, made) == "QUARANTINED"
    assert not path.exists()
    (kept,) = (store.root / "quarantine").glob("*.kvo")
    assert kept.read_bytes() == wrong
    reason = json.loads(Path(f"{kept}.reason.json").read_bytes())
    assert reason["code"] == "STORED_DIGEST_MISMATCH"
    assert reason["detail"]["found"] == sha256_digest(wrong)
    assert hit(store, made) is None
    assert store.info(made.entry_id).damaged
    assert hit(store, other) == other.entry_id
    read_back(store, other)
    assert put(store, made).objects_written == 1
    assert hit(store, made) == made.entry_id
    read_back(store, made, "always")
    clean(store)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_object_is_set_aside(store: EntryStore, made: MadeEntry, keep: int) -> None:
    path = object_file(store, made)
    overwrite(path, path.read_bytes()[:keep])
    assert code_of(read_back, store, made) == "STORED_SIZE_MISMATCH"
    assert not path.exists()
    assert hit(store, made) is None


def test_an_object_that_grew_is_set_aside(store: EntryStore, made: MadeEntry) -> None:
    path = object_file(store, made)
    overwrite(path, path.read_bytes() + b"\0")
    assert code_of(read_back, store, made) == "STORED_SIZE_MISMATCH"


def test_a_missing_object_is_a_typed_error_and_a_miss_from_then_on(store: EntryStore, made: MadeEntry) -> None:
    object_file(store, made).unlink()
    assert code_of(read_back, store, made) == "OBJECT_MISSING"
    assert hit(store, made) is None
    assert code_of(read_back, store, made) == "OBJECT_MISSING"
    put(store, made)
    assert hit(store, made) == made.entry_id
    read_back(store, made)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_no_plain_file_is_as_good_as_none(store: EntryStore, made: MadeEntry, name: str) -> None:
    """A pipe would be waited for without an end, and a device read without one."""
    path = object_file(store, made)
    path.unlink()
    INSTEAD[name](path)
    assert code_of(read_back, store, made) == "OBJECT_MISSING"
    assert hit(store, made) is None
    assert put(store, made).objects_written == 1
    read_back(store, made, "always")
    path.unlink()
    INSTEAD[name](path)
    store.remove([made.entry_id])
    assert [e.entry_id for e in store.entries()] == []


@pytest.mark.parametrize("name", INSTEAD)
def test_a_manifest_that_is_no_plain_file(store: EntryStore, made: MadeEntry, name: str) -> None:
    (path,) = (store.root / "manifests").rglob("*.json")
    path.unlink()
    INSTEAD[name](path)
    assert code_of(store.manifest, made.entry_id) == "OBJECT_MISSING"
    assert hit(store, made) is None
    store.remove([made.entry_id])
    assert put(store, make_entry(2, 600)).created


def test_a_file_that_comes_back_is_read_again(store: EntryStore, made: MadeEntry) -> None:
    path = object_file(store, made)
    data = path.read_bytes()
    path.unlink()
    assert code_of(read_back, store, made) == "OBJECT_MISSING"
    path.write_bytes(data)
    read_back(store, made)


def test_a_change_after_the_first_read_never_gives_wrong_data(tmp_path: Path) -> None:
    """Though size and time of modification stay as they were."""
    made = make_entry(3, 600)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
        read_back(store, made)
    path = tmp_path / "objects"
    with EntryStore.open(tmp_path) as store:
        path = object_file(store, made)
        status = path.stat()
        # In the data of a frame: header and frame table have digests of their own.
        flip(path, path.stat().st_size // 2)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert code_of(read_back, store, made) == "STORED_DIGEST_MISMATCH"
        assert not path.exists()
        assert hit(store, made) is None


def test_what_was_verified_is_known_to_the_next_process(tmp_path: Path) -> None:
    made = make_entry(4, 600)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
        with store._opened.index.read() as connection:
            assert connection.exec_driver_sql("SELECT count(verified) FROM objects").scalar() == 0
        read_back(store, made)
    with EntryStore.open(tmp_path) as store, store._opened.index.read() as connection:
        total, verified = connection.exec_driver_sql("SELECT count(*), count(verified) FROM objects").one()
        assert verified == total == 6


def test_a_file_written_anew_is_verified_anew(store: EntryStore, made: MadeEntry) -> None:
    read_back(store, made)
    path = object_file(store, made)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert code_of(read_back, store, made) == "STORED_DIGEST_MISMATCH"


def test_always_finds_an_object_that_holds_another_payload_than_it_says(tmp_path: Path) -> None:
    """Its stored digest is right, so only decoding it all shows the lie."""
    from kvstore.format.object import encode_object

    made, other = make_entry(5, 200, layers=1), make_entry(6, 200, layers=1)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
        ref = made.manifest.payloads()[0]
        lie = encode_object(other.payloads[other.manifest.payloads()[0].digest], digest=ref.digest)
        path = object_file(store, made)
        path.unlink()
        path = path.with_name(f"{ref.digest[7:]}.{lie.stored_digest[7:]}.kvo")
        path.write_bytes(b"".join(lie.parts))
        with store._opened.index.write() as connection:
            connection.exec_driver_sql(
                "UPDATE objects SET stored = ?, stored_size = ? WHERE payload = ?",
                (bytes.fromhex(lie.stored_digest[7:]), lie.size, bytes.fromhex(ref.digest[7:])),
            )
        assert code_of(read_back, store, made, "always") == "PAYLOAD_DIGEST_MISMATCH"
        assert not path.exists()
        assert code_of(read_back, store, made, "always") == "QUARANTINED"


def test_an_object_of_another_namespace_is_refused(store: EntryStore, made: MadeEntry) -> None:
    ref = made.manifest.payloads()[0]
    with pytest.raises(KVStoreError) as caught, store.open_object(ref, "other"):
        pass
    assert caught.value.code == "OBJECT_MISSING"


def test_a_callers_own_error_passes_through(store: EntryStore, made: MadeEntry) -> None:
    ref = made.manifest.payloads()[0]
    with pytest.raises(ZeroDivisionError), store.open_object(ref, "default"):
        _ = 1 // 0
    read_back(store, made)


def test_a_view_that_is_kept_stays_valid(tmp_path: Path) -> None:
    """Closing unmaps only what nobody looks at any more: keeping the reader is a mistake, never a crash."""
    made = make_entry(7, 2048, layers=1, heads=8, head_dim=64)
    with EntryStore.open(tmp_path) as store:
        put(store, made)
        ref = made.manifest.payloads()[0]
        assert object_file(store, made).stat().st_size > 256 * 1024
        with store.open_object(ref, "default") as reader:
            pass
        assert reader.read_payload().to_bytes() == made.payloads[ref.digest].to_bytes()


@pytest.mark.parametrize("data", [b"{}", b"", b"\xff", b'{"a":1.5}'])
def test_a_changed_manifest_is_never_parsed(store: EntryStore, made: MadeEntry, data: bytes) -> None:
    path = store.root / "manifests" / made.entry_id[7:9] / f"{made.entry_id[7:]}.json"
    overwrite(path, data)
    assert code_of(store.manifest, made.entry_id) == "MANIFEST_DIGEST_MISMATCH"
    assert hit(store, made) is None


def test_a_manifest_with_an_unknown_field_is_refused_by_name(store: EntryStore, made: MadeEntry) -> None:
    document = {**json.loads(made.manifest.data), "colour": "red"}
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    entry_id = sha256_digest(data)
    folder = store.root / "manifests" / entry_id[7:9]
    folder.mkdir(exist_ok=True)
    (folder / f"{entry_id[7:]}.json").write_bytes(data)
    with store._opened.index.write() as connection:
        connection.exec_driver_sql("UPDATE entries SET entry_id = ?", (bytes.fromhex(entry_id[7:]),))
    with pytest.raises(KVStoreError, match="colour") as caught:
        store.manifest(entry_id)
    assert caught.value.code == "FIELD_UNKNOWN"


def test_an_entry_that_is_not_there(store: EntryStore) -> None:
    assert code_of(store.manifest, sha256_digest(b"x")) == "NOT_FOUND"
    assert code_of(store.info, sha256_digest(b"x")) == "NOT_FOUND"


def test_a_read_only_store_reports_damage_and_changes_nothing(store: EntryStore, made: MadeEntry) -> None:
    flip(object_file(store, made))
    before = files(store.root)
    with EntryStore.open(store.root, read_only=True) as reader:
        for _ in range(2):
            assert code_of(read_back, reader, made) == "STORED_DIGEST_MISMATCH"
        assert [finding.code for finding in reader.verify().findings] == ["STORED_DIGEST_MISMATCH"]
    assert files(store.root) == before


def test_too_few_file_descriptors_harm_nothing(store: EntryStore, made: MadeEntry) -> None:
    before = files(store.root)
    script = """
import os, resource, sys
from kvstore.store.entry_store import EntryStore
from kvstore.store.objects import parse_object_name
from kvstore.store.rebuild import rebuild_index
from tests.builders import make_entry
from tests.store.kit import code_of, read_back
made = make_entry(1, 600)
with EntryStore.open(sys.argv[1]) as store:
    store.manifest(made.entry_id)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
    def load():
        for ref in made.manifest.payloads():
            with store.open_object(ref, "default") as reader:
                reader.read_payload()
    print(code_of(load))
"""
    assert child(script, store.root) == "STORE_IO\n"
    assert files(store.root) == before
    assert not store.info(made.entry_id).damaged
    read_back(store, made)


@pytest.mark.parametrize("size", [-1, 0, 1, 2**62])
def test_a_row_that_states_a_wrong_size_does_not_condemn_the_object(
    store: EntryStore, made: MadeEntry, size: int
) -> None:
    """The object's name proves its bytes; the row proves nothing. A new index mends it."""
    path = object_file(store, made)
    with store._opened.index.write() as connection:
        connection.exec_driver_sql(f"UPDATE objects SET stored_size = {size}")
    assert code_of(read_back, store, made) == "STORE_CORRUPT"
    assert path.exists()
    assert not (store.root / "quarantine").exists() or not any((store.root / "quarantine").iterdir())
    rebuild_index(store.root)
    read_back(store, made)
    clean(store)


def test_a_change_in_place_is_another_copy_even_where_the_time_was_set_back(
    store: EntryStore, made: MadeEntry
) -> None:
    """What was remembered as verified is then verified again, by the digest of all that is stored."""
    read_back(store, made)
    path = object_file(store, made)
    name = parse_object_name(path.relative_to(store.root / "objects").as_posix())
    assert name is not None
    before, status = store._opened.objects.identify(name), path.stat()
    assert before == store._opened.objects.identify(name)
    flip(path, status.st_size // 2)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert before != store._opened.objects.identify(name)
    assert code_of(read_back, store, made) == "STORED_DIGEST_MISMATCH"

"""A full disk: a typed error, nothing half-written, nothing lost, and going on when there is space again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.store.entry_store import EntryStore
from kvstore.store.rebuild import rebuild_index
from tests.builders import make_entry
from tests.store.kit import child, clean, code_of, put, read_back


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A volume of 3 MiB."""
    mounted = tmp_path / "m"
    mounted.mkdir()
    if os.getuid() or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", mounted], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting is not allowed here")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def test_a_full_disk(small: Path) -> None:
    kept, large = make_entry(1, 300), make_entry(2, 4000, heads=8, head_dim=32)
    with EntryStore.open(small / "s") as store:
        put(store, kept)
        assert code_of(put, store, large) == "NO_SPACE"
        assert list((small / "s" / "tmp").iterdir()) == []
        assert [info.entry_id for info in store.entries()] == [kept.entry_id]
        clean(store)
        read_back(store, kept, "always")
        put(store, make_entry(3, 300))


def test_what_is_read_needs_no_lease_where_there_is_no_room_for_one(small: Path) -> None:
    kept = make_entry(1, 300)
    with EntryStore.open(small / "s") as store:
        put(store, kept)
        filler, had = small / "filler", []
        for room in (0, 4, 8, 40):
            free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
            filler.write_bytes(bytes(max(0, free - room * 1024)))
            with store.while_leased(kept.entry_id) as lease:
                had.append(lease is not None)
                read_back(store, kept)
            filler.unlink()
            assert list((small / "s" / "tmp").iterdir()) == []
        assert (had[0], had[-1]) == (False, True)
        with store.while_leased(kept.entry_id) as lease:
            assert lease is not None
        clean(store)


def test_a_disk_that_fills_up_bit_by_bit_fails_at_every_step(small: Path) -> None:
    """With less and less room the put fails somewhere else each time: object, manifest, receipt, index."""
    with EntryStore.open(small / "s") as store:
        put(store, make_entry(1, 300))
        filler, codes, failed = small / "filler", set(), 0
        for room in range(8, 400, 8):
            free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
            filler.write_bytes(bytes(max(0, free - room * 1024)))
            made = make_entry(100 + room, 300)
            try:
                codes.add(code_of(put, store, made))
                failed += 1
            except pytest.fail.Exception:
                # There was room enough.
                read_back(store, made)
            filler.unlink()
            assert list((small / "s" / "tmp").iterdir()) == []
            read_back(store, make_entry(1, 300))
            # Nothing is left of a put that failed, not even where the commit was what failed.
            clean(store)
        assert codes == {"NO_SPACE"}
        assert failed >= 5


def test_an_index_for_which_there_is_no_room_is_none(tmp_path: Path, small: Path) -> None:
    """SQLite does not tell where it cannot fold the log into a file that is closed: half of an index would count."""
    made = [make_entry(number, 40) for number in range(40)]
    with EntryStore.open(tmp_path / "s") as store:
        for number, entry in enumerate(made):
            put(store, entry, label=f"label-{number}", annotations={"note": "x" * 200})
    root, codes = small / "s", set()
    shutil.copytree(tmp_path / "s", root)
    filler = small / "filler"
    for room in range(16, 1200, 24):
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        filler.write_bytes(bytes(max(0, free - room * 1024)))
        try:
            assert rebuild_index(root).entries == len(made)
            codes.add("OK")
        except KVStoreError as error:
            codes.add(error.code)
        filler.unlink()
        with EntryStore.open(root) as store:
            assert len(store.labels()) == len(made)
            clean(store)
        shutil.rmtree(root / "quarantine", ignore_errors=True)
    assert codes == {"OK", "NO_SPACE"}


def test_a_new_store_on_a_volume_that_is_too_small(tmp_path: Path, small: Path) -> None:
    codes = set()
    for size in range(16, 700, 20):
        subprocess.run(["mount", "-o", f"remount,size={size}k", small], check=True)
        try:
            EntryStore.open(small / "s").close()
            codes.add("OK")
        except KVStoreError as error:
            codes.add(error.code)
        subprocess.run(["mount", "-o", "remount,size=3m", small], check=True)
        with EntryStore.open(small / "s") as store:
            clean(store)
        shutil.rmtree(small / "s")
    assert codes == {"OK", "NO_SPACE"}


def test_a_file_size_limit(tmp_path: Path) -> None:
    script = """
import resource, sys
from kvstore.store.entry_store import EntryStore
from tests.builders import make_entry
from tests.store.kit import code_of, put
with EntryStore.open(sys.argv[1]) as store:
    put(store, make_entry(1, 300))
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
    print(code_of(put, store, make_entry(2, 256, layers=1, heads=16, head_dim=64)))
"""
    assert child(script, tmp_path) == "NO_SPACE\n"
    with EntryStore.open(tmp_path) as store:
        assert list((tmp_path / "tmp").iterdir()) == []
        read_back(store, make_entry(1, 300))
        clean(store)

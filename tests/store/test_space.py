"""A full disk: a typed error, nothing half-written, nothing lost, and going on when there is space again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.store.entry_store import EntryStore
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
        filler, codes = small / "filler", set()
        for room in range(8, 400, 24):
            free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
            filler.write_bytes(bytes(max(0, free - room * 1024)))
            made = make_entry(100 + room, 300)
            try:
                codes.add(code_of(put, store, made))
            except pytest.fail.Exception:
                # There was room enough.
                read_back(store, made)
            filler.unlink()
            assert list((small / "s" / "tmp").iterdir()) == []
            read_back(store, make_entry(1, 300))
        assert codes == {"NO_SPACE"}
        assert store.verify(deep=True).ok


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

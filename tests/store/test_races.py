"""Processes that put, read and remove the same content at once, and processes that are killed in the middle.

A plain protocol (look whether the file is there; delete rows, then unlink) loses live objects within seconds here.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.store.entry_store import EntryStore
from kvstore.store.temp import sweep_sessions
from tests.builders import MadeEntry, make_entry
from tests.store.kit import child, clean, put, read_back

pytestmark = pytest.mark.race


def drive(root: Path, *, rounds: int, kills: int, seed: int) -> None:
    with EntryStore.open(root):
        pass
    script = """
import pathlib, sys
from tests.store.race_driver import main
main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
"""
    assert child(script, root, rounds, kills, seed) == "done\n"


def test_putting_removing_and_reading_the_same_entries_at_once(tmp_path: Path) -> None:
    drive(tmp_path, rounds=50, kills=0, seed=1)
    with EntryStore.open(tmp_path) as store:
        assert not any(info.damaged for info in store.entries())
        clean(store)


def test_workers_that_are_killed_leave_whole_entries_and_no_temporary_files(tmp_path: Path) -> None:
    drive(tmp_path, rounds=0, kills=40, seed=2)
    with EntryStore.open(tmp_path) as store:
        # Sessions of this boot with a dead process go at once.
        assert list((tmp_path / "tmp").iterdir()) == []
        report = store.verify(deep=True)
        assert {finding.code for finding in report.findings} <= {
            "ORPHAN_OBJECT", "ORPHAN_MANIFEST", "ORPHAN_RECEIPT", "DOOMED_LEFT", "LEASE_LEFT"
        }  # fmt: skip
        assert store.holders() == []
        for tokens in (256, 512):
            made = make_entry(1, tokens, layers=1)
            put(store, made)
            read_back(store, made, "always")
        assert store.verify(deep=True).ok


INTERRUPTED = """
import os, signal, sys, threading, time
from kvstore.store.entry_store import EntryStore
from tests.builders import MadeEntry, make_entry
from tests.store.kit import put
made = make_entry(1, 3000)
store = EntryStore.open(sys.argv[1])
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for seed in range(1, 1000):
        put(store, make_entry(seed, 3000))
except KeyboardInterrupt:
    print("interrupted", len(os.listdir(sys.argv[1] + "/tmp")))
"""


@pytest.mark.parametrize("delay", [0.05, 0.11, 0.17])
def test_ctrl_c_in_the_middle_of_a_put(tmp_path: Path, delay: float) -> None:
    assert child(INTERRUPTED, tmp_path, delay) == "interrupted 0\n"
    with EntryStore.open(tmp_path) as store:
        report = store.verify(deep=True)
        assert report.ok
        assert {finding.code for finding in report.findings} <= {"ORPHAN_OBJECT", "ORPHAN_MANIFEST", "ORPHAN_RECEIPT"}


def test_an_interrupt_at_any_step_leaves_nothing(tmp_path: Path) -> None:
    made = make_entry(1, 2000)
    with EntryStore.open(tmp_path) as store:
        for at in (1, 3, 8):
            steps = [0]

            def progress(done: int, total: int, at: int = at, steps: list[int] = steps) -> None:
                steps[0] += 1
                if steps[0] == at:
                    signal.raise_signal(signal.SIGINT)

            with pytest.raises(KeyboardInterrupt):
                put(store, made, progress=progress)
            assert list((tmp_path / "tmp").iterdir()) == []
            assert not any((tmp_path / "objects").rglob("*.kvo"))
            clean(store)
        put(store, made)
        read_back(store, made)


def test_a_live_session_is_never_swept(tmp_path: Path) -> None:
    made, seen = make_entry(1, 2000), []
    with EntryStore.open(tmp_path) as store:

        def progress(done: int, total: int) -> None:
            # By age and by process id it might be dead; its lock says otherwise.
            seen.append(sweep_sessions(tmp_path / "tmp", young=-1))

        put(store, made, progress=progress)
        assert set(seen) == {0}
        clean(store)


def test_a_forked_child_uses_connections_of_its_own(tmp_path: Path) -> None:
    script = """
import os, sys
from kvstore.store.entry_store import EntryStore
from tests.builders import MadeEntry, make_entry
from tests.store.kit import put, read_back
store = EntryStore.open(sys.argv[1])
put(store, make_entry(1, 600))
children = []
for seed in (2, 3):
    pid = os.fork()
    if not pid:
        put(store, make_entry(seed, 600))
        read_back(store, make_entry(1, 600))
        store.close()
        os._exit(0)
    children.append(pid)
put(store, make_entry(4, 600))
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
for seed in (1, 2, 3, 4):
    read_back(store, make_entry(seed, 600))
store.close()
print("ok")
"""
    assert child(script, tmp_path) == "ok\n"
    with EntryStore.open(tmp_path) as store:
        assert len(store.entries()) == 4
        clean(store)


def test_one_store_used_by_many_threads(tmp_path: Path) -> None:
    entries = [make_entry(seed, 600) for seed in range(8)]

    def work(made: MadeEntry) -> None:
        put(store, made)
        for other in entries:
            found = store.match(other.manifest.model.digest, "default", other.token_ids)
            if found:
                read_back(store, other, "always")

    with EntryStore.open(tmp_path) as store, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, entries)) == [None] * 8
        assert len(store.entries()) == 8
        clean(store)

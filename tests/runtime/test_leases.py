"""What a load, and a put with a base, work from is not removed under them, by whatever process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import BusyError, NotFoundError
from kvstore.store.entry_store import EntryStore
from tests.runtime.driving import code_of
from tests.runtime.tiny import NEXT, logits, prefilled, run, tiny, tokens
from tests.store.kit import ROOT

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

COUNT = 300


def put(store: kvstore.Store, model: kvstore.BoundModel) -> str:
    return store.put(prefilled(model, COUNT), token_ids=tokens(COUNT), model=model).subject


def test_a_load_holds_a_lease_while_it_reads(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    entry, refused = put(store, model), []

    def remove(done: int, total: int) -> None:
        with EntryStore.open(store.entries.root) as other:
            refused.append(code_of(other.remove, [entry]))

    restored = store.load(store.match(tokens(COUNT + 1), model=model), into=model, progress=remove)
    assert set(refused) == {"ENTRY_LEASED"}
    assert store.entries.holders() == []
    store.remove(entry)
    assert logits(model, restored.cache, NEXT) == logits(model, prefilled(model, COUNT), NEXT)


def test_a_brief_load_takes_no_lease(store: kvstore.Store, models: Path) -> None:
    """It would cost more than the load; one that calls somebody meanwhile may take any time."""
    model = tiny(models, "llama")
    entry, sessions = put(store, model), store.entries.root / "tmp"
    before = sessions.stat().st_mtime_ns
    store.load(entry, into=model)
    assert sessions.stat().st_mtime_ns == before
    store.load(entry, into=model, cancelled=lambda: False)
    assert sessions.stat().st_mtime_ns > before


def test_a_put_holds_a_lease_on_its_base(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    entry = put(store, model)
    held: list[str] = []
    restored = store.load(entry, into=model)
    run(model, restored.cache, [7] * 20)

    def look(done: int, total: int) -> None:
        held.extend(holder.entry_id for holder in store.entries.holders())

    ids = [*tokens(COUNT), *[7] * 20]
    receipt = store.put(restored.cache, token_ids=ids, model=model, base=restored, progress=look)
    assert set(held) == {entry}
    assert receipt.facts["objects_reused"] == 1
    assert store.entries.holders() == []
    store.remove(entry)
    again = store.put(restored.cache, token_ids=ids, model=model, base=restored)
    assert again.subject == receipt.subject, "a base that has gone is none"
    assert store.verify(deep=True).ok


def test_a_lease_from_the_match_to_the_put(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "qwen3_next")
    entry = put(store, model)
    hit = store.match([*tokens(COUNT), 7], model=model)
    with store.lease(hit, seconds=60) as lease:
        assert lease.entry_id == hit.entry_id == entry
        restored = store.load(hit, into=model)
        assert code_of(store.remove, entry) == "ENTRY_LEASED", "the load's own lease has ended, this one has not"
        run(model, restored.cache, [7])
        branch = store.put(restored.cache, token_ids=[*tokens(COUNT), 7], model=model, base=hit).subject
        assert code_of(store.remove, branch, entry) == "ENTRY_LEASED"
    store.remove(entry)
    assert logits(model, store.load(branch, into=model).cache, NEXT) == logits(model, restored.cache, NEXT)
    assert store.verify(deep=True).ok


def test_what_can_be_leased(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    assert code_of(store.lease, store.match([1, 2], model=model)) == "NO_PREFIX"
    entry = put(store, model)
    store.label("name", entry)
    for ref in ("name", entry, entry[7:20]):
        with store.lease(ref) as lease:
            assert lease.entry_id == entry
    assert code_of(store.lease, "nothing") == "NOT_FOUND"
    with store.lease("name"):
        store.remove("name", force=True)
    assert code_of(store.load, entry, into=model) == "NOT_FOUND"


def test_a_store_that_cannot_be_written_is_loaded_from_all_the_same(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    entry = put(store, model)
    with kvstore.Store.open(store.entries.root, read_only=True) as reader:
        assert reader.load(entry, into=model).token_count == COUNT
        assert code_of(reader.lease, entry) == "STORE_READ_ONLY"


def test_an_export_holds_a_lease(store: kvstore.Store, models: Path, tmp_path: Path) -> None:
    model = tiny(models, "llama")
    entry = put(store, model)
    held: list[str] = []

    def look(done: int, total: int) -> None:
        held.extend(holder.entry_id for holder in store.entries.holders())

    store.entries.export_bundle(store.entries.resolve(entry), tmp_path / "bundle", progress=look)
    assert set(held) == {entry}
    assert store.entries.holders() == []


LOADER = """
import sys
import kvstore
from tests.runtime.tiny import tiny, tokens
from pathlib import Path

def stop(done, total):
    print("reading", flush=True)
    sys.stdin.readline()

model = tiny(Path(sys.argv[2]), "llama")
with kvstore.Store.open(sys.argv[1]) as store:
    hit = store.match(tokens(301), model=model)
    store.load(hit, into=model, progress=stop)
"""


@pytest.mark.race
def test_a_load_that_is_killed_holds_nothing(store: kvstore.Store, models: Path) -> None:
    entry = put(store, tiny(models, "llama"))
    process = subprocess.Popen(
        [sys.executable, "-c", LOADER, str(store.entries.root), str(models)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    assert code_of(store.remove, entry) == "ENTRY_LEASED"
    assert [holder.pid for holder in store.entries.holders()] == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store.remove(entry)
    assert not list((store.entries.root / "objects").rglob("*.kvo"))


TALKER = """
import random, sys
import kvstore
from kvstore.errors import NotFoundError
from tests.runtime.tiny import run, tiny, tokens
from pathlib import Path

rng = random.Random(int(sys.argv[3]))
model = tiny(Path(sys.argv[2]), "llama")
with kvstore.Store.open(sys.argv[1]) as store:
    for line in sys.stdin:
        ids = tokens(rng.choice((300, 520, 560)), seed=rng.randrange(2))
        hit = store.match(ids + [1], model=model)
        try:
            lease = store.lease(hit)
        except NotFoundError:
            # Removed since the match, or a miss: read from the start.
            receipt = store.put(run(model, model.model.make_cache(), ids), token_ids=ids, model=model)
            print("new", flush=True)
            continue
        with lease:
            restored = store.load(hit, into=model)
            run(model, restored.cache, ids[restored.token_count :])
            store.put(restored.cache, token_ids=ids, model=model, base=hit)
            print("on", flush=True)
"""


@pytest.mark.race
def test_conversations_go_on_while_entries_are_removed_and_processes_killed(
    store: kvstore.Store, models: Path
) -> None:
    """From the lease to the put nothing may fail, whatever is removed by name meanwhile."""
    model = tiny(models, "llama")
    talkers = [
        subprocess.Popen(
            [sys.executable, "-c", TALKER, str(store.entries.root), str(models), str(seed)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for seed in (1, 2)
    ]  # fmt: skip
    for talker in talkers:
        assert talker.stdin is not None
        talker.stdin.write("next\n" * 30)
        talker.stdin.flush()
    said: list[str] = []
    for turn in range(25):
        for talker in talkers:
            assert talker.stdout is not None
            said.append(talker.stdout.readline())
        for info in store.list() if turn % 3 == 0 else []:
            with suppress(BusyError, NotFoundError):
                store.remove(info.entry_id)
    assert set(said) == {"new\n", "on\n"}
    talkers[0].send_signal(signal.SIGKILL)
    talkers[0].communicate()
    talkers[1].communicate()
    assert talkers[1].returncode == 0
    assert store.entries.holders() == []
    assert store.verify(deep=True).ok
    for info in store.list():
        cache = store.load(info.entry_id, into=model, verification="always").cache
        ids = store.entries.token_ids(store.show(info.entry_id).manifest).tolist()
        assert store.put(cache, token_ids=ids, model=model).subject == info.entry_id
        store.remove(info.entry_id)
    assert store.entries.stats().objects == 0

"""Payloads that are encoded before their manifest exists: the same store as without, nothing left of what failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import CancelledError, KVStoreError
from kvstore.store.entry_store import EntryStore
from kvstore.store.publish import Written
from kvstore.store.staging import Staging
from tests.builders import MadeEntry, make_entry
from tests.store.kit import ROOT, clean, files, put, read_back


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


def stage(staging: Staging, made: MadeEntry) -> list[bool]:
    """Stage every payload as a capture does; which of them were taken."""
    taken = []
    for ref in made.manifest.payloads():
        payload = made.payloads[ref.digest]
        plans = staging.plans(payload)
        taken.append(plans is not None)
        if plans is not None:
            with staging.copied(payload) as copy:
                assert staging.encode(copy, plans) == ref.digest
    return taken


def put_staged(store: EntryStore, made: MadeEntry, **options: Any) -> Written:
    with store.staging(namespace=made.manifest.namespace, **options) as staging:
        stage(staging, made)
        return store.publish(
            made.manifest, made.source, token_ids=made.token_ids, staging=staging, codec=options.get("codec", "small")
        )


@pytest.mark.parametrize("codec", ["small", "fast"])
@pytest.mark.parametrize("tokens", [1, 256, 700])
def test_the_same_files_as_without(tmp_path: Path, codec: Any, tokens: int) -> None:
    made = make_entry(1, tokens)
    with EntryStore.open(tmp_path / "a") as one, EntryStore.open(tmp_path / "b") as other:
        staged = put_staged(one, made, codec=codec)
        assert made.asked == []
        assert staged.stored_bytes == put(other, made, codec=codec).stored_bytes
        names = [{name for name in files(store.root) if name.startswith("objects/")} for store in (one, other)]
        assert names[0] == names[1]
        read_back(one, made, "always")
        clean(one)


def test_what_is_stored_is_not_encoded_again(store: EntryStore) -> None:
    made, longer = make_entry(2, 1200, layers=1), make_entry(2, 1500, layers=1)
    put_staged(store, made)
    with store.staging(namespace="default") as staging:
        assert stage(staging, longer)[:2] == [True, False]
        assert staging.staged == {}
        assert not staging.needed
    written = put_staged(store, longer)
    assert written.objects_reused == 4
    read_back(store, longer, "always")
    clean(store)


def test_what_was_staged_for_nothing_goes(store: EntryStore) -> None:
    with store.staging(namespace="default") as staging:
        made = make_entry(3, 600)
        assert all(stage(staging, made))
        assert staging.staged.keys() == {ref.digest for ref in made.manifest.payloads()}
    assert list((store.root / "tmp").iterdir()) == []
    assert [name for name in files(store.root) if name.startswith("objects/")] == []


def test_an_entry_that_was_staged_for_another_is_not_taken(store: EntryStore) -> None:
    one, other = make_entry(4, 600), make_entry(5, 600)
    with store.staging(namespace="default") as staging:
        stage(staging, one)
        store.publish(other.manifest, other.source, token_ids=other.token_ids, staging=staging)
    read_back(store, other, "always")
    found = {Path(name).name.split(".")[0] for name in files(store.root) if name.endswith(".kvo")}
    wanted = (*other.manifest.payloads(), other.manifest.prefix.token_ids)
    assert found == {ref.digest.removeprefix("sha256:") for ref in wanted}
    clean(store)


def test_stopping_leaves_nothing(store: EntryStore) -> None:
    made, asked = make_entry(6, 3000), []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 8

    with pytest.raises(CancelledError):
        put_staged(store, made, cancelled=cancelled)
    assert list((store.root / "tmp").iterdir()) == []
    assert store.entries() == []
    put_staged(store, made)
    clean(store)


def test_a_copy_is_what_is_hashed_and_stored_whatever_becomes_of_the_source(store: EntryStore) -> None:
    made = make_entry(7, 256)
    ref = made.manifest.payloads()[0]
    payload = made.payloads[ref.digest]
    with store.staging(namespace="default") as staging:
        plans = staging.plans(payload)
        assert plans is not None
        with staging.copied(payload) as copy:
            before = [array.copy() for array in payload.arrays]
            for array in payload.arrays:
                array[...] = 0
            assert staging.encode(copy, plans) == ref.digest
        for array, bits in zip(payload.arrays, before, strict=True):
            array[...] = bits
        store.publish(made.manifest, made.source, token_ids=made.token_ids, staging=staging)
    read_back(store, made, "always")


def test_a_store_for_reading_only_is_refused_first(store: EntryStore) -> None:
    put(store, make_entry(8, 10))
    with EntryStore.open(store.root, read_only=True) as reading, pytest.raises(KVStoreError) as caught:
        put_staged(reading, make_entry(9, 10))
    assert caught.value.code == "STORE_READ_ONLY"


_ENDLESS = """
import sys
from pathlib import Path
from kvstore.store.entry_store import EntryStore
from tests.builders import make_entry
from tests.store.test_staging import stage
made = make_entry(10, 3000)
with EntryStore.open(Path(sys.argv[1])) as store, store.staging(namespace="default") as staging:
    stage(staging, made)
    print("staged", flush=True)
    sys.stdin.read()
"""


def test_a_killed_put_leaves_what_the_next_process_sweeps(store: EntryStore) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, store.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"staged\n"
        process.send_signal(signal.SIGKILL)
    assert len(list((store.root / "tmp").iterdir())) == 1
    with EntryStore.open(store.root) as again:
        assert list((again.root / "tmp").iterdir()) == []
        assert again.entries() == []
        clean(again)

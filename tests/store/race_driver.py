"""Forks workers that put, remove and read the same few entries, and kills some of them; see test_races.

Run as ``python -m tests.store.race_driver ROOT ROUNDS KILLS SEED``. Prints the operations done.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.store.entry_store import EntryStore
from kvstore.store.objects import ObjectName
from kvstore.store.schema import LIVE, objects
from tests.builders import MadeEntry, make_entry
from tests.store.kit import put, read_back

IS_LIVE = objects.c.state == LIVE
# Few entries with shared blocks, so that everybody meets everybody.
MADE = [make_entry(seed, tokens, layers=1) for seed in (1,) for tokens in (256, 512)]
KINDS = ("put", "churn", "churn", "churn", "read", "hold", "audit")
SEEN = {
    ("churn", "NOT_FOUND"), ("churn", "ENTRY_LEASED"), ("read", "NOT_FOUND"), ("read", "OBJECT_MISSING"),
    ("hold", "NOT_FOUND"),
}  # fmt: skip


def step(store: EntryStore, kind: str, entry: MadeEntry, rng: random.Random) -> None:
    try:
        if kind in ("put", "churn"):
            put(store, entry, codec=rng.choice(["small", "fast"]))
        if kind == "churn":
            store.remove([entry.entry_id])
        elif kind == "audit":
            audit(store)
        elif kind == "hold":
            hold(store, entry)
        elif kind == "read":
            found = store.match(entry.manifest.model.digest, "default", entry.token_ids)
            read_back(store, next((made for made in MADE if made.entry_id == found.entry_id), entry))
    except KVStoreError as error:
        # What a removal by others looks like; anything else, wrong data above all, ends the worker.
        if (kind, error.code) not in SEEN:
            raise


def hold(store: EntryStore, entry: MadeEntry) -> None:
    """What is leased is there until it is released, whoever removes what meanwhile."""
    with store.lease(entry.entry_id):
        try:
            for _ in range(3):
                read_back(store, entry)
                time.sleep(0.002)
        except KVStoreError as error:
            raise AssertionError("a leased entry was removed") from error


def audit(store: EntryStore) -> None:
    """A live row has a file, at every moment at which nobody is in the middle of publishing or removing.

    A put heals what it finds missing, so looking at the end is not enough.
    """
    with store._opened.index.write() as connection:
        for payload, stored in connection.execute(sa.select(objects.c.payload, objects.c.stored).where(IS_LIVE)).all():
            assert store._opened.objects.identify(ObjectName(payload, stored)) is not None
        assert connection.exec_driver_sql("SELECT count(*) FROM entries WHERE damaged").scalar() == 0


def worker(root: Path, kind: str, seed: int, rounds: int) -> int:
    """Fork one; its exit status is 0 if nothing was wrong. With no rounds it goes on until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        rng, done = random.Random(seed), 0
        with EntryStore.open(root) as store:
            while not rounds or done < rounds:
                step(store, kind, rng.choice(MADE), rng)
                done += 1
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(root: Path, rounds: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    running = {worker(root, kind, seed * 100 + at, rounds): kind for at, kind in enumerate(KINDS)}
    for kill in range(kills):
        time.sleep(rng.uniform(0.01, 0.15))
        pid = rng.choice(list(running))
        kind = running.pop(pid)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"a {kind} worker had ended by itself"
        running[worker(root, kind, seed * 100 + 50 + kill, rounds)] = kind
    for pid in running:
        if kills:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) if kills else status == 0, f"a {running[pid]} worker failed"
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

"""Filling: bit for bit through both codecs, all or nothing, and no copy at the first token."""

from __future__ import annotations

import gc
import threading
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kvstore.errors import KVStoreError
from kvstore.runtime.materialize import fill
from tests.releases import held
from tests.runtime.driving import bits, code_of, feed, fetched, keys_values, same_bits, same_future
from tests.runtime.trips import MemoryObjects, captured, plan, restored


def caches(count: int) -> list[Any]:
    return [feed(KVCache(), [count]), feed(RotatingKVCache(700), [count]), feed(QuantizedKVCache(32, 8), [count])]


@pytest.mark.parametrize("codec", ["small", "fast"])
@pytest.mark.parametrize("count", [1, 256, 600, 4000])
def test_both_codecs_and_both_ways_of_sharing_work(count: int, codec: str) -> None:
    for before, after in zip(caches(count), restored(caches(count), count, codec=codec), strict=True):
        assert same_future(after, before, [1, 1])


def test_the_first_token_copies_nothing() -> None:
    for count in (300, 256):
        (back,) = restored([feed(KVCache(), [count], size=512)], count)
        nbytes = back.keys.nbytes
        new = keys_values(1, 1, size=512)
        mx.eval(new)
        gc.collect()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        back.update_and_fetch(*new)
        mx.eval(back.keys, back.values)
        assert mx.get_peak_memory() - before < nbytes // 8


def test_memory_is_what_the_plan_said() -> None:
    made = captured(caches(600), 600)
    wanted = plan(made)
    objects = MemoryObjects(made)
    gc.collect()
    before = mx.get_active_memory()
    filled = fill(objects, wanted)
    grown = mx.get_active_memory() - before
    assert filled.buffer_bytes == wanted.layout.total_bytes
    assert wanted.layout.total_bytes <= grown < wanted.layout.total_bytes * 1.05 + 65536
    assert filled.objects == objects.opened == len(made.manifest.payloads())


def test_arrays_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened for a cache that there is no room for, and nothing is given out."""
    made = captured(caches(300), 300)
    wanted, objects = plan(made), MemoryObjects(made)

    def full(*_: Any) -> None:
        raise RuntimeError("[malloc_or_wait] Unable to allocate 300 bytes.")

    monkeypatch.setattr(mx, "eval", full)
    assert code_of(fill, objects, wanted) == "MATERIALIZE_FAILED"
    assert objects.opened == 0


def broken(index: int, at: int) -> tuple[Any, MemoryObjects]:
    made = captured(caches(600), 600)
    objects = MemoryObjects(made)
    ref = made.manifest.payloads()[index]
    objects.data[ref.digest][at] ^= 0x40
    return plan(made), objects


@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("at", [20, 200, 5000])
def test_a_damaged_object_leaves_nothing_behind(index: int, at: int) -> None:
    wanted, objects = broken(index, at)
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(KVStoreError) as caught:
        fill(objects, wanted)
    assert caught.value.phase in ("integrity", "payload", "json", "schema")
    del caught
    gc.collect()
    assert mx.get_active_memory() - before < 1024


def test_an_object_with_other_tensors_is_refused() -> None:
    made, other = captured(caches(600), 600), captured([feed(KVCache(), [600])], 600)
    objects = MemoryObjects(made)

    class Swapped(MemoryObjects):
        def open_object(self, ref: Any, namespace: str, *, verification: str = "auto") -> Any:
            wrong = other.manifest.payloads()[0]
            return super().open_object(wrong, namespace, verification=verification)

    swapped = Swapped(other)
    assert code_of(fill, swapped, plan(made)) == "PAYLOAD_TENSORS_MISMATCH"
    assert fill(objects, plan(made)).payload_bytes == sum(ref.size for ref in made.manifest.payloads())


@pytest.mark.parametrize("count", [300, 4000])
def test_a_cancelled_fill_leaves_nothing_behind(count: int) -> None:
    made = captured(caches(count), count)
    objects, wanted = MemoryObjects(made), plan(made)
    gc.collect()
    before = mx.get_active_memory()
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 4

    assert code_of(fill, objects, wanted, cancelled=cancelled) == "CANCELLED"
    gc.collect()
    assert mx.get_active_memory() - before < 1024


def test_an_interrupt_in_the_callback_leaves_nothing_behind() -> None:
    made = captured(caches(4000), 4000)
    objects, wanted = MemoryObjects(made), plan(made)
    gc.collect()
    before = mx.get_active_memory()

    def progress(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(objects, wanted, progress=progress)
    gc.collect()
    assert mx.get_active_memory() - before < 1024


def test_progress_comes_on_this_thread_and_ends_at_the_total() -> None:
    made = captured(caches(4000), 4000)
    seen: list[tuple[int, int, int]] = []
    objects = MemoryObjects(made)
    fill(objects, plan(made), progress=lambda done, total: seen.append((done, total, threading.get_ident())))
    total = sum(ref.size for ref in made.manifest.payloads())
    assert seen[0][:2] == (0, total)
    assert seen[-1][:2] == (total, total)
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    assert {thread for *_, thread in seen} == {threading.get_ident()}


def test_what_a_worker_thread_restored_is_used_on_another() -> None:
    cache = feed(KVCache(), [300])
    made = captured([cache], 300)
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.extend(fill(MemoryObjects(made), plan(made)).cache))
    worker.start()
    worker.join()
    assert same_future(found[0], cache, [1, 2])


def test_the_entry_can_be_filled_again_and_again() -> None:
    cache = feed(KVCache(), [300])
    made = captured([cache], 300)
    objects = MemoryObjects(made)
    (first,), (second,) = (fill(objects, plan(made)).cache for _ in range(2))
    fetched(first, [1, 1, 1])
    assert same_bits(held(second), held(cache))
    assert not bits(second.keys)[:, :, 300:].any()

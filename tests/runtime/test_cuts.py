"""Cuts in later chunks, and cuts against a cache that never went further, read in the same pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.runtime.probe import CacheOptions, make_cache
from tests.releases import CHUNK
from tests.runtime.driving import code_of
from tests.runtime.test_longest import other_end
from tests.runtime.tiny import NEXT, logits, prefilled, run, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

STEP = 2 * CHUNK
LATER = 3 * CHUNK + 4
"""Read in two pieces: after the first, all but the last chunk goes."""


@pytest.mark.parametrize("back", [CHUNK + 4, CHUNK + 3, CHUNK, 5, 1])
def test_a_cut_in_a_later_chunk(store: kvstore.Store, models: Path, back: int) -> None:
    """The front was trimmed before the last piece, and what is left of the chunk before the cut is whole."""
    model, at = tiny(models, "llama4"), LATER - back
    store.put(prefilled(model, LATER, step=STEP), token_ids=tokens(LATER), model=model)
    (info,) = store.list()
    starts = {leaf.integer("start") for leaf in store.show(info.entry_id).manifest.leaves.values()
              if leaf.kind == "kv-chunked"}  # fmt: skip
    assert starts == {CHUNK}
    assert info.lowest_cut == STEP
    hit = store.match(other_end(at, LATER + 50), model=model)
    assert (hit.entry_id, hit.token_count) == (info.entry_id, at), hit.reasons
    trimmed = prefilled(model, LATER, step=STEP)
    for cache in trimmed:
        assert cache.trim(back) == back
    expected = logits(model, trimmed, NEXT)
    assert logits(model, store.load(hit, into=model).cache, NEXT) == expected
    assert logits(model, prefilled(model, at, step=STEP), NEXT) == expected, "nor does the cold run differ"


def test_no_cut_before_the_chunk_that_is_left(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama4")
    entry = store.put(prefilled(model, LATER, step=STEP), token_ids=tokens(LATER), model=model).subject
    hit = store.match(other_end(STEP - 1, LATER), model=model)
    assert not hit
    assert hit.reasons[0].message == f"window not stored before {STEP}"
    whole = store.match(tokens(LATER + 1), model=model)
    assert whole.entry_id == entry
    assert code_of(store.load, kvstore.Hit(entry, STEP - 1, STEP - 1, ()), into=model) == "CUT_NOT_POSSIBLE"


def test_a_branch_goes_on_from_a_later_chunk(store: kvstore.Store, models: Path) -> None:
    """Load in the middle, extend, put, and load what that made."""
    model, at = tiny(models, "llama4"), LATER - 7
    store.put(prefilled(model, LATER, step=STEP), token_ids=tokens(LATER), model=model)
    ids = other_end(at, LATER + 20)
    restored = store.load(store.match(ids, model=model), into=model)
    assert restored.token_count == at
    twin = prefilled(model, LATER, step=STEP)
    for cache in twin:
        cache.trim(7)
    for caches in (restored.cache, twin):
        run(model, caches, ids[at:], step=9)
    branch = store.put(restored.cache, token_ids=ids, model=model, base=restored).subject
    assert branch == store.put(twin, token_ids=ids, model=model).subject
    assert logits(model, store.load(branch, into=model).cache, NEXT) == logits(model, twin, NEXT)


COLD: dict[str, tuple[str, CacheOptions, int, tuple[int, ...]]] = {
    "kv": ("llama", CacheOptions(), 600, (64, 100, 256, 513, 576, 599)),
    "kv-quantized, 8 bits": ("qwen3", CacheOptions(kv_bits=8, kv_group_size=32), 300, (64, 128, 257, 299)),
    "kv-quantized, 4 bits": ("llama", CacheOptions(kv_bits=4, kv_group_size=32), 300, (31, 64, 256)),
    "kv-quantized, 2 bits": ("llama", CacheOptions(kv_bits=2, kv_group_size=32), 100, (1, 64, 99)),
    "kv-rotating, not full": ("qwen3", CacheOptions(max_kv_size=128), 120, (1, 64, 119)),
    "kv-rotating, full, one back": ("gemma3", CacheOptions(), 65, (64,)),
    "kv-chunked, first chunk": ("llama4", CacheOptions(), CHUNK - 1, (1, CHUNK // 2, CHUNK - 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", COLD)
def test_a_cut_is_what_a_cold_run_in_the_same_pieces_gives(store: kvstore.Store, models: Path, name: str) -> None:
    family, options, count, places = COLD[name]
    model = tiny(models, family)
    for at in places:
        cache = make_cache(model.model, options)
        # The pieces end at the cut, so that both runs have read the same before it.
        run(model, cache, tokens(at))
        run(model, cache, tokens(count)[at:])
        entry = store.put(cache, token_ids=tokens(count), model=model).subject
        hit = store.match(other_end(at, count + 50), model=model, options=options)
        assert (hit.entry_id, hit.token_count) == (entry, at), hit.reasons
        cold = run(model, make_cache(model.model, options), tokens(at))
        assert logits(model, store.load(hit, into=model).cache, NEXT) == logits(model, cold, NEXT), at
        store.remove(entry)

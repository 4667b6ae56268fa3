"""Chunks whose front trim goes by the length of their buffer: exact to the row, and refused where it would be wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache

import kvstore
from kvstore.errors import KVStoreError
from kvstore.runtime.binding import load_model
from kvstore.runtime.buffers import needs
from kvstore.runtime.older_mlx_lm import BUFFER_ROWS
from tests.runtime.driving import code_of, feed, keys_values, same_bits
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS, logits, run, tiny, tokens
from tests.runtime.trips import captured, restored

STEP = ChunkedKVCache.step
TURNS = ([100], [100, 200], [300], [256, 1], [250, 1, 1, 1, 1, 1, 1, 1], [100, 200, 1, 1], [512, 40], [255, 255, 255])


def forward(cache: Any, steps: list[int], *, seed: int = 0) -> list[Any]:
    """What attention reads at each step, in a model that lets the front be trimmed before it."""
    read = []
    for number, rows in enumerate(steps):
        cache.maybe_trim_front()
        read.append(cache.update_and_fetch(*keys_values(rows, 1000 * seed + number, size=8)))
        mx.eval(read[-1])
    return read


def sees_its_chunk(cache: Any) -> bool:
    """Whether the last token that was read saw all of its chunk."""
    return bool(cache.start_position <= (cache.offset - 1) // cache.chunk_size * cache.chunk_size)


def sees_its_next(cache: Any) -> bool:
    """Whether the next one will."""
    twin = ChunkedKVCache(cache.chunk_size)
    vars(twin).update(vars(cache))
    twin.maybe_trim_front()
    return bool(twin.start_position <= twin.offset // twin.chunk_size * twin.chunk_size)


@given(
    st.lists(st.sampled_from([1, 2, 7, 99, 256, 300]), min_size=1, max_size=7),
    st.sampled_from([24, 256, 300, 512, 8192]),
)
def test_exactly_what_it_was_or_refused_with_reason(steps: list[int], chunk: int) -> None:
    cache = ChunkedKVCache(chunk)
    for number, rows in enumerate(steps):
        if not sees_its_next(cache):
            assert code_of(restored, [cache], cache.offset) == "CUT_NOT_POSSIBLE"
            break
        forward(cache, [rows], seed=number)
        if not sees_its_chunk(cache):
            assert code_of(captured, [cache], cache.offset) == "CACHE_INCONSISTENT"
            break
        if sees_its_next(cache):
            (back,) = restored([cache], cache.offset)
            assert vars(back).keys() == vars(cache).keys()
            assert (back.start_position, back.offset, back.chunk_size) == (cache.start_position, cache.offset, chunk)
            assert back.keys.shape == cache.keys.shape
            count = cache.offset - cache.start_position
            assert same_bits(back.keys[..., :count, :], cache.keys[..., :count, :])
            assert same_bits(back.values[..., :count, :], cache.values[..., :count, :])


@pytest.mark.parametrize("steps", TURNS, ids=str)
def test_it_goes_on_through_the_next_trims(steps: list[int]) -> None:
    cache = ChunkedKVCache(256)
    forward(cache, steps)
    (back,) = restored([cache], sum(steps))
    following = [1] * 200 + [9, 1]
    assert same_bits(forward(back, following, seed=5), forward(cache, following, seed=5))
    assert back.start_position == cache.start_position > 0


def test_only_a_length_that_does_not_follow_is_written_down() -> None:
    """So an entry has the same id as the one that a newer release makes of the same state."""
    plain, turns = ChunkedKVCache(256), ChunkedKVCache(256)
    forward(plain, [300])
    forward(turns, [100, 200])
    assert captured([plain], 300).manifest.continuation == ()
    assert captured([turns], 300).manifest.continuation == ((BUFFER_ROWS, 356),)


def test_layers_of_other_lengths_are_refused() -> None:
    first, second = ChunkedKVCache(256), ChunkedKVCache(256)
    forward(first, [100, 200])
    forward(second, [300])
    assert code_of(captured, [first, second], 300) == "CACHE_INCONSISTENT"


def test_layers_never_written_say_nothing() -> None:
    cache = ChunkedKVCache(256)
    forward(cache, [100, 200])
    back = restored([ChunkedKVCache(256), cache], 300)
    assert back[0].keys is None
    assert back[1].keys.shape[2] == 356


def test_a_cut_is_the_state_of_whoever_read_no_more() -> None:
    """The buffer of a longer prompt would have the cut one drop every row that it has."""
    cache, twin = ChunkedKVCache(256), ChunkedKVCache(256)
    forward(cache, [300])
    (back,) = restored([cache], 300, at=100)
    forward(twin, [100])
    twin.keys[..., :100, :], twin.values[..., :100, :] = cache.keys[..., :100, :], cache.values[..., :100, :]
    following = [1, 7, 200, 1]
    assert same_bits(forward(back, following, seed=3), forward(twin, following, seed=3))


@pytest.mark.parametrize("rows", [299, 813, "356"])
def test_a_length_that_no_buffer_had_is_refused(rows: Any) -> None:
    cache = ChunkedKVCache(256)
    forward(cache, [100, 200])
    manifest = replace(captured([cache], 300).manifest, continuation=((BUFFER_ROWS, rows),))
    assert code_of(needs, manifest, 300) == "CACHE_STATE_INVALID"


# With a model.


@pytest.mark.usefixtures("plain_kernels", "own_cache")
@pytest.mark.parametrize("turns", [[255], [100, 200], [300], [60, 190, 20], [256, 256, 3]], ids=str)
def test_a_model_goes_on_as_if_never_saved(models: Path, store: kvstore.Store, turns: list[int]) -> None:
    model, ids = tiny(models, "llama4"), tokens(sum(turns))
    cache = model.model.make_cache()
    at = 0
    for count in turns:
        run(model, cache, ids[at : at + count], step=count)
        at += count
    entry = store.put(cache, token_ids=ids, model=model).subject
    restored = store.load(entry, into=model)
    following = [[n * 7 % 90] for n in range(64)]
    assert logits(model, restored.cache, following) == logits(model, cache, following)


@pytest.mark.usefixtures("plain_kernels", "own_cache")
def test_a_state_that_would_go_wrong_is_found_and_refused_in_words(models: Path, store: kvstore.Store) -> None:
    config = {**CONFIGS["llama4"]["text_config"], "attention_chunk_size": 300}
    model = load_model(real_folder(models / "chunks of 300", {"model_type": "llama4", "text_config": config}))
    ids = tokens(280)
    cache = run(model, model.model.make_cache(), ids, step=280)
    entry = store.put(cache, token_ids=ids, model=model).subject
    with pytest.raises(KVStoreError) as refused:
        store.load(entry, into=model)
    assert refused.value.code == "CUT_NOT_POSSIBLE"
    assert "0.32" in str(refused.value)
    # What the class itself does from there.
    run(model, cache, [5])
    assert cache[0].start_position == 212
    with pytest.raises(KVStoreError) as lost:
        store.put(cache, token_ids=[*ids, 5], model=model)
    assert lost.value.code == "CACHE_INCONSISTENT"


def test_head_room_without_a_model() -> None:
    """A buffer below the chunk keeps its own step of head room; the next token copies nothing."""
    cache = feed(ChunkedKVCache(512), [40])
    (back,) = restored([cache], 40)
    assert back.keys.shape[2] == cache.keys.shape[2] == STEP

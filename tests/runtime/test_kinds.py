"""Each cache class comes back bit for bit, in every state that it can reach, and goes on as if never saved."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from kvstore.format.kinds import QUANTIZATION_BITS
from kvstore.format.rules import check_layers
from kvstore.runtime.batch import extract_sequence
from kvstore.runtime.kinds import describe, views
from kvstore.runtime.kinds_kv import CUT_MARK
from tests.releases import CHUNK, held, wrong_in_older
from tests.runtime.driving import bits, code_of, feed, fetched, keys_values, odd_bits, same_bits, same_future
from tests.runtime.trips import captured, restored

COUNTS = (1, 255, 256, 257, 512, 513)
NEXT = ([1, 1, 1], [7, 1], [300, 1])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_a_plain_cache_keeps_every_bit_pattern(count: int, dtype: mx.Dtype) -> None:
    cache = KVCache()
    keys, values = (odd_bits((1, 2, count, 8), dtype, seed) for seed in (1, 2))
    cache.update_and_fetch(keys, values)
    (back,) = restored([cache], count)
    assert type(back) is KVCache
    assert back.offset == count
    assert same_bits(held(back), (keys, values))
    assert np.isnan(np.array(held(back)[0].astype(mx.float32))).any()


@pytest.mark.parametrize("steps", NEXT, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_plain_cache_goes_on(count: int, steps: list[int]) -> None:
    cache = feed(KVCache(), [count])
    (back,) = restored([cache], count)
    assert same_future(back, cache, steps)


def test_arrays_that_are_not_contiguous() -> None:
    keys, values = keys_values(40, 3)
    cache = KVCache()
    cache.keys = mx.contiguous(keys.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    cache.values = mx.concatenate([values, values], axis=-1)[..., 1::2][..., :, ::-1]
    cache.offset = 37
    mx.eval(cache.keys, cache.values)
    expected = [bits(array) for array in held(cache)]
    (back,) = restored([cache], 37)
    assert all((bits(got) == want).all() for got, want in zip(held(back), expected, strict=True))


def test_trimmed_rows_and_head_room_are_not_state() -> None:
    long, short = feed(KVCache(), [300]), feed(KVCache(), [300])
    long.trim(40)
    (record,) = describe([long])
    assert record.tensors["k"].shape == (1, 2, 260, 64)
    short.trim(40)
    short.keys = short.keys[..., :260, :]
    short.values = short.values[..., :260, :]
    (back,) = restored([long], 260)
    assert same_future(back, short, [1, 5])
    assert not bits(back.keys)[:, :, 270:].any()


@pytest.mark.parametrize(("size", "group"), [(64, 32), (64, 64), (96, 32), (128, 32), (128, 128), (256, 64)])
def test_quantized_caches(size: int, group: int) -> None:
    """Also in the bits that a cache which was quantized from the start fails in, for heads of 96 and more."""
    for width in QUANTIZATION_BITS:
        plain = feed(KVCache(), [260], size=size)
        cache = plain.to_quantized(group_size=group, bits=width)
        (back,) = restored([cache], 260)
        assert type(back) is QuantizedKVCache
        assert (back.bits, back.group_size, back.offset) == (width, group, 260)
        assert same_future(back, cache, [1, 1, 9], size=size)


def test_a_quantized_cache_that_was_one_from_the_start() -> None:
    cache = feed(QuantizedKVCache(group_size=32, bits=4), [100, 1, 156])
    (back,) = restored([cache], 257)
    assert same_future(back, cache, [1, 300])


RING_STEPS = (
    [1], [7], [31], [32], [31, 1], [32, 1], [40, 1], [40, 5], [1] * 31, [1] * 32, [1] * 33, [1] * 63, [1] * 64,
    [300], [20, *[1] * 30], [64, 1, 1, 30], [32, *[1] * 5, 9, 1, 1], [5, 9],
)  # fmt: skip


@pytest.mark.parametrize("steps", RING_STEPS, ids=lambda s: f"{len(s)}x{sum(s)}")
@pytest.mark.parametrize("keep", [0, 4])
def test_a_ring_in_every_state_it_can_reach(steps: list[int], keep: int) -> None:
    for following in ([1, 1, 1], [5, 1, 1], [40, 1], [1, 9, 1]):
        cache = feed(RotatingKVCache(32, keep=keep), steps)
        (back,) = restored([cache], sum(steps))
        assert (back.max_size, back.keep, back.offset) == (32, keep, sum(steps))
        assert same_future(back, cache, following)


@pytest.mark.parametrize("count", [255, 256, 257, 512, 513])
def test_a_ring_larger_than_a_step(count: int) -> None:
    for first in ([count], [count - 3, 1, 1, 1]):
        cache = feed(RotatingKVCache(512), first)
        (back,) = restored([cache], count)
        assert same_future(back, cache, [1, 1, 4])


def test_rows_beyond_a_window_are_dropped_where_the_class_would_drop_them_unread() -> None:
    cache = feed(RotatingKVCache(32, keep=4), [100])
    (record,) = describe([cache])
    assert record.tensors["k"].shape[2] == 32
    rows = views([cache])["0"]["k"]
    assert rows.ranges == ((0, 4), (72, 100))


def test_a_trimmed_ring_that_has_not_wrapped() -> None:
    cache, twin = feed(RotatingKVCache(64), [40]), feed(RotatingKVCache(64), [40])
    assert cache.trim(11) == twin.trim(11) == 11
    (back,) = restored([cache], 29)
    assert same_future(back, twin, [1, 1])


@pytest.mark.parametrize("steps", [[1] * 40, [1] * 64, [40, 1], [31, 1, 1], [32, 1], [40, *[1] * 9]], ids=len)
@pytest.mark.parametrize("following", [[1, 1, 1], [5, 1], [40]], ids=str)
def test_a_full_ring_one_token_back(steps: list[int], following: list[int]) -> None:
    cache = feed(RotatingKVCache(32), steps)
    (back,) = restored([cache], sum(steps), at=sum(steps) - 1)
    cache.trim(1)
    assert back.offset == cache.offset
    assert same_future(back, cache, following)


def test_a_ring_with_a_hole_is_not_put_again_before_it_is_filled() -> None:
    cache = feed(RotatingKVCache(32), [1] * 40)
    (back,) = restored([cache], 40, at=39)
    assert getattr(back, CUT_MARK) == 39
    assert code_of(describe, [back]) == "CACHE_INCONSISTENT"
    assert code_of(describe, [copy.deepcopy(back)]) == "CACHE_INCONSISTENT"
    fetched(back, [1])
    (record,) = describe([back])
    assert record.offset == 40


def renewed(cache: Any) -> Any:
    """The cache as ``from_state`` makes it, in any release: attributes that mlx-lm does not know are gone."""
    fresh = type(cache)(cache.max_size, keep=cache.keep)
    for name in ("keys", "values", "offset", "_idx"):
        setattr(fresh, name, getattr(cache, name))
    return fresh


def through_a_file(cache: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        save_prompt_cache(f"{folder}/cache.safetensors", [cache])
        return load_prompt_cache(f"{folder}/cache.safetensors")[0]


WAYS: dict[str, Callable[[Any], Any]] = {
    "by itself": lambda c: c,
    "out of a batch of one": lambda c: extract_sequence([c], 0)[0],
    "through a batch": lambda c: type(c).merge([feed(type(c)(c.max_size), [3]), c]).extract(1),
    "through a batch, by us": lambda c: extract_sequence([type(c).merge([c])], 0)[0],
    "by its attributes": renewed,
    "through a file": through_a_file,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [33, 40, 64, 65])
def test_a_hole_is_seen_whatever_became_of_its_mark(way: str, count: int) -> None:
    (back,) = restored([feed(RotatingKVCache(32), [1] * count)], count, at=count - 1)
    moved = WAYS[way](back)
    assert code_of(captured, [moved], count - 1) == "CACHE_INCONSISTENT"
    fetched(moved, [1])
    captured([moved], count)


@pytest.mark.parametrize("count", [31, 32, 33])
def test_zero_keys_or_zero_values_alone_are_no_hole(count: int) -> None:
    for k, v in ((0, 1), (1, 0)):
        cache = RotatingKVCache(32)
        for _ in range(count):
            cache.update_and_fetch(mx.full((1, 1, 1, 8), k, mx.bfloat16), mx.full((1, 1, 1, 8), v, mx.bfloat16))
        captured([cache], count)


@wrong_in_older("a chunk that is no multiple of 256 drops rows that it needs")
@pytest.mark.parametrize("trimmed", [False, True])
def test_chunked_caches(trimmed: bool) -> None:
    for following in ([1, 1], [9, 1], [300]):
        cache = feed(ChunkedKVCache(48), [40, 30, 1])
        if trimmed:
            cache.maybe_trim_front()
            assert cache.start_position == 23
        (back,) = restored([cache], 71)
        assert (back.start_position, back.chunk_size, back.offset) == (cache.start_position, 48, 71)
        assert same_future(back, cache, following)


@wrong_in_older("a chunk that is no multiple of 256 drops rows that it needs")
def test_a_chunked_cache_is_cut_where_its_chunk_is_whole() -> None:
    cache = feed(ChunkedKVCache(48), [40, 30])
    (back,) = restored([cache], 70, at=33)
    cache.trim(37)
    assert same_future(back, cache, [1, 4])


def test_trimmed_rows_of_a_concatenated_cache_are_state() -> None:
    cache = feed(ConcatenateKVCache(), [30, 5])
    cache.trim(4)
    (record,) = describe([cache])
    assert (record.offset, record.rows) == (31, 35)
    (back,) = restored([cache], 31)
    assert back.offset == 31
    assert same_future(back, cache, [1, 2])
    assert back.offset == cache.offset == 38


@pytest.mark.parametrize("count", [2, 255, 256, 257, 600])
def test_a_plain_cache_is_cut_anywhere(count: int) -> None:
    for make in (KVCache, lambda: feed(KVCache(), []).to_quantized(group_size=32, bits=4)):
        cache = feed(make(), [count])
        for at in {1, count // 2, count - 1}:
            twin = copy.deepcopy(cache)
            twin.trim(count - at)
            (back,) = restored([cache], count, at=at)
            assert same_future(back, twin, [1, 3])


def test_nothing_of_the_rest_is_left_after_a_cut() -> None:
    cache = feed(KVCache(), [300])
    (back,) = restored([cache], 300, at=200)
    assert not bits(back.keys)[:, :, 200:].any()


def state_cache() -> Any:
    cache = ArraysCache(12)
    cache[0] = odd_bits((1, 3, 16), mx.bfloat16)
    cache[2] = mx.zeros((1, 0, 4), mx.float32)
    cache[10] = odd_bits((1, 4, 8, 8), mx.float32)
    cache[11] = mx.arange(3)[None]
    return cache


def test_state_slots_absent_and_empty_ones_included() -> None:
    cache = state_cache()
    (back,) = restored([cache], 9)
    assert type(back) is ArraysCache
    assert len(back.cache) == 12
    assert [slot is None for slot in back.cache] == [slot is None for slot in cache.cache]
    assert all(same_bits(a, b) for a, b in zip(back.cache, cache.cache, strict=True) if a is not None)
    assert (back.left_padding, back.lengths) == (None, None)
    assert back.make_mask(3) is None


def test_left_padding_and_lengths_come_back() -> None:
    cache = state_cache()
    cache.left_padding, cache.lengths = mx.array([-2]), mx.array([7])
    (back,) = restored([cache], 9)
    assert same_bits(back.left_padding, cache.left_padding)
    assert same_bits(back.lengths, cache.lengths)
    assert same_bits(back.make_mask(9), cache.make_mask(9))


def test_the_state_list_is_not_shared() -> None:
    cache = state_cache()
    (back,) = restored([cache], 9)
    back[0] = None
    assert cache[0] is not None


def test_lists_nested_and_mixed() -> None:
    inner = CacheList(feed(RotatingKVCache(32), [40]), state_cache())
    cache = CacheList(feed(KVCache(), [40]), inner, KVCache())
    (back,) = restored([cache], 40)
    assert [type(child) for child in back.caches] == [KVCache, CacheList, KVCache]
    assert [type(child) for child in back[1].caches] == [RotatingKVCache, ArraysCache]
    assert back[2].keys is None
    assert same_future(back[0], cache[0], [1])
    assert same_future(back[1][0], inner[0], [1, 1])


def test_layers_that_were_never_written() -> None:
    caches = [KVCache(), feed(KVCache(), [5]), RotatingKVCache(8, keep=2), QuantizedKVCache(32, 4), ChunkedKVCache(16),
              ConcatenateKVCache(), ArraysCache(2)]  # fmt: skip
    back = restored(caches, 5)
    assert [type(cache) for cache in back] == [type(cache) for cache in caches]
    assert back[0].keys is None
    assert (back[2].max_size, back[2].keep, back[2]._idx) == (8, 2, 0)
    assert (back[3].bits, back[3].group_size) == (4, 32)
    assert back[6].cache == [None, None]


def test_every_record_obeys_the_rules_of_the_format() -> None:
    count = CHUNK + 8
    caches = [feed(KVCache(), [count]), feed(RotatingKVCache(32), [1] * count), feed(ChunkedKVCache(CHUNK), [count])]
    caches[2].maybe_trim_front()
    check_layers(describe(caches), count)


def test_a_lazy_cache_is_described_without_evaluating_it() -> None:
    cache = KVCache()
    big = mx.zeros((1, 8, 1 << 20, 64))
    before = mx.get_active_memory()
    cache.update_and_fetch(big, big)
    (record,) = describe([cache])
    assert record.tensors["k"].shape == (1, 8, 1 << 20, 64)
    assert mx.get_active_memory() - before < 1024

"""Sparse caches: nothing dropped is nothing changed, what is kept is seen, and a store gives them back to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, can_trim_prompt_cache

import kvstore
from kvstore.format.manifest import MethodRecord
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.sparse import SparseKVCache, SparseQuantizedKVCache, drop_positions
from tests.runtime.driving import bits, code_of, feed, fetched, keys_values, same_bits
from tests.runtime.tiny import NEXT, logits, prefilled, tiny, tokens
from tests.runtime.trips import captured, restored

METHOD = MethodRecord.make("every-third", '{"keep":0.33}')
QUANTIZED = CacheOptions(kv_bits=8, kv_group_size=32)


@pytest.fixture(autouse=True)
def _plain_kernels() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _own_cache(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(models / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.Store.open(tmp_path / "store") as opened:
        yield opened


def everything(caches: list[Any]) -> list[Any]:
    return drop_positions(caches, [np.arange(item.offset) for item in caches])


def thinned(caches: list[Any], **options: Any) -> list[Any]:
    """Another third kept in each layer; layer 1 by head."""
    keep: list[Any] = [np.arange(index % 3, item.offset, 3) for index, item in enumerate(caches)]
    keep[1] = np.stack([np.arange(0, 2 * len(keep[0]), 2), np.arange(1, 2 * len(keep[0]) + 1, 2)])
    return drop_positions(caches, keep, **options)


@pytest.mark.parametrize("count", [1, 50, 255, 256, 257])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [None, QUANTIZED])
def test_nothing_dropped_changes_no_bit(models: Path, family: str, options: CacheOptions | None, count: int) -> None:
    model = tiny(models, family)
    dense, sparse = prefilled(model, count, options), everything(prefilled(model, count, options))
    kind = SparseKVCache if options is None else SparseQuantizedKVCache
    assert {type(item) for item in sparse} == {kind}
    assert logits(model, sparse, NEXT) == logits(model, dense, NEXT)
    assert [(item.offset, item.rows) for item in sparse] == [(count + 7, count + 7)] * 4


def attended(model: BoundModel, hidden: list[bool], count: int) -> list[bytes]:
    """Logits of a dense cache of ``count`` tokens in which a mask hides rows, step by step."""
    caches: list[Any] = [_Masked(hidden) for _ in range(4)]
    for item, full in zip(caches, prefilled(model, count), strict=True):
        item.keys, item.values, item.offset = full.keys, full.values, full.offset
    return logits(model, caches, NEXT)


class _Masked(KVCache):  # type: ignore[misc]
    """A dense cache whose mask hides some of the first rows: what a sparse cache must be equal to."""

    def __init__(self, hidden: list[bool]) -> None:
        super().__init__()
        self.hidden = mx.array(hidden)

    def make_mask(self, count: int, **options: Any) -> mx.array:
        old = self.offset
        seen = mx.concatenate([~self.hidden, mx.ones((old - self.hidden.size,), mx.bool_)])
        new = mx.arange(count)[:, None] >= mx.arange(count)[None]
        return mx.concatenate([mx.broadcast_to(seen[None], (count, old)), new], axis=1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_kept_is_seen_and_what_is_dropped_is_not(models: Path, family: str) -> None:
    model = tiny(models, family)
    kept = np.array([0, 1, 5, 17, 30, 31, 39])
    hidden = [n not in set(kept.tolist()) for n in range(40)]
    sparse = drop_positions(prefilled(model, 40), [kept] * 4)
    found = [np.frombuffer(b, np.float32) for b in logits(model, sparse, NEXT)]
    wanted = [np.frombuffer(b, np.float32) for b in attended(model, hidden, 40)]
    dense = [np.frombuffer(b, np.float32) for b in logits(model, prefilled(model, 40), NEXT)]
    for sparse_step, masked_step, dense_step in zip(found, wanted, dense, strict=True):
        np.testing.assert_allclose(sparse_step, masked_step, rtol=1e-4, atol=1e-5)
        assert np.abs(dense_step - masked_step).max() > 1e-3


def test_rows_are_taken_by_head() -> None:
    cache = feed(KVCache(), [10])
    keep = np.array([[0, 3, 9], [1, 2, 4]])
    (sparse,) = drop_positions([cache], [keep])
    keys, values = sparse.keys_and_values()
    for head, rows in enumerate(keep):
        assert same_bits(keys[:, head], cache.keys[:, head, mx.array(rows)])
        assert same_bits(values[:, head], cache.values[:, head, mx.array(rows)])
    assert np.array(sparse.positions).tolist() == keep.tolist()
    assert cache.offset == sparse.offset == 10
    feed(sparse, [2])
    assert np.array(sparse.positions)[:, : sparse.rows].tolist() == [[0, 3, 9, 10, 11], [1, 2, 4, 10, 11]]


def test_dropping_again() -> None:
    cache = feed(KVCache(), [10])
    (once,) = drop_positions([cache], [np.array([[0, 3, 5, 9], [1, 2, 4, 8]])])
    (twice,) = drop_positions([once], [[1, 3]])
    assert np.array(twice.positions).tolist() == [[3, 9], [2, 8]]
    assert same_bits(twice.keys[:, 0], cache.keys[:, 0, mx.array([3, 9])])
    (unrecorded,) = drop_positions([cache], [[0, 1, 2]], record_positions=False)
    (again,) = drop_positions([unrecorded], [np.array([[0, 1], [1, 2]])])
    assert again.positions is None
    (by_head,) = drop_positions(drop_positions([cache], [[0, 1, 2]]), [np.array([[0, 1], [1, 2]])])
    assert np.array(by_head.positions).tolist() == [[0, 1], [1, 2]]


def test_layers_may_be_left_alone(models: Path) -> None:
    caches = prefilled(tiny(models, "llama"), 20)
    mixed = drop_positions(caches, [None, range(5), None, []])
    assert [type(item) for item in mixed] == [KVCache, SparseKVCache, KVCache, SparseKVCache]
    assert mixed[0] is caches[0]
    assert (mixed[3].rows, mixed[3].offset) == (0, 20)


@pytest.mark.parametrize("keep", [
    [[0, 1], [0, 1]], [[0, 10]], [[-1, 0]], [[1, 0]], [[1, 1]], [[0.0, 1.0]], [[True]], [np.zeros((3, 2), int)],
    [np.zeros((1, 1, 1), int)], [["a"]],
], ids=str)  # fmt: skip
def test_indexes_that_do_not_fit(keep: Any) -> None:
    assert code_of(drop_positions, [feed(KVCache(), [10])], keep) == "USAGE"


@pytest.mark.parametrize("cache", [KVCache(), feed(RotatingKVCache(max_size=8), [4])])
def test_caches_that_cannot_be_thinned(cache: Any) -> None:
    assert code_of(drop_positions, [cache], [[0]]) == "USAGE"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("array", [False, True])
def test_masks(count: int, array: bool) -> None:
    (sparse,) = drop_positions([feed(KVCache(), [10])], [[0, 4, 7]])
    mask = create_attention_mask(mx.zeros((1, count, 8)), sparse, return_array=array)
    if count == 1:
        assert mask is None
    elif array:
        assert np.array(mask).tolist() == [[True] * 4 + [False] * 2, [True] * 5 + [False], [True] * 6]
    else:
        assert mask == "causal"


def test_a_window_that_hides_nothing_is_no_window() -> None:
    (sparse,) = drop_positions([feed(KVCache(), [10])], [[0, 4, 7]])
    assert sparse.make_mask(2, window_size=12) == "causal"
    assert code_of(sparse.make_mask, 3, window_size=12) == "KIND_UNSUPPORTED"


@pytest.mark.parametrize("steps", [[1] * 5, [255], [256], [257], [600, 1, 1]])
def test_it_grows_like_the_dense_one(steps: list[int]) -> None:
    dense, (sparse,) = feed(KVCache(), [10]), everything([feed(KVCache(), [10])])
    assert same_bits(fetched(sparse, steps), fetched(dense, steps))
    assert sparse.nbytes >= sparse.keys.nbytes + sparse.values.nbytes
    fresh = SparseKVCache()
    assert fresh.empty()
    assert fresh.nbytes == 0
    assert same_bits(fetched(fresh, steps), fetched(KVCache(), steps))
    assert fresh.positions is None


@pytest.mark.parametrize("width", [2, 3, 4, 6, 8])
def test_quantized_ones_grow_like_the_dense_ones(width: int) -> None:
    dense = feed(QuantizedKVCache(group_size=32, bits=width), [10])
    sparse = everything([dense])[0]
    assert same_bits(fetched(sparse, [1, 300, 1]), fetched(dense, [1, 300, 1]))
    assert (sparse.bits, sparse.group_size) == (width, 32)
    twin = SparseQuantizedKVCache(group_size=32, bits=width)
    assert same_bits(fetched(twin, [5]), fetched(QuantizedKVCache(group_size=32, bits=width), [5]))


def test_the_state_is_a_state() -> None:
    for sparse in (drop_positions([feed(KVCache(), [9])], [[1, 2]])[0],
                   drop_positions([feed(QuantizedKVCache(group_size=32, bits=4), [9])], [[1, 2]])[0]):  # fmt: skip
        twin = type(sparse)()
        twin.state = sparse.state
        assert same_bits(fetched(twin, [1, 2]), fetched(sparse, [1, 2]))
        assert not can_trim_prompt_cache([sparse])
        assert sparse.size() == 12


TRIPS: dict[str, Any] = {
    "plain": lambda: drop_positions([feed(KVCache(), [300])], [range(0, 300, 3)])[0],
    "one position row for each head": lambda: drop_positions(
        [feed(KVCache(), [300])], [np.stack([np.arange(280), np.arange(20, 300)])]
    )[0],
    "without positions": lambda: drop_positions([feed(KVCache(), [300])], [range(256)], record_positions=False)[0],
    "grown since": lambda: feed(drop_positions([feed(KVCache(), [300])], [range(9)])[0], [1, 250, 3]),
    "quantized": lambda: drop_positions([feed(QuantizedKVCache(group_size=32, bits=4), [300])], [range(5, 295)])[0],
    "quantized, without": lambda: feed(
        drop_positions([feed(QuantizedKVCache(group_size=64, bits=8), [9])], [[0]], record_positions=False)[0], [4]
    ),
    "nothing left": lambda: drop_positions([feed(KVCache(), [9])], [[]])[0],
}  # fmt: skip


@pytest.mark.parametrize("codec", ["small", "fast"])
@pytest.mark.parametrize("name", TRIPS)
def test_through_objects_and_back(name: str, codec: str) -> None:
    cache, twin = TRIPS[name](), TRIPS[name]()
    beside = feed(KVCache(), [cache.offset])  # an entry holds at least one row
    back = _restored([cache, beside], cache.offset, codec)[0]
    assert type(back) is type(cache)
    assert (back.offset, back.rows) == (twin.offset, twin.rows)
    if twin.positions is None or not twin.rows:
        assert back.positions is None or not twin.rows
    else:
        assert same_bits(back.positions[:, : back.rows], twin.positions[:, : twin.rows])
    assert same_bits(fetched(back, [1, 3, 1]), fetched(twin, [1, 3, 1]))


def _restored(caches: list[Any], count: int, codec: str) -> list[Any]:
    from kvstore.runtime.materialize import fill
    from tests.runtime.trips import MemoryObjects, plan

    made = captured(caches, count, method=METHOD)
    return fill(MemoryObjects(made, codec), plan(made)).cache


def test_a_sparse_cache_needs_a_method() -> None:
    cache = TRIPS["plain"]()
    assert code_of(restored, [cache], cache.offset) == "METHOD_MISSING"


def test_states_that_cannot_be() -> None:
    sparse = TRIPS["plain"]()
    sparse.positions = sparse.positions[:, :50]
    assert code_of(captured, [sparse], 300, method=METHOD) == "CACHE_INCONSISTENT"
    sparse = TRIPS["plain"]()
    sparse.rows = 301
    assert code_of(captured, [sparse], 300, method=METHOD) == "CACHE_INCONSISTENT"
    sparse = TRIPS["plain"]()
    sparse.rows = 101
    assert code_of(captured, [sparse], 300, method=METHOD) == "CACHE_INCONSISTENT"
    sparse = TRIPS["plain"]()
    sparse.positions = mx.zeros((3, 100), mx.int32)
    assert code_of(captured, [sparse], 300, method=METHOD) == "SHAPE_INCONSISTENT"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [None, QUANTIZED])
def test_a_model_goes_on_from_a_stored_one(
    store: kvstore.Store, models: Path, family: str, options: CacheOptions | None
) -> None:
    model = tiny(models, family)
    sparse, twin = thinned(prefilled(model, 300, options)), thinned(prefilled(model, 300, options))
    receipt = store.put(sparse, token_ids=tokens(300), model=model, method=METHOD)
    hit = store.match(tokens(301), model=model, options=options, method=METHOD.name)
    assert (hit.entry_id, hit.token_count) == (receipt.subject, 300)
    back = store.load(hit, into=model)
    assert [(type(a), a.rows) for a in back.cache] == [(type(b), b.rows) for b in twin]
    assert logits(model, back.cache, NEXT) == logits(model, twin, NEXT)


def test_whoever_does_not_name_the_method_gets_nothing(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    receipt = store.put(thinned(prefilled(model, 60)), token_ids=tokens(60), model=model, method=METHOD)
    assert not store.match(tokens(61), model=model)
    assert not store.match(tokens(61), model=model, method="another")
    assert not store.match(tokens(61), model=model, options=QUANTIZED, method=METHOD.name)
    assert code_of(store.load, receipt.subject, into=model) == "METHOD_MISMATCH"
    wrong = {"method": METHOD.name, "options": QUANTIZED}
    assert code_of(store.load, receipt.subject, into=model, **wrong) == "SIGNATURE_MISMATCH"
    assert store.load(receipt.subject, into=model, method=METHOD.name).token_count == 60


def test_the_method_is_part_of_what_an_entry_is(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    other = MethodRecord.make("every-third", '{"keep":0.34}')
    subjects = {
        store.put(thinned(prefilled(model, 60)), token_ids=tokens(60), model=model, method=method).subject
        for method in (METHOD, METHOD, other)
    }  # fmt: skip
    assert len(subjects) == 2


def test_a_dense_entry_is_preferred_where_it_holds_as_much(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    store.put(thinned(prefilled(model, 60)), token_ids=tokens(60), model=model, method=METHOD)
    dense = store.put(prefilled(model, 60), token_ids=tokens(60), model=model)
    assert store.match(tokens(61), model=model, method=METHOD.name).entry_id == dense.subject


def test_a_partly_sparse_cache(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    keep: list[Any] = [None, range(0, 60, 2), None, []]
    made = [drop_positions(prefilled(model, 60), keep) for _ in range(2)]
    store.put(made[0], token_ids=tokens(60), model=model, method=METHOD)
    back = store.load(store.match(tokens(61), model=model, method=METHOD.name), into=model)
    assert [type(item) for item in back.cache] == [KVCache, SparseKVCache] * 2
    assert logits(model, back.cache, NEXT) == logits(model, made[1], NEXT)


def test_bits_survive(store: kvstore.Store, models: Path) -> None:
    """Every bit pattern in the kept rows, not only numbers."""
    model = tiny(models, "llama", dtype="bfloat16")
    caches = prefilled(model, 40)
    noise = mx.random.randint(0, 2**16, caches[0].keys.shape, dtype=mx.int32).astype(mx.uint16).view(mx.bfloat16)
    caches[2].keys = noise
    sparse = drop_positions(caches, [range(0, 40, 2)] * 4)
    store.put(sparse, token_ids=tokens(40), model=model, method=METHOD)
    back = store.load(store.match(tokens(41), model=model, method=METHOD.name), into=model)
    assert (bits(back.cache[2].keys_and_values()[0]) == bits(sparse[2].keys_and_values()[0])).all()


def test_updating_one_leaves_the_other_alone() -> None:
    cache = feed(KVCache(), [10])
    before = bits(cache.keys).copy()
    (sparse,) = everything([cache])
    sparse.update_and_fetch(*keys_values(3, 5))
    assert (bits(cache.keys) == before).all()

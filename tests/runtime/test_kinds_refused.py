"""Caches that cannot be stored are refused by what is wrong with them; a new class can be taught."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, RotatingKVCache

from kvstore.errors import InvalidError, UnsupportedError, UsageError
from kvstore.format.layers import LayerRecord
from kvstore.runtime.kinds import describe, register_kind
from kvstore.runtime.kinds_kv import builtin
from kvstore.runtime.materialize import fill
from kvstore.runtime.registry import KindHandler
from tests.runtime.driving import code_of, feed, same_future
from tests.runtime.trips import MemoryObjects, captured, plan


class Renamed(KVCache):  # type: ignore[misc]
    pass


class RenamedHandler(KindHandler):
    kind = "kv"

    def __init__(self) -> None:
        self._plain = dict(builtin())[KVCache]

    def scalars(self, cache: Any) -> Any:
        return self._plain.scalars(cache)

    def sources(self, cache: Any, where: str) -> Any:
        return self._plain.sources(cache, where)

    def restore(self, record: LayerRecord, arrays: Any, children: Any) -> Any:
        cache = Renamed()
        cache.keys, cache.values, cache.offset = arrays["k"], arrays["v"], record.offset
        return cache


class Unheard(KVCache):  # type: ignore[misc]
    pass


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        describe([KVCache(), CacheList(Unheard())])
    assert caught.value.code == "CACHE_CLASS_UNKNOWN"
    assert "layers[1.0]" in caught.value.message
    assert "Unheard" in caught.value.message
    assert "kvstore.runtime.register_kind" in caught.value.message


def test_a_registered_class_is_taken_and_given_back() -> None:
    register_kind(Renamed, RenamedHandler())
    cache = feed(Renamed(), [9])
    made = captured([cache], 9)
    (usual,) = fill(MemoryObjects(made), plan(made)).cache
    (back,) = fill(MemoryObjects(made), plan(made, templates=[Renamed()])).cache
    assert type(usual) is KVCache
    assert type(back) is Renamed
    assert same_future(back, cache, [1])


def test_a_handler_for_a_kind_that_the_format_lacks() -> None:
    handler = RenamedHandler()
    handler.kind = "kv-imagined"  # type: ignore[misc]
    with pytest.raises(UsageError):
        register_kind(Unheard, handler)


def test_batches_are_refused_with_what_to_do() -> None:
    wide = KVCache()
    wide.update_and_fetch(mx.zeros((2, 1, 3, 8)), mx.zeros((2, 1, 3, 8)))
    rows = ArraysCache(1)
    rows[0] = mx.zeros((2, 4))
    padded = ArraysCache(1)
    padded.left_padding = mx.array([0, 1])
    for cache in (wide, rows, padded):
        assert code_of(describe, [cache]) == "CACHE_BATCHED"
    with pytest.raises(InvalidError, match="extract"):
        describe([BatchKVCache([0, 0])])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda c: setattr(c, "offset", 400),
        lambda c: setattr(c, "offset", -1),
        lambda c: setattr(c, "offset", mx.array(3)),
        lambda c: setattr(c, "keys", None),
        lambda c: setattr(c, "keys", c.keys[0]),
        lambda c: setattr(c, "keys", [1, 2]),
        lambda c: setattr(c, "values", c.values[:, :1]),
        lambda c: setattr(c, "values", c.values[:, :, :9]),
    ],
)
def test_a_plain_cache_that_contradicts_itself(break_it: Any) -> None:
    cache = feed(KVCache(), [20])
    break_it(cache)
    assert code_of(describe, [cache]) == "CACHE_INCONSISTENT"


def test_dtypes_that_the_format_cannot_name() -> None:
    cache = KVCache()
    cache.keys = cache.values = mx.zeros((1, 1, 2, 2), mx.float64, stream=mx.cpu)
    cache.offset = 2
    assert code_of(describe, [cache]) == "DTYPE_UNSUPPORTED"


@pytest.mark.parametrize(
    "change",
    [
        {"_idx": 50}, {"_idx": 3}, {"offset": 20}, {"max_size": 64}, {"max_size": 64, "_idx": 40},
        {"offset": 32, "_idx": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_ring_that_cannot_have_come_about(change: dict[str, int]) -> None:
    cache = feed(RotatingKVCache(32, keep=4), [1] * 40)
    for name, value in change.items():
        setattr(cache, name, value)
    assert code_of(describe, [cache]) == "CACHE_INCONSISTENT"

"""Every mismatch is refused by its own code, with both sides, before an object is opened or an array is made."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import kvstore
from kvstore.errors import KVStoreError
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.probe import CacheOptions
from tests.runtime.driving import code_of, feed
from tests.runtime.model_folders import edit_json, real_adapter
from tests.runtime.tiny import NEXT, logits, prefilled, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

COUNT = 300
_opened: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], (str, Path)) and str(arguments[0]).endswith(".kvo"):
        _opened.append(str(arguments[0]))


sys.addaudithook(_watch)


@contextmanager
def nothing_touched() -> Iterator[None]:
    """No object is opened meanwhile, and less than 1 KiB of MLX memory is held or was ever taken."""
    gc.collect()
    mx.clear_cache()
    _opened.clear()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    yield
    assert _opened == []
    assert mx.get_active_memory() - before < 1024
    assert mx.get_peak_memory() - before < 1024


@pytest.fixture(scope="module")
def bound(models: Path) -> BoundModel:
    return tiny(models, "llama")


@pytest.fixture
def entry(store: kvstore.Store, bound: BoundModel) -> str:
    return store.put(prefilled(bound, COUNT), token_ids=tokens(COUNT), model=bound).subject


def refused(store: kvstore.Store, entry: Any, into: Any, **options: Any) -> KVStoreError:
    with nothing_touched(), pytest.raises(KVStoreError) as caught:
        store.load(entry, into=into, **options)
    return caught.value


def test_the_watch_sees_a_load(store: kvstore.Store, entry: str, bound: BoundModel) -> None:
    _opened.clear()
    assert store.load(entry, into=bound).token_count == COUNT
    assert len(_opened) == 2


def test_other_weights_of_the_same_shape(store: kvstore.Store, entry: str, models: Path) -> None:
    error = refused(store, entry, tiny(models, "llama", seed=1))
    assert error.code == "MODEL_MISMATCH"
    assert error.detail["field"] == "model.weights[model.safetensors]"
    assert error.detail["expected"] != error.detail["found"]
    assert error.detail["names"]["entry"]["path"] != error.detail["names"]["model"]["path"]
    assert error.exit_code == 6


def altered(models: Path, bound: BoundModel, name: str, change: Callable[[Path], object]) -> BoundModel:
    folder = models / name
    if not folder.exists():
        shutil.copytree(bound.identity.path, folder)
        change(folder)
    return kvstore.load_model(folder)


def test_another_config(store: kvstore.Store, entry: str, bound: BoundModel, models: Path) -> None:
    other = altered(models, bound, "rope", lambda path: edit_json(path / "config.json", rope_theta=20000.0))
    error = refused(store, entry, other)
    assert (error.code, error.detail["field"]) == ("MODEL_MISMATCH", "model.config")


def test_fewer_layers(store: kvstore.Store, entry: str, models: Path) -> None:
    error = refused(store, entry, tiny(models, "llama", num_hidden_layers=3))
    assert error.code == "MODEL_MISMATCH"
    assert (error.detail["expected"], error.detail["found"]) == (3, 4)


def test_an_adapter(store: kvstore.Store, entry: str, bound: BoundModel, models: Path) -> None:
    adapter = models / "adapter"
    if not adapter.exists():
        real_adapter(adapter, bound.identity.path)
    with_adapter = kvstore.load_model(bound.identity.path, adapter)
    assert refused(store, entry, with_adapter).code == "ADAPTER_MISMATCH"
    other = store.put(prefilled(with_adapter, 20), token_ids=tokens(20), model=with_adapter).subject
    assert refused(store, other, bound).code == "ADAPTER_MISMATCH"


def test_another_tokenizer(store: kvstore.Store, entry: str, bound: BoundModel, models: Path) -> None:
    def change(path: Path) -> None:
        text = json.loads((path / "tokenizer.json").read_text())
        text["model"]["vocab"]["extra"] = 64
        (path / "tokenizer.json").write_text(json.dumps(text))

    other = altered(models, bound, "tokenizer", change)
    for policy in ("strict", "tokens"):
        assert refused(store, entry, other, policy=policy).detail["field"] == "tokenizer.digest"


def test_another_chat_template_is_a_matter_of_policy(
    store: kvstore.Store, entry: str, bound: BoundModel, models: Path
) -> None:
    other = altered(models, bound, "template", lambda path: (path / "chat_template.jinja").write_text("{{ other }}"))
    error = refused(store, entry, other)
    assert (error.code, error.detail["field"]) == ("TOKENIZER_MISMATCH", "tokenizer.chat_template")
    assert "policy 'tokens'" in error.message
    restored = store.load(entry, into=other, policy="tokens")
    assert restored.receipt.checks["chat_template"] == "skipped"


def test_other_kv_bits(store: kvstore.Store, entry: str, bound: BoundModel) -> None:
    error = refused(store, entry, bound, options=CacheOptions(kv_bits=4, kv_group_size=32))
    assert error.code == "SIGNATURE_MISMATCH"
    assert {m["field"] for m in error.detail["mismatches"]} >= {"layers[0].kind", "layers[3].kind"}
    quantized = prefilled(bound, 20, CacheOptions(kv_bits=8, kv_group_size=32))
    other = store.put(quantized, token_ids=tokens(20), model=bound).subject
    assert refused(store, other, bound).code == "SIGNATURE_MISMATCH"
    error = refused(store, other, bound, options=CacheOptions(kv_bits=4, kv_group_size=32))
    assert (error.detail["field"], error.detail["expected"], error.detail["found"]) == ("layers[0].bits", 4, 8)


def test_another_window(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "qwen3")
    narrow = prefilled(model, 50, CacheOptions(max_kv_size=40))
    entry = store.put(narrow, token_ids=tokens(50), model=model).subject
    assert refused(store, entry, model, options=CacheOptions(max_kv_size=41)).detail["field"].endswith("max_size")
    assert refused(store, entry, model).code == "SIGNATURE_MISMATCH"


def test_a_namespace(store: kvstore.Store, entry: str, bound: BoundModel) -> None:
    assert refused(store, entry, bound, namespace="tenant").code == "NAMESPACE_MISMATCH"


def test_an_unbound_model(store: kvstore.Store, entry: str, bound: BoundModel) -> None:
    for into in (bound.model, bound.identity, None):
        error = refused(store, entry, into)
        assert error.code == "MODEL_UNBOUND"
        assert "kvstore.bind" in error.message
    assert code_of(store.put, [], token_ids=[1], model=bound.model) == "MODEL_UNBOUND"
    assert code_of(store.match, [1, 2], model=bound.model) == "MODEL_UNBOUND"


def test_a_model_whose_parameters_were_replaced(store: kvstore.Store, entry: str, models: Path) -> None:
    model = tiny(models, "llama")
    model.model.update({"model": {"norm": {"weight": mx.ones(64) * 2}}})
    mx.eval(model.model.parameters())
    assert refused(store, entry, model).code == "BINDING_MISMATCH"


def test_a_position_that_cannot_be_restored(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "qwen3_next")
    store.put(prefilled(model, 40), token_ids=tokens(40), model=model)
    hit = store.match(tokens(41), model=model)
    error = refused(store, replace(hit, token_count=39), model)
    assert (error.code, error.detail["expected"], error.detail["found"]) == ("CUT_NOT_POSSIBLE", "40", 39)
    assert refused(store, replace(hit, token_count=41), model).code == "CUT_NOT_POSSIBLE"


def test_memory_that_is_not_there(store: kvstore.Store, entry: str, bound: BoundModel) -> None:
    needed = store.load(entry, into=bound).receipt.facts["buffer_bytes"]
    assert isinstance(needed, int)
    error = refused(store, entry, bound, budget=needed - 1)
    assert (error.code, error.detail["needed"], error.detail["allowed"]) == ("DEVICE_MEMORY_SHORT", needed, needed - 1)
    assert error.exit_code == 9
    assert store.load(entry, into=bound, budget=needed).token_count == COUNT


def test_a_refusal_needs_no_object_at_all(store: kvstore.Store, entry: str, bound: BoundModel, models: Path) -> None:
    """Objects are gone, and a refusal still says what is wrong with the model; only a good load misses them."""
    shutil.rmtree(store.entries.root / "objects")
    assert refused(store, entry, tiny(models, "llama", seed=1)).code == "MODEL_MISMATCH"
    before = mx.get_active_memory()
    assert code_of(store.load, entry, into=bound) == "OBJECT_MISSING"
    gc.collect()
    assert mx.get_active_memory() - before < 1024


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_damaged_object(store: kvstore.Store, entry: str, bound: BoundModel, at: int) -> None:
    path = max((store.entries.root / "objects").rglob("*.kvo"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    gc.collect()
    before = mx.get_active_memory()
    assert code_of(store.load, entry, into=bound) == "STORED_DIGEST_MISMATCH"
    gc.collect()
    assert mx.get_active_memory() - before < 1024
    assert code_of(store.load, entry, into=bound) == "QUARANTINED"
    cache = prefilled(bound, COUNT)
    assert store.put(cache, token_ids=tokens(COUNT), model=bound).subject == entry
    assert logits(bound, store.load(entry, into=bound).cache, NEXT) == logits(bound, cache, NEXT)


def unknown() -> Any:
    class Unheard(KVCache):  # type: ignore[misc]
        pass

    return feed(Unheard(), [9], size=32)


def wide() -> Any:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((2, 2, 9, 32)), mx.zeros((2, 2, 9, 32)))
    return cache


@pytest.mark.parametrize(
    ("caches", "code"),
    [
        (lambda: [KVCache() for _ in range(4)], "CACHE_EMPTY"),
        (lambda: [unknown() for _ in range(4)], "CACHE_CLASS_UNKNOWN"),
        (lambda: [wide() for _ in range(4)], "CACHE_BATCHED"),
        (lambda: [feed(KVCache(), [n], size=32, dtype=mx.float32) for n in (9, 9, 8, 9)], "CACHE_INCONSISTENT"),
        (lambda: [feed(KVCache(), [8], size=32, dtype=mx.float32) for _ in range(4)], "CACHE_INCONSISTENT"),
        (lambda: [feed(KVCache(), [9], size=32, dtype=mx.float32) for _ in range(3)], "CACHE_INCONSISTENT"),
        (lambda: [feed(KVCache(), [9], size=64, dtype=mx.float32) for _ in range(4)], "CACHE_INCONSISTENT"),
        (lambda: [feed(KVCache(), [9], size=32, dtype=mx.float16) for _ in range(4)], "CACHE_INCONSISTENT"),
        (list, "CACHE_INCONSISTENT"),
    ],
    ids=["empty", "unknown", "batch", "layers", "ids", "count", "size", "dtype", "none"],
)
def test_caches_that_a_put_refuses(store: kvstore.Store, bound: BoundModel, caches: Any, code: str) -> None:
    for model in (bound, bound.identity):
        assert code_of(store.put, caches(), token_ids=tokens(9), model=model) == code
    assert left_behind(store) == []


def test_a_cache_of_the_right_shape_is_taken_whatever_its_kind(store: kvstore.Store, bound: BoundModel) -> None:
    caches = [feed(KVCache(), [9], size=32, dtype=mx.float32).to_quantized(32, 8) for _ in range(4)]
    assert isinstance(caches[0], QuantizedKVCache)
    assert store.put(caches, token_ids=tokens(9), model=bound).subject


def left_behind(store: kvstore.Store) -> list[str]:
    """Files of a store that hold anything of an entry."""
    root = store.entries.root
    return [
        str(path.relative_to(root)) for name in ("objects", "manifests", "receipts", "tmp")
        for path in (root / name).rglob("*") if path.is_file()
    ]  # fmt: skip


def test_an_interrupt_in_a_put_leaves_nothing(store: kvstore.Store, bound: BoundModel) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    cache = prefilled(bound, 600)
    with pytest.raises(KeyboardInterrupt):
        store.put(cache, token_ids=tokens(600), model=bound, progress=interrupt)
    assert left_behind(store) == []
    assert store.list() == []
    assert store.put(cache, token_ids=tokens(600), model=bound).facts["objects_written"] == 4


def test_a_put_can_be_stopped(store: kvstore.Store, bound: BoundModel) -> None:
    cache = prefilled(bound, 600)
    assert code_of(store.put, cache, token_ids=tokens(600), model=bound, cancelled=lambda: True) == "CANCELLED"
    assert left_behind(store) == []
    assert store.list() == []


def test_a_load_can_be_stopped(store: kvstore.Store, entry: str, bound: BoundModel) -> None:
    gc.collect()
    before = mx.get_active_memory()
    assert code_of(store.load, entry, into=bound, cancelled=lambda: True) == "CANCELLED"
    gc.collect()
    assert mx.get_active_memory() - before < 1024
    assert store.load(entry, into=bound).token_count == COUNT

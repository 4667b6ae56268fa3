"""Put, match and load with models that run: the continuation is that of the cache that was never saved, bit for bit."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

import kvstore
from kvstore.format.manifest import MethodRecord
from kvstore.format.receipt import parse_receipt
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.kinds import describe
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.prompt_file import read_prompt_file, write_prompt_file
from tests.runtime.driving import code_of, state_of
from tests.runtime.tiny import NEXT, logits, prefilled, run, tiny, tokens

COUNTS = (1, 255, 256, 257, 512, 513)


pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")


def saved_and_back(
    store: kvstore.Store, model: BoundModel, count: int, options: CacheOptions | None = None
) -> tuple[list[Any], kvstore.Restored]:
    """A cache of ``count`` tokens that was never saved, and its twin that was."""
    cache = prefilled(model, count, options)
    receipt = store.put(cache, token_ids=tokens(count), model=model)
    hit = store.match([*tokens(count), 1], model=model, options=options)
    assert (hit.entry_id, hit.token_count) == (receipt.subject, count)
    return cache, store.load(hit, into=model)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_model_goes_on_as_if_never_saved(store: kvstore.Store, models: Path, dtype: str, count: int) -> None:
    model = tiny(models, "llama", dtype=dtype)
    cache, restored = saved_and_back(store, model, count)
    assert restored.token_count == count
    assert [type(item) for item in restored.cache] == [KVCache] * 4
    assert logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)


@pytest.mark.parametrize("count", [1, 20, 32, 33, 50, 300])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "llama4", "mamba2"])
def test_every_make_up_of_caches(store: kvstore.Store, models: Path, family: str, count: int) -> None:
    model = tiny(models, family)
    cache, restored = saved_and_back(store, model, count)
    assert logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8])
def test_quantized_caches(store: kvstore.Store, models: Path, width: int) -> None:
    model, options = tiny(models, "llama"), CacheOptions(kv_bits=width, kv_group_size=32)
    cache, restored = saved_and_back(store, model, 257, options)
    assert logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)
    assert not store.match(tokens(300), model=model)
    other = CacheOptions(kv_bits=4 if width == 8 else 8, kv_group_size=32)
    assert not store.match(tokens(300), model=model, options=other)


@pytest.mark.parametrize("count", [10, 40, 41, 100])
def test_a_window_that_the_caller_chose(store: kvstore.Store, models: Path, count: int) -> None:
    model, options = tiny(models, "qwen3"), CacheOptions(max_kv_size=40)
    cache, restored = saved_and_back(store, model, count, options)
    assert {item.keep for item in restored.cache} == {4}
    assert logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)


def test_after_decoding_token_by_token(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "gemma3")
    cache = run(model, prefilled(model, 50), tokens(60)[50:], step=1)
    store.put(cache, token_ids=tokens(60), model=model)
    restored = store.load(store.match(tokens(61), model=model), into=model)
    assert restored.token_count == 60
    assert logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_exact_repeat_of_a_prompt_hits_one_token_back(store: kvstore.Store, models: Path, family: str) -> None:
    model, ids = tiny(models, family), tokens(70)
    cache = run(model, prefilled(model, 64), ids[64:], step=1)
    store.put(cache, token_ids=ids, model=model)
    hit = store.match(ids, model=model)
    assert hit.token_count == 69
    restored = store.load(hit, into=model)
    for item in cache:
        item.trim(1)
    following = [[ids[-1]], *NEXT]
    assert logits(model, restored.cache, following) == logits(model, cache, following)


@pytest.mark.parametrize("common", [1, 100, 256, 299])
def test_a_prompt_that_parts_earlier_restores_what_is_common(store: kvstore.Store, models: Path, common: int) -> None:
    model = tiny(models, "llama")
    cache = prefilled(model, 300)
    store.put(cache, token_ids=tokens(300), model=model)
    other = [*tokens(300)[:common], *((token + 1) % 96 for token in tokens(330)[common:])]
    hit = store.match(other, model=model)
    restored = store.load(hit, into=model)
    assert restored.token_count == hit.token_count == common
    for item in cache:
        item.trim(300 - common)
    assert logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)


def test_a_state_is_restored_at_its_own_end_only(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "qwen3_next")
    store.put(prefilled(model, 40), token_ids=tokens(40), model=model)
    hit = store.match(tokens(40), model=model)
    assert not hit
    assert hit.common_tokens == 40
    assert [reason.code for reason in hit.reasons]
    assert code_of(store.load, hit, into=model) == "NO_PREFIX"


def test_prefill_saves_where_an_exact_repeat_still_hits(store: kvstore.Store, models: Path) -> None:
    for family in ("llama", "gemma3", "qwen3_next", "llama4", "mamba2"):
        model, ids = tiny(models, family), tokens(45)
        filled = kvstore.prefill(model.model, ids)
        store.put(filled.cache, token_ids=filled.token_ids, model=model)
        hit = store.match(ids, model=model)
        assert hit.token_count == 44
        assert store.load(hit, into=model).token_count == 44


def test_the_same_cache_twice_writes_nothing(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "gemma3")
    cache = prefilled(model, 300)
    first = store.put(cache, token_ids=tokens(300), model=model)
    before = sorted(path.name for path in store.entries.root.rglob("*") if path.is_file())
    again = store.put(copy.deepcopy(cache), token_ids=tokens(300), model=model)
    assert again.subject == first.subject
    assert again.facts["stored_bytes"] == 0
    assert sorted(path.name for path in store.entries.root.rglob("*") if path.is_file()) == before


def test_a_restored_cache_is_the_same_entry(store: kvstore.Store, models: Path) -> None:
    for family in ("llama", "gemma3", "qwen3_next", "llama4", "mamba2"):
        model = tiny(models, family)
        _, restored = saved_and_back(store, model, 50)
        again = store.put(restored.cache, token_ids=tokens(50), model=model)
        assert again.subject == restored.receipt.subject
        assert again.facts["stored_bytes"] == 0


def test_a_grown_conversation_shares_what_it_has_in_common(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    cache = prefilled(model, 600)
    store.put(cache, token_ids=tokens(600), model=model)
    run(model, cache, tokens(700)[600:])
    receipt = store.put(cache, token_ids=tokens(700), model=model)
    assert receipt.facts["objects_reused"] == 2
    assert store.match(tokens(701), model=model).token_count == 700


def test_a_put_leaves_the_cache_as_it_was(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "gemma3")
    cache = prefilled(model, 40)
    before = [state_of(item) for item in cache]
    store.put(cache, token_ids=tokens(40), model=model)
    assert [state_of(item) for item in cache] == before


def test_the_token_after_a_put_copies_nothing(store: kvstore.Store, models: Path) -> None:
    """No view of the caller's arrays is kept."""
    model, cache = tiny(models, "llama"), prefilled(tiny(models, "llama"), 300)
    store.put(cache, token_ids=tokens(300), model=model)
    new = [mx.ones((1, 2, 1, 32)) for _ in range(2)]
    mx.eval(new)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for item in cache:
        item.update_and_fetch(*new)
        mx.eval(item.keys, item.values)
    assert mx.get_peak_memory() - before < cache[0].keys.nbytes // 4


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_files_of_mlx_lm_in_and_out(store: kvstore.Store, models: Path, tmp_path: Path, family: str) -> None:
    model, cache = tiny(models, family), prefilled(tiny(models, family), 70)
    save_prompt_cache(str(tmp_path / "in.safetensors"), cache, {"model": "m"})
    found = read_prompt_file(tmp_path / "in.safetensors")
    store.put(found.cache, token_ids=tokens(70), model=model.identity, label="from a file")
    restored = store.load("from a file", into=model)
    write_prompt_file(tmp_path / "out.safetensors", restored.cache, found.metadata)
    again, metadata = load_prompt_cache(str(tmp_path / "out.safetensors"), return_metadata=True)
    assert metadata == {"model": "m"}
    assert logits(model, again, NEXT) == logits(model, restored.cache, NEXT) == logits(model, cache, NEXT)


def test_the_load_receipt(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    _, restored = saved_and_back(store, model, 300)
    receipt = restored.receipt
    assert parse_receipt(receipt.data) == receipt
    assert receipt.type == "load"
    assert receipt.facts["token_count"] == 300
    assert receipt.facts["layout_digest"] == kvstore.probe(model).layout_at(300).digest
    assert receipt.facts["objects_read"] == 2
    assert receipt.checks["model"] == receipt.checks["signature"] == "verified"
    assert receipt.checks["payload_digests"] == "skipped"
    assert receipt.device is not None
    always = store.load(store.match(tokens(301), model=model), into=model, verification="always")
    assert always.receipt.checks["payload_digests"] == "verified"


def test_the_write_receipt_and_what_is_shown(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    receipt = store.put(
        prefilled(model, 30), token_ids=tokens(30), model=model, label="notes", annotations={"document": "d-1"}
    )
    assert receipt.device is not None
    assert receipt.libraries["mlx"]
    details = store.show("notes")
    assert details.info.entry_id == details.manifest.entry_id == receipt.subject
    assert details.info.annotations["document"] == "d-1"
    assert details.info.annotations["model.path"] == str(model.identity.path)
    assert receipt in details.receipts
    assert [info.entry_id for info in store.list()] == [receipt.subject]
    assert store.labels() == {"notes": receipt.subject}
    store.label("other", receipt.subject[:20])
    assert set(store.labels()) == {"notes", "other"}
    assert store.load("other", into=model).token_count == 30
    assert store.verify(["notes"], deep=True).ok
    assert store.verify().ok
    store.remove("notes")
    assert store.list() == []
    assert code_of(store.show, "notes") == "NOT_FOUND"


def test_namespaces_and_methods_never_meet_by_accident(store: kvstore.Store, models: Path) -> None:
    model, cache = tiny(models, "llama"), prefilled(tiny(models, "llama"), 30)
    store.put(cache, token_ids=tokens(30), model=model, namespace="tenant")
    assert not store.match(tokens(31), model=model)
    hit = store.match(tokens(31), model=model, namespace="tenant")
    assert store.load(hit, into=model).token_count == 30
    lossy = store.put(cache, token_ids=tokens(30), model=model, method=MethodRecord.make("drop/half", "{}"))
    assert not store.match(tokens(31), model=model)
    assert code_of(store.load, lossy.subject, into=model) == "METHOD_MISMATCH"
    hit = store.match(tokens(31), model=model, method="drop/half")
    assert store.load(hit, into=model).receipt.subject == lossy.subject


def test_from_threads(store: kvstore.Store, models: Path) -> None:
    """Put and load on worker threads, at once, with a cache that was computed on this one."""
    model = tiny(models, "gemma3")
    cache = prefilled(model, 300)
    mx.eval([item.state for item in cache])
    found: list[Any] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            receipt = store.put(cache, token_ids=tokens(300), model=model, label=f"n{number}")
            found.append((receipt.subject, store.load(f"n{number}", into=model)))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    assert len({subject for subject, _ in found}) == 1
    expected = logits(model, cache, NEXT)
    for _, restored in found:
        assert logits(model, restored.cache, NEXT) == expected


def test_what_was_put_may_be_described_by_its_manifest(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama4")
    cache = prefilled(model, 50)
    receipt = store.put(cache, token_ids=tokens(50), model=model)
    assert store.show(receipt.subject).manifest.layers == describe(cache)

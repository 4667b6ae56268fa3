"""Models whose weights stay on disk, tokenizers without models, and options read off an entry."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

import kvstore
from kvstore.errors import KVStoreError
from kvstore.runtime.kinds import describe
from kvstore.runtime.lazy import load_tokenizer, open_model, options_of
from kvstore.runtime.probe import CacheOptions, make_cache, probe
from tests.releases import held
from tests.runtime.driving import same_bits
from tests.runtime.tiny import prefilled, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")


def test_a_lazily_opened_model_takes_the_cache_of_a_loaded_one(models: Path, store: kvstore.Store) -> None:
    loaded = tiny(models, "qwen3")
    cache = prefilled(loaded, 40)
    store.put(cache, token_ids=tokens(40), model=loaded, label="a")
    opened = open_model(loaded.identity.path)
    assert opened.identity == loaded.identity
    restored = store.load("a", into=opened)
    for ours, theirs in zip(restored.cache, cache, strict=True):
        assert same_bits(held(ours), held(theirs))


def test_opening_reads_next_to_no_weights(models: Path) -> None:
    path = tiny(models, "qwen3", hidden_size=512, intermediate_size=1024).identity.path
    mx.clear_cache()
    before = mx.get_active_memory()
    opened = open_model(path)
    grown = mx.get_active_memory() - before
    size = (path / "model.safetensors").stat().st_size
    assert size > 10_000_000
    assert grown < size // 20
    assert probe(opened).layers


def test_a_tokenizer_comes_without_its_model(models: Path) -> None:
    assert load_tokenizer(tiny(models, "qwen3").identity.path).encode("w3 w5") == [3, 5]


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for act in (open_model, load_tokenizer):
        with pytest.raises(KVStoreError) as error:
            act(tmp_path / "none")
        assert error.value.code == "MODEL_FOLDER_INVALID"


@pytest.mark.parametrize(
    "options",
    [CacheOptions(), CacheOptions(kv_bits=4, kv_group_size=32), CacheOptions(max_kv_size=24)],
    ids=["plain", "quantized", "windowed"],
)
def test_options_are_read_off_an_entry(models: Path, options: CacheOptions) -> None:
    model = tiny(models, "qwen3")
    layers = describe(prefilled(model, 40, options))
    assert options_of(layers, model.model) == options
    assert probe(model, options_of(layers, model.model)).signature == probe(model, options).signature
    assert len(make_cache(model.model, options_of(layers, model.model))) == len(layers)

"""Sequences of a batch: refused as a batch with the way out named, taken by themselves as any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, make_prompt_cache

import kvstore
from kvstore.errors import InvalidError
from kvstore.runtime import extract_sequence
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.kinds import describe
from kvstore.runtime.probe import make_cache
from kvstore.runtime.sparse import drop_positions
from tests.families.folders import family_folder
from tests.families.tables import FAMILIES
from tests.releases import held, wrong_in_older
from tests.runtime.driving import code_of, feed, keys_values, same_bits
from tests.runtime.tiny import NEXT, logits, run, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

PROMPTS = [tokens(11, seed=1), tokens(37, seed=2), tokens(26, seed=3)]
BATCHED = ("qwen3", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "baichuan_m1", "deepseek_v32")


def family(root: Path, name: str) -> BoundModel:
    folder = family_folder(root, FAMILIES[name])
    return kvstore.bind(utils.load_model(folder)[0], kvstore.ModelIdentity.from_path(folder))


def read_together(model: BoundModel, more: int = 3) -> tuple[list[Any], list[list[int]]]:
    """Caches of all prompts in one batch, some tokens further, and what each has read."""
    batch = PromptProcessingBatch(model.model, [0, 1, 2], [make_prompt_cache(model.model) for _ in PROMPTS])
    batch.prompt([list(prompt) for prompt in PROMPTS])
    ids = [list(prompt) for prompt in PROMPTS]
    for step in range(more):
        for number, sequence in enumerate(ids):
            sequence.append((step * 5 + number) % 90)
        mx.eval(model.model(mx.array([[sequence[-1]] for sequence in ids]), cache=batch.prompt_cache))
    return batch.prompt_cache, ids



@pytest.mark.parametrize("name", BATCHED)
def test_each_sequence_is_stored_and_goes_on(models: Path, store: kvstore.Store, name: str) -> None:
    model = family(models, name)
    batch, ids = read_together(model)
    assert code_of(store.put, batch, token_ids=ids[0], model=model) == "CACHE_BATCHED"
    for number, sequence in enumerate(ids):
        caches = extract_sequence(batch, number)
        entry = store.put(caches, token_ids=sequence, model=model).subject
        restored = store.load(entry, into=model)
        assert logits(model, restored.cache, NEXT) == logits(model, caches, NEXT)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=wrong_in_older("padding fades the state of mamba2")) if name == "mamba2" else name
    for name in BATCHED
])  # fmt: skip
def test_it_is_the_state_of_that_sequence(models: Path, name: str) -> None:
    """Computed alone it is the same but for rounding."""
    model = family(models, name)
    batch, ids = read_together(model)
    for number, sequence in enumerate(ids):
        alone = run(model, make_cache(model.model), sequence)
        left, right = (
            np.array(model.model(mx.array([[7]]), cache=caches)[0, -1].astype(mx.float32))
            for caches in (extract_sequence(batch, number), alone)
        )
        assert np.abs(left - right).max() <= 0.05 * np.abs(right).max()


def test_the_message_names_the_way_out(models: Path) -> None:
    batch, _ = read_together(family(models, "qwen3"))
    with pytest.raises(InvalidError) as error:
        describe(batch)
    assert "BatchKVCache" in str(error.value)
    assert "extract_sequence(cache, index)" in str(error.value)


def test_taking_one_leaves_the_batch_alone(models: Path) -> None:
    model = family(models, "qwen3_next")
    batch, _ = read_together(model)
    caches = extract_sequence(batch, 1)
    run(model, caches, [1, 2, 3])
    again = extract_sequence(batch, 1)
    assert describe(again) != describe(caches)
    assert describe(again) == describe(extract_sequence(batch, 1))


def test_plain_caches_of_equal_length() -> None:
    cache = KVCache()
    keys, values = zip(keys_values(9, 1), keys_values(9, 2), strict=True)
    cache.update_and_fetch(mx.concatenate(list(keys)), mx.concatenate(list(values)))
    found = extract_sequence([cache], 1)[0]
    assert type(found) is KVCache
    assert same_bits(held(found), keys_values(9, 2))


def test_slots_that_are_empty_and_padding_that_was_read() -> None:
    cache = ArraysCache(3)
    cache[0] = mx.arange(12).reshape(2, 6)
    cache.left_padding, cache.lengths = mx.array([0, 4]), mx.array([8, 9])
    first, second = (extract_sequence([cache], index)[0] for index in (0, 1))
    assert first.left_padding is None
    assert (second.left_padding.tolist(), second.lengths.tolist()) == ([4], [9])
    assert second.cache[1:] == [None, None]
    assert second.cache[0].tolist() == [[6, 7, 8, 9, 10, 11]]
    second[1] = mx.zeros((1, 2))
    assert cache[1] is None


@pytest.mark.parametrize("index", [-1, 3, True, 1.0])
def test_sequences_that_are_not_there(models: Path, index: Any) -> None:
    for name in ("qwen3", "mamba2"):
        batch, _ = read_together(family(models, name))
        assert code_of(extract_sequence, batch, index) == "USAGE"


def test_one_of_one() -> None:
    sparse = drop_positions([feed(KVCache(), [9])], [[0, 3]])
    assert describe(extract_sequence(sparse, 0)) == describe(sparse)
    assert code_of(extract_sequence, sparse, 1) == "USAGE"
    assert code_of(extract_sequence, [BatchKVCache([0, 2])], 0) == "CACHE_EMPTY"


def test_rows_that_are_still_to_be_moved() -> None:
    cache = BatchKVCache([0, 0])
    cache.prepare(right_padding=[0, 2], lengths=[4, 2])
    keys, values = keys_values(4, 1)
    cache.update_and_fetch(mx.concatenate([keys] * 2), mx.concatenate([values] * 2))
    assert code_of(extract_sequence, [cache], 0) == "CACHE_BATCHED"
    cache.finalize()
    assert extract_sequence([cache], 1)[0].offset == 2

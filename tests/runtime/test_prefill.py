"""Prefill: the state that a model reaches by itself, saved where an exact repeat still hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError, UsageError
from kvstore.runtime.kinds import describe
from kvstore.runtime.prefill import default_step, prefill
from kvstore.runtime.probe import CacheOptions, make_cache
from tests.releases import CHUNK, held
from tests.runtime.driving import same_bits
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS, logits, run, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

SAVED_AT_THE_END = {"llama": None, "gemma3": None, "qwen3 quantized": CacheOptions(kv_bits=8, kv_group_size=32)}
SAVED_ONE_BEFORE = {
    "mamba2": None, "qwen3_next": None, "llama4": None, "qwen3 windowed": CacheOptions(max_kv_size=16),
}  # fmt: skip
LONG = CHUNK + 38
"""Tokens of a prompt that is longer than every window."""
FAMILIES = {**SAVED_AT_THE_END, **SAVED_ONE_BEFORE}


def states(cache: list[Any]) -> list[Any]:
    """Every array of plain caches, cut to what counts."""
    return [held(item) for item in cache]


def test_the_state_is_that_of_the_same_steps_by_hand(models: Path) -> None:
    model = tiny(models, "qwen3")
    ids = tokens(70)
    filled = prefill(model, ids, step=32)
    by_hand = make_cache(model.model)
    for part in (ids[:32], ids[32:64], ids[64:69], ids[69:]):
        run(model, by_hand, part)
    assert same_bits(states(filled.cache), states(by_hand))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exact_repeat_of_a_prompt_hits_all_but_its_last_token(
    models: Path, store: kvstore.Store, name: str
) -> None:
    model, options, ids = tiny(models, name.split()[0]), FAMILIES[name], tokens(LONG)
    filled = prefill(model, ids, options=options)
    assert filled.token_ids.size == (LONG if name in SAVED_AT_THE_END else LONG - 1)
    store.put(filled.cache, token_ids=filled.token_ids, model=model)
    hit = store.match(ids, model=model, options=options)
    assert hit.token_count == LONG - 1, hit.reasons
    restored = store.load(hit, into=model)
    rest = [ids[filled.token_ids.size :]] if name in SAVED_ONE_BEFORE else []
    first_time = logits(model, filled.cache, [*rest, [3], [4, 5]])
    again = logits(model, restored.cache, [ids[LONG - 1 :], [3], [4, 5]])
    assert again[-len(first_time) :] == first_time


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_one_token_is_read(models: Path, name: str) -> None:
    filled = prefill(tiny(models, name.split()[0]), [5], options=FAMILIES[name])
    assert filled.token_ids.tolist() == [5]


def test_quantization_begins_where_it_shall(models: Path) -> None:
    model, options = tiny(models, "qwen3"), CacheOptions(kv_bits=4, kv_group_size=32)

    def kinds(start: int) -> set[str]:
        filled = prefill(model, tokens(40), options=options, quantized_kv_start=start)
        return {layer.kind for layer in describe(filled.cache)}

    assert kinds(0) == kinds(40) == {"kv-quantized"}
    assert kinds(41) == {"kv"}


@pytest.mark.parametrize(("family", "group"), [("gemma3", 32), ("qwen3", 64)])
def test_what_cannot_be_quantized_is_refused_before_anything_is_read(models: Path, family: str, group: int) -> None:
    model, seen = tiny(models, family), list[tuple[int, int]]()
    options = CacheOptions(kv_bits=4, kv_group_size=group)
    with pytest.raises(UsageError, match="cannot be quantized"):
        prefill(model, tokens(50), options=options, progress=lambda *at: seen.append(at))
    assert seen == []
    assert prefill(model, tokens(50), options=options, quantized_kv_start=51).token_ids.size == 50


@pytest.mark.parametrize("count", [1, 2, 9, 10])
def test_progress_counts_up_to_all(models: Path, count: int) -> None:
    seen: list[tuple[int, int]] = []
    prefill(tiny(models, "mamba2"), tokens(count), step=4, progress=lambda *at: seen.append(at))
    assert seen[0] == (0, count)
    assert seen[-1] == (count, count)
    assert sorted(set(seen)) == seen
    assert len(seen) >= count // 4 + 1


@pytest.mark.parametrize(
    ("ids", "code"), [([], "CACHE_EMPTY"), ([1, -1], "TOKEN_ID_RANGE"), ([2**32], "TOKEN_ID_RANGE")]
)
def test_ids_that_are_none_are_refused(models: Path, ids: list[int], code: str) -> None:
    with pytest.raises(KVStoreError) as error:
        prefill(tiny(models, "qwen3"), ids)
    assert error.value.code == code


@pytest.mark.parametrize("name", ["qwen3", "mamba2"])
def test_an_id_that_the_model_has_no_embedding_for_is_refused_before_mlx_reads_past_the_table(
    models: Path, name: str
) -> None:
    model = tiny(models, name)
    last = model.model.args.vocab_size - 1
    assert prefill(model, [5, last]).token_ids.tolist()[0] == 5
    with pytest.raises(KVStoreError, match=rf"position 1: .* expected 0 to {last}, found {last + 1}") as error:
        prefill(model, [5, last + 1])
    assert error.value.code == "TOKEN_ID_RANGE"


def test_a_quantized_table_counts_its_rows(tmp_path: Path) -> None:
    model = kvstore.load_model(real_folder(tmp_path / "quantized", CONFIGS["llama"], bits=4))
    with pytest.raises(KVStoreError, match="the model has no such token"):
        prefill(model, [999_999_999])


def test_a_cpu_reads_in_steps_that_one_can_wait_for() -> None:
    assert 1 <= default_step() <= 2048

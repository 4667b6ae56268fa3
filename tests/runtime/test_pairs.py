"""A model and its draft model: two entries, found and restored together or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import trim_prompt_cache

import kvstore
from kvstore.errors import IncompatibleError, IntegrityError, InvalidError, NotFoundError
from kvstore.runtime import PairHit, load_pair, match_pair, pair_of, put_pair
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.pairs import DRAFT_NOTE, MAIN_NOTE
from tests.releases import held
from tests.runtime.driving import same_bits
from tests.runtime.tiny import NEXT, logits, prefilled, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")


@pytest.fixture
def main(models: Path) -> BoundModel:
    return tiny(models, "qwen3")


@pytest.fixture
def draft(models: Path) -> BoundModel:
    return tiny(models, "llama", num_hidden_layers=2)


def both(main: BoundModel, draft: BoundModel, count: int = 60) -> list[Any]:
    return [*prefilled(main, count), *prefilled(draft, count)]


def found(store: kvstore.Store, main: BoundModel, draft: BoundModel, count: int = 61) -> PairHit:
    return match_pair(store, tokens(count), model=main, draft=draft)


def test_both_come_back_at_one_position(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    caches = both(main, draft)
    first, second = put_pair(store, caches, token_ids=tokens(60), model=main, draft=draft, label="talk")
    assert first.subject != second.subject
    pair = load_pair(store, found(store, main, draft), into=main, draft_into=draft)
    assert pair.token_count == 60
    assert len(pair.cache) == len(caches) == 6
    assert logits(main, pair.cache[:4], NEXT) == logits(main, caches[:4], NEXT)
    assert logits(draft, pair.cache[4:], NEXT) == logits(draft, caches[4:], NEXT)


def test_each_names_the_other(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    first, second = put_pair(store, both(main, draft), token_ids=tokens(60), model=main, draft=draft)
    notes = {entry: store.show(entry).info.annotations for entry in (first.subject, second.subject)}
    assert notes[first.subject][DRAFT_NOTE] == second.subject
    assert notes[second.subject][MAIN_NOTE] == first.subject
    for mine, other in ((first, second), (second, first)):
        (written,) = store.show(mine.subject).receipts
        assert (written.digest, written.type) == (mine.digest, "write")
        assert other.subject in written.data.decode()


def test_a_main_entry_that_was_there_already_becomes_one_of_a_pair(
    store: kvstore.Store, main: BoundModel, draft: BoundModel
) -> None:
    caches = both(main, draft)
    alone = store.put(caches[:4], token_ids=tokens(60), model=main).subject
    first, second = put_pair(store, caches, token_ids=tokens(60), model=main, draft=draft)
    assert first.subject == alone
    assert store.show(alone).info.annotations[DRAFT_NOTE] == second.subject
    assert found(store, main, draft).token_count == 60


def test_identities_will_do_for_caches_out_of_a_file(
    store: kvstore.Store, main: BoundModel, draft: BoundModel
) -> None:
    caches = both(main, draft)
    put_pair(store, caches, token_ids=tokens(60), model=main.identity, draft=draft.identity)
    hit = match_pair(store, tokens(61), model=main.identity, draft=draft.identity)
    pair = load_pair(store, hit, into=main, draft_into=draft)
    assert logits(main, pair.cache[:4], NEXT) == logits(main, caches[:4], NEXT)


def test_a_pair_by_name(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    caches = both(main, draft)
    trim_prompt_cache(caches[4:], 1)
    _, second = put_pair(store, caches, token_ids=tokens(60), model=main, draft=draft, label="talk")
    pair = load_pair(store, pair_of(store, "talk", into=main, draft_into=draft), into=main, draft_into=draft)
    assert (pair.token_count, len(pair.cache)) == (59, 6)
    store.remove(second.subject)
    with pytest.raises(NotFoundError) as error:
        pair_of(store, "talk", into=main, draft_into=draft)
    assert error.value.code == "NO_PREFIX"


def test_a_draft_that_cannot_be_loaded_is_a_miss_of_both(
    store: kvstore.Store, main: BoundModel, draft: BoundModel
) -> None:
    put_pair(store, both(main, draft), token_ids=tokens(60), model=main, draft=draft)
    hit = found(store, main, draft)
    with pytest.raises(IncompatibleError):
        load_pair(store, hit, into=main, draft_into=main)
    manifest = store.show(hit.draft.entry_id or "").manifest
    for ref in manifest.payloads():
        for file in (store.entries.root / "objects").rglob(f"{ref.digest.removeprefix('sha256:')}.*"):
            file.unlink()
    with pytest.raises(IntegrityError):
        load_pair(store, hit, into=main, draft_into=draft)


def test_nothing_is_put_where_the_draft_could_not_be(
    store: kvstore.Store, main: BoundModel, draft: BoundModel, models: Path
) -> None:
    other = prefilled(tiny(models, "llama", num_hidden_layers=2, num_key_value_heads=4), 60)
    with pytest.raises(InvalidError) as error:
        put_pair(store, [*prefilled(main, 60), *other], token_ids=tokens(60), model=main, draft=draft)
    assert error.value.code == "CACHE_INCONSISTENT"
    assert store.list() == []


def test_a_draft_model_may_be_a_token_behind(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    caches = both(main, draft)
    trim_prompt_cache(caches[4:], 1)
    put_pair(store, caches, token_ids=tokens(60), model=main, draft=draft)
    pair = load_pair(store, found(store, main, draft), into=main, draft_into=draft)
    assert pair.token_count == 59
    trim_prompt_cache(caches[:4], 1)
    for ours, theirs in zip(pair.cache, caches, strict=True):
        assert same_bits(held(ours), held(theirs))


def test_shorter_than_what_is_stored(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    put_pair(store, both(main, draft), token_ids=tokens(60), model=main, draft=draft)
    assert found(store, main, draft, 41).token_count == 40


def test_one_alone_is_a_miss(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    caches = both(main, draft)
    store.put(caches[:4], token_ids=tokens(60), model=main)
    miss = found(store, main, draft)
    assert not miss
    assert miss.main.token_count == 60
    with pytest.raises(NotFoundError) as error:
        load_pair(store, miss, into=main, draft_into=draft)
    assert error.value.code == "NO_PREFIX"
    store.put(caches[4:], token_ids=tokens(60), model=draft)
    assert not found(store, main, draft)


@pytest.mark.parametrize("gone", [0, 1], ids=["main", "draft"])
def test_a_pair_of_which_one_was_removed_is_a_miss(
    store: kvstore.Store, main: BoundModel, draft: BoundModel, gone: int
) -> None:
    receipts = put_pair(store, both(main, draft), token_ids=tokens(60), model=main, draft=draft)
    store.remove(receipts[gone].subject)
    assert not found(store, main, draft)


def test_a_position_that_one_of_them_cannot_be_cut_to_is_a_miss(
    store: kvstore.Store, models: Path, draft: BoundModel
) -> None:
    state = tiny(models, "mamba2")
    caches = [*prefilled(state, 60), *prefilled(draft, 60)]
    put_pair(store, caches, token_ids=tokens(60), model=state, draft=draft)
    assert found(store, state, draft).token_count == 60
    assert not found(store, state, draft, 41)


def test_a_longer_entry_of_the_main_model_does_not_hide_the_pair(
    store: kvstore.Store, main: BoundModel, draft: BoundModel
) -> None:
    put_pair(store, both(main, draft), token_ids=tokens(60), model=main, draft=draft)
    store.put(prefilled(main, 80), token_ids=tokens(80), model=main)
    assert found(store, main, draft, 81).token_count == 60


def test_caches_that_are_not_of_both(store: kvstore.Store, main: BoundModel, draft: BoundModel) -> None:
    with pytest.raises(InvalidError) as error:
        put_pair(store, prefilled(main, 60), token_ids=tokens(60), model=main, draft=draft)
    assert error.value.code == "CACHE_INCONSISTENT"
    assert store.list() == []

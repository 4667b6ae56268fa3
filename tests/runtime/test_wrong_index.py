"""An index that leads astray: edited rows and another store's index cost a hit at most, never a wrong cache."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.probe import make_cache
from tests.runtime.driving import code_of
from tests.runtime.tiny import NEXT, VOCABULARY, logits, prefilled, run, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

COUNT = 300
OTHER = [(token + 1) % VOCABULARY for token in tokens(COUNT)]


@pytest.fixture(scope="module")
def bound(models: Path) -> BoundModel:
    return tiny(models, "llama")


def edit(root: Path, statement: str) -> None:
    """Change the index behind the store's back."""
    with closing(sqlite3.connect(root / "index.sqlite")) as connection:
        connection.execute(statement)
        connection.commit()


@pytest.fixture
def swapped(store: kvstore.Store, bound: BoundModel) -> kvstore.Store:
    """A store of two entries whose tree names each in the other's place."""
    first = store.put(prefilled(bound, COUNT), token_ids=tokens(COUNT), model=bound)
    second = store.put(run(bound, make_cache(bound.model, None), OTHER), token_ids=OTHER, model=bound)
    assert first.subject != second.subject
    edit(store.entries.root, "UPDATE tree_reach SET entry_key = 3 - entry_key")
    return store


@pytest.mark.parametrize("count", [COUNT, COUNT - 1, 257, 256, 255, 1])
def test_an_entry_of_other_tokens_is_never_loaded(swapped: kvstore.Store, bound: BoundModel, count: int) -> None:
    hit = swapped.match([*tokens(count), 1], model=bound)
    assert hit.token_count >= count
    assert code_of(swapped.load, hit, into=bound) == "PREFIX_NOT_MATCHED"


def test_a_put_is_not_left_out_for_an_entry_of_other_tokens(swapped: kvstore.Store, bound: BoundModel) -> None:
    cache = prefilled(bound, COUNT - 10)
    ids = tokens(COUNT - 10)
    receipt = swapped.put(cache, token_ids=ids, model=bound, if_covered="skip")
    assert receipt.facts["objects_written"]
    assert swapped.show(receipt.subject).manifest.token_count == COUNT - 10


def test_a_hit_keeps_the_ids_that_it_was_found_for(store: kvstore.Store, bound: BoundModel) -> None:
    cache = prefilled(bound, COUNT)
    store.put(cache, token_ids=tokens(COUNT), model=bound)
    ids = np.array([*tokens(257), 1], np.uint32)
    hit = store.match(ids, model=bound)
    ids[:] = 0
    restored = store.load(hit, into=bound)
    for item in cache:
        item.trim(COUNT - 257)
    assert logits(bound, restored.cache, NEXT) == logits(bound, cache, NEXT)


def test_the_index_of_another_store(store: kvstore.Store, bound: BoundModel, tmp_path: Path) -> None:
    store.put(prefilled(bound, COUNT), token_ids=tokens(COUNT), model=bound)
    with kvstore.Store.open(tmp_path / "other") as other:
        other.put(prefilled(bound, COUNT), token_ids=tokens(COUNT), model=bound, label="both")
        entry = other.put(prefilled(bound, 40), token_ids=tokens(40), model=bound).subject
    root = store.entries.root
    store.close()
    shutil.copyfile(tmp_path / "other" / "index.sqlite", root / "index.sqlite")
    with kvstore.Store.open(root) as wrong:
        assert code_of(wrong.load, wrong.match(tokens(41), model=bound), into=bound) == "OBJECT_MISSING"
        assert entry in {finding.subject for finding in wrong.verify().findings}
        restored = wrong.load(wrong.match([*tokens(COUNT), 1], model=bound), into=bound)
        assert logits(bound, restored.cache, NEXT) == logits(bound, prefilled(bound, COUNT), NEXT)

"""A call that is wrong is refused as one, before anything is done, and by no error but ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.prefill import prefill
from kvstore.runtime.wp30_write import write_wp30
from tests.runtime.tiny import prefilled, tiny, tokens

pytestmark = pytest.mark.usefixtures("own_cache")

COUNT = 9
LOOP: list[Any] = []
LOOP.append(LOOP)


class Calls:
    """A store with one entry, and the calls that a test makes wrong."""

    def __init__(self, store: kvstore.Store, model: BoundModel) -> None:
        self.store, self.model, self.cache = store, model, prefilled(model, COUNT)
        self.entry = self.put().subject

    def put(self, **options: Any) -> Any:
        return self.store.put(self.cache, token_ids=tokens(COUNT), model=self.model, **options)

    def load(self, wanted: Any = None, **options: Any) -> Any:
        return self.store.load(self.entry if wanted is None else wanted, into=self.model, **options)

    def prefill(self, **options: Any) -> Any:
        return prefill(self.model, tokens(COUNT), **options)


@pytest.fixture
def calls(store: kvstore.Store, models: Path) -> Calls:
    return Calls(store, tiny(models, "llama"))


def refused(call: Callable[[], object], code: str = "USAGE") -> None:
    with pytest.raises(KVStoreError) as caught:
        call()
    assert caught.value.code == code


WORDS: dict[str, Callable[[Calls, Any, Path], object]] = {
    "codec": lambda c, word, _: c.put(codec=word),
    "codec of a bundle": lambda c, word, path: c.store.entries.import_bundle(path / "bundle", codec=word),
    "codec of an older format": lambda c, word, path: write_wp30(path / "x", c.cache, tokens(COUNT), {}, codec=word),
    "if_covered": lambda c, word, _: c.put(if_covered=word),
    "policy": lambda c, word, _: c.load(policy=word),
    "verification": lambda c, word, _: c.load(verification=word),
    "verification of token ids": lambda c, word, _: c.store.entries.token_ids(
        c.store.entries.manifest(c.entry), verification=word
    ),
    "durability": lambda _, word, path: kvstore.EntryStore.open(path / "other", durability=word),
}


@pytest.mark.parametrize("word", ["", "smal", "SKIP", "Tokens", "alway", "ful", None, 1, ["small"]], ids=repr)
@pytest.mark.parametrize("name", WORDS)
def test_a_word_that_is_no_choice(calls: Calls, tmp_path: Path, name: str, word: Any) -> None:
    calls.store.entries.export_bundle(calls.entry, tmp_path / "bundle")
    refused(lambda: WORDS[name](calls, word, tmp_path))
    assert len(calls.store.list()) == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", True], ids=repr)
def test_a_count_of_tokens_that_is_none(calls: Calls, count: Any) -> None:
    refused(lambda: calls.prefill(step=count))
    refused(lambda: calls.prefill(checkpoint_every=count, checkpoint=print))


@pytest.mark.parametrize("base", ["sha256:" + "0" * 64, 5, object(), [], b"x"], ids=lambda base: type(base).__name__)
def test_a_base_that_is_none(calls: Calls, base: Any) -> None:
    refused(lambda: calls.put(base=base))
    refused(lambda: calls.put(base=calls.model))


NOTES: dict[str, tuple[Any, str]] = {
    "no mapping": ([1], "USAGE"),
    "a text": ("x", "USAGE"),
    "a number as a name": ({1: 2}, "USAGE"),
    "names of several types": ({None: 1, "a": 2}, "USAGE"),
    "an object": ({"a": object()}, "USAGE"),
    "bytes": ({"a": b"x"}, "USAGE"),
    "a set": ({"a": {"b": [{1}]}}, "USAGE"),
    "a number as a key": ({"a": {1: 2}}, "USAGE"),
    "a fraction": ({"a": 1.5}, "JSON_FLOAT"),
    "a fraction in a tuple": ({"a": (1, (2.5,))}, "JSON_FLOAT"),
    "a list in itself": ({"a": LOOP}, "JSON_TOO_DEEP"),
    "no name": ({"": 1}, "FIELD_RANGE"),
}


@pytest.mark.parametrize("name", NOTES)
def test_annotations_that_are_none(calls: Calls, name: str) -> None:
    facts, code = NOTES[name]
    before = calls.store.show(calls.entry)
    refused(lambda: calls.put(annotations=facts), code)
    refused(lambda: calls.put(annotations=facts, if_covered="skip"), code)
    refused(lambda: calls.store.entries.annotate(calls.entry, facts), code)
    assert calls.store.show(calls.entry) == before


@pytest.mark.parametrize("ref", [None, 5, b"label", [], object()], ids=lambda ref: type(ref).__name__)
def test_a_reference_that_is_no_text(calls: Calls, ref: Any) -> None:
    store = calls.store
    for call in (store.show, store.remove, store.lease, lambda ref: store.load(ref, into=calls.model),
                 lambda ref: store.verify([ref]), lambda ref: store.label("x", ref)):  # fmt: skip
        refused(lambda call=call: call(ref))  # type: ignore[misc]
    refused(lambda: store.label(ref, calls.entry), "LABEL_INVALID")
    if ref is not None:
        refused(lambda: calls.put(label=ref), "LABEL_INVALID")

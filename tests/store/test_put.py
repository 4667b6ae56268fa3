"""What is said about an entry in a put: refused before anything is done, and from then on nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.format.groups import PayloadRef
from kvstore.format.tensors import Payload
from kvstore.store.entry_store import EntryStore
from tests.builders import make_entry
from tests.store.kit import code_of, files, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


NO_MAPPINGS: list[Any] = [5, 0, "x", "", [], ["x"], {"x"}]
NO_FACTS: list[tuple[str, Any, str]] = [
    *((name, facts, "USAGE") for name in ("annotations", "libraries", "device") for facts in NO_MAPPINGS),
    *((name, {1: "x"}, "USAGE") for name in ("annotations", "libraries", "device")),
    ("libraries", {"x": 1}, "FIELD_TYPE"), ("libraries", {"x": "1" * 256}, "FIELD_RANGE"),
    ("device", {"x": 1.5}, "JSON_FLOAT"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "code"), NO_FACTS, ids=lambda item: str(item)[:12])
def test_facts_that_a_receipt_cannot_hold(store: EntryStore, name: str, facts: Any, code: str) -> None:
    before = files(store.root)
    assert code_of(put, store, make_entry(6, 20), **{name: facts}) == code
    assert files(store.root) == before


def test_facts_are_those_at_the_call(store: EntryStore) -> None:
    made, notes, libraries = make_entry(6, 20), {"a": 1}, {"x": "1"}

    def source(ref: PayloadRef) -> Payload:
        notes["a"], libraries["x"] = 2, "2"
        return made.source(ref)

    store.publish(made.manifest, source, token_ids=made.token_ids, annotations=notes, libraries=libraries)
    (receipt,) = store.receipts(made.entry_id)
    assert (receipt.facts["annotations"], receipt.libraries) == ({"a": 1}, {"x": "1"})
    assert store.info(made.entry_id).annotations == {"a": 1}

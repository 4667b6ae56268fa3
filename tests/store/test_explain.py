"""Why a prompt misses: which model, which field, which namespace has it instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.format.compat import signature
from kvstore.store.entry_store import EntryStore
from kvstore.store.explain import Asked
from kvstore.store.match import Reason
from tests.builders import MadeEntry, make_entry, make_model
from tests.store.kit import object_file, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


def asked(made: MadeEntry, *, model: str = "toy", namespace: str = "default") -> Asked:
    return Asked(make_model(model), namespace, made.token_ids, signature(made.manifest.layers))


def reasons(store: EntryStore, what: Asked, *, longer_than: int = 0, namespaces: bool = False) -> tuple[Reason, ...]:
    return store.explain(what, (), longer_than=longer_than, namespaces=namespaces)


def test_another_model_is_named_by_the_field_that_differs(store: EntryStore) -> None:
    made = make_entry(1, 300, model="theirs")
    put(store, made)
    (reason,) = reasons(store, asked(make_entry(1, 400), model="ours"))
    assert (reason.code, reason.token, reason.entry_id) == ("OTHER_MODEL", 300, made.entry_id)
    assert reason.expected == make_model("ours").weights[0].digest
    assert reason.found == make_model("theirs").weights[0].digest
    assert reason.message.startswith("other model: 300 of the tokens are stored by one whose model.weights[model.saf")
    assert str(reason.found).removeprefix("sha256:")[:12] in reason.message


def test_other_models_come_in_the_order_of_what_they_share(store: EntryStore) -> None:
    for name, count in (("short", 100), ("long", 400), ("middle", 257)):
        put(store, make_entry(1, count, model=name))
    put(store, make_entry(2, 500, model="unrelated"))
    found = reasons(store, asked(make_entry(1, 500)))
    assert [reason.token for reason in found] == [400, 257, 100]
    assert [reason.token for reason in reasons(store, asked(make_entry(1, 500)), longer_than=256)] == [400, 257]


def test_other_namespaces_are_looked_into_only_when_that_is_asked_for(store: EntryStore) -> None:
    made = make_entry(1, 300, namespace="tenant")
    put(store, made)
    put(store, make_entry(1, 200, namespace="tenant", model="theirs"))
    what = asked(make_entry(1, 400))
    assert reasons(store, what) == ()
    first, second = reasons(store, what, namespaces=True)
    assert (first.code, first.expected, first.found) == ("OTHER_NAMESPACE", "default", "tenant")
    assert first.message == "other namespace: 300 of the tokens are stored in namespace 'tenant'"
    assert second.code == "OTHER_MODEL"
    assert "in namespace 'tenant'" in second.message
    assert reasons(store, asked(made, namespace="tenant", model="nobody"))[0].entry_id == made.entry_id


def test_another_shape_is_named_by_layer_and_field(store: EntryStore) -> None:
    made = make_entry(1, 300, window=64)
    put(store, made)
    what = asked(make_entry(1, 300, window=128))
    found = store.match(what.model.digest, "default", what.ids, signature=make_entry(1, 300).signature)
    assert [reason.code for reason in found.reasons] == ["OTHER_SIGNATURE"]
    (reason,) = store.explain(what, found.reasons, longer_than=0)
    assert (reason.expected, reason.found) == ("128", "64")
    assert reason.message == (
        "an entry with another cache signature reaches token 299: layers[1].max_size differs (expected 128, found 64)"
    )


def test_an_entry_whose_manifest_cannot_be_read_says_nothing(store: EntryStore) -> None:
    made = make_entry(1, 300, model="theirs")
    put(store, made)
    path = object_file(store, made).parents[2] / "manifests" / made.entry_id[7:9] / f"{made.entry_id[7:]}.json"
    path.unlink()
    assert reasons(store, asked(make_entry(1, 400))) == ()


def test_the_nearest_entry_need_not_be_restorable(store: EntryStore) -> None:
    made = make_entry(1, 300, window=64)
    put(store, made)
    near = store.nearest(asked(make_entry(1, 100)))
    assert near is not None
    assert (near.entry_id, near.common_tokens) == (made.entry_id, 100)
    assert store.nearest(asked(make_entry(2, 100))) is None


def test_stored_bytes_are_those_of_the_files(store: EntryStore) -> None:
    made = make_entry(1, 600)
    put(store, made)
    refs = made.manifest.payloads()
    sizes = [object_file(store, made, number).stat().st_size for number in range(len(refs))]
    assert store.stored_bytes("default", refs) == sum(sizes)
    assert store.stored_bytes("default", refs[:1]) == sizes[0]
    assert store.stored_bytes("elsewhere", refs) == 0

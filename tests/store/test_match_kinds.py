"""Match against the manifests themselves: over all kinds of layers, no position is found that one of them forbids,
and none is missed that one of them allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.format.digest import sha256_digest
from kvstore.format.manifest import Manifest, PrefixRecord
from kvstore.format.prefix import as_token_ids
from kvstore.runtime.cut import cut_layers, needed_payloads
from kvstore.store.match import match
from kvstore.store.schema import METADATA
from tests.samples import MODEL, TOKENIZER
from tests.store.brute import MODEL as DIGEST
from tests.store.brute import Entry, put
from tests.store.test_match import media_items, prefixes
from tests.strategies import groups_of, layer_lists, payload_ref


@pytest.fixture(scope="module")
def engine() -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    METADATA.create_all(engine)
    yield engine
    engine.dispose()


@st.composite
def stored(draw: Any, known: list[tuple[int, ...]]) -> tuple[Entry, Manifest]:
    """An entry of any kinds of layers, and the manifest that says where it can be cut."""
    ids = draw(prefixes(known))
    media = draw(media_items(len(ids)))
    layers = draw(layer_lists(len(ids)))
    prefix = PrefixRecord(len(ids), sha256_digest(b"prefix"), payload_ref(8), media)
    manifest = Manifest(MODEL, TOKENIZER, "default", prefix, layers, groups_of(layers))
    return Entry(ids, manifest.lowest_cut, media), manifest


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_match_is_the_best_cut_of_all_manifests(engine: sa.Engine, data: st.DataObject) -> None:
    with engine.connect() as conn:
        known: list[tuple[int, ...]] = []
        made: list[tuple[Entry, Manifest]] = []
        for _ in range(data.draw(st.integers(1, 6))):
            entry, manifest = data.draw(stored(known))
            known.append(entry.ids)
            made.append((put(conn, entry), manifest))
        ids = data.draw(prefixes(known))
        media = data.draw(media_items(len(ids)))
        found = match(conn, DIGEST, "default", as_token_ids(ids), media=media)
        best: tuple[int, int, Manifest | None] = (0, 0, None)
        for entry, manifest in made:
            most = min(entry.common(ids, media), len(ids) - 1)
            reach = next((n for n in range(most, 0, -1) if manifest.can_cut(n)), 0)
            if reach and (reach, entry.key) > best[:2]:
                best = (reach, entry.key, manifest)
        assert found.token_count == best[0]
        assert found.entry_id == next((e.entry_id for e, m in made if e.key == best[1]), None)
        if best[2] is not None:
            # What is found can be planned: every layer has a record there, and its payloads are some of the entry's.
            cut_layers(best[2].layers, best[0])
            assert set(needed_payloads(best[2], best[0])) <= set(best[2].payloads())
        conn.rollback()

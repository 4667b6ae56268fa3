"""What a match finds is what a load would accept, and the most of it: over all kinds, shapes, methods, models and
namespaces, compared with asking every manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.format.compat import Wanted, mismatches, signature, signature_digest
from kvstore.format.digest import sha256_digest
from kvstore.format.kinds import KINDS, LOSSY_KINDS
from kvstore.format.layers import LayerRecord, TensorRecord, leaves
from kvstore.format.manifest import Manifest, MethodRecord, PrefixRecord, parse_manifest, token_spec
from kvstore.format.prefix import MediaItem, as_token_ids
from kvstore.format.tensors import payload_size
from kvstore.runtime.find import find
from kvstore.runtime.probe import CacheOptions
from kvstore.store.entry_store import EntryStore
from kvstore.store.explain import Asked
from tests.runtime.driving import code_of
from tests.runtime.tiny import prefilled, tiny, tokens
from tests.samples import MODEL, TOKENIZER
from tests.store.brute import Entry, drop, put
from tests.store.test_match import media_items, prefixes
from tests.strategies import LEAF_KINDS, canonical_leaf, groups_of, payload_ref

MODELS = (MODEL, replace(MODEL, config=sha256_digest(b"another config")))
METHODS = (None, "two-of-three", "snapkv")
NAMESPACES = ("default", "tenant")
WINDOW, CHUNK = 300, 100


def test_every_kind_is_looked_at() -> None:
    assert {*LEAF_KINDS, "list"} == set(KINDS)


def layer(kind: str, count: int, shape: int) -> LayerRecord:
    """A layer after ``count`` tokens; ``shape`` (0 or 1) tells signatures of one kind apart."""
    scalars: dict[str, Any] = {"offset": count}
    if kind == "state":
        return LayerRecord(kind, {"slots": 1 + shape, "left_padding": None, "lengths": None},
                           {"slot.0": TensorRecord("F32", (1, 4))})  # fmt: skip
    if kind == "kv-compressed":
        size = 64 * (1 + shape)
        window = TensorRecord("F32", (1, min(count, size), 4))
        return LayerRecord(kind, {**scalars, "max_size": size}, {"window": window})
    rows = count
    if kind == "kv-rotating":
        rows, keep = min(count, WINDOW), 4 * shape
        ring = rows if count <= WINDOW else keep + (count - keep) % (rows - keep)
        scalars |= {"max_size": WINDOW, "keep": keep, "ring_index": ring}
    elif kind == "kv-chunked":
        rows = min(count, CHUNK + 50)
        scalars |= {"chunk_size": CHUNK, "start": count - rows}
    elif kind in LOSSY_KINDS:
        rows = (count + 1) // 2
    if "quantized" in kind:
        return _packed(kind, {**scalars, "bits": 8 if shape else 4, "group_size": 32, "mode": "affine"}, rows)
    tensor = TensorRecord("F16", (1, 1 + shape, rows, 4))
    return LayerRecord(kind, scalars, {"k": tensor, "v": tensor})


def _packed(kind: str, scalars: dict[str, Any], rows: int) -> LayerRecord:
    words = TensorRecord("U32", (1, 1, rows, scalars["bits"]))
    part = TensorRecord("F16", (1, 1, rows, 1))
    tensors = {f"{side}.{role}": words if role == "words" else part
               for side in "kv" for role in ("words", "scales", "biases")}  # fmt: skip
    return LayerRecord(kind, scalars, tensors)


@dataclass(frozen=True)
class Made:
    """An entry's row and its manifest."""

    entry: Entry
    manifest: Manifest

    def reach(self, ids: tuple[int, ...], media: tuple[MediaItem, ...]) -> int:
        """The most tokens of the ids that the manifest lets be restored, one left to evaluate."""
        most = min(self.entry.common(ids, media), len(ids) - 1)
        return next((n for n in range(most, 0, -1) if self.manifest.can_cut(n)), 0)


@st.composite
def shapes(draw: Any, kind: str) -> tuple[tuple[str, int], ...]:
    """The layers of a cache: one of the kind, and maybe another; the second within a list."""
    both = st.tuples(st.sampled_from((kind, kind, *LEAF_KINDS)), st.integers(0, 1))
    return (kind, draw(st.integers(0, 1))), *draw(st.lists(both, max_size=1))


def layers_of(cache: tuple[tuple[str, int], ...], count: int) -> tuple[LayerRecord, ...]:
    first, *rest = (canonical_leaf(layer(kind, count, shape)) for kind, shape in cache)
    return first, *(LayerRecord("list", {}, {}, (one,)) for one in rest)


@st.composite
def entries(draw: Any, caches: list[tuple[tuple[str, int], ...]], known: list[tuple[int, ...]], *, plain: bool) -> Made:
    ids = draw(prefixes(known))
    media = () if plain else draw(media_items(len(ids)))
    layers = layers_of(draw(st.sampled_from(caches)), len(ids))
    lossy = any(leaf.kind in LOSSY_KINDS for _, leaf in leaves(layers))
    name = draw(st.sampled_from(METHODS[1:] if lossy else (None, *METHODS)))
    manifest = Manifest(
        draw(st.sampled_from((*MODELS[:1] * 3, *MODELS))), TOKENIZER,
        draw(st.sampled_from((*NAMESPACES[:1] * 3, *NAMESPACES))),
        PrefixRecord(len(ids), sha256_digest(b"prefix"), payload_ref(8), media), layers, groups_of(layers),
        None if name is None else MethodRecord.make(name, "{}"),
    )  # fmt: skip
    entry = Entry(
        ids, manifest.lowest_cut, media, signature_digest(signature(layers), name), name, manifest.model.digest,
        manifest.namespace,
    )  # fmt: skip
    return Made(entry, manifest)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryStore]:
    """A store whose entries are rows of the index and no more."""
    with EntryStore.open(tmp_path_factory.mktemp("find")) as store:
        yield store


@pytest.mark.parametrize("kind", LEAF_KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_match_is_the_best_of_all_that_a_load_accepts(rows: EntryStore, kind: str, data: st.DataObject) -> None:
    known: list[tuple[int, ...]] = []
    made: list[Made] = []
    caches = data.draw(st.lists(shapes(kind), min_size=1, max_size=2), label="caches")
    plain = data.draw(st.sampled_from((True, True, False)), label="no media")
    for _ in range(data.draw(st.integers(2, 7), label="entries")):
        made.append(data.draw(entries(caches, known, plain=plain), label="entry"))
        known.append(made[-1].entry.ids)
    ids = data.draw(prefixes(known), label="asked for")
    asked = Asked(
        MODELS[0], data.draw(st.sampled_from((*NAMESPACES[:1] * 3, *NAMESPACES)), label="namespace"), as_token_ids(ids),
        data.draw(st.sampled_from([signature(one.manifest.layers) for one in made]), label="signature"),
        () if plain else data.draw(media_items(len(ids)), label="media"),
    )  # fmt: skip
    method = data.draw(st.sampled_from([one.entry.method for one in made]), label="method")
    # Nothing is drawn from here on, so that no example leaves anything to the next.
    with rows._opened.index.write(durable=False) as connection:
        made = [replace(one, entry=put(connection, one.entry)) for one in made]
    hit = find(rows, asked, options=CacheOptions(), method=method)
    with rows._opened.index.write(durable=False) as connection:
        for one in made:
            drop(connection, one.entry)
    wanted = Wanted(asked.model, TOKENIZER, asked.namespace, "strict", asked.signature, method)
    fitting = [one for one in made if not mismatches(one.manifest, wanted) and one.reach(ids, asked.media)]
    best = max(
        fitting, default=None,
        key=lambda one: (one.reach(ids, asked.media), one.manifest.method is None, one.entry.key),
    )  # fmt: skip
    event("a hit" if best else "a miss")
    event(f"{len(fitting)} fit")
    assert hit.entry_id == (None if best is None else best.entry.entry_id)
    assert hit.token_count == (0 if best is None else best.reach(ids, asked.media))


@pytest.mark.parametrize("kind", LEAF_KINDS)
@pytest.mark.parametrize("count", [1, 50, 300, 301, 520])
def test_the_layers_of_these_entries_are_valid(kind: str, count: int) -> None:
    for shape in (0, 1):
        layers = layers_of(((kind, shape), ("kv", 0)), count)
        method = MethodRecord.make("m", "{}") if kind in LOSSY_KINDS else None
        prefix = PrefixRecord(count, sha256_digest(b"prefix"), payload_ref(payload_size([token_spec(count)])), ())
        manifest = Manifest(MODEL, TOKENIZER, "default", prefix, layers, groups_of(layers), method)
        assert parse_manifest(manifest.data).layers == layers


@pytest.mark.usefixtures("plain_kernels", "own_cache")
def test_a_match_reads_no_payload_writes_nothing_and_waits_for_nobody(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    store.put(prefilled(model, 300), token_ids=tokens(300), model=model)
    asked = [*tokens(280), 5, 6, 7]
    expected = store.match(asked, model=model)
    assert expected.token_count == 280
    objects, away = store.entries.root / "objects", store.entries.root / "away"
    with EntryStore.open(store.entries.root) as writer, writer._opened.index.write():
        objects.rename(away)
        began = changes(store.entries.root)
        hit = store.match(asked, model=model)
        assert (hit, hit.reads) == (expected, expected.reads)
        assert store.explain(asked, model=model).token_count == 280
        assert changes(store.entries.root) == began
        assert store.entries.holders() == []
    assert code_of(store.load, hit, into=model) == "OBJECT_MISSING"


def changes(root: Path) -> list[tuple[str, int, int]]:
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("index.sqlite*")
                  if not path.name.endswith("-shm"))  # fmt: skip

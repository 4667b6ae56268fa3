"""What is proved of one family: its caches come back from a store, at every token where they may, bit for bit.

A tiny model reads a prompt and goes on greedily, token by token. Nothing of that run ever touches a store but what is
put on the way. From each entry other runs start, and have to give the same logits to the last bit.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import utils
from mlx_lm.models.cache import RotatingKVCache

import kvstore
from kvstore.errors import KVStoreError
from kvstore.format.compat import signature
from kvstore.format.layers import leaves
from kvstore.format.layout import layout_of
from kvstore.format.manifest import Manifest, MethodRecord
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.kinds import objects
from kvstore.runtime.prefill import default_step
from kvstore.runtime.probe import make_cache, quantize_cache
from kvstore.runtime.results import Hit
from kvstore.runtime.sparse import drop_positions
from tests.families.base import VOCABULARY, Family
from tests.families.folders import family_folder
from tests.runtime.driving import bits

LONG, SHORT = 70, 9
"""Tokens of the prompts: one longer than every window of the tables, one shorter."""
MORE = {LONG: 13, SHORT: 4}
"""Tokens after a prompt, read one by one, at which the cache is put again: a ring is then in the middle of a turn."""
GREEDY, AFTER_A_SHORT_ONE = 64, 16
AFTER_A_CUT = 6
FEW = (1, 2, 5)
THINNED = MethodRecord.make("two-of-three", "{}")


@dataclass(frozen=True)
class ClassFacts:
    """What was seen of one class in one family's four entries.

    Attributes:
        kind: The format's kind.
        span: Kind of the span of its rows.
        lowest: Its own lowest cut in each entry, the entry's token count where it cannot be cut.
    """

    kind: str
    span: str
    lowest: tuple[int, ...]


@dataclass(frozen=True)
class Proof:
    """What was seen of a family; a row of the table.

    Attributes:
        classes: Classes of the caches that the model makes, with their numbers.
        caches, layers: How many caches the model makes, and how many layers it says that it has.
        groups: Groups of the last long entry, by kind of span and number of layers.
        counts: Token counts of the four entries: a long prompt, some tokens later, a short prompt, some tokens later.
        lowest: Their lowest cuts.
        leaves: By class.
        restores: Restores whose logits were compared.
    """

    name: str
    dtype: str
    classes: tuple[tuple[str, int], ...]
    caches: int
    layers: int
    groups: tuple[tuple[str, int], ...]
    counts: tuple[int, ...]
    lowest: tuple[int, ...]
    leaves: Mapping[str, ClassFacts]
    restores: int


@dataclass
class _Run:
    """A run that is never saved: what it read, and the bits of the logits after each token that came alone."""

    model: BoundModel
    family: Family
    ids: list[int]
    caches: list[Any]
    after: dict[int, bytes] = field(default_factory=dict)
    twins: dict[int, list[Any]] = field(default_factory=dict)

    def read(self, ids: Sequence[int]) -> mx.array:
        """Logits after the last of ``ids``."""
        out: mx.array = self.model.model(mx.array([list(ids)]), cache=self.caches)[0, -1]
        mx.eval(out)
        # Not-a-numbers are equal to each other, whatever the cache holds.
        assert not mx.isnan(out).any().item()
        return out

    def go_on(self, last: mx.array, count: int) -> mx.array:
        """Greedily, ``count`` tokens."""
        for _ in range(count):
            best: Any = mx.argmax(last).item()
            self.ids.append(best)
            last = self.read(self.ids[-1:])
            self.after[len(self.ids)] = bits(last).tobytes()
        return last


def prove(family: Family, root: Path) -> Proof:
    """Run the whole proof for one family; an assertion fails where it does not hold."""
    folder = family_folder(root, family)
    model = kvstore.bind(utils.load_model(folder)[0], kvstore.ModelIdentity.from_path(folder))
    manifests: list[Manifest] = []
    with kvstore.Store.open(root / f"{family.title}.store") as store:
        proved = 0 if family.thinned else sum(_prove_few(store, model, family, count) for count in FEW)
        proved += sum(_prove_repeat(store, model, family, count) for count in (LONG, SHORT))
        for prompt in (LONG, SHORT):
            run, entries = _saved_run(store, model, family, prompt)
            for entry in entries:
                manifests.append(store.show(entry).manifest)
                proved += _prove_entry(store, run, manifests[-1])
    if not family.thinned:
        _prove_probe(model, family, manifests)
    return Proof(
        family.title, family.dtype, tuple(sorted(Counter(map(_class_name, run.caches)).items())), len(run.caches),
        len(model.model.layers), tuple((group.span.kind, len(group.layers)) for group in manifests[1].groups),
        tuple(m.token_count for m in manifests), tuple(m.lowest_cut for m in manifests),
        _class_facts(run.caches, manifests), proved,
    )  # fmt: skip


def _class_facts(caches: Sequence[Any], manifests: Sequence[Manifest]) -> dict[str, ClassFacts]:
    facts = {}
    for path, cache in objects(caches):
        leaf_of = [manifest.leaves[path] for manifest in manifests]
        if leaf_of[0].span is not None:
            lows = tuple(
                m.token_count if leaf.lowest_cut < 0 else leaf.lowest_cut
                for m, leaf in zip(manifests, leaf_of, strict=True)
            )
            facts[type(cache).__name__] = ClassFacts(leaf_of[0].kind, leaf_of[0].span.kind, lows)
    return facts


def _prove_few(store: kvstore.Store, model: BoundModel, family: Family, count: int) -> int:
    """A cache of a token or two is taken, found and given back, too."""
    run = _fresh(model, family, _tokens(count))
    run.read(run.ids)
    entry = _put(store, run)
    hit = store.match([*run.ids, 5], model=model, options=family.options)
    assert (hit.entry_id, hit.token_count) == (entry, count), hit.reasons
    restored = _Run(model, family, list(run.ids), store.load(hit, into=model).cache)
    assert _bits(restored.read([5])) == _bits(run.read([5]))
    return 1


def _prove_repeat(store: kvstore.Store, model: BoundModel, family: Family, count: int) -> int:
    """A prompt that was prefilled and put is asked for again: all but its last token is there."""
    ids, method = _tokens(count)[::-1], None
    filled = kvstore.prefill(model, ids if not family.thinned else ids[:-1], options=family.options)
    if family.thinned:
        method, keep = THINNED, [n for n in range(count - 1) if n % 3 != 1]
        filled = replace(filled, cache=drop_positions(filled.cache, [keep] * len(filled.cache)))
    entry = store.put(filled.cache, token_ids=filled.token_ids, model=model, codec="fast", method=method).subject
    hit = store.match(ids, model=model, options=family.options, method=None if method is None else method.name)
    assert (hit.entry_id, hit.token_count) == (entry, count - 1), hit.reasons
    restored = _Run(model, family, ids[:-1], store.load(hit, into=model).cache)
    # As a prefill reads: each piece sees what has been quantized before it.
    twin = _Run(model, family, ids[:-1], make_cache(model.model, replace(family.options, kv_bits=None)))
    for at in range(0, count - 1, default_step()):
        twin.read(ids[at : min(at + default_step(), count - 1)])
        quantize_cache(twin.caches, family.options)
    if family.thinned:
        twin.caches = drop_positions(twin.caches, [keep] * len(twin.caches))
    assert _bits(restored.read(ids[-1:])) == _bits(twin.read(ids[-1:]))
    return 1


def _fresh(model: BoundModel, family: Family, ids: list[int]) -> _Run:
    return _Run(model, family, ids, make_cache(model.model, family.options))


def _saved_run(store: kvstore.Store, model: BoundModel, family: Family, prompt: int) -> tuple[_Run, list[str]]:
    """A run with entries at the end of its prompt and some tokens later."""
    run = _fresh(model, family, _tokens(prompt))
    run.read(run.ids[:-3])
    last = run.read(run.ids[-3:])
    if family.thinned:
        run.caches = drop_positions(run.caches, [[n for n in range(prompt) if n % 3 != 1]] * len(run.caches))
    entries = [_put(store, run)]
    last = run.go_on(last, MORE[prompt])
    entries.append(_put(store, run))
    run.go_on(last, GREEDY)
    assert len(set(run.after.values())) > GREEDY // 4
    return run, entries


def _put(store: kvstore.Store, run: _Run) -> str:
    run.twins[len(run.ids)] = copy.deepcopy(run.caches)
    method = THINNED if run.family.thinned else None
    return store.put(run.caches, token_ids=run.ids, model=run.model, codec="fast", method=method).subject


def _prove_entry(store: kvstore.Store, run: _Run, manifest: Manifest) -> int:
    """The entry whole, then cut wherever it says that it can be; and not one token further."""
    count, low = manifest.token_count, max(1, manifest.lowest_cut)
    options, method = run.family.options, THINNED.name if run.family.thinned else None
    hit = store.match(run.ids[: count + 1], model=run.model, options=options, method=method)
    assert hit.token_count == count, hit.reasons
    # A longer entry that can be cut may have been found as well; this one is looked at.
    hit = replace(hit, entry_id=manifest.entry_id)
    _prove_at(store, run, hit, GREEDY if count > LONG else AFTER_A_SHORT_ONE)
    assert _bits(_fresh(run.model, run.family, []).read([run.ids[count]])) != run.after[count + 1]
    cuts = sorted({low, (low + count) // 2, count - 2, count - 1} & set(range(low, count)))
    for cut in cuts:
        _prove_at(store, run, replace(hit, token_count=cut), AFTER_A_CUT)
    if low > 1:
        _prove_refused(store, run, replace(hit, token_count=low - 1))
    return 1 + len(cuts)


def _prove_at(store: kvstore.Store, run: _Run, hit: Hit, steps: int) -> None:
    """Restored at the hit's token count, the model goes on as the run did."""
    at = hit.token_count
    restored = _Run(run.model, run.family, run.ids[:at], store.load(hit, into=run.model).cache)
    if at == LONG - 1 and any(isinstance(cache, RotatingKVCache) for cache in _leaf_caches(restored.caches)):
        _prove_ring_in_prompt(run, restored, at)
        return
    expected = run.after if at + 1 in run.after else _trimmed(run, at, steps)
    for count in range(at + 1, at + steps + 1):
        assert _bits(restored.read([run.ids[count - 1]])) == expected[count], f"token {count} after {at}"


def _trimmed(run: _Run, at: int, steps: int) -> dict[int, bytes]:
    """Logits within a prompt that was read in one piece: by a copy of the cache that is trimmed as mlx_lm does."""
    count, caches = next((count, twin) for count, twin in sorted(run.twins.items()) if count > at)
    twin = _Run(run.model, run.family, run.ids[:at], copy.deepcopy(caches))
    assert all(cache.trim(count - at) == count - at for cache in twin.caches)
    return {n: _bits(twin.read([run.ids[n - 1]])) for n in range(at + 1, at + steps + 1)}


def _prove_ring_in_prompt(run: _Run, restored: _Run, at: int) -> None:
    """A full ring one token back, where the prompt's end was read in one piece.

    mlx_lm's own trim leaves the trimmed row in such a ring, so it is no measure. The same tokens read in other pieces
    are one, but other pieces are other sums, and the ring begins elsewhere: equal within the rounding.
    """
    twin = _fresh(run.model, run.family, run.ids[:at])
    twin.read(run.ids[: at - 2])
    twin.read(run.ids[at - 2 : at])
    for token in run.ids[at : at + AFTER_A_CUT]:
        left, right = (np.array(one.read([token]).astype(mx.float32)) for one in (restored, twin))
        assert np.abs(left - right).max() <= 0.05 * np.abs(right).max()


def _leaf_caches(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        yield from _leaf_caches(cache.caches) if hasattr(cache, "caches") else (cache,)


def _prove_refused(store: kvstore.Store, run: _Run, hit: Hit) -> None:
    with pytest.raises(KVStoreError) as refused:
        store.load(hit, into=run.model)
    assert refused.value.code == "CUT_NOT_POSSIBLE"


def _prove_probe(model: BoundModel, family: Family, manifests: Sequence[Manifest]) -> None:
    """What a lazy token said before anything was computed is what came."""
    found = kvstore.probe(model, family.options)
    for manifest in manifests:
        assert found.signature == signature(manifest.layers)
        # A chunk drops its surplus only when it is read again.
        if not any(leaf.kind == "kv-chunked" and leaf.integer("start") for _, leaf in leaves(manifest.layers)):
            assert found.lowest_cut(manifest.token_count) == manifest.lowest_cut
            assert found.layout_at(manifest.token_count) == layout_of(manifest.layers, manifest.token_count)


def _tokens(count: int) -> list[int]:
    return [(n * 37 + n * n * 11 + 5) % VOCABULARY for n in range(count)]


def _bits(array: mx.array) -> bytes:
    return bits(array).tobytes()


def _class_name(cache: Any) -> str:
    children = getattr(cache, "caches", ())
    return f"CacheList({', '.join(map(_class_name, children))})" if children else type(cache).__name__

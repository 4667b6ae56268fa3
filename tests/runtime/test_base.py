"""A put with a base: the same entry as without one, whatever became of the arrays or of the base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvstore
from kvstore.format.groups import PayloadRef, Segment
from kvstore.format.seal import mark_of
from kvstore.format.tensors import Payload
from kvstore.runtime.base import Base, Bases, place_of
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.capture import capture
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.results import Hit
from tests.runtime.driving import feed
from tests.runtime.tiny import NEXT, logits, prefilled, run, tiny, tokens
from tests.runtime.trips import IDENTITY, ids

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

FAMILIES = ("llama", "gemma3", "qwen3_next", "llama4", "mamba2")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[kvstore.Store]:
    """A second store."""
    with kvstore.Store.open(tmp_path / "other") as opened:
        yield opened


def loaded(store: kvstore.Store, model: BoundModel, count: int, **options: Any) -> tuple[Hit, kvstore.Restored]:
    """A cache of ``count`` tokens, stored and loaded again."""
    store.put(prefilled(model, count), token_ids=tokens(count), model=model)
    hit = store.match(tokens(count + 1), model=model)
    return hit, store.load(hit, into=model, **options)


def flipped(cache: Any, row: int) -> None:
    """Change the sign of one number in place, where it lies."""
    keys = cache.keys
    keys[0, 0, row, 0] = -keys[0, 0, row, 0]
    cache.keys = keys


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_the_same_with_and_without_a_base(
    store: kvstore.Store, other: kvstore.Store, models: Path, family: str
) -> None:
    model, base = tiny(models, family), None
    cache: list[Any] = prefilled(model, 0)
    for turn, end in enumerate((300, 520, 522, 800)):
        start = 0 if turn == 0 else (300, 520, 522)[turn - 1]
        if turn:
            hit = store.match(tokens(end), model=model)
            assert hit.token_count == start
            base = store.load(hit, into=model)
            cache = base.cache
        run(model, cache, tokens(end)[start:])
        with_base = store.put(cache, token_ids=tokens(end), model=model, base=base)
        without = other.put(cache, token_ids=tokens(end), model=model)
        assert with_base.subject == without.subject
        assert with_base.facts["objects_written"] == without.facts["objects_written"]
    assert store.verify(deep=True).ok


def test_only_what_is_new_is_hashed() -> None:
    cache = [feed(cache, [600]) for cache in _plain(2)]
    first = capture(cache, ids(600), IDENTITY, base=Base())
    assert first.base is not None
    again = capture([feed(item, [100], seed=3) for item in cache], ids(700), IDENTITY, base=first.base)
    (group,) = again.manifest.groups
    hashed = [again.source(ref).seal is not None for ref in group.payloads]
    assert hashed == [False, False, True]
    assert again.manifest == capture(cache, ids(700), IDENTITY).manifest


def test_a_window_that_moved_on_hashes_its_interior_only_once() -> None:
    from mlx_lm.models.cache import RotatingKVCache

    cache = [feed(RotatingKVCache(max_size=768), [1000])]
    first = capture(cache, ids(1000), IDENTITY, base=Base())
    again = capture([feed(cache[0], [24], seed=3)], ids(1024), IDENTITY, base=first.base)
    (group,) = again.manifest.groups
    assert [again.source(ref).seal is not None for ref in group.payloads] == [False, False, True]


def _plain(count: int) -> list[Any]:
    from mlx_lm.models.cache import KVCache

    return [KVCache() for _ in range(count)]


@pytest.mark.parametrize("row", [0, 255, 256, 299])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_changed_array_is_noticed(
    store: kvstore.Store, other: kvstore.Store, models: Path, layer: int, row: int
) -> None:
    model = tiny(models, "llama", dtype="bfloat16")
    hit, restored = loaded(store, model, 300)
    flipped(restored.cache[layer], row)
    receipt = store.put(restored.cache, token_ids=tokens(300), model=model, base=hit)
    assert receipt.subject != hit.entry_id
    assert receipt.facts["objects_written"] == 1
    assert receipt.subject == other.put(restored.cache, token_ids=tokens(300), model=model).subject
    again = store.load(receipt.subject, into=model, verification="always")
    assert logits(model, again.cache, NEXT) == logits(model, restored.cache, NEXT)


def test_an_array_changed_after_a_put_is_noticed_by_the_next(store: kvstore.Store, models: Path) -> None:
    """The receipt of a put that had a base is one itself."""
    model = tiny(models, "llama")
    hit, restored = loaded(store, model, 300)
    first = store.put(run(model, restored.cache, [1, 2]), token_ids=[*tokens(300), 1, 2], model=model, base=hit)
    flipped(restored.cache[1], 7)
    run(model, restored.cache, [3])
    second = store.put(restored.cache, token_ids=[*tokens(300), 1, 2, 3], model=model, base=first)
    assert second.facts["objects_written"] == 3, "the changed block, the new one, the token ids"
    again = store.load(second.subject, into=model, verification="always")
    assert logits(model, again.cache, NEXT) == logits(model, restored.cache, NEXT)


@pytest.mark.parametrize("remember", [True, False])
def test_a_base_that_is_removed_meanwhile_is_written_again(
    store: kvstore.Store, models: Path, remember: bool
) -> None:
    model = tiny(models, "gemma3")
    hit, restored = loaded(store, model, 600, remember=remember)
    assert hit.entry_id is not None
    store.remove(hit.entry_id)
    assert store.entries.stats().objects == 0
    run(model, restored.cache, tokens(700)[600:])
    receipt = store.put(restored.cache, token_ids=tokens(700), model=model, base=hit)
    assert receipt.facts["objects_reused"] == 0
    assert store.verify(deep=True).ok
    again = store.load(receipt.subject, into=model, verification="always")
    assert logits(model, again.cache, NEXT) == logits(model, restored.cache, NEXT)


def test_a_damaged_base_is_healed_by_the_put(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    hit, restored = loaded(store, model, 600)
    assert hit.entry_id is not None
    name = store.entries.manifest(hit.entry_id).groups[0].payloads[0].digest.removeprefix("sha256:")
    (path,) = (store.entries.root / "objects" / name[:2]).glob(f"{name}.*")
    path.unlink()
    run(model, restored.cache, [9])
    receipt = store.put(restored.cache, token_ids=[*tokens(600), 9], model=model, base=hit)
    assert receipt.facts["objects_written"] == 3, "the lost block, the last one, the token ids"
    assert store.verify(deep=True).ok


def test_from_a_position_in_the_middle(store: kvstore.Store, other: kvstore.Store, models: Path) -> None:
    """A segment that was restored in part is not what it was."""
    model = tiny(models, "llama")
    store.put(prefilled(model, 600), token_ids=tokens(600), model=model)
    branch = [*tokens(400), *(token ^ 1 for token in tokens(450)[400:])]
    hit = store.match(branch, model=model)
    restored = store.load(hit, into=model)
    assert restored.token_count == 400
    run(model, restored.cache, branch[400:])
    receipt = store.put(restored.cache, token_ids=branch, model=model, base=restored)
    assert receipt.facts["objects_reused"] == 1
    assert receipt.subject == other.put(restored.cache, token_ids=branch, model=model).subject


def test_what_is_no_base_changes_nothing(store: kvstore.Store, other: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    miss = store.match(tokens(50), model=model)
    cache = prefilled(model, 300)
    receipt = store.put(cache, token_ids=tokens(300), model=model, base=miss)
    foreign = other.put(cache, token_ids=tokens(300), model=model, base=receipt)
    assert foreign.subject == receipt.subject
    options = CacheOptions(kv_bits=8, kv_group_size=32)
    quantized = prefilled(model, 300, options)
    unlike = store.put(quantized, token_ids=tokens(300), model=model, base=receipt)
    assert unlike.subject == other.put(quantized, token_ids=tokens(300), model=model).subject


def payload(data: list[int]) -> Payload:
    return Payload.make({"0.k": ("U64", np.array(data, np.uint64))})


@pytest.mark.parametrize(
    "changed", [[1, 2, 4], [2, 1, 3], [1 << 63 | 1, 1 << 63 | 2, 3], [1, 2], [1, 2, 3, 0], [0, 3, 3]]
)
def test_a_fingerprint_tells_contents_apart(changed: list[int]) -> None:
    assert mark_of(payload([1, 2, 3])) == mark_of(payload([1, 2, 3]))
    assert mark_of(payload([1, 2, 3])) != mark_of(payload(changed))


def test_a_fingerprint_tells_names_dtypes_and_shapes_apart() -> None:
    rows = np.zeros((2, 4), np.uint16)
    made = [
        Payload.make({name: (dtype, data)})
        for name in ("0.k", "0.v") for dtype in ("BF16", "F16") for data in (rows, rows.reshape(4, 2))
    ]  # fmt: skip
    assert len({mark_of(item) for item in made}) == len(made)


def test_kept_rows_are_not_taken_for_the_first_ones() -> None:
    kept, running = Segment(0, 4, 0), Segment(0, 4, 4)
    assert place_of(["0"], kept, keep=4) != place_of(["0"], running, keep=4)
    assert place_of(["0"], Segment(256, 256, 100), keep=4) == place_of(["0"], Segment(256, 256, 40), keep=4)


def test_the_memory_is_bounded_and_forgets_what_is_used_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.runtime.base._MOST_SEGMENTS", 4)
    data = payload([1])
    ref = PayloadRef(data.digest(), data.size)

    def base(name: str) -> Base:
        return Base({place_of([name, str(n)], Segment(0, 0, 0), keep=0): (ref, b"") for n in range(2)})

    known = Bases()
    names = [data.digest().replace("sha256:", f"sha256:{n}")[:71] for n in range(3)]
    for name in names[:2]:
        known.keep(name, base(name))  # type: ignore[arg-type]
    known.get(names[0])  # type: ignore[arg-type]
    known.keep(names[2], base(names[2]))  # type: ignore[arg-type]
    assert [bool(known.get(name).marks) for name in names] == [True, False, True]  # type: ignore[arg-type]


def test_no_view_of_a_restored_cache_is_kept(store: kvstore.Store, models: Path) -> None:
    """The first decode step after a load that remembers copies nothing."""
    model = tiny(models, "llama")
    _, restored = loaded(store, model, 300)
    new = [mx.ones((1, 2, 1, 32)) for _ in range(2)]
    mx.eval(new)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for item in restored.cache:
        item.update_and_fetch(*new)
        mx.eval(item.keys, item.values)
    assert mx.get_peak_memory() - before < restored.cache[0].keys.nbytes // 4

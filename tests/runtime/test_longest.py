"""The longest prefix with models that run: what is found, what it will read, why it is not more; cuts and branches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.format.digest import sha256_digest
from kvstore.format.manifest import MethodRecord
from kvstore.format.prefix import MediaItem
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.cut import needed_payloads, require_cut
from kvstore.runtime.prefill import Prefilled, prefill
from kvstore.runtime.probe import CacheOptions
from tests.releases import CHUNK
from tests.runtime.driving import code_of
from tests.runtime.tiny import NEXT, logits, prefilled, run, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

Q8 = CacheOptions(kv_bits=8, kv_group_size=32)
WINDOW = CacheOptions(max_kv_size=64)


def other_end(count: int, total: int) -> list[int]:
    """A prompt with ``count`` tokens in common with :func:`tokens`."""
    return [*tokens(total)[:count], *((token + 1) % 96 for token in tokens(total)[count:])]


def put(store: kvstore.Store, model: BoundModel, count: int, options: CacheOptions | None = None, **more: Any) -> str:
    cache = prefilled(model, count, options)
    return store.put(cache, token_ids=tokens(count), model=model, **more).subject


# What a load will read.


@pytest.mark.parametrize("at", [1, 256, 257, 400, 700])
@pytest.mark.parametrize(("family", "options"), [("llama", None), ("qwen3", Q8), ("llama", CacheOptions())])
def test_a_hit_says_what_a_load_reads(
    store: kvstore.Store, models: Path, family: str, options: CacheOptions | None, at: int
) -> None:
    model = tiny(models, family)
    put(store, model, 700, options)
    hit = store.match(other_end(at, 800), model=model, options=options)
    assert hit.token_count == at
    assert hit.reads is not None
    receipt = store.load(hit, into=model).receipt
    assert hit.reads.entries == 1
    assert hit.reads.segments == receipt.facts["objects_read"]
    assert hit.reads.payload_bytes == receipt.facts["payload_bytes"]
    assert 0 < hit.reads.stored_bytes < hit.reads.payload_bytes


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "llama4", "mamba2"])
def test_the_same_of_windows_chunks_and_states(store: kvstore.Store, models: Path, family: str) -> None:
    model = tiny(models, family)
    put(store, model, 300)
    for asked in (tokens(301), tokens(300)):
        hit = store.match(asked, model=model)
        if hit:
            assert hit.reads is not None
            facts = store.load(hit, into=model).receipt.facts
            assert (hit.reads.segments, hit.reads.payload_bytes) == (facts["objects_read"], facts["payload_bytes"])


def test_an_entry_removed_after_the_match(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    subject = put(store, model, 30)
    hit = store.match(tokens(40), model=model)
    store.remove(subject)
    assert code_of(lambda: hit.reads) == "NOT_FOUND"
    assert code_of(store.load, hit, into=model) == "NOT_FOUND"
    assert store.match(tokens(40), model=model).reads is None


# Why it is not more.


def test_reasons_in_full(store: kvstore.Store, models: Path) -> None:
    model, other = tiny(models, "llama"), tiny(models, "llama", seed=1)
    put(store, model, 100)
    put(store, model, 200, Q8)
    put(store, other, 300)
    put(store, model, 400, namespace="tenant")
    asked = other_end(350, 500)
    hit = store.explain(asked, model=model, other_namespaces=True)
    assert hit.token_count == 100
    assert {reason.code: reason.token for reason in hit.reasons} == {
        "OTHER_SIGNATURE": 200, "ENDED": 200, "OTHER_MODEL": 300, "OTHER_NAMESPACE": 350
    }
    said = {reason.code: reason.message for reason in hit.reasons}
    assert "layers[0].bits differs (expected null, found 8)" in said["OTHER_SIGNATURE"]
    assert "model.weights[model.safetensors] differs" in said["OTHER_MODEL"]
    assert "tenant" in said["OTHER_NAMESPACE"]
    assert {reason.code for reason in store.explain(asked, model=model).reasons} == set(said) - {"OTHER_NAMESPACE"}


def test_a_miss_names_the_model_that_has_it_and_a_hit_does_not_ask(store: kvstore.Store, models: Path) -> None:
    model, other = tiny(models, "llama"), tiny(models, "llama", seed=1)
    put(store, other, 300)
    miss = store.match(tokens(301), model=model)
    assert not miss
    assert [reason.code for reason in miss.reasons] == ["NO_ENTRY_OF_MODEL", "OTHER_MODEL"]
    put(store, model, 100)
    assert [reason.code for reason in store.match(tokens(301), model=model).reasons] == ["ENDED"]
    explained = store.explain(tokens(301), model=model)
    assert [(reason.code, reason.token) for reason in explained.reasons] == [("ENDED", 100), ("OTHER_MODEL", 300)]


def test_another_architecture_is_named_by_what_a_person_can_check(store: kvstore.Store, models: Path) -> None:
    put(store, tiny(models, "qwen3"), 50)
    (_, reason) = store.match(tokens(60), model=tiny(models, "llama")).reasons
    assert (reason.expected, reason.found) == ("llama", "qwen3")
    assert "model.model_type" in reason.message


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_state_is_restored_at_the_last_position_inside_the_common_prefix(
    store: kvstore.Store, models: Path, family: str
) -> None:
    model = tiny(models, family)
    for count in (40, 80, 120):
        put(store, model, count)
    hit = store.match(other_end(100, 200), model=model)
    assert hit.token_count == 80
    assert next(reason.message for reason in hit.reasons) == "state snapshot only at 120"
    restored = store.load(hit, into=model)
    assert logits(model, restored.cache, NEXT) == logits(model, prefilled(model, 80), NEXT)


def test_a_window_is_restored_at_the_last_position_inside_the_common_prefix(
    store: kvstore.Store, models: Path
) -> None:
    model = tiny(models, "gemma3")
    for count in (20, 50, 90):
        put(store, model, count)
    hit = store.match(other_end(70, 200), model=model)
    assert hit.token_count == 50
    assert next(reason.message for reason in hit.reasons) == "window not stored before 89"
    restored = store.load(hit, into=model)
    assert logits(model, restored.cache, NEXT) == logits(model, prefilled(model, 50), NEXT)


# Cuts of every kind that has one: the state of a cache that was never saved, trimmed to the same token.

CUTS: dict[str, tuple[str, CacheOptions | None, int, tuple[int, ...]]] = {
    "kv": ("llama", None, 600, (1, 255, 256, 257, 512, 599)),
    "kv-quantized 8": ("qwen3", Q8, 600, (1, 256, 300, 599)),
    "kv-quantized 4": ("llama", CacheOptions(kv_bits=4, kv_group_size=32), 300, (31, 256, 299)),
    "kv-rotating, not full": ("gemma3", None, 31, (1, 16, 30)),
    "kv-rotating, full, nothing kept": ("gemma3", None, 50, (49,)),
    "kv-rotating of the caller's, not full": ("qwen3", WINDOW, 60, (1, 30, 59)),
    "kv-chunked, first chunk": ("llama4", None, 31, (1, 20, 30)),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_exactly_the_state_there(store: kvstore.Store, models: Path, name: str) -> None:
    family, options, count, places = CUTS[name]
    model = tiny(models, family)
    # The last token alone: a ring that was filled in one step has more rows than its window, and trims otherwise.
    cache = run(model, prefilled(model, count - 2, options), tokens(count)[-2:], step=1)
    store.put(cache, token_ids=tokens(count), model=model)
    for at in places:
        hit = store.match(other_end(at, count + 50), model=model, options=options)
        assert hit.token_count == at, hit.reasons
        restored = store.load(hit, into=model)
        assert restored.token_count == at
        twin = run(model, prefilled(model, count - 2, options), tokens(count)[-2:], step=1)
        for item in twin:
            assert item.trim(count - at) == count - at
        assert logits(model, restored.cache, NEXT) == logits(model, twin, NEXT), at


def test_a_chunk_goes_back_to_the_last_chunk_that_is_whole(store: kvstore.Store, models: Path) -> None:
    """Rows before a chunk's own are gone: what lies behind them cannot be restored."""
    model = tiny(models, "llama4")
    count = 3 * CHUNK + 4
    put(store, model, count)
    (info,) = store.list()
    assert CHUNK < info.lowest_cut < count
    assert store.match(other_end(info.lowest_cut, count + 50), model=model).token_count == info.lowest_cut
    assert not store.match(other_end(info.lowest_cut - 1, count + 50), model=model)


def test_nothing_is_cut_inside_a_media_item(store: kvstore.Store, models: Path) -> None:
    model, picture = tiny(models, "llama"), MediaItem(40, 20, "image", sha256_digest(b"cat"), sha256_digest(b"p"))
    receipt = store.put(prefilled(model, 100), token_ids=tokens(100), model=model, media=[picture])
    hit = store.match(tokens(60), model=model, media=[picture])
    assert (hit.token_count, [reason.code for reason in hit.reasons]) == (40, ["INSIDE_MEDIA"])
    assert store.load(hit, into=model).token_count == 40
    assert store.match(tokens(61), model=model, media=[picture]).token_count == 60
    manifest = store.show(receipt.subject).manifest
    for at in (40, 60, 99):
        require_cut(manifest, at)
    for at in (41, 59):
        assert code_of(require_cut, manifest, at) == "CUT_NOT_POSSIBLE"
    assert not store.match(tokens(101), model=model).token_count > 40


# Branches, namespaces, models.


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_branches_share_objects_and_live_on_without_each_other(
    store: kvstore.Store, models: Path, family: str
) -> None:
    model = tiny(models, family)
    root = put(store, model, 520)
    ends: dict[str, list[int]] = {"left": [7] * 40, "right": [9] * 60}
    expected: dict[str, list[bytes]] = {}
    for name, end in ends.items():
        ids = [*tokens(520), *end]
        restored = store.load(store.match(ids, model=model), into=model)
        assert restored.token_count == 520
        run(model, restored.cache, end)
        receipt = store.put(restored.cache, token_ids=ids, model=model, base=restored, label=name)
        if family != "qwen3_next":
            assert receipt.facts["objects_reused"] == 2, "two full blocks of the layers that see everything"
        expected[name] = logits(model, restored.cache, NEXT)
    before = store.entries.stats().objects
    store.remove("left")
    assert store.entries.stats().objects < before
    assert store.verify(deep=True).ok
    assert store.match([*tokens(520), *ends["left"]], model=model).token_count == 520
    for name in ("right", root):
        assert store.load(name, into=model, verification="always").token_count >= 520
    assert logits(model, store.load("right", into=model).cache, NEXT) == expected["right"]
    store.remove(root)
    assert logits(model, store.load("right", into=model).cache, NEXT) == expected["right"]
    assert store.verify(deep=True).ok


def test_namespaces_never_meet(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    here = put(store, model, 300)
    there = put(store, model, 300, namespace="tenant")
    assert here != there
    assert store.show(here).manifest.prefix.digest != store.show(there).manifest.prefix.digest
    for name, entry in (("default", here), ("tenant", there)):
        assert store.match(tokens(301), model=model, namespace=name).entry_id == entry
    assert not store.match(tokens(301), model=model, namespace="third")
    assert code_of(store.load, there, into=model) == "NAMESPACE_MISMATCH"
    assert store.entries.stats().objects == 6, "not one object is shared"
    base = store.load(there, into=model, namespace="tenant")
    receipt = store.put(base.cache, token_ids=tokens(300), model=model, namespace="third", base=base)
    assert receipt.facts["objects_reused"] == 0, "a base of another namespace gives digests, never objects"
    store.remove(there)
    assert store.verify(deep=True).ok


def test_the_same_tokens_under_two_models_never_meet(store: kvstore.Store, models: Path) -> None:
    first, second = tiny(models, "llama"), tiny(models, "llama", seed=1)
    ours, theirs = put(store, first, 300), put(store, second, 300)
    assert store.match(tokens(301), model=first).entry_id == ours
    assert store.match(tokens(301), model=second).entry_id == theirs
    assert code_of(store.load, store.match(tokens(301), model=first), into=second) == "MODEL_MISMATCH"
    store.remove(ours)
    assert not store.match(tokens(301), model=first)
    assert store.load(theirs, into=second, verification="always").token_count == 300


# Covered, checkpoints.


def test_skip_writes_nothing_where_the_tokens_are_covered(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    longer = put(store, model, 300)
    files = sorted(store.entries.root.rglob("*.*"))
    receipt = store.put(prefilled(model, 200), token_ids=tokens(200), model=model, if_covered="skip")
    assert receipt.subject == longer
    assert (receipt.facts["objects_written"], receipt.facts["stored_bytes"]) == (0, 0)
    assert receipt.checks["payload_digests"] == "skipped"
    assert sorted(store.entries.root.rglob("*.*")) == files
    assert len(store.list()) == 1
    assert put(store, model, 200) != longer


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "mamba2", "llama4"])
@pytest.mark.parametrize("count", [1, 2, 15, 40, 70])
def test_covered_knows_where_a_prefill_would_end(
    store: kvstore.Store, models: Path, family: str, count: int
) -> None:
    model = tiny(models, family)
    assert store.covered(tokens(count), model=model) is None
    filled = prefill(model, tokens(count))
    receipt = store.put(filled.cache, token_ids=filled.token_ids, model=model)
    found = store.covered(tokens(count), model=model, label="here")
    assert found is not None
    assert found.subject == receipt.subject == store.labels()["here"]
    assert found.facts["objects_written"] == 0
    assert store.covered(tokens(count + 2), model=model, label="longer") is None
    assert store.covered([], model=model) is None


def test_covered_asks_for_the_shape_that_a_prefill_ends_in(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    filled = prefill(model, tokens(50), options=Q8)
    store.put(filled.cache, token_ids=filled.token_ids, model=model)
    assert store.covered(tokens(50), model=model) is None
    assert store.covered(tokens(50), model=model, options=Q8)
    assert store.covered(tokens(50), model=model, options=Q8, quantized_kv_start=51) is None


def test_a_label_is_about_a_position(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    longer = put(store, model, 300)
    named = put(store, model, 200, if_covered="skip", label="two hundred")
    assert named != longer
    assert store.load("two hundred", into=model).token_count == 200
    again = put(store, model, 300, if_covered="skip", label="three", annotations={"document": "d"})
    assert again == longer
    assert store.labels()["three"] == longer
    assert store.show(longer).info.annotations["document"] == "d"


@pytest.mark.parametrize("case", ["longer", "other tokens", "another shape", "a state", "a method", "a model"])
def test_what_does_not_cover_is_stored(store: kvstore.Store, models: Path, case: str) -> None:
    family = "mamba2" if case == "a state" else "llama"
    model = tiny(models, family)
    put(store, model, 100, method=MethodRecord.make("m", "{}") if case == "a method" else None)
    if case == "a model":
        model = tiny(models, family, seed=1)
    count = 101 if case == "longer" else 90
    ids = tokens(count) if case != "other tokens" else other_end(89, 90)
    cache = prefilled(model, count, Q8 if case == "another shape" else None)
    receipt = store.put(cache, token_ids=ids, model=model, if_covered="skip")
    assert receipt.facts["objects_written"] != 0
    assert len(store.list()) == 2


KEEP_2, KEEP_8 = (MethodRecord.make("thin", f'{{"keep":{keep}}}') for keep in (2, 8))


@pytest.mark.parametrize(
    "there", [None, KEEP_2, MethodRecord.make("other", KEEP_8.config)], ids=["lossless", "config", "name"]
)
@pytest.mark.parametrize("label", [None, "thinned"])
def test_an_entry_of_another_method_does_not_cover(
    store: kvstore.Store, models: Path, there: MethodRecord | None, label: str | None
) -> None:
    model = tiny(models, "llama")
    first = put(store, model, 100, method=there, label="first")
    ours = put(store, model, 100, method=KEEP_8, if_covered="skip", label=label)
    assert store.show(ours).manifest.method == KEEP_8
    assert store.labels() == {"first": first, **({} if label is None else {label: ours})}


def test_an_entry_of_the_method_covers_beside_a_lossless_one(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama")
    ours = put(store, model, 100, method=KEEP_8)
    lossless = put(store, model, 120)
    receipt = store.put(prefilled(model, 90), token_ids=tokens(90), model=model, method=KEEP_8, if_covered="skip")
    assert (receipt.subject, receipt.checks["payload_digests"]) == (ours, "skipped")
    assert put(store, model, 100, method=KEEP_8, if_covered="skip", label="thinned") == ours
    assert put(store, model, 110, if_covered="skip") == lossless
    # The newest of the name is another; the very same entry is found by its bytes.
    put(store, model, 100, method=KEEP_2)
    assert put(store, model, 100, method=KEEP_8, if_covered="skip", label="thinned") == ours
    assert store.labels() == {"thinned": ours}
    assert len(store.list()) == 3


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "gemma3", "llama4"])
def test_checkpoints_of_a_prefill_serve_branches(store: kvstore.Store, models: Path, family: str) -> None:
    model, seen = tiny(models, family), []

    def keep(at: Prefilled) -> None:
        seen.append(store.put(at.cache, token_ids=at.token_ids, model=model, remember=True).subject)

    filled = prefill(model, tokens(200), step=32, checkpoint_every=64, checkpoint=keep)
    assert [store.show(entry).manifest.token_count for entry in seen] == [64, 128, 192]
    plain = prefill(model, tokens(200), step=32)
    assert logits(model, filled.cache, NEXT) == logits(model, plain.cache, NEXT)
    hit = store.match(other_end(150, 220), model=model)
    assert hit.token_count in ((128,) if family in ("qwen3_next", "mamba2") else range(128, 151))
    restored = store.load(hit, into=model)
    assert logits(model, restored.cache, NEXT) == logits(model, prefill_to(model, hit.token_count), NEXT)


def prefill_to(model: BoundModel, count: int) -> list[Any]:
    return run(model, prefilled(model, count, step=32), [])


def test_no_checkpoint_where_the_last_state_is_enough(models: Path) -> None:
    for options in (None, Q8):
        prefill(
            tiny(models, "llama"), tokens(100), options=options, checkpoint_every=10,
            checkpoint=lambda at: pytest.fail("a cache that can be cut anywhere"),
        )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 10, 11, 12, 21])
def test_checkpoints_lie_before_the_end(models: Path, count: int) -> None:
    seen: list[int] = []
    model = tiny(models, "mamba2")
    prefill(model, tokens(count), checkpoint_every=10, checkpoint=lambda at: seen.append(at.token_ids.size))
    assert seen == [at for at in (10, 20) if at < count - 1]


@pytest.mark.parametrize(
    "options", [{"checkpoint_every": 5}, {"checkpoint": print}, {"checkpoint_every": 0, "checkpoint": print}], ids=str
)
def test_half_a_wish_for_checkpoints_is_refused(models: Path, options: dict[str, Any]) -> None:
    assert code_of(prefill, tiny(models, "llama"), tokens(5), **options) == "USAGE"


def test_needed_payloads_are_those_of_a_whole_entry_at_its_end(store: kvstore.Store, models: Path) -> None:
    for family in ("llama", "gemma3", "qwen3_next", "llama4"):
        manifest = store.show(put(store, tiny(models, family), 300)).manifest
        assert needed_payloads(manifest, 300) == manifest.payloads()

"""What a capture refuses, and that it is a pure function of the logical state."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kvstore.errors import InvalidError
from kvstore.format.digest import sha256_digest
from kvstore.format.manifest import MethodRecord, check_prefix, parse_manifest
from kvstore.format.prefix import MediaItem, as_token_ids
from kvstore.format.tensors import payload_from_bytes
from kvstore.runtime.capture import capture
from tests.runtime.driving import code_of, feed, keys_values, state_of
from tests.runtime.trips import IDENTITY, captured, ids


def test_the_manifest_is_one_that_readers_accept() -> None:
    made = captured([feed(KVCache(), [300]), feed(RotatingKVCache(32), [300])], 300)
    assert parse_manifest(made.manifest.data) == made.manifest
    check_prefix(made.manifest, as_token_ids(ids(300)))
    assert [group.span.kind for group in made.manifest.groups] == ["tokens", "tokens"]
    assert made.manifest.prefix.token_count == 300


def test_every_payload_has_the_digest_and_size_that_the_manifest_says() -> None:
    made = captured([feed(KVCache(), [300]), feed(RotatingKVCache(32, keep=4), [1] * 40 + [260])], 300)
    for ref in (*made.manifest.payloads(), made.manifest.prefix.token_ids):
        data = made.source(ref).to_bytes()
        assert (sha256_digest(data), len(data)) == (ref.digest, ref.size)
        payload_from_bytes(data)


def test_the_token_ids_are_those_that_were_hashed_whatever_becomes_of_the_callers() -> None:
    buffer = np.array(ids(300), np.uint32)
    made = capture([feed(KVCache(), [300])], buffer, IDENTITY)
    buffer[:] = 0
    check_prefix(made.manifest, made.token_ids)
    assert made.token_ids.tolist() == list(ids(300))
    ref = made.manifest.prefix.token_ids
    assert made.source(ref).digest() == ref.digest


def test_equal_states_are_one_entry_whatever_their_buffers() -> None:
    """How the tokens came in, head room, trimmed rows and strides are no state."""
    keys, values = keys_values(300, 5)
    whole, pieces, trimmed = KVCache(), KVCache(), KVCache()
    whole.update_and_fetch(keys, values)
    for at in range(0, 300, 50):
        pieces.update_and_fetch(keys[:, :, at : at + 50], values[:, :, at : at + 50])
    trimmed.update_and_fetch(keys, values)
    trimmed.update_and_fetch(*keys_values(9, 6))
    trimmed.trim(9)
    assert len({captured([cache], 300).manifest.entry_id for cache in (whole, pieces, trimmed)}) == 1


def test_what_is_identity_and_what_is_not() -> None:
    cache = [feed(KVCache(), [3])]
    base = capture(cache, [1, 2, 3], IDENTITY).manifest.entry_id
    others = [
        capture(cache, [1, 2, 4], IDENTITY),
        capture(cache, [1, 2, 3], IDENTITY, namespace="other"),
        capture(cache, [1, 2, 3], IDENTITY, method=MethodRecord.make("drop/half", "{}")),
        capture(cache, [1, 2, 3], IDENTITY,
                media=(MediaItem(0, 2, "image", sha256_digest(b"a"), sha256_digest(b"b")),)),
        capture([feed(KVCache(), [3], seed=1)], [1, 2, 3], IDENTITY),
    ]  # fmt: skip
    assert len({base, *(other.manifest.entry_id for other in others)}) == 6
    assert capture(cache, np.array([1, 2, 3]), IDENTITY).manifest.entry_id == base


def test_a_window_that_moved_on_shares_its_whole_blocks() -> None:
    cache = feed(RotatingKVCache(1024), [1500])
    before = captured([cache], 1500).manifest
    cache.update_and_fetch(*keys_values(100, 7))
    after = captured([cache], 1600).manifest
    shared = set(before.groups[0].payloads) & set(after.groups[0].payloads)
    assert len(before.groups[0].payloads) == 5
    assert len(shared) == 2


@pytest.mark.parametrize(
    "caches", [[], [KVCache()], [KVCache(), ArraysCache(2)], [feed(KVCache(), [5])]], ids=["none", "one", "two", "ids"]
)
def test_an_empty_cache(caches: list[Any]) -> None:
    assert code_of(capture, caches, [1, 2] if not caches or caches[0].keys is None else [], IDENTITY) == "CACHE_EMPTY"


def test_a_cache_that_was_trimmed_to_nothing_is_empty() -> None:
    cache = feed(KVCache(), [5])
    cache.trim(5)
    assert code_of(captured, [cache], 5) == "CACHE_EMPTY"


def test_layers_that_disagree_are_named_with_both_values() -> None:
    with pytest.raises(InvalidError, match=r"layers\[1\]\.offset.*layers\[0\].*expected 5, found 6") as caught:
        captured([feed(KVCache(), [5]), feed(KVCache(), [6])], 5)
    assert caught.value.code == "CACHE_INCONSISTENT"


def test_token_ids_that_are_too_many_or_too_few() -> None:
    for count in (4, 6):
        with pytest.raises(InvalidError, match=rf"number of token ids: expected {count}, found 5") as caught:
            captured([feed(KVCache(), [5])], count)
        assert caught.value.code == "CACHE_INCONSISTENT"


def test_token_ids_outside_32_bits() -> None:
    for wrong in ([1, -1], [1, 2**32], [1, 1.5], [1, True]):
        assert code_of(capture, [feed(KVCache(), [2])], wrong, IDENTITY) == "TOKEN_ID_RANGE"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"keep": -(2**31)}, "FIELD_RANGE"), ({"max_size": 2**40}, "FIELD_RANGE"), ({"keep": 2**26 + 1}, "FIELD_RANGE"),
        ({"max_size": 32.0}, "FIELD_TYPE"), ({"keep": True}, "FIELD_TYPE"), ({"keep": 32}, "CACHE_STATE_INVALID"),
    ],
)  # fmt: skip
def test_numbers_that_no_cache_has_are_refused_before_anything_is_planned_by_them(
    changes: dict[str, Any], code: str
) -> None:
    """A prompt-cache file can say any: two billion kept rows would be eight million segments."""
    cache = feed(RotatingKVCache(32), [40])
    vars(cache).update(changes)
    assert code_of(captured, [cache], 40) == code


def test_the_count_of_a_state_is_the_callers_word() -> None:
    state = ArraysCache(1)
    state[0] = mx.ones((1, 4))
    assert captured([state], 12).manifest.asserted
    assert not captured([state, feed(KVCache(), [12])], 12).manifest.asserted


def test_nothing_is_copied_on_the_device() -> None:
    cache = feed(KVCache(), [2000])
    mx.eval(cache.keys, cache.values)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    captured([cache], 2000)
    assert mx.get_peak_memory() - before < 4096


def test_a_capture_leaves_the_cache_as_it_was() -> None:
    cache = feed(RotatingKVCache(32), [1] * 40)
    before = state_of(cache)
    captured([cache], 40)
    assert state_of(cache) == before


def test_a_capture_can_be_stopped() -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(threading.get_ident())
        return len(asked) > 2

    assert code_of(captured, [feed(KVCache(), [2000])], 2000, cancelled=cancelled) == "CANCELLED"


def test_an_evaluated_cache_is_captured_on_another_thread() -> None:
    cache = feed(KVCache(), [300])
    mx.eval(cache.keys, cache.values)
    expected = captured([cache], 300).manifest.entry_id
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(captured([cache], 300).manifest.entry_id))
    worker.start()
    worker.join()
    assert found == [expected]


def test_a_lazy_cache_of_another_thread_says_what_to_do() -> None:
    made: list[Any] = []
    worker = threading.Thread(target=lambda: made.append(feed(KVCache(), [5])))
    worker.start()
    worker.join()
    with pytest.raises(InvalidError, match="on the thread that made it"):
        captured(made, 5)

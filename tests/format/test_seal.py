"""Seals: what was hashed is what is encoded, or the put is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.object import Choice, ObjectParts, encode_object, parse_object
from kvstore.format.seal import print_of, seal
from kvstore.format.tensors import Payload
from kvstore.limits import MAX_CHUNK_BYTES
from tests.format.payloads import bits, payloads, strided


def sealed(payload: Payload) -> Payload:
    return replace(payload, seal=seal(payload))


def parts_of(payload: Payload, **options: str) -> bytes:
    assert payload.seal is not None
    return b"".join(map(bytes, ObjectParts(payload, digest=payload.seal.digest, **options)))  # type: ignore[arg-type]


@given(payloads())
def test_a_seal_holds_the_digest_and_changes_no_byte(payload: Payload) -> None:
    mark = seal(payload)
    assert mark.digest == payload.digest()
    assert parts_of(replace(payload, seal=mark)) == b"".join(encode_object(payload, digest=mark.digest).parts)


@pytest.mark.parametrize("codec", ["small", "fast"])
@pytest.mark.parametrize("shape", [(1, 2, 300, 64), (3,), (1, 1, 2, MAX_CHUNK_BYTES), (1, 3, 5000, 128), (7, 3)])
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_one_changed_element_is_seen(codec: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    array = bits("BF16", shape, 3).copy()
    other = bits("F32", (5, 9), 4).copy()
    payload = sealed(Payload.make({"0.k": ("BF16", array), "1.v": ("F32", other)}))
    at = data.draw(st.integers(0, array.size - 1))
    array.reshape(-1)[at] ^= 1 << data.draw(st.integers(0, 15))
    with pytest.raises(KVStoreError) as caught:
        parts_of(payload, codec=codec)
    assert caught.value.code == "PAYLOAD_DIGEST_MISMATCH"


@pytest.mark.parametrize("step", ["print", "hash"])
@pytest.mark.parametrize("shape", [(1, 1, 1024, 256), (1, 1, 2, MAX_CHUNK_BYTES), (3,)])
def test_a_change_while_the_seal_is_made_is_in_neither_or_seen(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], step: str
) -> None:
    """Between fingerprint and digest, in whichever order: never is one of the old data and one of the new believed."""
    array = bits("BF16", shape, 3).copy()
    payload = Payload.make({"k": ("BF16", array)})
    done: list[int] = []

    def change() -> None:
        if not done:
            done.append(1)
            array.reshape(-1)[0] ^= 1

    def printed(rows: Any) -> bytes:
        found = print_of(rows)
        change()
        return found

    class Hasher:
        def __init__(self, data: bytes) -> None:
            self.hasher = hashlib.sha256(data)
            self.hexdigest = self.hasher.hexdigest

        def update(self, data: memoryview) -> None:
            self.hasher.update(data)
            change()

    with monkeypatch.context() as patch:
        if step == "hash":
            patch.setattr("kvstore.format.seal.hashlib", SimpleNamespace(sha256=Hasher))
        else:
            patch.setattr("kvstore.format.seal.print_of", printed)
        found = seal(payload)
    refused, data = None, b""
    try:
        data = parts_of(replace(payload, seal=found))
    except KVStoreError as error:
        refused = error.code
    if data:
        parse_object(memoryview(data), digest=found.digest, size=payload.size).verify_payload()
    assert refused == (None if data else "PAYLOAD_DIGEST_MISMATCH")


def test_rows_that_changed_places_are_seen() -> None:
    array = bits("BF16", (1, 1, 1024, 64), 9).copy()
    payload = sealed(Payload.make({"k": ("BF16", array)}))
    array[...] = np.roll(array, 64, axis=2)
    with pytest.raises(KVStoreError):
        parts_of(payload)


def test_words_that_changed_places_are_seen() -> None:
    array = bits("BF16", (1, 1, 16, 64), 9).copy()
    payload = sealed(Payload.make({"k": ("BF16", array)}))
    array[0, 0, 3, :4], array[0, 0, 5, :4] = array[0, 0, 5, :4].copy(), array[0, 0, 3, :4].copy()
    with pytest.raises(KVStoreError):
        parts_of(payload)


@pytest.mark.parametrize("codec", ["small", "fast"])
@given(payloads())
def test_a_copy_has_the_same_bytes_and_becomes_the_same_object(codec: str, payload: Payload) -> None:
    copy = payload.copied(np.empty(payload.size, np.uint8))
    assert (copy.digest(), copy.to_bytes()) == (payload.digest(), payload.to_bytes())
    made = [encode_object(one, digest=payload.digest(), codec=codec) for one in (payload, copy)]  # type: ignore[arg-type]
    assert made[0] == made[1]


def test_strided_views_of_one_buffer() -> None:
    payload = sealed(Payload.make({"k": ("BF16", strided(bits("BF16", (1, 4, 256, 32), 5), 1))}))
    assert parse_object(
        memoryview(parts_of(payload)), digest=payload.digest(), size=payload.size
    ).read_payload().to_bytes() == payload.to_bytes()


def test_what_was_chosen_for_one_segment_serves_the_next() -> None:
    choice = Choice()
    first, second = (
        Payload.make({f"{layer}.k": ("BF16", bits("BF16", (1, 2, rows, 64), layer)) for layer in range(3)})
        for rows in (256, 77)
    )
    assert choice.plans(first)[0] == choice.plans(second)[0]
    assert Choice().plans(first) == choice.plans(first)

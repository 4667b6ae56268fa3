"""The prefix chain, recomputed with nothing but hashlib and struct from SPEC.md's words."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidError, KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.fields import Fields
from kvstore.format.prefix import MediaItem, as_token_ids, chain_digests, parse_media, parse_namespace, prefix_digest
from kvstore.limits import MAX_TOKENS

MODEL = sha256_digest(b"a model")


def h(tag: str, *parts: bytes) -> bytes:
    """SPEC.md, Digests: each part, the tag first, preceded by its length as a 64-bit little-endian integer."""
    return hashlib.sha256(b"".join(struct.pack("<Q", len(p)) + p for p in (tag.encode(), *parts))).digest()


def chain(model: str, namespace: str, ids: list[int], media: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
    """SPEC.md, Prefix chain, written a second time."""
    links = [(0, h("kvstore prefix v1", model.encode(), namespace.encode()))]
    for start in range(0, len(ids), 256):
        block = ids[start : start + 256]
        end = start + len(block)
        tag = "kvstore block v1" if len(block) == 256 else f"kvstore tail v1 {len(block)}"
        inside = [m for m in media if m["start"] < end and m["start"] + m["length"] > start]
        text = json.dumps(inside, sort_keys=True, separators=(",", ":")).encode() if inside else b""
        links.append((end, h(tag, links[-1][1], struct.pack(f"<{len(block)}I", *block), text)))
    return links


def picture(start: int, length: int, content: bytes = b"picture") -> MediaItem:
    return MediaItem(start, length, "image", sha256_digest(content), sha256_digest(b"processor"))


VECTORS: dict[str, tuple[list[int], tuple[MediaItem, ...]]] = {
    "no tokens": ([], ()),
    "one token": ([0], ()),
    "ids above 255": ([65, 321, 255, 256], ()),
    "ids above 65535": ([65535, 65536, 128256, 262144], ()),
    "largest id": ([2**32 - 1, 2**31], ()),
    "255": (list(range(255)), ()),
    "256": (list(range(256)), ()),
    "257": (list(range(257)), ()),
    "512": (list(range(70000, 70512)), ()),
    "513": (list(range(70000, 70513)), ()),
    "media in one block": (list(range(300)), (picture(10, 5),)),
    "media over a boundary": (list(range(600)), (picture(250, 10), picture(511, 89))),
    "media up to a boundary": (list(range(600)), (picture(0, 256), picture(256, 256))),
}


@pytest.mark.parametrize("namespace", ["default", "team-7"])
@pytest.mark.parametrize(("ids", "media"), VECTORS.values(), ids=VECTORS)
def test_against_the_words_of_the_spec(ids: list[int], media: tuple[MediaItem, ...], namespace: str) -> None:
    expected = chain(MODEL, namespace, ids, [m.to_json() for m in media])
    assert list(chain_digests(MODEL, namespace, as_token_ids(ids), media)) == expected
    assert prefix_digest(MODEL, namespace, as_token_ids(ids), media) == f"sha256:{expected[-1][1].hex()}"


def test_every_input_enters_the_digest() -> None:
    ids = list(range(300))
    media = (picture(10, 5),)
    forms = [
        (MODEL, "default", ids, ()),
        (sha256_digest(b"another"), "default", ids, ()),
        (MODEL, "other", ids, ()),
        (MODEL, "default", ids[:-1], ()),
        (MODEL, "default", [*ids, 0], ()),
        (MODEL, "default", [*ids[:-1], ids[-1] + 65536], ()),
        (MODEL, "default", [ids[1], ids[0], *ids[2:]], ()),
        (MODEL, "default", ids, media),
        (MODEL, "default", ids, (picture(10, 6),)),
        (MODEL, "default", ids, (picture(11, 5),)),
        (MODEL, "default", ids, (picture(10, 5, b"other picture"),)),
    ]
    digests = {prefix_digest(model, name, as_token_ids(tokens), items) for model, name, tokens, items in forms}
    assert len(digests) == len(forms)


def test_a_tail_is_never_a_block() -> None:
    """The chain of 256 tokens isn't that of the same tokens as a tail, and shared blocks share their links."""
    ids = list(range(512))
    long = dict(chain_digests(MODEL, "default", as_token_ids(ids)))
    for count in (1, 255, 257, 300):
        short = dict(chain_digests(MODEL, "default", as_token_ids(ids[:count])))
        assert short[count] not in long.values()
        assert all(short[n] == long[n] for n in short if n % 256 == 0)


@given(st.integers(0, 700), st.integers(0, 2**32), st.data())
def test_random_chains(count: int, seed: int, data: st.DataObject) -> None:
    ids = random.Random(seed).choices(range(2**32), k=count)
    marks = sorted(data.draw(st.sets(st.integers(0, count), max_size=4)))
    media = [picture(a, b - a, bytes([a % 256])) for a, b in pairwise(marks)]
    expected = chain(MODEL, "default", ids, [m.to_json() for m in media])
    assert list(chain_digests(MODEL, "default", as_token_ids(ids), media)) == expected


GOOD_IDS: dict[str, Any] = {
    "list": [1, 2**32 - 1], "tuple": (1, 2**32 - 1), "int64": np.array([1, 2**32 - 1]),
    "uint64": np.array([1, 2**32 - 1], np.uint64), "uint32": np.array([1, 2**32 - 1], np.uint32),
    "big-endian": np.array([1, 2**32 - 1], ">u4"), "strided": np.array([1, 0, 2**32 - 1, 0], np.uint32)[::2],
    "numpy integers": [np.int64(1), np.uint32(2**32 - 1)],
}  # fmt: skip


@pytest.mark.parametrize("ids", GOOD_IDS.values(), ids=GOOD_IDS)
def test_token_ids(ids: Any) -> None:
    assert as_token_ids(ids).tobytes() == struct.pack("<2I", 1, 2**32 - 1)


@pytest.mark.parametrize("ids", GOOD_IDS.values(), ids=GOOD_IDS)
def test_token_ids_are_nobody_elses(ids: Any) -> None:
    given = copy(ids)
    made = as_token_ids(given)
    again = as_token_ids(made)
    assert not np.shares_memory(made, again)
    assert not made.flags.writeable
    if not isinstance(given, tuple):
        given[0] = 9
    assert made.tolist() == again.tolist() == [1, 2**32 - 1]


def test_token_ids_that_others_may_still_write_to_are_copied() -> None:
    base = np.array([1, 2, 3], np.uint32)
    view = base[:]
    view.flags.writeable = False
    made = as_token_ids(view)
    base[:] = 0
    assert made.tolist() == [1, 2, 3]


BAD_IDS: dict[str, tuple[Any, str]] = {
    "negative": ([3, -1], "position 1"),
    "2^32": ([2**32], "position 0"),
    "2^64": ([1, 2, 2**64], "position 2"),
    "2^70": ([2**70], "position 0"),
    "float": ([1.0], "position 0"),
    "integer and float": ([1, 2.5], "position 1"),
    "boolean": ([True], "position 0"),
    "boolean among integers": ([1, True], "position 1"),
    "text": (["1"], "position 0"),
    "null": ([1, None], "position 1"),
    "nested": ([[1, 2]], "dimensions"),
    "two axes": (np.zeros((1, 4), np.uint32), "dimensions"),
    "no axis": (np.array(7, np.uint32), "dimensions"),
    "float array": (np.zeros(3, np.float32), "position 0"),
    "boolean array": (np.zeros(3, np.bool_), "position 0"),
    "negative array": (np.array([5, -7]), "position 1"),
}


@pytest.mark.parametrize(("ids", "words"), BAD_IDS.values(), ids=BAD_IDS)
def test_bad_token_ids(ids: Any, words: str) -> None:
    with pytest.raises(InvalidError, match=words) as caught:
        as_token_ids(ids)
    assert caught.value.code == "TOKEN_ID_RANGE"


@pytest.mark.parametrize("count", [MAX_TOKENS + 1, 2**45])
@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_too_many_token_ids(dtype: Any, count: int) -> None:
    ids = np.broadcast_to(dtype(1), (count,))
    with pytest.raises(InvalidError) as caught:
        as_token_ids(ids)
    assert caught.value.code == "LIMIT_EXCEEDED"


@pytest.mark.parametrize("name", ["default", "a", "0", "team-7_x.y", "a" * 255])
def test_namespace(name: str) -> None:
    assert parse_namespace(name) == name


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", "FIELD_FORMAT"), ("A", "FIELD_FORMAT"), ("-a", "FIELD_FORMAT"), ("a/b", "FIELD_FORMAT"),
        ("a\n", "FIELD_FORMAT"), ("é", "FIELD_FORMAT"), ("a" * 256, "FIELD_RANGE"), (1, "FIELD_TYPE"),
    ],
)  # fmt: skip
def test_bad_namespace(name: Any, code: str) -> None:
    with pytest.raises(InvalidError, match=r"^namespace") as caught:
        parse_namespace(name)
    assert caught.value.code == code


def media(*items: dict[str, Any]) -> tuple[MediaItem, ...]:
    return parse_media(Fields({"media": list(items)}, "prefix", None), "media", 100)


def item(**changes: Any) -> dict[str, Any]:
    return {**picture(10, 20).to_json(), **changes}


def test_media() -> None:
    assert media(item(), item(start=30, length=70)) == (picture(10, 20), picture(30, 70))


BAD_MEDIA: dict[str, tuple[list[dict[str, Any]], str]] = {
    "overlap": ([item(), item(start=29)], "FIELD_RANGE"),
    "descending": ([item(start=50), item(start=10)], "FIELD_RANGE"),
    "past the end": ([item(start=90, length=11)], "FIELD_RANGE"),
    "empty": ([item(length=0)], "FIELD_RANGE"),
    "kind": ([item(kind="Image")], "FIELD_FORMAT"),
    "unknown field": ([item(url="x")], "FIELD_UNKNOWN"),
    "no digest": ([{k: v for k, v in item().items() if k != "digest"}], "FIELD_MISSING"),
}


@pytest.mark.parametrize(("items", "code"), BAD_MEDIA.values(), ids=BAD_MEDIA)
def test_bad_media(items: list[dict[str, Any]], code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        media(*items)
    assert caught.value.code == code

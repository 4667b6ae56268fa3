"""Digests: grammar, and tagged hashes recomputed by hand."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidError, KVStoreError, UnsupportedError
from kvstore.format.digest import digest_bytes, digest_hex, parse_digest, sha256_digest, tagged_digest

HEX = "0123456789abcdef" * 4


def test_known_digest() -> None:
    # FIPS 180-2, appendix B.1.
    expected = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_digest(b"abc") == sha256_digest([b"a", bytearray(b"b"), memoryview(b"c")]) == expected


def test_parts_of_a_digest() -> None:
    digest = parse_digest(f"sha256:{HEX}")
    assert digest_hex(digest) == HEX
    assert digest_bytes(digest) == bytes.fromhex(HEX)


REFUSED: dict[str, tuple[Any, type[KVStoreError], str]] = {
    "number": (1, InvalidError, "FIELD_TYPE"),
    "null": (None, InvalidError, "FIELD_TYPE"),
    "bare hex": (HEX, InvalidError, "FIELD_FORMAT"),
    "empty": ("", InvalidError, "FIELD_FORMAT"),
    "upper-case hex": (f"sha256:{HEX.upper()}", InvalidError, "FIELD_FORMAT"),
    "upper-case name": (f"SHA256:{HEX}", InvalidError, "FIELD_FORMAT"),
    "short": (f"sha256:{HEX[:-1]}", InvalidError, "FIELD_FORMAT"),
    "long": (f"sha256:{HEX}0", InvalidError, "FIELD_FORMAT"),
    "newline": (f"sha256:{HEX}\n", InvalidError, "FIELD_FORMAT"),
    "other digits": (f"sha256:{HEX[:-1]}٣", InvalidError, "FIELD_FORMAT"),
    "space": (f" sha256:{HEX}", InvalidError, "FIELD_FORMAT"),
    "other algorithm": (f"blake3:{HEX}", UnsupportedError, "DIGEST_ALGORITHM_UNSUPPORTED"),
    "sha512": (f"sha512:{HEX}{HEX}", UnsupportedError, "DIGEST_ALGORITHM_UNSUPPORTED"),
}


@pytest.mark.parametrize(("value", "error", "code"), REFUSED.values(), ids=REFUSED)
def test_refused(value: Any, error: type[KVStoreError], code: str) -> None:
    with pytest.raises(error) as caught:
        parse_digest(value, "here")
    assert caught.value.code == code
    assert "here" in caught.value.message


@given(st.sampled_from(("a", "kvstore x v1")), st.lists(st.binary(max_size=20), max_size=4))
def test_tagged_digest_by_hand(tag: str, parts: list[bytes]) -> None:
    data = b"".join(struct.pack("<Q", len(part)) + part for part in (tag.encode(), *parts))
    assert tagged_digest(tag, *parts) == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_tagged_digests_keep_parts_and_tags_apart() -> None:
    forms = [("t", b"ab"), ("t", b"a", b"b"), ("t", b"", b"ab"), ("t", b"ab", b""), ("ta", b"b"), ("tab",)]
    digests = {tagged_digest(form[0], *form[1:]) for form in forms}  # type: ignore[arg-type]
    assert len(digests) == len(forms)

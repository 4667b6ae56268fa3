"""Digests: their grammar, and the tagged SHA-256 that keeps their uses apart.

A digest is written ``sha256:`` and 64 lower-case hex digits. Payloads, objects,
manifests and receipts are named by the plain SHA-256 of their bytes, so that any tool
can check a name. Everything that is *derived* (model digest, prefix chain, layout
digest) is a tagged hash: no input of one use can collide with an input of another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, Final, NewType, TypeAlias

from kvstore.errors import fail

__all__ = [
    "Digest", "Readable", "digest_bytes", "digest_hex", "parse_digest", "sha256_digest", "tagged_digest",
]  # fmt: skip

Digest = NewType("Digest", str)
"""A parsed digest, ``sha256:<64 lower-case hex>``."""

Readable: TypeAlias = "bytes | bytearray | memoryview"

_PREFIX: Final = "sha256:"
_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ALGORITHM: Final = re.compile(r"[a-z0-9+._-]+:", re.ASCII)


def parse_digest(value: Any, where: str = "digest") -> Digest:
    """Check a digest's grammar.

    Raises:
        InvalidError: FIELD_TYPE or FIELD_FORMAT.
        UnsupportedError: DIGEST_ALGORITHM_UNSUPPORTED.
    """
    if not isinstance(value, str):
        raise fail("FIELD_TYPE", where, expected="text", found=type(value).__name__)
    if value.startswith(_PREFIX) and _HEX.fullmatch(value, len(_PREFIX)):
        return Digest(value)
    if not value.startswith(_PREFIX) and _ALGORITHM.match(value):
        raise fail("DIGEST_ALGORITHM_UNSUPPORTED", where, expected="sha256", found=value.split(":")[0])
    raise fail("FIELD_FORMAT", where, expected="sha256:<64 lower-case hex digits>", found=value)


def digest_hex(digest: Digest) -> str:
    """The 64 hex digits, as file names use them."""
    return digest[len(_PREFIX) :]


def digest_bytes(digest: Digest) -> bytes:
    """The 32 bytes."""
    return bytes.fromhex(digest[len(_PREFIX) :])


def sha256_digest(parts: Readable | Iterable[Readable]) -> Digest:
    """SHA-256 over bytes, or over several buffers one after another."""
    if isinstance(parts, (bytes, bytearray, memoryview)):
        return Digest(_PREFIX + hashlib.sha256(parts).hexdigest())
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return Digest(_PREFIX + hasher.hexdigest())


def tagged_digest(tag: str, *parts: Readable) -> Digest:
    """SHA-256 over ``tag`` and ``parts``, each preceded by its length (64-bit little-endian)."""
    hasher = hashlib.sha256()
    for part in (tag.encode("ascii"), *parts):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return Digest(_PREFIX + hasher.hexdigest())

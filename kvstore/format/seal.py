"""A cheap proof that data which was hashed has not changed since.

SHA-256 reads one or two gigabytes a second, and a put would otherwise need it twice: once
to name a payload, and once more when the payload is encoded, since its arrays are the live
cache's and anybody may have written to them meanwhile. So a fingerprint of every box is
taken while the data is hashed, and compared when the box is encoded, both times while it is
in the processor's cache. Every box was then the same when it was hashed and when it was
encoded; all are hashed before the first is encoded, so at one moment between the two the
whole cache was what is stored.

The fingerprints, XXH3 with 128 bits, guard against accidents, not against an enemy, who
could as well give another cache. They never leave the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.tensors import Payload, Seal

__all__ = ["changed", "check_marks", "seal"]

Array = np.ndarray[Any, Any]


def seal(payload: Payload) -> Seal:
    """The payload's digest and the fingerprints of its boxes; reads it once."""
    hasher = hashlib.sha256(payload.header)
    marks: list[bytes] = []
    for rows in payload.runs():
        hasher.update(rows.reshape(-1).data)
        marks.extend(map(xxhash.xxh3_128_digest, rows))
    return Seal(Digest(f"sha256:{hasher.hexdigest()}"), tuple(marks))


def check_marks(rows: Array, expected: Iterable[bytes], digest: Digest) -> None:
    """Prove that boxes are those that were sealed.

    Args:
        rows: Boxes as they are now, ``[boxes, bytes]``.
        expected: Their fingerprints of then.
        digest: The payload's, for the message.

    Raises:
        IntegrityError: PAYLOAD_DIGEST_MISMATCH.
    """
    if list(map(xxhash.xxh3_128_digest, rows)) != list(expected):
        raise changed(digest)


def changed(digest: Digest, found: Digest | None = None) -> Exception:
    """The error for a payload that is not, or no longer, the one that was named; the caller raises it."""
    return fail(
        "PAYLOAD_DIGEST_MISMATCH", "the data of a payload to be put", expected=digest, found=found or "other data",
        fix="Capture the cache again: its arrays have changed since.",
    )  # fmt: skip

"""A cheap proof that data which was hashed has not changed since.

SHA-256 reads about a gigabyte a second, and a put would otherwise need it twice: once to
name a payload, and once more when the payload is encoded, since its arrays are the live
cache's and anybody may have written to them meanwhile. So sums are taken while the data
is hashed, and compared when it is encoded, both times while it is in the processor's
cache. Every box was then the same when it was hashed and when it was encoded; all are
hashed before the first is encoded, so at one moment between the two the whole cache was
what is stored.

The sums guard against accidents, not against an enemy, who could as well give another
cache: 64-bit words are added up over 8 KiB, so a change stays unseen if it only moves
words within one such block, or else by a chance of one in 2^64.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.tensors import Payload, Seal

__all__ = ["block_count", "block_sums", "changed", "check_sums", "seal"]

Array = np.ndarray[Any, Any]
_BLOCK_WORDS: Final = 1024
_NOTHING: Final = np.empty(0, np.uint64)


def block_count(nbytes: int) -> int:
    """How many sums a box of so many bytes has."""
    return (nbytes // 8 if nbytes % 8 == 0 else nbytes) // _BLOCK_WORDS + 1


def block_sums(rows: Array) -> Array:
    """Sums of each row of bytes ``[boxes, bytes]``, one for every block of 8 KiB and one for the rest."""
    words = rows.view(np.uint64) if rows.shape[1] % 8 == 0 else rows
    count, size = words.shape
    whole = size // _BLOCK_WORDS
    sums = np.empty((count, whole + 1), np.uint64)
    blocks = words[:, : whole * _BLOCK_WORDS].reshape(count, whole, _BLOCK_WORDS)
    np.add.reduce(blocks, axis=2, dtype=np.uint64, out=sums[:, :whole])
    np.add.reduce(words[:, whole * _BLOCK_WORDS :], axis=1, dtype=np.uint64, out=sums[:, whole])
    return sums


def seal(payload: Payload) -> Seal:
    """The payload's digest and the sums of its data; reads it once."""
    hasher = hashlib.sha256(payload.header)
    sums = [_NOTHING]
    for rows in payload.runs():
        hasher.update(rows.reshape(-1).data)
        sums.append(block_sums(rows).reshape(-1))
    return Seal(Digest(f"sha256:{hasher.hexdigest()}"), np.concatenate(sums))


def check_sums(rows: Array, expected: Array, digest: Digest) -> None:
    """Prove that rows of bytes are those that were sealed.

    Args:
        rows: Boxes as they are now, ``[boxes, bytes]``.
        expected: Their sums of then, one after another.
        digest: The payload's, for the message.

    Raises:
        IntegrityError: PAYLOAD_DIGEST_MISMATCH.
    """
    if not np.array_equal(block_sums(rows).reshape(-1), expected):
        raise changed(digest)


def changed(digest: Digest, found: Digest | None = None) -> Exception:
    """The error for a payload that is not, or no longer, the one that was named; the caller raises it."""
    return fail(
        "PAYLOAD_DIGEST_MISMATCH", "the data of a payload to be put", expected=digest, found=found or "other data",
        fix="Capture the cache again: its arrays have changed since.",
    )  # fmt: skip

"""A cheap proof that data which was hashed has not changed since.

SHA-256 reads one or two gigabytes a second, and a put would otherwise need it twice: once
to name a payload, and once more when the payload is encoded, since its arrays are the live
cache's and anybody may have written to them meanwhile. So a fingerprint of every box is
taken while the data is hashed, and compared when the box is encoded, both times while it is
in the processor's cache. Every box was then the same when it was hashed and when it was
encoded; all are hashed before the first is encoded, so at one moment between the two the
whole cache was what is stored.

The fingerprints, XXH3 with 128 bits, guard against accidents, not against an enemy, who
could as well give another cache. They never leave the process and name nothing. Those of
all boxes of a payload make up its *mark*, by which a later put sees that a segment is still
what it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from kvstore.errors import fail
from kvstore.format.boxes import Grid, Shape3
from kvstore.format.digest import Digest, Readable
from kvstore.format.tensors import DTYPE_SIZES, Payload, Seal, TensorSpec
from kvstore.limits import MAX_CHUNK_BYTES

__all__ = ["Place", "changed", "check_prints", "mark_from", "mark_of", "places", "print_of", "seal"]

Array = np.ndarray[Any, Any]
Place = tuple[str, Shape3]
"""A box of a payload: its tensor's name, and where it begins."""


def print_of(box: Readable | Array) -> bytes:
    """The fingerprint of a box, of any strides: 16 bytes."""
    if not isinstance(box, np.ndarray):
        return xxhash.xxh3_128_digest(box)
    if box.flags.c_contiguous:
        return xxhash.xxh3_128_digest(box.data)
    hasher = xxhash.xxh3_128()
    for part in box:
        hasher.update(np.ascontiguousarray(part).data)
    return hasher.digest()


def places(specs: Sequence[TensorSpec]) -> Iterator[tuple[Place, int]]:
    """Every box in the order of the payload's bytes, and its bytes."""
    known: dict[tuple[str, tuple[int, ...]], list[tuple[Shape3, int]]] = {}
    for spec in specs:
        kind = spec.dtype, spec.shape
        if kind not in known:
            size = DTYPE_SIZES[spec.dtype]
            grid = Grid.of(spec.shape, MAX_CHUNK_BYTES // size)
            known[kind] = [(box.start, box.size * size) for box in map(grid.box, range(grid.count))]
        for start, nbytes in known[kind]:
            yield (spec.name, start), nbytes


def mark_of(payload: Payload) -> bytes:
    """16 bytes over a payload; equal ones mean an equal payload."""
    if payload.data is not None:
        found = _prints_of_run(payload.specs, payload.data)
    else:
        found = (print_of(row) for rows in payload.runs() for row in rows)
    return print_of(payload.header + b"".join(found))


def mark_from(header: bytes, specs: Sequence[TensorSpec], prints: Mapping[Place, bytes]) -> bytes:
    """The mark of a payload with this tensor header whose boxes have these fingerprints."""
    return print_of(header + b"".join(prints[place] for place, _ in places(specs)))


def _prints_of_run(specs: Sequence[TensorSpec], data: Array) -> Iterator[bytes]:
    at = 0
    for _, nbytes in places(specs):
        yield print_of(data[at : at + nbytes])
        at += nbytes


def seal(payload: Payload) -> Seal:
    """The payload's digest and the fingerprints of its boxes; reads it once."""
    hasher = hashlib.sha256(payload.header)
    prints: list[bytes] = []
    for rows in payload.runs():
        # In this order: what changes between the two is not what the fingerprint was taken of, and is found.
        prints.extend(map(print_of, rows))
        hasher.update(rows.reshape(-1).data)
    return Seal(Digest(f"sha256:{hasher.hexdigest()}"), tuple(prints))


def check_prints(rows: Array, expected: Iterable[bytes], digest: Digest) -> None:
    """Prove that boxes are those that were sealed.

    Args:
        rows: Boxes as they are now, ``[boxes, bytes]``.
        expected: Their fingerprints of then.
        digest: The payload's, for the message.

    Raises:
        IntegrityError: PAYLOAD_DIGEST_MISMATCH.
    """
    if list(map(print_of, rows)) != list(expected):
        raise changed(digest)


def changed(digest: Digest, found: Digest | None = None) -> Exception:
    """The error for a payload that is not, or no longer, the one that was named; the caller raises it."""
    return fail(
        "PAYLOAD_DIGEST_MISMATCH", "the data of a payload to be put", expected=digest, found=found or "other data",
        fix="Capture the cache again: its arrays have changed since.",
    )  # fmt: skip

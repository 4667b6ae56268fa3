"""Encoding a payload as an object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvstore.format.boxes import read_box
from kvstore.format.choose import RAW, Choice, Plan
from kvstore.format.digest import Digest, Readable
from kvstore.format.filters import scratch, split_planes
from kvstore.format.object_header import Codec, ObjectHeader, encode_header, encode_table
from kvstore.format.object_layout import Batch, Group
from kvstore.format.seal import Place, check_prints, places
from kvstore.format.tensors import Payload
from kvstore.format.zstd import compress_planes, joined
from kvstore.limits import MAX_CHUNK_BYTES

__all__ = ["EncodedObject", "ObjectParts", "encode_object"]

Array = np.ndarray[Any, Any]


class ObjectParts:
    """An object's bytes as they are made: iterate once, then ask for size and digest.

    Whoever writes the parts one after another needs memory for one of them, at most about 1 MiB, however large the
    object is. The same payload and plans give the same bytes under one version of the zstd library. Several may be
    made at once in several threads.

    Attributes:
        filters: Payload bytes under each filter, by its name.
        size: Bytes so far.
    """

    def __init__(
        self,
        payload: Payload,
        *,
        digest: Digest,
        namespace: str = "default",
        codec: Codec = "small",
        plans: Sequence[Plan] | None = None,
        checkpoint: Callable[[], None] | None = None,
    ) -> None:
        """Choose filters; nothing is encoded yet.

        Args:
            payload: What to encode. Where it is sealed, its data is compared with the seal.
            digest: The payload's digest, which the header names.
            namespace: The namespace that the object belongs to.
            codec: ``small`` picks a filter for each tensor; ``fast`` stores raw frames throughout.
            plans: What :meth:`Choice.plans` chose for this payload together with others; by default for it alone.
            checkpoint: Called between units of work; whatever it raises ends the encoding.
        """
        if codec == "fast":
            plans = [RAW] * len(payload.specs)
        elif plans is None:
            plans = Choice().plans(payload)
        groups = _group(payload, plans)
        self.filters: Mapping[str, int] = _summary(groups)
        self.size = 0
        self._header = ObjectHeader(digest, payload.size, namespace, codec, MAX_CHUNK_BYTES, groups)
        self._source = _Source(payload, digest)
        self._plans = {spec.name: plan for spec, plan in zip(payload.specs, plans, strict=True)}
        self._checkpoint = checkpoint or (lambda: None)
        self._hasher = hashlib.sha256()

    def __iter__(self) -> Iterator[Readable]:
        """The parts, each in this thread's scratch until the next one is asked for.

        Raises:
            IntegrityError: PAYLOAD_DIGEST_MISMATCH where sealed data has changed.
        """
        frame = encode_header(self._header)
        yield self._count(frame)
        sizes: list[int] = []
        for batch in self._header.layout.batches:
            self._checkpoint()
            plan = self._plans[batch.parts[0][0]]
            frames = compress_planes(split_planes(self._source.words(batch, plan), plan.filter), plan.codings)
            sizes.extend(map(len, frames))
            # One part per batch: many small writes and hash calls cost more than this copy.
            yield self._count(joined(frames))
        yield self._count(encode_table(frame, sizes))

    @property
    def stored_digest(self) -> Digest:
        """SHA-256 of the parts so far."""
        return Digest(f"sha256:{self._hasher.hexdigest()}")

    def _count(self, part: Readable) -> Readable:
        self._hasher.update(part)
        self.size += len(part)
        return part


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """An object's bytes, in parts to be written one after another.

    Attributes:
        parts: The bytes.
        size: Their number.
        stored_digest: Their SHA-256.
        filters: Payload bytes under each filter, by its name.
    """

    parts: tuple[bytes, ...]
    size: int
    stored_digest: Digest
    filters: Mapping[str, int]


def encode_object(
    payload: Payload,
    *,
    digest: Digest,
    namespace: str = "default",
    codec: Codec = "small",
    checkpoint: Callable[[], None] | None = None,
) -> EncodedObject:
    """Encode a payload in memory; :class:`ObjectParts` says what the arguments mean."""
    made = ObjectParts(payload, digest=digest, namespace=namespace, codec=codec, checkpoint=checkpoint)
    parts = tuple(map(bytes, made))
    return EncodedObject(parts, made.size, made.stored_digest, made.filters)


class _Source:
    """A payload's elements as they are to be filtered, each box proved to be what was sealed."""

    def __init__(self, payload: Payload, digest: Digest) -> None:
        self._digest = digest
        self._arrays = {spec.name: array for spec, array in zip(payload.specs, payload.arrays, strict=True)}
        self._prints: dict[Place, bytes] | None = None
        if payload.seal is not None:
            names = (place for place, _ in places(payload.specs))
            self._prints = dict(zip(names, payload.seal.prints, strict=True))
        self._data = payload.data
        self._offsets = {} if payload.data is None else _offsets(payload)

    def words(self, batch: Batch, plan: Plan) -> Array:
        """The elements of a batch ``[chunks, elements]`` in stored order; to be read before the next batch."""
        natural = self._natural(batch)
        if self._prints is not None:
            rows = natural.reshape(len(natural), -1).view(np.uint8)
            check_prints(rows, [self._prints[name, part.start] for name, part in batch.parts], self._digest)
        if plan.filter.channel_major:
            count, outer, across, along = natural.shape
            words = scratch("gathered", (count, outer, along, across), natural.dtype)
            np.copyto(words, natural.swapaxes(-1, -2))
            return words.reshape(count, -1)
        return natural.reshape(len(natural), -1, copy=False)

    def _natural(self, batch: Batch) -> Array:
        """The boxes of a batch, ``[chunks, outer, rows, cols]``: where they are, if at even distances, or gathered."""
        (name, box), dtype = batch.parts[0], self._arrays[batch.parts[0][0]].dtype
        shape = (len(batch.parts), *box.shape)
        if self._data is not None:
            starts = [self._offsets[name, part.start] for name, part in batch.parts]
            steps = set(np.diff(starts).tolist())
            if len(steps) < 2:
                _, rows, cols = box.shape
                strides = (steps.pop() if steps else 0, *(dtype.itemsize * n for n in (rows * cols, cols, 1)))
                return np.ndarray(shape, dtype, self._data.data, starts[0], strides)
        natural = scratch("natural", shape, dtype)
        for room, (name, part) in zip(natural, batch.parts, strict=True):
            read_box(self._arrays[name], part, room)
        return natural


def _offsets(payload: Payload) -> dict[Place, int]:
    """Where each box begins in the payload's data."""
    found, at = {}, 0
    for place, nbytes in places(payload.specs):
        found[place] = at
        at += nbytes
    return found


def _group(payload: Payload, plans: Sequence[Plan]) -> tuple[Group, ...]:
    """Tensors that are alike in all that matters to a batch, brought together; canonical order within."""
    members: dict[tuple[str, tuple[int, ...], Plan], list[str]] = {}
    for spec, plan in zip(payload.specs, plans, strict=True):
        members.setdefault((spec.dtype, spec.shape, plan), []).append(spec.name)
    return tuple(Group(dtype, shape, plan.filter, tuple(names)) for (dtype, shape, plan), names in members.items())


def _summary(groups: tuple[Group, ...]) -> Mapping[str, int]:
    total: dict[str, int] = {}
    for group in groups:
        nbytes = prod(group.shape) * group.itemsize * len(group.names)
        total[group.filter.name] = total.get(group.filter.name, 0) + nbytes
    return total

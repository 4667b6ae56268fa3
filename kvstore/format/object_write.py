"""Encoding a payload as an object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvstore.format.boxes import Shape3, box_shape, boxes, read_box
from kvstore.format.choose import RAW, Choice, Plan
from kvstore.format.digest import Digest
from kvstore.format.filters import scratch, split_planes
from kvstore.format.object_header import Codec, ObjectHeader, encode_header, encode_table
from kvstore.format.object_layout import Batch, Group
from kvstore.format.seal import block_count, check_sums
from kvstore.format.tensors import Payload
from kvstore.format.zstd import compress_planes
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

    def __iter__(self) -> Iterator[bytes]:
        """The parts.

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
            yield self._count(b"".join(frames))
        yield self._count(encode_table(frame, sizes))

    @property
    def stored_digest(self) -> Digest:
        """SHA-256 of the parts so far."""
        return Digest(f"sha256:{self._hasher.hexdigest()}")

    def _count(self, part: bytes) -> bytes:
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
    parts = tuple(made)
    return EncodedObject(parts, made.size, made.stored_digest, made.filters)


class _Source:
    """A payload's elements as they are to be filtered, each box proved to be what was sealed."""

    def __init__(self, payload: Payload, digest: Digest) -> None:
        self._digest = digest
        self._arrays = {spec.name: array for spec, array in zip(payload.specs, payload.arrays, strict=True)}
        self._sums = None if payload.seal is None else payload.seal.sums
        self._places = {} if payload.seal is None else _places(payload)

    def words(self, batch: Batch, plan: Plan) -> Array:
        """The elements of a batch ``[chunks, elements]`` in stored order, in this thread's scratch."""
        box = batch.parts[0][1]
        dtype = self._arrays[batch.parts[0][0]].dtype
        natural = scratch("natural", (len(batch.parts), box.size), dtype)
        boxed = natural.reshape(-1, *box.shape)
        for at, (name, part) in enumerate(batch.parts):
            read_box(self._arrays[name], part, boxed[at])
        if self._sums is not None:
            rows = natural.view(np.uint8)
            count = block_count(rows.shape[1])
            starts = [self._places[name, part.start] for name, part in batch.parts]
            check_sums(rows, np.concatenate([self._sums[at : at + count] for at in starts]), self._digest)
        if not plan.filter.channel_major:
            return natural
        outer, across, along = box.shape
        words = scratch("gathered", (len(batch.parts), outer, along, across), dtype)
        np.copyto(words, natural.reshape(-1, outer, across, along).swapaxes(-1, -2))
        return words.reshape(len(batch.parts), -1)


def _places(payload: Payload) -> dict[tuple[str, Shape3], int]:
    """Where the sums of each box begin."""
    places, at = {}, 0
    counts: dict[tuple[tuple[int, ...], int], list[tuple[Shape3, int]]] = {}
    for spec, array in zip(payload.specs, payload.arrays, strict=True):
        kind = spec.shape, array.itemsize
        if kind not in counts:
            cut = boxes(box_shape(spec.shape), MAX_CHUNK_BYTES // array.itemsize)
            counts[kind] = [(box.start, block_count(box.size * array.itemsize)) for box in cut]
        for start, count in counts[kind]:
            places[spec.name, start] = at
            at += count
    return places


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

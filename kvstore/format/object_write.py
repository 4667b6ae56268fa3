"""Encoding a payload as an object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.format.boxes import read_box
from kvstore.format.choose import RAW, Plan, choose_plans
from kvstore.format.digest import Digest
from kvstore.format.filters import boxed, scratch, split_planes
from kvstore.format.object_header import Codec, ObjectHeader, encode_header, encode_table
from kvstore.format.object_layout import Batch, Group
from kvstore.format.tensors import Payload
from kvstore.format.zstd import compress_planes
from kvstore.limits import MAX_CHUNK_BYTES

__all__ = ["EncodedObject", "encode_object"]

Array = np.ndarray[Any, Any]


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
    """Encode a payload; the same payload gives the same bytes under one version of the zstd library.

    Needs scratch of a few MiB per thread beside the result. Safe to call from several threads at once.

    Args:
        payload: What to encode.
        digest: The payload's digest, which the header names.
        namespace: The namespace that the object belongs to.
        codec: ``small`` picks a filter for each tensor; ``fast`` stores raw frames throughout.
        checkpoint: Called between units of work; whatever it raises ends the encoding.
    """
    plans = choose_plans(payload) if codec == "small" else [RAW] * len(payload.specs)
    groups = _group(payload, plans)
    header = ObjectHeader(digest, payload.size, namespace, codec, MAX_CHUNK_BYTES, groups)
    plan_of = {spec.name: plan for spec, plan in zip(payload.specs, plans, strict=True)}
    arrays = {spec.name: array for spec, array in zip(payload.specs, payload.arrays, strict=True)}
    parts = [encode_header(header)]
    hasher = hashlib.sha256(parts[0])
    sizes: list[int] = []
    for batch in header.layout.batches:
        if checkpoint is not None:
            checkpoint()
        frames = _encode(batch, plan_of[batch.parts[0][0]], arrays)
        sizes.extend(map(len, frames))
        # One part per batch: many small writes and hash calls cost more than this copy.
        parts.append(b"".join(frames))
        hasher.update(parts[-1])
    parts.append(encode_table(parts[0], sizes))
    hasher.update(parts[-1])
    return EncodedObject(tuple(parts), sum(map(len, parts)), Digest(f"sha256:{hasher.hexdigest()}"), _summary(groups))


def _group(payload: Payload, plans: list[Plan]) -> tuple[Group, ...]:
    """Tensors that are alike in all that matters to a batch, brought together; canonical order within."""
    members: dict[tuple[str, tuple[int, ...], Plan], list[str]] = {}
    for spec, plan in zip(payload.specs, plans, strict=True):
        members.setdefault((spec.dtype, spec.shape, plan), []).append(spec.name)
    return tuple(Group(dtype, shape, plan.filter, tuple(names)) for (dtype, shape, plan), names in members.items())


def _encode(batch: Batch, plan: Plan, arrays: Mapping[str, Array]) -> list[Any]:
    shape = batch.parts[0][1].shape
    dtype = arrays[batch.parts[0][0]].dtype
    words = scratch("gathered", (len(batch.parts), batch.parts[0][1].size), dtype)
    for row, (name, box) in zip(words, batch.parts, strict=True):
        read_box(arrays[name], box, boxed(row, shape, plan.filter))
    return compress_planes(split_planes(words, plan.filter), plan.codings)


def _summary(groups: tuple[Group, ...]) -> Mapping[str, int]:
    total: dict[str, int] = {}
    for group in groups:
        total[group.filter.name] = total.get(group.filter.name, 0) + sum(spec.nbytes for spec in group.specs())
    return total

"""Which filter a tensor gets: the smallest on a sample, with a bound on the work.

Tensors of one dtype and shape whose names differ in digits only are a *family*: the keys
of all layers, say. The filters are tried on a sample of at most 16,384 elements of one
tensor of each family. First-layer values depend on their token alone, so that rows repeat
where tokens do. So the first four tensors of a family are asked whether rows begin alike,
and only where they do are repeats tried as well, on the tensor's first chunk.

Choosing thus costs at most five compressions of a sample and twelve of a chunk for a
family, however many tensors it has. The choice is a function of the payload alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.format.boxes import Box, Grid, read_box
from kvstore.format.filters import FILTERS, NONE, Filter, boxed, scratch, split_planes
from kvstore.format.tensors import Payload, TensorSpec
from kvstore.format.zstd import Coding, compress_planes
from kvstore.limits import MAX_CHUNK_BYTES

__all__ = ["RAW", "Plan", "choose_plans"]

Array = np.ndarray[Any, Any]

_SAMPLE_ELEMENTS: Final = 16384
_PROBED: Final = 4
_PROBE_ROWS: Final = 256
_PROBE_BYTES: Final = 8
_REPEATING: Final = 1 / 16
"""Share of rows that must occur twice for repeats to be tried."""
_ENTROPY: Final[tuple[Coding, ...]] = ("entropy",)
_REPEATS: Final[tuple[Coding, ...]] = ("repeats",)
_WORTH: Final = 0.995
"""A plane is compressed, and a later (costlier) filter preferred, only where that leaves less than this share."""
_FLOATS: Final = frozenset({"F16", "BF16", "F32", "F64"})
_DIGITS: Final = re.compile(r"\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a tensor's chunks are encoded: the filter, and for each plane how it is compressed."""

    filter: Filter
    codings: tuple[Coding, ...]


RAW: Final = Plan(NONE, ("raw",))


def choose_plans(payload: Payload) -> list[Plan]:
    """A plan for each tensor of ``payload``, in its order."""
    families: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for at, spec in enumerate(payload.specs):
        families.setdefault((spec.dtype, spec.shape, _DIGITS.sub("", spec.name)), []).append(at)
    plans = [RAW] * len(payload.specs)
    for members in families.values():
        if payload.specs[members[0]].nbytes == 0:
            continue
        middle = members[len(members) // 2]
        common = _choose(payload.specs[middle], payload.arrays[middle])
        for at in members:
            plans[at] = common
        for at in members[:_PROBED]:
            if _rows_repeat(payload.arrays[at]):
                plans[at] = _choose_repeats(payload.arrays[at], common)
    return plans


def _choose(spec: TensorSpec, array: Array) -> Plan:
    grid = Grid.of(array.shape, _SAMPLE_ELEMENTS)
    box = grid.box(grid.count // 2)
    best, best_size = RAW, box.size * array.itemsize * _WORTH
    kinds = list(_candidates(spec.dtype, array.itemsize))
    for kind, (codings, size) in zip(kinds, _try_entropy(array, box, kinds), strict=True):
        if size < best_size:
            best, best_size = Plan(kind, codings), size * _WORTH
    if spec.dtype not in _FLOATS and _try(array, box, Plan(NONE, _REPEATS)) < best_size:
        best = Plan(NONE, _REPEATS)
    return best


def _candidates(dtype: str, itemsize: int) -> Iterator[Filter]:
    """By rising cost of decoding."""
    if itemsize == 1:
        yield NONE
    else:
        yield FILTERS["byte-planes"]
    if dtype in _FLOATS:
        yield FILTERS["exponent-planes"]
    yield FILTERS["byte-planes+channel-major"]
    if dtype in _FLOATS:
        yield FILTERS["exponent-planes+channel-major"]


def _try_entropy(array: Array, box: Box, kinds: list[Filter]) -> Iterator[tuple[tuple[Coding, ...], float]]:
    """For each filter codings and size with the planes that do not shrink left raw."""
    width = kinds[-1].plane_count(array.itemsize)
    planes = np.empty((len(kinds), width, box.size), np.uint8)
    for tried, kind in zip(planes, kinds, strict=True):
        tried[:] = _filtered(array, box, kind)[0]
    sizes = [len(frame) for frame in compress_planes(planes, _ENTROPY * width)]
    for at in range(0, len(sizes), width):
        got = sizes[at : at + width]
        yield tuple("entropy" if size < box.size * _WORTH else "raw" for size in got), sum(map(float, got))


def _try(array: Array, box: Box, plan: Plan) -> int:
    return sum(len(frame) for frame in compress_planes(_filtered(array, box, plan.filter), plan.codings))


def _filtered(array: Array, box: Box, kind: Filter) -> Array:
    words = scratch("gathered", (1, box.size), array.dtype)
    read_box(array, box, boxed(words[0], box.shape, kind))
    return split_planes(words, kind)


def _rows_repeat(array: Array) -> bool:
    """Whether many rows begin alike; where rows are too short or too few to tell, they might."""
    cols = _PROBE_BYTES // array.itemsize
    if array.ndim < 2 or array.shape[-1] < cols or array.shape[-2] < _PROBED:
        return True
    heads = np.ascontiguousarray(array[(0,) * (array.ndim - 2)][:_PROBE_ROWS, :cols])
    keys = np.sort(heads.view(np.uint64)[:, 0])
    repeats = int(np.count_nonzero(keys[1:] == keys[:-1]))
    return repeats > _REPEATING * len(keys)


def _choose_repeats(array: Array, common: Plan) -> Plan:
    grid = Grid.of(array.shape, MAX_CHUNK_BYTES // array.itemsize)
    plans = [common, Plan(NONE, _REPEATS)]
    if common.filter.planes:
        plans.append(Plan(FILTERS["exponent-planes"], _REPEATS * array.itemsize))
    return min(plans, key=lambda plan: _try(array, grid.box(0), plan))

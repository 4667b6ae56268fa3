"""Which filter a tensor gets: the smallest on a sample, with a bound on the work.

Tensors of one dtype and shape whose names differ in digits only are a *family*: the keys
of all layers, say. Each filter is tried on at most 4,096 elements of each of three tensors
of a family. First-layer values depend on their token alone, so that rows repeat where
tokens do. So the first four tensors of a family are asked whether rows begin alike, and
only where they do are repeats tried as well, on at most 16,384 elements.

Choosing thus costs at most fifteen compressions of the smaller sample and twelve of the
larger one for a family, however many tensors it has. The choice is a function of the
payload alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.format.boxes import Box, Grid, read_box
from kvstore.format.filters import FILTERS, NONE, Filter, boxed, scratch, split_planes
from kvstore.format.tensors import Payload
from kvstore.format.zstd import Coding, compress_planes

__all__ = ["RAW", "Plan", "choose_plans"]

Array = np.ndarray[Any, Any]

_SAMPLE_ELEMENTS: Final = 4096
_REPEAT_ELEMENTS: Final = 16384
_PROBED: Final = 4
_PROBE_ROWS: Final = 256
_PROBE_BYTES: Final = 8
_REPEATING: Final = 1 / 16
"""Share of rows that must occur twice for repeats to be tried."""
_ENTROPY: Final[tuple[Coding, ...]] = ("entropy",)
_REPEATS: Final[tuple[Coding, ...]] = ("repeats",)
_WORTH: Final = 0.995
"""A plane is compressed, and channel-major (slower to read) preferred, only where that leaves less than this share."""
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
    for (dtype, _, _), members in families.items():
        if payload.specs[members[0]].nbytes == 0:
            continue
        sampled = sorted({members[len(members) * quarter // 4] for quarter in (1, 2, 3)})
        common = _choose(dtype, [payload.arrays[at] for at in sampled])
        for at in members:
            plans[at] = common
        for at in members[:_PROBED]:
            if _rows_repeat(payload.arrays[at]):
                plans[at] = _choose_repeats(payload.arrays[at], common)
    return plans


def _choose(dtype: str, arrays: list[Array]) -> Plan:
    """The plan that leaves the least of a sample of these arrays, which are of one shape."""
    grid = Grid.of(arrays[0].shape, _SAMPLE_ELEMENTS)
    box = grid.box(grid.count // 2)
    best, best_size = RAW, len(arrays) * box.size * arrays[0].itemsize * _WORTH
    for kind in _candidates(dtype, arrays[0].itemsize):
        codings, size = _try_entropy(arrays, box, kind)
        if kind.channel_major:
            size /= _WORTH
        if size < best_size:
            best, best_size = Plan(kind, codings), size
    if dtype not in _FLOATS and sum(_try(array, box, Plan(NONE, _REPEATS)) for array in arrays) < best_size:
        best = Plan(NONE, _REPEATS)
    return best


def _candidates(dtype: str, itemsize: int) -> Iterator[Filter]:
    yield FILTERS["byte-planes"] if itemsize > 1 else NONE
    yield FILTERS["byte-planes+channel-major"]
    if dtype in _FLOATS:
        yield FILTERS["exponent-planes"]
        yield FILTERS["exponent-planes+channel-major"]


def _try_entropy(arrays: list[Array], box: Box, kind: Filter) -> tuple[tuple[Coding, ...], float]:
    """Codings and size, with the planes that do not shrink left raw."""
    width = kind.plane_count(arrays[0].itemsize)
    planes = np.empty((len(arrays), width, box.size), np.uint8)
    for tried, array in zip(planes, arrays, strict=True):
        tried[:] = _filtered(array, box, kind)[0]
    frames = compress_planes(planes, _ENTROPY * width)
    sizes = [sum(map(len, frames[plane::width])) for plane in range(width)]
    raw = len(arrays) * box.size
    return tuple("entropy" if size < raw * _WORTH else "raw" for size in sizes), float(sum(sizes))


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
    grid = Grid.of(array.shape, _REPEAT_ELEMENTS)
    plans = [common, Plan(NONE, _REPEATS)]
    if common.filter.planes:
        plans.append(Plan(FILTERS["exponent-planes"], _REPEATS * array.itemsize))
    return min(plans, key=lambda plan: _try(array, grid.box(0), plan))

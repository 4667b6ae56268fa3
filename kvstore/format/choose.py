"""Which filter a tensor gets: the smallest on a sample, with a bound on the work.

Tensors of one dtype and shape whose names differ in digits only are a *family*: the keys
of all layers, say. Each filter is tried on at most 4,096 elements of each of two tensors of
a family. First-layer values depend on their token alone, so that rows repeat where
tokens do. So the first four tensors of a family are asked whether rows begin alike, and
only where they do are repeats tried as well, on at most 16,384 elements.

Choosing thus costs at most ten compressions of the smaller sample and twelve of the
larger one for a family, however many tensors it has, and is done once for all segments
of a cache. The choice is a function of the payloads alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.format.boxes import Box, Grid, read_box
from kvstore.format.filters import FILTERS, NONE, Filter, boxed, scratch, split_planes
from kvstore.format.tensors import Payload, TensorSpec
from kvstore.format.zstd import Coding, compress_planes

__all__ = ["RAW", "Choice", "Plan"]

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


Family = tuple[str, tuple[int, ...], str]


class Choice:
    """Remembers what was chosen, for payloads that are alike: the segments of one cache.

    What is remembered is a family's plan, and that of each tensor that was asked for repeats, whatever the number of
    rows. Not for two threads at once, and what was chosen first holds: whoever wants the same bytes each time shows
    the payloads in order.
    """

    def __init__(self) -> None:
        """Start with nothing chosen."""
        self._families: dict[Family, Plan] = {}
        self._tensors: dict[Family, Plan] = {}
        self._latest: tuple[tuple[TensorSpec, ...], list[Plan]] = ((), [])

    def plans(self, payload: Payload) -> list[Plan]:
        """A plan for each tensor of ``payload``, in its order."""
        # Payloads that are cut alike share their specs, so what holds for one is what was remembered for the next.
        if self._latest[0] is not payload.specs:
            self._latest = payload.specs, self._plans(payload)
        return self._latest[1]

    def _plans(self, payload: Payload) -> list[Plan]:
        plans = [RAW] * len(payload.specs)
        for family, members in _families(payload).items():
            common = self._families.get(_remembered(family))
            if common is None:
                sampled = sorted({members[len(members) * quarter // 4] for quarter in (1, 3)})
                common = _choose(family[0], [payload.arrays[at] for at in sampled])
                self._families[_remembered(family)] = common
            for at in members:
                plans[at] = common
            for at in members[:_PROBED]:
                plans[at] = self._probed((*family[:2], payload.specs[at].name), payload.arrays[at], common)
        return plans

    def _probed(self, tensor: Family, array: Array, common: Plan) -> Plan:
        plan = self._tensors.get(_remembered(tensor))
        if plan is None:
            plan = _choose_repeats(array, common) if _rows_repeat(array) else common
            self._tensors[_remembered(tensor)] = plan
        return plan


def _families(payload: Payload) -> dict[Family, list[int]]:
    """The places of tensors that hold something, by family."""
    families: dict[Family, list[int]] = {}
    for at, spec in enumerate(payload.specs):
        if spec.nbytes:
            families.setdefault((spec.dtype, spec.shape, _DIGITS.sub("", spec.name)), []).append(at)
    return families


def _remembered(family: Family) -> Family:
    """The family without its number of rows: the last segment of a cache is shorter than the others."""
    dtype, shape, name = family
    return dtype, (*shape[:-2], *shape[-1:]), name


def _choose(dtype: str, arrays: list[Array]) -> Plan:
    """The plan that leaves the least of a sample of these arrays, which are of one shape."""
    grid = Grid.of(arrays[0].shape, _SAMPLE_ELEMENTS)
    box = grid.box(grid.count // 2)
    samples = np.empty((len(arrays), *box.shape), arrays[0].dtype)
    for sample, array in zip(samples, arrays, strict=True):
        read_box(array, box, sample)
    kinds = tuple(_candidates(dtype, samples.itemsize))
    raw = len(arrays) * box.size
    best, best_size = RAW, raw * samples.itemsize * _WORTH
    for kind, planes in zip(kinds, _try_entropy(samples, kinds), strict=True):
        size = sum(planes) / (_WORTH if kind.channel_major else 1)
        if size < best_size:
            codings: tuple[Coding, ...] = tuple("entropy" if plane < raw * _WORTH else "raw" for plane in planes)
            best, best_size = Plan(kind, codings), size
    if dtype not in _FLOATS:
        repeats = compress_planes(samples.view(np.uint8).reshape(len(arrays), 1, -1), _REPEATS)
        best = Plan(NONE, _REPEATS) if sum(map(len, repeats)) < best_size else best
    return best


def _candidates(dtype: str, itemsize: int) -> Iterator[Filter]:
    yield FILTERS["byte-planes"] if itemsize > 1 else NONE
    yield FILTERS["byte-planes+channel-major"]
    if dtype in _FLOATS:
        yield FILTERS["exponent-planes"]
        yield FILTERS["exponent-planes+channel-major"]


def _try_entropy(samples: Array, kinds: Sequence[Filter]) -> list[list[int]]:
    """For each filter the compressed size of each plane, over all samples; one call into zstd."""
    count, size = len(samples), samples[0].size
    width = kinds[0].plane_count(samples.itemsize)
    planes = np.empty((len(kinds), count, width, size), np.uint8)
    for tried, kind in zip(planes, kinds, strict=True):
        stored = samples.swapaxes(-1, -2) if kind.channel_major else samples
        tried[:] = split_planes(stored.reshape(count, size, copy=True), kind)
    frames = compress_planes(planes.reshape(-1, width, size), _ENTROPY * width)
    sizes = np.array([len(frame) for frame in frames]).reshape(len(kinds), count, width).sum(axis=1)
    return [list(map(int, row)) for row in sizes]


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

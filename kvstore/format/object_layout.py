"""What lies where in an object: groups of tensors, their chunks, and the frames of each.

All of it follows from the groups that an object's header lists, so it is worked out once
for all objects whose groups are the same, as those of the segments of a cache are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from kvstore.errors import fail
from kvstore.format.boxes import Box, Grid
from kvstore.format.filters import Filter
from kvstore.format.tensor_header import check_specs
from kvstore.format.tensors import DTYPE_SIZES, TensorSpec, canonical_order, encode_tensor_header
from kvstore.limits import MAX_OBJECT_HEADER_BYTES

__all__ = ["BATCH_BYTES", "Batch", "Group", "Layout", "layout_of"]

Array = np.ndarray[Any, Any]

BATCH_BYTES: Final = 512 * 1024
"""Chunks of one shape are worked on together up to this size; one larger chunk is a batch of its own."""
_CACHED_FRAMES: Final = 8192


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one dtype, shape and filter, in the order in which their frames lie."""

    dtype: str
    shape: tuple[int, ...]
    filter: Filter
    names: tuple[str, ...]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_SIZES[self.dtype]

    @property
    def plane_count(self) -> int:
        """Frames per chunk."""
        return self.filter.plane_count(self.itemsize)

    def grid(self, chunk_bytes: int) -> Grid:
        """How each tensor of the group is cut into chunks."""
        return Grid.of(self.shape, chunk_bytes // self.itemsize)

    def specs(self) -> Iterator[TensorSpec]:
        """The group's tensors."""
        return (TensorSpec(name, self.dtype, self.shape) for name in self.names)


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of one shape that follow one another in one group: the unit of work.

    Attributes:
        group: Their group.
        parts: For each chunk the tensor's name and the chunk's box.
        frame: Number of the first chunk's first frame in the frame table.
        nbytes: Unfiltered bytes.
    """

    group: Group
    parts: tuple[tuple[str, Box], ...]
    frame: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """What follows from an object's groups.

    A header of a hundred bytes leads to millions of chunks. So they are listed when they are first asked for, and
    whoever reads an object asks after its frame table has proved that it has so many frames.

    Attributes:
        groups: The groups.
        chunk_bytes: What the largest chunk has.
        specs: All tensors, in canonical order.
        tensor_header: The payload's canonical header.
        payload_size: Bytes of the payload.
        frame_count: Number of data frames.
    """

    groups: tuple[Group, ...]
    chunk_bytes: int
    specs: tuple[TensorSpec, ...]
    tensor_header: bytes
    payload_size: int
    frame_count: int

    @cached_property
    def contents(self) -> Array:
        """The bytes that each data frame decodes to, int64, in frame order."""
        return np.concatenate([np.empty(0, np.int64), *(_contents(group, self.chunk_bytes) for group in self.groups)])

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """All chunks, in frame order."""
        return tuple(_batches(self.groups, self.chunk_bytes))


def layout_of(groups: tuple[Group, ...], chunk_bytes: int) -> Layout:
    """Work out the layout of an object with these groups.

    Raises:
        InvalidError: ST_HEADER_INVALID, ST_SHAPE_OVERFLOW, or FRAME_TABLE_INVALID for too many frames.
    """
    frames = _frames(groups, chunk_bytes)
    if 4 * frames > MAX_OBJECT_HEADER_BYTES:
        check_specs([spec for group in groups for spec in group.specs()])
        limit = f"at most {MAX_OBJECT_HEADER_BYTES // 4}"
        raise fail("FRAME_TABLE_INVALID", "the number of data frames", expected=limit, found=frames)
    # Only small layouts are kept, so that no object can make the process hold on to much.
    return _cached_layout(groups, chunk_bytes) if frames <= _CACHED_FRAMES else _layout(groups, chunk_bytes)


@lru_cache(maxsize=256)
def _frames(groups: tuple[Group, ...], chunk_bytes: int) -> int:
    return sum(group.grid(chunk_bytes).count * group.plane_count * len(group.names) for group in groups)


def _layout(groups: tuple[Group, ...], chunk_bytes: int) -> Layout:
    specs = [spec for group in groups for spec in group.specs()]
    tensor_header = encode_tensor_header(specs)
    size = len(tensor_header) + sum(spec.nbytes for spec in specs)
    return Layout(groups, chunk_bytes, canonical_order(specs), tensor_header, size, _frames(groups, chunk_bytes))


_cached_layout = lru_cache(maxsize=64)(_layout)


def _contents(group: Group, chunk_bytes: int) -> Array:
    per_tensor = group.grid(chunk_bytes).sizes() * (group.itemsize // group.plane_count)
    return np.tile(np.repeat(per_tensor, group.plane_count), len(group.names))


def _batches(groups: tuple[Group, ...], chunk_bytes: int) -> Iterator[Batch]:
    frame = 0
    for group in groups:
        for parts in _runs(group, group.grid(chunk_bytes)):
            yield Batch(group, parts, frame, len(parts) * parts[0][1].size * group.itemsize)
            frame += len(parts) * group.plane_count


def _runs(group: Group, grid: Grid) -> Iterator[tuple[tuple[str, Box], ...]]:
    """Neighbouring chunks of one shape, up to :data:`BATCH_BYTES`."""
    run: list[tuple[str, Box]] = []
    for name in group.names:
        for box in map(grid.box, range(grid.count)):
            full = (len(run) + 1) * box.size * group.itemsize > BATCH_BYTES
            if run and (full or run[0][1].shape != box.shape):
                yield tuple(run)
                run = []
            run.append((name, box))
    if run:
        yield tuple(run)

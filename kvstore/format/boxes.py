"""Chunks: how a tensor is cut into boxes that each are one run of its C order.

A tensor of any rank is seen as ``[outer, rows, cols]``: the last two axes, and all
before them folded into one. A box is as many whole outer slices as fit, else as many
whole rows of one slice, else as many elements of one row. So the boxes of a tensor, one
after another, are its bytes, and a transposition within a box never leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

__all__ = ["Box", "Grid", "Shape3", "box_of", "box_shape", "boxes", "read_box", "write_box"]

Shape3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an ``[outer, rows, cols]`` tensor: where it begins and its extents, in elements."""

    start: Shape3
    shape: Shape3

    @property
    def size(self) -> int:
        """Elements in the box."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Grid:
    """How one tensor is cut: its folded shape and the largest box, both in elements.

    ``step`` is the box that all but the last one along each axis have.
    """

    shape: Shape3
    step: Shape3

    @classmethod
    def of(cls, shape: tuple[int, ...], limit: int) -> Grid:
        """Cut a tensor of ``shape`` into boxes of at most ``limit`` elements."""
        outer, rows, cols = box_shape(shape)
        if cols > limit:
            return cls((outer, rows, cols), (1, 1, limit))
        if rows * cols > limit:
            return cls((outer, rows, cols), (1, limit // cols, cols))
        return cls((outer, rows, cols), (max(1, min(outer, limit // max(1, rows * cols))), rows, cols))

    @property
    def count(self) -> int:
        """Number of boxes; none where the tensor has no elements."""
        return 0 if 0 in self.shape else prod(self._counts())

    def box(self, index: int) -> Box:
        """The box at ``index``, in C order."""
        _, across, along = self._counts()
        index, col = divmod(index, along)
        outer, row = divmod(index, across)
        start = (outer * self.step[0], row * self.step[1], col * self.step[2])
        extents = [min(step, full - at) for step, full, at in zip(self.step, self.shape, start, strict=True)]
        return Box(start, (extents[0], extents[1], extents[2]))

    def sizes(self) -> np.ndarray[Any, Any]:
        """The elements of every box, int64, in C order; found without listing the boxes."""
        if not self.count:
            return np.empty(0, np.int64)
        outer, rows, cols = (
            np.minimum(step, full - step * np.arange(count, dtype=np.int64))
            for step, full, count in zip(self.step, self.shape, self._counts(), strict=True)
        )
        sizes: np.ndarray[Any, Any] = outer[:, None, None] * rows[:, None] * cols
        return sizes.reshape(-1)

    def _counts(self) -> tuple[int, ...]:
        return tuple(-(-extent // step) for extent, step in zip(self.shape, self.step, strict=True))


def box_shape(shape: tuple[int, ...]) -> Shape3:
    """A shape as ``[outer, rows, cols]``; missing axes are 1."""
    if len(shape) < 2:
        return (1, 1, shape[0] if shape else 1)
    return (prod(shape[:-2]), shape[-2], shape[-1])


def boxes(shape: Shape3, limit: int) -> Iterator[Box]:
    """All boxes of at most ``limit`` elements, in C order."""
    grid = Grid.of(shape, limit)
    return (grid.box(index) for index in range(grid.count))


def read_box(array: np.ndarray[Any, Any], box: Box, out: np.ndarray[Any, Any]) -> None:
    """Copy a box of ``array`` (its own rank, any strides) to ``out`` of the box's shape."""
    if out.size == array.size:
        np.copyto(out.reshape(array.shape), array)
        return
    for part, at in _parts(array, box):
        np.copyto(out[at], part)


def write_box(array: np.ndarray[Any, Any], box: Box, source: np.ndarray[Any, Any]) -> None:
    """Copy ``source``, of the box's shape, to a box of ``array`` (its own rank, any strides)."""
    if source.size == array.size and source.flags.c_contiguous:
        np.copyto(array, source.reshape(array.shape))
        return
    for part, at in _parts(array, box):
        np.copyto(part, source[at])


def box_of(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    """A box of ``array`` (its own rank, any strides), ``[outer, rows, cols]``: a view where the leading axes fold."""
    parts = [part for part, _ in _parts(array, box)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _parts(array: np.ndarray[Any, Any], box: Box) -> Iterator[tuple[np.ndarray[Any, Any], slice]]:
    """Views of ``array`` that make up the box, with the outer slices that each covers.

    One view where the leading axes fold without a copy (every cache layout known), else one per outer slice.
    """
    (o0, r0, c0), (outer, rows, cols) = box.start, box.shape
    try:
        folded = array.reshape(box_shape(array.shape), copy=False)
    except ValueError:
        for at in range(outer):
            index = np.unravel_index(o0 + at, array.shape[:-2])
            yield array[index][None, r0 : r0 + rows, c0 : c0 + cols], slice(at, at + 1)
        return
    yield folded[o0 : o0 + outer, r0 : r0 + rows, c0 : c0 + cols], slice(None)

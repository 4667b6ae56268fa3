"""Filters: the reversible rearrangements that make KV data compress.

The exponents of a layer's keys and values repeat and their mantissas are noise. Apart,
the exponents shrink to a third and the mantissas can lie raw; together, neither does. A
filter works on one chunk (a box of one tensor) and has up to three steps:

* *channel-major*: the box is stored with its rows and columns exchanged, so that values
  of one channel are neighbours (best for keys, whose channels differ in scale);
* *exponent*: each element is rotated left by one bit, so that the sign moves from in
  front of the exponent to behind the mantissa;
* *planes*: byte ``j`` of every element, most significant first, in a plane of its own.

Chunks of one shape are worked on together, ``[chunks, elements]``: a cache has many small
tensors, and a call for each would cost more than the work, above all under two threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from kvstore.errors import fail

__all__ = ["FILTERS", "NONE", "Filter", "boxed", "join_planes", "parse_filter", "scratch", "split_planes"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter by its steps; ``name`` is how an object header names it."""

    name: str
    planes: bool = False
    exponent: bool = False
    channel_major: bool = False

    def plane_count(self, itemsize: int) -> int:
        """Frames that a chunk of elements of ``itemsize`` bytes becomes."""
        return itemsize if self.planes else 1


NONE: Final = Filter("none")
FILTERS: Final[Mapping[str, Filter]] = MappingProxyType({
    item.name: item
    for item in (
        NONE,
        Filter("byte-planes", planes=True),
        Filter("byte-planes+channel-major", planes=True, channel_major=True),
        Filter("exponent-planes", planes=True, exponent=True),
        Filter("exponent-planes+channel-major", planes=True, exponent=True, channel_major=True),
    )
})


def parse_filter(value: Any, where: str) -> Filter:
    """Look a filter up by name.

    Raises:
        InvalidError: FIELD_TYPE.
        UnsupportedError: FILTER_UNSUPPORTED.
    """
    if not isinstance(value, str):
        raise fail("FIELD_TYPE", where, expected="text", found=type(value).__name__)
    if value not in FILTERS:
        raise fail("FILTER_UNSUPPORTED", where, expected=f"one of {', '.join(FILTERS)}", found=value)
    return FILTERS[value]


class _Scratch(threading.local):
    """Per thread: byte buffers by name that grow to the largest batch seen and are used again."""

    def __init__(self) -> None:
        self.buffers: dict[str, Array] = {}


_SCRATCH = _Scratch()


def scratch(name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | type[Any]) -> Array:
    """This thread's array ``name``, uninitialized. Its content lasts until the name is asked for again."""
    result_type = np.dtype(dtype)
    nbytes = result_type.itemsize
    for extent in shape:
        nbytes *= extent
    buffer = _SCRATCH.buffers.get(name)
    if buffer is None or len(buffer) < nbytes:
        buffer = _SCRATCH.buffers[name] = np.empty(nbytes, np.uint8)
    return buffer[:nbytes].view(result_type).reshape(shape)


def boxed(words: Array, shape: tuple[int, int, int], kind: Filter) -> Array:
    """One chunk's words as its box ``[outer, rows, cols]``, whichever order they are stored in."""
    if not kind.channel_major:
        return words.reshape(shape)
    outer, rows, cols = shape
    return words.reshape(outer, cols, rows).swapaxes(-1, -2)


def split_planes(words: Array, kind: Filter) -> Array:
    """Filter chunks: words ``[chunks, elements]`` to bytes ``[chunks, planes, elements]``.

    Without planes the result is a view of ``words``; otherwise it is this thread's scratch ``"planes"``.
    """
    count, size = words.shape
    width = words.itemsize
    if not kind.planes:
        if not words.flags.c_contiguous:
            together = scratch("natural", words.shape, words.dtype)
            np.copyto(together, words)
            words = together
        return words.view(np.uint8).reshape(count, 1, size * width)
    planes = scratch("planes", (count, width, size), np.uint8)
    shifted = scratch("shifted", words.shape, words.dtype)
    if kind.exponent:
        rotated = scratch("rotated", words.shape, words.dtype)
        np.right_shift(words, 8 * width - 1, out=shifted)
        np.left_shift(words, 1, out=rotated)
        words = np.bitwise_or(rotated, shifted, out=rotated)
    for plane in range(width - 1):
        np.right_shift(words, 8 * (width - 1 - plane), out=shifted)
        np.copyto(planes[:, plane], shifted, casting="unsafe")
    np.copyto(planes[:, width - 1], words, casting="unsafe")
    return planes


def join_planes(planes: Array, dtype: np.dtype[Any], kind: Filter) -> Array:
    """Undo :func:`split_planes`: bytes ``[chunks, planes, bytes of a plane]`` to words ``[chunks, elements]``.

    Without planes the words are a view of what was decoded; otherwise they are this thread's scratch ``"words"``.
    """
    width = dtype.itemsize
    if not kind.planes:
        return planes[:, 0].view(dtype)
    words = scratch("words", (len(planes), planes.shape[2]), dtype)
    np.copyto(words, planes[:, 0])
    for plane in range(1, width):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, planes[:, plane], out=words)
    if kind.exponent:
        shifted = scratch("shifted", words.shape, dtype)
        np.left_shift(words, 8 * width - 1, out=shifted)
        np.right_shift(words, 1, out=words)
        np.bitwise_or(words, shifted, out=words)
    return words

"""Arrays whose memory nobody has touched yet.

``mx.zeros`` and ``mx.empty`` write every byte of what they make, on a thread of MLX's: the
system hands out each page, and by the time that a decoder writes the same page again it has
left the processor's cache. But MLX allocates an array that it loads before it asks the file
for the bytes. So large arrays are loaded from a file that has a header and gives no bytes;
their pages are handed out to the thread that writes them first.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from math import prod
from typing import Any, Final, cast

import mlx.core as mx

__all__ = ["untouched"]

_SMALL_BYTES: Final = 64 * 1024
"""Arrays below this size are simply zeros,"""
_LITTLE_BYTES: Final = 8 * 2**20
"""and all are, if they take less than this together: that stays in the cache, and a file costs a millisecond."""
_NAMES: Final = {mx.uint8: ("U8", 1), mx.uint16: ("U16", 2), mx.uint32: ("U32", 4), mx.uint64: ("U64", 8)}


def untouched(wanted: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> list[mx.array]:
    """Evaluated arrays of these shapes and unsigned dtypes, without meaningful contents.

    Raises:
        RuntimeError, MemoryError, ValueError: MLX could not make them.
    """
    sizes = [prod(shape) * _NAMES[dtype][1] for shape, dtype in wanted]
    least = _SMALL_BYTES if sum(sizes) >= _LITTLE_BYTES else sum(sizes) + 1
    large = {str(at): (*wanted[at], size) for at, size in enumerate(sizes) if size >= least}
    loaded: Any = mx.load(cast("Any", _Hollow(large)), format="safetensors") if large else {}
    arrays = [
        loaded[str(at)] if str(at) in large else mx.zeros(shape, dtype) for at, (shape, dtype) in enumerate(wanted)
    ]
    mx.eval(arrays)
    return arrays


class _Hollow(io.RawIOBase):
    """A safetensors file with a header, whose data reads as whatever is there already."""

    def __init__(self, tensors: dict[str, tuple[tuple[int, ...], mx.Dtype, int]]) -> None:
        header, end = {}, 0
        for name, (shape, dtype, size) in tensors.items():
            header[name] = {"dtype": _NAMES[dtype][0], "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        self._start = len(text).to_bytes(8, "little") + text
        self._size = len(self._start) + end
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._size - self._at))
        part = self._start[self._at : self._at + count]
        buffer[: len(part)] = part
        self._at += count
        return count

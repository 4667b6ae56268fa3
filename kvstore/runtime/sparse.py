"""KV caches from which positions were dropped, usable by the models of mlx_lm.

A compression method keeps some of the positions of a cache. What is left remembers two
numbers instead of one: how many tokens were read (``offset``, at which new tokens are
rotated) and how many rows are stored (``rows``). Every retained row is visible to every
new token; new tokens are causal among themselves. Keys were rotated at their original
positions and stay so.

::

    keep = [important(layer) for layer in cache]              # indexes, one array a layer
    sparse = drop_positions(cache, keep)
    store.put(sparse, token_ids=ids, model=model, method=MethodRecord.make("my-method", "{}"))

Models that ask for their mask as an array make one for all layers, so there all layers
must keep equally many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache, create_attention_mask

from kvstore.errors import KVStoreError, fail

__all__ = ["SparseKVCache", "SparseQuantizedKVCache", "drop_positions"]

_ROW_AXIS: Final = 2


class SparseKVCache:
    """A KV cache with fewer rows than tokens.

    Attributes:
        keys, values: ``[1, heads, capacity, size]``, the first :attr:`rows` of them stored; None while empty.
        offset: Tokens that were read.
        rows: Rows that are stored.
        positions: ``[heads or 1, capacity]`` int32, the original position of each row, or None where not recorded.
            Nothing is computed from it.
    """

    step: ClassVar[int] = 256

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self.rows = 0
        self.positions: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append rows of new tokens; returns all stored rows."""
        count, start = int(keys.shape[_ROW_AXIS]), self.rows
        self._reserve(keys, values, start + count)
        for side, new in ((self.keys, keys), (self.values, values)):
            self._write(side, new, start)
        if self.positions is not None:
            self.positions[:, start : start + count] = mx.arange(self.offset, self.offset + count, dtype=mx.int32)
        self.rows += count
        self.offset += count
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """The stored rows."""
        if self.rows == self._capacity():
            return self.keys, self.values
        keys, values = tree_map(lambda array: array[..., : self.rows, :], (self.keys, self.values))
        return keys, values

    def make_mask(self, count: int, *, return_array: bool = False, window_size: int | None = None) -> Any:
        """The attention mask of ``count`` new tokens over the stored rows and themselves.

        Raises:
            UnsupportedError: KIND_UNSUPPORTED where a window would hide retained rows, which this cache cannot do.
        """
        if window_size is not None and self.offset + count > window_size:
            raise fail(
                "KIND_UNSUPPORTED", "a sparse cache under a sliding window", expected=f"at most {window_size} tokens",
                found=self.offset + count, fix="Drop positions only in layers that see all tokens.",
            )  # fmt: skip
        return create_attention_mask(count, self.rows, return_array, None)

    @property
    def state(self) -> Any:
        """Arrays and numbers, as mlx_lm evaluates them."""
        return self.keys, self.values, self.offset, self.rows, self.positions

    @state.setter
    def state(self, value: Any) -> None:
        self.keys, self.values, self.offset, self.rows, self.positions = value

    def is_trimmable(self) -> bool:
        """False: which rows the last tokens have is not known once others were dropped."""
        return False

    def size(self) -> int:
        """Tokens that were read."""
        return self.offset

    def empty(self) -> bool:
        """Whether no array was made yet."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, head room included."""
        return sum(array.nbytes for array in _arrays(self))

    def _capacity(self) -> int:
        return int(_first_array(self.keys).shape[_ROW_AXIS])

    def _reserve(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Room for ``rows`` rows; grown by whole steps."""
        if self.keys is not None and rows <= self._capacity():
            return
        room = -(-(rows - self.rows) // self.step) * self.step
        if self.keys is None:
            self.keys, self.values = self._blank(keys, room), self._blank(values, room)
            return
        both = self.keys, self.values
        self.keys, self.values = tree_map(lambda array: _grown(array, self.rows, room, _ROW_AXIS), both)
        if self.positions is not None:
            self.positions = _grown(self.positions, self.rows, room, 1)

    def _blank(self, like: mx.array, rows: int) -> Any:
        """Zeroed storage for rows like those of ``like``."""
        return mx.zeros((*like.shape[:_ROW_AXIS], rows, like.shape[3]), like.dtype)

    def _write(self, stored: Any, new: mx.array, start: int) -> None:
        stored[..., start : start + new.shape[_ROW_AXIS], :] = new


class SparseQuantizedKVCache(SparseKVCache):
    """The same with quantized rows; new tokens are quantized as they come.

    Attributes:
        keys, values: Packed words, scales, biases, each ``[1, heads, capacity, …]``.
    """

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        super().__init__()
        self.group_size = group_size
        self.bits = bits

    @property
    def state(self) -> Any:
        """Arrays and numbers, as mlx_lm evaluates them."""
        return self.keys, self.values, self.offset, self.rows, self.positions, self.group_size, self.bits

    @state.setter
    def state(self, value: Any) -> None:
        self.keys, self.values, self.offset, self.rows, self.positions, self.group_size, self.bits = value

    def _blank(self, like: mx.array, rows: int) -> Any:
        parts = self._quantized(mx.zeros((*like.shape[:_ROW_AXIS], 1, like.shape[3]), like.dtype))
        return tuple(mx.zeros((*part.shape[:_ROW_AXIS], rows, part.shape[3]), part.dtype) for part in parts)

    def _write(self, stored: Any, new: mx.array, start: int) -> None:
        for part, fresh in zip(stored, self._quantized(new), strict=True):
            super()._write(part, fresh, start)

    def _quantized(self, array: mx.array) -> Any:
        return mx.quantize(array, group_size=self.group_size, bits=self.bits)


def drop_positions(cache: Sequence[Any], keep: Sequence[Any], *, record_positions: bool = True) -> list[Any]:
    """Sparse caches that hold only some rows of ``cache``, which is left as it is.

    Args:
        cache: Caches of one model.
        keep: For each cache the rows to keep, or None to leave it: ascending indexes ``[rows]`` for all heads, or
            ``[heads, rows]``, equally many for each head. They index stored rows, which in a ``KVCache`` are positions.
        record_positions: Keep the original position of each row beside it.

    Raises:
        UsageError: USAGE where ``keep`` does not fit, or names a cache that has no rows to drop.
    """
    if len(keep) != len(cache):
        raise fail("USAGE", "keep", expected=f"{len(cache)} items, one for each cache", found=len(keep))
    return [
        item if rows is None else _dropped(item, rows, f"keep[{index}]", record=record_positions)
        for index, (item, rows) in enumerate(zip(cache, keep, strict=True))
    ]


def _dropped(cache: Any, keep: Any, where: str, *, record: bool) -> SparseKVCache:
    stored = _stored_rows(cache, where)
    indexes = _indexes(keep, stored, int(_first_array(cache.keys).shape[1]), where)
    made = _like(cache)
    made.keys, made.values = tree_map(lambda array: _taken(array, indexes), (cache.keys, cache.values))
    made.offset, made.rows = cache.offset, int(indexes.shape[1])
    if record:
        made.positions = _positions(cache, indexes)
    mx.eval(_arrays(made))
    return made


def _like(cache: Any) -> SparseKVCache:
    if isinstance(cache, (QuantizedKVCache, SparseQuantizedKVCache)):
        return SparseQuantizedKVCache(cache.group_size, cache.bits)
    return SparseKVCache()


def _stored_rows(cache: Any, where: str) -> int:
    """Rows of a cache of a class that can be made sparse."""
    kinds = (KVCache, QuantizedKVCache, SparseKVCache, SparseQuantizedKVCache)
    if type(cache) not in kinds or cache.keys is None:
        raise fail(
            "USAGE", f"{where} is for a {type(cache).__name__}", fix="Give None for this layer.",
            expected="a cache with rows, one of " + ", ".join(kind.__name__ for kind in kinds),
            found=type(cache).__name__ if type(cache) not in kinds else "one that was never written",
        )  # fmt: skip
    return int(cache.rows if isinstance(cache, SparseKVCache) else cache.offset)


def _indexes(keep: Any, stored: int, heads: int, where: str) -> np.ndarray[Any, Any]:
    """``[1 or heads, rows]`` ascending indexes of stored rows."""
    array = np.asarray(keep)
    if array.ndim == 1:
        array = array[None]
    whole = array.size == 0 or array.dtype.kind in "iu"
    if array.ndim != 2 or array.shape[0] not in (1, heads) or not whole:
        raise _bad(where, f"integers, [rows] or [{heads}, rows]", f"{array.dtype} {list(array.shape)}")
    array = array.astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= stored):
        raise _bad(where, f"0 to {stored - 1}", f"{array.min()} to {array.max()}")
    if (np.diff(array, axis=1) <= 0).any():
        raise _bad(where, "ascending indexes, none twice", "others")
    return array


def _taken(array: mx.array, indexes: np.ndarray[Any, Any]) -> mx.array:
    """The rows at ``indexes`` of ``[1, heads, capacity, size]``, for each head its own."""
    if indexes.shape[0] == 1:
        return mx.contiguous(mx.take(array, mx.array(indexes[0]), axis=_ROW_AXIS))
    return mx.take_along_axis(array, mx.array(indexes)[None, :, :, None], axis=_ROW_AXIS)


def _positions(cache: Any, indexes: np.ndarray[Any, Any]) -> mx.array | None:
    """Where the rows stood in the prompt. Rows of a sparse cache without positions have lost theirs."""
    if not isinstance(cache, SparseKVCache):
        return mx.array(indexes.astype(np.int32))
    if cache.positions is None:
        return None
    known = np.array(cache.positions)[:, : cache.rows]
    heads = max(known.shape[0], indexes.shape[0])
    wide = np.broadcast_to(known, (heads, known.shape[1])), np.broadcast_to(indexes, (heads, indexes.shape[1]))
    return mx.array(np.take_along_axis(*wide, axis=1))


def _grown(array: mx.array, rows: int, room: int, axis: int) -> mx.array:
    """The first ``rows`` rows and ``room`` zeroed ones."""
    used = array[(slice(None),) * axis + (slice(rows),)]
    blank = mx.zeros((*array.shape[:axis], room, *array.shape[axis + 1 :]), array.dtype)
    return mx.concatenate([used, blank], axis=axis)


def _first_array(side: Any) -> mx.array:
    array: mx.array = side[0] if isinstance(side, (tuple, list)) else side
    return array


def _arrays(cache: SparseKVCache) -> list[mx.array]:
    sides = [cache.keys, cache.values, cache.positions]
    flat = [part for side in sides for part in (side if isinstance(side, (tuple, list)) else (side,))]
    return [array for array in flat if array is not None]


def _bad(where: str, expected: str, found: str) -> KVStoreError:
    return fail("USAGE", where, expected=expected, found=found)

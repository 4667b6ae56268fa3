"""New MLX arrays for an entry, filled in place through host views, and handed out whole.

MLX lets the host write into an evaluated array. So the final arrays are made once, as
unsigned integers with the head room that the cache class would give itself; decoders in
other threads write into plain memory; and at the end, on the calling thread, the bits
are seen as the dtype that they are. No host view outlives :meth:`Buffers.release`: one
that did would make the first decode step copy the whole array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvstore.format.groups import Segment
from kvstore.format.layers import LayerRecord, leaves
from kvstore.format.manifest import Manifest
from kvstore.format.tensors import DTYPE_SIZES, UintArray, uint_dtype
from kvstore.runtime.cut import Cut, cut_layer, cut_layers
from kvstore.runtime.kinds import objects, place
from kvstore.runtime.kinds import restore as restore_layers
from kvstore.runtime.kinds_kv import CUT_MARK
from kvstore.runtime.registry import DTYPES, UINTS, Continuation
from kvstore.runtime.rows import Rows
from kvstore.runtime.untouched import untouched

__all__ = ["Buffers", "Need", "Target", "needs"]



@dataclass(frozen=True, slots=True)
class Need:
    """One array to be made: where it belongs, its dtype, its shape with head room, and its rows' places."""

    path: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_SIZES[self.dtype]


def needs(manifest: Manifest, tokens: int, templates: Sequence[Any] | None = None) -> tuple[Need, ...]:
    """The arrays that an entry needs at ``tokens``, in cache order; nothing is made.

    Raises:
        InvalidError: CACHE_STATE_INVALID for a continuation that cannot be.
        IncompatibleError: CUT_NOT_POSSIBLE where the installed release of mlx_lm could not go on from there.
    """
    by_path = {} if templates is None else dict(objects(templates))
    found: list[Need] = []
    for path, layer in manifest.leaves.items():
        # What was said of the state where it was saved says nothing of an earlier one.
        continuation = dict(manifest.continuation) if layer.offset == tokens else {}
        found += _leaf_needs(path, cut_layer(layer, tokens), by_path.get(path), continuation)
    return tuple(found)


def _leaf_needs(path: str, cut: Cut, template: Any, continuation: Continuation) -> list[Need]:
    if cut.record.never_written:
        return []
    placement = place(cut.placed, template, continuation)
    found = []
    for role, tensor in cut.record.tensors.items():
        axis, shape = cut.record.axis(role), tensor.shape
        if axis is not None and placement.capacity is not None:
            shape = (*shape[:axis], placement.capacity, *shape[axis + 1 :])
        found.append(Need(path, role, tensor.dtype, shape, axis, _head(placement.ranges, cut.rows)))
    return found


def _head(ranges: tuple[tuple[int, int], ...], rows: int) -> tuple[tuple[int, int], ...]:
    """The places of the first ``rows`` stored rows."""
    found = []
    for start, stop in ranges:
        taken = min(stop - start, rows)
        if taken:
            found.append((start, start + taken))
        rows -= taken
    return tuple(found)


@dataclass(slots=True)
class Target:
    """Where one payload is decoded to: live rows, or scratch for tensors whose rows do not lie together.

    Attributes:
        destinations: For each tensor of the payload a writable array of its stored shape.
        whole: Whether every row of the payload becomes a row of the restored cache.
    """

    destinations: dict[str, UintArray]
    whole: bool = True
    _scratch: dict[str, Rows] = field(default_factory=dict)
    _first: int = 0

    def finish(self) -> None:
        """Copy scratch to the places of its rows, once the payload is decoded whole."""
        for name, rows in self._scratch.items():
            rows.write(self._first, self.destinations[name])


class Buffers:
    """The arrays of one entry while they are filled. Make and release it on the thread that will use the cache."""

    def __init__(self, wanted: Sequence[Need]) -> None:
        """Make the arrays, unfilled."""
        made = untouched([(need.shape, UINTS[DTYPE_SIZES[need.dtype]]) for need in wanted])
        arrays = dict(zip(wanted, made, strict=True))
        self._arrays = arrays
        self._rows: dict[tuple[str, str], Rows] = {
            (need.path, need.role): Rows(np.array(array, copy=False), need.axis, need.ranges)
            for need, array in arrays.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, head room included."""
        return sum(need.nbytes for need in self._arrays)

    def target(self, paths: Sequence[str], layers: Mapping[str, LayerRecord], segment: Segment) -> Target | None:
        """Where the payload of one segment goes, or None where none of its rows is needed."""
        target = Target({}, _first=segment.first)
        needed = False
        for path in paths:
            for role, record in layers[path].tensors.items():
                rows, name = self._rows[path, role], f"{path}.{role}"
                needed = needed or rows.axis is None or segment.first < rows.count
                target.whole &= rows.axis is None or segment.first + segment.rows <= rows.count
                window = rows.window(segment.first, segment.rows)
                if window is None:
                    shape = list(record.shape)
                    shape[rows.axis or 0] = segment.rows
                    window = np.empty(shape, uint_dtype(record.dtype))
                    target._scratch[name] = rows  # noqa: SLF001 - made here
                target.destinations[name] = window
        return target if needed else None

    def clear_head_room(self) -> None:
        """Zero all rows that hold no token: fresh arrays may show memory that was freed before."""
        for rows in self._rows.values():
            rows.clear_rest()

    def release(
        self, layers: Sequence[LayerRecord], tokens: int, templates: Sequence[Any] | None = None
    ) -> list[Any]:
        """The live caches at ``tokens``; every host view is dropped, and this object is empty afterwards."""
        self._rows.clear()
        arrays: dict[str, dict[str, mx.array]] = {}
        while self._arrays:
            need, array = self._arrays.popitem()
            arrays.setdefault(need.path, {})[need.role] = _as(array, need.dtype)
        mx.eval([array for roles in arrays.values() for array in roles.values()])
        cuts = {path: cut_layer(layer, tokens) for path, layer in leaves(tuple(layers))}
        caches = restore_layers(cut_layers(layers, tokens), arrays, templates)
        for path, cache in objects(caches):
            if cuts[path].hole:
                setattr(cache, CUT_MARK, tokens)
        return caches


def _as(array: mx.array, dtype: str) -> mx.array:
    """The array's bits as ``dtype``; shares the memory."""
    wanted = DTYPES[dtype]
    return array if array.dtype == wanted else array.view(wanted)

"""A dense-Qwen3.5 cache in the profile's own layout, and the same state as caches that mlx_lm runs.

The profile's buffers and mlx_lm's arrays hold the same numbers in other orders:

===========================  ============================================  =====================================
the profile                  shape                                         mlx_lm
===========================  ============================================  =====================================
``k``, ``v``                 [1, kv heads, tokens, head size]              ``KVCache``, the same, tokens grow
``conv_state``               [channels, history, 1]                        ``ArraysCache`` slot 0, axes reversed
``recurrent``                [key size, value size, value heads, 1]        ``ArraysCache`` slot 1, axes reversed
===========================  ============================================  =====================================

A linear slot has each state twice. Whoever writes a new state writes it beside the
current one; the ping-pong flag says which of the two is current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.qwen35_config import Qwen35Config
from kvstore.format.qwen35_plan import FULL_ROLES, LINEAR_ROLES, Plan, make_plan
from kvstore.format.qwen35_receipt import BufferFacts, CacheFacts, DeviceFacts, FullFacts, LinearFacts

__all__ = ["FullSlot", "LinearSlot", "TeacherCache"]

_NAMES: Final = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}


@dataclass(slots=True)
class FullSlot:
    """A layer with full attention: its rank, tokens held, and the buffers ``k`` and ``v``."""

    rank: int
    length: int
    arrays: tuple[mx.array, ...]


@dataclass(slots=True)
class LinearSlot:
    """A layer with linear attention: its rank, whether scratch is current, and its four buffers."""

    rank: int
    flipped: bool
    arrays: tuple[mx.array, ...]

    @property
    def current(self) -> tuple[mx.array, mx.array]:
        """The current convolution state and the current recurrent state."""
        conv, conv_scratch, recurrent, recurrent_scratch = self.arrays
        return (conv_scratch, recurrent_scratch) if self.flipped else (conv, recurrent)


class TeacherCache:
    """The cache of one sequence.

    Attributes:
        config: What it was planned from.
        max_sequence_tokens: Tokens that it has room for.
        slots: One for each layer, in order.
    """

    def __init__(self, config: Qwen35Config, max_sequence_tokens: int, slots: Sequence[FullSlot | LinearSlot]) -> None:
        self.config = config
        self.max_sequence_tokens = max_sequence_tokens
        self.slots = tuple(slots)

    @classmethod
    def fresh(cls, config: Qwen35Config, plan: Plan) -> TeacherCache:
        """Allocate every planned buffer, zeroed, on the default device.

        Raises:
            RuntimeError: from MLX, where it cannot.
        """
        remaining = iter(plan.records)
        slots: list[FullSlot | LinearSlot] = []
        for kind, rank in plan.slot_table:
            roles = FULL_ROLES if kind == "full" else LINEAR_ROLES
            arrays = tuple(mx.zeros(next(remaining).shape, mx.float32) for _ in roles)
            mx.eval(arrays)
            full = kind == "full"
            slots.append(FullSlot(rank, 0, arrays) if full else LinearSlot(rank, flipped=False, arrays=arrays))
        return cls(config, plan.max_sequence_tokens, slots)

    def reset(self) -> None:
        """Zero the state of the one sequence and begin anew.

        In new buffers: caches that :meth:`to_mlx_lm` handed out may share the old ones.
        """
        for slot in self.slots:
            slot.arrays = tuple(mx.zeros(array.shape, array.dtype) for array in slot.arrays)
            mx.eval(slot.arrays)
            if isinstance(slot, FullSlot):
                slot.length = 0
            else:
                slot.flipped = False

    def facts(self, device: DeviceFacts) -> CacheFacts:
        """What can be seen of it, for validation."""
        names = [
            [f"blk.{layer}.base_text_cache.{role}" for role in (FULL_ROLES if _is_full(slot) else LINEAR_ROLES)]
            for layer, slot in enumerate(self.slots)
        ]
        found = [
            tuple(_buffer(name, array, device) for name, array in zip(roles, slot.arrays, strict=True))
            for roles, slot in zip(names, self.slots, strict=True)
        ]
        pairs = list(zip(self.slots, found, strict=True))
        return CacheFacts(
            max_sequence_tokens=self.max_sequence_tokens,
            n_sequences=1,
            tq_kv_active=False,
            mtp_slot_allocated=False,
            linear_capture_allocated=False,
            slot_table=tuple(("full" if _is_full(slot) else "linear", slot.rank) for slot in self.slots),
            full=tuple(FullFacts(s.rank, (s.length,), False, *b) for s, b in pairs if isinstance(s, FullSlot)),  # noqa: FBT003 - in the order of the facts
            linear=tuple(LinearFacts(s.rank, (s.flipped,), 0, 0, b) for s, b in pairs if isinstance(s, LinearSlot)),
            payload_bytes=sum(array.nbytes for slot in self.slots for array in slot.arrays),
        )

    def to_mlx_lm(self) -> list[Any]:
        """The same state as the caches that ``mlx_lm.models.qwen3_5`` makes for itself.

        They share memory with this object until one side writes; drop this object first, and nothing is copied.

        Raises:
            UnsupportedError: CACHE_FILE_EXPORT for a convolution of width 1, whose state mlx_lm does not keep.
        """
        if self.config.linear_conv_kernel_dim < 2:
            raise fail(
                "CACHE_FILE_EXPORT", "mlx_lm keeps no state for a convolution of width 1", expected="at least 2",
                found=self.config.linear_conv_kernel_dim,
            )  # fmt: skip
        return [_full_to_mlx_lm(slot) if isinstance(slot, FullSlot) else _linear_to_mlx_lm(slot) for slot in self.slots]

    @classmethod
    def from_mlx_lm(cls, caches: Sequence[Any], config: Qwen35Config, max_sequence_tokens: int) -> TeacherCache:
        """The state of caches that ``mlx_lm.models.qwen3_5`` has filled, in new buffers of the profile's layout.

        Shapes and dtypes are taken as they are: :func:`kvstore.runtime.prepare.check_captured` holds them against the
        plan.

        Raises:
            InvalidError: PLAN_* codes; PREPARED_CACHE_INVALID where number, classes or lengths of the caches cannot be
                those of the schedule.
        """
        plan = make_plan(config, max_sequence_tokens)
        if len(caches) != len(plan.slots):
            raise _misfit("the number of caches", len(plan.slots), len(caches))
        slots = [
            _full_from_mlx_lm(cache, rank, plan, f"layer {layer}")
            if kind == "full"
            else _linear_from_mlx_lm(cache, rank, plan, f"layer {layer}")
            for layer, (cache, (kind, rank)) in enumerate(zip(caches, plan.slot_table, strict=True))
        ]
        lengths = {slot.length for slot in slots if isinstance(slot, FullSlot)}
        if len(lengths) > 1:
            raise _misfit("the current lengths of the layers", "one length", sorted(lengths))
        return cls(config, max_sequence_tokens, slots)


def _is_full(slot: FullSlot | LinearSlot) -> bool:
    return isinstance(slot, FullSlot)


def _buffer(role: str, array: mx.array, device: DeviceFacts) -> BufferFacts:
    """What the host sees of a buffer. That it begins at 0 and is in no file holds because this module made it."""
    view = np.array(array, copy=False) if array.dtype == mx.float32 else np.array(array.view(mx.uint16), copy=False)
    span = sum(stride * (extent - 1) for stride, extent in zip(view.strides, view.shape, strict=True)) + view.itemsize
    return BufferFacts(
        role=role, shape=tuple(array.shape), dtype=_NAMES.get(array.dtype, str(array.dtype)), byte_len=array.nbytes,
        data_len=span if array.size else 0, byte_offset=0, file_backed=False, cpu_writable=view.flags.writeable,
        registry_id=device.registry_id,
    )  # fmt: skip


def _full_to_mlx_lm(slot: FullSlot) -> Any:
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    # New array objects: an update of the cache must not reach into this slot's.
    cache.keys, cache.values = (mx.contiguous(array) for array in slot.arrays)
    cache.offset = slot.length
    return cache


def _linear_to_mlx_lm(slot: LinearSlot) -> Any:
    from mlx_lm.models.cache import ArraysCache

    cache = ArraysCache(2)
    for index, array in enumerate(slot.current):
        cache[index] = mx.contiguous(array.transpose())
    mx.eval(cache.cache)
    return cache


def _full_from_mlx_lm(cache: Any, rank: int, plan: Plan, where: str) -> FullSlot:
    from mlx_lm.models.cache import KVCache

    if type(cache) is not KVCache:
        raise _misfit(f"the cache of {where}", "KVCache", type(cache).__name__)
    if cache.offset > plan.max_sequence_tokens:
        raise _misfit(f"the current length of {where}", f"at most {plan.max_sequence_tokens}", cache.offset)
    if cache.keys is None:
        arrays = tuple(mx.zeros(_shape(plan, "k"), mx.float32) for _ in FULL_ROLES)
    else:
        arrays = tuple(_with_room(a, cache.offset, plan.max_sequence_tokens) for a in (cache.keys, cache.values))
    mx.eval(arrays)
    return FullSlot(rank, cache.offset, arrays)


def _shape(plan: Plan, role: str) -> tuple[int, ...]:
    """The planned shape of a role; it is the same in all layers that have it."""
    return next(record.shape for record in plan.records if record.role.endswith(f".{role}"))


def _with_room(array: mx.array, rows: int, capacity: int) -> mx.array:
    """The first rows in a buffer of the planned length; the others are zero.

    Made contiguous by word: where there are no others, MLX hands out a view of the longer buffer.
    """
    rest = mx.zeros((*array.shape[:2], capacity - rows, *array.shape[3:]), array.dtype)
    return mx.contiguous(mx.concatenate([array[:, :, :rows], rest], axis=2))


def _linear_from_mlx_lm(cache: Any, rank: int, plan: Plan, where: str) -> LinearSlot:
    from mlx_lm.models.cache import ArraysCache

    if type(cache) is not ArraysCache or len(cache.cache) != 2:
        raise _misfit(f"the cache of {where}", "ArraysCache of 2 slots", type(cache).__name__)
    if cache.left_padding is not None or cache.lengths is not None:
        raise _misfit(f"the cache of {where}", "one sequence without padding", "padding or lengths")
    arrays: list[mx.array] = []
    for array, role in zip(cache.cache, ("conv_state", "recurrent"), strict=True):
        state = mx.zeros(_shape(plan, role), mx.float32) if array is None else mx.contiguous(array.transpose())
        arrays += [state, mx.zeros(state.shape, state.dtype)]
    mx.eval(arrays)
    return LinearSlot(rank, flipped=False, arrays=tuple(arrays))


def _misfit(what: str, expected: Any, found: Any) -> KVStoreError:
    return fail(
        "PREPARED_CACHE_INVALID", what, expected=expected, found=found,
        fix="Take the caches from a dense Qwen3.5 model that read one sequence.",
    )  # fmt: skip

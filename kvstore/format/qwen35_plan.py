"""The plan of profile ``dense_qwen35_source_teacher_base_text_f32_cache_v1``.

Before a reference run a hybrid cache is allocated fresh; the plan says, before any
allocation, exactly which buffers that will be. It is a pure function of the model's
config and of the number of tokens, in unsigned 64-bit arithmetic: what would not fit
into 64 bits is refused, although Python could go on.

The document has a form of its own: keys in declared order, compact, raw UTF-8, bare hex
digests. Byte for byte, other programs make the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvstore.errors import KVStoreError, fail
from kvstore.format.qwen35_config import Qwen35Config, u32

__all__ = [
    "DTYPE", "ELEMENT_BYTES", "FULL_ROLES", "LINEAR_ROLES", "MAX_LAYERS", "MAX_SEQUENCE_TOKENS", "MAX_TOTAL_BYTES",
    "PROFILE", "BufferRecord", "Plan", "add", "compact", "make_plan", "make_record", "mul", "records_of",
    "require_count",
]  # fmt: skip

PROFILE: Final = "dense_qwen35_source_teacher_base_text_f32_cache_v1"
SCHEMA_VERSION: Final = 1
DTYPE: Final = "f32"
ELEMENT_BYTES: Final = 4
MAX_SEQUENCE_TOKENS: Final = 4096
MAX_LAYERS: Final = 256
MAX_TOTAL_BYTES: Final = 2**31
U64_MAX: Final = 2**64 - 1
FULL_ROLES: Final = ("k", "v")
LINEAR_ROLES: Final = ("conv_state", "conv_state_scratch", "recurrent", "recurrent_scratch")
_DIMENSIONS: Final = (
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip

Slot = Literal["full", "linear"]


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """One buffer: role, extents, dtype (always ``f32``), and size in bytes."""

    role: str
    shape: tuple[int, ...]
    dtype: str
    byte_len: int

    def to_json(self) -> dict[str, Any]:
        """The JSON object, keys in declared order."""
        return {"role": self.role, "shape": list(self.shape), "dtype": self.dtype, "byte_len": self.byte_len}


@dataclass(frozen=True)
class Plan:
    """What will be allocated.

    Attributes:
        slots: Kind of each layer, in order.
        records: Every buffer, in layer order.
        full_bytes: Bytes of all keys and values.
        linear_bytes: Bytes of all states, scratch included.
        total_bytes: Both.
    """

    max_sequence_tokens: int
    slots: tuple[Slot, ...]
    records: tuple[BufferRecord, ...]
    full_bytes: int
    linear_bytes: int
    total_bytes: int

    @property
    def full_slots(self) -> int:
        """Layers with full attention."""
        return self.slots.count("full")

    @property
    def linear_slots(self) -> int:
        """Layers with linear attention."""
        return self.slots.count("linear")

    @property
    def slot_table(self) -> tuple[tuple[Slot, int], ...]:
        """For each layer its kind, and its rank among the layers of that kind."""
        return tuple((kind, self.slots[:index].count(kind)) for index, kind in enumerate(self.slots))

    @property
    def layout_sha256(self) -> str:
        """Bare hex SHA-256 of the document's compact form without this field."""
        return hashlib.sha256(compact(self._body())).hexdigest()

    @property
    def data(self) -> bytes:
        """The document's bytes."""
        return compact(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The document, keys in declared order."""
        return {**self._body(), "layout_sha256": self.layout_sha256}

    def _body(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "profile": PROFILE,
            "max_sequence_tokens": self.max_sequence_tokens,
            "n_sequences": 1,
            "full_attention_slots": self.full_slots,
            "linear_attention_slots": self.linear_slots,
            "buffer_records": [record.to_json() for record in self.records],
            "base_full_attention_cache_bytes": self.full_bytes,
            "base_linear_attention_state_bytes": self.linear_bytes,
            "total_payload_bytes": self.total_bytes,
            "mtp_slot_allocated": False,
            "tq_kv_active": False,
            "linear_capture_allocated": False,
        }


def make_plan(config: Qwen35Config, max_sequence_tokens: int) -> Plan:
    """Plan a cache; the first rule that fails, in this order, decides the refusal.

    Raises:
        InvalidError: PLAN_CONFIG_INVALID where the count is no unsigned 32-bit integer, then PLAN_SEQUENCE,
            PLAN_NOT_DENSE, PLAN_SCHEDULE, PLAN_DIMENSIONS, PLAN_CHANNELS_OVERFLOW, PLAN_RECORD_SHAPE,
            PLAN_RECORD_OVERFLOW, PLAN_SUM_OVERFLOW, PLAN_RECORD_COUNT, PLAN_KIND_MISSING, PLAN_TOTAL_OVERFLOW,
            PLAN_TOTAL_LIMIT.
    """
    tokens = u32(max_sequence_tokens, "max_sequence_tokens")
    _check_sequence(config, tokens)
    _check_dense(config)
    _check_schedule(config)
    _check_dimensions(config)
    slots: tuple[Slot, ...] = tuple(
        "full" if name == "full_attention" else "linear" for name in config.layer_types
    )
    records, sums = records_of(config, tokens, slots, channels_of(config))
    require_count(records, slots)
    for kind in ("full", "linear"):
        if kind not in slots:
            raise fail("PLAN_KIND_MISSING", f"the schedule has no {kind} attention layer", expected="both kinds")
    total = add(sums["full"], sums["linear"], "PLAN_TOTAL_OVERFLOW", "the bytes of all buffers")
    if total > MAX_TOTAL_BYTES:
        raise fail(
            "PLAN_TOTAL_LIMIT", "the bytes of all buffers", expected=f"at most {MAX_TOTAL_BYTES}", found=total,
            fix="Plan fewer tokens.",
        )  # fmt: skip
    return Plan(tokens, slots, records, sums["full"], sums["linear"], total)


def channels_of(config: Qwen35Config) -> int:
    """Channels of the convolution: those of queries and keys, and those of values. Raises PLAN_CHANNELS_OVERFLOW."""
    code, what = "PLAN_CHANNELS_OVERFLOW", "the number of convolution channels"
    keys = mul((2, config.linear_num_key_heads, config.linear_key_head_dim), code, what)
    return add(keys, mul((config.linear_num_value_heads, config.linear_value_head_dim), code, what), code, what)


def records_of(
    config: Qwen35Config, tokens: int, slots: Sequence[Slot], channels: int
) -> tuple[tuple[BufferRecord, ...], dict[Slot, int]]:
    """All records in layer order, and their bytes by kind.

    Raises:
        InvalidError: PLAN_RECORD_SHAPE, PLAN_RECORD_OVERFLOW, PLAN_SUM_OVERFLOW.
    """
    kv = (1, config.num_key_value_heads, tokens, config.head_dim)
    conv = (channels, max(config.linear_conv_kernel_dim - 1, 1), 1)
    state = (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_num_value_heads, 1)
    shapes: dict[Slot, tuple[tuple[str, tuple[int, ...]], ...]] = {
        "full": tuple((role, kv) for role in FULL_ROLES),
        "linear": tuple(zip(LINEAR_ROLES, (conv, conv, state, state), strict=True)),
    }
    records: list[BufferRecord] = []
    sums: dict[Slot, int] = {"full": 0, "linear": 0}
    for layer, kind in enumerate(slots):
        for role, shape in shapes[kind]:
            record = make_record(f"blk.{layer}.base_text_cache.{role}", shape)
            records.append(record)
            sums[kind] = add(
                sums[kind], record.byte_len, "PLAN_SUM_OVERFLOW", f"the bytes of all {kind} attention buffers"
            )
    return tuple(records), sums


def make_record(role: str, shape: tuple[int, ...]) -> BufferRecord:
    """One record. Raises PLAN_RECORD_SHAPE, PLAN_RECORD_OVERFLOW."""
    if not shape or 0 in shape:
        raise fail("PLAN_RECORD_SHAPE", f"{role}: shape", expected="extents, none of them 0", found=list(shape))
    size = mul((*shape, ELEMENT_BYTES), "PLAN_RECORD_OVERFLOW", f"the bytes of {role}")
    return BufferRecord(role, shape, DTYPE, size)


def require_count(records: Sequence[BufferRecord], slots: Sequence[Slot]) -> None:
    """As many records as the schedule asks for. Raises PLAN_RECORD_COUNT."""
    expected = len(FULL_ROLES) * slots.count("full") + len(LINEAR_ROLES) * slots.count("linear")
    if len(records) != expected:
        raise fail("PLAN_RECORD_COUNT", "the number of buffers", expected=expected, found=len(records))


def mul(factors: Iterable[int], code: str, what: str) -> int:
    """A product that must fit into 64 bits at every step; raises ``code``."""
    result = 1
    for factor in factors:
        result = _u64(result * factor, code, what)
    return result


def add(left: int, right: int, code: str, what: str) -> int:
    """A sum that must fit into 64 bits; raises ``code``."""
    return _u64(left + right, code, what)


def compact(document: dict[str, Any]) -> bytes:
    """A document of this profile as bytes: no spaces, raw UTF-8, keys as they stand."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _u64(value: int, code: str, what: str) -> int:
    if value > U64_MAX:
        raise fail(code, f"{what} overflow", expected=f"at most {U64_MAX}", found=value)
    return value


def _check_sequence(config: Qwen35Config, tokens: int) -> None:
    if not 1 <= tokens <= MAX_SEQUENCE_TOKENS:
        raise fail("PLAN_SEQUENCE", "max_sequence_tokens", expected=f"1 to {MAX_SEQUENCE_TOKENS}", found=tokens)
    if tokens > config.max_position_embeddings:
        raise fail(
            "PLAN_SEQUENCE", "max_sequence_tokens is above the model's max_position_embeddings",
            expected=f"at most {config.max_position_embeddings}", found=tokens,
        )  # fmt: skip


def _check_dense(config: Qwen35Config) -> None:
    if config.num_experts:
        raise _not_dense("a mixture of experts", "no experts", config.num_experts)
    if config.intermediate_size is None:
        raise _not_dense("intermediate_size", "a width", None)
    if config.variant != "dense":
        raise _not_dense("variant", "dense", config.variant)


def _check_schedule(config: Qwen35Config) -> None:
    count, listed = config.num_hidden_layers, len(config.layer_types)
    if not 1 <= count <= MAX_LAYERS:
        raise fail("PLAN_SCHEDULE", "num_hidden_layers", expected=f"1 to {MAX_LAYERS}", found=count)
    if count != listed:
        raise fail("PLAN_SCHEDULE", "the length of layer_types", expected=count, found=listed)


def _check_dimensions(config: Qwen35Config) -> None:
    for name in _DIMENSIONS:
        if getattr(config, name) == 0:
            raise fail("PLAN_DIMENSIONS", name, expected="at least 1", found=0)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values < keys:
        raise fail(
            "PLAN_DIMENSIONS", "linear_num_value_heads are fewer than linear_num_key_heads",
            expected=f"at least {keys}", found=values,
        )  # fmt: skip
    if values % keys:
        raise fail(
            "PLAN_DIMENSIONS", "linear_num_value_heads is no multiple of linear_num_key_heads",
            expected=f"a multiple of {keys}", found=values,
        )  # fmt: skip


def _not_dense(what: str, expected: str, found: Any) -> KVStoreError:
    return fail(
        "PLAN_NOT_DENSE", f"the model is not dense: {what}", expected=expected, found=found,
        fix="This profile is for dense Qwen3.5 text models.",
    )  # fmt: skip

"""What a prepared dense-Qwen3.5 cache is, as plain facts, and the receipt that the profile issues for it.

The receipt is issued only where the device has a registry id. Like the plan it has a
form of its own: keys in declared order, compact, bare hex digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstore.errors import fail
from kvstore.format.qwen35_plan import PROFILE, SCHEMA_VERSION, U64_MAX, Plan, Slot, compact

__all__ = [
    "BufferFacts", "CacheFacts", "DeviceFacts", "FullFacts", "LinearFacts", "ProfileReceipt", "make_receipt",
    "receipt_sha256",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device that holds the buffers; ``registry_id`` is None where the system tells none."""

    name: str
    registry_id: int | None


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """One buffer as it is. A property that the backend does not show is None.

    Attributes:
        shape: The actual extents.
        byte_len: Bytes of the elements.
        data_len: Bytes that the elements span in memory; more where there is padding.
        registry_id: Of the device that the buffer is on.
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    byte_len: int
    data_len: int
    byte_offset: int
    file_backed: bool
    cpu_writable: bool
    registry_id: int | None


@dataclass(frozen=True, slots=True)
class FullFacts:
    """A full-attention slot: its rank, the current length of each sequence, and its two buffers."""

    rank: int
    lengths: tuple[int, ...]
    tq_kv: bool
    k: BufferFacts | None
    v: BufferFacts | None

    @property
    def buffers(self) -> tuple[BufferFacts | None, ...]:
        """Keys, then values."""
        return (self.k, self.v)


@dataclass(frozen=True, slots=True)
class LinearFacts:
    """A linear-attention slot.

    Attributes:
        rank: Its rank among the linear slots.
        ping_pong: One flag for each sequence: whether scratch and state have changed places.
        captured_states: States kept aside for later inspection; none in a fresh cache.
        captured_conv_states: The same of the convolution.
        buffers: conv_state, conv_state_scratch, recurrent, recurrent_scratch.
    """

    rank: int
    ping_pong: tuple[bool, ...]
    captured_states: int
    captured_conv_states: int
    buffers: tuple[BufferFacts | None, ...]


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """A prepared cache.

    Attributes:
        slot_table: For each layer its kind and its rank within that kind.
        payload_bytes: The cache's own count of its bytes.
    """

    max_sequence_tokens: int
    n_sequences: int
    tq_kv_active: bool
    mtp_slot_allocated: bool
    linear_capture_allocated: bool
    slot_table: tuple[tuple[Slot, int], ...]
    full: tuple[FullFacts, ...]
    linear: tuple[LinearFacts, ...]
    payload_bytes: int

    def buffers(self) -> Iterator[BufferFacts | None]:
        """Every buffer in layer order; the slot table must have been checked."""
        for kind, rank in self.slot_table:
            yield from self.full[rank].buffers if kind == "full" else self.linear[rank].buffers


@dataclass(frozen=True, slots=True)
class ProfileReceipt:
    """The profile's receipt; ``sha256`` is over its other fields, with the plan's digest instead of the plan."""

    schema_version: int
    profile: str
    plan: Plan
    device_name: str
    device_registry_id: int
    actual_payload_bytes: int
    fresh_semantic_state: bool
    sha256: str

    @property
    def data(self) -> bytes:
        """The document's bytes."""
        return compact(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The document, keys in declared order."""
        return {
            "schema_version": self.schema_version,
            "profile": self.profile,
            "plan": self.plan.to_json(),
            "device_name": self.device_name,
            "device_registry_id": self.device_registry_id,
            "actual_payload_bytes": self.actual_payload_bytes,
            "fresh_semantic_state": self.fresh_semantic_state,
            "receipt_sha256": self.sha256,
        }


def receipt_sha256(
    *, schema_version: int, profile: str, layout_sha256: str, device_name: str, device_registry_id: int,
    actual_payload_bytes: int, fresh_semantic_state: bool,
) -> str:  # fmt: skip
    """The receipt's own digest, bare hex."""
    return hashlib.sha256(
        compact({
            "schema_version": schema_version,
            "profile": profile,
            "layout_sha256": layout_sha256,
            "device_name": device_name,
            "device_registry_id": device_registry_id,
            "actual_payload_bytes": actual_payload_bytes,
            "fresh_semantic_state": fresh_semantic_state,
        })
    ).hexdigest()  # fmt: skip


def make_receipt(plan: Plan, device: DeviceFacts) -> ProfileReceipt:
    """The receipt of a cache that was just allocated and reset; its byte count is the plan's.

    Raises:
        UnsupportedError: PREPARED_NO_REGISTRY_ID, where the device's is not known.
    """
    identity = device.registry_id
    if identity is None or not 0 <= identity <= U64_MAX:
        raise fail(
            "PREPARED_NO_REGISTRY_ID", f"device {device.name!r}", expected="an unsigned 64-bit registry id",
            found=identity, fix="Issue this profile's receipt on Metal; elsewhere the load receipt says what is known.",
        )  # fmt: skip
    digest = receipt_sha256(
        schema_version=SCHEMA_VERSION, profile=PROFILE, layout_sha256=plan.layout_sha256, device_name=device.name,
        device_registry_id=identity, actual_payload_bytes=plan.total_bytes, fresh_semantic_state=True,
    )  # fmt: skip
    return ProfileReceipt(SCHEMA_VERSION, PROFILE, plan, device.name, identity, plan.total_bytes, True, digest)  # noqa: FBT003 - the document's own order

"""Does a prepared dense-Qwen3.5 cache hold what its plan and its receipt say?

The plan is derived again, from the config and from the cache's *own* length, and
everything is held against that. Each condition has its own message. What a backend
does not show (a buffer's device id, where nobody tells one) is reported as not
observable, never passed as verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.qwen35_config import Qwen35Config
from kvstore.format.qwen35_plan import (
    DTYPE,
    ELEMENT_BYTES,
    PROFILE,
    SCHEMA_VERSION,
    BufferRecord,
    Plan,
    add,
    make_plan,
    mul,
)
from kvstore.format.qwen35_receipt import BufferFacts, CacheFacts, DeviceFacts, ProfileReceipt, receipt_sha256

__all__ = ["validate", "validate_layout"]

VERIFIED: Final = "verified"
NOT_OBSERVABLE: Final = "not observable"
_STALE: Final = "PREPARED_NOT_FRESH"


def validate(
    config: Qwen35Config, cache: CacheFacts, device: DeviceFacts, receipt: ProfileReceipt | None
) -> dict[str, str]:
    """Check a prepared cache that nobody has used yet.

    Args:
        receipt: The profile's receipt, or None where the device has no registry id and so none could be issued.

    Returns:
        Each check, ``verified`` or ``not observable``.

    Raises:
        InvalidError: the PLAN_* codes, then PREPARED_RECEIPT_INVALID, PREPARED_CACHE_INVALID, PREPARED_NOT_FRESH,
            PREPARED_BUFFER_INVALID, PREPARED_BUFFER_SIZE, PREPARED_RECORDS_MISMATCH, PREPARED_TOTAL_MISMATCH.
    """
    plan = make_plan(config, cache.max_sequence_tokens)
    if receipt is not None:
        _check_receipt(receipt, plan, device)
    _check_cache(cache, plan)
    _check_fresh(cache)
    _check_buffers(cache, plan, device)
    _check_totals(cache, plan.total_bytes if receipt is None else receipt.actual_payload_bytes)
    known = NOT_OBSERVABLE if device.registry_id is None else VERIFIED
    return {
        "plan": VERIFIED, "profile_receipt": NOT_OBSERVABLE if receipt is None else VERIFIED, "slots": VERIFIED,
        "fresh": VERIFIED, "buffers": VERIFIED, "buffer_device": known, "records": VERIFIED, "totals": VERIFIED,
    }  # fmt: skip


def validate_layout(config: Qwen35Config, cache: CacheFacts, device: DeviceFacts) -> Plan:
    """Check a cache that may have been used: everything but the receipt and the freshness. Returns its plan.

    Raises:
        InvalidError: as :func:`validate`, without PREPARED_RECEIPT_INVALID and PREPARED_NOT_FRESH.
    """
    plan = make_plan(config, cache.max_sequence_tokens)
    _check_cache(cache, plan)
    _check_buffers(cache, plan, device)
    _check_totals(cache, plan.total_bytes)
    return plan


def _check_receipt(receipt: ProfileReceipt, plan: Plan, device: DeviceFacts) -> None:
    pairs: Mapping[str, tuple[Any, Any]] = {
        "schema_version": (SCHEMA_VERSION, receipt.schema_version),
        "profile": (PROFILE, receipt.profile),
        "plan": (plan.layout_sha256, receipt.plan.layout_sha256),
        "device_name": (device.name, receipt.device_name),
        "device_registry_id": (device.registry_id, receipt.device_registry_id),
        "actual_payload_bytes": (plan.total_bytes, receipt.actual_payload_bytes),
        "fresh_semantic_state": (True, receipt.fresh_semantic_state),
    }
    for name, (expected, found) in pairs.items():
        _require(f"the receipt's {name}", expected, found, "PREPARED_RECEIPT_INVALID")
    if receipt.plan != plan:
        raise fail("PREPARED_RECEIPT_INVALID", "the receipt's plan is another one of the same digest")
    digest = receipt_sha256(
        schema_version=receipt.schema_version, profile=receipt.profile, layout_sha256=receipt.plan.layout_sha256,
        device_name=receipt.device_name, device_registry_id=receipt.device_registry_id,
        actual_payload_bytes=receipt.actual_payload_bytes, fresh_semantic_state=receipt.fresh_semantic_state,
    )  # fmt: skip
    _require("the receipt's receipt_sha256", digest, receipt.sha256, "PREPARED_RECEIPT_INVALID")


def _check_cache(cache: CacheFacts, plan: Plan) -> None:
    """Counts and flags. The cache's length is the plan's, which was derived from it."""
    _require("the number of sequences", 1, cache.n_sequences)
    _forbid("quantized keys and values in the cache", cache.tq_kv_active)
    _forbid("a multi-token-prediction slot", cache.mtp_slot_allocated)
    _forbid("linear-state capture in the cache", cache.linear_capture_allocated)
    _require("the number of full attention slots", plan.full_slots, len(cache.full))
    _require("the number of linear attention slots", plan.linear_slots, len(cache.linear))
    _require("the length of the slot table", len(plan.slots), len(cache.slot_table))
    for layer, (expected, found) in enumerate(zip(plan.slot_table, cache.slot_table, strict=True)):
        _require(f"the kind of layer {layer}", expected[0], found[0])
        _require(f"the rank of layer {layer} within its kind", expected[1], found[1])
    for rank, full in enumerate(cache.full):
        _require(f"the rank of full attention slot {rank}", rank, full.rank)
        _forbid(f"quantized keys and values in full attention slot {rank}", full.tq_kv)
    for rank, linear in enumerate(cache.linear):
        _require(f"the rank of linear attention slot {rank}", rank, linear.rank)
        _require(f"captured states in linear attention slot {rank}", 0, linear.captured_states)
        _require(f"captured convolution states in linear attention slot {rank}", 0, linear.captured_conv_states)


def _check_fresh(cache: CacheFacts) -> None:
    for rank, full in enumerate(cache.full):
        _require(f"the number of current lengths of full attention slot {rank}", 1, len(full.lengths), _STALE)
        _require(f"the current length of full attention slot {rank}", 0, full.lengths[0], _STALE)
    for rank, linear in enumerate(cache.linear):
        _require(f"the number of ping-pong flags of linear attention slot {rank}", 1, len(linear.ping_pong), _STALE)
        _forbid(f"the ping-pong flag of linear attention slot {rank}", linear.ping_pong[0], _STALE)


def _check_buffers(cache: CacheFacts, plan: Plan, device: DeviceFacts) -> None:
    found = list(_present(cache, plan))
    for buffer in found:
        _check_buffer(buffer, device)
    for buffer in found:
        size = mul((*buffer.shape, ELEMENT_BYTES), "PREPARED_BUFFER_SIZE", f"the bytes of {buffer.role}")
        _require(f"{buffer.role}: bytes, for its shape {list(buffer.shape)}", size, buffer.byte_len,
                 "PREPARED_BUFFER_SIZE")  # fmt: skip
    actual = [BufferRecord(buffer.role, buffer.shape, buffer.dtype, buffer.byte_len) for buffer in found]
    for index, (planned, record) in enumerate(zip(plan.records, actual, strict=True)):
        _require(f"buffer {index}", planned.to_json(), record.to_json(), "PREPARED_RECORDS_MISMATCH")


def _present(cache: CacheFacts, plan: Plan) -> Iterator[BufferFacts]:
    """The buffers, one for each record of the plan."""
    buffers = list(cache.buffers())
    _require("the number of buffers", len(plan.records), len(buffers), "PREPARED_RECORDS_MISMATCH")
    for record, buffer in zip(plan.records, buffers, strict=True):
        if buffer is None:
            raise fail("PREPARED_BUFFER_INVALID", f"{record.role} is absent", expected="a buffer")
        yield buffer


def _check_buffer(buffer: BufferFacts, device: DeviceFacts) -> None:
    pairs: Mapping[str, tuple[Any, Any]] = {
        "dtype": (DTYPE, buffer.dtype),
        "bytes of its data": (buffer.byte_len, buffer.data_len),
        "byte offset": (0, buffer.byte_offset),
        "backed by a file": (False, buffer.file_backed),
        "writable by the CPU": (True, buffer.cpu_writable),
        "registry id of its device": (device.registry_id, buffer.registry_id),
    }
    for what, (expected, found) in pairs.items():
        _require(f"{buffer.role}: {what}", expected, found, "PREPARED_BUFFER_INVALID")


def _check_totals(cache: CacheFacts, expected: int) -> None:
    total = 0
    for buffer in cache.buffers():
        size = 0 if buffer is None else buffer.byte_len
        total = add(total, size, "PREPARED_TOTAL_MISMATCH", "the bytes of all buffers")
    _require("the bytes of all buffers", expected, total, "PREPARED_TOTAL_MISMATCH")
    _require("the cache's own count of its bytes", expected, cache.payload_bytes, "PREPARED_TOTAL_MISMATCH")


def _forbid(what: str, found: object, code: str = "PREPARED_CACHE_INVALID") -> None:
    """Exactly false: a number that is falsy is not the flag that was meant."""
    if found is not False:
        raise _wrong(code, what, expected=False, found=found)


def _require(what: str, expected: Any, found: Any, code: str = "PREPARED_CACHE_INVALID") -> None:
    if type(expected) is not type(found) or expected != found:
        raise _wrong(code, what, expected=expected, found=found)


def _wrong(code: str, what: str, *, expected: Any, found: Any) -> KVStoreError:
    return fail(code, what, expected=str(expected), found=str(found), fix="Prepare the cache anew.")

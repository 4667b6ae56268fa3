"""Validation of a prepared cache: each condition broken by itself, each with its own message."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import KVStoreError
from kvstore.format.qwen35_config import parse_qwen35_config
from kvstore.format.qwen35_plan import Plan, make_plan
from kvstore.format.qwen35_receipt import (
    BufferFacts,
    CacheFacts,
    DeviceFacts,
    FullFacts,
    LinearFacts,
    ProfileReceipt,
    make_receipt,
    receipt_sha256,
)
from kvstore.format.qwen35_validate import validate, validate_layout
from tests.format.test_qwen35_plan import FLAT

CONFIG = parse_qwen35_config({**FLAT, "full_attention_interval": 2})
PLAN = make_plan(CONFIG, 16)
DEVICE = DeviceFacts("Some GPU é", 2**63 + 5)
RECEIPT = make_receipt(PLAN, DEVICE)


def facts(plan: Plan = PLAN, device: DeviceFacts = DEVICE) -> CacheFacts:
    records = iter(plan.records)

    def buffer() -> BufferFacts:
        record = next(records)
        return BufferFacts(
            record.role, record.shape, "f32", record.byte_len, record.byte_len, 0, False, True, device.registry_id
        )

    full, linear = [], []
    for kind, rank in plan.slot_table:
        if kind == "full":
            full.append(FullFacts(rank, (0,), False, buffer(), buffer()))
        else:
            linear.append(LinearFacts(rank, (False,), 0, 0, tuple(buffer() for _ in range(4))))
    return CacheFacts(
        plan.max_sequence_tokens, 1, False, False, False, plan.slot_table, tuple(full), tuple(linear), plan.total_bytes
    )


CACHE = facts()


def at_full(**changes: Any) -> CacheFacts:
    return replace(CACHE, full=(CACHE.full[0], replace(CACHE.full[1], **changes)))


def at_linear(**changes: Any) -> CacheFacts:
    return replace(CACHE, linear=(replace(CACHE.linear[0], **changes), CACHE.linear[1]))


def at_k(**changes: Any) -> CacheFacts:
    assert CACHE.full[1].k is not None
    return at_full(k=replace(CACHE.full[1].k, **changes))


def at_state(**changes: Any) -> CacheFacts:
    buffers = list(CACHE.linear[0].buffers)
    assert buffers[2] is not None
    buffers[2] = replace(buffers[2], **changes)
    return at_linear(buffers=tuple(buffers))


def test_a_sound_cache() -> None:
    checks = validate(CONFIG, CACHE, DEVICE, RECEIPT)
    assert set(checks.values()) == {"verified"}
    assert validate_layout(CONFIG, at_full(lengths=(7,)), DEVICE) == PLAN


def test_what_nobody_tells_is_not_verified() -> None:
    device = DeviceFacts("cpu", None)
    checks = validate(CONFIG, facts(device=device), device, None)
    assert {name for name, result in checks.items() if result == "not observable"} == {
        "profile_receipt", "buffer_device"
    }  # fmt: skip


def test_the_receipt_byte_for_byte() -> None:
    body = (
        '{"schema_version":1,"profile":"dense_qwen35_source_teacher_base_text_f32_cache_v1",'
        f'"layout_sha256":"{PLAN.layout_sha256}","device_name":"Some GPU é","device_registry_id":9223372036854775813,'
        f'"actual_payload_bytes":{PLAN.total_bytes},"fresh_semantic_state":true}}'
    )
    digest = hashlib.sha256(body.encode()).hexdigest()
    assert RECEIPT.sha256 == digest
    plan = PLAN.data.decode()
    assert RECEIPT.data.decode() == body.replace(
        f'"layout_sha256":"{PLAN.layout_sha256}",', f'"plan":{plan},', 1
    ).removesuffix("}") + f',"receipt_sha256":"{digest}"}}'
    assert json.loads(RECEIPT.data)["plan"]["layout_sha256"] == PLAN.layout_sha256


def test_the_digest_of_given_values() -> None:
    expected = hashlib.sha256(
        b'{"schema_version":7,"profile":"p","layout_sha256":"ab","device_name":"d","device_registry_id":0,'
        b'"actual_payload_bytes":18446744073709551615,"fresh_semantic_state":false}'
    ).hexdigest()
    assert expected == receipt_sha256(
        schema_version=7, profile="p", layout_sha256="ab", device_name="d", device_registry_id=0,
        actual_payload_bytes=2**64 - 1, fresh_semantic_state=False,
    )  # fmt: skip


@pytest.mark.parametrize("identity", [None, -1, 2**64])
def test_no_receipt_without_a_registry_id(identity: int | None) -> None:
    with pytest.raises(KVStoreError) as caught:
        make_receipt(PLAN, DeviceFacts("cpu", identity))
    assert caught.value.code == "PREPARED_NO_REGISTRY_ID"


def forged(**changes: Any) -> ProfileReceipt:
    """A receipt with changed fields whose own digest is right again."""
    receipt = replace(RECEIPT, **changes)
    return replace(receipt, sha256=receipt_sha256(
        schema_version=receipt.schema_version, profile=receipt.profile, layout_sha256=receipt.plan.layout_sha256,
        device_name=receipt.device_name, device_registry_id=receipt.device_registry_id,
        actual_payload_bytes=receipt.actual_payload_bytes, fresh_semantic_state=receipt.fresh_semantic_state,
    ))  # fmt: skip


OTHER = make_plan(CONFIG, 17)
RECEIPTS: dict[str, tuple[ProfileReceipt, str]] = {
    "schema": (forged(schema_version=2), "schema_version"),
    "a schema that is true": (forged(schema_version=True), "schema_version"),
    "profile": (forged(profile="other"), "profile"),
    "plan": (forged(plan=OTHER), "plan"),
    "a plan with another order of layers": (
        forged(plan=replace(PLAN, slots=("full", "linear", "full", "linear"))), "another one of the same digest",
    ),
    "device name": (forged(device_name="Other GPU"), "device_name"),
    "device id": (forged(device_registry_id=1), "device_registry_id"),
    "bytes": (forged(actual_payload_bytes=PLAN.total_bytes + 4), "actual_payload_bytes"),
    "fresh": (forged(fresh_semantic_state=False), "fresh_semantic_state"),
    "digest": (replace(RECEIPT, sha256="0" * 64), "receipt_sha256"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECEIPTS)
def test_receipts_that_are_refused(name: str) -> None:
    receipt, text = RECEIPTS[name]
    with pytest.raises(KVStoreError, match=text) as caught:
        validate(CONFIG, CACHE, DEVICE, receipt)
    assert caught.value.code == "PREPARED_RECEIPT_INVALID"


STRUCTURE, FRESH, BUFFER = "PREPARED_CACHE_INVALID", "PREPARED_NOT_FRESH", "PREPARED_BUFFER_INVALID"
TABLE = CACHE.slot_table
CACHES: dict[str, tuple[CacheFacts, str, str]] = {
    "sequences": (replace(CACHE, n_sequences=2), STRUCTURE, "number of sequences"),
    "quantized": (replace(CACHE, tq_kv_active=True), STRUCTURE, "quantized keys and values in the cache"),
    "prediction": (replace(CACHE, mtp_slot_allocated=True), STRUCTURE, "multi-token-prediction"),
    "capture": (replace(CACHE, linear_capture_allocated=True), STRUCTURE, "capture in the cache"),
    "full slots": (replace(CACHE, full=CACHE.full[:1]), STRUCTURE, "number of full"),
    "linear slots": (replace(CACHE, linear=CACHE.linear * 2), STRUCTURE, "number of linear"),
    "table length": (replace(CACHE, slot_table=TABLE[:-1]), STRUCTURE, "length of the slot table"),
    "kind": (replace(CACHE, slot_table=(("full", 0), *TABLE[1:])), STRUCTURE, "kind of layer 0"),
    "rank": (replace(CACHE, slot_table=(*TABLE[:3], ("full", 0))), STRUCTURE, "rank of layer 3"),
    "full rank": (at_full(rank=0), STRUCTURE, "rank of full attention slot 1"),
    "quantized layer": (at_full(tq_kv=True), STRUCTURE, "quantized keys and values in full attention slot 1"),
    "linear rank": (at_linear(rank=1), STRUCTURE, "rank of linear attention slot 0"),
    "states": (at_linear(captured_states=1), STRUCTURE, "captured states in linear attention slot 0"),
    "convolutions": (at_linear(captured_conv_states=1), STRUCTURE, "captured convolution states"),
    "no length": (at_full(lengths=()), FRESH, "number of current lengths"),
    "two lengths": (at_full(lengths=(0, 0)), FRESH, "number of current lengths"),
    "used": (at_full(lengths=(1,)), FRESH, "current length of full attention slot 1"),
    "no flag": (at_linear(ping_pong=()), FRESH, "number of ping-pong"),
    "swapped": (at_linear(ping_pong=(True,)), FRESH, "ping-pong flag of linear attention slot 0"),
    "a flag that is a number": (at_linear(ping_pong=(0,)), FRESH, "ping-pong flag of linear attention slot 0"),
    "no keys": (at_full(k=None), BUFFER, "blk.3.base_text_cache.k is absent"),
    "no values": (at_full(v=None), BUFFER, "blk.3.base_text_cache.v is absent"),
    "dtype": (at_k(dtype="bf16"), BUFFER, "blk.3.base_text_cache.k: dtype"),
    "padding": (at_k(data_len=PLAN.records[-2].byte_len + 4), BUFFER, "bytes of its data"),
    "offset": (at_k(byte_offset=4), BUFFER, "byte offset"),
    "a file": (at_state(file_backed=True), BUFFER, "backed by a file"),
    "read-only": (at_state(cpu_writable=False), BUFFER, "writable"),
    "another device": (at_state(registry_id=1), BUFFER, "registry id"),
    "unknown device": (at_state(registry_id=None), BUFFER, "registry id"),
    "bytes": (at_k(byte_len=8, data_len=8), "PREPARED_BUFFER_SIZE", "for its shape"),
    "an endless shape": (at_k(shape=(2**40, 2**40)), "PREPARED_BUFFER_SIZE", "overflow"),
    "role": (at_k(role="blk.3.base_text_cache.v"), "PREPARED_RECORDS_MISMATCH", "buffer 10"),
    "shape": (
        at_k(shape=tuple(reversed(PLAN.records[-2].shape))), "PREPARED_RECORDS_MISMATCH", "buffer 10",
    ),
    "order": (
        at_linear(buffers=tuple(CACHE.linear[0].buffers[i] for i in (1, 0, 2, 3))), "PREPARED_RECORDS_MISMATCH",
        "buffer 0",
    ),
    "one too few": (
        at_linear(buffers=CACHE.linear[0].buffers[:3]), "PREPARED_RECORDS_MISMATCH", "number of buffers",
    ),
    "own count": (replace(CACHE, payload_bytes=PLAN.total_bytes - 4), "PREPARED_TOTAL_MISMATCH", "own count"),
    "length": (replace(CACHE, max_sequence_tokens=17), "PREPARED_RECEIPT_INVALID", "plan"),
    "no length at all": (replace(CACHE, max_sequence_tokens=0), "PLAN_SEQUENCE", "max_sequence_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_caches_that_are_refused(name: str) -> None:
    cache, code, text = CACHES[name]
    with pytest.raises(KVStoreError, match=text) as caught:
        validate(CONFIG, cache, DEVICE, RECEIPT)
    assert caught.value.code == code


def test_the_records_sum_is_held_against_the_receipt() -> None:
    """The records were found equal to the plan before, so their sum can differ only from a receipt that says less."""
    from kvstore.format import qwen35_validate

    for expected in (PLAN.total_bytes - 4, PLAN.total_bytes + 4):
        with pytest.raises(KVStoreError, match="the bytes of all buffers") as caught:
            qwen35_validate._check_totals(CACHE, expected)
        assert caught.value.code == "PREPARED_TOTAL_MISMATCH"


def test_the_sum_is_checked() -> None:
    from kvstore.format import qwen35_validate

    with pytest.raises(KVStoreError, match="overflow") as caught:
        qwen35_validate._check_totals(at_k(byte_len=2**64 - 1), PLAN.total_bytes)
    assert caught.value.code == "PREPARED_TOTAL_MISMATCH"

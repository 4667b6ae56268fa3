"""The plan of the dense-Qwen3.5 profile: its bytes by an independent derivation, and every refusal."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format import qwen35_plan
from kvstore.format.qwen35_config import Qwen35Config, config_from_bytes, parse_qwen35_config
from kvstore.format.qwen35_plan import MAX_TOTAL_BYTES, U64_MAX, add, make_plan, make_record, mul, require_count

FLAT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "max_position_embeddings": 262144, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "intermediate_size": 64, "mtp_num_hidden_layers": 1,
}  # fmt: skip
BASE = parse_qwen35_config(FLAT)
BIG = 2**32 - 1


def changed(**changes: Any) -> Qwen35Config:
    return replace(BASE, **changes)


def refusal(call: Any, *args: Any) -> tuple[str, str]:
    with pytest.raises(KVStoreError) as caught:
        call(*args)
    assert caught.value.phase == "profile"
    return caught.value.code, caught.value.message


def derived(flat: dict[str, Any], tokens: int) -> str:
    """The document as text, put together by hand."""
    channels = (2 * flat["linear_num_key_heads"] * flat["linear_key_head_dim"]
                + flat["linear_num_value_heads"] * flat["linear_value_head_dim"])  # fmt: skip
    history = max(flat["linear_conv_kernel_dim"] - 1, 1)
    kv = [1, flat["num_key_value_heads"], tokens, flat["head_dim"]]
    state = [flat["linear_key_head_dim"], flat["linear_value_head_dim"], flat["linear_num_value_heads"], 1]
    conv = [channels, history, 1]
    texts, sums, counts = [], {True: 0, False: 0}, {True: 0, False: 0}
    for layer in range(flat["num_hidden_layers"]):
        full = (layer + 1) % flat.get("full_attention_interval", 4) == 0
        counts[full] += 1
        rows = [("k", kv), ("v", kv)] if full else [
            ("conv_state", conv), ("conv_state_scratch", conv), ("recurrent", state), ("recurrent_scratch", state)
        ]  # fmt: skip
        for role, shape in rows:
            size = 4
            for extent in shape:
                size *= extent
            sums[full] += size
            shown = ",".join(map(str, shape))
            texts.append(f'{{"role":"blk.{layer}.base_text_cache.{role}","shape":[{shown}],"dtype":"f32","byte_len":{size}}}')
    body = (
        '{"schema_version":1,"profile":"dense_qwen35_source_teacher_base_text_f32_cache_v1",'
        f'"max_sequence_tokens":{tokens},"n_sequences":1,"full_attention_slots":{counts[True]},'
        f'"linear_attention_slots":{counts[False]},"buffer_records":[{",".join(texts)}],'
        f'"base_full_attention_cache_bytes":{sums[True]},"base_linear_attention_state_bytes":{sums[False]},'
        f'"total_payload_bytes":{sum(sums.values())},"mtp_slot_allocated":false,"tq_kv_active":false,'
        '"linear_capture_allocated":false'
    )
    digest = hashlib.sha256((body + "}").encode()).hexdigest()
    return f'{body},"layout_sha256":"{digest}"}}'


@given(
    tokens=st.integers(1, 4096), layers=st.integers(4, 12), interval=st.integers(2, 4), heads=st.integers(1, 4),
    kernel=st.integers(1, 5),
)  # fmt: skip
def test_the_document_byte_for_byte(tokens: int, layers: int, interval: int, heads: int, kernel: int) -> None:
    flat = {**FLAT, "num_hidden_layers": layers, "full_attention_interval": interval, "linear_num_key_heads": heads,
            "linear_num_value_heads": heads * 2, "linear_conv_kernel_dim": kernel}  # fmt: skip
    plan = make_plan(parse_qwen35_config(flat), tokens)
    assert plan.data.decode() == derived(flat, tokens)
    assert json.loads(plan.data)["layout_sha256"] == plan.layout_sha256


def test_a_known_document() -> None:
    plan = make_plan(BASE, 16)
    assert plan.slot_table == (("linear", 0), ("linear", 1), ("linear", 2), ("full", 0))
    assert [record.byte_len for record in plan.records[:4]] == [384, 384, 240, 240]
    assert (plan.full_bytes, plan.linear_bytes, plan.total_bytes) == (2048, 3744, 5792)
    assert plan.layout_sha256 == "1e0a18f83f765e3f999b122f692f2f104eed3bb2a0f9a630d44eeba2c23b8507"


@pytest.mark.parametrize("document", [
    {"text_config": FLAT, "model_type": "qwen3_5", "vision_config": {}},
    {**FLAT, "text_config": None},
    {**FLAT, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    {**FLAT, "layer_types": None, "full_attention_interval": 4, "num_nextn_predict_layers": 3},
])  # fmt: skip
def test_one_config_in_its_forms(document: dict[str, Any]) -> None:
    assert config_from_bytes(json.dumps(document).encode()) == BASE


@pytest.mark.parametrize(("document", "field"), [
    ([], "the document"), ({"text_config": 3}, "text_config"), ({}, "max_position_embeddings is absent"),
    ({**FLAT, "head_dim": True}, "head_dim"), ({**FLAT, "head_dim": 8.0}, "head_dim"),
    ({**FLAT, "head_dim": -1}, "head_dim"), ({**FLAT, "head_dim": 2**32}, "head_dim"),
    ({**FLAT, "head_dim": None}, "head_dim"), ({**FLAT, "intermediate_size": "64"}, "intermediate_size"),
    ({**FLAT, "layer_types": "full"}, "layer_types"), ({**FLAT, "layer_types": ["sliding"]}, "layer_types[0]"),
    ({**FLAT, "layer_types": [["full_attention"]]}, "layer_types[0]"),
    ({**FLAT, "full_attention_interval": 0}, "full_attention_interval"),
    ({**FLAT, "num_experts": -1}, "num_experts"), ({**FLAT, "model_type": "llama"}, "model_type"),
])  # fmt: skip
def test_configs_that_are_none(document: Any, field: str) -> None:
    code, message = refusal(parse_qwen35_config, document)
    assert code == "PLAN_CONFIG_INVALID"
    assert field in message


@pytest.mark.parametrize("data", [b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000])
def test_bytes_that_are_no_config(data: bytes) -> None:
    assert refusal(config_from_bytes, data)[0] == "PLAN_CONFIG_INVALID"


REFUSALS: dict[str, tuple[Qwen35Config, Any, str, str]] = {
    "no count": (BASE, True, "PLAN_CONFIG_INVALID", "max_sequence_tokens"),
    "a float": (BASE, 16.0, "PLAN_CONFIG_INVALID", "max_sequence_tokens"),
    "negative": (BASE, -1, "PLAN_CONFIG_INVALID", "max_sequence_tokens"),
    "nothing": (BASE, 0, "PLAN_SEQUENCE", "1 to 4096"),
    "too many": (BASE, 4097, "PLAN_SEQUENCE", "1 to 4096"),
    "above the model": (changed(max_position_embeddings=15), 16, "PLAN_SEQUENCE", "max_position_embeddings"),
    "experts": (changed(num_experts=8), 16, "PLAN_NOT_DENSE", "mixture"),
    "no width": (changed(intermediate_size=None), 16, "PLAN_NOT_DENSE", "intermediate_size"),
    "a variant": (changed(variant="qwen3_5_moe"), 16, "PLAN_NOT_DENSE", "variant"),
    "no layers": (changed(num_hidden_layers=0, layer_types=()), 16, "PLAN_SCHEDULE", "num_hidden_layers"),
    "257 layers": (changed(num_hidden_layers=257), 16, "PLAN_SCHEDULE", "num_hidden_layers"),
    "another length": (changed(num_hidden_layers=5), 16, "PLAN_SCHEDULE", "layer_types"),
    "value heads": (changed(linear_num_value_heads=1), 16, "PLAN_DIMENSIONS", "fewer"),
    "not a multiple": (changed(linear_num_value_heads=3), 16, "PLAN_DIMENSIONS", "multiple"),
    "channels, product": (
        changed(linear_num_key_heads=BIG, linear_num_value_heads=BIG, linear_key_head_dim=BIG), 16,
        "PLAN_CHANNELS_OVERFLOW", "channels",
    ),
    "channels, sum": (
        changed(linear_num_key_heads=2**31 - 1, linear_num_value_heads=2**32 - 2, linear_key_head_dim=BIG,
                linear_value_head_dim=BIG), 16, "PLAN_CHANNELS_OVERFLOW", "channels",
    ),
    "one record": (
        changed(num_key_value_heads=BIG, head_dim=BIG), 16, "PLAN_RECORD_OVERFLOW", "blk.3.base_text_cache.k",
    ),
    "sum of full": (
        changed(num_key_value_heads=2**31, head_dim=2**31 - 1), 1, "PLAN_SUM_OVERFLOW", "full",
    ),
    "sum of linear": (
        changed(linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=2**31,
                linear_value_head_dim=2**31 - 1), 1, "PLAN_SUM_OVERFLOW", "linear",
    ),
    "linear only": (changed(layer_types=("linear_attention",) * 4), 16, "PLAN_KIND_MISSING", "no full"),
    "full only": (changed(layer_types=("full_attention",) * 4), 16, "PLAN_KIND_MISSING", "no linear"),
    "total overflow": (
        changed(num_key_value_heads=2**31, head_dim=2**29, linear_num_key_heads=1, linear_num_value_heads=1,
                linear_key_head_dim=2**30, linear_value_head_dim=2**30, num_hidden_layers=2,
                layer_types=("linear_attention", "full_attention")), 1, "PLAN_TOTAL_OVERFLOW", "all buffers",
    ),
    "too large": (changed(num_key_value_heads=65536, head_dim=65536), 1, "PLAN_TOTAL_LIMIT", str(MAX_TOTAL_BYTES)),
}  # fmt: skip
REFUSALS |= {
    name: (changed(**{name: 0}), 16, "PLAN_DIMENSIONS", name)
    for name in ("num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
                 "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    config, tokens, code, text = REFUSALS[name]
    found, message = refusal(make_plan, config, tokens)
    assert found == code
    assert text in message


def test_messages_differ() -> None:
    """Whatever is refused, the words before the two values say what."""
    same = {"too many": "nothing", "channels, sum": "channels, product", "257 layers": "no layers",
            "a float": "no count", "negative": "no count"}  # fmt: skip
    messages = {}
    for name, (config, tokens, *_) in REFUSALS.items():
        messages[name] = refusal(make_plan, config, tokens)[1].partition(": expected")[0]
    assert all(messages[name] == messages[other] for name, other in same.items())
    assert len(set(messages.values())) == len(REFUSALS) - len(same)


ORDER = [
    ("PLAN_SEQUENCE", {"max_position_embeddings": 1}), ("PLAN_NOT_DENSE", {"num_experts": 4}),
    ("PLAN_SCHEDULE", {"num_hidden_layers": 9}), ("PLAN_DIMENSIONS", {"linear_conv_kernel_dim": 0}),
]  # fmt: skip


def test_the_first_refusal_decides() -> None:
    faults: dict[str, Any] = {}
    for code, change in reversed(ORDER):
        faults |= change
        assert refusal(make_plan, changed(**faults), 16)[0] == code


def test_later_refusals_come_in_order() -> None:
    """One config that breaks every rule from 5 on, repaired from the front."""
    layers: dict[str, Any] = {"layer_types": ("full_attention",) * 4}
    records: dict[str, Any] = {**layers, "num_key_value_heads": BIG, "head_dim": BIG}
    channels = {**records, "linear_key_head_dim": BIG, "linear_num_key_heads": BIG, "linear_num_value_heads": BIG}
    assert refusal(make_plan, changed(**channels), 16)[0] == "PLAN_CHANNELS_OVERFLOW"
    assert refusal(make_plan, changed(**records), 16)[0] == "PLAN_RECORD_OVERFLOW"
    assert refusal(make_plan, changed(**layers, num_key_value_heads=2**31, head_dim=2**30), 1)[0] == "PLAN_SUM_OVERFLOW"
    assert refusal(make_plan, changed(**layers, num_key_value_heads=65536, head_dim=65536), 1)[0] == "PLAN_KIND_MISSING"


def test_what_a_config_cannot_reach() -> None:
    assert refusal(make_record, "r", ())[0] == "PLAN_RECORD_SHAPE"
    assert refusal(make_record, "r", (1, 0, 2))[0] == "PLAN_RECORD_SHAPE"
    assert refusal(require_count, make_plan(BASE, 1).records[1:], ("full", *["linear"] * 3))[0] == "PLAN_RECORD_COUNT"


def test_a_lost_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the derivation, which no config provokes."""
    honest = qwen35_plan.records_of

    def loses_one(*args: Any) -> Any:
        records, sums = honest(*args)
        return records[:-1], sums

    monkeypatch.setattr(qwen35_plan, "records_of", loses_one)
    assert refusal(make_plan, BASE, 16)[0] == "PLAN_RECORD_COUNT"


def test_arithmetic_ends_at_64_bits() -> None:
    assert add(U64_MAX - 1, 1, "PLAN_TOTAL_OVERFLOW", "it") == U64_MAX
    assert refusal(add, U64_MAX, 1, "PLAN_TOTAL_OVERFLOW", "it")[0] == "PLAN_TOTAL_OVERFLOW"
    assert mul((2**32, 2**31, 1), "PLAN_RECORD_OVERFLOW", "it") == 2**63
    # As in 64 bits, an overflow on the way is one, even where a zero would follow.
    assert refusal(mul, (2**32, 2**32, 0), "PLAN_RECORD_OVERFLOW", "it")[0] == "PLAN_RECORD_OVERFLOW"


def test_the_limit_is_inclusive() -> None:
    tokens = 4096
    rest = make_plan(BASE, tokens).linear_bytes
    exact = changed(num_key_value_heads=1, head_dim=(MAX_TOTAL_BYTES - rest) // (8 * tokens))
    plan = make_plan(exact, tokens)
    assert plan.total_bytes <= MAX_TOTAL_BYTES
    assert refusal(make_plan, replace(exact, head_dim=exact.head_dim + 1), tokens)[0] == "PLAN_TOTAL_LIMIT"
    assert make_plan(changed(max_position_embeddings=4096), 4096).max_sequence_tokens == 4096
    names = ["linear_attention"] * 255 + ["full_attention"]
    assert len(make_plan(changed(num_hidden_layers=256, layer_types=tuple(names)), 1).slots) == 256


def test_a_rule_instead_of_a_list_costs_nothing() -> None:
    config = parse_qwen35_config({**FLAT, "num_hidden_layers": BIG})
    assert refusal(make_plan, config, 16) == refusal(make_plan, changed(num_hidden_layers=BIG), 16)

"""Prepared caches: proved fresh, handed over once, and the same state as mlx_lm's own caches of a model that runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from kvstore.format.digest import Digest
from kvstore.format.qwen35_config import parse_qwen35_config
from kvstore.format.qwen35_plan import make_plan
from kvstore.format.qwen35_receipt import DeviceFacts
from kvstore.format.qwen35_validate import validate
from kvstore.format.receipt import parse_receipt
from kvstore.runtime import prepare as prepare_module
from kvstore.runtime.prepare import Authorization, Prepared, check_captured, prepare
from kvstore.runtime.registry_id import metal_registry_id
from kvstore.runtime.teacher_cache import LinearSlot, TeacherCache
from tests.runtime.driving import bits, code_of

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = parse_qwen35_config({"model_type": "qwen3_5", "text_config": TEXT})


@pytest.fixture(autouse=True)
def _plain_kernels() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def model() -> Any:
    mx.random.seed(3)
    made = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({"model_type": "qwen3_5", "text_config": dict(TEXT)}))
    mx.eval(made.parameters())
    return made


def taken(prepared: Prepared) -> TeacherCache:
    return prepared.take(Authorization.for_receipt(prepared.receipt))


def logits(model: Any, caches: list[Any], ids: list[int]) -> bytes:
    out = model(mx.array([ids]), cache=caches)
    mx.eval(out)
    return bits(out).tobytes()


def test_a_prepared_cache_is_what_was_planned() -> None:
    prepared = prepare(CONFIG, 32)
    cache = taken(prepared)
    records = iter(prepared.plan.records)
    for slot in cache.slots:
        for array in slot.arrays:
            record = next(records)
            assert (tuple(array.shape), array.dtype, array.nbytes) == (record.shape, mx.float32, record.byte_len)
            assert not np.array(array).any()
    assert [type(slot).__name__ for slot in cache.slots] == ["LinearSlot", "FullSlot"] * 2
    assert [slot.rank for slot in cache.slots] == [0, 0, 1, 1]


def test_the_receipt_says_what_is_known() -> None:
    prepared = prepare(CONFIG, 32)
    receipt = parse_receipt(prepared.receipt.data)
    assert receipt == prepared.receipt
    assert receipt.subject == f"sha256:{prepared.plan.layout_sha256}"
    assert receipt.facts["actual_payload_bytes"] == prepared.plan.total_bytes
    if metal_registry_id() is None:
        assert prepared.profile_receipt is None
        assert receipt.device is not None
        assert receipt.device["registry_id"] is None
        assert receipt.checks["profile_receipt"] == receipt.checks["buffer_device"] == "not observable"
        assert code_of(prepared.require_profile_receipt) == "PREPARED_NO_REGISTRY_ID"
        proved = ("plan", "slots", "fresh", "buffers", "records", "totals")
        assert {receipt.checks[name] for name in proved} == {"verified"}
    else:
        assert prepared.require_profile_receipt().plan == prepared.plan


def test_where_a_registry_id_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer, given by hand: this is all that differs on Metal."""
    monkeypatch.setattr(prepare_module, "this_device", lambda: DeviceFacts("A GPU", 2**64 - 1))
    prepared = prepare(CONFIG, 32)
    issued = prepared.require_profile_receipt()
    assert (issued.device_name, issued.device_registry_id) == ("A GPU", 2**64 - 1)
    assert prepared.receipt.facts["receipt_sha256"] == issued.sha256
    assert prepared.receipt.device is not None
    assert prepared.receipt.device["registry_id"] == str(2**64 - 1)
    assert set(prepared.receipt.checks.values()) <= {"verified", "not observable"}
    assert prepared.receipt.checks["profile_receipt"] == prepared.receipt.checks["buffer_device"] == "verified"


def test_it_is_handed_over_once() -> None:
    prepared = prepare(CONFIG, 8)
    assert code_of(prepared.take, Authorization(Digest("sha256:" + "0" * 64))) == "PREPARED_UNAUTHORIZED"
    leave = Authorization.for_receipt(prepared.receipt)
    assert isinstance(prepared.take(leave), TeacherCache)
    assert code_of(prepared.take, leave) == "PREPARED_TAKEN"
    assert prepared.receipt.digest == leave.receipt


def test_nothing_is_allocated_before_a_refusal() -> None:
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert code_of(prepare, CONFIG, 513) == "PLAN_SEQUENCE"
    assert code_of(prepare, CONFIG, 512, budget=1000) == "DEVICE_MEMORY_SHORT"
    assert mx.get_peak_memory() <= before


def test_a_model_runs_on_a_prepared_cache(model: Any) -> None:
    own, prepared = model.language_model.make_cache(), taken(prepare(CONFIG, 64)).to_mlx_lm()
    for ids in ([3, 5, 8, 13, 21], [34], [1, 2]):
        assert logits(model, prepared, ids) == logits(model, own, ids)
    assert prepared[1].keys.shape[2] == 64


@pytest.mark.parametrize("count", [1, 2, 40, 64])
def test_there_and_back(model: Any, count: int) -> None:
    own, twin = model.language_model.make_cache(), model.language_model.make_cache()
    ids = [(7 * n + 1) % 64 for n in range(count)]
    logits(model, own, ids)
    logits(model, twin, ids)
    captured = check_captured(own, CONFIG, 64)
    assert {slot.length for slot in captured.slots if not isinstance(slot, LinearSlot)} == {count}
    back = captured.to_mlx_lm()
    assert logits(model, back, [9]) == logits(model, twin, [9])
    # What the model wrote went into the cache's own arrays.
    again = captured.to_mlx_lm()
    assert again[1].offset == count
    assert logits(model, again, [9, 4]) == logits(model, own, [9, 4])


def test_the_flag_says_which_state_is_current(model: Any) -> None:
    own = model.language_model.make_cache()
    logits(model, own, [1, 2, 3])
    captured = check_captured(own, CONFIG, 16)
    for slot in captured.slots:
        if isinstance(slot, LinearSlot):
            conv, conv_scratch, recurrent, recurrent_scratch = slot.arrays
            slot.arrays, slot.flipped = (conv_scratch, conv, recurrent_scratch, recurrent), True
    assert logits(model, captured.to_mlx_lm(), [4]) == logits(model, own, [4])


def test_an_empty_cache_is_fresh(model: Any) -> None:
    cache = TeacherCache.from_mlx_lm(model.language_model.make_cache(), CONFIG, 16)
    device = prepare_module.this_device()
    assert validate(CONFIG, cache.facts(device), device, None)["fresh"] == "verified"


def test_a_used_cache_is_not_fresh(model: Any) -> None:
    own = model.language_model.make_cache()
    logits(model, own, [1])
    captured, device = check_captured(own, CONFIG, 16), prepare_module.this_device()
    assert code_of(validate, CONFIG, captured.facts(device), device, None) == "PREPARED_NOT_FRESH"
    captured.reset()
    assert validate(CONFIG, captured.facts(device), device, None)["fresh"] == "verified"


def filled(model: Any) -> list[Any]:
    caches: list[Any] = model.language_model.make_cache()
    logits(model, caches, [1, 2, 3])
    return caches


def test_caches_that_are_not_of_the_plan(model: Any) -> None:
    caches = filled(model)
    assert code_of(check_captured, caches[:-1], CONFIG, 16) == "PREPARED_CACHE_INVALID"
    assert code_of(check_captured, caches[::-1], CONFIG, 16) == "PREPARED_CACHE_INVALID"
    assert code_of(check_captured, caches, CONFIG, 2) == "PREPARED_CACHE_INVALID"
    assert code_of(check_captured, caches, replace(CONFIG, head_dim=8), 16) == "PREPARED_RECORDS_MISMATCH"
    assert code_of(check_captured, caches, replace(CONFIG, linear_key_head_dim=4), 16) == "PREPARED_RECORDS_MISMATCH"
    assert code_of(check_captured, caches, replace(CONFIG, num_experts=2), 16) == "PLAN_NOT_DENSE"


def test_caches_in_a_state_that_the_profile_has_not(model: Any) -> None:
    ragged = filled(model)
    ragged[1].offset = 2
    assert code_of(check_captured, ragged, CONFIG, 16) == "PREPARED_CACHE_INVALID"
    padded = filled(model)
    padded[0].left_padding = mx.array([0])
    assert code_of(check_captured, padded, CONFIG, 16) == "PREPARED_CACHE_INVALID"
    quantized: list[Any] = filled(model)
    quantized[1] = QuantizedKVCache(group_size=32, bits=8)
    assert code_of(check_captured, quantized, CONFIG, 16) == "PREPARED_CACHE_INVALID"
    wide = filled(model)
    wide[0] = ArraysCache(3)
    assert code_of(check_captured, wide, CONFIG, 16) == "PREPARED_CACHE_INVALID"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_another_dtype_is_named(model: Any, dtype: mx.Dtype) -> None:
    caches = filled(model)
    caches[3].keys, caches[3].values = caches[3].keys.astype(dtype), caches[3].values.astype(dtype)
    assert code_of(check_captured, caches, CONFIG, 16) == "PREPARED_BUFFER_INVALID"


def test_buffers_are_looked_at() -> None:
    """Padding and strides, as the host sees them."""
    cache = taken(prepare(CONFIG, 8))
    device = prepare_module.this_device()
    slot = cache.slots[1]
    keys, values = slot.arrays
    wide = mx.zeros((1, 2, 8, 32))
    mx.eval(wide)
    part = wide[..., :16]
    mx.eval(part)
    slot.arrays = (part, values)
    assert code_of(validate, CONFIG, cache.facts(device), device, None) == "PREPARED_BUFFER_INVALID"
    slot.arrays = (keys, values)
    assert validate(CONFIG, cache.facts(device), device, None)["buffers"] == "verified"


def test_a_convolution_of_width_one_has_no_state_in_mlx_lm() -> None:
    config = replace(CONFIG, linear_conv_kernel_dim=1)
    assert make_plan(config, 8).records[0].shape[1] == 1
    assert code_of(taken(prepare(config, 8)).to_mlx_lm) == "CACHE_FILE_EXPORT"


def test_the_classes_are_those_that_the_model_makes(model: Any) -> None:
    made = taken(prepare(CONFIG, 8)).to_mlx_lm()
    assert [type(c) for c in made] == [type(c) for c in model.language_model.make_cache()] == [ArraysCache, KVCache] * 2

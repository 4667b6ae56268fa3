"""The lazy probe: what it says of large models without their memory, and that small models then do just that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils

from kvstore.errors import InvalidError, UnsupportedError, UsageError
from kvstore.format.compat import signature
from kvstore.runtime.binding import bind, load_model, require_bound
from kvstore.runtime.kinds import describe
from kvstore.runtime.probe import CacheOptions, make_cache, probe, probe_config, probe_folder
from tests.releases import CHUNK, OLDER
from tests.runtime.model_folders import CONFIG, real_folder

COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
QWEN3_8B = {
    **COMMON, "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {
    **COMMON, "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "float16",
}  # fmt: skip
GEMMA3_27B = {
    **COMMON, "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "intermediate_size": 21504,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
    "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 168,
}  # fmt: skip
QWEN3_NEXT_80B = {
    **COMMON, "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 5120,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
    "decoder_sparse_step": 1, "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512,
    "mlp_only_layers": [], "partial_rotary_factor": 0.25, "max_position_embeddings": 262144,
    "full_attention_interval": 4,
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "vocab_size": 100352, "d_model": 6144, "n_layers": 40, "n_heads": 48,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
LLAMA4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        **COMMON, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128,
        "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760, "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rope_scaling": None,
        "use_qk_norm": True, "vocab_size": 202048, "dtype": "float16",
    },
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2", "num_heads": 128, "head_dim": 64, "vocab_size": 32768, "hidden_size": 4096,
    "intermediate_size": 8192, "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4, "n_groups": 8, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
    "time_step_limit": [0.0, 1e30], "time_step_rank": 256, "max_position_embeddings": 2056,
}  # fmt: skip

LARGE: dict[str, tuple[dict[str, Any], set[str], int, int, int]] = {
    # config, kinds, layers, bytes per token, lowest cut at 9,000 tokens
    "qwen3 8 B": (QWEN3_8B, {"kv"}, 36, 36 * 2 * 8 * 128 * 2, 0),
    "llama 70 B": (LLAMA_70B, {"kv"}, 80, 80 * 2 * 8 * 128 * 2, 0),
    "gemma3 27 B": (GEMMA3_27B, {"kv", "kv-rotating"}, 62, 62 * 2 * 16 * 128 * 2, 8999),
    "qwen3_next 80 B": (QWEN3_NEXT_80B, {"kv", "state"}, 48, 12 * 2 * 2 * 256 * 2, 9000),
    "dbrx 132 B": (DBRX, {"kv"}, 40, 40 * 2 * 8 * 128 * 2, 0),
    "llama4 109 B": (LLAMA4_SCOUT, {"kv", "kv-chunked"}, 48, 48 * 2 * 8 * 128 * 2, 9000),
    "mamba2 7 B": (MAMBA2, {"state"}, 64, 0, 9000),
}

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA_70B, **SMALL, **HEADS},
    "qwen3": {**QWEN3_8B, **SMALL, **HEADS},
    "gemma3": {**GEMMA3_27B, **SMALL, **HEADS, "sliding_window": 8, "sliding_window_pattern": 2},
    "qwen3_next": {
        **QWEN3_NEXT_80B, **SMALL, **HEADS, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "full_attention_interval": 2,
    },
    "dbrx": {
        **DBRX, "vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **LLAMA4_SCOUT["text_config"], **SMALL, **HEADS, "attention_chunk_size": CHUNK if OLDER else 8,
            "intermediate_size_mlp": 64, "num_local_experts": 2,
        },
    },
    "mamba2": {
        **MAMBA2, "num_heads": 4, "head_dim": 32, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
        "state_size": 16, "num_hidden_layers": 2, "n_groups": 2, "time_step_rank": 4,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_kernels() -> Iterator[None]:
    """Fused kernels are built by a C++ compiler here, seconds for each; shapes do not depend on them."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def build(config: dict[str, Any], dtype: mx.Dtype = mx.float32) -> Any:
    model_class, arguments = utils._get_classes(config)
    mx.random.seed(0)
    model = model_class(arguments.from_dict(dict(config)))
    model.set_dtype(dtype)
    return model


def run(model: Any, caches: list[Any], tokens: int, *, at_once: bool = True) -> list[Any]:
    ids = mx.arange(tokens)[None] % 90
    for part in [ids] if at_once else [ids[:, at : at + 1] for at in range(tokens)]:
        mx.eval(model(part, cache=caches))
    return caches


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_costs_nothing(name: str) -> None:
    config, kinds, layers, per_token, lowest = LARGE[name]
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = probe_config(config)
    assert mx.get_peak_memory() - before < 64 * 1024
    assert mx.get_active_memory() - before < 1024
    assert {layer.kind for layer in found.layers} == kinds
    assert len(found.layers) == layers
    assert found.bytes_per_token == per_token
    assert found.lowest_cut(9000) == lowest


def test_layouts() -> None:
    found = probe_config(QWEN3_8B)
    layout = found.layout_at(1000)
    assert layout.token_count == 1000
    assert layout.total_bytes == 1000 * found.bytes_per_token
    assert [buffer.role for buffer in layout.buffers[:3]] == ["0.k", "0.v", "1.k"]
    assert (layout.buffers[0].shape, layout.buffers[0].dtype) == ((1, 8, 1000, 128), "BF16")
    assert layout.digest != found.layout_at(1001).digest
    for count in (0, -1, 2**26 + 1):
        with pytest.raises(UsageError):
            found.layout_at(count)


def test_a_window_stops_growing() -> None:
    found = probe_config(GEMMA3_27B)
    row = 2 * 16 * 128 * 2
    assert found.layout_at(1024).total_bytes == 1024 * 62 * row
    assert found.layout_at(2000).total_bytes == (2000 * 10 + 1024 * 52) * row
    assert found.lowest_cut(1024) == 0


def test_the_dtype_without_weights_is_that_of_the_config() -> None:
    def dtype(config: dict[str, Any]) -> str:
        return probe_config(config).layers[0].tensors["k"].dtype

    tiny = {**TINY["llama"], "torch_dtype": None}
    assert dtype(tiny) == "BF16"
    assert dtype({**tiny, "torch_dtype": "torch.float32"}) == "F32"
    assert dtype({**tiny, "dtype": "float16"}) == "F16"
    assert dtype(TINY["llama4"]) == "F16"
    assert probe_config(TINY["qwen3_next"]).layers[0].tensors["slot.1"].dtype == "F32"


@pytest.mark.parametrize("tokens", [1, 8, 13])
@pytest.mark.parametrize("name", TINY)
def test_a_model_that_runs_does_what_the_probe_said(name: str, tokens: int) -> None:
    model = build(TINY[name])
    found = probe(model)
    caches = run(model, make_cache(model), tokens)
    layers = describe(caches)
    assert found.signature == signature(layers)
    if name != "llama4" or tokens <= 8:
        # A prefill in one piece may leave more than a chunk; the next forward pass drops it.
        assert found.layers_at(tokens) == layers
    assert signature(describe(run(model, make_cache(model), tokens, at_once=False))) == found.signature


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
def test_the_dtype_is_that_of_the_weights(name: str, dtype: mx.Dtype) -> None:
    model = build(TINY[name], dtype)
    assert probe(model).signature == signature(describe(run(model, make_cache(model), 3)))


OPTIONS: dict[str, CacheOptions] = {
    "window": CacheOptions(max_kv_size=6),
    "8 bits": CacheOptions(kv_bits=8, kv_group_size=32),
    "4 bits": CacheOptions(kv_bits=4, kv_group_size=32),
    "3 bits": CacheOptions(kv_bits=3, kv_group_size=32),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    model = build(TINY["qwen3"], mx.bfloat16)
    found = probe(model, OPTIONS[name])
    layers = describe(run(model, make_cache(model, OPTIONS[name]), 9))
    assert found.layers_at(9) == layers
    assert found.signature == signature(layers) != probe(model).signature


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_cache_quantized_after_the_prefill_has_the_same_signature(bits: int) -> None:
    """Also with the bits that a cache made quantized refuses."""
    model, options = build(TINY["llama"]), CacheOptions(kv_bits=bits, kv_group_size=32)
    caches = run(model, make_cache(model), 9)
    quantized = [cache.to_quantized(group_size=32, bits=bits) for cache in caches]
    assert probe(model, options).signature == signature(describe(quantized))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
def test_a_model_with_caches_of_its_own_takes_no_other_window(name: str) -> None:
    """mlx-lm asks the model first, and would silently make caches without one."""
    model = build(TINY[name])
    for act in (probe, make_cache):
        with pytest.raises(UsageError) as caught:
            act(model, CacheOptions(max_kv_size=6))
        assert caught.value.detail == {"expected": "a model whose caches mlx-lm makes", "found": 6}
        assert str(caught.value).endswith("Leave max_kv_size out for this model.")


def test_recurrent_layers_are_not_quantized() -> None:
    found = probe(build(TINY["qwen3_next"]), CacheOptions(kv_bits=4, kv_group_size=32))
    assert {layer.kind for layer in found.layers} == {"state", "kv-quantized"}


@pytest.mark.parametrize(
    ("name", "bits", "group", "expected", "found", "fix"),
    [
        ("gemma3", 4, 32, "KVCache", "RotatingKVCache", "Leave kv_bits out for this model."),
        ("llama", 7, 32, [2, 3, 4, 5, 6, 8], 7, "Set kv_bits to one of them."),
        ("llama", 4, 16, [32, 64, 128], 16, "Set kv_group_size to one of them."),
        ("llama", 4, 48, [32, 64, 128], 48, "Set kv_group_size to one of them."),
        ("llama", 4, 64, "a multiple of the group size, 64", 32, "Set kv_group_size to 32."),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused(
    name: str, bits: int, group: int, expected: Any, found: Any, fix: str
) -> None:
    """In our words, each with what would do; MLX's own text never comes through."""
    with pytest.raises(UsageError) as caught:
        probe(build(TINY[name]), CacheOptions(kv_bits=bits, kv_group_size=group))
    assert (caught.value.code, caught.value.detail) == ("USAGE", {"expected": expected, "found": found})
    assert str(caught.value).endswith(fix)
    assert "[quantize]" not in str(caught.value)


def test_a_probe_leaves_the_model_as_it_was() -> None:
    model = build(TINY["llama"])
    mx.eval(model.parameters())
    before = {name: id(array) for name, array in tree_flatten(model.parameters())}
    active = mx.get_active_memory()
    probe(model)
    assert {name: id(array) for name, array in tree_flatten(model.parameters())} == before
    assert mx.get_active_memory() - active < 1024


def test_folders_with_and_without_weights(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if not key.startswith("_")}
    for dtype, short in (("float16", "F16"), ("float32", "F32")):
        path = real_folder(tmp_path / dtype, config, dtype=dtype)
        found = probe_folder(path)
        assert found == probe(load_model(path))
        assert {layer.tensors["k"].dtype for layer in found.layers} == {short}
        (path / "model.safetensors").unlink()
        assert {layer.tensors["k"].dtype for layer in probe_folder(path).layers} == {"BF16"}
    assert {layer.kind for layer in probe_folder(path, CacheOptions(concatenated=True)).layers} == {"kv-concatenated"}


def test_a_folder_with_weights_is_not_read(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 20_000, "torch_dtype": None}
    path = real_folder(tmp_path / "model", config, bits=4, dtype="bfloat16")
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = probe_folder(path)
    assert mx.get_peak_memory() - before < 64 * 1024 < (path / "model.safetensors").stat().st_size
    assert found.signature == probe(load_model(path)).signature
    assert found.layers[0].tensors["k"].dtype == "BF16"


def test_a_config_that_is_no_model() -> None:
    for config in ({}, {"model_type": "no_such_model"}, {"model_type": "llama"}):
        with pytest.raises(InvalidError) as caught:
            probe_config(config)
        assert caught.value.code == "MODEL_FOLDER_INVALID"


def test_a_cache_class_that_nobody_knows() -> None:
    class Own:
        offset = 0

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            return keys, values

        def make_mask(self, *args: Any, **kwargs: Any) -> None:
            return None

    model = build(TINY["llama"])
    type(model).make_cache = lambda self: [Own() for _ in self.layers]
    try:
        with pytest.raises(UnsupportedError) as caught:
            probe(model)
    finally:
        del type(model).make_cache
    assert caught.value.code == "CACHE_CLASS_UNKNOWN"


@pytest.mark.parametrize("name", TINY)
def test_a_model_that_has_run_can_still_be_bound(name: str, tmp_path: Path) -> None:
    """Some models keep things on their modules while they run; that is no other setting."""
    path = real_folder(tmp_path / "model", TINY[name])
    bound = load_model(path)
    run(bound.model, make_cache(bound.model), 5)
    assert require_bound(bound) is bound
    assert bind(bound.model, bound.identity, sample=None).compared > 2
    assert probe_folder(path).signature == probe(bound).signature

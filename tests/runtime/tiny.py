"""Tiny models of several cache make-ups, as real folders, and what the tests do with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvstore.runtime.binding import BoundModel, load_model
from kvstore.runtime.probe import CacheOptions, make_cache
from tests.releases import CHUNK
from tests.runtime.driving import bits
from tests.runtime.model_folders import real_folder

VOCABULARY = 96
COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_size": 64,
    "intermediate_size": 64, "vocab_size": VOCABULARY, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "model_type": "llama"},
    "qwen3": {**COMMON, "model_type": "qwen3"},
    "gemma3": {
        **COMMON, "model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "qwen3_next": {
        **COMMON, "model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32, "mlp_only_layers": [], "partial_rotary_factor": 0.25,
        "full_attention_interval": 2,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **COMMON, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": CHUNK,
            "interleave_moe_layer_step": 1, "intermediate_size_mlp": 64, "num_experts_per_tok": 1,
            "num_local_experts": 2, "rope_scaling": None, "use_qk_norm": True,
        },
    },
    "mamba2": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 32, "vocab_size": VOCABULARY, "hidden_size": 64,
        "intermediate_size": 128, "state_size": 16, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
        "time_step_limit": [0.001, 1e30], "time_step_rank": 4, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def tiny(root: Path, family: str, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> BoundModel:
    """A bound tiny model; the same arguments give the same folder."""
    folder = root / "-".join([family, dtype, str(seed), *(f"{key}={value}" for key, value in changes.items())])
    if not folder.exists():
        real_folder(folder, {**CONFIGS[family], **changes}, seed=seed, dtype=dtype)
    return load_model(folder)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(n * 37 + n * n * 11 + seed * 5) % VOCABULARY for n in range(count)]


def run(model: BoundModel, caches: list[Any], ids: Sequence[int], *, step: int = 64) -> list[Any]:
    """Read ``ids`` into ``caches``."""
    for at in range(0, len(ids), step):
        model.model(mx.array([list(ids[at : at + step])]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def prefilled(model: BoundModel, count: int, options: CacheOptions | None = None, *, step: int = 64) -> list[Any]:
    return run(model, make_cache(model.model, options), tokens(count), step=step)


def logits(model: BoundModel, caches: list[Any], steps: Sequence[Sequence[int]]) -> list[bytes]:
    """The bits of all logits of the next ``steps``."""
    found = []
    for ids in steps:
        out = model.model(mx.array([list(ids)]), cache=caches)
        mx.eval(out)
        found.append(bits(out).tobytes())
    return found


NEXT: Sequence[Sequence[int]] = ([5], [17, 3, 8], [2], [40], [1])

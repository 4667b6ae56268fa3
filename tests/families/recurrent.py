"""Tiny configs of families that carry recurrent state, alone or beside keys and values."""

from __future__ import annotations

from typing import Any

from tests.families.base import COMMON, EXPERTS, LATENT, WINDOW, Family

_MAMBA: dict[str, Any] = {
    "state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
    "intermediate_size": 128,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "partial_rotary_factor": 0.25,
}  # fmt: skip
_LFM: dict[str, Any] = {
    "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 64,
    "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention"],
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    **EXPERTS, "layer_group_size": 2, "group_norm_size": 2, "norm_topk_prob": True, "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip
_KDA: dict[str, Any] = {
    "linear_attn_config": {
        "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
    },
    "num_experts_per_token": 2, "model_max_length": 4096, "first_k_dense_replace": 1,
}  # fmt: skip

RECURRENT = (
    Family("mamba", _MAMBA),
    Family("mamba2", {
        **_MAMBA, "num_heads": 4, "head_dim": 32, "layer_norm_epsilon": 1e-5, "n_groups": 2,
        "time_step_limit": [0.001, 1e30],
    }),
    Family("rwkv7", {
        "norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    }),
)  # fmt: skip

HYBRID = (
    Family("qwen3_5", {"text_config": {**COMMON, **_DELTA, "model_type": "qwen3_5_text"}}),
    Family("prism_hadamard_qwen35", {
        "text_config": {**COMMON, **_DELTA, "intermediate_size": 128}, "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"mode": "affine", "bits": 2, "group_size": 128},
        "modules": [
            {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
    }),
    Family("qwen3_next", {
        **EXPERTS, **_DELTA, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32, "mlp_only_layers": [],
    }),
    Family("jamba", {
        **EXPERTS, "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2,
    }),
    Family("falcon_h1", {
        "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 1,
    }),
    Family("granitemoehybrid", {
        "layer_types": ["mamba", "attention"], "embedding_multiplier": 2.0, "attention_multiplier": 0.25,
        "logits_scaling": 1.0, "residual_multiplier": 0.5, "attention_bias": False, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 32, "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    }, moe=True),
    Family("lfm2", _LFM),
    Family("lfm2_moe", {**EXPERTS, **_LFM, "use_expert_bias": True, "num_dense_layers": 1}),
    Family("nemotron_h", {
        "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "attention_bias": False, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 2,
        "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
    }),
    Family("kimi_linear", {**EXPERTS, **LATENT, **_KDA}),
    Family("kimi_k3", {"text_config": {
        **COMMON, **EXPERTS, **LATENT, **_KDA, "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
        "hidden_act": "situ",
    }}, moe=True),
    Family("qwen3_5_moe", {"text_config": {
        **COMMON, **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32,
    }}, moe=True),
    Family("lfm2-vl", {"text_config": {**COMMON, **_LFM, "model_type": "lfm2"}}),
    Family("recurrent_gemma", {
        "num_hidden_layers": 3, "attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW, "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
    }),
    Family("olmo_hybrid", {
        **_DELTA, "linear_allow_neg_eigval": True, "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    Family("plamo2", {
        "hidden_size_per_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_num_heads": 4, "mamba_step": 2,
    }),
    Family("bailing_hybrid", {**_LINEAR, **LATENT}),
    Family("bailing_moe_linear", _LINEAR),
    Family("bailing_moe_v3", {**_LINEAR, **LATENT, "moe_shared_expert_intermediate_size": 32}),
    Family("baichuan_m1", {"sliding_window": WINDOW, "sliding_window_layers": [0], "conv_window": 2}),
    Family("gear", {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"], "num_hidden_layers": 3,
                    "sliding_window": WINDOW}),
)  # fmt: skip

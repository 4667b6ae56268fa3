"""Tiny configs of families whose caches are keys and values: whole, windowed, chunked, latent, several to a layer."""

from __future__ import annotations

from typing import Any

from tests.families.base import COMMON, EXPERTS, LATENT, VOCABULARY, WINDOW, Family

_LAYER_TYPES: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_FOUR: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_ROPES = {name: {"rope_theta": 10000.0, "rope_type": "default"} for name in _LAYER_TYPES["layer_types"]}
_YARN: dict[str, Any] = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32, "beta_slow": 1,
}
_GPT: dict[str, Any] = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 4096, "n_ctx": 4096, "n_inner": 64,
    "layer_norm_epsilon": 1e-5, "vocab_size": VOCABULARY,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_INDEXER: dict[str, Any] = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 24}
_LONGCAT: dict[str, Any] = {
    **LATENT, "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 64, "moe_topk": 2,
    "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2, "num_layers": 2,
    "routed_scaling_factor": 1.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_bias": False,
}  # fmt: skip

PLAIN = (
    Family("llama"),
    Family("qwen2"),
    Family("qwen3"),
    Family("gemma"),
    Family("gemma2"),
    Family("phi3"),
    Family("glm4", {"attention_bias": False, "partial_rotary_factor": 0.5}),
    Family("cohere", {"num_key_value_heads": 2}),
    Family("starcoder2"),
    Family("gpt2", _GPT),
    Family("gpt_neox", {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25}),
    Family("granite", _GRANITE),
    Family("olmo2"),
    Family("stablelm", {"use_qkv_bias": False, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5}),
    Family("smollm3"),
    Family("ernie4_5", {"use_bias": False}),
    Family("seed_oss"),
    Family("internlm3"),
    Family("helium", {"attention_bias": False, "mlp_bias": False}),
    Family("nemotron", {"hidden_act": "relu2", "norm_eps": 1e-5}),
    Family("nanochat"),
    Family("mixtral", EXPERTS, bits=4),
    Family("qwen3_moe", EXPERTS),
    Family("olmoe", EXPERTS),
    Family("minimax", {**EXPERTS, "rotary_dim": 16, "shared_intermediate_size": 0}),
    Family("dbrx", {
        "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    }, moe=True),
    Family("glm4_moe", {**EXPERTS, "attention_bias": False, "partial_rotary_factor": 0.5, "rope_scaling": None}),
    Family("deepseek_v2", {**EXPERTS, **LATENT, "topk_method": "greedy", "rope_scaling": _YARN}),
    Family("deepseek_v3", {**EXPERTS, **LATENT}),
    Family("glm4_moe_lite", {**EXPERTS, **LATENT}),
    Family("minicpm3", {
        **LATENT, "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12, "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    }),
    Family("youtu_llm", LATENT),
)  # fmt: skip

WINDOWED = (
    Family("gemma3_text", {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    Family("gemma3n", {"text_config": {
        **COMMON, **_FOUR, "num_hidden_layers": 6, "layer_types": _FOUR["layer_types"] + _LAYER_TYPES["layer_types"],
        "num_kv_shared_layers": 2, "model_type": "gemma3n_text", "vocab_size_per_layer_input": VOCABULARY,
        "intermediate_size": [64] * 6, "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4, "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
        "laurel_rank": 8,
    }}),
    Family("gemma4_text", {
        **_FOUR, "num_kv_shared_layers": 2, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    }),
    Family("gpt_oss", {**EXPERTS, **_LAYER_TYPES}),
    Family("cohere2", {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    Family("exaone4", {
        "num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None,
    }),
    Family("olmo3", _LAYER_TYPES),
    Family("ministral3", {**_LAYER_TYPES, "rope_parameters": {
        "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4096,
    }}),
    Family("mellum", {**EXPERTS, **_LAYER_TYPES, "rope_parameters": _ROPES}),
    Family("mimo_v2_flash", {
        **EXPERTS, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "sliding_window_size": WINDOW, "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1, "v_head_dim": 8,
        "swa_head_dim": 16, "swa_v_head_dim": 8, "partial_rotary_factor": 0.5,
    }),
    Family("muse_glimmer", _LAYER_TYPES),
    Family("plamo3", {"num_hidden_layers": 4, "window_size": WINDOW, "sliding_window_pattern": 2}),
    Family("spark2_5", {**_LAYER_TYPES, "rope_parameters": _ROPES}),
    Family("laguna", {
        **EXPERTS, **_LAYER_TYPES, "rope_parameters": _ROPES, "shared_expert_intermediate_size": 32,
    }),
    Family("step3p5", {**_LAYER_TYPES, "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2,
                       "moe_intermediate_size": 32, "share_expert_dim": 32, "moe_layers_enum": "1"}, moe=True),
    Family("afmoe", {**EXPERTS, **_LAYER_TYPES, "num_dense_layers": 1}),
    Family("exaone_moe", {**EXPERTS, **_LAYER_TYPES, "is_moe_layer": [False, True]}),
    Family("iquestloopcoder", {"loop_window_size": WINDOW}),
    Family("llama4", {"text_config": {
        **COMMON, "model_type": "llama4_text", "num_hidden_layers": 4, "attention_bias": False,
        "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 64,
        "num_experts_per_tok": 1, "num_local_experts": 2, "rope_scaling": None, "use_qk_norm": True,
    }}, moe=True),
)  # fmt: skip

SEVERAL = (
    Family("afm7", {
        "hidden_dim": 64, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2,
        "vocab_size": VOCABULARY,
    }),
    Family("nemotron-nas", {"block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    ], "num_hidden_layers": 3}),
    Family("nanbeige", {"num_loops": 2}),
    Family("deepseek_v32", {**EXPERTS, **LATENT, **_INDEXER}),
    Family("glm_moe_dsa", {
        **EXPERTS, **LATENT, **_INDEXER, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0}, "attention_bias": False,
    }),
    Family("longcat_flash", _LONGCAT, moe=True),
    Family("longcat_flash_ngram", {**_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 4,
                                   "emb_split_num": 2}, moe=True),
    Family("minimax_m3_vl", {"text_config": {
        **COMMON, **EXPERTS, "dense_intermediate_size": 64, "intermediate_size": 32, "shared_intermediate_size": 32,
        "moe_layer_freq": [0, 1], "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8,
        "index_topk_blocks": 4, "sparse_attention_freq": [0, 1],
    }}, moe=True),
    Family("deepseek_v41", {
        "num_hidden_layers": 4, "head_dim": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "o_groups": 2,
        "o_lora_rank": 16, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": WINDOW, "compress_ratios": [0, 4, 1, 8], "kv_source_layer_ids": [1, 2, 3],
        "index_source_layer_ids": [1, 2, 3], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 6,
        "hc_mult": 2, "hc_sinkhorn_iters": 3,
    }, moe=True),
)  # fmt: skip

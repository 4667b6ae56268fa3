"""More families whose caches are made up like those of others: here so that each still proves it by itself."""

from __future__ import annotations

from tests.families.base import COMMON, EXPERTS, LATENT, VOCABULARY, WINDOW, Family

_TEXT = {**COMMON, "model_type": "llama"}
_PHI = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 4096, "layer_norm_epsilon": 1e-5, "rotary_dim": 8}

ALIKE = (
    Family("apertus", {"mlp_bias": False, "attention_bias": False, "post_norm": False, "qk_norm": True}),
    Family("exaone", {"num_layers": 2, "layer_norm_epsilon": 1e-5}),
    Family("glm"),
    Family("gpt_bigcode", {**_PHI, "n_inner": 64}),
    Family("gptj", _PHI),
    Family("hunyuan_v1_dense"),
    Family("internlm2"),
    Family("llama4_text", {"intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "use_qk_norm": True}),
    Family("mimo"),
    Family("minicpm", {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12}),
    Family("openelm", {
        "num_transformer_layers": 2, "model_dim": 64, "ffn_dim_divisor": 8, "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 1.0],
    }),
    Family("phi", {"num_key_value_heads": 4}),
    Family("phi3small", {
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 64, "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5, "blocksparse_block_size": 64, "blocksparse_num_local_blocks": 2,
        "blocksparse_vert_stride": 2, "vocab_size": 100352,
    }),
    Family("plamo", {"n_shared_head": 2}),
    Family("qwen", {"kv_channels": 16, "no_bias": True, "layer_norm_epsilon": 1e-6}),
    Family("talkie", {"num_key_value_heads": 4}),
    Family("telechat3"),
    Family("lille-130m", {
        "block_size": 4096, "layer_norm_eps": 1e-5, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2,
    }),
    Family("mistral3", {"text_config": _TEXT}),
    Family("pixtral", {"text_config": _TEXT}),
    Family("qwen2_vl", {"text_config": {**COMMON, "model_type": "qwen2"}}),
    Family("qwen3_vl", {"text_config": {**COMMON, "model_type": "qwen3"}}),
    Family("gemma3", {"vocab_size": VOCABULARY, "text_config": {
        **COMMON, "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    }}),
    Family("gemma4", {"vocab_size": VOCABULARY, "text_config": {
        **COMMON, "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": WINDOW,
        "num_kv_shared_layers": 0, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
        "sliding_window_pattern": 2,
    }}),
    Family("Klear", {**EXPERTS, "attention_bias": False}),
    Family("bailing_moe", EXPERTS),
    Family("deepseek", EXPERTS),
    Family("dots1", EXPERTS),
    Family("ernie4_5_moe", {**EXPERTS, "use_bias": False, "moe_num_experts": 4, "moe_k": 2}),
    Family("granitemoe", {
        **EXPERTS, "logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5, "attention_bias": False,
    }),
    Family("hunyuan", {
        **EXPERTS, "moe_topk": [2, 2], "num_shared_expert": [1, 1], "use_mixed_mlp_moe": True, "use_cla": True,
        "cla_share_factor": 2, "attention_bias": False, "moe_intermediate_size": [32, 32],
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    }),
    Family("kimi_k25", {"text_config": {**COMMON, **EXPERTS, **LATENT, "model_type": "deepseek_v3"}}, moe=True),
    Family("kimi_vl", {"text_config": {**COMMON, **EXPERTS, **LATENT}}, moe=True),
    Family("mistral4", {**EXPERTS, **LATENT, "rope_parameters": {
        "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4096,
    }}),
    Family("phimoe", EXPERTS),
    Family("phixtral", {"num_vocab": VOCABULARY, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8},
           moe=True),
    Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    Family("qwen3_vl_moe", {"text_config": {**COMMON, **EXPERTS, "model_type": "qwen3_moe"}}, moe=True),
    Family("solar_open", {**EXPERTS, "partial_rotary_factor": 0.5}),
)  # fmt: skip

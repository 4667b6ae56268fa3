"""What the tables of families share: how small a tiny model is, and what a row says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.runtime.probe import CacheOptions

VOCABULARY = 96
WINDOW = 24
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "use_qk_norm": True,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model family in its tiniest form.

    Attributes:
        name: The module in ``mlx_lm.models``; also the config's ``model_type``.
        changes: Keys over :data:`COMMON`.
        moe: Whether it has a mixture of experts: those have no bf16 kernel on a CPU, so they run in float32.
        bits: Bits of the weights, where they are quantized; then experts run in bf16 too.
        options: How the caches are shaped, where not as the model makes them.
        thinned: Whether every third position of the prompt is dropped before the first put.
        label: What it is called, where the name is not enough.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    moe: bool | None = None
    bits: int | None = None
    options: CacheOptions = CacheOptions()  # noqa: RUF009 - frozen
    thinned: bool = False
    label: str = ""

    @property
    def title(self) -> str:
        """Its name in tables and tests."""
        return self.label or self.name

    @property
    def config(self) -> dict[str, Any]:
        """The config as ``config.json`` holds it."""
        inner = "text_config" in self.changes
        return {**({} if inner else COMMON), "model_type": self.name, **self.changes}

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        moe = "num_experts" in self.changes if self.moe is None else self.moe
        return "float32" if moe and self.bits is None else "bfloat16"

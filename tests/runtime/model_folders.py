"""Model folders made of a few bytes: enough for an identity, too little for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "rope_scaling": None,
    "_name_or_path": "someone/something", "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
}  # fmt: skip
TOKENIZER_CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
ADAPTER_CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora", "num_layers": 2, "iters": 100, "data": "somewhere",
    "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.1, "keys": ["self_attn.q_proj"]},
}  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; ``...`` as a value drops the key."""
    value = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: item for key, item in value.items() if item is not ...})


def fake_folder(path: Path, *, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True)
    write_json(path / "config.json", CONFIG if config is None else config)
    (path / "model-00001-of-00002.safetensors").write_bytes(bytes(range(256)) * 8)
    (path / "model-00002-of-00002.safetensors").write_bytes(b"weights two")
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    write_json(path / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(path / "generation_config.json", {"eos_token_id": 2})
    return path


def fake_adapter(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    write_json(path / "adapter_config.json", {**ADAPTER_CONFIG, **changes})
    (path / "adapters.safetensors").write_bytes(b"lora a and b")
    return path

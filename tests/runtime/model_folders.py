"""Model folders: some of a few bytes, enough for an identity; some with small real models."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
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


def read_arrays(path: str) -> dict[str, Any]:
    import mlx.core as mx

    loaded: Any = mx.load(path)
    return dict(loaded.items())


def real_folder(
    path: Path, config: dict[str, Any], *, seed: int = 0, bits: int | None = None, dtype: str = "float32",
    prepare: Callable[[Any], None] | None = None,
) -> Path:  # fmt: skip
    """A folder that mlx-lm loads: random weights for ``config``, and a tokenizer that knows ``w0`` to ``w63``.

    ``prepare`` may change the weights before they take their dtype.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils
    from tokenizers import Tokenizer, models, pre_tokenizers

    path.mkdir(parents=True)
    model_class, arguments = utils._get_classes(config)
    mx.random.seed(seed)
    model = model_class(arguments.from_dict(copy.deepcopy(config)))
    if prepare is not None:
        prepare(model)
    model.set_dtype(getattr(mx, dtype))
    if bits is not None:
        model, config = utils.quantize_model(model, dict(config), group_size=32, bits=bits)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    write_json(path / "config.json", config)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    return path


def real_adapter(
    path: Path, base: Path, *, kind: str = "lora", scale: float = 20.0, seed: int = 1, layers: int = 2
) -> Path:
    """An adapter with random weights for the model in ``base``; LoRA or DoRA, on the last ``layers`` layers."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils
    from mlx_lm.tuner.utils import linear_to_lora_layers

    path.mkdir(parents=True)
    parameters = {"rank": 2, "scale": scale, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    write_json(
        path / "adapter_config.json", {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    )
    mx.random.seed(seed)
    model, _ = utils.load_model(base)
    linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
    leaves = ("lora_a", "lora_b", "m")
    arrays = {n: a for n, a in tree_flatten(model.parameters()) if n.rpartition(".")[2] in leaves}
    trained = {n: mx.random.normal(a.shape) if n.endswith("lora_b") else a for n, a in arrays.items()}
    mx.save_safetensors(str(path / "adapters.safetensors"), trained)
    return path

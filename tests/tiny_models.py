"""Tiny models that read any text: random weights, a byte-level tokenizer with a chat template, real files.

For tests of layers that take text (the command line, the server, the demo). Tests that only need token ids use
``tests.runtime.tiny``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runtime.model_folders import real_folder, write_json
from tests.runtime.tiny import CONFIGS

SPECIAL = ("<pad>", "<eos>", "<bos>", "<|user|>", "<|assistant|>")
VOCABULARY = 320  # all bytes and the special tokens, with room to spare
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": 1, "bos_token_id": 2}

TINY: dict[str, dict[str, Any]] = {
    family: {**CONFIGS[family], **WITH_TEXT} for family in ("llama", "qwen3", "qwen3_next", "mamba2")
}
TINY["gemma3_text"] = {
    **CONFIGS["gemma3"], **WITH_TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
    "sliding_window_pattern": 3,
}  # fmt: skip


def make_tiny_model(path: Path, config: dict[str, Any], *, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """A folder for ``mlx_lm.load``: random weights for ``config``, and a tokenizer for any text.

    The same arguments give the same weights. On a CPU mixtures of experts (``qwen3_next``) run in float32 only.
    """
    real_folder(path, config, seed=seed, dtype=dtype)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>",
        "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    return path


def byte_tokenizer() -> Any:
    """Every byte a token, the special tokens before them; ``<bos>`` comes first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer

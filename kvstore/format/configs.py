"""The canonical form of a model folder's JSON files, which are foreign and free in form.

Two configs that a model cannot tell apart get one form: sorted keys, integral floats
as integers, fractions as number texts, and no *inert* keys. A null stays, since it
overrides a default where an absent key does not. Inert keys are those that no model of
mlx-lm reads, held to that by a test over its sources; the lists belong to version 1 of
the model identity, so another list is another version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.digest import Digest, Readable, tagged_digest
from kvstore.format.json import Json, bracket_depth, canonical_bytes, number_text
from kvstore.limits import MAX_EXACT_INT

__all__ = [
    "INERT_CONFIG_KEYS", "INERT_PROCESSOR_KEYS", "INERT_TOKENIZER_KEYS", "MAX_FOLDER_JSON_BYTES",
    "canonical_config", "canonical_json", "geometry", "parse_folder_json", "template_digest",
]  # fmt: skip

MAX_FOLDER_JSON_BYTES: Final = 64 * 2**20
"""Largest JSON file of a model folder that is parsed; weight indexes and tokenizers are not."""

_MAX_DEPTH: Final = 64
"""More than any model's files have, and far from where a recursive reader gives up."""

INERT_CONFIG_KEYS: Final = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "auto_map",
    "bos_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "router_aux_loss_coef", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip
"""Keys dropped from a config and from its ``text_config``: none of them reaches keys or values.

``torch_dtype`` is among them because mlx-lm computes in the dtype of the weight files,
whose digests are in the identity; the token ids are, because they only end a
generation. A config that names custom code (``model_file``) keeps every key.
"""

INERT_TOKENIZER_KEYS: Final = frozenset({
    "_commit_hash", "_name_or_path", "chat_template", "is_local", "local_files_only", "name_or_path",
    "processor_class", "special_tokens_map_file", "tokenizer_file", "transformers_version",
})  # fmt: skip
"""Keys dropped from ``tokenizer_config.json``: names, paths, and the template, which has its own digest."""

INERT_PROCESSOR_KEYS: Final = frozenset({"_commit_hash", "_name_or_path", "chat_template", "transformers_version"})

_TEMPLATE_TAG: Final = "kvstore chat template v1"
_GEOMETRY: Final = (
    "head_dim", "hidden_size", "kv_lora_rank", "n_embd", "n_head", "n_heads", "n_layer", "n_layers",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "qk_rope_head_dim", "sliding_window",
    "v_head_dim", "vocab_size",
)  # fmt: skip
_TAG: Final = "__float__"
_TAGGED: Final = frozenset({"Infinity", "-Infinity", "NaN"})


def parse_folder_json(data: Readable, what: str) -> dict[str, Any]:
    """Parse one JSON file of a model folder, as mlx-lm reads it (of two equal keys the last counts).

    Raises:
        InvalidError: MODEL_FOLDER_INVALID where it is not an object in UTF-8 JSON of bounded size and depth.
    """
    if len(data) > MAX_FOLDER_JSON_BYTES:
        raise fail(
            "MODEL_FOLDER_INVALID", f"{what} has too many bytes", expected=f"at most {MAX_FOLDER_JSON_BYTES}",
            found=len(data),
        )  # fmt: skip
    raw = bytes(data)
    if bracket_depth(raw, _MAX_DEPTH) > _MAX_DEPTH:
        raise fail("MODEL_FOLDER_INVALID", f"{what} is nested too deeply", expected=f"at most {_MAX_DEPTH} levels")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise fail("MODEL_FOLDER_INVALID", f"{what} is not JSON: {error}", fix="Fetch the model again.") from None
    if not isinstance(value, dict):
        raise fail("MODEL_FOLDER_INVALID", what, expected="a JSON object", found=type(value).__name__)
    return value


def canonical_config(config: Mapping[str, Any]) -> dict[str, Json]:
    """A model config in canonical form, without inert keys (see :data:`INERT_CONFIG_KEYS`)."""
    if config.get("model_file") is not None:
        return canonical_json(config)
    kept = {key: value for key, value in config.items() if key not in INERT_CONFIG_KEYS}
    text = kept.get("text_config")
    if isinstance(text, dict):
        kept["text_config"] = {key: value for key, value in text.items() if key not in INERT_CONFIG_KEYS}
    return canonical_json(kept)


def canonical_json(value: Mapping[str, Any], inert: frozenset[str] = frozenset()) -> dict[str, Json]:
    """Any parsed JSON object in the profile of ``kvstore.format.json``, without ``inert`` top-level keys."""
    return {_key(key): _value(item) for key, item in value.items() if key not in inert}


def geometry(config: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The numbers of a config that people compare models by, from it or else from its ``text_config``."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else {}
    found = {name: _count(config.get(name, inner.get(name))) for name in _GEOMETRY}
    return tuple((name, number) for name, number in sorted(found.items()) if number is not None)


def template_digest(templates: Mapping[str, str]) -> Digest | None:
    """Digest of chat templates by name (the usual one is ``default``); None where there is none."""
    return tagged_digest(_TEMPLATE_TAG, canonical_bytes(canonical_json(templates))) if templates else None


def _count(value: Any) -> int | None:
    """A whole number that the manifest can hold, or None."""
    number = _value(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return number if isinstance(number, int) and 0 <= number <= MAX_EXACT_INT else None


def _key(key: str) -> str:
    """Escape what the JSON profile does not allow in a key; one-to-one, since backslashes are escaped too."""
    return key if key.isascii() and "\\" not in key else json.dumps(key)[1:-1]


def _value(value: Any) -> Json:
    if isinstance(value, dict):
        # transformers tags non-finite numbers; mlx-lm undoes that, so both spellings are one config.
        if set(value) == {_TAG} and value[_TAG] in _TAGGED:
            return str(value[_TAG])
        return canonical_json(value)
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value)
    return value if isinstance(value, (bool, str)) else None


def _number(value: float) -> int | str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value == int(value) and abs(value) <= MAX_EXACT_INT:
        return int(value)
    return number_text(value)

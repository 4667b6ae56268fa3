"""The typed config that the dense-Qwen3.5 profile plans from, and how a Hugging Face config becomes one.

All numbers are unsigned 32-bit: a boolean, a float, a negative number or a larger one
has no place in it, whatever it would mean. Nothing is judged here; what a plan refuses
is in ``qwen35_plan``. Foreign JSON: our JSON profile does not apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from kvstore.errors import KVStoreError, fail
from kvstore.format.json import unique_pairs

__all__ = [
    "DEFAULT_INTERVAL", "MAX_CONFIG_BYTES", "LayerType", "Qwen35Config", "config_from_bytes", "parse_qwen35_config",
    "u32",
]  # fmt: skip

LayerType = Literal["full_attention", "linear_attention"]
U32_MAX: Final = 2**32 - 1
DEFAULT_INTERVAL: Final = 4
"""``full_attention_interval`` where a config has neither it nor ``layer_types``."""
MAX_CONFIG_BYTES: Final = 16 * 2**20
_MOST_LISTED: Final = 257
"""Layers that are listed where the config gives a rule instead of a list: one more than a plan may have."""
_DENSE: Final = ("qwen3_5", "qwen3_5_text")
_MIXTURE: Final = ("qwen3_5_moe", "qwen3_5_moe_text")
_EXPERTS: Final = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
_NUMBERS: Final = (
    "max_position_embeddings", "num_hidden_layers", "num_key_value_heads", "head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Qwen35Config:
    """What the plan reads of a model; fields are named as in Hugging Face configs.

    Attributes:
        layer_types: One for each layer.
        intermediate_size: Width of the dense feed-forward part, or None where there is none.
        num_experts: Experts of a mixture; 0 for a dense model.
        variant: ``dense``, or another name.
    """

    max_position_embeddings: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    intermediate_size: int | None
    num_experts: int = 0
    variant: str = "dense"

    def __post_init__(self) -> None:
        """Hold the types, however the object is made. Raises PLAN_CONFIG_INVALID."""
        for name in (*_NUMBERS, "num_experts"):
            u32(getattr(self, name), name)
        if self.intermediate_size is not None:
            u32(self.intermediate_size, "intermediate_size")
        for index, name in enumerate(self.layer_types):
            _layer_type(name, f"layer_types[{index}]")


def config_from_bytes(data: bytes) -> Qwen35Config:
    """The config in a ``config.json``.

    Raises:
        InvalidError: PLAN_CONFIG_INVALID.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid("the document", f"at most {MAX_CONFIG_BYTES} bytes", len(data))
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the document is not JSON: {str(error)[:80]}") from None
    return parse_qwen35_config(value)


def parse_qwen35_config(document: Any) -> Qwen35Config:
    """The config in a parsed document: its ``text_config`` where that is present and not null, else itself.

    Layers for multi-token prediction are not read. Where ``layer_types`` is absent, layer ``i`` is linear unless
    ``i + 1`` is a multiple of ``full_attention_interval``.

    Raises:
        InvalidError: PLAN_CONFIG_INVALID, naming the field.
    """
    outer = _object(document, "the document")
    inner = outer.get("text_config")
    text = outer if inner is None else _object(inner, "text_config")
    numbers = {name: u32(_field(text, name), name) for name in _NUMBERS}
    size = text.get("intermediate_size")
    return Qwen35Config(
        **numbers,
        layer_types=_layer_types(text, numbers["num_hidden_layers"]),
        intermediate_size=None if size is None else u32(size, "intermediate_size"),
        num_experts=_experts(text),
        variant=_variant(outer, text),
    )


def u32(value: Any, name: str) -> int:
    """The value if it is an integer that 32 unsigned bits hold.

    Raises:
        InvalidError: PLAN_CONFIG_INVALID.
    """
    if type(value) is not int:
        raise _invalid(name, "an unsigned 32-bit integer", f"{type(value).__name__} {value!r}"[:80])
    if not 0 <= value <= U32_MAX:
        raise _invalid(name, f"0 to {U32_MAX}", value)
    return value


def _layer_types(text: Mapping[str, Any], count: int) -> tuple[LayerType, ...]:
    listed = text.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list):
            raise _invalid("layer_types", "an array", type(listed).__name__)
        return tuple(_layer_type(name, f"layer_types[{index}]") for index, name in enumerate(listed))
    interval = u32(text.get("full_attention_interval", DEFAULT_INTERVAL), "full_attention_interval")
    if interval == 0:
        raise _invalid("full_attention_interval", "at least 1", 0)
    return tuple(
        "full_attention" if (index + 1) % interval == 0 else "linear_attention"
        for index in range(min(count, _MOST_LISTED))
    )


def _layer_type(name: Any, where: str) -> LayerType:
    if name not in get_args(LayerType):
        raise _invalid(where, " or ".join(get_args(LayerType)), name)
    return cast("LayerType", name)


def _experts(text: Mapping[str, Any]) -> int:
    """Experts, by whichever key a config tells of them; 0 where it tells of none."""
    return max((u32(text[name], name) for name in _EXPERTS if text.get(name) is not None), default=0)


def _variant(outer: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """``dense``, or the model type of a mixture. A config without a model type is taken at its fields' word."""
    for part in (text, outer):
        name = part.get("model_type")
        if name is None or name in _DENSE:
            continue
        if name in _MIXTURE:
            return str(name)
        raise _invalid("model_type", "one of " + ", ".join((*_DENSE, *_MIXTURE)), name)
    return "dense"


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(where, "an object", type(value).__name__)
    return value


def _field(text: Mapping[str, Any], name: str) -> Any:
    if name not in text:
        raise _invalid(f"{name} is absent")
    return text[name]


def _invalid(what: str, expected: Any = None, found: Any = None) -> KVStoreError:
    return fail(
        "PLAN_CONFIG_INVALID", f"Qwen3.5 config: {what}", expected=expected, found=found,
        fix="Give the config.json of a dense Qwen3.5 text model.",
    )  # fmt: skip

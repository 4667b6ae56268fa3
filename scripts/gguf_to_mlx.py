"""Turn a Gemma 3 GGUF file into the folder that ``mlx_lm.load`` reads.

What a GGUF file does differently from an MLX folder, all of it undone here:

* weights are quantized in blocks; they become bf16, rounded to nearest even;
* tensors have llama.cpp's names; they get those of ``mlx_lm.models.gemma3_text``;
* an RMS norm is stored as ``1 + w``; the MLX model adds the one itself, so ``w`` is written;
* the base of the local rotary embedding, the query scale and the period of the global
  layers are constants of the architecture and not in the file.

Rows of q and k are *not* permuted: Gemma's rotary embedding pairs the two halves of a
head in both formats. The output head is tied to the embedding, so it is not written.

The weights file is written here rather than by MLX so that its bytes, and with them the
model digest, depend on the GGUF file alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from scripts.gemma_tokenizer import Vocabulary, write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

__all__ = ["ConversionError", "convert", "mlx_name", "model_config", "to_bf16", "write_safetensors"]

_ROWS_AT_ONCE: Final = 16384  # bounds the float32 scratch of the embedding to 40 MiB

_TOP: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class ConversionError(Exception):
    """The GGUF file is not a Gemma 3 text model as this module knows it."""


def mlx_name(name: str) -> str:
    """The name in ``mlx_lm.models.gemma3_text`` of the GGUF tensor ``name``.

    Raises:
        ConversionError: The architecture has no such tensor.
    """
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is None or found[2] not in _BLOCK:
        raise ConversionError(f"unknown tensor {name!r}: this is not a Gemma 3 text model")
    return f"model.layers.{found[1]}.{_BLOCK[found[2]]}.weight"


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bf16 bit patterns of finite float32 ``values``, rounded to nearest even.

    Raises:
        ConversionError: A value is NaN or infinite: no weight is.
    """
    if not np.isfinite(values).all():
        raise ConversionError("a weight is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` for the metadata ``fields`` of a GGUF file.

    Raises:
        ConversionError: Another architecture, a missing field, or heads of unequal sizes.
    """
    if (found := fields.get("general.architecture")) != "gemma3":
        raise ConversionError(f"expected architecture 'gemma3', found {found!r}")
    try:
        one = {name.removeprefix("gemma3."): value for name, value in fields.items() if name.startswith("gemma3.")}
        if one["attention.key_length"] != one["attention.value_length"]:
            raise ConversionError("keys and values have different head sizes")
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": one["embedding_length"],
            "num_hidden_layers": one["block_count"],
            "intermediate_size": one["feed_forward_length"],
            "num_attention_heads": one["attention.head_count"],
            "num_key_value_heads": one["attention.head_count_kv"],
            "head_dim": one["attention.key_length"],
            "rms_norm_eps": _shortest(one["attention.layer_norm_rms_epsilon"]),
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "rope_theta": _shortest(one["rope.freq_base"]),
            "sliding_window": one["attention.sliding_window"],
            "max_position_embeddings": one["context_length"],
            # The four that no GGUF field holds: constants of Gemma 3.
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
            "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        }
    except KeyError as missing:
        raise ConversionError(f"the GGUF metadata has no field {missing}") from None


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], parts: Iterator[bytes]) -> None:
    """Write bf16 tensors, given as the concatenated ``parts`` of all of them in name order.

    Args:
        path: The file to write.
        shapes: Shape by tensor name.
        parts: The bytes of the tensors, sorted by name, cut anywhere.

    Raises:
        ConversionError: ``parts`` has not as many bytes as the shapes say.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + 2 * int(np.prod(shapes[name]))
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(part) for part in parts)
    if written != end:
        raise ConversionError(f"expected {end} bytes of weights, found {written}")


def convert(gguf: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files of ``gguf`` into ``folder``.

    Raises:
        ConversionError: The file is not a Gemma 3 text model, or a tensor is missing or unknown.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    tensors = _tensors_by_name(reader, layers=config["num_hidden_layers"])
    # GGUF lists the fastest axis first.
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    vocabulary = Vocabulary.from_gguf(fields)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(vocabulary, folder, chat_template=fields.get("tokenizer.chat_template"))
    write_safetensors(
        folder / "model.safetensors", shapes, (part for name in sorted(tensors) for part in _bf16_parts(tensors[name]))
    )


def _tensors_by_name(reader: GGUFReader, *, layers: int) -> dict[str, ReaderTensor]:
    """The file's tensors by MLX name, exactly those that the architecture has."""
    found = {mlx_name(tensor.name): tensor for tensor in reader.tensors}
    names = {f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in _BLOCK.values()}
    if wrong := sorted((names | set(_TOP.values())) ^ set(found)):
        raise ConversionError(f"the GGUF file lacks tensors, or has too many: {', '.join(wrong[:4])}")
    return found


def _bf16_parts(tensor: ReaderTensor) -> Iterator[bytes]:
    """The tensor's bf16 bytes, some rows at a time so that float32 never holds all of it."""
    from gguf import dequantize

    for start in range(0, len(tensor.data), _ROWS_AT_ONCE):
        values = dequantize(tensor.data[start : start + _ROWS_AT_ONCE], tensor.tensor_type)
        if tensor.name.endswith("_norm.weight"):
            values = values - np.float32(1)
        yield to_bf16(values).tobytes()


def _shortest(value: float) -> float:
    """A float32 field as the decimal that people write: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))

"""A GGUF file becomes the model that it came from: names, norms, dtypes, constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from scripts.gguf_to_mlx import ConversionError, convert, mlx_name, model_config, to_bf16, write_safetensors
from tests.test_gemma_tokenizer import SMALL, small_fields

Floats = npt.NDArray[np.float32]
# Six layers: the model looks at the first global one.
LAYERS, WIDTH, HEAD, INNER = 6, 32, 32, 64
VOCABULARY = len(SMALL.pieces)
SHAPES = {
    "attn_q": (2 * HEAD, WIDTH), "attn_k": (HEAD, WIDTH), "attn_v": (HEAD, WIDTH), "attn_output": (WIDTH, 2 * HEAD),
    "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
    "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,), "attn_norm": (WIDTH,), "post_attention_norm": (WIDTH,),
    "ffn_norm": (WIDTH,), "post_ffw_norm": (WIDTH,),
}  # fmt: skip


def metadata() -> dict[str, Any]:
    """The fields of a small Gemma 3 GGUF file."""
    return {
        "general.architecture": "gemma3", "gemma3.context_length": 128, "gemma3.embedding_length": WIDTH,
        "gemma3.block_count": LAYERS, "gemma3.feed_forward_length": INNER, "gemma3.attention.head_count": 2,
        "gemma3.attention.head_count_kv": 1, "gemma3.attention.key_length": HEAD, "gemma3.attention.value_length": HEAD,
        "gemma3.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)), "gemma3.rope.freq_base": 1e6,
        "gemma3.attention.sliding_window": 16, **small_fields(),
    }  # fmt: skip


def tensors(seed: int = 0) -> dict[str, Floats]:
    """Float32 values by GGUF name."""
    random = np.random.default_rng(seed)
    shapes = {f"blk.{layer}.{part}.weight": shape for layer in range(LAYERS) for part, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, values: dict[str, Floats]) -> Path:
    """A real GGUF file; matrices in Q8_0, the rest in float32."""
    writer = GGUFWriter(path, "gemma3")
    for name, value in metadata().items():
        if name == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    for name, array in values.items():
        if array.ndim == 2:
            packed = quantize(array, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    convert(write_gguf(tmp_path / "small.gguf", tensors()), made)
    return made


def same(array: mx.array, values: Floats) -> bool:
    return array.dtype == mx.bfloat16 and bool(mx.array_equal(array, mx.array(values).astype(mx.bfloat16)).item())


def unpacked(values: Floats) -> Floats:
    found: Floats = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    return found


def test_every_weight_arrives(folder: Path) -> None:
    import mlx_lm

    model, tokenizer, *_ = mlx_lm.load(str(folder))
    given, layer = tensors(), model.layers[1]
    assert same(model.model.embed_tokens.weight, unpacked(given["token_embd.weight"]))
    for own, name in [
        (layer.self_attn.q_proj, "attn_q"), (layer.self_attn.k_proj, "attn_k"), (layer.self_attn.v_proj, "attn_v"),
        (layer.self_attn.o_proj, "attn_output"), (layer.mlp.gate_proj, "ffn_gate"), (layer.mlp.up_proj, "ffn_up"),
        (layer.mlp.down_proj, "ffn_down"),
    ]:  # fmt: skip
        assert same(own.weight, unpacked(given[f"blk.1.{name}.weight"])), name
    for own, name in [
        (layer.input_layernorm, "attn_norm"), (layer.post_attention_layernorm, "post_attention_norm"),
        (layer.pre_feedforward_layernorm, "ffn_norm"), (layer.post_feedforward_layernorm, "post_ffw_norm"),
        (layer.self_attn.q_norm, "attn_q_norm"), (layer.self_attn.k_norm, "attn_k_norm"),
    ]:  # fmt: skip
        assert same(own.weight, given[f"blk.1.{name}.weight"] - np.float32(1)), name
    assert same(model.model.norm.weight, given["output_norm.weight"] - np.float32(1))
    ids = tokenizer.encode("the here")
    assert model(mx.array([ids])).shape == (1, len(ids), VOCABULARY)


def test_the_bytes_depend_on_the_gguf_file_alone(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    convert(tmp_path / "small.gguf", again)
    assert {path.name for path in again.iterdir()} == {path.name for path in folder.iterdir()}
    assert all((again / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


def test_constants_that_no_gguf_field_holds() -> None:
    config = model_config(metadata())
    expected = {
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6,
        "model_type": "gemma3_text", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 16,
        "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_key_value_heads": 1, "head_dim": HEAD,
        "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "llama"}, "expected architecture 'gemma3', found 'llama'"),
        ({"gemma3.attention.value_length": 64}, "different head sizes"),
        ({"gemma3.block_count": None}, "no field 'block_count'"),
        ({"tokenizer.ggml.eos_token_id": None}, "no field 'tokenizer.ggml.eos_token_id'"),
    ],
)
def test_other_files_are_refused(change: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in {**metadata(), **change}.items() if value is not None}
    with pytest.raises(ConversionError, match=message):
        model_config(fields)


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("blk.1.ffn_up.weight", "", "model.layers.1.mlp.up_proj.weight"),
        ("", "blk.6.ffn_up.weight", "model.layers.6.mlp.up_proj.weight"),
        ("", "blk.0.attn_q.bias", "unknown tensor 'blk.0.attn_q.bias'"),
    ],
)
def test_missing_and_unknown_tensors_are_refused(tmp_path: Path, drop: str, add: str, message: str) -> None:
    values = {name: array for name, array in tensors().items() if name != drop}
    if add:
        values[add] = np.zeros(WIDTH, dtype=np.float32)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConversionError, match=message):
        convert(write_gguf(tmp_path / "wrong.gguf", values), out)
    assert list(out.iterdir()) == []


def test_names() -> None:
    assert mlx_name("blk.17.ffn_norm.weight") == "model.layers.17.pre_feedforward_layernorm.weight"
    assert mlx_name("blk.0.post_ffw_norm.weight") == "model.layers.0.post_feedforward_layernorm.weight"
    assert mlx_name("output_norm.weight") == "model.norm.weight"


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8))
def test_bf16_is_rounded_as_mlx_rounds(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    assert to_bf16(array).tolist() == np.array(mx.array(array).astype(mx.bfloat16).view(mx.uint16)).tolist()


def test_bf16_ties_go_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x80000000], dtype=np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x8000]


def test_a_weight_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConversionError, match="not finite"):
        to_bf16(np.array([1.0, np.nan], dtype=np.float32))


def test_weights_of_another_size_than_their_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="expected 12 bytes of weights, found 10"):
        write_safetensors(tmp_path / "x.safetensors", {"a": (2, 3)}, iter([bytes(4), bytes(6)]))


def test_the_weights_file_is_one_that_the_reference_package_reads(tmp_path: Path) -> None:
    import safetensors

    deserialize: Any = safetensors.deserialize
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"b": (2,), "a": (1, 2)}, iter([b"\x80\x3f\x00", b"\x40\x40\x40\x00\x00"]))
    assert dict(deserialize(path.read_bytes())) == {
        "a": {"shape": [1, 2], "dtype": "BF16", "data": bytearray(b"\x80\x3f\x00\x40")},
        "b": {"shape": [2], "dtype": "BF16", "data": bytearray(b"\x40\x40\x00\x00")},
    }

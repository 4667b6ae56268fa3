"""The documents of wp30-cache-2 files, and the headers that carry them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from kvstore.errors import KVStoreError
from kvstore.format.foreign_tensors import emit_foreign_header, header_length, parse_foreign_header
from kvstore.format.layers import TensorRecord
from kvstore.format.tensors import DTYPE_SIZES
from kvstore.format.wp30 import (
    CORE_KEYS,
    Wp30Layer,
    build_manifest,
    dtype_text,
    emit_layers,
    parse_layer_lines,
    parse_wp30,
    prefix_token_hash,
)
from kvstore.format.wp30_codec import CODECS, codec_of, compressed

SHAPES = st.tuples(st.just(1), st.integers(1, 4), st.integers(0, 9), st.integers(1, 8))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6,
)  # fmt: skip
FREE = ("created_utc", "config_hash", "rope_theta", "rope_scaling", "document_id", "method_id", "compression_config")


@st.composite
def layers(draw: Any) -> Wp30Layer:
    count = draw(st.sampled_from((1, 3)))
    shapes = [tuple(draw(SHAPES) for _ in range(count)) for _ in "kv"]
    quantization = (4, 64) if count == 3 else (None, None)
    name = "QuantizedKVCache" if count == 3 else draw(st.sampled_from(("KVCache", "SparseKVCache", "Ünknown")))
    return Wp30Layer(
        draw(st.integers(0, 9)), name, shapes[0], shapes[1], ("mlx.core.bfloat16",) * count, shapes[0][0][2],
        draw(st.integers(0, 99)), *quantization,
    )  # fmt: skip


@given(
    made=st.lists(layers(), max_size=3), facts=st.dictionaries(st.sampled_from(FREE), VALUES),
    extra=st.dictionaries(st.text(min_size=1, max_size=5).filter(lambda k: k not in CORE_KEYS), VALUES, max_size=3),
)  # fmt: skip
def test_documents_there_and_back(made: list[Wp30Layer], facts: dict[str, Any], extra: dict[str, Any]) -> None:
    manifest = build_manifest(facts, made, [1, 2, 3], extra=extra)
    assert parse_wp30(manifest.text()) == manifest
    assert parse_wp30(manifest.text()).text() == manifest.text()
    assert list(manifest.to_json()) == [*CORE_KEYS, *extra]
    assert manifest.text().isascii()
    assert parse_layer_lines(emit_layers(made)) == tuple(layer.line() for layer in made)


def test_a_known_list() -> None:
    quantized = Wp30Layer(1, "QuantizedKVCache", ((1, 2, 3, 4),) * 3, ((1, 2, 3, 4),) * 3, ("x",) * 3, 3, 9, 4, 64)
    plain = Wp30Layer(0, "SparseKVCache", ((1, 2, 3, 4),), ((1, 2, 3, 4),), ("mlx.core.bfloat16",), 3, 9)
    assert emit_layers([plain, quantized]) == (
        '[{"cls": "SparseKVCache", "offset": 9, "n_kept": 3}, '
        '{"cls": "QuantizedKVCache", "offset": 9, "group_size": 64, "bits": 4, "n_kept": 3}]'
    )
    assert json.dumps(plain.to_json(), separators=(",", ":")) == (
        '{"layer":0,"cls":"SparseKVCache","k_shape":[1,2,3,4],"v_shape":[1,2,3,4],"dtype":"mlx.core.bfloat16",'
        '"stored_positions":3,"logical_offset":9}'
    )
    assert list(quantized.to_json()) == [
        "layer", "cls", "k_shapes", "v_shapes", "dtypes", "bits", "group_size", "stored_positions", "logical_offset"
    ]  # fmt: skip


def test_the_hash_of_a_prefix() -> None:
    """sha256 of ``1,22,333`` and of nothing, by the command line's sha256sum."""
    assert prefix_token_hash([1, 22, 333]) == "8915516745284e69425d3f566025a855f5a5718d6d44f09451fb19d0f61fc185"
    assert prefix_token_hash([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_what_is_said_of_the_prefix_is_never_taken_from_outside() -> None:
    manifest = build_manifest({"prefix_token_count": 9, "schema_version": "x", "num_layers": 4}, [], [5])
    assert manifest.fields["prefix_token_count"] == 1
    assert manifest.fields["num_layers"] == 0
    assert parse_wp30(manifest.text()) == manifest


@pytest.mark.parametrize("dtype", DTYPE_SIZES)
def test_every_dtype_has_a_text(dtype: str) -> None:
    assert dtype_text(dtype).startswith("mlx.core.")


@given(specs=st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda n: n != "__metadata__"),
    st.tuples(st.sampled_from(["U8", "F16", "F32", "I64"]), st.lists(st.integers(0, 3), max_size=3)), max_size=4,
), metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))  # fmt: skip
def test_headers_there_and_back(specs: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    tensors = [(name, TensorRecord(dtype, tuple(shape))) for name, (dtype, shape) in specs.items()]
    data = emit_foreign_header(tensors, metadata)
    assert header_length(data[:8]) == len(data) - 8
    assert len(data) % 8 == 0
    header = parse_foreign_header(data[8:])
    assert header.records == dict(tensors)
    assert header.metadata == metadata
    if "" not in specs:
        loaded = load(data + bytes(header.data_bytes))
        assert {name: list(array.shape) for name, array in loaded.items()} == {n: s for n, (_, s) in specs.items()}


@pytest.mark.parametrize("first", [b"", bytes(8), b"\x01" + bytes(7), (2**25).to_bytes(8, "little"), b"\xff" * 8])
def test_lengths_that_are_none(first: bytes) -> None:
    with pytest.raises(KVStoreError) as caught:
        header_length(first)
    assert caught.value.code == "CACHE_FILE_INVALID"


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_are_told_by_content(codec: Any) -> None:
    data = b"".join(bytes(part) for part in compressed([b"{}", memoryview(b"more")], codec))
    assert codec_of(data) == codec
    for level in (1, 9):
        assert codec_of(b"".join(bytes(part) for part in compressed([b"x"], codec, level))) == codec

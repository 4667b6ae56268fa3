"""wp30-cache-2 files in both directions, against a writer and a reader that know nothing of kvstore."""

from __future__ import annotations

import gc
import gzip
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import zstandard
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import kvstore
from kvstore.format.wp30_check import Receiver, check_compatible
from kvstore.runtime.sparse import SparseKVCache, SparseQuantizedKVCache
from kvstore.runtime.wp30_file import inspect_wp30, is_wp30, read_wp30
from kvstore.runtime.wp30_notes import claims_in, extra_in, method_of
from tests.runtime import wp30_reference as reference
from tests.runtime.driving import code_of, feed, odd_bits, same_bits
from tests.runtime.tiny import tokens
from tests.runtime.wp30_reference import Layer

CODECS = ("none", "gzip", "zstd")


def dense(count: int = 20, seed: int = 0, cls: str = "KVCache") -> Layer:
    k, v = odd_bits((1, 2, count, 32), mx.bfloat16, seed), odd_bits((1, 2, count, 32), mx.bfloat16, seed + 1)
    return Layer(cls, k, v, count, count)


def thin(count: int = 20, kept: int = 7, cls: str = "SparseKVCache") -> Layer:
    layer = dense(kept, 5, cls)
    layer.offset = count
    return layer


def packed(count: int = 20, kept: int = 20, cls: str = "QuantizedKVCache") -> Layer:
    sides = [mx.quantize(mx.random.normal((1, 2, kept, 32), key=mx.random.key(s)), 32, 4) for s in (1, 2)]
    return Layer(cls, tuple(sides[0]), tuple(sides[1]), count, kept, 4, 32)


def written(path: Path, layers: list[Layer], *, codec: str = "none", ids: list[int] | None = None,
            lines: Any = None, extra: dict[str, Any] | None = None, **facts: Any) -> Path:  # fmt: skip
    document = reference.manifest(layers, tokens(20) if ids is None else ids, extra, **facts)
    path.write_bytes(reference.pack(reference.serialize(layers, document, lines), codec))
    return path


def read(path: Path, **options: Any) -> Any:
    return read_wp30(path, tokens(20), receiver=None, **options)


@pytest.mark.parametrize("codec", CODECS)
def test_what_another_wrote_is_read_to_the_bit(tmp_path: Path, codec: str) -> None:
    layers = [dense(), thin(), packed(), packed(kept=9, cls="SparseQuantizedKVCache"), thin(cls="SomeCompressedCache")]
    path = written(tmp_path / "c", layers, codec=codec, method_id="Keep Half!", compression_config={"ratio": 0.5})
    assert is_wp30(path)
    found = read(path)
    assert [type(item) for item in found.cache] == [
        KVCache, SparseKVCache, QuantizedKVCache, SparseQuantizedKVCache, SparseKVCache
    ]  # fmt: skip
    for item, layer in zip(found.cache, layers, strict=True):
        assert same_bits(item.keys, layer.k)
        assert same_bits(item.values, layer.v)
        assert item.offset == 20
        assert getattr(item, "rows", 20) == layer.n_kept
    assert (found.cache[2].bits, found.cache[2].group_size) == (4, 32)
    assert found.info.codec == codec
    assert found.method is not None
    assert (found.method.name, found.method.config) == ("keep-half-", '{"ratio":0.5}')
    assert found.annotations["wp30.codec"] == codec
    assert found.milliseconds > 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_look_reads_no_array(tmp_path: Path, codec: str) -> None:
    path = written(tmp_path / "c", [dense(), thin()], codec=codec)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    info = inspect_wp30(path)
    assert mx.get_peak_memory() <= before
    assert info.manifest.fields["document_id"] == "doc-é"
    assert info.payload_bytes == 2 * 2 * 32 * 2 * 27
    assert {field.name for field in fields(info)} == {"manifest", "codec", "file_bytes", "payload_bytes"}
    if codec == "none":  # the arrays may even be damaged
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert inspect_wp30(path) == info


def test_claims_become_annotations(tmp_path: Path) -> None:
    extra = {"note": "x", "score": 0.25, "document_id": "another"}
    found = read(written(tmp_path / "c", [dense()], extra=extra))
    notes = found.annotations
    assert notes["wp30.document_id"] == "another"
    assert notes["wp30.created_utc"] == "2026-03-04T05:06:07Z"
    assert (notes["wp30.extra.note"], notes["wp30.extra.score"]) == ("x", "0.25")
    assert (notes["wp30.mlx_version"], notes["wp30.mlx_lm_version"]) == ("0.30.1", "0.30.0")
    claims = claims_in(notes)
    assert claims["config_hash"] == "c0"
    assert claims["rope_theta"] == 10000.0
    assert extra_in(claims) == {"note": "x", "score": 0.25}
    assert claims_in({}) == claims_in({"wp30.claims": "{"}) == claims_in({"wp30.claims": "[]"}) == {}
    assert method_of(found.info.manifest) is None


def line(layer: Layer, **changes: Any) -> list[dict[str, Any]]:
    return [{"cls": layer.cls, "offset": layer.offset, "n_kept": layer.n_kept, **changes}]


def record(**changes: Any) -> dict[str, Any]:
    return {"layers": [{**reference._record(0, dense()), **changes}]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"extra": {"schema_version": "wp30-cache-1"}}, "wp30-cache-1"),
    "a missing field": ({"drop": "document_id"}, "document_id is absent"),
    "positions": ({"positions": "keys before RoPE"}, "positions"),
    "mask": ({"causal_mask_semantics": "none"}, "causal_mask_semantics"),
    "count of ids": ({"prefix_token_count": 19}, "offset of layer 0"),
    "count that is true": ({"prefix_token_count": True}, "prefix_token_count"),
    "hash of ids": ({"prefix_token_hash": "0" * 64}, "hash of the token ids"),
    "hash that is none": ({"prefix_token_hash": None}, "prefix_token_hash"),
    "layers": ({"num_layers": 2}, "number of layers of the manifest"),
    "list": ({"lines": []}, "items in the list"),
    "list that is none": ({"lines": {}}, "wp30_layers"),
    "class": ({"lines": line(dense(), cls="Other")}, "in the manifest and in the list"),
    "offset": ({"lines": line(dense(), offset=21)}, "in the manifest and in the list"),
    "kept": ({"lines": line(dense(), n_kept=19)}, "in the manifest and in the list"),
    "number of a layer": ({"extra": record(layer=1)}, "number of layer 0"),
    "shape": ({"extra": record(k_shape=[1, 2, 20, 16])}, "shape of L0.k"),
    "shape of v": ({"extra": record(v_shape=[1, 2, 21, 32])}, "shape of L0.v"),
    "no shape": ({"extra": record(k_shape=None)}, "k_shape"),
    "dtype": ({"extra": record(dtype="mlx.core.float16")}, "dtype of L0.k"),
    "no dtype": ({"extra": record(dtype=None)}, "dtypes of K"),
    "stored positions": ({"extra": record(stored_positions=19), "lines": line(dense(), n_kept=19)}, "stored positions"),
    "a quantized name": ({"extra": record(cls="QuantizedKVCache")}, "k_shapes"),
    "a negative number": ({"extra": record(logical_offset=-1)}, "logical_offset"),
    "layers that are none": ({"extra": {"layers": {}}}, "layers"),
    "a layer that is none": ({"extra": {"layers": [3]}}, "layers[0]"),
    "a class that is none": ({"extra": record(cls=None)}, "cls"),
}


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("name", BAD)
def test_what_disagrees_is_refused(tmp_path: Path, name: str, codec: str) -> None:
    changes, text = BAD[name]
    changes = dict(changes)
    lines, extra, drop = (changes.pop(key, None) for key in ("lines", "extra", "drop"))
    document = reference.manifest([dense()], tokens(20), extra, **changes)
    document.pop(drop, None)
    path = tmp_path / "c"
    path.write_bytes(reference.pack(reference.serialize([dense()], document, lines), codec))
    with pytest.raises(kvstore.KVStoreError) as caught:
        read(path)
    assert caught.value.code == ("MEDIA_TYPE_UNKNOWN" if name == "schema" else "CACHE_FILE_INVALID")
    assert text in caught.value.message


@pytest.mark.parametrize("cls", ["RotatingKVCache", "ChunkedKVCache", "ArraysCache", "CacheList", "BatchKVCache"])
def test_what_lost_its_state_is_refused(tmp_path: Path, cls: str) -> None:
    path = written(tmp_path / "c", [dense(cls=cls)])
    assert code_of(read, path) == "CACHE_FILE_INVALID"


def test_more_rows_than_tokens(tmp_path: Path) -> None:
    layer = dense(256)
    layer.offset = 20
    assert code_of(read, written(tmp_path / "c", [layer])) == "CACHE_FILE_INVALID"


def test_other_token_ids(tmp_path: Path) -> None:
    path = written(tmp_path / "c", [dense()])
    assert code_of(read_wp30, path, tokens(19), receiver=None) == "CACHE_FILE_INVALID"
    assert code_of(read_wp30, path, tokens(20, 1), receiver=None) == "CACHE_FILE_INVALID"


def with_tensors(path: Path, change: Any) -> Path:
    """A sound file whose arrays are others."""
    layers = [dense()]
    data = reference.serialize(layers, reference.manifest(layers, tokens(20)))
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    body = change(header, body)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    return path


CHANGES: dict[str, Any] = {
    "one more": lambda h, b: (h.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), b)[1],
    "one less": lambda h, b: (h.pop("L0.v"), b)[1],
    "renamed": lambda h, b: (h.update({"L0.k0": h.pop("L0.k")}), b)[1],
    "overlap": lambda h, b: (h["L0.v"].update(data_offsets=h["L0.k"]["data_offsets"]), b)[1],
    "hole": lambda h, b: (h["L0.v"].update(data_offsets=[n + 8 for n in h["L0.v"]["data_offsets"]]), b + bytes(8))[1],
    "short span": lambda h, b: (h["L0.v"].update(shape=[1, 2, 20, 33]), b)[1],
    "three offsets": lambda h, b: (h["L0.v"].update(data_offsets=[0, 1, 2]), b)[1],
    "a negative extent": lambda h, b: (h["L0.v"].update(shape=[1, 2, -20, 32]), b)[1],
    "no entry": lambda h, b: (h.update({"L0.v": 3}), b)[1],
    "no metadata": lambda h, b: (h.pop("__metadata__"), b)[1],
    "metadata of numbers": lambda h, b: (h.update(__metadata__={"a": 1}), b)[1],
    "one key of two": lambda h, b: (h["__metadata__"].pop("wp30_layers"), b)[1],
    "a manifest that is not JSON": lambda h, b: (h["__metadata__"].update(wp30_manifest="{"), b)[1],
    "a manifest that is no object": lambda h, b: (h["__metadata__"].update(wp30_manifest="[]"), b)[1],
    "a key twice": lambda h, b: (h["__metadata__"].update(wp30_manifest='{"a":1,"a":2}'), b)[1],
    "no number": lambda h, b: (h["__metadata__"].update(wp30_manifest='{"a":NaN}'), b)[1],
    "longer": lambda h, b: b + b"x",
    "shorter": lambda h, b: b[:-1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_arrays_that_are_others(tmp_path: Path, name: str) -> None:
    assert code_of(read, with_tensors(tmp_path / "c", CHANGES[name])) == "CACHE_FILE_INVALID"


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", 3])
def test_dtypes_that_mlx_has_not(tmp_path: Path, dtype: Any) -> None:
    def change(header: dict[str, Any], body: bytes) -> bytes:
        spans = header["L0.v"]["data_offsets"]
        header["L0.v"].update(dtype=dtype, shape=[(spans[1] - spans[0]) // 8])
        return body

    assert code_of(read, with_tensors(tmp_path / "c", change)) == "DTYPE_UNSUPPORTED"


@pytest.mark.parametrize("data", [
    b"", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"short", bytes(8) + b"{}", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]",
    (4).to_bytes(8, "little") + b"\xff\xfe{}", (9).to_bytes(8, "little") + b'{"a": {"b"', gzip.compress(b"text"),
])  # fmt: skip
def test_files_that_are_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(data)
    assert not is_wp30(path)
    assert code_of(inspect_wp30, path) == "CACHE_FILE_INVALID"
    assert not is_wp30(tmp_path / "none")
    assert code_of(inspect_wp30, tmp_path / "none") == "CACHE_FILE_INVALID"


def test_mlx_lms_own_files_are_none(tmp_path: Path) -> None:
    from mlx_lm.models.cache import save_prompt_cache

    save_prompt_cache(str(tmp_path / "c.safetensors"), [feed(KVCache(), [3])])
    assert not is_wp30(tmp_path / "c.safetensors")


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_every_truncation_and_trailing_bytes(tmp_path: Path, codec: str) -> None:
    path = written(tmp_path / "c", [thin(kept=1)], codec=codec)
    data = path.read_bytes()
    for end in {*range(0, len(data), 7), len(data) - 1, len(data) - 4, len(data) - 8}:
        path.write_bytes(data[:end])
        assert code_of(read, path) == "CACHE_FILE_INVALID", end
    for more in (b"\0", data):
        path.write_bytes(data + more)
        assert code_of(read, path) == "CACHE_FILE_INVALID"


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_bomb_is_left_alone(tmp_path: Path, codec: str) -> None:
    """A sound file, and after it, in the same stream, more than anyone has room for."""
    layers = [dense()]
    data = reference.serialize(layers, reference.manifest(layers, tokens(20)))
    path = tmp_path / "c"
    zeros = 300 * 2**20
    with path.open("wb") as file:
        packer: Any
        if codec == "gzip":
            packer = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1)
        else:
            packer = zstandard.ZstdCompressor().stream_writer(file, closefd=False)
        with packer:
            packer.write(data)
            for _ in range(zeros >> 20):
                packer.write(bytes(2**20))
    assert path.stat().st_size < zeros // 200
    with pytest.raises(kvstore.KVStoreError, match="bytes follow") as caught:
        read(path)
    assert caught.value.code == "CACHE_FILE_INVALID"


def test_more_than_there_is_room_for(tmp_path: Path) -> None:
    path = written(tmp_path / "c", [dense()], codec="gzip")
    assert code_of(read, path, limit=1000) == "DEVICE_MEMORY_SHORT"


MODEL: dict[str, Any] = {
    "config_hash": "c0", "tokenizer_hash": "70", "chat_template_hash": None, "model_revision": "abc", "num_layers": 1,
    "num_kv_heads": 2, "head_dim": 32,
}  # fmt: skip
DIFFERENT = {"config_hash": "c1", "tokenizer_hash": None, "chat_template_hash": "x", "model_revision": "abd",
             "num_layers": 2, "num_kv_heads": None, "head_dim": 64}  # fmt: skip
CODES = {"config_hash": "MODEL_MISMATCH", "tokenizer_hash": "TOKENIZER_MISMATCH",
         "chat_template_hash": "TOKENIZER_MISMATCH", "model_revision": "MODEL_MISMATCH", "geometry": "MODEL_MISMATCH",
         "prefix_token_hash": "PREFIX_NOT_MATCHED", None: None}  # fmt: skip


@pytest.mark.parametrize(
    "changed", [(), *((name,) for name in DIFFERENT), tuple(DIFFERENT), ("model_revision", "head_dim")]
)
@pytest.mark.parametrize("prefix", [None, tokens(20), tokens(21)])
def test_the_formats_own_check_in_its_order(tmp_path: Path, changed: tuple[str, ...], prefix: list[int] | None) -> None:
    path = written(tmp_path / "c", [dense()])
    manifest = inspect_wp30(path).manifest
    model = {**MODEL, **{name: DIFFERENT[name] for name in changed}}
    expected = CODES[reference.check(reference.manifest([dense()], tokens(20)), model, prefix)]
    hashes = {n: model[n] for n in ("config_hash", "tokenizer_hash", "chat_template_hash", "model_revision")}
    receiver = Receiver(model["num_layers"], model["num_kv_heads"], model["head_dim"], hashes, "other/repo")
    wanted = None if prefix is None else reference.manifest([], prefix)["prefix_token_hash"]
    if expected is None:
        check_compatible(manifest, receiver, prefix_hash=wanted)
    else:
        assert code_of(check_compatible, manifest, receiver, prefix_hash=wanted) == expected


def test_both_sides_are_named(tmp_path: Path) -> None:
    manifest = inspect_wp30(written(tmp_path / "c", [dense()])).manifest
    with pytest.raises(kvstore.KVStoreError, match="config_hash") as caught:
        check_compatible(manifest, Receiver(1, 2, 32, {**MODEL, "config_hash": "c1"}, "other/repo"))
    assert caught.value.detail["names"] == {
        "entry": {"repo": "someone/small", "revision": "abc"}, "model": {"repo": "other/repo", "revision": "abc"}
    }  # fmt: skip
    check_compatible(manifest, None)


def test_the_check_comes_before_the_arrays(tmp_path: Path) -> None:
    """The arrays are missing, and nobody noticed: the model was refused first."""
    path = written(tmp_path / "c", [dense()], codec="zstd", ids=tokens(20))
    data = reference.unpack(path.read_bytes(), "zstd")
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    path.write_bytes(reference.pack(head, "zstd"))
    assert code_of(read_wp30, path, tokens(20), receiver=Receiver(9, 2, 32)) == "MODEL_MISMATCH"
    assert code_of(read_wp30, path, tokens(20), receiver=Receiver(1, 2, 32)) == "CACHE_FILE_INVALID"

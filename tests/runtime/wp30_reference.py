"""A writer and a reader of ``wp30-cache-2`` files, written from the format's description alone.

Nothing of kvstore is used, so that what kvstore reads was written by someone else, and
what it writes is read by someone else. Arrays of a layer are ``k`` and ``v``, or three
each; a cache here is a plain record.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import zstandard


@dataclass
class Layer:
    cls: str
    k: Any
    v: Any
    offset: int
    n_kept: int
    bits: int | None = None
    group_size: int | None = None


def manifest(layers: list[Layer], ids: list[int], extra: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "schema_version": "wp30-cache-2", "created_utc": "2026-03-04T05:06:07Z", "model_repo_id": "someone/small",
        "model_revision": "abc", "config_hash": "c0", "weight_files_sha256": {"model.safetensors": "ab"},
        "tokenizer_hash": "70", "chat_template_hash": None,
        "prefix_token_hash": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest(),
        "prefix_token_count": len(ids), "num_layers": len(layers), "num_kv_heads": 2, "head_dim": 32,
        "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": None,
        "positions": "keys stored post-RoPE at original positions; logical_offset = original processed-token count",
        "causal_mask_semantics":
            "retained positions fully visible to new tokens; new tokens causal among themselves",
        "mlx_version": "0.30.1", "mlx_lm_version": "0.30.0", "document_id": "doc-é", "method_id": None,
        "compression_config": None,
    }  # fmt: skip
    result |= facts
    result["layers"] = [_record(index, layer) for index, layer in enumerate(layers)]
    result.update(extra or {})
    return result


def _record(index: int, layer: Layer) -> dict[str, Any]:
    if layer.bits is None:
        return {
            "layer": index, "cls": layer.cls, "k_shape": list(layer.k.shape), "v_shape": list(layer.v.shape),
            "dtype": str(layer.k.dtype), "stored_positions": layer.k.shape[2], "logical_offset": layer.offset,
        }  # fmt: skip
    return {
        "layer": index, "cls": layer.cls, "k_shapes": [list(a.shape) for a in layer.k],
        "v_shapes": [list(a.shape) for a in layer.v], "dtypes": [str(a.dtype) for a in layer.k], "bits": layer.bits,
        "group_size": layer.group_size, "stored_positions": layer.k[0].shape[2], "logical_offset": layer.offset,
    }  # fmt: skip


def serialize(layers: list[Layer], document: dict[str, Any], lines: list[dict[str, Any]] | None = None) -> bytes:
    """The uncompressed file."""
    arrays: dict[str, mx.array] = {}
    listed = []
    for index, layer in enumerate(layers):
        line: dict[str, Any] = {"cls": layer.cls, "offset": layer.offset}
        if layer.bits is None:
            arrays |= {f"L{index}.k": layer.k, f"L{index}.v": layer.v}
        else:
            for part in range(3):
                arrays |= {f"L{index}.k{part}": layer.k[part], f"L{index}.v{part}": layer.v[part]}
            line |= {"group_size": layer.group_size, "bits": layer.bits}
        listed.append({**line, "n_kept": layer.n_kept})
    metadata = {
        "wp30_manifest": json.dumps(document, separators=(",", ":")),
        "wp30_layers": json.dumps(listed if lines is None else lines),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "payload.safetensors"
        mx.save_safetensors(str(path), arrays, metadata)
        return path.read_bytes()


def pack(data: bytes, codec: str) -> bytes:
    if codec == "gzip":
        return gzip.compress(data, 6)
    return zstandard.ZstdCompressor(level=3).compress(data) if codec == "zstd" else data


def unpack(data: bytes, codec: str) -> bytes:
    if codec == "gzip":
        return gzip.decompress(data)
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=2**30) if codec == "zstd" else data


def deserialize(data: bytes) -> tuple[list[Layer], dict[str, Any], dict[str, str]]:
    """Layers as the format's reader makes them: two classes, told apart by the name in the list."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "payload.safetensors"
        path.write_bytes(data)
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        mx.eval(list(arrays.values()))
    layers = []
    for index, line in enumerate(json.loads(metadata["wp30_layers"])):
        if line["cls"] in ("SparseQuantizedKVCache", "QuantizedKVCache"):
            k, v = (tuple(arrays[f"L{index}.{side}{part}"] for part in range(3)) for side in "kv")
            layers.append(Layer("quantized", k, v, line["offset"], line["n_kept"], line["bits"], line["group_size"]))
        else:
            k, v = arrays[f"L{index}.k"], arrays[f"L{index}.v"]
            layers.append(Layer("sparse", k, v, line["offset"], line["n_kept"]))
    return layers, json.loads(metadata["wp30_manifest"]), metadata


def check(document: dict[str, Any], model: dict[str, Any] | None, prefix: list[int] | None) -> str | None:
    """The name of the first field that does not fit, in the format's order."""
    if document["schema_version"] != "wp30-cache-2":
        return "schema_version"
    if model is not None:
        for name in ("config_hash", "tokenizer_hash", "chat_template_hash", "model_revision"):
            if document[name] != model[name]:
                return name
        if any(document[n] != model[n] for n in ("num_layers", "num_kv_heads", "head_dim")):
            return "geometry"
    if prefix is not None and document["prefix_token_hash"] != manifest([], prefix)["prefix_token_hash"]:
        return "prefix_token_hash"
    return None

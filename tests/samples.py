"""Small valid records, written out, from which tests change one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.layers import LayerRecord, TensorRecord
from kvstore.format.manifest import Manifest, MethodRecord, PrefixRecord, token_spec
from kvstore.format.model import AdapterRecord, FileRecord, ModelRecord, TokenizerRecord
from kvstore.format.prefix import MediaItem, as_token_ids, prefix_digest
from kvstore.format.tensors import payload_size
from tests.strategies import canonical_leaf, groups_of, payload_ref

COUNT = 600
"""Tokens of every sample: two full blocks and a tail."""


def refusal(call: Callable[[], object]) -> KVStoreError | None:
    """The error that ``call`` raises, or None where it ends well."""
    try:
        call()
    except KVStoreError as error:
        return error
    return None


def layer(kind: str, tensors: dict[str, tuple[str, list[int]]], **scalars: Any) -> LayerRecord:
    records = {role: TensorRecord(dtype, tuple(shape)) for role, (dtype, shape) in tensors.items()}
    return canonical_leaf(LayerRecord(kind, scalars, records))


def kv_tensors(rows: int, dtype: str = "BF16") -> dict[str, tuple[str, list[int]]]:
    return {"k": (dtype, [1, 2, rows, 8]), "v": (dtype, [1, 2, rows, 4])}


def packed_tensors(rows: int) -> dict[str, tuple[str, list[int]]]:
    parts = {"words": ("U32", [1, 2, rows, 8]), "scales": ("F16", [1, 2, rows, 2]), "biases": ("F16", [1, 2, rows, 2])}
    return {f"{side}.{part}": spec for side in "kv" for part, spec in parts.items()}


def compressed_tensors(window: int, groups: int, pending: int) -> dict[str, tuple[str, list[int]]]:
    return {
        "window": ("BF16", [1, window, 8]), "compressed": ("BF16", [1, groups, 8]), "index": ("BF16", [1, groups, 4]),
        "pending.kv": ("F32", [1, pending, 8]), "pending.gate": ("F32", [1, pending, 8]),
    }  # fmt: skip


QUANTIZATION = {"bits": 4, "group_size": 32, "mode": "affine"}

LEAVES: dict[str, LayerRecord] = {
    "kv": layer("kv", kv_tensors(COUNT), offset=COUNT),
    "kv-quantized": layer("kv-quantized", packed_tensors(COUNT), offset=COUNT, **QUANTIZATION),
    "kv-rotating": layer("kv-rotating", kv_tensors(512), offset=COUNT, max_size=512, keep=4, ring_index=92),
    "kv-chunked": layer("kv-chunked", kv_tensors(300), offset=COUNT, chunk_size=256, start=300),
    "kv-concatenated": layer("kv-concatenated", kv_tensors(COUNT + 2), offset=COUNT),
    "kv-sparse": layer("kv-sparse", {**kv_tensors(40), "positions": ("I32", [2, 40])}, offset=COUNT),
    "kv-sparse-quantized": layer(
        "kv-sparse-quantized", {**packed_tensors(40), "positions": ("I32", [1, 40])}, offset=COUNT, **QUANTIZATION
    ),
    "kv-compressed": layer("kv-compressed", compressed_tensors(128, 75, 0), offset=COUNT, max_size=128),
    "state": layer(
        "state", {"slot.0": ("BF16", [1, 3, 16]), "slot.2": ("F32", [1, 4, 8, 8])}, slots=3, left_padding=(0,),
        lengths=(COUNT,),
    ),
}  # fmt: skip
"""One written layer of every kind that holds tensors."""

NEVER_WRITTEN = layer("kv", {}, offset=0)

MODEL = ModelRecord(
    model_type="toy",
    weights=(FileRecord("model.safetensors", 1000, sha256_digest(b"weights")),),
    config=sha256_digest(b"config"),
    code=(FileRecord("toy.py", 10, sha256_digest(b"code")),),
    adapter=AdapterRecord(
        "lora", (FileRecord("adapters.safetensors", 20, sha256_digest(b"adapter")),), sha256_digest(b"ac"), "0.5"
    ),
    processor=sha256_digest(b"processor"),
    geometry=(("head_dim", 8), ("layers", 9)),
)
TOKENIZER = TokenizerRecord(sha256_digest(b"tokenizer"), sha256_digest(b"template"))
MEDIA = (MediaItem(250, 10, "image", sha256_digest(b"picture"), sha256_digest(b"processor")),)
IDS = as_token_ids([(n * 7919) % 200_000 for n in range(COUNT)])


def manifest(layers: tuple[LayerRecord, ...] | None = None, **changes: Any) -> Manifest:
    """A manifest with every kind of layer and every optional record, or with ``layers``."""
    if layers is None:
        nested = LayerRecord("list", {}, {}, (LEAVES["kv"], LEAVES["state"]))
        layers = (*LEAVES.values(), nested, NEVER_WRITTEN)
    prefix = PrefixRecord(
        COUNT, prefix_digest(MODEL.digest, "default", IDS, MEDIA), payload_ref(payload_size([token_spec(COUNT)])),
        MEDIA,
    )  # fmt: skip
    made = Manifest(
        model=MODEL, tokenizer=TOKENIZER, namespace="default", prefix=prefix, layers=layers, groups=groups_of(layers),
        method=MethodRecord.make("drop/half", '{ "ratio": 0.5 }'), continuation=(("rope_delta", -3), ("tag", "x")),
    )  # fmt: skip
    return replace(made, **changes)

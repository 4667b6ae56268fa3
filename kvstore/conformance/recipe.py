"""The writer's role: a cache in words, made into a manifest and its payloads.

A recipe is a cache as a runtime would hold it, with its tensors given as a seed or in hex
(``fixtures/README.md``), so that no tensor bytes need to be carried and all writers start
from the same bits. What a writer must refuse is refused here, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.fields import Fields, expect_object
from kvstore.format.groups import Group, PayloadRef, Segment, plan_groups, segment_tensors, segments
from kvstore.format.layers import LayerRecord, leaves, parse_layers
from kvstore.format.manifest import Manifest, MethodRecord, PrefixRecord, check_manifest, token_spec
from kvstore.format.model import parse_model, parse_tokenizer
from kvstore.format.prefix import TokenIds, as_token_ids, parse_media, parse_namespace, prefix_digest
from kvstore.format.tensors import Payload, uint_dtype

__all__ = ["Made", "make_entry", "stream"]

Array = np.ndarray[Any, Any]
_FIELDS = ("continuation", "layers", "media", "method", "model", "namespace", "token_ids", "tokenizer")
_LOSSY = frozenset({"kv-sparse", "kv-sparse-quantized"})


@dataclass(frozen=True, slots=True)
class Made:
    """An entry: its manifest, and every payload by digest, the token ids among them."""

    manifest: Manifest
    payloads: Mapping[Digest, Payload]


def stream(seed: str, size: int) -> bytes:
    """``size`` bytes that follow from ``seed``: SHA-256 of the seed and a 64-bit little-endian counter, joined."""
    blocks = (hashlib.sha256(seed.encode() + n.to_bytes(8, "little")).digest() for n in range(-(-size // 32)))
    return b"".join(blocks)[:size]


def make_entry(recipe: Any) -> Made:
    """The entry of a recipe.

    Raises:
        InvalidError: CACHE_EMPTY, CACHE_BATCHED, CACHE_INCONSISTENT, METHOD_MISSING or TOKEN_ID_RANGE where the cache
            is one that no writer may store; else the code of the manifest's rule that it breaks.
    """
    fields = Fields(recipe, "", _FIELDS)
    ids = as_token_ids(fields.get("token_ids"))
    plain, data = _split(fields.get("layers"))
    layers = parse_layers(Fields({"layers": plain}, "", None), "layers")
    _refuse(layers, int(ids.size), method=fields.get("method"))
    payloads: dict[Digest, Payload] = {}
    manifest = _manifest(fields, ids, layers, payloads)
    groups = tuple(
        Group(span, paths, tuple(_payload(paths, layers, part, data, payloads) for part in segments(span)))
        for span, paths in plan_groups(layers)
    )
    return Made(check_manifest(replace(manifest, groups=groups)), payloads)


def _manifest(
    fields: Fields, ids: TokenIds, layers: tuple[LayerRecord, ...], payloads: dict[Digest, Payload]
) -> Manifest:
    model = parse_model(fields.get("model"))
    namespace = parse_namespace(fields.get("namespace"))
    media = parse_media(fields, "media", int(ids.size))
    spec = token_spec(int(ids.size))
    prefix = PrefixRecord(
        int(ids.size), prefix_digest(model.digest, namespace, ids, media),
        _keep(Payload.make({spec.name: (spec.dtype, ids)}), payloads), media,
    )  # fmt: skip
    continuation = expect_object(fields.get("continuation"), "continuation")
    return Manifest(
        model=model, tokenizer=parse_tokenizer(fields.get("tokenizer")), namespace=namespace, prefix=prefix,
        layers=layers, groups=(), method=fields.nullable("method", lambda name: _method(fields.get(name))),
        continuation=tuple(sorted(continuation.items())),
    )  # fmt: skip


def _method(value: Any) -> MethodRecord:
    fields = Fields(value, "method", ("config", "name"))
    return MethodRecord.make(fields.text("name"), fields.text("config", limit=1 << 20))


def _split(layers: Any, prefix: str = "") -> tuple[list[Any], dict[str, Array]]:
    """Layer records without their data, and the data by ``<path>.<role>``."""
    plain: list[Any] = []
    data: dict[str, Array] = {}
    for index, layer in enumerate(layers):
        if layer["kind"] == "list":
            children, inner = _split(layer["children"], f"{prefix}{index}.")
            plain.append({**layer, "children": children})
            data |= inner
            continue
        tensors = {}
        for role, tensor in layer["tensors"].items():
            tensors[role] = {name: tensor[name] for name in ("dtype", "shape")}
            data[f"{prefix}{index}.{role}"] = _array(tensor)
        plain.append({**layer, "tensors": tensors})
    return plain, data


def _array(tensor: Mapping[str, Any]) -> Array:
    dtype, shape = uint_dtype(tensor["dtype"]), tuple(tensor["shape"])
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    raw = bytes.fromhex(tensor["hex"]) if "hex" in tensor else stream(tensor["seed"], size)
    if len(raw) != size:
        raise fail("CACHE_INCONSISTENT", "a tensor's hex", expected=f"{size} bytes", found=len(raw))
    return np.frombuffer(raw, dtype).reshape(shape)


def _refuse(layers: tuple[LayerRecord, ...], tokens: int, *, method: Any) -> None:
    """What a writer must not store, whatever the manifest's rules would say of it."""
    written = [(path, leaf) for path, leaf in leaves(layers) if not leaf.never_written]
    if not tokens or not written:
        raise fail("CACHE_EMPTY", "the cache holds no tokens")
    for path, leaf in written:
        if any(record.shape[0] != 1 for role, record in leaf.tensors.items() if role != "positions"):
            raise fail("CACHE_BATCHED", f"layer {path} holds more than one sequence")
        if leaf.offset is not None and leaf.offset != tokens:
            raise fail("CACHE_INCONSISTENT", f"the offset of layer {path}", expected=tokens, found=leaf.offset)
        if leaf.kind in _LOSSY and method is None:
            raise fail("METHOD_MISSING", f"layer {path} lacks rows, and no method is named")


def _payload(
    paths: tuple[str, ...], layers: tuple[LayerRecord, ...], part: Segment, data: Mapping[str, Array],
    payloads: dict[Digest, Payload],
) -> PayloadRef:  # fmt: skip
    by_path = dict(leaves(layers))
    tensors: dict[str, tuple[str, Array]] = {}
    for spec in segment_tensors(paths, by_path, part):
        tensors[spec.name] = (spec.dtype, _rows(spec.name, by_path, data[spec.name], part))
    return _keep(Payload.make(tensors), payloads)


def _rows(name: str, layers: Mapping[str, LayerRecord], array: Array, part: Segment) -> Array:
    axis = next(
        leaf.axis(role) for path, leaf in layers.items() for role in leaf.tensors if name == f"{path}.{role}"
    )
    if axis is None:
        return array
    return array.take(np.arange(part.first, part.first + part.rows), axis=axis)


def _keep(payload: Payload, payloads: dict[Digest, Payload]) -> PayloadRef:
    ref = PayloadRef(payload.digest(), payload.size)
    payloads[ref.digest] = payload
    return ref


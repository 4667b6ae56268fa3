"""The writer's role: a cache in words, made into a manifest and its payloads.

A recipe is a cache as a runtime would hold it, with its tensors given as a seed or in hex
(``fixtures/README.md``), so that no tensor bytes need to be carried and all writers start
from the same bits. What a writer must refuse is refused here, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.fields import NAME, Fields, expect_array, expect_object
from kvstore.format.groups import Group, PayloadRef, Segment, plan_groups, segment_tensors, segments
from kvstore.format.layers import LayerRecord, leaves, parse_layers
from kvstore.format.manifest import (
    Manifest,
    MethodRecord,
    PrefixRecord,
    parse_continuation,
    parse_manifest,
    token_spec,
)
from kvstore.format.model import parse_model, parse_tokenizer
from kvstore.format.prefix import TokenIds, as_token_ids, parse_media, parse_namespace, prefix_digest
from kvstore.format.rules import check_layers
from kvstore.format.tensors import Payload, TensorSpec, uint_dtype

__all__ = ["MAX_RECIPE_BYTES", "Made", "make_entry", "stream"]

Array = np.ndarray[Any, Any]
_FIELDS = ("continuation", "layers", "media", "method", "model", "namespace", "token_ids", "tokenizer")
_TENSOR = ("dtype", "hex", "seed", "shape")
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})*", re.ASCII)
MAX_RECIPE_BYTES: Final = 16 * 2**20
"""Bytes of all tensors of a recipe together."""


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
        InvalidError: CACHE_EMPTY, CACHE_BATCHED, CACHE_INCONSISTENT or TOKEN_ID_RANGE where the cache is one that no
            writer may store; LIMIT_EXCEEDED for one too large for a recipe; else the code of the manifest's rule that
            it breaks.
    """
    fields = Fields(recipe, "", _FIELDS)
    ids = as_token_ids(expect_array(fields.get("token_ids"), "token_ids"))
    plain, sources = _split(fields.get("layers"), "layers")
    layers = parse_layers(Fields({"layers": plain}, "", None), "layers")
    _refuse(layers, int(ids.size))
    check_layers(layers, int(ids.size))
    payloads: dict[Digest, Payload] = {}
    manifest = _manifest(fields, ids, layers, payloads)
    data = _data(layers, sources)
    groups = tuple(
        Group(span, paths, tuple(_payload(paths, layers, part, data, payloads) for part in segments(span)))
        for span, paths in plan_groups(layers)
    )
    # Read as any reader will: a writer must not make what is refused later.
    return Made(parse_manifest(replace(manifest, groups=groups).data), payloads)


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
    return Manifest(
        model=model, tokenizer=parse_tokenizer(fields.get("tokenizer")), namespace=namespace, prefix=prefix,
        layers=layers, groups=(), method=fields.nullable("method", lambda name: _method(fields.get(name))),
        continuation=parse_continuation(fields),
    )  # fmt: skip


def _method(value: Any) -> MethodRecord:
    fields = Fields(value, "method", ("config", "name"))
    return MethodRecord.make(fields.text("name", grammar=NAME), fields.text("config", limit=1 << 20))


def _split(value: Any, where: str, prefix: str = "") -> tuple[list[Any], dict[str, Fields]]:
    """Layer records without their data, and what the recipe says of the data by ``<path>.<role>``."""
    plain: list[Any] = []
    sources: dict[str, Fields] = {}
    for index, item in enumerate(expect_array(value, where)):
        layer = expect_object(item, f"{where}[{index}]")
        inner: dict[str, Any] = {}
        if "children" in layer:
            inner["children"], found = _split(layer["children"], f"{where}[{index}].children", f"{prefix}{index}.")
            sources |= found
        if "tensors" in layer:
            at = f"{where}[{index}].tensors"
            inner["tensors"] = tensors = {}
            for role, tensor in expect_object(layer["tensors"], at).items():
                fields = sources[f"{prefix}{index}.{role}"] = Fields(tensor, f"{at}.{role}", _TENSOR)
                tensors[role] = {name: fields.get(name) for name in ("dtype", "shape")}
        plain.append({**layer, **inner})
    return plain, sources


def _data(layers: tuple[LayerRecord, ...], sources: Mapping[str, Fields]) -> dict[str, Array]:
    """The tensors by ``<path>.<role>``; none is made before all are known to be small."""
    specs = [
        TensorSpec(f"{path}.{role}", record.dtype, record.shape)
        for path, leaf in leaves(layers)
        for role, record in leaf.tensors.items()
    ]
    total = sum(spec.nbytes for spec in specs)
    if total > MAX_RECIPE_BYTES:
        raise fail("LIMIT_EXCEEDED", "bytes of a recipe's tensors", expected=f"at most {MAX_RECIPE_BYTES}", found=total)
    return {spec.name: _array(spec, sources[spec.name]) for spec in specs}


def _array(spec: TensorSpec, fields: Fields) -> Array:
    if fields.has("hex") and fields.has("seed"):
        raise fail("FIELD_UNKNOWN", f"{fields.path('seed')} beside hex", field="seed")
    if fields.has("hex"):
        raw = _bytes(fields.text("hex", limit=None), fields.path("hex"))
    else:
        raw = stream(fields.text("seed", limit=None), spec.nbytes)
    if len(raw) != spec.nbytes:
        raise fail("CACHE_INCONSISTENT", fields.path("hex"), expected=f"{spec.nbytes} bytes", found=len(raw))
    return np.frombuffer(raw, uint_dtype(spec.dtype)).reshape(spec.shape)


def _bytes(text: str, where: str) -> bytes:
    if _HEX.fullmatch(text) is None:
        raise fail("CACHE_INCONSISTENT", where, expected="pairs of lower-case hex digits", found=text[:40])
    return bytes.fromhex(text)


def _refuse(layers: tuple[LayerRecord, ...], tokens: int) -> None:
    """What a writer must not store, whatever the manifest's rules would say of it."""
    written = [(path, leaf) for path, leaf in leaves(layers) if not leaf.never_written]
    if not tokens or not written:
        raise fail("CACHE_EMPTY", "the cache holds no tokens")
    for path, leaf in written:
        if any(record.shape[:1] > (1,) for role, record in leaf.tensors.items() if role != "positions"):
            raise fail("CACHE_BATCHED", f"layer {path} holds more than one sequence")
        if leaf.offset is not None and leaf.offset != tokens:
            raise fail("CACHE_INCONSISTENT", f"the offset of layer {path}", expected=tokens, found=leaf.offset)


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

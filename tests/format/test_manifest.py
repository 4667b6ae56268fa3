"""The manifest as a whole: identity, refusals, and the schema that says the same as step 3."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.json import canonical_bytes
from kvstore.format.layers import LayerRecord
from kvstore.format.manifest import Manifest, check_prefix, manifest_from_json, parse_manifest
from kvstore.format.prefix import as_token_ids
from kvstore.limits import MAX_LAYERS, MAX_MANIFEST_BYTES, MAX_MEDIA_ITEMS, MAX_TOKENS
from tests import schema_mutants
from tests.samples import COUNT, IDS, LEAVES, NEVER_WRITTEN, layer, manifest, refusal
from tests.strategies import groups_of, json_values, manifests

SAMPLE = manifest()
SCHEMA = "manifest.v1"
VALIDATOR = schema_mutants.validator(SCHEMA)

CODE_OF_KEYWORD = {
    "type": "FIELD_TYPE", "required": "FIELD_MISSING", "additionalProperties": "FIELD_UNKNOWN",
    "pattern": "FIELD_FORMAT", "propertyNames": "FIELD_FORMAT", "maxLength": "FIELD_RANGE", "minimum": "FIELD_RANGE",
    "maximum": "FIELD_RANGE", "maxItems": "LIMIT_EXCEEDED", "minItems": "FIELD_RANGE",
    "maxProperties": "LIMIT_EXCEEDED", "enum": "FIELD_FORMAT",
}  # fmt: skip
SPECIAL = {
    ("/$defs/tensor/properties/dtype", "enum"): "DTYPE_UNSUPPORTED",
    ("/properties/profile", "enum"): "PROFILE_UNSUPPORTED",
    ("/properties/media_type", "const"): "MEDIA_TYPE_UNKNOWN",
    ("/properties/features", "maxItems"): "FEATURE_UNSUPPORTED",
    ("/$defs/model/properties/shard", "type"): "SHARD_UNSUPPORTED",
    ("/$defs/digest", "maxLength"): "FIELD_FORMAT",
    ("/$defs/layer-kv-quantized/properties/mode", "enum"): "QUANTIZATION_UNSUPPORTED",
    ("/$defs/layer-kv-sparse-quantized/properties/mode", "enum"): "QUANTIZATION_UNSUPPORTED",
}
BEYOND_SCHEMA = ("model.weights", "model.code", "model.adapter.files", "model.adapter.scale", "prefix.media")
"""Rules of step 3 that JSON Schema can't say: order, spans, derived values."""


def document() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(SAMPLE.data)
    return value


def step_3(value: Any) -> str | None:
    """The code with which step 3 refuses a document, or None."""
    error = refusal(lambda: manifest_from_json(value))
    if error is None or (error.message.startswith(BEYOND_SCHEMA) and VALIDATOR.is_valid(value)):
        return None
    assert error.phase == "schema", error
    return error.code


@given(manifests())
def test_parse_is_the_inverse_of_the_bytes(made: Manifest) -> None:
    read = parse_manifest(made.data)
    assert read == made
    assert read.data == canonical_bytes(read.to_json()) == made.data
    assert read.entry_id == sha256_digest(made.data)
    assert VALIDATOR.is_valid(json.loads(made.data))


def test_the_sample() -> None:
    assert parse_manifest(SAMPLE.data) == SAMPLE
    check_prefix(SAMPLE, IDS)
    assert SAMPLE.token_count == COUNT
    assert SAMPLE.lowest_cut == COUNT
    assert not SAMPLE.asserted


MUTANTS = list(schema_mutants.mutants(SCHEMA, document()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.keyword} {m.pointer}" for m in MUTANTS])
def test_schema_and_step_3_refuse_each_mutant(mutant: schema_mutants.Mutant) -> None:
    assert not VALIDATOR.is_valid(mutant.document)
    code = step_3(mutant.document)
    if mutant.keyword == "const" and mutant.pointer.endswith("/kind"):
        assert code == "KIND_UNSUPPORTED"
    elif mutant.keyword == "propertyNames":
        assert code in ("FIELD_FORMAT", "FIELD_RANGE", "FIELD_UNKNOWN")
    else:
        assert code == SPECIAL.get((mutant.pointer, mutant.keyword)) or code == CODE_OF_KEYWORD[mutant.keyword]


def test_no_keyword_of_the_schema_is_without_a_mutant() -> None:
    killed = {(m.pointer, m.keyword) for m in MUTANTS}
    left = [(p, k, v) for p, k, v in schema_mutants.keywords(schema_mutants.load(SCHEMA)) if (p, k) not in killed]
    dear = {v for _, k, v in left if k == "maxItems"}
    assert dear == {MAX_LAYERS, MAX_MEDIA_ITEMS, 65536, MAX_TOKENS // 256 + 2}
    assert {(k, v) for _, k, v in left if k != "maxItems"} == {("type", "null")}  # the other side of nullable fields


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, item in children for p in places(item, (*path, key)))]


PLACES = places(document())[1:]
ODD_VALUES: st.SearchStrategy[Any] = st.sampled_from((
    None, True, False, 0, 1, -1, 2**26, 2**26 + 1, 2**31, 2**53 - 1, "", "a", "A", "a\n", "zz", "0.5", "1.0", "é" * 255,
    "a" * 256, [], [0], [[]], {}, {"a": 1}, sha256_digest(b""), sha256_digest(b"") + "\n", "F32", "rows", "kv",
)) | json_values  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(PLACES), ODD_VALUES, st.booleans())
def test_schema_agrees_with_step_3(place: tuple[Any, ...], value: Any, drop: bool) -> None:
    changed = document()
    node = changed
    for step in place[:-1]:
        node = node[step]
    if drop:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    assert VALIDATOR.is_valid(changed) == (step_3(changed) is None)


@settings(max_examples=100)
@given(st.sampled_from(PLACES), ODD_VALUES)
def test_a_changed_document_is_refused_or_another_entry(place: tuple[Any, ...], value: Any) -> None:
    """Whatever is changed: either a code of the steps 2 to 4, or a sound manifest with another id."""
    changed = document()
    node: Any = changed
    for step in place[:-1]:
        node = node[step]
    if node[place[-1]] == value and type(node[place[-1]]) is type(value):
        return
    node[place[-1]] = value
    error = refusal(lambda: parse_manifest(canonical_bytes(changed)))
    if error is not None:
        assert error.phase in ("json", "schema", "semantic"), error
        return
    read = parse_manifest(canonical_bytes(changed))
    assert read.entry_id != SAMPLE.entry_id
    assert read.to_json() == changed


def edit(*path: Any, to: Any) -> Any:
    value: Any = document()
    node = value
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = to
    return value


def media(**changes: Any) -> Any:
    value = document()
    value["prefix"]["media"][0].update(changes)
    return value


KV, ROTATING, CHUNKED = 0, 2, 3
"""Positions of kinds among the sample's layers."""

SEMANTIC: dict[str, tuple[Any, str]] = {
    "token count": (edit("prefix", "token_count", to=COUNT - 1), "TOKEN_COUNT_MISMATCH"),
    "offset": (edit("layers", KV, "offset", to=COUNT + 1), "TOKEN_COUNT_MISMATCH"),
    "rows": (edit("layers", KV, "tensors", "k", "shape", 2, to=COUNT - 1), "SHAPE_INCONSISTENT"),
    "heads": (edit("layers", KV, "tensors", "k", "shape", 1, to=3), "SHAPE_INCONSISTENT"),
    "batch": (edit("layers", KV, "tensors", "v", "shape", 0, to=2), "SHAPE_INCONSISTENT"),
    "width": (edit("layers", KV, "tensors", "v", "shape", 3, to=5), "PAYLOAD_SIZE_MISMATCH"),
    "dtype": (edit("layers", KV, "tensors", "v", "dtype", to="F32"), "PAYLOAD_SIZE_MISMATCH"),
    "ring index": (edit("layers", ROTATING, "ring_index", to=513), "CACHE_STATE_INVALID"),
    "kept rows": (edit("layers", ROTATING, "keep", to=5), "GROUP_INVALID"),
    "chunk start": (edit("layers", CHUNKED, "start", to=299), "CACHE_STATE_INVALID"),
    "layers": (edit("layers", to=[]), "CACHE_STATE_INVALID"),
    "tensor left out": (edit("layers", KV, "tensors", to={"k": document()["layers"][KV]["tensors"]["k"]}),
                        "TENSOR_SET_MISMATCH"),
    "groups": (edit("groups", to=[]), "GROUP_INVALID"),
    "group start": (edit("groups", 0, "start", to=1), "GROUP_INVALID"),
    "group layers": (edit("groups", 0, "layers", to=["0"]), "GROUP_INVALID"),
    "payloads": (edit("groups", 0, "payloads", to=[]), "SEGMENTS_INVALID"),
    "payload size": (edit("groups", 0, "payloads", 0, "size", to=8), "PAYLOAD_SIZE_MISMATCH"),
    "token payload size": (edit("prefix", "token_ids", "size", to=8), "PAYLOAD_SIZE_MISMATCH"),
}  # fmt: skip

SCHEMA_ONLY_IN_CODE: dict[str, tuple[Any, str]] = {
    "config digest": (edit("method", "config_digest", to=sha256_digest(b"")), "METHOD_DIGEST_MISMATCH"),
    "config text": (edit("method", "config", to="{}"), "METHOD_DIGEST_MISMATCH"),
    "media past the end": (media(start=COUNT), "FIELD_RANGE"),
    "media too long": (media(length=COUNT), "FIELD_RANGE"),
    "scale": (edit("model", "adapter", "scale", to="0.50"), "FIELD_FORMAT"),
    "features": (edit("features", to=["keyed-digests"]), "FEATURE_UNSUPPORTED"),
    "major version": (edit("media_type", to="application/vnd.kvstore.manifest.v2+json"), "MEDIA_TYPE_UNKNOWN"),
    "a receipt": (edit("media_type", to="application/vnd.kvstore.receipt.v1+json"), "MEDIA_TYPE_UNKNOWN"),
    "profile": (edit("profile", to="generic/2"), "PROFILE_UNSUPPORTED"),
    "digest algorithm": (edit("prefix", "digest", to="blake3:" + "0" * 64), "DIGEST_ALGORITHM_UNSUPPORTED"),
    "floating scalar as text": (edit("continuation", to={"rope_delta": True}), "FIELD_TYPE"),
    "reserved field": ({**document(), "digest_key_id": None}, "FIELD_UNKNOWN"),
}


@pytest.mark.parametrize(
    ("value", "code"), [*SEMANTIC.values(), *SCHEMA_ONLY_IN_CODE.values()], ids=[*SEMANTIC, *SCHEMA_ONLY_IN_CODE]
)
def test_refused(value: Any, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_manifest(canonical_bytes(value))
    assert caught.value.code == code


def test_version_is_looked_at_before_the_fields() -> None:
    """A newer document is told from a broken one, whatever else is in it."""
    for change in ({"features": ["x"]}, {"media_type": "other"}, {"profile": "x/1"}):
        with pytest.raises(KVStoreError) as caught:
            manifest_from_json({**document(), "zz": 1, **change})
        assert caught.value.exit_code == 7


def test_too_large() -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_manifest(b" " * (MAX_MANIFEST_BYTES + 1))
    assert caught.value.code == "DOC_TOO_LARGE"


def test_not_canonical() -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_manifest(json.dumps(document()).encode())
    assert caught.value.code == "JSON_NOT_CANONICAL"


def manifest_bytes_read(record: LayerRecord) -> Manifest:
    return parse_manifest(manifest((record,)).data)


def test_lists_as_deep_as_the_profile_allows() -> None:
    record, deep = LEAVES["kv"], 0
    read = partial(manifest_bytes_read, record)
    while (error := refusal(read)) is None:
        record, deep = LayerRecord("list", {}, {}, (record,)), deep + 1
        read = partial(manifest_bytes_read, record)
    assert error.code == "JSON_TOO_DEEP"
    assert deep == 6


CUTS: dict[str, tuple[tuple[LayerRecord, ...], int]] = {
    "all can be cut": ((LEAVES["kv"], LEAVES["kv-quantized"]), 0),
    "strictest of all": (
        (LEAVES["kv"], layer("kv-chunked", {"k": ("F16", [1, 1, 300, 1]), "v": ("F16", [1, 1, 300, 1])}, offset=COUNT,
                             chunk_size=256, start=300)), 556,
    ),
    "a state pins it": ((LEAVES["kv"], LEAVES["state"]), COUNT),
    "never written counts for nothing": ((LEAVES["kv"], NEVER_WRITTEN), 0),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "lowest"), CUTS.values(), ids=CUTS)
def test_lowest_cut(layers: tuple[LayerRecord, ...], lowest: int) -> None:
    assert manifest(layers).lowest_cut == lowest


def test_can_cut() -> None:
    made = manifest((LEAVES["kv"],))  # with a media item of ten tokens from position 250 on
    possible = [tokens for tokens in range(COUNT + 2) if made.can_cut(tokens)]
    assert possible == [*range(1, 251), *range(260, COUNT + 1)]
    assert [tokens for tokens in range(COUNT + 2) if SAMPLE.can_cut(tokens)] == [COUNT]


def test_asserted_token_count() -> None:
    assert manifest((LEAVES["state"], NEVER_WRITTEN)).asserted
    assert not manifest((LEAVES["state"], LEAVES["kv"])).asserted


def test_payloads_are_listed_once() -> None:
    made = manifest((LEAVES["kv"],))
    group = made.groups[0]
    twice = replace(made, groups=(replace(group, payloads=group.payloads * 2),))
    assert twice.payloads() == group.payloads


def test_check_prefix() -> None:
    wrong = {"TOKEN_COUNT_MISMATCH": IDS[:-1], "PREFIX_CHAIN_MISMATCH": as_token_ids([*IDS[:-1].tolist(), 5])}
    for code, ids in wrong.items():
        with pytest.raises(KVStoreError) as caught:
            check_prefix(SAMPLE, ids)
        assert caught.value.code == code


def test_bytes_do_not_depend_on_construction_order() -> None:
    record = LEAVES["kv-quantized"]
    scalars = {name: record.scalars[name] for name in reversed(list(record.scalars))}
    backwards = LayerRecord(record.kind, scalars, {r: record.tensors[r] for r in reversed(list(record.tensors))})
    assert manifest((backwards,)).data == manifest((record,)).data


def test_no_mutable_state_is_shared() -> None:
    before = copy.deepcopy(SAMPLE.to_json())
    SAMPLE.to_json()["layers"].clear()  # type: ignore[union-attr]
    assert SAMPLE.to_json() == before


@given(manifests(kinds=("kv", "kv-rotating")))
def test_groups_are_those_of_the_layers(made: Manifest) -> None:
    assert [(g.span, g.layers) for g in made.groups] == [(g.span, g.layers) for g in groups_of(made.layers)]

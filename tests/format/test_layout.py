"""Layouts: buffers in cache order, their sizes, and a digest that can be proved."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given

from kvstore.errors import KVStoreError
from kvstore.format.json import canonical_bytes
from kvstore.format.layers import LayerRecord
from kvstore.format.layout import Buffer, Layout, layout_of, parse_layout
from kvstore.format.manifest import Manifest
from kvstore.limits import MAX_LAYOUT_BYTES, MAX_SLOTS
from tests import schema_mutants
from tests.samples import COUNT, LEAVES, NEVER_WRITTEN, refusal
from tests.strategies import manifests

LAYERS = (LEAVES["kv"], NEVER_WRITTEN, LayerRecord("list", {}, {}, (LEAVES["state"],)))
LAYOUT = layout_of(LAYERS, COUNT)
SCHEMA = "layout.v1"
VALIDATOR = schema_mutants.validator(SCHEMA)


def document() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(canonical_bytes(LAYOUT.to_json()))
    return value


def test_buffers_in_cache_order() -> None:
    assert LAYOUT.buffers == (
        Buffer("0.k", (1, 2, COUNT, 8), "BF16"), Buffer("0.v", (1, 2, COUNT, 4), "BF16"),
        Buffer("2.0.slot.0", (1, 3, 16), "BF16"), Buffer("2.0.slot.2", (1, 4, 8, 8), "F32"),
    )  # fmt: skip
    assert LAYOUT.total_bytes == 2 * 2 * COUNT * (8 + 4) + 2 * 48 + 4 * 256


def test_digest_by_hand() -> None:
    tag = b"kvstore layout v1"
    buffers = json.dumps(document()["buffers"], sort_keys=True, separators=(",", ":")).encode()
    data = b"".join(struct.pack("<Q", len(part)) + part for part in (tag, buffers))
    assert LAYOUT.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"


@given(manifests())
def test_round_trip(made: Manifest) -> None:
    layout = layout_of(made.layers, made.token_count)
    data = canonical_bytes(layout.to_json())
    assert parse_layout(data) == layout
    assert VALIDATOR.is_valid(json.loads(data))


def test_an_empty_layout() -> None:
    assert parse_layout(canonical_bytes(Layout(0, ()).to_json())).total_bytes == 0


def changed_buffer(**changes: Any) -> dict[str, Any]:
    value = document()
    value["buffers"][0].update(changes)
    return value


WRONG: dict[str, tuple[Any, str]] = {
    "total": ({**document(), "total_bytes": 1}, "SHAPE_INCONSISTENT"),
    "size of a buffer": (changed_buffer(byte_len=1), "SHAPE_INCONSISTENT"),
    "size above the limit": (changed_buffer(byte_len=2**40 + 1), "FIELD_RANGE"),
    "name of a buffer": (changed_buffer(role="0.x"), "LAYOUT_DIGEST_MISMATCH"),
    "order": ({**document(), "buffers": document()["buffers"][::-1]}, "LAYOUT_DIGEST_MISMATCH"),
    "digest": ({**document(), "layout_digest": "sha256:" + "0" * 64}, "LAYOUT_DIGEST_MISMATCH"),
    "media type": ({**document(), "media_type": "x"}, "MEDIA_TYPE_UNKNOWN"),
}


@pytest.mark.parametrize(("value", "code"), WRONG.values(), ids=WRONG)
def test_refused(value: Any, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_layout(canonical_bytes(value))
    assert caught.value.code == code


def test_too_large() -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_layout(b" " * (MAX_LAYOUT_BYTES + 1))
    assert caught.value.code == "DOC_TOO_LARGE"


MUTANTS = list(schema_mutants.mutants(SCHEMA, document()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.keyword} {m.pointer}" for m in MUTANTS])
def test_schema_and_parser_refuse_each_mutant(mutant: schema_mutants.Mutant) -> None:
    assert not VALIDATOR.is_valid(mutant.document)
    error = refusal(lambda: parse_layout(canonical_bytes(mutant.document)))
    assert error is not None
    assert error.phase in ("json", "schema")


def test_no_keyword_of_the_schema_is_without_a_mutant() -> None:
    killed = {(m.pointer, m.keyword) for m in MUTANTS}
    left = [(k, v) for p, k, v in schema_mutants.keywords(schema_mutants.load(SCHEMA)) if (p, k) not in killed]
    assert left == [("maxItems", 4096 * MAX_SLOTS)]

"""Receipts: evidence that newer programs may add to, and that can only ever be ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.json import Json, canonical_bytes
from kvstore.format.receipt import CHECK_RESULTS, RECEIPT_TYPES, Receipt, parse_receipt
from kvstore.limits import MAX_RECEIPT_BYTES
from tests import schema_mutants
from tests.samples import refusal
from tests.strategies import digests, json_values, keys, texts

SCHEMA = "receipt.v1"
VALIDATOR = schema_mutants.validator(SCHEMA)

SAMPLE = Receipt(
    type="load", subject=sha256_digest(b"entry"), made_at="2026-02-03T04:05:06.789012Z",
    producer={"name": "kvstore", "version": "0.1.0"}, libraries={"mlx": "0.32.4"}, device={"backend": "cpu"},
    checks={"model": "verified", "registry_id": "not observable"}, facts={"token_count": 600},
)  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(SAMPLE.data), **changes}


free = st.dictionaries(keys, json_values, max_size=3)
receipts = st.builds(
    Receipt,
    type=st.sampled_from(RECEIPT_TYPES),
    subject=digests,
    made_at=st.datetimes().map(lambda d: f"{d:%Y-%m-%dT%H:%M:%S}Z".zfill(20)),
    producer=st.dictionaries(keys, texts, max_size=2).map(lambda d: {**d, "name": "x", "version": "1"}),
    libraries=st.dictionaries(keys, texts, max_size=3),
    device=st.none() | free,
    checks=st.dictionaries(keys, st.sampled_from(CHECK_RESULTS), max_size=4),
    facts=free,
)


@given(receipts, free)
def test_parse_is_the_inverse_of_the_bytes(made: Receipt, more: dict[str, Json]) -> None:
    made = replace(made, extra={name: item for name, item in more.items() if name not in made.to_json()})
    read = parse_receipt(made.data)
    assert read == made
    assert read.digest == sha256_digest(made.data)
    assert VALIDATOR.is_valid(json.loads(made.data))


def test_unknown_fields_are_kept_and_mean_nothing() -> None:
    value = document(signature="x", facts={"new": [1, {"a": None}]}, producer={**SAMPLE.producer, "build": "b"})
    read = parse_receipt(canonical_bytes(value))
    assert read.data == canonical_bytes(value)
    assert replace(read, extra={}, facts=SAMPLE.facts, producer=SAMPLE.producer) == SAMPLE
    assert VALIDATOR.is_valid(value)


def without(field: str) -> dict[str, Any]:
    return {k: v for k, v in document().items() if k != field}


REFUSED: dict[str, tuple[Any, str]] = {
    **{f"no {field}": (without(field), "FIELD_MISSING") for field in document()},
    "a manifest": (document(media_type="application/vnd.kvstore.manifest.v1+json"), "MEDIA_TYPE_UNKNOWN"),
    "next major version": (document(media_type="application/vnd.kvstore.receipt.v2+json"), "MEDIA_TYPE_UNKNOWN"),
    "type": (document(type="audit"), "FIELD_FORMAT"),
    "subject": (document(subject="x"), "FIELD_FORMAT"),
    "time with offset": (document(made_at="2026-02-03T04:05:06+01:00"), "FIELD_FORMAT"),
    "time without zone": (document(made_at="2026-02-03T04:05:06"), "FIELD_FORMAT"),
    "time with space": (document(made_at="2026-02-03 04:05:06Z"), "FIELD_FORMAT"),
    "time as number": (document(made_at=1770091506), "FIELD_TYPE"),
    "check": (document(checks={"model": "ok"}), "FIELD_FORMAT"),
    "check is true": (document(checks={"model": True}), "FIELD_TYPE"),
    "producer without version": (document(producer={"name": "x"}), "FIELD_MISSING"),
    "producer as text": (document(producer="x"), "FIELD_TYPE"),
    "library version as number": (document(libraries={"mlx": 1}), "FIELD_TYPE"),
    "device as text": (document(device="cpu"), "FIELD_TYPE"),
    "facts as array": (document(facts=[]), "FIELD_TYPE"),
    "not an object": ([], "FIELD_TYPE"),
}


@pytest.mark.parametrize(("value", "code"), REFUSED.values(), ids=REFUSED)
def test_refused(value: Any, code: str) -> None:
    assert not VALIDATOR.is_valid(value)
    with pytest.raises(KVStoreError) as caught:
        parse_receipt(canonical_bytes(value))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("data", "code"), [(b" " * (MAX_RECEIPT_BYTES + 1), "DOC_TOO_LARGE"), (b'{"a": 1}', "JSON_NOT_CANONICAL")]
)
def test_bytes_refused(data: bytes, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_receipt(data)
    assert caught.value.code == code


MUTANTS = list(schema_mutants.mutants(SCHEMA, document()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.keyword} {m.pointer}" for m in MUTANTS])
def test_schema_and_parser_refuse_each_mutant(mutant: schema_mutants.Mutant) -> None:
    assert not VALIDATOR.is_valid(mutant.document)
    error = refusal(lambda: parse_receipt(canonical_bytes(mutant.document)))
    assert error is not None
    assert error.phase == "schema"


def test_no_keyword_of_the_schema_is_without_a_mutant() -> None:
    killed = {(m.pointer, m.keyword) for m in MUTANTS}
    assert [k for p, k, _ in schema_mutants.keywords(schema_mutants.load(SCHEMA)) if (p, k) not in killed] == []

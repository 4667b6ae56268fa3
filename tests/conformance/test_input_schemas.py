"""The schemas of contexts, recipes and prefix inputs: held to the fixtures, and to what our own parsers refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.conformance.chain import chain_document
from kvstore.conformance.context import parse_context
from kvstore.conformance.index import load_index
from kvstore.conformance.recipe import make_entry
from kvstore.errors import KVStoreError
from scripts.fixtures.kinds import CACHES
from scripts.fixtures.tree import FIXTURES
from tests import schema_mutants

INDEX = load_index(FIXTURES)
PARSERS: dict[str, Callable[[Any], Any]] = {
    "fixture-context.v1": parse_context, "fixture-prefix.v1": chain_document, "fixture-recipe.v1": make_entry,
}  # fmt: skip
ROLES = {"fixture-prefix.v1": "prefix", "fixture-recipe.v1": "writer"}


def inputs(role: str) -> Iterator[tuple[str, Any]]:
    for case in INDEX.cases:
        if case.role == role and case.expect["verdict"] == "accept":
            yield case.id, json.loads(INDEX.path(case.input).read_bytes())


def contexts() -> Iterator[tuple[str, Any]]:
    for path in sorted((FIXTURES / "contexts").iterdir()):
        yield path.stem, json.loads(path.read_bytes())


def samples(schema: str) -> list[tuple[str, Any]]:
    return list(contexts() if schema == "fixture-context.v1" else inputs(ROLES[schema]))


@pytest.mark.parametrize("schema", PARSERS)
def test_what_is_right_obeys(schema: str) -> None:
    validator = schema_mutants.validator(schema)
    found = samples(schema)
    assert len(found) > 10
    assert [name for name, value in found if not validator.is_valid(value)] == []


def documents(schema: str) -> list[Any]:
    """Inputs in which every part of the schema has something to break."""
    if schema == "fixture-prefix.v1":
        return [value for name, value in samples(schema) if name == "prefix/media"]
    files = dict(inputs("writer"))["write/files"]
    media = dict(inputs("writer"))["write/media"]["media"]
    if schema == "fixture-recipe.v1":
        kinds = [cache.recipe for cache in CACHES if cache.name != "kv" and "4095" not in cache.name]
        method = {"config": "{}", "name": "drop/half"}
        everything = {**files, "media": media[:1], "method": method, "continuation": {"a": 1, "b": "x"}}
        return [*({**everything, **{name: kind[name] for name in ("layers", "token_ids")}} for kind in kinds)]
    plain = dict(contexts())
    numbers = dict.fromkeys(("bits", "chunk_size", "group_size", "keep", "max_size", "slots"), 4)
    leaf = {"kind": "kv-quantized", "mode": "mxfp4", **numbers, "tensors.k": {"dtype": "U8", "shape": [1, None]}}
    full = {
        **plain["toy-files"], "media": media, "method": "drop/half", "token_count": 3, "signature": {"0.1": leaf},
        "device": {"max_buffer_bytes": 12, "memory_bytes": 24},
    }  # fmt: skip
    return [full, {**plain["toy"], "token_ids": [1, 2]}]


def mutants(schema: str) -> list[schema_mutants.Mutant]:
    """Each keyword broken once, in the first document that has the place."""
    found: dict[tuple[str, str], list[schema_mutants.Mutant]] = {}
    for document in documents(schema):
        new: dict[tuple[str, str], list[schema_mutants.Mutant]] = {}
        for mutant in schema_mutants.mutants(schema, copy.deepcopy(document)):
            new.setdefault((mutant.pointer, mutant.keyword), []).append(mutant)
        found = new | found
    # An array in the place of null may be the other thing that a field can be.
    nulls = {p for p, k, v in schema_mutants.keywords(schema_mutants.load(schema)) if (k, v) in NULLS}
    return [mutant for group in found.values() for mutant in group if mutant.pointer not in nulls]


def refused(schema: str, document: Any) -> bool:
    try:
        PARSERS[schema](document)
    except KVStoreError:
        return True
    return False


NOT_OURS = ("/$defs/leaf_signature", "/$defs/open_tensor", "/properties/signature")
"""Our reader compares signatures with its own, so one that is none fits nothing: nothing is to be refused."""
NULLS = [("type", "null")]
DEAR = {"maxItems"}


@pytest.mark.parametrize("schema", PARSERS)
def test_schema_and_parser_refuse_each_mutant(schema: str) -> None:
    validator = schema_mutants.validator(schema)
    made = mutants(schema)
    taken = [(m.pointer, m.keyword) for m in made if validator.is_valid(m.document)]
    assert taken == []
    ours = [mutant for mutant in made if not mutant.pointer.startswith(NOT_OURS)]
    assert [(m.pointer, m.keyword) for m in ours if not refused(schema, m.document)] == []
    killed = {(mutant.pointer, mutant.keyword) for mutant in made}
    every = schema_mutants.keywords(schema_mutants.load(schema))
    left = [(p, k, v) for p, k, v in every if (p, k) not in killed]
    assert [item for item in left if item[1:] not in NULLS and item[1] not in DEAR] == []


@pytest.mark.parametrize("schema", PARSERS)
def test_parts_that_manifests_have_are_described_alike(schema: str) -> None:
    there, here = (schema_mutants.load(name)["$defs"] for name in ("manifest.v1", schema))
    own = {"method", "tensor", "tensor-hex", "tensor-seed"}
    assert {name for name in there.keys() & here.keys() if there[name] != here[name]} <= own

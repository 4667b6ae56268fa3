"""The schema of results: every keyword in it refuses something, in documents made from the schema itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests import schema_mutants

NAME = "cli-output.v1"
ROOT = schema_mutants.load(NAME)
VALIDATOR = schema_mutants.validator(NAME)
PATTERNS = {"sha256": "sha256:" + "0" * 64, "{4}-": "2026-01-02T03:04:05.678901Z", "{64}": "0" * 64}
PLAIN: dict[str, Any] = {"boolean": True, "integer": 7, "null": None, "number": 0.5, "string": "x"}


def sample(schema: dict[str, Any], option: int) -> Any:
    """A value that obeys the schema, with every property; of alternatives the one of this number, if there is one."""
    if "$ref" in schema:
        return sample(ROOT["$defs"][schema["$ref"].rpartition("/")[2]], option)
    if "anyOf" in schema:
        return sample(schema["anyOf"][min(option, len(schema["anyOf"]) - 1)], option)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "pattern" in schema:
        return next(text for part, text in PATTERNS.items() if part in schema["pattern"])
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[min(option, len(kinds) - 1)]
    if kind == "array":
        return [sample(schema.get("items", {}), option)]
    if kind == "object":
        found = {name: sample(item, option) for name, item in schema.get("properties", {}).items()}
        more = schema.get("additionalProperties")
        return {**found, **({"more": sample(more, option)} if isinstance(more, dict) else {})}
    return max(schema.get("minimum", 0), PLAIN[kind]) if kind in ("integer", "number") else PLAIN[kind]


def documents() -> Iterator[Any]:
    for reference in ROOT["oneOf"]:
        yield from (sample(reference, option) for option in range(2))


def test_every_keyword_refuses_something() -> None:
    killed: set[tuple[str, str]] = set()
    for document in documents():
        VALIDATOR.validate(document)
        for mutant in schema_mutants.mutants(NAME, document):
            if not VALIDATOR.is_valid(mutant.document):
                killed.add((mutant.pointer, mutant.keyword))
    left = {(p, k) for p, k, value in schema_mutants.keywords(ROOT) if value != "null"} - killed
    assert left == set()


def test_each_document_is_of_one_type() -> None:
    types = [document["type"] for document in documents()]
    assert len(set(types)) == len(ROOT["oneOf"]) == len(types) / 2

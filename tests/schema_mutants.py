"""One broken document for each keyword of a JSON Schema, made from a valid one.

:func:`mutants` walks a schema and a document that satisfies it side by side. For each
keyword it meets it yields the document with exactly that keyword violated, once.
:func:`keywords` lists all keywords, so that a test can see that none was left out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "schemas"
AFFORDABLE = 64
"""Longer arrays and more properties than this are not built; a test compares those limits with the code's."""


class Mutant(NamedTuple):
    """A keyword by its JSON pointer and name, and a document that violates it."""

    pointer: str
    keyword: str
    document: Any


def load(name: str) -> dict[str, Any]:
    """A schema of the project."""
    value: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    return value


def validator(name: str) -> jsonschema.Draft202012Validator:
    """A validator for a schema of the project, the schema itself checked."""
    schema = load(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def keywords(schema: Any, pointer: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every constraint in the schema: pointer, keyword, value. What stands under propertyNames is one constraint."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            where = f"{pointer}/{key}"
            forbids = key != "additionalProperties" or value is False
            if key in _CONSTRAINTS and forbids and not pointer.endswith(("/properties", "/$defs")):
                yield pointer, key, value
            if isinstance(value, (dict, list)) and key not in ("enum", "propertyNames", "required"):
                yield from keywords(value, where)
    elif isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from keywords(item, f"{pointer}/{index}")


def mutants(name: str, document: Any) -> Iterator[Mutant]:
    """The broken documents, each keyword's first opportunity taken."""
    yield from _Walk(load(name), document).at("", document, ())


class _Walk:
    def __init__(self, root: dict[str, Any], document: Any) -> None:
        self.root, self.document = root, document
        self.seen: set[tuple[str, str]] = set()

    def at(self, pointer: str, value: Any, path: tuple[Any, ...]) -> Iterator[Mutant]:
        schema = self.resolve(pointer)
        if "$ref" in schema:
            yield from self.at(schema["$ref"].removeprefix("#"), value, path)
        for key in ("anyOf", "oneOf"):
            for index, option in enumerate(schema.get(key, ())):
                if self.fits(option, value):
                    yield from self.at(f"{pointer}/{key}/{index}", value, path)
        for keyword in _CONSTRAINTS & set(schema):
            if (pointer, keyword) not in self.seen:
                broken = _VIOLATIONS[keyword](schema[keyword], value)
                if broken:
                    self.seen.add((pointer, keyword))
                yield from (Mutant(pointer, keyword, self.replaced(path, item)) for item in broken)
        yield from self.below(pointer, schema, value, path)

    def below(self, pointer: str, schema: dict[str, Any], value: Any, path: tuple[Any, ...]) -> Iterator[Mutant]:
        if isinstance(value, list) and "items" in schema:
            for index, item in enumerate(value):
                yield from self.at(f"{pointer}/items", item, (*path, index))
        if not isinstance(value, dict):
            return
        for key, item in value.items():
            if key in schema.get("properties", ()):
                yield from self.at(f"{pointer}/properties/{key}", item, (*path, key))
            elif "patternProperties" in schema:
                (pattern,) = schema["patternProperties"]
                yield from self.at(f"{pointer}/patternProperties/{pattern}", item, (*path, key))
            elif isinstance(schema.get("additionalProperties"), dict):
                yield from self.at(f"{pointer}/additionalProperties", item, (*path, key))

    def fits(self, option: dict[str, Any], value: Any) -> bool:
        whole = {**option, "$defs": self.root.get("$defs", {})}
        return bool(jsonschema.Draft202012Validator(whole).is_valid(value))

    def resolve(self, pointer: str) -> dict[str, Any]:
        node: Any = self.root
        rest = pointer
        while rest:
            # A pattern may hold slashes, so the longest key that fits is taken.
            keys = node if isinstance(node, dict) else range(len(node))
            key = max((k for k in keys if f"{rest}/".startswith(f"/{k}/")), key=lambda k: len(str(k)))
            node, rest = node[key], rest[len(str(key)) + 1 :]
        assert isinstance(node, dict)
        return node

    def replaced(self, path: tuple[Any, ...], value: Any) -> Any:
        if not path:
            return value
        result = copy.deepcopy(self.document)
        node = result
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value
        return result


def _many_items(wanted: int, value: list[Any]) -> list[Any]:
    return [[*(value or [0]) * (wanted + 1)][: wanted + 1]] if wanted <= AFFORDABLE else []


def _many_properties(wanted: int, _: Any) -> list[Any]:
    return [{f"a{n}": 1 for n in range(wanted + 1)}] if wanted <= AFFORDABLE else []


def _odd_names(_: Any, value: dict[str, Any]) -> list[Any]:
    item = next(iter(value.values()), 1)
    return [{**value, name: item} for name in ("a b\n", "a" * 256)]


_VIOLATIONS: Mapping[str, Callable[[Any, Any], list[Any]]] = {
    "type": lambda wanted, _: [{}] if wanted == "array" else [[]],
    "required": lambda wanted, value: [{k: v for k, v in value.items() if k != name} for name in wanted],
    "additionalProperties": lambda wanted, value: [{**value, "zz": 1}] if wanted is False else [],
    "propertyNames": _odd_names,
    "enum": lambda _, __: ["zz"],
    "const": lambda _, __: ["zz"],
    "pattern": lambda _, value: [value + "\n", value + "\x00"],
    "maxLength": lambda wanted, _: ["a" * (wanted + 1)],
    "minLength": lambda _, __: [""],
    "minimum": lambda wanted, _: [wanted - 1],
    "maximum": lambda wanted, _: [wanted + 1],
    "minItems": lambda _, __: [[]],
    "maxItems": _many_items,
    "maxProperties": _many_properties,
}
"""For each keyword: values in the place of a valid one that break it; none where that can't be afforded."""
_CONSTRAINTS = frozenset(_VIOLATIONS)

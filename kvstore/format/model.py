"""What a cache was computed with: the model record and the tokenizer record.

The model record holds everything that changes keys and values for given token ids:
the weight files, the config, custom model code, adapters, the media processor, the
shard, and the geometry in readable form. Its digest, the *model digest*, keys every
prefix chain. Names (repository, revision, path) are not in it: two copies of one model
are one model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.digest import Digest, tagged_digest
from kvstore.format.fields import Fields, expect_text
from kvstore.format.json import Json, canonical_bytes, number_text
from kvstore.limits import MAX_NAME_CHARS

__all__ = [
    "AdapterRecord", "FileRecord", "ModelRecord", "TokenizerRecord", "config_digest", "parse_model",
    "parse_tokenizer",
]  # fmt: skip

MODEL_TAG: Final = "kvstore model v1"
CONFIG_TAG: Final = "kvstore config v1"
_MAX_FILES: Final = 65536
_FILE_NAME: Final = re.compile(r"[^\x00-\x1f\\]+")
_SCALE: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-][1-9][0-9]*)?", re.ASCII)
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file by name, size in bytes, and SHA-256."""

    name: str
    size: int
    digest: Digest

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"digest": self.digest, "name": self.name, "size": self.size}


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """A low-rank adapter: its kind (``lora``, ``dora``, ``full``), its files, and its scale as a number text."""

    kind: str
    files: tuple[FileRecord, ...]
    config: Digest
    scale: str

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "config": self.config, "files": [f.to_json() for f in self.files], "kind": self.kind, "scale": self.scale,
        }  # fmt: skip


@dataclass(frozen=True)
class ModelRecord:
    """The model identity.

    Attributes:
        model_type: The config's ``model_type``, for people; the config digest decides.
        weights: Every weight file, by name.
        config: Digest of the canonical config without inert keys (:func:`config_digest`).
        code: Custom model code files.
        adapter: The adapter, or None for the base model.
        processor: Digest of the media processor's config, or None.
        shard: Always None in v1: one rank holds the whole model.
        geometry: Readable numbers (layers, heads, head size …), sorted by name.
    """

    model_type: str
    weights: tuple[FileRecord, ...]
    config: Digest
    code: tuple[FileRecord, ...]
    adapter: AdapterRecord | None
    processor: Digest | None
    geometry: tuple[tuple[str, int], ...]

    @cached_property
    def digest(self) -> Digest:
        """The model digest."""
        return tagged_digest(MODEL_TAG, canonical_bytes(self.to_json()))

    def to_json(self) -> dict[str, Json]:
        """The JSON object that the manifest holds."""
        return {
            "adapter": None if self.adapter is None else self.adapter.to_json(),
            "code": [f.to_json() for f in self.code],
            "config": self.config,
            "geometry": dict(self.geometry),
            "model_type": self.model_type,
            "processor": self.processor,
            "shard": None,
            "weights": [f.to_json() for f in self.weights],
        }


@dataclass(frozen=True, slots=True)
class TokenizerRecord:
    """Digests of the tokenizer's files together and of the chat template (None where there is none)."""

    digest: Digest
    chat_template: Digest | None

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"chat_template": self.chat_template, "digest": self.digest}


def config_digest(config: Mapping[str, Json]) -> Digest:
    """Digest of a config whose fractions are already number texts and whose inert keys are gone."""
    return tagged_digest(CONFIG_TAG, canonical_bytes(dict(config)))


def parse_model(value: Any, where: str = "model") -> ModelRecord:
    """Parse a model record.

    Raises:
        InvalidError: FIELD_* codes.
        UnsupportedError: SHARD_UNSUPPORTED for anything but one whole model.
    """
    fields = Fields(
        value, where, ("adapter", "code", "config", "geometry", "model_type", "processor", "shard", "weights")
    )
    if fields.get("shard") is not None:
        raise fail("SHARD_UNSUPPORTED", fields.path("shard"), expected="null", found="a shard")
    return ModelRecord(
        model_type=fields.text("model_type", grammar=_WORD),
        weights=_at_least_one(fields, "weights"),
        config=fields.digest("config"),
        code=_files(fields, "code"),
        adapter=fields.nullable("adapter", lambda name: _adapter(fields.get(name), fields.path(name))),
        processor=fields.nullable("processor", fields.digest),
        geometry=_geometry(fields),
    )


def parse_tokenizer(value: Any, where: str = "tokenizer") -> TokenizerRecord:
    """Parse a tokenizer record."""
    fields = Fields(value, where, ("chat_template", "digest"))
    return TokenizerRecord(
        digest=fields.digest("digest"), chat_template=fields.nullable("chat_template", fields.digest)
    )


def _geometry(fields: Fields) -> tuple[tuple[str, int], ...]:
    value = fields.get("geometry")
    inner = Fields(value, fields.path("geometry"), None)
    for name in value:
        expect_text(name, inner.path(name), grammar=_WORD, limit=MAX_NAME_CHARS)
    return tuple((name, inner.integer(name)) for name in sorted(value))


def _adapter(value: Any, where: str) -> AdapterRecord:
    fields = Fields(value, where, ("config", "files", "kind", "scale"))
    return AdapterRecord(
        kind=fields.text("kind", grammar=_WORD),
        files=_at_least_one(fields, "files"),
        config=fields.digest("config"),
        scale=_scale(fields),
    )


def _scale(fields: Fields) -> str:
    """A number text: the shortest form of its own value, so that one scale has one text."""
    text = fields.text("scale", grammar=_SCALE)
    shortest = _shortest(text)
    if text != shortest:
        raise fail("FIELD_FORMAT", fields.path("scale"), expected=shortest, found=text)
    return text


def _shortest(text: str) -> str:
    value = float(text)
    return number_text(value) if isfinite(value) else "a finite number"


def _at_least_one(fields: Fields, name: str) -> tuple[FileRecord, ...]:
    records = _files(fields, name)
    if not records:
        raise fail("FIELD_RANGE", fields.path(name), expected="at least one file", found="none")
    return records


def _files(fields: Fields, name: str) -> tuple[FileRecord, ...]:
    """File records in strictly ascending order of name, so that one set has one form."""
    records = tuple(_file(item, where) for item, where in fields.items(name, limit=_MAX_FILES))
    names = [record.name for record in records]
    if any(a >= b for a, b in pairwise(names)):
        raise fail("FIELD_FORMAT", fields.path(name), expected="names in ascending order, none twice", found=names)
    return records


def _file(value: Any, where: str) -> FileRecord:
    fields = Fields(value, where, ("digest", "name", "size"))
    return FileRecord(
        name=fields.text("name", grammar=_FILE_NAME), size=fields.integer("size"), digest=fields.digest("digest")
    )

"""The manifest: what one cache is. A pure function of model, prefix, state and method.

No time, host, codec, library version or name is in it, so putting the same cache twice
gives the same bytes. The SHA-256 of those bytes is the *entry id*. Unknown fields,
kinds, features and versions are refused: a misread cache is silent wrong output, and
computing it again is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.digest import Digest, Readable, sha256_digest
from kvstore.format.fields import NAME, Fields, expect_object, expect_text
from kvstore.format.groups import Group, PayloadRef, check_groups, parse_groups, parse_payload_ref
from kvstore.format.json import Json, canonical_bytes, parse_canonical
from kvstore.format.kinds import LOSSY_KINDS
from kvstore.format.layers import LayerRecord, leaves, lowest_cut, parse_layers
from kvstore.format.model import ModelRecord, TokenizerRecord, parse_model, parse_tokenizer
from kvstore.format.prefix import MediaItem, TokenIds, before_media, parse_media, parse_namespace, prefix_digest
from kvstore.format.rules import check_layers
from kvstore.format.tensors import TensorSpec, payload_size
from kvstore.limits import MAX_EXACT_INT, MAX_MANIFEST_BYTES, MAX_NAME_CHARS, MAX_TOKENS

__all__ = [
    "MANIFEST_MEDIA_TYPE", "PROFILES", "Manifest", "MethodRecord", "PrefixRecord", "check_manifest", "check_prefix",
    "parse_continuation", "parse_manifest", "token_spec",
]  # fmt: skip

MANIFEST_MEDIA_TYPE: Final = "application/vnd.kvstore.manifest.v1+json"
PROFILES: Final = ("generic/1",)
_CONTINUATION: Final = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_MAX_CONTINUATION: Final = 64
_MAX_METHOD_TEXT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MethodRecord:
    """The lossy method that made the state, and its config as verbatim foreign JSON text with its digest."""

    name: str
    config: str
    config_digest: Digest

    @classmethod
    def make(cls, name: str, config: str) -> MethodRecord:
        """A record with the digest computed."""
        return cls(name, config, sha256_digest(config.encode()))

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"config": self.config, "config_digest": self.config_digest, "name": self.name}


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """The token prefix: count, chain digest, the payload of the token ids, and the media in it."""

    token_count: int
    digest: Digest
    token_ids: PayloadRef
    media: tuple[MediaItem, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "digest": self.digest,
            "media": [item.to_json() for item in self.media],
            "token_count": self.token_count,
            "token_ids": self.token_ids.to_json(),
        }


@dataclass(frozen=True)
class Manifest:
    """One entry: see SPEC.md, section Manifest, for every field."""

    model: ModelRecord
    tokenizer: TokenizerRecord
    namespace: str
    prefix: PrefixRecord
    layers: tuple[LayerRecord, ...]
    groups: tuple[Group, ...]
    method: MethodRecord | None = None
    continuation: tuple[tuple[str, int | str], ...] = ()
    profile: str = "generic/1"

    @cached_property
    def data(self) -> bytes:
        """The canonical bytes."""
        return canonical_bytes(self.to_json())

    @cached_property
    def entry_id(self) -> Digest:
        """SHA-256 of the canonical bytes."""
        return sha256_digest(self.data)

    @cached_property
    def leaves(self) -> Mapping[str, LayerRecord]:
        """Leaf layers by path, in cache order."""
        return dict(leaves(self.layers))

    @property
    def token_count(self) -> int:
        """Tokens that the cache is the state of."""
        return self.prefix.token_count

    @property
    def lowest_cut(self) -> int:
        """The least token count that the whole entry can be cut back to (``token_count`` if it cannot)."""
        return lowest_cut(self.leaves.values(), self.token_count)

    def can_cut(self, tokens: int) -> bool:
        """Whether the entry can be restored at ``tokens``: not below the lowest cut, not within a media item."""
        whole = before_media(tokens, self.prefix.media) == tokens
        return whole and max(self.lowest_cut, 1) <= tokens <= self.token_count

    @property
    def method_name(self) -> str | None:
        """Name of the lossy method, or None for a lossless entry."""
        return None if self.method is None else self.method.name

    @property
    def asserted(self) -> bool:
        """Whether no layer has an offset, so that the token count is the caller's word."""
        return all(leaf.offset is None or leaf.never_written for leaf in self.leaves.values())

    def payloads(self) -> tuple[PayloadRef, ...]:
        """Every payload that the state needs (token ids excluded), in group order, each once."""
        return tuple(dict.fromkeys(ref for group in self.groups for ref in group.payloads))

    def all_payloads(self) -> tuple[PayloadRef, ...]:
        """The same and the payload of the token ids, last."""
        return tuple(dict.fromkeys((*self.payloads(), self.prefix.token_ids)))

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "continuation": dict(self.continuation),
            "features": [],
            "groups": [group.to_json() for group in self.groups],
            "layers": [layer.to_json() for layer in self.layers],
            "media_type": MANIFEST_MEDIA_TYPE,
            "method": None if self.method is None else self.method.to_json(),
            "model": self.model.to_json(),
            "namespace": self.namespace,
            "prefix": self.prefix.to_json(),
            "profile": self.profile,
            "tokenizer": self.tokenizer.to_json(),
        }


def parse_manifest(data: Readable) -> Manifest:
    """Steps 1 to 4 of the reading order: size, canonical JSON, fields, cross-field rules.

    Raises:
        InvalidError, UnsupportedError: with the code of the first rule that fails.
    """
    value = parse_canonical(data, MAX_MANIFEST_BYTES, "manifest")
    manifest = check_manifest(manifest_from_json(value))
    # No other bytes are canonical for it: what was parsed need not be written again.
    vars(manifest)["data"] = bytes(data)
    return manifest


def manifest_from_json(value: Any) -> Manifest:
    """Step 3 alone: the fields, without cross-field rules."""
    _check_envelope(value)
    fields = Fields(value, "", (
        "continuation", "features", "groups", "layers", "media_type", "method", "model", "namespace", "prefix",
        "profile", "tokenizer",
    ))  # fmt: skip
    return Manifest(
        model=parse_model(fields.get("model")),
        tokenizer=parse_tokenizer(fields.get("tokenizer")),
        namespace=parse_namespace(fields.get("namespace"), "namespace"),
        prefix=_prefix(fields.get("prefix")),
        layers=parse_layers(fields, "layers"),
        groups=parse_groups(fields, "groups"),
        method=fields.nullable("method", lambda name: _method(fields.get(name))),
        continuation=parse_continuation(fields),
        profile=fields.text("profile"),
    )


def check_manifest(manifest: Manifest) -> Manifest:
    """Step 4: the cross-field rules. Returns the manifest."""
    check_layers(manifest.layers, manifest.token_count)
    _check_sparse(manifest)
    check_groups(manifest.groups, manifest.layers)
    _check_method(manifest.method)
    expected = payload_size([token_spec(manifest.token_count)])
    if manifest.prefix.token_ids.size != expected:
        raise fail(
            "PAYLOAD_SIZE_MISMATCH", "prefix.token_ids.size", expected=expected, found=manifest.prefix.token_ids.size
        )
    return manifest


def _check_sparse(manifest: Manifest) -> None:
    """Without a method's name, nobody who asks for lossless state could be kept from a sparse entry."""
    sparse = [path for path, leaf in manifest.leaves.items() if leaf.kind in LOSSY_KINDS]
    if sparse and manifest.method is None:
        raise fail("METHOD_MISSING", f"layers[{sparse[0]}] is sparse", expected="a method", found=None, layers=sparse)


def _check_method(method: MethodRecord | None) -> None:
    if method is None:
        return
    actual = sha256_digest(method.config.encode())
    if method.config_digest != actual:
        raise fail("METHOD_DIGEST_MISMATCH", "method.config_digest", expected=actual, found=method.config_digest)


def check_prefix(manifest: Manifest, ids: TokenIds) -> None:
    """Prove that ``ids`` are the entry's token ids.

    Raises:
        InvalidError: PREFIX_CHAIN_MISMATCH or TOKEN_COUNT_MISMATCH.
    """
    if ids.size != manifest.token_count:
        raise fail("TOKEN_COUNT_MISMATCH", "token ids", expected=manifest.token_count, found=int(ids.size))
    found = prefix_digest(manifest.model.digest, manifest.namespace, ids, manifest.prefix.media)
    if found != manifest.prefix.digest:
        raise fail("PREFIX_CHAIN_MISMATCH", "prefix.digest", expected=manifest.prefix.digest, found=found)


def token_spec(count: int) -> TensorSpec:
    """The one tensor of the token-ids payload."""
    return TensorSpec("token_ids", "U32", (count,))


def _check_envelope(value: Any) -> None:
    """Media type, features and profile decide whether the rest can be understood at all."""
    head = Fields(value, "", None)
    head.require_media_type(MANIFEST_MEDIA_TYPE)
    head.require_no_features("FEATURE_UNSUPPORTED", "features")
    profile = head.text("profile", limit=None)
    if profile not in PROFILES:
        raise fail("PROFILE_UNSUPPORTED", "profile", expected=list(PROFILES), found=profile)


def _prefix(value: Any) -> PrefixRecord:
    fields = Fields(value, "prefix", ("digest", "media", "token_count", "token_ids"))
    count = fields.integer("token_count", low=1, high=MAX_TOKENS)
    return PrefixRecord(
        token_count=count,
        digest=fields.digest("digest"),
        token_ids=parse_payload_ref(fields.get("token_ids"), fields.path("token_ids")),
        media=parse_media(fields, "media", count),
    )


def _method(value: Any) -> MethodRecord:
    fields = Fields(value, "method", ("config", "config_digest", "name"))
    text = fields.text("config", limit=_MAX_METHOD_TEXT)
    return MethodRecord(fields.text("name", grammar=NAME), text, fields.digest("config_digest"))


def parse_continuation(fields: Fields) -> tuple[tuple[str, int | str], ...]:
    """The field ``continuation``: scalars beside the cache that a model needs to go on (M-RoPE deltas and the like).

    Raises:
        InvalidError: FIELD_MISSING, FIELD_TYPE, FIELD_FORMAT, FIELD_RANGE or LIMIT_EXCEEDED.
    """
    where = fields.path("continuation")
    value = expect_object(fields.get("continuation"), where)
    inner = Fields(value, where, None)
    if len(value) > _MAX_CONTINUATION:
        raise fail("LIMIT_EXCEEDED", where, expected=f"at most {_MAX_CONTINUATION}", found=len(value))
    for name in value:
        expect_text(name, f"{where}.{name}", grammar=_CONTINUATION, limit=MAX_NAME_CHARS)
    return tuple(
        (name, inner.text(name) if isinstance(value[name], str) else inner.integer(name, low=-MAX_EXACT_INT))
        for name in sorted(value)
    )

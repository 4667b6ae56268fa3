"""The receiving side of a case: what a reader is asked to restore into, as a JSON document.

A fixture can't hold a live model, so a context says what a reader would know of one: its
records, the signature of its caches, the wanted prefix or position, and limits of the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvstore.errors import fail
from kvstore.format.compat import Policy, Wanted
from kvstore.format.fields import NAME, Fields, expect_array, expect_object
from kvstore.format.model import parse_model, parse_tokenizer
from kvstore.format.prefix import MediaItem, TokenIds, as_token_ids, parse_media, parse_namespace
from kvstore.limits import MAX_TOKENS

__all__ = ["Context", "parse_context"]

_FIELDS = (
    "device", "media", "method", "model", "namespace", "policy", "signature", "token_count", "token_ids", "tokenizer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Context:
    """What a reader knows of the receiving side.

    Attributes:
        wanted: Records, namespace, policy, signature, acceptable method.
        token_ids, media: The wanted prefix, or None where the entry is asked for by its id alone.
        token_count: The position to restore at, or None for the last one possible.
        max_buffer_bytes, memory_bytes: Limits of the device, or None where nobody tells.
    """

    wanted: Wanted
    token_ids: TokenIds | None = None
    media: tuple[MediaItem, ...] = ()
    token_count: int | None = None
    max_buffer_bytes: int | None = None
    memory_bytes: int | None = None


def parse_context(value: Any) -> Context:
    """Parse a context document.

    Raises:
        KVStoreError: of the first field that is wrong: the context, not the case, is at fault.
    """
    fields = Fields(value, "", _FIELDS)
    device = Fields(fields.get("device"), "device", ("max_buffer_bytes", "memory_bytes"))
    ids = fields.nullable("token_ids", lambda name: as_token_ids(expect_array(fields.get(name), name)))
    count = fields.nullable("token_count", lambda name: fields.integer(name, high=MAX_TOKENS))
    if ids is not None and count is not None:
        raise fail("USAGE", "a context names a prefix or a position, not both")
    return Context(
        wanted=_wanted(fields),
        token_ids=ids,
        media=parse_media(fields, "media", MAX_TOKENS),
        token_count=count,
        max_buffer_bytes=device.nullable("max_buffer_bytes", device.integer),
        memory_bytes=device.nullable("memory_bytes", device.integer),
    )


def _wanted(fields: Fields) -> Wanted:
    policy = fields.text("policy")
    if policy not in ("strict", "tokens"):
        raise fail("USAGE", "policy", expected="strict or tokens", found=policy)
    return Wanted(
        model=parse_model(fields.get("model")),
        tokenizer=parse_tokenizer(fields.get("tokenizer")),
        namespace=parse_namespace(fields.get("namespace")),
        policy=cast("Policy", policy),
        signature=fields.nullable("signature", lambda name: _signature(fields.get(name))),
        method=fields.nullable("method", lambda name: fields.text(name, grammar=NAME)),
    )


def _signature(value: Any) -> Mapping[str, Mapping[str, Any]]:
    return {path: expect_object(leaf, f"signature.{path}") for path, leaf in expect_object(value, "signature").items()}

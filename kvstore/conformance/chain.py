"""Prefix chains from a JSON document: the ``prefix`` role."""

from __future__ import annotations

from typing import Any

from kvstore.format.fields import Fields, expect_array
from kvstore.format.prefix import as_token_ids, chain_digests, parse_media, parse_namespace

__all__ = ["chain_document"]


def chain_document(value: Any) -> dict[str, Any]:
    """The chain of ``model``, ``namespace``, ``token_ids`` and ``media``: every link with its token count.

    Raises:
        InvalidError: TOKEN_ID_RANGE, or a FIELD_* code.
    """
    fields = Fields(value, "", ("media", "model", "namespace", "token_ids"))
    ids = as_token_ids(expect_array(fields.get("token_ids"), "token_ids"))
    media = parse_media(fields, "media", int(ids.size))
    links = chain_digests(fields.digest("model"), parse_namespace(fields.get("namespace")), ids, media)
    return {"chain": [{"digest": f"sha256:{digest.hex()}", "tokens": int(tokens)} for tokens, digest in links]}

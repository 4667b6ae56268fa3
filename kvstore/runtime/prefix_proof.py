"""Proof that an entry is a prefix of the ids that it was found for: the index finds, and is not believed."""

from __future__ import annotations

import numpy as np

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.manifest import Manifest
from kvstore.format.prefix import prefix_digest
from kvstore.store.entry_store import EntryStore
from kvstore.store.explain import Asked

__all__ = ["begins", "require_prefix"]


def begins(entries: EntryStore, manifest: Manifest, asked: Asked, tokens: int) -> bool:
    """Whether the first ``tokens`` positions of the entry are those of the ids; the index alone proves nothing.

    For a whole entry its prefix digest tells; for a part of it, its token ids are read.

    Raises:
        IntegrityError, InvalidError: of the object that holds the token ids.
    """
    ids, media = asked.ids[:tokens], tuple(item for item in asked.media if item.start < tokens)
    if ids.size < tokens or manifest.model.digest != asked.model.digest or manifest.namespace != asked.namespace:
        return False
    if tokens == manifest.token_count:
        return prefix_digest(asked.model.digest, asked.namespace, ids, media) == manifest.prefix.digest
    same = media == tuple(item for item in manifest.prefix.media if item.start < tokens)
    return same and np.array_equal(ids, entries.token_ids(manifest)[:tokens])


def require_prefix(entries: EntryStore, manifest: Manifest, asked: Asked, tokens: int) -> None:
    """Prove that the entry is a prefix of the ids, whatever the index says.

    Raises:
        IncompatibleError: PREFIX_NOT_MATCHED.
        IntegrityError, InvalidError: as :func:`begins`.
    """
    if not begins(entries, manifest, asked, tokens):
        raise fail(
            "PREFIX_NOT_MATCHED", f"the entry's first {tokens} tokens are not those that were asked for",
            expected=_prefix_of(asked, tokens), found=manifest.prefix.digest,
            fix="The index is wrong: rebuild it with `kvstore verify --rebuild-index`.",
            entry=manifest.entry_id, token_count=tokens,
        )  # fmt: skip


def _prefix_of(asked: Asked, tokens: int) -> Digest:
    media = tuple(item for item in asked.media if item.start < tokens)
    return prefix_digest(asked.model.digest, asked.namespace, asked.ids[:tokens], media)

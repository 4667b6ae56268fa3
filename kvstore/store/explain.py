"""Why a prompt hits or misses, looked at more closely than a match does.

A match names what is stored for its own model in its own namespace. Here it is also
asked what others have for the same tokens, and manifests are read to name the very
field that differs. It costs about one match for each model that is looked at, which is
little beside the prefill that a miss costs.

Another namespace is looked into only when that is asked for: whether somebody else has
stored a prefix is nobody's business where namespaces separate tenants.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.format.compat import Mismatch, Signature, Wanted, mismatches
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.manifest import Manifest
from kvstore.format.model import ModelRecord
from kvstore.format.prefix import MediaItem, TokenIds
from kvstore.store.match import Reason, block_digests
from kvstore.store.nodes import locate, reach, roots
from kvstore.store.opening import Opened
from kvstore.store.read import read_manifest
from kvstore.store.schema import entries
from kvstore.store.symbols import Symbols

__all__ = ["Asked", "Elsewhere", "elsewhere", "explain", "nearest"]

_MOST_PLACES: Final = 16
_SHOWN_CHARS: Final = 120


@dataclass(frozen=True, slots=True)
class Asked:
    """What a match was asked for.

    Attributes:
        ids: Token ids of the prompt.
        signature: Of the receiving model's caches, or None where any will do.
        media: Media items of the prompt.
    """

    model: ModelRecord
    namespace: str
    ids: TokenIds
    signature: Signature | None = None
    media: tuple[MediaItem, ...] = ()


class Elsewhere(NamedTuple):
    """Another model or namespace that holds a prefix of the same tokens, and an entry that does."""

    namespace: str
    model: Digest
    common_tokens: int
    entry_id: Digest


def nearest(
    conn: sa.Connection, asked: Asked, *, model: Digest | None = None, namespace: str | None = None
) -> Elsewhere | None:
    """The newest of the entries that share the most tokens, restorable or not; by default in the place asked for."""
    where, what = namespace or asked.namespace, model or asked.model.digest
    spot = locate(conn, block_digests(what, where, asked.ids, asked.media), Symbols(asked.ids, asked.media))
    if spot is None or not spot.depth:
        return None
    key = sa.select(sa.func.max(reach.c.entry_key)).where(reach.c.node == spot.steps[-1].node).scalar_subquery()
    entry_id = conn.execute(sa.select(entries.c.entry_id).where(entries.c.entry_key == key)).scalar_one()
    return Elsewhere(where, what, spot.depth, entry_id)


def elsewhere(
    conn: sa.Connection, asked: Asked, *, namespaces: bool = False, most: int = _MOST_PLACES
) -> tuple[Elsewhere, ...]:
    """Other models that hold a prefix of the same tokens; the longest first.

    Args:
        namespaces: Also look into other namespaces.
        most: At most so many places are looked at, newest first.
    """
    here = sa.and_(roots.c.namespace == asked.namespace, roots.c.model_digest == asked.model.digest)
    query = sa.select(roots.c.namespace, roots.c.model_digest).where(~here).order_by(roots.c.node.desc()).limit(most)
    if not namespaces:
        query = query.where(roots.c.namespace == asked.namespace)
    found = [nearest(conn, asked, namespace=row[0], model=row[1]) for row in conn.execute(query).all()]
    return tuple(sorted((place for place in found if place), key=lambda p: (-p.common_tokens, p.namespace, p.model)))


def explain(
    opened: Opened, asked: Asked, reasons: Sequence[Reason], *, longer_than: int, namespaces: bool = False
) -> tuple[Reason, ...]:
    """A match's reasons with the fields that differ, and what others have that is longer.

    Args:
        reasons: Of the match.
        longer_than: Tokens that the match restores.
        namespaces: Also look into other namespaces.
    """
    with opened.index.read() as conn:
        places = elsewhere(conn, asked, namespaces=namespaces)
    own = (_with_field(opened, asked, reason) for reason in reasons)
    others = (_of_place(opened, asked, place) for place in places if place.common_tokens > longer_than)
    return (*own, *(reason for reason in others if reason is not None))


def _with_field(opened: Opened, asked: Asked, reason: Reason) -> Reason:
    """Name the first layer and field by which a signature differs; both sides are that field's then."""
    if reason.code != "OTHER_SIGNATURE" or reason.entry_id is None or asked.signature is None:
        return reason
    manifest = _manifest(opened, reason.entry_id)
    first = None if manifest is None else _difference(manifest, replace(asked, model=manifest.model))
    return reason if first is None else _sides(reason, f"{reason.message}: {first.field}", first)


def _of_place(opened: Opened, asked: Asked, place: Elsewhere) -> Reason | None:
    """What another model or namespace has, and by which field it is another."""
    where = "" if place.namespace == asked.namespace else f" in namespace {place.namespace!r}"
    tail = f"{place.common_tokens} of the tokens are stored"
    if place.model == asked.model.digest:
        message = f"other namespace: {tail}{where}"
        return Reason(
            "OTHER_NAMESPACE", message, place.common_tokens, asked.namespace, place.namespace, place.entry_id
        )  # fmt: skip
    manifest = _manifest(opened, place.entry_id)
    first = None if manifest is None else _difference(manifest, replace(asked, signature=None))
    reason = Reason("OTHER_MODEL", "", place.common_tokens, entry_id=place.entry_id)
    return None if first is None else _sides(reason, f"other model: {tail}{where} by one whose {first.field}", first)


def _difference(manifest: Manifest, asked: Asked) -> Mismatch | None:
    """The first field by which an entry is not what was asked for; tokenizer, namespace and method aside."""
    wanted = Wanted(
        asked.model, manifest.tokenizer, manifest.namespace, "strict", asked.signature, manifest.method_name
    )
    return next(iter(mismatches(manifest, wanted)), None)


def _sides(reason: Reason, what: str, mismatch: Mismatch) -> Reason:
    expected, found = _text(mismatch.expected), _text(mismatch.found)
    return replace(
        reason, message=f"{what} differs (expected {_short(expected)}, found {_short(found)})", expected=expected,
        found=found,
    )  # fmt: skip


def _manifest(opened: Opened, entry_id: Digest) -> Manifest | None:
    """The manifest, or None where the entry has gone or cannot be read: then there is nothing to say of it."""
    try:
        return read_manifest(opened, entry_id)
    except KVStoreError:
        return None


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    """A digest by its first digits; any other text as it is, up to a line."""
    text = text.removeprefix("sha256:")[:12] if text.startswith("sha256:") else text
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"

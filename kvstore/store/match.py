"""The longest prefix that can be restored: which entry, how many tokens, and why not more.

The way from the root to the deepest shared position is a list of *points*: the end of
each node on it, and the position where the ids part. An entry below a point's node whose
lowest cut is not beyond the point can be restored there, and ``tree_reach`` names the
newest one. The deepest point with such an entry wins; mostly that is the first one
looked at. Otherwise all points of the way are read, and what lay deeper says why.

A point inside a media item is none: there the item's start counts. Up to where the ids
part, what is stored has the same media as they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import sqlalchemy as sa

from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.prefix import MediaItem, TokenIds, before_media, chain_digests
from kvstore.limits import BLOCK_TOKENS
from kvstore.store.nodes import Spot, ancestors, locate, nodes, reach
from kvstore.store.prepared import Prepared
from kvstore.store.schema import entries
from kvstore.store.symbols import ID_BYTES, Symbols

__all__ = ["Found", "Reason", "ReasonCode", "Wanted", "block_digests", "match"]

ReasonCode = Literal[
    "NO_ENTRY_OF_MODEL", "STATE_ONLY_AT", "WINDOW_NOT_STORED", "OTHER_SIGNATURE", "OTHER_METHOD", "DAMAGED",
    "INSIDE_MEDIA", "DIVERGED", "MEDIA_DIFFERS", "ENDED", "OTHER_MODEL", "OTHER_NAMESPACE",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that kept the match from being longer.

    Attributes:
        message: In words.
        token: The position it is about.
        expected: What was asked for there, if the reason has two sides.
        found: What is stored there.
        entry_id: The entry that it is about, or an example of such entries.
    """

    code: ReasonCode
    message: str
    token: int = 0
    expected: int | str | None = None
    found: int | str | None = None
    entry_id: Digest | None = None

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "code": self.code, "entry_id": self.entry_id, "expected": self.expected, "found": self.found,
            "message": self.message, "token": self.token,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a match; falsy on a miss.

    Attributes:
        entry_id: The entry to restore from, or None.
        token_count: How many tokens of it can be restored.
        common_tokens: How many tokens the ids share with anything stored for this model in this namespace,
            restorable or not.
        reasons: Why it is not longer, gravest first; empty where all that may be restored is.
    """

    entry_id: Digest | None
    token_count: int
    common_tokens: int
    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return self.entry_id is not None


class Wanted(NamedTuple):
    """What an entry must be: of this signature (None: any), made by no method or by this one."""

    signature: Digest | None
    method: str | None


class Offer(NamedTuple):
    """A row of ``tree_reach`` with its entry; field names are those of the query."""

    end: int
    cut: int
    entry_key: int
    entry_id: Digest
    token_count: int
    lowest_cut: int
    signature: Digest
    method: str | None
    damaged: int

    def misfit(self, wanted: Wanted) -> ReasonCode | None:
        """Why the entry is none for this caller, or None if it is one."""
        if wanted.signature is not None and self.signature != wanted.signature:
            return "OTHER_SIGNATURE"
        if self.method is not None and self.method != wanted.method:
            return "OTHER_METHOD"
        return "DAMAGED" if self.damaged else None


def match(
    conn: sa.Connection, model: Digest, namespace: str, ids: TokenIds, *, signature: Digest | None = None,
    method: str | None = None, media: Sequence[MediaItem] = (), limit: int | None = None,
) -> Found:  # fmt: skip
    """Find the entry that restores the most of ``ids``; among equals the newest.

    Args:
        conn: Open for reading; one snapshot for all statements.
        model: Model digest.
        namespace: Namespace.
        ids: Token ids of the prompt.
        signature: Signature that the entry must have, or None for any.
        method: Lossy method that is acceptable beside lossless entries.
        media: Media items of the prompt.
        limit: Most tokens to restore; by default all but the last, because a model needs one to evaluate.
    """
    symbols = Symbols(ids, media)
    spot = locate(conn, block_digests(model, namespace, ids, media), symbols)
    if spot is None:
        return Found(None, 0, 0, (Reason("NO_ENTRY_OF_MODEL", f"no entry of this model in namespace {namespace!r}"),))
    may = max(0, symbols.size - 1 if limit is None else min(limit, symbols.size))
    shared, wanted = min(may, spot.depth), Wanted(signature, method)
    most = before_media(shared, media)
    best, restorable, reasons = choose(_offers_at(conn, spot, most), most, wanted, media)
    if best is None:
        best, restorable, reasons = choose(_offers_above(conn, spot, most), most, wanted, media)
    if most < shared:
        reasons = (*reasons, Reason("INSIDE_MEDIA", f"a media item begins at token {most} and ends later", most))
    if spot.depth < may:
        reasons = (*reasons, _parting(conn, spot, symbols))
    return Found(None if best is None else best.entry_id, restorable, spot.depth, reasons)


def choose(
    offers: Iterable[Offer], most: int, wanted: Wanted, media: Sequence[MediaItem] = ()
) -> tuple[Offer | None, int, tuple[Reason, ...]]:
    """The decision, without a database.

    Args:
        offers: Of the nodes on the way, deepest node first, and newest entry first within a node.
        most: Position to which the ids agree and may be restored.
        wanted: What an entry must be.
        media: Media items of the prompt.

    Returns:
        The best offer, if there is one; how many tokens it restores; one reason of each sort for what lay deeper.
    """
    seen: dict[ReasonCode, tuple[int, Reason]] = {}
    best, reached = None, 0
    for offer in offers:
        point, misfit = before_media(min(offer.end, most), media), offer.misfit(wanted)
        # Nodes that end inside one media item share a point, so the newest may come later.
        if point < max(1, reached):
            break
        if misfit is None and offer.cut <= point:
            if best is None or offer.entry_key > best.entry_key:
                best, reached = offer, point
        elif misfit is None or offer.cut <= point:
            reason = _uncut(offer) if misfit is None else _unfit(offer, misfit, point, wanted)
            seen.setdefault(reason.code, (point, reason))
    deeper = [reason for point, reason in seen.values() if point > reached]
    return best, reached, tuple(sorted(deeper, key=lambda reason: _CODES.index(reason.code)))


def block_digests(model: Digest, namespace: str, ids: TokenIds, media: Sequence[MediaItem]) -> list[bytes]:
    """The chain digests of the root and of each full block, as :func:`kvstore.store.nodes.locate` takes them."""
    full = ids[: ids.size // BLOCK_TOKENS * BLOCK_TOKENS]
    return [digest for _, digest in chain_digests(model, namespace, full, media)]


def _offers_at(conn: sa.Connection, spot: Spot, most: int) -> list[Offer]:
    """Offers of the node that holds position ``most``; none where it is not among the steps."""
    node = next((step.node for step in spot.steps if step.start < most <= step.end), None)
    return [] if node is None else [Offer(*row) for row in _AT(conn, node=node)]


def _offers_above(conn: sa.Connection, spot: Spot, most: int) -> list[Offer]:
    """Offers of that node and of all above it: what parts from the ids only beyond ``most`` is in there too."""
    rows = [Offer(*row) for row in conn.execute(_ABOVE, {"node": spot.steps[-1].node})]
    holder = min((row.end for row in rows if row.end >= most), default=most)
    return [row for row in rows if row.end <= holder]


def _uncut(offer: Offer) -> Reason:
    if offer.lowest_cut == offer.token_count:
        return Reason(
            "STATE_ONLY_AT", f"state snapshot only at {offer.token_count}", offer.token_count, entry_id=offer.entry_id
        )
    return Reason(
        "WINDOW_NOT_STORED", f"window not stored before {offer.lowest_cut}", offer.lowest_cut, entry_id=offer.entry_id
    )


def _unfit(offer: Offer, code: ReasonCode, point: int, wanted: Wanted) -> Reason:
    if code == "OTHER_METHOD":
        message = f"an entry made by method {offer.method!r} reaches token {point}"
        return Reason(code, message, point, wanted.method, offer.method, offer.entry_id)
    if code == "OTHER_SIGNATURE":
        message = f"an entry with another cache signature reaches token {point}"
        return Reason(code, message, point, wanted.signature, offer.signature, offer.entry_id)
    return Reason(code, f"an entry that reaches token {point} lacks an object", point, entry_id=offer.entry_id)


def _parting(conn: sa.Connection, spot: Spot, symbols: Symbols) -> Reason:
    """What the store has where the ids part from it."""
    last, at = spot.steps[-1], spot.depth
    if at < last.end:
        first: bytes | None = last.ids[(at - last.start) * ID_BYTES :]
    else:
        first = conn.execute(_FIRST_CHILD, {"node": last.node}).scalar()
    if first is None:
        return Reason("ENDED", f"nothing is stored beyond token {at}", at)
    expected, found = symbols.token(at), int.from_bytes(first[:ID_BYTES], "big")
    if expected == found:
        return Reason("MEDIA_DIFFERS", f"the media at token {at} differ", at)
    return Reason("DIVERGED", f"diverged at token {at} (expected {expected}, found {found})", at, expected, found)


_CODES: Final[tuple[ReasonCode, ...]] = get_args(ReasonCode)
_OFFER: Final = (
    reach.c.cut, reach.c.entry_key, entries.c.entry_id, entries.c.token_count, entries.c.lowest_cut,
    entries.c.signature, entries.c.method, entries.c.damaged,
)  # fmt: skip
_JOINED: Final = reach.join(entries, entries.c.entry_key == reach.c.entry_key)
_AT: Final = Prepared(
    sa.select(nodes.c.end, *_OFFER)
    .select_from(_JOINED.join(nodes, nodes.c.node == reach.c.node))
    .where(reach.c.node == sa.bindparam("node"))
    .order_by(reach.c.entry_key.desc())
)
_UP: Final = ancestors()
_ABOVE: Final = (
    sa.select(_UP.c.end, *_OFFER)
    .select_from(_JOINED.join(_UP, _UP.c.node == reach.c.node))
    .order_by(_UP.c.end.desc(), reach.c.entry_key.desc())
)
_FIRST_CHILD: Final = (
    sa.select(nodes.c.head).where(nodes.c.parent == sa.bindparam("node")).order_by(nodes.c.head).limit(1)
)

"""Writing the tree: an entry goes in, comes out, or is filed anew.

Writers hold the index's write lock (``BEGIN IMMEDIATE``): node numbers are handed out as
one more than the largest.

*Newest* means put last: entry keys grow, and the largest key wins. Whoever rebuilds the
index adds entries in the order of their receipts.

Cost: a few statements, and rows in proportion to the depth of the entry. Nothing depends
on how many entries or siblings there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import sqlalchemy as sa

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.prefix import MediaItem, TokenIds, chain_digests
from kvstore.limits import BLOCK_TOKENS
from kvstore.store.nodes import BEYOND, Spot, Step, ancestors, classes, leaves, locate, nodes, reach, roots
from kvstore.store.prepared import Prepared
from kvstore.store.schema import DigestBlob, entries
from kvstore.store.symbols import ID_BYTES, Symbols, head, split_media

__all__ = ["Filed", "add_entry", "file_entry", "refile_entry", "remove_entry"]

_NOTHING: Final = b""


class Filed(NamedTuple):
    """What the tree must know of an entry's row; fields are named as its columns."""

    entry_key: int
    model_digest: Digest
    namespace: str
    lowest_cut: int
    signature: Digest
    method: str | None
    damaged: int = 0


def add_entry(conn: sa.Connection, *, entry_id: Digest, ids: TokenIds, media: Sequence[MediaItem] = ()) -> None:
    """Offer an entry to :func:`kvstore.store.match.match`; its row in ``entries`` is there already.

    Args:
        conn: In a transaction that holds the write lock.
        entry_id: The entry.
        ids: All of its token ids.
        media: The media items of its prefix.

    Raises:
        NotFoundError: NOT_FOUND, if ``entries`` has no such row.
    """
    if _leaf(conn, entry_id) is None:
        file_entry(conn, _entry(conn, entry_id), ids, media)


def file_entry(conn: sa.Connection, entry: Filed, ids: TokenIds, media: Sequence[MediaItem] = ()) -> None:
    """:func:`add_entry` for one that was not in the tree before, and whose row is known."""
    symbols = Symbols(ids, media)
    chain = list(chain_digests(entry.model_digest, entry.namespace, ids, media))
    blocks = [digest for end, digest in chain if end % BLOCK_TOKENS == 0]
    spot = locate(conn, blocks, symbols) or _plant(conn, entry, blocks[0])
    last = spot.steps[-1]
    node = last.node if spot.depth == last.end else _split(conn, last, spot.depth)
    node = _grow(conn, node, spot.depth, blocks, symbols)
    kind = _kind(conn, entry)
    _ADD_LEAF(conn, entry_key=entry.entry_key, node=node, kind=kind, lowest_cut=entry.lowest_cut)
    _offer(conn, node, kind, entry.lowest_cut, entry.entry_key)


def remove_entry(conn: sa.Connection, entry_id: Digest) -> None:
    """Take an entry out, and every node that leads to no other entry. Its row in ``entries`` is left alone.

    Does nothing where the tree does not hold the entry.
    """
    leaf = _leaf(conn, entry_id)
    if leaf is None:
        return
    conn.execute(leaves.delete().where(leaves.c.entry_key == leaf.entry_key))
    _withdraw(conn, leaf.node, leaf.kind, leaf.entry_key)
    _prune(conn, leaf.node)


def refile_entry(conn: sa.Connection, entry_id: Digest) -> None:
    """Read the entry's row again: call this after its ``damaged`` flag has changed."""
    leaf = _leaf(conn, entry_id)
    if leaf is None:
        return
    kind = _kind(conn, _entry(conn, entry_id))
    if kind == leaf.kind:
        return
    conn.execute(leaves.update().where(leaves.c.entry_key == leaf.entry_key).values(kind=kind))
    _withdraw(conn, leaf.node, leaf.kind, leaf.entry_key)
    _offer(conn, leaf.node, kind, leaf.lowest_cut, leaf.entry_key)


def _entry(conn: sa.Connection, entry_id: Digest) -> Filed:
    row = _FILED.first(conn, entry_id=entry_id)
    if row is None:
        raise fail("NOT_FOUND", f"entry {entry_id} has no row in the index")
    return Filed(*row)


def _leaf(conn: sa.Connection, entry_id: Digest) -> sa.Row[tuple[object, ...]] | None:
    return conn.execute(_LEAF, {"entry_id": entry_id}).first()


def _kind(conn: sa.Connection, entry: Filed) -> int:
    """The class of entries that are offered to the same callers as this one."""
    for kind, method, damaged in _CLASSES(conn, signature=entry.signature):
        if (method, damaged) == (entry.method, entry.damaged):
            return int(kind)
    wanted = {"signature": entry.signature, "method": entry.method, "damaged": entry.damaged}
    key = conn.execute(classes.insert(), wanted).inserted_primary_key
    return int(key[0]) if key is not None else 0


def _next_node(conn: sa.Connection) -> int:
    ((last,),) = _LAST_NODE(conn)
    return int(last) + 1


def _plant(conn: sa.Connection, entry: Filed, digest: bytes) -> Spot:
    """The root of a model in a namespace."""
    node = _next_node(conn)
    conn.execute(nodes.insert().values(node=node, head=_NOTHING, end=0, ids=_NOTHING, digest=digest))
    conn.execute(roots.insert().values(node=node, namespace=entry.namespace, model_digest=entry.model_digest))
    return Spot((Step(node, None, 0, 0, _NOTHING, None),), 0)


def _split(conn: sa.Connection, step: Step, at: int) -> int:
    """Cut a node in two at a position and return the upper part.

    The lower part keeps the node's number, so that neither children nor leaves move.
    """
    upper, cut = _next_node(conn), (at - step.start) * ID_BYTES
    above, below = split_media(step.media, at)
    conn.execute(
        nodes.update().where(nodes.c.node == step.node).values(
            parent=upper, head=head(step.ids[cut:], at, below), ids=step.ids[cut:], media=below
        )
    )  # fmt: skip
    conn.execute(nodes.insert().values(
        node=upper, parent=step.parent, head=head(step.ids, step.start, above), end=at, ids=step.ids[:cut], media=above,
    ))  # fmt: skip
    conn.execute(reach.update().where(reach.c.node == step.node).values(parent=upper))
    seen = sa.select(
        reach.c.kind, sa.case((reach.c.cut <= at, reach.c.cut), else_=BEYOND).label("cut"), reach.c.entry_key
    ).where(reach.c.node == step.node).subquery()  # fmt: skip
    rows = sa.select(
        sa.literal(upper), seen.c.kind, seen.c.cut, sa.literal(step.parent), sa.func.max(seen.c.entry_key)
    ).group_by(seen.c.kind, seen.c.cut)  # fmt: skip
    conn.execute(reach.insert().from_select(["node", "kind", "cut", "parent", "entry_key"], rows))
    return upper


def _grow(conn: sa.Connection, node: int, at: int, blocks: Sequence[bytes], symbols: Symbols) -> int:
    """New nodes below ``node`` for all positions from ``at`` on; the last one."""
    free = _next_node(conn)
    while at < symbols.size:
        end = min(symbols.size, (at // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        full = end % BLOCK_TOKENS == 0
        _ADD_NODE(
            conn, node=free, parent=node, head=symbols.head(at), end=end, ids=symbols.ids(at, end),
            media=symbols.media(at, end), digest=blocks[end // BLOCK_TOKENS] if full else None,
        )  # fmt: skip
        node, at, free = free, end, free + 1
    return node


def _offer(conn: sa.Connection, node: int, kind: int, lowest_cut: int, key: int) -> None:
    """Make the entry known at its node and at every node above."""
    _OFFER(conn, node=node, kind=kind, lowest_cut=lowest_cut, entry_key=key, beyond=BEYOND)


def _withdraw(conn: sa.Connection, node: int, kind: int, key: int) -> None:
    """Put the next newest entry into each row that names this one; from below, as parents look at children."""
    for row in conn.execute(_NAMED, {"node": node, "kind": kind, "key": key}).all():
        place = {"at": row.node, "of": kind, "to": row.cut}
        query = _ANY_BEYOND if row.cut == BEYOND else _NEXT
        found = conn.execute(query, {**place, "end": row.end} if row.cut == BEYOND else place).scalar()
        if found is None:
            conn.execute(_FORGET, place)
        else:
            conn.execute(_RENEW, {**place, "key": found})


def _prune(conn: sa.Connection, node: int) -> None:
    """Drop the dead end of the path to ``node``, and join what is left there."""
    path = conn.execute(_PATH, {"node": node}).all()
    alive = {row.node for row in conn.execute(_ALIVE, {"node": node})}
    dead = [row.node for row in path if row.node not in alive]
    if dead:
        conn.execute(nodes.delete().where(nodes.c.node == sa.bindparam("dead")), [{"dead": n} for n in dead])
        conn.execute(roots.delete().where(roots.c.node == dead[-1]))
    if alive:
        _join(conn, next(row.node for row in path if row.node in alive))


def _join(conn: sa.Connection, node: int) -> None:
    """Join a node with its only child, unless an entry or a block ends at it."""
    upper = conn.execute(sa.select(nodes).where(nodes.c.node == node)).one()
    if upper.end % BLOCK_TOKENS == 0 or conn.execute(sa.select(leaves.c.node).where(leaves.c.node == node)).first():
        return
    below = conn.execute(sa.select(nodes).where(nodes.c.parent == node).limit(2)).all()
    if len(below) != 1:
        return
    lower = below[0]
    # Before the update: a parent and a head belong to one node only.
    conn.execute(nodes.delete().where(nodes.c.node == node))
    media = (upper.media or b"") + (lower.media or b"") or None
    conn.execute(
        nodes.update().where(nodes.c.node == lower.node).values(
            parent=upper.parent, head=upper.head, ids=upper.ids + lower.ids, media=media
        )
    )  # fmt: skip
    conn.execute(reach.delete().where(reach.c.node == node))
    conn.execute(reach.update().where(reach.c.node == lower.node).values(parent=upper.parent))


_FILED: Final = Prepared(
    sa.select(*(entries.c[name] for name in Filed._fields)).where(entries.c.entry_id == sa.bindparam("entry_id"))
)
_LEAF: Final = (
    sa.select(leaves).join(entries, entries.c.entry_key == leaves.c.entry_key)
    .where(entries.c.entry_id == sa.bindparam("entry_id"))
)  # fmt: skip
_CLASSES: Final = Prepared(
    sa.select(classes.c.kind, classes.c.method, classes.c.damaged).where(
        classes.c.signature == sa.bindparam("signature", type_=DigestBlob)
    )
)
_LAST_NODE: Final = Prepared(sa.select(sa.func.coalesce(sa.func.max(nodes.c.node), 0)))
_ADD_NODE: Final = Prepared(nodes.insert())
_ADD_LEAF: Final = Prepared(leaves.insert())
# As text, because each database has its own construct for what both of them spell so.
_OFFER: Final = Prepared(sa.text(
    """
    INSERT INTO tree_reach (node, class, cut, parent, entry_key)
    WITH RECURSIVE up (node, parent, "end") AS (
        SELECT node, parent, "end" FROM tree_nodes WHERE node = :node
        UNION SELECT above.node, above.parent, above."end" FROM tree_nodes above JOIN up ON above.node = up.parent
    )
    SELECT node, :kind, CASE WHEN :lowest_cut <= "end" THEN :lowest_cut ELSE :beyond END, parent, :entry_key
    FROM up WHERE true
    ON CONFLICT (node, class, cut) DO UPDATE SET entry_key = excluded.entry_key
    WHERE tree_reach.entry_key < excluded.entry_key
    """
))  # fmt: skip
_UP: Final = ancestors()
_PATH: Final = sa.select(_UP.c.node, _UP.c.parent, _UP.c.end).order_by(_UP.c.end.desc())
_ALIVE: Final = sa.select(_UP.c.node).where(sa.exists().where(reach.c.node == _UP.c.node))
_NAMED: Final = (
    sa.select(reach.c.node, reach.c.cut, _UP.c.end)
    .where(
        reach.c.node == _UP.c.node, reach.c.kind == sa.bindparam("kind"), reach.c.entry_key == sa.bindparam("key")
    )
    .order_by(_UP.c.end.desc())
)
_ROW: Final = (
    reach.c.node == sa.bindparam("at"), reach.c.kind == sa.bindparam("of"), reach.c.cut == sa.bindparam("to")
)  # fmt: skip
_RENEW: Final = reach.update().where(*_ROW).values(entry_key=sa.bindparam("key"))
_FORGET: Final = reach.delete().where(*_ROW)
_BELOW: Final = (reach.c.parent == sa.bindparam("at"), reach.c.kind == sa.bindparam("of"))
_OWN: Final = sa.select(sa.func.max(leaves.c.entry_key).label("entry_key")).where(
    leaves.c.node == sa.bindparam("at"), leaves.c.kind == sa.bindparam("of"), leaves.c.lowest_cut == sa.bindparam("to")
)
_CHILDREN: Final = sa.select(sa.func.max(reach.c.entry_key).label("entry_key")).where(
    *_BELOW, reach.c.cut == sa.bindparam("to")
)
_BOTH: Final = sa.union_all(_OWN, _CHILDREN).subquery()
_NEXT: Final = sa.select(sa.func.max(_BOTH.c.entry_key))
_ANY_BEYOND: Final = (
    sa.select(reach.c.entry_key).where(*_BELOW, reach.c.cut > sa.bindparam("end")).order_by(reach.c.cut).limit(1)
)

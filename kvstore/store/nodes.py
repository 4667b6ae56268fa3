"""The radix tree over stored prefixes: its tables, and how a prefix is found in it.

A node holds the token ids between its parent's end and its own, at most 256 of them: an
edge is cut where stored prefixes part, and at every multiple of 256. So each id of each
distinct prefix is stored once, a node that ends at a multiple of 256 has a digest of the
prefix chain, and a child is told from its siblings by the first thing that it holds.

Finding the longest stored prefix takes two queries however large the tree is: one has
the chain digests of all full blocks and bisects for the deepest that is stored; the
other steps from there along first ids, at most 255 times and still inside one block.

A media item is part of the text: the place where it starts is the token id *and* a
fingerprint of the item. Equal ids with another image are another prefix.

What may be served at a node is kept in ``tree_reach``: for each class of entries
(signature, method, damaged or not) and each lowest cut, the newest entry at or below the
node. A node without such rows does not exist. Of a cut that lies beyond the node's end
it matters only that there is one, so all of those share one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from kvstore.errors import fail
from kvstore.limits import BLOCK_TOKENS, MAX_TOKENS
from kvstore.store.findings import REBUILD
from kvstore.store.prepared import Prepared
from kvstore.store.schema import METADATA, BigKey, DigestBlob
from kvstore.store.symbols import ID_BYTES, Symbols

__all__ = ["BEYOND", "Spot", "Step", "ancestors", "locate", "classes", "leaves", "nodes", "reach", "roots"]

BEYOND: Final = MAX_TOKENS + 1
"""Stands in ``reach.cut`` for every lowest cut beyond the node's end."""

_HAS_DIGEST: Final = sa.text("digest IS NOT NULL")

nodes: Final[sa.Table] = sa.Table(
    "tree_nodes", METADATA,
    sa.Column("node", BigKey, primary_key=True, autoincrement=False),
    # NULL for a root: the state after no token of one model in one namespace.
    sa.Column("parent", BigKey),
    # The first id, big-endian, followed by the fingerprint of the media item that starts there, if one does.
    sa.Column("head", sa.LargeBinary, nullable=False),
    sa.Column("end", BigKey, nullable=False),
    sa.Column("ids", sa.LargeBinary, nullable=False),
    # Start (32-bit big-endian) and fingerprint of each media item that starts inside the node.
    sa.Column("media", sa.LargeBinary),
    sa.Column("digest", sa.LargeBinary),
    sa.UniqueConstraint("parent", "head"),
    sa.Index("ix_tree_nodes_digest", "digest", unique=True, sqlite_where=_HAS_DIGEST),
    sqlite_strict=True,
)  # fmt: skip

roots: Final[sa.Table] = sa.Table(
    "tree_roots", METADATA,
    sa.Column("node", BigKey, primary_key=True, autoincrement=False),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("model_digest", DigestBlob, nullable=False),
    sa.UniqueConstraint("namespace", "model_digest"),
    sqlite_strict=True,
)  # fmt: skip

classes: Final[sa.Table] = sa.Table(
    "tree_classes", METADATA,
    sa.Column("class", BigKey, primary_key=True, key="kind"),
    sa.Column("signature", DigestBlob, nullable=False),
    sa.Column("method", sa.Text),
    sa.Column("damaged", sa.Integer, nullable=False),
    sa.Index(None, "signature"),
    sqlite_strict=True,
)  # fmt: skip

leaves: Final[sa.Table] = sa.Table(
    "tree_leaves", METADATA,
    # No cascade: an entry's row cannot go while the tree still offers it.
    sa.Column("entry_key", BigKey, sa.ForeignKey("entries.entry_key"), primary_key=True, autoincrement=False),
    sa.Column("node", BigKey, nullable=False),
    sa.Column("class", BigKey, nullable=False, key="kind"),
    sa.Column("lowest_cut", BigKey, nullable=False),
    sa.Index("ix_tree_leaves_place", "node", "kind", "lowest_cut", "entry_key"),
    sqlite_strict=True,
)  # fmt: skip

reach: Final[sa.Table] = sa.Table(
    "tree_reach", METADATA,
    sa.Column("node", BigKey, primary_key=True, autoincrement=False),
    sa.Column("class", BigKey, primary_key=True, autoincrement=False, key="kind"),
    sa.Column("cut", BigKey, primary_key=True, autoincrement=False),
    sa.Column("parent", BigKey),
    sa.Column("entry_key", BigKey, nullable=False),
    # The children of a node, newest first: what removing an entry needs to find the next one.
    sa.Index("ix_tree_reach_parent", "parent", "kind", "cut", "entry_key"),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A node on the way: it holds positions ``start`` … ``end``."""

    node: int
    parent: int | None
    start: int
    end: int
    ids: bytes
    media: bytes | None

    def __post_init__(self) -> None:
        """Refuse what no tree of ours holds: a file that somebody has changed must not pass as one.

        Raises:
            IntegrityError: STORE_CORRUPT.
        """
        size = self.end - self.start
        in_range = 0 <= self.start <= self.end <= MAX_TOKENS and size <= BLOCK_TOKENS
        if not in_range or len(self.ids) != size * ID_BYTES:
            raise fail(
                "STORE_CORRUPT", f"node {self.node} of the index's prefix tree",
                expected=f"at most {BLOCK_TOKENS} ids of {ID_BYTES} bytes each",
                found=f"{len(self.ids)} bytes that end at {self.end}", fix=REBUILD,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spot:
    """How far a prefix is known.

    Attributes:
        steps: The deepest node that ends at a full block, then the nodes inside the next block; never empty.
            All agree with the prefix to their end, except that the last may agree in part.
        depth: Positions in common with what is stored.
    """

    steps: tuple[Step, ...]
    depth: int


def locate(conn: sa.Connection, chain: Sequence[bytes], symbols: Symbols) -> Spot | None:
    """The deepest place that a prefix shares with what is stored.

    Args:
        conn: Open for reading.
        chain: Digests of the root and of each full block, in order.
        symbols: The prefix.

    Returns:
        The spot, or None where nothing of this model is stored in this namespace.

    Raises:
        IntegrityError: STORE_CORRUPT.
    """
    row = _DEEPEST.first(conn, chain=b"".join(chain), beyond=len(chain) + 1)
    if row is None:
        return None
    node, parent, depth, ids, media = row
    steps = [Step(node, parent, depth - len(ids) // ID_BYTES, depth, ids, media)]
    for step, common in _inside_block(conn, steps[0], symbols):
        steps.append(step)
        depth = step.start + common
    return Spot(tuple(steps), depth)


def _inside_block(conn: sa.Connection, last: Step, symbols: Symbols) -> Iterator[tuple[Step, int]]:
    """The nodes below ``last`` that agree with the prefix, each with how far it does."""
    node, at = last.node, last.end
    end = min(symbols.size, at + BLOCK_TOKENS)
    while at < end:
        first = symbols.head(at)
        mark = min(end, symbols.next_mark(at + 1))
        plain = len(first) == ID_BYTES
        rows = _WALK(conn, node=node, rest=symbols.ids(at, mark)) if plain else _CHILD(conn, node=node, head=first)
        for child, ids, media in rows:
            size = len(ids) // ID_BYTES
            step = Step(child, node, at, at + size, ids, media)
            common = symbols.common(at, ids, media)
            yield step, common
            node, at = child, at + common
            if common < size or not size:
                return
        # The walk stops at the next mark, where ids alone no longer tell children apart.
        if not rows or (plain and at < mark):
            return


_CHILD: Final = Prepared(
    sa.select(nodes.c.node, nodes.c.ids, nodes.c.media).where(
        nodes.c.parent == sa.bindparam("node"), nodes.c.head == sa.bindparam("head")
    )
)


# These two are text: they are read more easily so, and a first call need not wait for them to be compiled.
_DEEPEST: Final = Prepared(sa.text(
    """
    WITH RECURSIVE search (low, high, node) AS (
        SELECT 0, CAST(:beyond AS INTEGER), CAST(NULL AS BIGINT)
        UNION ALL
        SELECT CASE WHEN known.node IS NULL THEN low ELSE (low + high) / 2 END,
            CASE WHEN known.node IS NULL THEN (low + high) / 2 ELSE high END,
            coalesce(known.node, search.node)
        FROM search LEFT JOIN tree_nodes known
            ON known.digest = substr(:chain, ((low + high) / 2 - 1) * 32 + 1, 32) AND known.digest IS NOT NULL
        WHERE high - low > 1
    )
    SELECT deepest.node, deepest.parent, deepest."end", deepest.ids, deepest.media
    FROM search JOIN tree_nodes deepest ON deepest.node = search.node
    WHERE high - low = 1
    """
))  # fmt: skip
"""The node of the last digest in ``chain`` that is stored, by bisection.

Nodes of a stored prefix are there from the root on without a gap, so a digest is stored exactly
if all before it are: ``low`` counts digests that are, and number ``high`` is not.
"""
# Only "whole" rows lead on. Integers, because the two databases disagree on booleans.
_WALK: Final = Prepared(sa.text(
    """
    WITH RECURSIVE walk (node, used, whole) AS (
        SELECT CAST(:node AS BIGINT), 0, 1
        UNION
        SELECT child.node, used + length(child.ids),
            CASE WHEN substr(:rest, used + 1, length(child.ids)) = child.ids THEN 1 ELSE 0 END
        FROM walk JOIN tree_nodes child ON child.parent = walk.node AND child.head = substr(:rest, used + 1, 4)
        WHERE whole = 1
    )
    SELECT child.node, child.ids, child.media
    FROM walk JOIN tree_nodes child ON child.node = walk.node
    WHERE used > 0
    ORDER BY used
    """
))  # fmt: skip
"""Down from a node along the ids of ``rest``; the last row may agree in part."""


def ancestors() -> sa.CTE:
    """The node ``:node`` and all nodes above it, as columns ``node``, ``parent``, ``end``.

    A union without duplicates, so that rows which somebody has tied into a ring are walked once.
    """
    up = sa.select(nodes.c.node, nodes.c.parent, nodes.c.end).where(
        nodes.c.node == sa.bindparam("node", type_=BigKey)
    ).cte("up", recursive=True)  # fmt: skip
    return up.union(sa.select(nodes.c.node, nodes.c.parent, nodes.c.end).where(nodes.c.node == up.c.parent))

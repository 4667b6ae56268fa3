"""Is the prefix tree what the entries say? Wrong rows would send a match to the wrong entry, or to none.

An entry's own place is proved from its manifest: the nodes above its leaf spell out ids
whose chain ends in the prefix digest. What nodes offer is proved node by node: a row of
``tree_reach`` follows from the leaves of its node and from the rows of the children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from kvstore.format.digest import digest_bytes
from kvstore.format.manifest import Manifest
from kvstore.format.prefix import TokenIds, chain_digests
from kvstore.store.nodes import BEYOND, ancestors, classes, leaves, nodes, reach, roots
from kvstore.store.schema import entries
from kvstore.store.symbols import ID_BYTES, Symbols, head

__all__ = ["check_offers", "check_place"]


def check_place(connection: sa.Connection, manifest: Manifest) -> list[str]:
    """What is wrong with an entry's place in the tree; its row in ``entries`` is taken to be right.

    Args:
        connection: Open for reading.
        manifest: The entry's.
    """
    leaf = connection.execute(_LEAF, {"entry_id": manifest.entry_id}).first()
    if leaf is None:
        return ["the tree does not hold the entry"]
    wrong = []
    if (leaf.signature, leaf.method, leaf.damaged) != (leaf.own_signature, leaf.own_method, leaf.own_damaged):
        wrong.append("the tree offers the entry as one of another class")
    if leaf.lowest_cut != manifest.lowest_cut:
        wrong.append("the tree offers the entry from another token on")
    path = list(reversed(connection.execute(_PATH, {"node": leaf.node}).all()))
    if not _is_path(path, manifest):
        wrong.append("the tree holds the entry under other token ids")
    return wrong


def _is_path(path: Sequence[Any], manifest: Manifest) -> bool:
    """Whether these nodes, root first, lead to the manifest's prefix and to nothing else."""
    if not path or (path[0].model_digest, path[0].namespace) != (manifest.model.digest, manifest.namespace):
        return False
    data = b"".join(row.ids for row in path)
    if len(data) != manifest.token_count * ID_BYTES:
        return False
    ids: TokenIds = np.frombuffer(data, ">u4").astype("<u4")
    chain = dict(chain_digests(manifest.model.digest, manifest.namespace, ids, manifest.prefix.media))
    if chain[manifest.token_count] != digest_bytes(manifest.prefix.digest):
        return False
    symbols, at = Symbols(ids, manifest.prefix.media), 0
    for row in path:
        end = at + len(row.ids) // ID_BYTES
        if row.end != end or row.media != symbols.media(at, end) or row.head != head(row.ids, at, row.media):
            return False
        if row.digest is not None and row.digest != chain.get(end):
            return False
        at = end
    return True


def check_offers(connection: sa.Connection) -> list[str]:
    """What is wrong with the rows that say which entries can be had at a node.

    Args:
        connection: Open for reading; one snapshot for all statements.
    """
    wrong = []
    for query, message in (
        (sa.except_(_DUE, _THERE), "a node of the prefix tree does not offer an entry that it should"),
        (sa.except_(_THERE, _DUE), "a node of the prefix tree offers an entry that it should not"),
        (_STRAY, "a row of the prefix tree names another parent than its node does"),
        (_IDLE, "a node of the prefix tree leads to no entry"),
    ):
        if connection.execute(query.limit(1)).first() is not None:
            wrong.append(message)
    return wrong


_LEAF: Final = (
    sa.select(
        leaves.c.node, leaves.c.lowest_cut, classes.c.signature, classes.c.method, classes.c.damaged,
        entries.c.signature.label("own_signature"), entries.c.method.label("own_method"),
        entries.c.damaged.label("own_damaged"),
    )
    .select_from(
        leaves.join(entries, entries.c.entry_key == leaves.c.entry_key).join(classes, classes.c.kind == leaves.c.kind)
    )
    .where(entries.c.entry_id == sa.bindparam("entry_id"))
)  # fmt: skip
_UP: Final = ancestors()
_PATH: Final = (
    sa.select(
        nodes.c.ids, nodes.c.end, nodes.c.head, nodes.c.media, nodes.c.digest, roots.c.model_digest, roots.c.namespace
    )
    .select_from(_UP.join(nodes, nodes.c.node == _UP.c.node).outerjoin(roots, roots.c.node == _UP.c.node))
    .order_by(nodes.c.end.desc())
)
# A row for a cut beyond the node's end may name any of the entries that it stands for.
_GIVEN: Final = sa.union_all(
    sa.select(leaves.c.node, leaves.c.kind, leaves.c.lowest_cut.label("cut"), leaves.c.entry_key),
    sa.select(reach.c.parent, reach.c.kind, reach.c.cut, reach.c.entry_key).where(reach.c.parent.is_not(None)),
).subquery()
_CUT: Final = sa.case((_GIVEN.c.cut <= nodes.c.end, _GIVEN.c.cut), else_=BEYOND)
_NEWEST: Final = sa.case((_CUT == BEYOND, 0), else_=sa.func.max(_GIVEN.c.entry_key))
_DUE: Final = (
    sa.select(_GIVEN.c.node, _GIVEN.c.kind, _CUT, _NEWEST)
    .select_from(_GIVEN.outerjoin(nodes, nodes.c.node == _GIVEN.c.node))
    .group_by(_GIVEN.c.node, _GIVEN.c.kind, _CUT)
)
_THERE: Final = sa.select(
    reach.c.node, reach.c.kind, reach.c.cut, sa.case((reach.c.cut == BEYOND, 0), else_=reach.c.entry_key)
)
_STRAY: Final = (
    sa.select(reach.c.node)
    .select_from(reach.outerjoin(nodes, nodes.c.node == reach.c.node))
    .where(sa.or_(nodes.c.node.is_(None), nodes.c.parent.is_distinct_from(reach.c.parent)))
)
_IDLE: Final = sa.select(nodes.c.node).where(~sa.exists().where(reach.c.node == nodes.c.node))

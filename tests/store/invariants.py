"""What must hold of the tree's tables after any sequence of writes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy as sa

from kvstore.format.prefix import as_token_ids, chain_digests
from kvstore.limits import BLOCK_TOKENS
from kvstore.store import nodes as t
from kvstore.store.symbols import Symbols, head
from tests.store.brute import Entry


def check_tree(conn: sa.Connection, stored: list[Entry]) -> None:
    """Prove shape, spans, digests, and that ``tree_reach`` says exactly what lies below each node."""
    nodes = {row.node: row for row in conn.execute(sa.select(t.nodes))}
    leaves = {row.entry_key: row for row in conn.execute(sa.select(t.leaves))}
    assert leaves.keys() == {entry.key for entry in stored}
    roots = {row.node: (row.model_digest, row.namespace) for row in conn.execute(sa.select(t.roots))}
    assert sorted(roots.values()) == sorted({(entry.model, entry.namespace) for entry in stored})
    assert {n for n, row in nodes.items() if row.parent is None} == roots.keys()
    _check_shape(nodes, {leaf.node for leaf in leaves.values()})
    want: dict[tuple[int, int, int], set[int]] = {}
    for entry in stored:
        path = _check_path(nodes, roots, entry, leaves[entry.key].node)
        for node in path:
            cut = entry.lowest_cut if entry.lowest_cut <= node.end else t.BEYOND
            want.setdefault((node.node, leaves[entry.key].kind, cut), set()).add(entry.key)
    rows = {(row.node, row.kind, row.cut): row for row in conn.execute(sa.select(t.reach))}
    assert rows.keys() == want.keys()
    assert {key[0] for key in rows} == nodes.keys()
    for key, row in rows.items():
        assert row.parent == nodes[row.node].parent
        assert row.entry_key in want[key] if row.cut == t.BEYOND else row.entry_key == max(want[key])


def _check_shape(nodes: dict[int, Any], leaf_nodes: set[int]) -> None:
    children = Counter(row.parent for row in nodes.values())
    for row in nodes.values():
        if row.parent is None:
            assert (row.ids, row.head, row.media, row.end) == (b"", b"", None, 0)
            continue
        start, size = nodes[row.parent].end, len(row.ids) // 4
        assert row.end == start + size > start
        assert start // BLOCK_TOKENS == (row.end - 1) // BLOCK_TOKENS
        assert row.head == head(row.ids, start, row.media)
        assert (row.digest is not None) == (row.end % BLOCK_TOKENS == 0)
        # Nothing is cut without need.
        assert row.end % BLOCK_TOKENS == 0 or row.node in leaf_nodes or children[row.node] > 1


def _check_path(nodes: dict[int, Any], roots: dict[int, Any], entry: Entry, leaf: int) -> list[Any]:
    path = [nodes[leaf]]
    while path[-1].parent is not None:
        path.append(nodes[path[-1].parent])
    assert roots[path[-1].node] == (entry.model, entry.namespace)
    ids = as_token_ids(entry.ids)
    symbols = Symbols(ids, entry.media)
    assert b"".join(row.ids for row in reversed(path)) == symbols.data
    assert b"".join(row.media or b"" for row in reversed(path)) == (symbols.media(0, symbols.size) or b"")
    digests = dict(chain_digests(entry.model, entry.namespace, ids, entry.media))
    for row in path:
        assert row.digest is None or row.digest == digests[row.end]
    return path

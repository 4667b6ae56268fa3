"""Match among 10,000 and 1,000,000 nodes: time, ratio, size of the index, opening, chain hashing.

The store is synthetic but made by the code that makes real ones. Each entry has 8,192
tokens: half of them follow a common system prompt, half branch off an earlier entry at a
random token. One in five holds recurrent state and so can be restored at its end alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import sqlalchemy as sa

from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.prefix import TokenIds, chain_digests
from kvstore.store import nodes as tables
from kvstore.store.entry_store import EntryStore
from kvstore.store.index import Index
from kvstore.store.match import match
from kvstore.store.schema import entries
from kvstore.store.tree import add_entry, remove_entry

__all__ = ["run"]

SIZES: Final = (10_000, 1_000_000)
TOKENS: Final = 8192
SYSTEM_TOKENS: Final = 700
VOCABULARY: Final = 151_936
QUERIES: Final = 400
BATCH: Final = 250
MODEL: Final = sha256_digest(b"bench model")
FULL, HYBRID = sha256_digest(b"full attention"), sha256_digest(b"recurrent state")


QUESTIONS: Final = (
    ("match_ms", None, FULL), ("match_repeat_ms", TOKENS, FULL), ("match_state_only_ms", None, HYBRID),
    ("match_miss_ms", 0, FULL),
)  # fmt: skip
"""Name of the figure, tokens in common (None: any number), signature."""


class Writer:
    """Adds entries, and keeps some of their token ids to ask for."""

    def __init__(self, index: Index) -> None:
        """Start with an empty index."""
        self.random = np.random.default_rng(4)
        self.nodes = self.entries = 0
        self._index = index
        self._system = self._text(SYSTEM_TOKENS)
        self._recent: deque[TokenIds] = deque(maxlen=256)
        self.sample: list[TokenIds] = []

    def grow(self, size: int) -> float:
        """Add entries until there are ``size`` nodes; seconds an entry."""
        began = time.perf_counter()
        while self.nodes < size:
            # What is measured is the tree; that every batch survives a power cut would only take time.
            with self._index.write(durable=False) as conn:
                for _ in range(min(BATCH, 1 + (size - self.nodes) // 40)):
                    self._add(conn)
                self.nodes = conn.execute(sa.select(sa.func.max(tables.nodes.c.node))).scalar_one()
        return (time.perf_counter() - began) / self.entries

    def _text(self, count: int) -> TokenIds:
        return self.random.integers(0, VOCABULARY, count, dtype=np.uint32)

    def _add(self, conn: sa.Connection) -> None:
        base = self._system
        if self._recent and self.random.random() < 0.5:
            parent = self._recent[int(self.random.integers(len(self._recent)))]
            base = parent[: int(self.random.integers(SYSTEM_TOKENS, TOKENS))]
        ids = np.concatenate([base, self._text(TOKENS - base.size)])
        hybrid = self.random.random() < 0.2
        self.entries += 1
        entry_id = sha256_digest(str(self.entries).encode())
        conn.execute(entries.insert().values(
            entry_id=entry_id, model_digest=MODEL, namespace="default", token_count=TOKENS,
            lowest_cut=TOKENS if hybrid else 0, signature=HYBRID if hybrid else FULL, prefix_digest=entry_id,
            raw_bytes=0, created_at=self.entries, accessed_at=0,
        ))  # fmt: skip
        add_entry(conn, entry_id=entry_id, ids=ids)
        self._recent.append(ids)
        slot = self.entries if self.entries <= QUERIES else int(self.random.integers(1, self.entries + 1))
        if slot <= QUERIES:
            self.sample[slot - 1 : slot] = [ids]

    def prompt(self, keep: int | None) -> TokenIds:
        """A prompt that shares ``keep`` tokens with a stored entry, or any number of them."""
        ids = self.sample[int(self.random.integers(len(self.sample)))]
        kept = int(self.random.integers(SYSTEM_TOKENS, TOKENS)) if keep is None else keep
        return np.concatenate([ids[:kept], self._text(TOKENS - kept)])


def run(*, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Build and measure; every figure with its unit in its name."""
    with tempfile.TemporaryDirectory() as folder:
        stores = []
        for size in sizes:
            root = Path(folder) / str(size)
            with EntryStore.open(root):
                path = root / "index.sqlite"
            index = Index(path)
            writer = Writer(index)
            add_ms = writer.grow(size) * 1e3
            # The last connection to close folds the write-ahead log into the file, which is then measured whole.
            index.close()
            stores.append((index, writer, {"add_entry_ms": add_ms, **_size(path)}))
        for name, keep, signature in QUESTIONS:
            _match(stores, name, keep, signature)
        for index, _, figures in stores:
            figures["remove_entry_ms"] = _remove(index)
            index.close()
        rows = [figures for _, _, figures in stores]
        ratios = {name: rows[-1][name] / rows[0][name] for name, _, _ in QUESTIONS}
        return {
            "tokens": TOKENS, "sizes": rows, "most_to_fewest": ratios,
            "chain_ns_per_token": _chain(stores[0][1].prompt(None)),
        }  # fmt: skip


def _size(path: Path) -> dict[str, Any]:
    """Bytes, and the time to open the store and ask it a first question."""
    size, opened = path.stat().st_size, statistics.median(_open(path.parent) for _ in range(20))
    index = Index(path)
    with index.read() as conn:
        ids = sa.func.sum(sa.func.length(tables.nodes.c.ids))
        nodes, token_bytes = conn.execute(sa.select(sa.func.count(), ids).select_from(tables.nodes)).one()
        held = conn.execute(sa.select(sa.func.count()).select_from(entries)).scalar_one()
    index.close()
    return {
        "nodes": nodes, "entries": held, "index_bytes": size, "token_id_bytes": token_bytes,
        "bytes_per_node_beyond_ids": (size - token_bytes) / nodes, "open_ms": opened,
    }  # fmt: skip


def _open(root: Path) -> float:
    """Open the store and match a prompt of one token: the whole of what a process pays before its first answer."""
    ids = np.zeros(1, np.uint32)
    began = time.perf_counter()
    with EntryStore.open(root, create=False) as store:
        store.match(MODEL, "default", ids)
        elapsed = time.perf_counter() - began
    return elapsed * 1e3


def _match(stores: list[Measured], name: str, keep: int | None, signature: Digest) -> None:
    """Median over prompts that differ, chain hashing included; in turns, so that all meet the same machine."""
    times: list[list[float]] = [[] for _ in stores]
    with ExitStack() as stack:
        conns = [stack.enter_context(index.read()) for index, _, _ in stores]
        for _ in range(QUERIES):
            for at, (_, writer, _) in enumerate(stores):
                ids = writer.prompt(keep)
                began = time.perf_counter()
                found = match(conns[at], MODEL, "default", ids, signature=signature)
                times[at].append(time.perf_counter() - began)
                if found.token_count > found.common_tokens:
                    raise SystemExit("a match restored more than there is in common")
    for (_, _, figures), taken in zip(stores, times, strict=True):
        figures[name] = statistics.median(taken) * 1e3


def _remove(index: Index) -> float:
    """Remove entries and take it back."""
    times = []
    with index.read() as conn:
        newest = sa.select(entries.c.entry_id).order_by(entries.c.entry_key.desc()).limit(50)
        ids: list[Digest] = list(conn.execute(newest).scalars())
    try:
        with index.write() as conn:
            for entry_id in ids:
                began = time.perf_counter()
                remove_entry(conn, entry_id)
                times.append(time.perf_counter() - began)
            raise _TakeBackError
    except _TakeBackError:
        return statistics.median(times) * 1e3


Measured = tuple[Index, Writer, dict[str, Any]]


class _TakeBackError(Exception):
    """Rolls a transaction back."""


def _chain(ids: TokenIds) -> float:
    times = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in chain_digests(MODEL, "default", ids):
            pass
        times.append(time.perf_counter() - began)
    return statistics.median(times) / ids.size * 1e9


def main() -> None:
    """Print a table, or with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of nodes, ascending")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    result = run(sizes=tuple(options.sizes))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for row in result["sizes"]:
        print("  ".join(f"{name} {value:,.3f}" if isinstance(value, float) else f"{name} {value:,}"
                        for name, value in row.items()))  # fmt: skip
    print("most nodes / fewest:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in result["most_to_fewest"].items()))
    print(f"chain hashing: {result['chain_ns_per_token']:.1f} ns a token")


if __name__ == "__main__":
    main()

"""Any sequence of operations and accidents, against a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.format.digest import Digest
from kvstore.store.entry_store import EntryStore
from tests.builders import MadeEntry, make_entry
from tests.store.kit import code_of, flip, put, read_back

ENTRIES = [
    make_entry(seed, tokens, layers, namespace=namespace)
    for seed, layers, namespace in ((1, 1, "default"), (2, 2, "default"), (1, 1, "other"))
    for tokens in (5, 256, 300, 520)
]
some_entry = st.sampled_from(ENTRIES)


class Machine(RuleBasedStateMachine):
    """The store and what it should hold."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.store = EntryStore.open(self.root)
        self.entries: dict[Digest, MadeEntry] = {}
        self.names: dict[str, Digest] = {}
        self.lost: set[tuple[str, Digest]] = set()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)

    def whole(self, made: MadeEntry) -> bool:
        return not any((made.manifest.namespace, ref.digest) in self.lost for ref in made.manifest.payloads())

    @rule(made=some_entry, codec=st.sampled_from(["small", "fast"]))
    def put(self, made: MadeEntry, codec: Any) -> None:
        new = made.entry_id not in self.entries
        whole = self.whole(made)
        written = put(self.store, made, codec=codec)
        assert written.created == new
        if not new and whole:
            assert written.objects_written == 0
        self.entries[made.entry_id] = made
        for ref in made.manifest.payloads():
            self.lost.discard((made.manifest.namespace, ref.digest))

    @rule(made=some_entry)
    def remove(self, made: MadeEntry) -> None:
        if made.entry_id in self.entries:
            self.store.remove([made.entry_id])
            del self.entries[made.entry_id]
            self.names = {name: entry_id for name, entry_id in self.names.items() if entry_id != made.entry_id}
            kept = {
                (entry.manifest.namespace, ref.digest)
                for entry in self.entries.values() for ref in entry.manifest.payloads()
            }  # fmt: skip
            self.lost &= kept
        else:
            self.refused("NOT_FOUND", lambda: self.store.remove([made.entry_id]))

    @rule(made=some_entry, name=st.sampled_from(["a", "b"]))
    def label(self, made: MadeEntry, name: str) -> None:
        if made.entry_id in self.entries:
            self.store.set_label(name, made.entry_id)
            self.names[name] = made.entry_id
            assert self.store.resolve(name) == made.entry_id
        else:
            self.refused("NOT_FOUND", lambda: self.store.set_label(name, made.entry_id))

    @rule(made=some_entry)
    def read(self, made: MadeEntry) -> None:
        if made.entry_id not in self.entries:
            self.refused("NOT_FOUND", lambda: read_back(self.store, made))
        elif self.whole(made):
            read_back(self.store, made)
        else:
            codes = ("OBJECT_MISSING", "STORED_DIGEST_MISMATCH", "QUARANTINED")
            self.refused(codes, lambda: read_back(self.store, made))

    @rule(made=some_entry, number=st.integers(0, 5), how=st.sampled_from(["flip", "lose"]))
    def harm(self, made: MadeEntry, number: int, how: str) -> None:
        refs = made.manifest.payloads()
        ref = refs[number % len(refs)]
        if made.entry_id not in self.entries or (made.manifest.namespace, ref.digest) in self.lost:
            return
        name = ref.digest.removeprefix("sha256:")
        with self.store._opened.index.read() as connection:
            stored = connection.exec_driver_sql(
                "SELECT stored FROM objects WHERE namespace = ? AND payload = ?",
                (made.manifest.namespace, bytes.fromhex(name)),
            ).scalar()
        path = self.root / "objects" / name[:2] / f"{name}.{bytes(stored or b'').hex()}.kvo"
        if how == "flip":
            flip(path)
        else:
            path.unlink()
        self.lost.add((made.manifest.namespace, ref.digest))
        if self.store.verify([made.entry_id]).ok:
            raise AssertionError("the check saw nothing")

    @rule(made=some_entry, extra=st.integers(0, 3), cut=st.integers(0, 600))
    def match(self, made: MadeEntry, extra: int, cut: int) -> None:
        ids = [*made.token_ids.tolist()[: cut or None], *range(extra)]
        model, namespace = made.manifest.model.digest, made.manifest.namespace
        found = self.store.match(model, namespace, ids)
        best = max(
            (self.restorable(entry, ids) for entry in self.entries.values()
             if entry.manifest.namespace == namespace and self.whole(entry)),
            default=0,
        )  # fmt: skip
        assert found.token_count == best
        assert (found.entry_id is not None) == (best > 0)
        if found.entry_id is not None:
            assert self.restorable(self.entries[found.entry_id], ids) == best

    @staticmethod
    def restorable(entry: MadeEntry, ids: list[int]) -> int:
        mine = entry.token_ids.tolist()
        common = next((n for n, (a, b) in enumerate(zip(mine, ids, strict=False)) if a != b), min(len(mine), len(ids)))
        common = min(common, len(ids) - 1)
        return common if common >= entry.manifest.lowest_cut else 0

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = EntryStore.open(self.root)

    @rule()
    def lose_the_index(self) -> None:
        """Labels go, and so do entries that had lost an object."""
        self.store.close()
        for path in self.root.glob("index.sqlite*"):
            path.unlink()
        for namespace, digest in list(self.lost):
            name = digest.removeprefix("sha256:")
            kept = [p for p in (self.root / "objects" / name[:2]).glob(f"{name}.*") if self.belongs(p, namespace)]
            for path in kept:
                path.unlink()
        self.entries = {entry_id: made for entry_id, made in self.entries.items() if self.whole(made)}
        self.names.clear()
        for path in (self.root / "manifests").rglob("*.json"):
            if Digest(f"sha256:{path.stem}") not in self.entries:
                path.unlink()
        self.lost.clear()
        self.store = EntryStore.open(self.root)

    @staticmethod
    def belongs(path: Path, namespace: str) -> bool:
        return f'"namespace":"{namespace}"'.encode() in path.read_bytes()

    @rule()
    def delete_everything(self) -> None:
        shutil.rmtree(self.root)
        assert self.store.entries() == []
        self.entries.clear()
        self.names.clear()
        self.lost.clear()

    @invariant()
    def the_index_agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {info.entry_id for info in self.store.entries()} == self.entries.keys()
        assert self.store.labels() == self.names
        report = self.store.verify()
        assert report.ok == all(self.whole(made) for made in self.entries.values()), report.to_json()

    @staticmethod
    def refused(codes: str | tuple[str, ...], call: Any) -> None:
        assert code_of(call) in codes


TestStore = Machine.TestCase
TestStore.settings = settings(settings.get_profile("repeatable"), max_examples=12, stateful_step_count=25)

"""An index that somebody has changed: typed errors, never a wrong cache, and a new index mends it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.store.entry_store import EntryStore
from kvstore.store.rebuild import rebuild_index
from tests.builders import MadeEntry, make_entry
from tests.store.kit import code_of, put, read_back

MADE = make_entry(1, 300), make_entry(2, 300)
NEW = make_entry(3, 300)
VALUES = {
    "INTEGER": ("-1", "0", "1", "4611686018427387904", "-9223372036854775808", "NULL"),
    "TEXT": ("''", "'zz'", "char(0)", "'sha256:zz'", f"'{'[' * 3000}'", "CAST(x'ff' AS TEXT)", "NULL"),
    "BLOB": ("x''", "x'00'", "x'0102030405'", "zeroblob(32)", "zeroblob(100000)", "NULL"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "s"
    with EntryStore.open(root) as store:
        for made in MADE:
            put(store, made)
        store.set_label("x", MADE[0].entry_id)
        store.annotate(MADE[0].entry_id, {"n": 1})
    return root


def columns(index: Path) -> list[tuple[str, str, str]]:
    with closing(sqlite3.connect(index)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite%'")
        return [
            (table, row[1], row[2]) for (table,) in tables.fetchall()
            for row in connection.execute(f"PRAGMA table_info({table})")
        ]  # fmt: skip


def find(store: EntryStore, made: MadeEntry) -> object:
    return store.match(made.manifest.model.digest, made.manifest.namespace, made.token_ids).entry_id


def calls(store: EntryStore) -> Iterator[Callable[[], object]]:
    first, second = MADE
    yield store.entries
    yield store.labels
    for made in MADE:
        yield lambda made=made: store.info(made.entry_id)  # type: ignore[misc]
        yield lambda made=made: store.receipts(made.entry_id)  # type: ignore[misc]
        yield lambda made=made: find(store, made)  # type: ignore[misc]
    yield lambda: read_back(store, first)
    yield lambda: read_back(store, second, "always")
    yield lambda: put(store, NEW)
    yield lambda: put(store, first)
    yield lambda: store.annotate(first.entry_id, {"z": 2})
    yield store.verify


def changed(sound: Path, root: Path, statement: str) -> bool:
    """A copy of the store with its index changed; False where SQLite itself does not take the change."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(sound, root)
    with closing(sqlite3.connect(root / "index.sqlite")) as connection:
        try:
            connection.execute(statement)
        except sqlite3.Error:
            return False
        connection.commit()
    return True


def test_every_column_of_every_table(sound: Path, tmp_path: Path) -> None:
    """Whatever a call gives, it gives no error but ours; read_back proves each payload to the bit."""
    tried = 0
    for table, column, kind in columns(sound / "index.sqlite"):
        for value in VALUES[kind]:
            if not changed(sound, tmp_path / "s", f"UPDATE OR REPLACE {table} SET {column} = {value}"):
                continue
            tried += 1
            with suppress(KVStoreError), EntryStore.open(tmp_path / "s") as store:
                for call in calls(store):
                    with suppress(KVStoreError):
                        call()
            rebuild_index(tmp_path / "s")
            with EntryStore.open(tmp_path / "s") as store:
                for made in MADE:
                    read_back(store, made)
    assert tried > 150


@pytest.mark.parametrize("change", ["ids = x'0102030405'", "ids = zeroblob(4000)", '"end" = -5', '"end" = 1 << 60'])
def test_a_node_that_no_tree_holds(sound: Path, tmp_path: Path, change: str) -> None:
    made = MADE[0]
    assert changed(sound, tmp_path / "s", f"UPDATE tree_nodes SET {change} WHERE parent IS NOT NULL")
    with EntryStore.open(tmp_path / "s") as store:
        assert code_of(find, store, made) == "STORE_CORRUPT"
    rebuild_index(tmp_path / "s")
    with EntryStore.open(tmp_path / "s") as store:
        assert find(store, made) == made.entry_id


@pytest.mark.parametrize("value", ["NULL", "7", "'x'", "x'ff'", "1.5", "CAST(x'ff' AS TEXT)"])
@pytest.mark.parametrize("table", ["entries", "labels", "annotations", "leases", "doomed_files"])
def test_tables_with_columns_of_any_type(sound: Path, tmp_path: Path, table: str, value: str) -> None:
    """One row of what the old index alone knew is of other types: the rows after it are handed on all the same."""
    root = tmp_path / "s"
    shutil.copytree(sound, root)
    with EntryStore.open(root) as store:
        store.set_label("y", MADE[1].entry_id)
        store.annotate(MADE[1].entry_id, {"n": 2})
    names = [name for where, name, _ in columns(root / "index.sqlite") if where == table]
    for name in names:
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        shutil.copytree(root, tmp_path / "t")
        with closing(sqlite3.connect(tmp_path / "t" / "index.sqlite")) as connection:
            connection.execute("PRAGMA legacy_alter_table=ON")
            connection.execute(f"CREATE TABLE other AS SELECT * FROM {table}")
            connection.execute(f"DROP TABLE {table}")
            connection.execute(f"CREATE TABLE {table} ({', '.join(names)})")
            connection.execute(f"INSERT INTO {table} SELECT * FROM other")
            row = ", ".join(value if each == name else each for each in names)
            connection.execute(f"INSERT INTO {table} SELECT {row} FROM other")
            connection.execute(f"UPDATE {table} SET {name} = {value} WHERE rowid = 1")
            connection.commit()
        for read_only in (False, True):
            assert code_of(EntryStore.open, tmp_path / "t", read_only=read_only) == "STORE_CORRUPT"
        rebuild_index(tmp_path / "t")
        with EntryStore.open(tmp_path / "t") as store:
            for made in MADE:
                read_back(store, made)
            if table not in ("entries", "labels"):
                assert set(store.labels()) == {"x", "y"}

"""Prepared statements do what SQLAlchemy itself would do with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.store.entry_store import EntryStore
from kvstore.store.prepared import Prepared
from kvstore.store.schema import LIVE, objects, receipts
from tests.builders import make_entry
from tests.store.kit import put

ADD = Prepared(receipts.insert())
ROW = {"digest": sha256_digest(b"a"), "subject": sha256_digest(b"b"), "type": "load", "made_at": "then"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EntryStore]:
    with EntryStore.open(tmp_path / "store") as opened:
        yield opened


def test_values_and_rows_have_the_types_of_their_columns(store: EntryStore) -> None:
    put(store, make_entry(1, 20))
    live = sa.select(objects).where(objects.c.state == LIVE, objects.c.raw_size >= sa.bindparam("size"))
    prepared = Prepared(live)
    with store._opened.index.read() as connection:
        expected = [tuple(row) for row in connection.execute(live, {"size": 1})]
        assert expected
        assert sorted(prepared(connection, size=1)) == sorted(expected)
        assert prepared.first(connection, size=1) in expected
        assert prepared(connection, size=2**40) == []
        assert prepared.first(connection, size=2**40) is None


def test_rows_are_written_in_the_connection_s_transaction(store: EntryStore) -> None:
    add = Prepared(receipts.insert().returning(receipts.c.digest))
    find = Prepared(sa.select(receipts.c.type).where(receipts.c.subject == sa.bindparam("subject")))
    with store._opened.index.write() as connection:
        assert add(connection, **ROW) == [(ROW["digest"],)]
        assert find(connection, subject=ROW["subject"]) == [("load",)]
        connection.rollback()
    with store._opened.index.write() as connection:
        assert find(connection, subject=ROW["subject"]) == []
        assert ADD(connection, **ROW) == []
    with store._opened.index.read() as connection:
        assert connection.execute(sa.select(receipts)).mappings().one() == ROW


def test_a_read_sees_one_snapshot(store: EntryStore) -> None:
    count = Prepared(sa.select(sa.func.count()).select_from(receipts))
    with store._opened.index.read() as connection:
        assert count(connection) == [(0,)]
        with EntryStore.open(store.root) as other, other._opened.index.write() as writing:
            ADD(writing, **ROW)
        assert count(connection) == [(0,)]
    with store._opened.index.read() as connection:
        assert count(connection) == [(1,)]


def test_an_error_of_the_database_is_a_typed_one(store: EntryStore) -> None:
    def twice() -> None:
        with store._opened.index.write() as connection:
            ADD(connection, **ROW)
            ADD(connection, **ROW)

    with pytest.raises(KVStoreError) as error:
        twice()
    assert error.value.code == "STORE_IO"

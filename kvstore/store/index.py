"""The index's engine: transactions, and database errors as typed ones.

:class:`Index` is one SQLite database in WAL mode. Its write lock is the only lock of its
rows: the kernel drops it with the process, so a killed writer blocks nobody. Every
unit that writes starts with ``BEGIN IMMEDIATE``, because a deferred transaction that
reads and then writes fails at once when another has committed in between, whatever the
timeout. Commits are ``synchronous=FULL``: deleting files is safe only after the commit
that doomed them is durable.

Engines are made per process, and connections are dropped when the file below them was
replaced or deleted, so that nothing is ever written to an index that is gone.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError, StatementError

from kvstore.errors import KVStoreError, fail
from kvstore.store.findings import REBUILD
from kvstore.store.sqlite_file import IndexConnection, connect, file_identity, fold_log

__all__ = ["DEFAULT_LOCK_TIMEOUT", "Index", "database_error", "once"]

DEFAULT_LOCK_TIMEOUT: Final = 30.0
"""Seconds that a writer waits for another one."""
_SLICE: Final = 0.5
"""Seconds that one attempt waits inside SQLite, where neither a signal nor a cancellation is seen."""


class Index:
    """Transactions on the index at ``path``."""

    def __init__(
        self, path: Path, *, read_only: bool = False, immutable: bool = False, full: bool = False,
        lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
    ) -> None:  # fmt: skip
        """Remember the place; the first transaction opens it.

        Args:
            read_only: Refuse to write.
            immutable: See :func:`kvstore.store.sqlite_file.connect`.
            full: See :func:`kvstore.store.sqlite_file.connect`.
            lock_timeout: Seconds to wait for another writer before STORE_BUSY.
        """
        self.path = path
        self.read_only = read_only
        self.lock_timeout = lock_timeout
        self._connect = partial(
            connect, path, read_only=read_only, immutable=immutable, timeout=min(_SLICE, lock_timeout), full=full
        )
        self._pid = -1
        self._engine: sa.Engine | None = None
        self.on_missing: Callable[[], None] | None = None
        """Called before a transaction where the file is not there: makes it again, waits for it, or raises."""

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one snapshot and writes nothing."""
        with _typed(self.path):
            connection = self._open().connect()
        try:
            with _typed(self.path):
                yield connection
        finally:
            connection.close()

    @contextmanager
    def write(
        self, checkpoint: Callable[[], None] | None = None, *, durable: bool = True
    ) -> Iterator[sa.Connection]:
        """A transaction that holds the store's write lock; commits at the end, rolls back on any exception.

        Args:
            checkpoint: Called while waiting for the lock; raises to give up.
            durable: Whether the commit must survive a power cut; the next one that must takes it along.

        Raises:
            BusyError: STORE_BUSY.
            StoreError: STORE_READ_ONLY and the other store codes.
        """
        self.refuse_read_only()
        with _typed(self.path):
            connection = self._open().execution_options(sqlite_begin="IMMEDIATE").connect()
        try:
            with _typed(self.path):
                driver: Any = connection.connection.driver_connection
                driver.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                self._begin(connection, checkpoint)
                yield connection
                connection.commit()
                self._require_same_file(connection)
        finally:
            # Rolls back whatever was not committed.
            connection.close()

    def fold(self) -> None:
        """Bring everything into the file itself. See :func:`kvstore.store.sqlite_file.fold_log`.

        Raises:
            SpaceError, BusyError, StoreError: as of a write.
        """
        with _typed(self.path), self._open().connect() as connection:
            driver: Any = connection.connection.driver_connection
            fold_log(driver)

    def refuse_read_only(self) -> None:
        """Raise STORE_READ_ONLY where the store was opened for reading."""
        if self.read_only:
            raise fail(
                "STORE_READ_ONLY", f"the store at {self.path.parent} is open for reading only",
                fix="Open it writable, or check the directory's permissions.",
            )  # fmt: skip

    def present(self) -> bool:
        """Whether the file is there."""
        return self.path.exists()

    def close(self) -> None:
        """Close every idle connection; the last one folds the write-ahead log into the file."""
        # Taken at once: of two threads that find the file replaced, one closes.
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose(close=self._pid == os.getpid())

    def _begin(self, connection: sa.Connection, checkpoint: Callable[[], None] | None) -> None:
        """Take the write lock, looking up for signals and cancellation twice a second."""
        deadline = time.monotonic() + self.lock_timeout
        while True:
            if checkpoint is not None:
                checkpoint()
            try:
                connection.begin()
            except DBAPIError as error:
                if _primary(error.orig) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
            else:
                break
        self._require_same_file(connection)

    def _require_same_file(self, connection: sa.Connection) -> None:
        """Rows written to an index that somebody has replaced are lost: they must not be acknowledged."""
        if connection.info["file"] != file_identity(self.path):
            raise fail("STORE_BUSY", f"the index at {self.path} was replaced just now", fix="Try again.")

    def _open(self) -> sa.Engine:
        if self.on_missing is not None and not self.path.exists():
            # Old connections must be closed before a new file takes the name.
            self.close()
            self.on_missing()
        if self.read_only and not self.path.exists():
            raise fail("STORE_MISSING", f"the index at {self.path} is gone", fix="Mount the volume again.")
        engine = self._engine
        if engine is None or self._pid != os.getpid():
            self.close()
            engine = self._make_engine()
            self._pid, self._engine = os.getpid(), engine
        return engine

    def _make_engine(self) -> sa.Engine:
        engine = sa.create_engine(
            "sqlite://", creator=self._connect_or_make, poolclass=sa.QueuePool, pool_size=4, max_overflow=-1
        )

        @sa.event.listens_for(engine, "connect")
        def _remember(connection: Any, record: Any) -> None:
            record.info["file"] = connection.file

        @sa.event.listens_for(engine, "checkout")
        def _still_there(connection: Any, record: Any, proxy: Any) -> None:
            if record.info["file"] != file_identity(self.path):
                raise DisconnectionError("the index was replaced")

        @sa.event.listens_for(engine, "begin")
        def _start(connection: sa.Connection) -> None:
            mode = connection.get_execution_options().get("sqlite_begin", "DEFERRED")
            connection.exec_driver_sql(f"BEGIN {mode}")

        return engine

    def _connect_or_make(self) -> IndexConnection:
        """A connection; where the file went between the look for it and its opening, to what is made in its place."""
        try:
            return self._connect()
        except sqlite3.OperationalError as error:
            if _primary(error) != sqlite3.SQLITE_CANTOPEN or self.on_missing is None:
                raise
            self.on_missing()
            return self._connect()


def once() -> Callable[[], None]:
    """A checkpoint for :meth:`Index.write` that lets a wait for the lock be tried once, for half a second."""
    tries = iter((True,))

    def checkpoint() -> None:
        if not next(tries, False):
            raise fail("STORE_BUSY", "another process is writing to the store", fix="Try again.")

    return checkpoint


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """Database errors of the body as typed errors; others pass."""
    try:
        yield
    except DBAPIError as error:
        raise database_error(error.orig, path) from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise database_error(error, path) from error
    except (UnicodeEncodeError, OverflowError) as error:
        raise fail("USAGE", f"text or a number that no index can hold: {error}") from error
    except SQLAlchemyError as error:
        # A value that was refused on its way into a statement.
        if isinstance(error, StatementError) and isinstance(error.orig, KVStoreError):
            raise error.orig from error
        raise fail("STORE_IO", f"the index at {path} failed: {error}", path=str(path)) from error


def _primary(error: BaseException | None) -> int:
    """SQLite's primary result code of an error, or -1."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else int(code) & 0xFF


_CODES: Final = {
    sqlite3.SQLITE_BUSY: ("STORE_BUSY", "Try again, or find the process that holds it."),
    sqlite3.SQLITE_LOCKED: ("STORE_BUSY", "Try again, or find the process that holds it."),
    sqlite3.SQLITE_CORRUPT: ("STORE_CORRUPT", REBUILD),
    sqlite3.SQLITE_NOTADB: ("STORE_CORRUPT", REBUILD),
    sqlite3.SQLITE_FULL: ("NO_SPACE", "Free space on the store's volume and try again."),
    sqlite3.SQLITE_READONLY: ("STORE_READ_ONLY", "Check permissions and mount options."),
    sqlite3.SQLITE_CANTOPEN: ("STORE_UNREADABLE", "Check that the store is there and its permissions."),
    sqlite3.SQLITE_PERM: ("STORE_UNREADABLE", "Check the permissions."),
    sqlite3.SQLITE_IOERR: ("STORE_IO", "Check the volume that the store is on."),
}


def database_error(error: BaseException | None, path: Path) -> KVStoreError:
    """The typed error for a database error; the caller raises it."""
    code, fix = _CODES.get(_primary(error), ("STORE_IO", ""))
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_SHMSIZE:
        # The log's shared memory is a file, too, and SQLite has no other word for a volume without room for it.
        code, fix = _CODES[sqlite3.SQLITE_FULL]
    if isinstance(error, UnicodeDecodeError) or (type(error) is sqlite3.OperationalError and _primary(error) < 0):
        # Text in the file that is none: found by Python's module, which has no code of SQLite's for it.
        code, fix = _CODES[sqlite3.SQLITE_CORRUPT]
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return fail(code, f"the index at {path}: {error}", fix=fix, path=str(path), sqlite=name)

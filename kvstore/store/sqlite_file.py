"""The SQLite file of an index: how it is made, what proves that it is ours, its connections."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from kvstore.errors import fail
from kvstore.store.findings import REBUILD
from kvstore.store.fs import publish_new, sync_path
from kvstore.store.schema import METADATA

__all__ = [
    "APPLICATION_ID", "SCHEMA_VERSION", "IndexConnection", "check_file", "connect", "file_identity", "fold_log",
    "make_file", "readable_copy", "require_ours",
]  # fmt: skip

APPLICATION_ID: Final = 0x4B565354
"""``KVST`` in SQLite's header field for the application."""
_DIALECT: Final = sqlite.dialect()
_PAGE_SIZE: Final = 8192
_WAL_LIMIT: Final = 64 * 2**20


def _add_leases(connection: sqlite3.Connection) -> None:
    """2: leases."""
    connection.execute(
        "CREATE TABLE leases (owner TEXT NOT NULL, entry_key INTEGER NOT NULL, taken_at INTEGER NOT NULL, "
        "expires_at INTEGER NOT NULL, CONSTRAINT pk_leases PRIMARY KEY (owner), "
        "CONSTRAINT fk_leases_entry_key FOREIGN KEY(entry_key) REFERENCES entries (entry_key) "
        "ON DELETE CASCADE) WITHOUT ROWID, STRICT"
    )
    connection.execute("CREATE INDEX ix_leases_entry_key ON leases (entry_key)")


MIGRATIONS: Final[tuple[Callable[[sqlite3.Connection], None], ...]] = (_add_leases,)
"""Step ``n`` brings a file from ``user_version`` n + 1 to n + 2; the version moves in the same transaction."""

SCHEMA_VERSION: Final = len(MIGRATIONS) + 1


class IndexConnection(sqlite3.Connection):
    """A connection that knows its file.

    Attributes:
        file: Device and inode of the file that it reads and writes, with the log of that file and of no other.
    """

    file: tuple[int, int] | None = None


def file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file of that name, or None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def connect(
    path: Path, *, read_only: bool = False, immutable: bool = False, timeout: float = 1.0, full: bool = False
) -> IndexConnection:
    """A connection with every pragma set; never creates the file.

    Args:
        immutable: Nothing can change the file and nothing can be made beside it (read-only medium).
        timeout: Seconds that SQLite itself waits for a lock.
        full: On macOS flush the drive's own cache with every commit.

    Raises:
        sqlite3.Error: as it comes; for a file that is no database, too.
    """
    while True:
        before = file_identity(path)
        connection = _connect(path, read_only=read_only, immutable=immutable, timeout=timeout, full=full)
        # SQLite opens the log by its name. Where the file was exchanged meanwhile, that log is another file's.
        if file_identity(path) == before:
            connection.file = before
            return connection
        connection.close()


def _connect(path: Path, *, read_only: bool, immutable: bool, timeout: float, full: bool) -> IndexConnection:
    mode = "ro&immutable=1" if immutable else "ro" if read_only else "rw"
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(
        uri, uri=True, check_same_thread=False, isolation_level=None, timeout=timeout, factory=IndexConnection
    )
    try:
        _configure(connection, full=full)
        # Opens the log.
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _configure(connection: sqlite3.Connection, *, full: bool) -> None:
    legacy = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", None)
    if legacy is not None:
        # Python 3.12 and later: transactions are begun and ended by us alone.
        connection.autocommit = legacy  # type: ignore[attr-defined, unused-ignore]
    for pragma in (
        "synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF", "secure_delete=ON", "cell_size_check=ON",
        f"journal_size_limit={_WAL_LIMIT}", f"fullfsync={full:d}", f"checkpoint_fullfsync={full:d}",
    ):  # fmt: skip
        connection.execute(f"PRAGMA {pragma}")


def make_file(path: Path, temporary: Path) -> None:
    """Make an empty index at ``path``, unless another process was first.

    It is made whole under a name of its own and then linked into place, so that nobody ever sees
    half of one and no two processes race to switch it to WAL.

    Raises:
        OSError, sqlite3.Error: as they come.
    """
    temporary.touch(0o600, exist_ok=False)
    connection = connect(temporary)
    try:
        connection.execute(f"PRAGMA page_size={_PAGE_SIZE}")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _definitions():
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
        fold_log(connection)
    finally:
        connection.close()
    publish_new(temporary, path)
    sync_path(path.parent)


def fold_log(connection: sqlite3.Connection) -> None:
    """Bring everything that is in the log into the file, which is then the whole index.

    The last connection that is closed does so as well, but does not tell where it cannot, as on a full volume.

    Raises:
        sqlite3.Error: as it comes.
        BusyError: STORE_BUSY where another connection reads the log.
    """
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        raise fail("STORE_BUSY", "another process reads a new index", fix="Try again.")


def check_file(path: Path, connection: sqlite3.Connection, *, read_only: bool) -> None:
    """Prove that an open file is an index of a version that we know; bring an older one up to date.

    Raises:
        StoreError: as :func:`require_ours`; STORE_READ_ONLY for an older one that cannot be brought up to date.
        IntegrityError: STORE_CORRUPT for an empty file, and for one that is not what its version says.
        UnsupportedError: STORE_VERSION_UNSUPPORTED.
    """
    version = require_ours(path, connection)
    if version < 1:
        raise fail("STORE_CORRUPT", f"the version of {path}", expected="1 or more", found=version, fix=REBUILD)
    if version < SCHEMA_VERSION:
        if read_only:
            raise fail(
                "STORE_READ_ONLY", f"{path} is of an older release and cannot be brought up to date",
                expected=SCHEMA_VERSION, found=version, fix="Open the store writable once.",
            )  # fmt: skip
        _migrate(path, connection)
    _require_columns(path, connection)


_COLUMNS: Final = """
    SELECT tables.name, columns.name, columns.type, columns."notnull"
    FROM pragma_table_list AS tables JOIN pragma_table_xinfo(tables.name) AS columns
    WHERE tables.schema = 'main' AND tables.strict
"""


def _require_columns(path: Path, connection: sqlite3.Connection) -> None:
    """Every column of every table is there, of its type: in strict tables its values then are, too."""
    wanted = {
        (table.name, column.name, column.type.dialect_impl(_DIALECT).compile(_DIALECT), int(not column.nullable))
        for table in _tables() for column in table.columns
    }  # fmt: skip
    missing = wanted.difference(connection.execute(_COLUMNS))
    if missing:
        table, column, kind, _ = min(missing)
        raise fail(
            "STORE_CORRUPT", f"the tables of {path}", expected=f"{table}.{column}, strictly {kind}", found="another",
            fix=REBUILD,
        )  # fmt: skip


def require_ours(path: Path, connection: sqlite3.Connection) -> int:
    """The version of an open file that is an index, or empty, or was an index once; 0 where it has none.

    Raises:
        StoreError: STORE_NOT_OURS for another program's database.
        UnsupportedError: STORE_VERSION_UNSUPPORTED for an index of a newer release.
    """
    application, version = _number(connection, "application_id"), _number(connection, "user_version")
    if application != APPLICATION_ID and (application or version or _number(connection, "schema_version")):
        raise fail(
            "STORE_NOT_OURS", f"{path} is another program's database", expected=f"application id {APPLICATION_ID:#x}",
            found=f"{application:#x}", fix="Move it away: the index is then made again from the store's files.",
        )  # fmt: skip
    if version > SCHEMA_VERSION:
        raise fail(
            "STORE_VERSION_UNSUPPORTED", f"{path} was written by a newer release", expected=SCHEMA_VERSION,
            found=version, fix="Upgrade kvstore.",
        )  # fmt: skip
    return version


def readable_copy(path: Path) -> Path:
    """A private copy of an index whose write-ahead log cannot be read in place, as on a read-only medium."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-index-"))
    try:
        for suffix in ("", "-wal"):
            source = Path(f"{path}{suffix}")
            if source.exists():
                shutil.copyfile(source, folder / source.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / path.name


def _tables() -> list[sa.Table]:
    """Every table of the index, in an order in which they can be made."""
    # The prefix tree adds its tables to METADATA when it is imported.
    import kvstore.store.nodes  # noqa: F401

    return METADATA.sorted_tables


def _definitions() -> Iterator[str]:
    """The statements that make every table and index."""
    for table in _tables():
        yield str(CreateTable(table).compile(dialect=_DIALECT))
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            yield str(CreateIndex(index).compile(dialect=_DIALECT))


def _migrate(path: Path, connection: sqlite3.Connection) -> None:
    """Run the steps that are missing, each in a transaction with its version."""
    while True:
        connection.execute("BEGIN IMMEDIATE")
        # Read again under the lock: another process may have been faster.
        version = _number(connection, "user_version")
        if version >= SCHEMA_VERSION:
            connection.execute("ROLLBACK")
            return
        try:
            MIGRATIONS[version - 1](connection)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            raise fail("STORE_CORRUPT", f"{path} is not of version {version}: {error}", fix=REBUILD) from error
        connection.execute(f"PRAGMA user_version={version + 1}")
        connection.execute("COMMIT")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)

"""Which file is the store's index: one process at a time may make it, or put another in its place.

Making an index is not a transaction of any index, so a lock beside them guards it: ``flock`` on
the store's own directory, which the kernel drops with the process and which leaves no file.

The index is replaced in steps, each of which may be the last one:

1. ``index.sqlite`` and its log move to ``index.sqlite.old``. A process that comes now finds no
   index and waits for the lock to make one.
2. The new file takes the name.
3. The old files move to ``quarantine/``.

Where the steps ended early, the next process finds the old index still beside the place of the
new one, and takes from it what it alone knew.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from kvstore.errors import fail
from kvstore.store.config import Paths
from kvstore.store.fs import make_dir, publish_new, sync_path
from kvstore.store.index import DEFAULT_LOCK_TIMEOUT, database_error
from kvstore.store.sqlite_file import connect, require_ours

__all__ = ["index_lock", "is_clear", "lock_old", "old_index", "swap_index", "wait_for_index"]

_SUFFIXES: Final = ("", "-wal", "-shm")
_POLL: Final = 0.02
"""Seconds between two attempts to take the lock."""


@contextmanager
def index_lock(paths: Paths, timeout: float = DEFAULT_LOCK_TIMEOUT) -> Iterator[None]:
    """The right to make or replace the index of a store; not reentrant.

    Where a file system has no locks, the last name in place wins, as a link or a rename gives it.

    Raises:
        OSError: as the system gave it.
        BusyError: STORE_BUSY.
    """
    fd = os.open(paths.root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd, paths, time.monotonic() + timeout)
        yield
    finally:
        os.close(fd)


def wait_for_index(paths: Paths, timeout: float) -> None:
    """Where the index is not there, wait while another process makes or exchanges it; needs no right to write.

    Raises:
        BusyError: STORE_BUSY.
    """
    if not paths.index.exists():
        with suppress(OSError), index_lock(paths, timeout):
            pass


def _lock(fd: int, paths: Paths, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise fail(
                    "STORE_BUSY", f"another process makes the index of {paths.root}", fix="Try again.",
                ) from None  # fmt: skip
            time.sleep(_POLL)
        except OSError:
            return
        else:
            return


def old_index(paths: Paths) -> Path:
    """The file to take facts from: the index, or the one that an interrupted exchange had moved; under the lock."""
    moved = _moved(paths)
    if paths.index.exists() or not moved.exists():
        _set_aside(paths)
        return paths.index
    # The log had not followed yet, or it had and there is none.
    _move(paths.index, moved)
    return moved


def is_clear(paths: Paths) -> bool:
    """Whether nothing is left of any index: a log alone would be taken for that of the next file of its name."""
    return not _files(paths.index) and not _files(_moved(paths))


def lock_old(index: Path, stack: ExitStack) -> sqlite3.Connection | None:
    """An old index with its write lock held, or None where it is gone or past reading.

    Raises:
        StoreError, UnsupportedError: as :func:`~kvstore.store.sqlite_file.require_ours`.
        BusyError, StoreError, SpaceError: as of any index.
    """
    if not index.exists():
        return None
    try:
        connection = stack.enter_context(closing(connect(index, timeout=DEFAULT_LOCK_TIMEOUT)))
        require_ours(index, connection)
        connection.execute("BEGIN IMMEDIATE")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        typed = database_error(error, index)
        if typed.code != "STORE_CORRUPT":
            raise typed from error
        return None
    return connection


def swap_index(paths: Paths, fresh: Path) -> None:
    """Put ``fresh`` in the index's place and what was there into quarantine; under the lock.

    The log must leave the name before the new file takes it, or it would be taken for that one's.
    Connections to the old index notice that its file was moved, and SQLite leaves the names alone
    when they are closed.

    Raises:
        OSError: as the system gave it.
        BusyError: STORE_BUSY where the lock could not be had and another process was first.
    """
    sync_path(fresh)
    _move(paths.index, _moved(paths))
    if not publish_new(fresh, paths.index):
        raise fail("STORE_BUSY", f"another process made the index of {paths.root} just now", fix="Try again.")
    sync_path(paths.root)
    _set_aside(paths)


def _moved(paths: Paths) -> Path:
    return paths.index.with_name(f"{paths.index.name}.old")


def _files(index: Path) -> list[str]:
    """The suffixes of an index and its log that are there, the index first: a log alone is nobody's."""
    return [suffix for suffix in _SUFFIXES if Path(f"{index}{suffix}").exists()]


def _move(index: Path, target: Path) -> None:
    for suffix in _files(index):
        Path(f"{index}{suffix}").replace(f"{target}{suffix}")


def _set_aside(paths: Paths) -> None:
    """Move what an exchange took out of the way to where nothing reads it but people."""
    moved = _moved(paths)
    if _files(moved):
        make_dir(paths.quarantine)
        _move(moved, paths.quarantine / f"{time.time_ns()}-{paths.index.name}")

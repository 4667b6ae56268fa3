"""Opening a store: what is there, what may be done with it, and what must be made first."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest
from kvstore.store.config import Paths, StoreConfig, ensure_layout, open_config, store_root, write_config
from kvstore.store.documents import Documents
from kvstore.store.fs import list_files, os_errors, sync_paths
from kvstore.store.index import DEFAULT_LOCK_TIMEOUT, Index, database_error
from kvstore.store.index_swap import index_lock, is_clear, wait_for_index
from kvstore.store.locations import Locations
from kvstore.store.objects import LocalObjects, ObjectBackend
from kvstore.store.sqlite_file import check_file, connect, make_file, readable_copy
from kvstore.store.temp import Session, sweep_sessions
from kvstore.store.verified import Verified

__all__ = ["Durability", "Opened", "ensure_index", "make_index", "open_store"]

Durability = Literal["normal", "full"]
"""``normal``: flushed to the drive. ``full``: on macOS also out of the drive's own cache; the same elsewhere."""


class Opened:
    """An open store's parts, as every module of this package takes them.

    Attributes:
        paths, config: Where it is and what it says of itself.
        index, objects, manifests, receipts: Its four parts.
        full: Whether to flush the drive's own cache too.
        last_read: The entry whose manifest was read last, and when it had been used: spares noting that a query.
    """

    def __init__(
        self, paths: Paths, config: StoreConfig, index: Index, *, full: bool = False, copied: Path | None = None
    ) -> None:
        """Put the parts together; ``copied`` is a private copy of the index, removed at the end."""
        self.paths = paths
        self.config = config
        self.index = index
        self.full = full
        self.objects: ObjectBackend = LocalObjects(paths.objects, paths.quarantine, full=full)
        self.manifests = Documents(paths.manifests, paths.quarantine, full=full)
        self.receipts = Documents(paths.receipts, paths.quarantine, full=full)
        self.locations = Locations()
        self.verified = Verified(index)
        self.last_read: tuple[Digest | None, int | None] = (None, None)
        self._copied = copied
        self._device = _device(paths.root), _device(paths.root.parent)
        index.on_missing = partial(wait_for_index, paths, index.lock_timeout) if index.read_only else self._revive

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written."""
        return self.index.read_only

    def session(self) -> Session:
        """A place for temporary files; raises typed errors."""
        with os_errors("making a temporary directory", writing=True):
            try:
                return Session(self.paths.tmp, full=self.full)
            except FileNotFoundError:
                self._revive()
                return Session(self.paths.tmp, full=self.full)

    def sync(self, paths: Iterable[Path]) -> None:
        """Flush these directories together; raises typed errors."""
        with os_errors("flushing directories", writing=True):
            sync_paths(paths, full=self.full)

    def _revive(self) -> None:
        """Make directories and index again after somebody deleted them; entries that are gone are gone.

        Not where the volume itself is gone: a store must not appear below a mount point.
        """
        root = self.paths.root
        own, parent = self._device
        if _device(root) != own if root.exists() else _device(root.parent) != parent:
            raise fail("STORE_MISSING", f"the volume of the store at {root} is not there", fix="Mount it again.")
        with os_errors(f"making the store at {self.paths.root} again", writing=True):
            if not self.paths.config.exists():
                self.config = write_config(self.paths.root, self.config)
            ensure_layout(self.paths)
            ensure_index(self.paths, self.index.lock_timeout)

    def close(self) -> None:
        """Note what was verified, close the index, drop the private copy if there is one."""
        self.verified.flush()
        self.index.close()
        if self._copied is not None:
            shutil.rmtree(self._copied.parent, ignore_errors=True)
            self._copied = None


def open_store(
    root: Path,
    *,
    create: bool = True,
    read_only: bool = False,
    durability: Durability = "normal",
    lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
) -> Opened:
    """Open the store at ``root``; one that cannot be written is opened for reading.

    Raises:
        UsageError: USAGE for a path that cannot be one.
        StoreError: STORE_MISSING, STORE_NOT_OURS, STORE_UNREADABLE, STORE_READ_ONLY.
        UnsupportedError: STORE_VERSION_UNSUPPORTED.
        IntegrityError: STORE_CORRUPT.
    """
    paths = Paths(store_root(root))
    config = open_config(paths.root, create=create and not read_only)
    full = durability == "full"
    if read_only or not os.access(paths.root, os.W_OK | os.X_OK):
        return _open_for_reading(paths, config, lock_timeout)
    with os_errors(f"opening the store at {paths.root}", writing=True):
        ensure_layout(paths)
        sweep_sessions(paths.tmp)
        ensure_index(paths, lock_timeout)
        try:
            _check(paths.index, read_only=False)
        except KVStoreError as error:
            if error.code not in ("STORE_UNREADABLE", "STORE_IO"):
                raise
            # Another process may be exchanging it just now, or somebody has deleted it while it was opened:
            # SQLite calls that an error of the disk. A disk that fails does so the second time, too.
            ensure_index(paths, lock_timeout)
            _check(paths.index, read_only=False)
    return Opened(paths, config, Index(paths.index, full=full, lock_timeout=lock_timeout), full=full)


def ensure_index(paths: Paths, timeout: float = DEFAULT_LOCK_TIMEOUT) -> None:
    """Make the index where it is not there, from what the store holds. Raises OSError and typed errors.

    Args:
        timeout: Seconds to wait for another process that makes it.
    """
    if paths.index.exists():
        return
    with index_lock(paths, timeout):
        # Another process may have made it, and written to it, while this one waited.
        if paths.index.exists():
            return
        if _holds_entries(paths) or not is_clear(paths):
            from kvstore.store.rebuild import rebuild_locked

            rebuild_locked(paths)
            return
        with Session(paths.tmp) as session:
            make_index(paths.index, session)


def _holds_entries(paths: Paths) -> bool:
    """Whether there is a manifest. A folder that cannot be listed raises OSError: it may hold some."""
    return any(path.suffix == ".json" for path in list_files(paths.manifests))


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def make_index(index: Path, session: Session) -> None:
    """Make an empty index at ``index``, unless another process was first. Raises OSError and typed errors."""
    try:
        make_file(index, session.name())
    except sqlite3.Error as error:
        raise database_error(error, index) from error


def _open_for_reading(paths: Paths, config: StoreConfig, lock_timeout: float) -> Opened:
    # Twice, for another process may exchange the index between the look for it and its opening.
    for last in (False, True):
        wait_for_index(paths, lock_timeout)
        if not paths.index.exists():
            raise fail(
                "STORE_CORRUPT", f"the store at {paths.root} has no index",
                fix="Open it writable once: it is then rebuilt.",
            )  # fmt: skip
        try:
            _check(paths.index, read_only=True)
        except KVStoreError as error:
            if error.code not in ("STORE_UNREADABLE", "STORE_READ_ONLY") and (last or error.code != "STORE_IO"):
                raise
        else:
            return Opened(paths, config, Index(paths.index, read_only=True, lock_timeout=lock_timeout))
    return _open_frozen(paths, config)


def _open_frozen(paths: Paths, config: StoreConfig) -> Opened:
    """Open where not even the shared-memory file of the write-ahead log can be made.

    The log itself must not be passed over, or rows that it holds would be missing; a copy of both can be read.
    """
    log = Path(f"{paths.index}-wal")
    with os_errors(f"reading the index at {paths.index}"):
        if not log.exists() or not log.stat().st_size:
            _check(paths.index, read_only=True, immutable=True)
            return Opened(paths, config, Index(paths.index, read_only=True, immutable=True))
        copy = readable_copy(paths.index)
        try:
            _check(copy, read_only=True)
        except BaseException:
            shutil.rmtree(copy.parent, ignore_errors=True)
            raise
        return Opened(paths, config, Index(copy, read_only=True), copied=copy)


def _check(path: Path, *, read_only: bool, immutable: bool = False) -> None:
    try:
        with closing(connect(path, read_only=read_only, immutable=immutable)) as connection:
            check_file(path, connection, read_only=read_only)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise database_error(error, path) from error

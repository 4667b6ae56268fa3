"""Temporary files: one locked, private directory for each operation.

A *session* is a directory in ``tmp/`` named by boot, process and random, held by a lock
that the kernel drops with the process. A session of another boot, or one whose lock is
free, is garbage, and whoever opens the store next sweeps it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from kvstore.format.digest import Readable
from kvstore.store.fs import DIR_MODE, sync_path, sync_paths, write_file
from kvstore.store.parallel import start_waiting, wait_for

__all__ = ["Session", "boot_id", "garbage_sessions", "is_live", "sweep_sessions"]

_YOUNG: Final = 60.0
"""Seconds for which a session of a living process is left alone: its owner may be about to lock it."""
_FLUSHED_BYTES: Final = 8 * 2**20
"""Bytes that are flushed together: fewer, and threads would be woken all the time."""
_OLD: Final = 86400.0
"""Seconds after which a session is garbage on a file system without locks."""


class Session:
    """A private directory for the temporary files of one operation; a context manager."""

    def __init__(self, tmp: Path, *, full: bool = False) -> None:
        """Make and lock the directory below ``tmp``; raises OSError."""
        self._full = full
        self._unsynced: list[Path] = []
        self._unsynced_bytes = 0
        self._guard = threading.Lock()
        self._flushing: list[Future[object]] = []
        self._lock = -1
        while self._lock < 0:
            self.path = tmp / f"{boot_id()}-{os.getpid()}-{secrets.token_hex(8)}"
            self.path.mkdir(DIR_MODE)
            try:
                self._lock, _ = _lock(self.path)
            except OSError:
                _remove(self.path)
                raise

    def name(self) -> Path:
        """A fresh path in the session."""
        return self.path / secrets.token_hex(8)

    def write(self, parts: Iterable[Readable]) -> Path:
        """Write a file, part by part as they are made; :meth:`sync` makes it ready to be published. Raises OSError.

        May be called from several threads. Flushes begin when there is something to flush: the device works while
        the next files are made.
        """
        path = self.name()
        size = write_file(path, parts, sync=False)
        with self._guard:
            self._unsynced.append(path)
            self._unsynced_bytes += size
            if self._unsynced_bytes >= _FLUSHED_BYTES:
                paths, self._unsynced, self._unsynced_bytes = self._unsynced, [], 0
                self._flushing.append(start_waiting(self._flush, paths))
        return path

    def _flush(self, paths: Iterable[Path]) -> None:
        for path in paths:
            sync_path(path, full=self._full)

    def sync(self) -> None:
        """Flush every file that was written since the last time; raises OSError."""
        paths, self._unsynced, self._unsynced_bytes = self._unsynced, [], 0
        flushing, self._flushing = self._flushing, []
        sync_paths(paths, full=self._full)
        wait_for(flushing)

    def close(self) -> None:
        """Remove the directory with whatever is left in it."""
        wait(self._flushing)
        try:
            _remove(self.path)
        except BaseException:
            # A second signal; nobody would sweep this while the process lives.
            _remove(self.path)
            raise
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _remove(path: Path) -> None:
    try:
        # Mostly every file has been moved to its name.
        path.rmdir()
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def sweep_sessions(tmp: Path, *, young: float = _YOUNG) -> int:
    """Remove what dead processes left in ``tmp``; returns how many sessions that were."""
    swept = 0
    for path in _listed(tmp):
        # Held to the end, so that nobody takes what is half removed for a session of his own.
        with _claimed(path, young, fcntl.LOCK_EX) as ended:
            if ended:
                shutil.rmtree(path, ignore_errors=True)
                swept += 1
    return swept


def garbage_sessions(tmp: Path, *, young: float = _YOUNG) -> list[Path]:
    """Sessions whose process is gone."""
    return [path for path in _listed(tmp) if _has_ended(path, young)]


def is_live(path: Path) -> bool:
    """Whether the process that made a session has not ended, as far as locks can tell."""
    return path.is_dir() and not _has_ended(path, 0.0)


def _listed(tmp: Path) -> list[Path]:
    try:
        return sorted(tmp.iterdir())
    except FileNotFoundError:
        return []


def _has_ended(path: Path, young: float) -> bool:
    # A shared lock: two that look at the same time must not take each other for the owner.
    with _claimed(path, young, fcntl.LOCK_SH) as ended:
        return ended


@contextmanager
def _claimed(path: Path, young: float, kind: int) -> Iterator[bool]:
    """Whether a session's process is gone; if it is, the session is locked meanwhile."""
    boot, pid, *_ = [*path.name.split("-"), "", ""]
    if boot != boot_id():
        yield path.is_dir()
        return
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        yield False
        return
    alive = pid.isdecimal() and _alive(int(pid))
    fd, held = -1, False
    if not alive or age >= young:
        # What cannot be opened, as without a free descriptor, is not proved to have ended.
        with suppress(OSError):
            fd, held = _lock(path, kind)
    try:
        yield fd >= 0 and (held or not alive or age > _OLD)
    finally:
        if fd >= 0:
            os.close(fd)


def _alive(pid: int) -> bool:
    """Whether a process of that id exists; another container's looks dead, which is why locks decide."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _lock(path: Path, kind: int = fcntl.LOCK_EX) -> tuple[int, bool]:
    """Open a directory and lock it.

    Returns:
        The descriptor, or -1 where another holds the lock or the directory is gone; and whether there is a lock,
        which some file systems cannot give.

    Raises:
        OSError: the directory is there and cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1, False
    held = True
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return -1, False
    except OSError:
        held = False
    # A sweeper may have removed the directory between its making and its locking.
    if path.exists():
        return fd, held
    os.close(fd)
    return -1, False


_boot = ""


def boot_id() -> str:
    """A word that changes at every boot of the machine; "0" where none can be had."""
    global _boot
    if not _boot:
        _boot = _read_boot_id().replace("-", "")[:16] or "0"
    return _boot


def _read_boot_id() -> str:
    if sys.platform == "darwin":  # pragma: no cover - macOS only
        return _darwin_boot_id()
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _darwin_boot_id() -> str:  # pragma: no cover - macOS only
    import ctypes

    buffer = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(buffer))
    status = ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", buffer, ctypes.byref(size), None, 0)
    return buffer.value.decode("ascii", "replace") if status == 0 else ""

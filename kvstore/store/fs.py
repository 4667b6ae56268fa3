"""Files that survive a power cut, and operating-system errors as typed ones.

A file is written under a name that no other process can hold, flushed, closed, and only
then moved to its place; after that its directory is flushed. So whatever stands under a
final name is whole. Final files are read-only (0400) and never written again.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Readable
from kvstore.store.parallel import wait_parallel

__all__ = [
    "DIR_MODE", "FILE_MODE", "list_files", "make_dir", "open_plain", "os_error", "os_errors", "plain_stat",
    "publish_file", "publish_new", "read_file", "remove_file", "replace_file", "require_path", "sync_path",
    "sync_paths", "write_file",
]  # fmt: skip

DIR_MODE: Final = 0o700
FILE_MODE: Final = 0o400
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
# A file system that cannot flush says so with one of these; what it can do has then been done.
_CANNOT_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.EBADF, errno.EROFS})
_CANNOT_LINK: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS})


def os_error(error: OSError, what: str, *, writing: bool = False) -> KVStoreError:
    """The typed error for an operating-system error; the caller raises it.

    Args:
        what: What was being done, for the message.
        writing: Whether it was a write: decides what a denied permission means.
    """
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    detail: dict[str, Any] = {"errno": name, "path": path}
    if path is not None and path not in what:
        what += f" at {path}"
    if error.errno in _NO_SPACE:
        return fail("NO_SPACE", f"{what}: {name}", fix="Free space on the store's volume and try again.", **detail)
    if error.errno == errno.EROFS or (writing and error.errno in _DENIED):
        return fail("STORE_READ_ONLY", f"{what}: {name}", fix="Check permissions and mount options.", **detail)
    if error.errno in _DENIED:
        return fail("STORE_UNREADABLE", f"{what}: {name}", fix="Check the permissions.", **detail)
    return fail(
        "STORE_IO", f"{what}: {name}: {error.strerror}", fix="Look at what is there, and at the volume that it is on.",
        **detail,
    )


@contextmanager
def os_errors(what: str, *, writing: bool = False) -> Iterator[None]:
    """Turn any OSError of the body into its typed error."""
    try:
        yield
    except OSError as error:
        raise os_error(error, what, writing=writing) from error


def require_path(path: Path, what: str) -> None:
    """Refuse what the system cannot take for a path at all: it says so by errors that are none of the system's.

    Args:
        what: What the path is of, for the message.

    Raises:
        UsageError: USAGE.
    """
    try:
        sound = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        sound = False
    if not sound:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise fail("USAGE", what, expected="text without U+0000 and half characters", found=shown)


def list_files(root: Path) -> Iterator[Path]:
    """Every file below a directory, in order of names; what cannot be listed is an error, not as if it were empty.

    Raises:
        OSError: as the system gave it.
    """
    for folder, folders, files in os.walk(root, onerror=_reraise):
        folders.sort()
        yield from (Path(folder) / name for name in sorted(files))


def _reraise(error: OSError) -> None:
    # A directory that was removed between its listing and its reading holds nothing.
    if not isinstance(error, FileNotFoundError):
        raise error


def sync_fd(fd: int, *, full: bool = False) -> None:
    """Flush a file or directory to the device.

    Args:
        full: On macOS also flush the drive's own cache (``F_FULLFSYNC``), where the file system can.
    """
    if full and sys.platform == "darwin":  # pragma: no cover - macOS only
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        else:
            return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_path(path: Path, *, full: bool = False) -> None:
    """Flush a file's content, or a directory's names."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_fd(fd, full=full)
    finally:
        os.close(fd)


def sync_paths(paths: Iterable[Path], *, full: bool = False) -> None:
    """Flush several files or directories together."""
    wait_parallel(partial(sync_path, full=full), sorted(set(paths)))


def write_file(
    path: Path, parts: Iterable[Readable], *, mode: int = FILE_MODE, full: bool = False, sync: bool = True
) -> int:
    """Write a new file whole; on failure it is gone again.

    Args:
        sync: Flush it; otherwise the caller does so before anybody may see it.

    Returns:
        Bytes written.

    Raises:
        OSError: as the system gave it; FileExistsError where the name is taken.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        size = sum(_write_all(fd, part) for part in parts)
        if sync:
            sync_fd(fd, full=full)
    except BaseException:
        os.close(fd)
        remove_file(path)
        raise
    os.close(fd)
    return size


def _write_all(fd: int, part: Readable) -> int:
    """Write every byte: a call may write less, on a nearly full disk or above 2 GiB."""
    view = memoryview(part).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def publish_file(temporary: Path, final: Path) -> None:
    """Move a flushed file to its place, replacing what is there; the caller flushes the directory."""
    try:
        os.replace(temporary, final)  # noqa: PTH105 - the two-argument form reads better here
    except FileNotFoundError:
        if not temporary.exists():
            raise
        make_dir(final.parent)
        temporary.replace(final)


def publish_new(temporary: Path, final: Path) -> bool:
    """Move a flushed file to its place unless the name is taken; tells whether it was moved.

    Where hard links do not exist, two processes can both believe that they were first.
    """
    try:
        os.link(temporary, final)
    except FileExistsError:
        remove_file(temporary)
        return False
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        if final.exists():
            remove_file(temporary)
            return False
        temporary.replace(final)
        return True
    remove_file(temporary)
    return True


def make_dir(path: Path) -> None:
    """Make a directory, private to its owner, unless it is there."""
    with suppress(FileExistsError):
        path.mkdir(DIR_MODE)


def remove_file(path: Path) -> bool:
    """Remove a file; tells whether it was there. A directory of that name is none, and is left alone."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except (IsADirectoryError, PermissionError):
        # POSIX lets a system say either.
        if not path.is_dir():
            raise
        return False
    return True


def open_plain(path: Path) -> int:
    """A descriptor for reading a plain file; a pipe in its place is not waited for, and no device is read.

    Raises:
        OSError: as the system gave it; FileNotFoundError also where something else is there.
    """
    with _links_that_lead_nowhere(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain(path)
    return fd


def plain_stat(path: Path) -> os.stat_result:
    """The status of a plain file; raises as :func:`open_plain`."""
    with _links_that_lead_nowhere(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _not_plain(path)
    return status


def read_file(path: Path, limit: int) -> bytes:
    """A plain file's bytes, at most ``limit`` and one: the caller sees that there are too many.

    Raises:
        OSError: as :func:`open_plain`.
    """
    with open(open_plain(path), "rb") as file:
        return file.read(limit + 1)


@contextmanager
def _links_that_lead_nowhere(path: Path) -> Iterator[None]:
    """A link to itself is as good as none."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_plain(path) from error
        raise


def _not_plain(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "not a plain file", os.fspath(path))


def replace_file(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a reader never sees half a file; for this user alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

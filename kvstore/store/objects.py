"""Objects as files: the interface that any backend gives, and the local one.

An object's name holds two digests: of its payload, and of its stored bytes, so that any
tool can check a file by its name alone. A name is written once and never again while
its index row is live; who may publish or remove, and when, is the index's business.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.format.digest import Digest, digest_hex, sha256_digest
from kvstore.format.object import ObjectParts
from kvstore.store.fs import (
    list_files,
    make_dir,
    open_plain,
    os_error,
    os_errors,
    plain_stat,
    publish_file,
    remove_file,
)
from kvstore.store.quarantine import clear_place, set_aside
from kvstore.store.temp import Session

__all__ = [
    "LocalObjects", "ObjectBackend", "ObjectName", "Staged", "StoredObject", "parse_object_name",
    "stored_digest",
]  # fmt: skip

_NAME: Final = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.kvo", re.ASCII)
_SMALL: Final = 256 * 1024
"""Objects up to this size are read, not mapped: cheaper, and a vanishing drive is an error, not a signal."""
_LARGE: Final = 4 * 2**20
_PIECE: Final = 2 * 2**20
_CAN_RELEASE: Final = hasattr(mmap, "MADV_DONTNEED")


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """The digests of an object's payload and of its stored bytes."""

    payload: Digest
    stored: Digest

    @property
    def path(self) -> str:
        """The name below ``objects/``: ``ab/<payload hex>.<stored hex>.kvo``."""
        payload = digest_hex(self.payload)
        return f"{payload[:2]}/{payload}.{digest_hex(self.stored)}.kvo"


def parse_object_name(path: str) -> ObjectName | None:
    """The name that a path below ``objects/`` stands for, or None where it is not an object's."""
    shard, _, name = path.partition("/")
    match = _NAME.fullmatch(name)
    if match is None or match[1][:2] != shard:
        return None
    return ObjectName(Digest(f"sha256:{match[1]}"), Digest(f"sha256:{match[2]}"))


class StoredObject(Protocol):
    """An open object: its bytes, and what tells this copy of it from any other."""

    data: memoryview
    identity: str

    def release(self, begin: int, end: int) -> None:
        """These bytes have been read: let go of memory that they take; whoever reads them again gets them again."""

    def close(self) -> None:
        """Release the bytes; views into them keep them alive until they are gone too."""


def stored_digest(stored: StoredObject) -> Digest:
    """SHA-256 of the stored bytes; of a large object no more than a few MiB are in memory at once."""
    return sha256_digest(_pieces(stored))


def _pieces(stored: StoredObject) -> Iterator[memoryview]:
    for begin in range(0, len(stored.data), _PIECE):
        yield stored.data[begin : begin + _PIECE]
        stored.release(begin, begin + _PIECE)


@dataclass(frozen=True, slots=True)
class Staged:
    """An object that is written and durable but not yet visible."""

    name: ObjectName
    size: int
    path: Path


class ObjectBackend(Protocol):
    """Where objects lie. Methods raise typed errors only."""

    def stage(self, session: Session, payload: Digest, parts: ObjectParts) -> Staged:
        """Write an object as it is made, without making it visible; may be called from several threads.

        It is durable after ``session.sync()``.
        """

    def publish(self, staged: Staged) -> None:
        """Make it visible under its name."""

    def folders(self, names: Iterable[ObjectName]) -> set[Path]:
        """Directories to be flushed before it is durable that these names are there."""

    def open(self, name: ObjectName) -> StoredObject | None:
        """The object of that name, or None where it is not there."""

    def identify(self, name: ObjectName) -> tuple[str, int] | None:
        """What tells this copy from any other, and its size in bytes; None where it is not there."""

    def remove(self, name: ObjectName) -> bool:
        """Remove it; tells whether it was there."""

    def set_aside(self, name: ObjectName, reason: Mapping[str, Any]) -> None:
        """Move it to quarantine, with the reason beside it."""

    def paths(self) -> Iterator[tuple[str, ObjectName | None]]:
        """Every path, with the name that it stands for, or None for a foreign file."""


class MappedObject:
    """A local object: small ones in memory, large ones mapped."""

    __slots__ = ("_large", "_map", "data", "identity")

    def __init__(self, fd: int, status: os.stat_result) -> None:
        """Read or map an open file; the descriptor stays the caller's."""
        self.identity = _identity(status)
        self._map: mmap.mmap | None = None
        self._large = status.st_size > _LARGE and _CAN_RELEASE
        if status.st_size > _SMALL:
            self._map = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
            self.data = memoryview(self._map)
        else:
            # One byte more than there should be shows a file that grew.
            self.data = memoryview(os.read(fd, status.st_size + 1))

    def release(self, begin: int, end: int) -> None:
        """Unmap whole pages of a large object; they stay in the system's cache."""
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._large and self._map is not None and not self._map.closed and first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Unmap, unless somebody still holds a view: then the last view does."""
        with suppress(BufferError):
            self.data.release()
            if self._map is not None:
                self._map.close()


class LocalObjects:
    """Objects as files below ``objects/``, in 256 folders by the first two digits."""

    def __init__(self, root: Path, quarantine: Path, *, full: bool = False) -> None:
        """Use ``root`` for objects; nothing is touched yet."""
        self._root = root
        self._quarantine = quarantine
        self._full = full

    def stage(self, session: Session, payload: Digest, parts: ObjectParts) -> Staged:
        """Write a temporary file; the folder for it is made now, while no lock is held."""
        with os_errors("writing an object", writing=True):
            path = session.write(parts)
            name = ObjectName(payload, parts.stored_digest)
            make_dir(self._path(name).parent)
            return Staged(name, parts.size, path)

    def publish(self, staged: Staged) -> None:
        """Move the file to its name; what is no file and stands there is set aside."""
        path = self._path(staged.name)
        clear_place(path, self._quarantine, full=self._full)
        with os_errors("publishing an object", writing=True):
            publish_file(staged.path, path)

    def folders(self, names: Iterable[ObjectName]) -> set[Path]:
        """The folders of these names, and the one that they are in."""
        return {self._root, *(self._path(name).parent for name in names)}

    def open(self, name: ObjectName) -> MappedObject | None:
        """Open the file; the descriptor, then the mapping, outlives a removal by others."""
        path = self._path(name)
        try:
            fd = open_plain(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise os_error(error, "opening an object") from error
        try:
            with os_errors("reading an object"):
                return MappedObject(fd, os.fstat(fd))
        finally:
            os.close(fd)

    def identify(self, name: ObjectName) -> tuple[str, int] | None:
        """Identity and size, without opening the file."""
        try:
            status = plain_stat(self._path(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise os_error(error, "looking for an object") from error
        return _identity(status), status.st_size

    def remove(self, name: ObjectName) -> bool:
        """Unlink the file."""
        with os_errors("removing an object", writing=True):
            return remove_file(self._path(name))

    def set_aside(self, name: ObjectName, reason: Mapping[str, Any]) -> None:
        """Move the file to ``quarantine/``, where nothing reads it but people."""
        set_aside(self._path(name), self._quarantine, reason, full=self._full)

    def paths(self) -> Iterator[tuple[str, ObjectName | None]]:
        """Every file below ``objects/``."""
        with os_errors("listing objects"):
            for file in list_files(self._root):
                path = file.relative_to(self._root).as_posix()
                yield path, parse_object_name(path)

    def _path(self, name: ObjectName) -> Path:
        return self._root / name.path


def _identity(status: os.stat_result) -> str:
    # Who changes a file's bytes can set the time of modification back, but not that of the last change of status.
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"

"""The files of a bundle, in a directory or a tar archive: names first, bytes when asked for."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvstore.errors import fail
from kvstore.format.archive import members
from kvstore.format.bundle import BundleFile, check_path
from kvstore.format.digest import Readable
from kvstore.store.fs import open_plain, os_errors, require_path, sync_path, write_file

__all__ = ["BundleFiles", "open_bundle", "write_folder", "write_tar"]

_FILE_MODE = 0o600
_BLOCK = 512
_END = 2 * _BLOCK
_PIECE = 2**20


@dataclass
class BundleFiles:
    """What was found, and a way to the bytes of a plain file. ``close`` ends it; bytes that were read stay.

    Nothing is mapped: the file of a mapping that is cut off meanwhile ends the process, and not by an error.

    Attributes:
        files: Everything that is no directory.
    """

    files: tuple[BundleFile, ...]
    _root: Path
    _archive: BinaryIO | None = None
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def read(self, name: str, most: int) -> memoryview:
        """A file's bytes, at most ``most`` and one: the caller sees that there are too many.

        In a directory it is opened now, and must be a plain file still.

        Raises:
            InvalidError: PATH_UNSAFE.
            SpaceError: DEVICE_MEMORY_SHORT.
            KVStoreError: STORE_IO and its like.
        """
        with os_errors(f"reading {name} of a bundle"):
            if self._archive is not None:
                start, size = self._places[name]
                return _read(self._archive.fileno(), start, min(size, most + 1), name)
            fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise fail("PATH_UNSAFE", f"{name} in a bundle is no plain file any more")
                return _read(fd, 0, min(status.st_size, most + 1), name)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close the archive."""
        if self._archive is not None:
            self._archive.close()


def _read(fd: int, start: int, size: int, name: str) -> memoryview:
    """Exactly so many bytes from there."""
    try:
        room = memoryview(bytearray(size))
    except MemoryError as error:
        raise fail(
            "DEVICE_MEMORY_SHORT", f"there is no memory for the {size} bytes of {name} in a bundle",
            fix="Free memory and try again.", needed=size,
        ) from error  # fmt: skip
    done = 0
    while done < size:
        part = os.pread(fd, min(_PIECE, size - done), start + done)
        if not part:
            raise fail(
                "STORE_IO", f"{name} in a bundle was cut off while it was read", expected=size, found=done,
                fix="Import it when nobody writes it any more.",
            )  # fmt: skip
        room[done : done + len(part)] = part
        done += len(part)
    return room.toreadonly()


@contextmanager
def open_bundle(path: Path) -> Iterator[BundleFiles]:
    """The files of the bundle at ``path``.

    Raises:
        InvalidError: BUNDLE_LAYOUT_INVALID or PATH_UNSAFE.
        UsageError: USAGE, where nothing is there.
        KVStoreError: STORE_IO and its like.
    """
    require_path(path, "the path of a bundle")
    with os_errors("opening a bundle"):
        folder = path.is_dir()
        if not folder and not path.is_file():
            raise fail("USAGE", f"there is no bundle at {path}", expected="a folder or a tar archive", found="neither")
        files = BundleFiles(tuple(_walk(path, "")), path) if folder else _archive(path)
    try:
        yield files
    finally:
        files.close()


def _walk(folder: Path, prefix: str) -> Iterator[BundleFile]:
    with os.scandir(folder) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        name = prefix + item.name
        # A folder's, too: it bounds how deep this goes.
        check_path(name)
        if item.is_dir(follow_symlinks=False):
            yield from _walk(Path(item.path), name + "/")
        else:
            yield BundleFile(name, item.is_file(follow_symlinks=False))


def _archive(path: Path) -> BundleFiles:
    """A tar archive, which stays open; its members are places in it."""
    source = os.fdopen(open_plain(path), "rb")
    try:
        found = list(members(source, path.name))
    except BaseException:
        source.close()
        raise
    places = {member.file.path: (member.start, member.size) for member in found if member.file.plain}
    return BundleFiles(tuple(member.file for member in found), path, source, places)


def write_folder(folder: Path, files: Iterable[tuple[str, Readable]]) -> int:
    """Write files below a new folder, each flushed, then the folders; gives the number of bytes."""
    folder.mkdir(mode=0o700)
    total = 0
    for name, data in files:
        target = folder / name
        target.parent.mkdir(mode=0o700, exist_ok=True)
        total += write_file(target, [data], mode=_FILE_MODE)
    for item in (*folder.iterdir(), folder):
        if item.is_dir():
            sync_path(item)
    return total


def write_tar(path: Path, files: Iterable[tuple[str, Readable]]) -> int:
    """Write files into a new archive that says nothing of this machine; gives the number of bytes."""
    total = 0

    def parts() -> Iterator[Readable]:
        nonlocal total
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), _FILE_MODE
            yield info.tobuf(tarfile.PAX_FORMAT)
            yield data
            yield bytes(-len(data) % _BLOCK)
            total += len(data)
        yield bytes(_END)

    write_file(path, parts(), mode=_FILE_MODE)
    return total

"""The files of a bundle, in a directory or a tar archive: names first, bytes when asked for, nothing copied."""

from __future__ import annotations

import mmap
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import fail
from kvstore.format.archive import members
from kvstore.format.bundle import BundleFile, check_path
from kvstore.format.digest import Readable
from kvstore.store.fs import open_plain, os_errors, sync_path, write_file

__all__ = ["BundleFiles", "open_bundle", "require_path", "write_folder", "write_tar"]

_FILE_MODE = 0o600
_BLOCK = 512
_END = 2 * _BLOCK


@dataclass
class BundleFiles:
    """What was found, and a way to the bytes of a plain file. ``close`` releases them.

    Attributes:
        files: Everything that is no directory.
    """

    files: tuple[BundleFile, ...]
    _root: Path | None = None
    _slices: dict[str, memoryview] = field(default_factory=dict)
    _maps: list[mmap.mmap] = field(default_factory=list)

    def read(self, name: str) -> memoryview:
        """The bytes of a file; in a directory it is opened now, and must be a plain file still."""
        if name not in self._slices:
            assert self._root is not None  # noqa: S101 - an archive's files are all there
            with os_errors(f"reading {name} of a bundle"):
                self._slices[name] = self._map(self._root / name)
        return self._slices[name]

    def release(self, name: str) -> None:
        """Forget a file's bytes; they stay as long as somebody holds a view."""
        if self._root is not None:
            self._slices.pop(name, None)

    def close(self) -> None:
        """Release what nobody holds any more."""
        self._slices.clear()
        for item in self._maps:
            with suppress(BufferError):
                item.close()

    def _map(self, path: Path) -> memoryview:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise fail("PATH_UNSAFE", f"{path.name} in a bundle is no plain file any more")
            if not status.st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)


@contextmanager
def open_bundle(path: Path) -> Iterator[BundleFiles]:
    """The files of the bundle at ``path``.

    Raises:
        InvalidError: BUNDLE_LAYOUT_INVALID or PATH_UNSAFE.
        UsageError: USAGE, where nothing is there.
        KVStoreError: STORE_IO and its like.
    """
    require_path(path)
    with os_errors("opening a bundle"):
        folder = path.is_dir()
        if not folder and not path.is_file():
            raise fail("USAGE", f"there is no bundle at {path}", expected="a folder or a tar archive", found="neither")
        files = BundleFiles(tuple(_walk(path, "")), path) if folder else _archive(path)
    try:
        yield files
    finally:
        files.close()


def require_path(path: Path) -> None:
    """Refuse what the system cannot take for a path at all: it says so by errors that are none of the system's.

    Raises:
        UsageError: USAGE.
    """
    try:
        sound = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        sound = False
    if not sound:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise fail("USAGE", "the path of a bundle", expected="text without U+0000 and half characters", found=shown)


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
    """A tar archive, mapped whole; its members are slices of it."""
    with os.fdopen(open_plain(path), "rb") as source:
        if not os.fstat(source.fileno()).st_size:
            raise fail("BUNDLE_LAYOUT_INVALID", f"{path.name} is empty")
        mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        whole = memoryview(mapped)
        files: list[BundleFile] = []
        result = BundleFiles((), None, {}, [mapped])
        for member in members(source, path.name):
            files.append(member.file)
            if member.file.plain:
                name = member.file.path
                result._slices[name] = whole[member.start : member.start + member.size]  # noqa: SLF001 - made here
    result.files = tuple(files)
    return result


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

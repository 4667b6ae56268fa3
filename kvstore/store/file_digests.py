"""SHA-256 of large files, remembered so that a model's weights are read once.

A digest is remembered by path, size, both times and inode. As in git's index, a file
that changed within the last two seconds before it was read is not remembered: a second
change could leave every one of these numbers as they are. Nor does a write through a
mapping change them while its page waits for the disk, so files are synced before they
are read; on file systems in memory, where nothing waits, such a change goes unseen as
long as the page stays mapped. The memory is a small JSON
file in the user's cache folder; it is best effort, and losing it costs time only.
The names of a hub cache's files, which should be their SHA-256, are not believed: a
download that was cut off, or a file that was written to, keeps its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.errors import UsageError, fail
from kvstore.format.digest import Digest
from kvstore.store.fs import open_plain, replace_file
from kvstore.store.home import user_cache
from kvstore.store.parallel import Stop, run_parallel

__all__ = ["FileDigests", "FileFact", "Stamp", "default_memory", "stamp_of"]

_VERSION: Final = 1
_MAX_REMEMBERED: Final = 16384
_RACY_NS: Final = 2_000_000_000
"""Coarsest time stamp of a file system in use (FAT's 2 s)."""
_CHUNK: Final = 4 * 2**20
_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Stamp(NamedTuple):
    """What tells that a file is still the one that was read."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file's digest and the stamp that it had before and after it was read."""

    digest: Digest
    stamp: Stamp


def default_memory() -> Path:
    """``$XDG_CACHE_HOME/kvstore-digests.json``, else the same in ``~/.cache``; beside the store, not in it.

    For an account without a home it is where no file can be, so that nothing is remembered.
    """
    try:
        folder = user_cache()
    except UsageError:
        folder = Path(os.devnull)
    return folder / "kvstore-digests.json"


def stamp_of(path: Path) -> Stamp:
    """The stamp of the file that ``path`` leads to.

    Raises:
        OSError: if it cannot be looked at.
    """
    return _stamp(path.stat())


class FileDigests:
    """Digests of files, through the memory at one path."""

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = default_memory() if memory is None else memory

    def digest_all(self, paths: Iterable[Path], *, rehash: bool = False) -> dict[Path, FileFact]:
        """Digest files, several at once.

        Args:
            rehash: Read every file, whatever is remembered.

        Raises:
            InvalidError: MODEL_FOLDER_INVALID if one cannot be read or changes meanwhile.
        """
        wanted = list(dict.fromkeys(paths))
        remembered = {} if rehash else self._load()
        facts = {path: fact for path in wanted if (fact := None if rehash else _known(path, remembered))}
        missing = [path for path in wanted if path not in facts]
        if missing:
            started = time.time_ns()
            stop = Stop()
            facts.update(zip(missing, run_parallel(partial(_read, stop=stop), missing, stop=stop), strict=True))
            self._remember({path: facts[path] for path in missing}, started)
        return {path: facts[path] for path in wanted}

    def _load(self) -> dict[str, FileFact]:
        """What is remembered; a damaged or foreign file counts as nothing remembered."""
        try:
            document = json.loads(self._memory.read_bytes())
            if document["version"] != _VERSION:
                return {}
            return {path: _parse(row) for path, row in document["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return {}

    def _remember(self, facts: Mapping[Path, FileFact], started_ns: int) -> None:
        clean = {
            os.path.realpath(path): fact for path, fact in facts.items()
            if max(fact.stamp.mtime_ns, fact.stamp.ctime_ns) + _RACY_NS < started_ns
        }  # fmt: skip
        if not clean:
            return
        kept = {path: fact for path, fact in self._load().items() if path not in clean}
        rows = list({**kept, **clean}.items())[-_MAX_REMEMBERED:]
        document = {"files": {path: [fact.digest, *fact.stamp] for path, fact in rows}, "version": _VERSION}
        with contextlib.suppress(OSError):
            replace_file(self._memory, json.dumps(document).encode())


def _known(path: Path, remembered: Mapping[str, FileFact]) -> FileFact | None:
    stamp = _stamp_or_refuse(path)
    fact = remembered.get(os.path.realpath(path))
    return fact if fact is not None and fact.stamp == stamp else None


def _read(path: Path, *, stop: Stop) -> FileFact:
    hasher = hashlib.sha256()
    try:
        with os.fdopen(open_plain(path), "rb", buffering=0) as file:
            with contextlib.suppress(OSError):  # what cannot be written to disk has no pages that wait
                os.fsync(file.fileno())
            before = _stamp(os.fstat(file.fileno()))
            buffer = bytearray(_CHUNK)
            while count := file.readinto(buffer):
                stop.checkpoint()
                hasher.update(memoryview(buffer)[:count])
            after = _stamp(os.fstat(file.fileno()))
    except OSError as error:
        raise _unreadable(path, error) from error
    if before != after:
        raise fail(
            "MODEL_FOLDER_INVALID", f"{path} changed while it was read", fix="Try again when nothing writes to it."
        )
    return FileFact(Digest(f"sha256:{hasher.hexdigest()}"), after)


def _stamp(info: os.stat_result) -> Stamp:
    return Stamp(info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def _stamp_or_refuse(path: Path) -> Stamp:
    try:
        return stamp_of(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> Exception:
    return fail("MODEL_FOLDER_INVALID", f"{path} cannot be read: {error.strerror}", path=str(path))


def _parse(row: Any) -> FileFact:
    digest, *numbers = row
    if not (isinstance(digest, str) and _HEX.fullmatch(digest.removeprefix("sha256:"))):
        raise ValueError(digest)
    return FileFact(Digest(digest), Stamp(*(int(number) for number in numbers)))

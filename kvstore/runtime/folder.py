"""Finding a model's folder, and reading the files in it that an identity is made of.

A model is named by a folder, by a folder inside a hub cache, or by the id of a model
that is already in the hub cache. Nothing here goes to the network.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.configs import MAX_FOLDER_JSON_BYTES, parse_folder_json
from kvstore.format.digest import Digest
from kvstore.format.model import FileRecord
from kvstore.store.file_digests import FileDigests, Stamp, stamp_of
from kvstore.store.fs import read_file
from kvstore.store.home import user_cache

__all__ = ["Folder", "Located", "hub_cache", "load_errors", "locate", "require_no_pattern"]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)
_REPO_PREFIX: Final = "models--"


@dataclass(frozen=True, slots=True)
class Located:
    """A model folder, and what it is called: ``path``, and for a hub cache ``repo`` and ``revision``."""

    path: Path
    names: dict[str, str]


def hub_cache() -> Path:
    """The hub cache's folder, from the environment variables that the hub's own client reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(value).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    # The hub's client also takes a relative one, against the rules, and is followed.
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else user_cache(instead="HF_HOME")) / "huggingface" / "hub"


def locate(model: str | os.PathLike[str]) -> Located:
    """Find the folder that ``model`` names: a folder first, as mlx-lm does, else an id in the hub cache.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID where there is no such folder.
        UsageError: USAGE where the hub cache is in the home of an account that has none.
    """
    name = os.fspath(model)
    try:
        return _find(model)
    except OSError as error:
        what = f"{name[:200]} cannot be read: {error.strerror}"
        raise fail("MODEL_FOLDER_INVALID", what, fix="Check the path.", path=name) from error
    except RuntimeError as error:
        what = f"there is no such home as that of {name[:200]}"
        raise fail("MODEL_FOLDER_INVALID", what, fix="Name it from /.", path=name) from error


def _find(model: str | os.PathLike[str]) -> Located:
    path = Path(model).expanduser()
    if path.is_dir():
        return _snapshot_of(path, path.name) if (path / "snapshots").is_dir() else _named(path)
    if path.exists():
        raise fail(
            "MODEL_FOLDER_INVALID", f"{path} is a file", expected="a model folder", found="a file",
            fix="Name the folder that holds config.json and the weights.",
        )  # fmt: skip
    name = os.fspath(model)
    if not _HUB_ID.fullmatch(name):
        raise fail("MODEL_FOLDER_INVALID", f"there is no model folder {path}", fix="Check the path.", path=str(path))
    hub = hub_cache()
    repo = hub / (_REPO_PREFIX + name.replace("/", "--"))
    if not (repo / "snapshots").is_dir():
        raise fail(
            "MODEL_FOLDER_INVALID", f"{name!r} is neither a folder nor a model in the hub cache {hub}",
            fix=f"If the hub has it, `hf download {name}` fetches it; kvstore does not use the network.", path=name,
        )  # fmt: skip
    return _snapshot_of(repo, name)


def _snapshot_of(repo: Path, name: str) -> Located:
    """The snapshot that ``main`` points to; the only one where there is no such pointer."""
    try:
        revision = (repo / "refs" / "main").read_text("utf-8", "replace").strip()
    except OSError:
        found = sorted(item.name for item in (repo / "snapshots").iterdir())
        revision = found[0] if len(found) == 1 else ""
    snapshot = repo / "snapshots" / revision
    if not revision or not snapshot.is_dir():
        raise fail(
            "MODEL_FOLDER_INVALID", f"the hub cache has no whole snapshot of {name!r}",
            fix="Download the model again, or name the snapshot's folder.", path=str(repo),
        )  # fmt: skip
    return _named(snapshot)


def _named(path: Path) -> Located:
    full = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links, whose names carry repository and revision
    names = {"path": str(full)}
    repo = full.parent.parent.name
    if full.parent.name == "snapshots" and repo.startswith(_REPO_PREFIX):
        names |= {"repo": repo.removeprefix(_REPO_PREFIX).replace("--", "/"), "revision": full.name}
    return Located(full, names)


def require_no_pattern(path: Path) -> None:
    """Refuse a model's path that mlx-lm would take for a pattern: it globs it whole, and loads what that matches.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    if glob.has_magic(str(path)):
        raise fail(
            "MODEL_FOLDER_INVALID", f"the path of model folder {path} is a pattern to mlx-lm, which may load another",
            expected="no *, ? or [ in it", found=str(path), fix="Rename the folder, or the one above it.",
            path=str(path),
        )  # fmt: skip


@dataclass(slots=True)
class Folder:
    """One folder's files; every file that is read leaves its stamp, so that a later change is seen.

    Attributes:
        path: The folder.
        what: What it is, in messages (``model folder``, ``adapter folder``).
        stamps: Stamp of each file taken before it was read.
    """

    path: Path
    what: str
    digests: FileDigests
    rehash: bool = False
    stamps: dict[Path, Stamp] = field(default_factory=dict)

    def beside(self, path: Path, what: str) -> Folder:
        """Another folder of the same identity: one memory, one set of stamps."""
        return Folder(path, what, self.digests, self.rehash, self.stamps)

    def names(self, *patterns: str) -> list[str]:
        """Names directly in the folder that match one of the patterns, ascending.

        Raises:
            InvalidError: MODEL_FOLDER_INVALID where the folder cannot be listed.
        """
        try:
            found = os.listdir(self.path)  # noqa: PTH208 - names are wanted, and an error for the whole
        except OSError as error:
            raise fail(
                "MODEL_FOLDER_INVALID", f"{self.what} {self.path} cannot be read: {error.strerror}",
                path=str(self.path),
            ) from error  # fmt: skip
        return sorted(name for name in found if any(fnmatchcase(name, pattern) for pattern in patterns))

    def names_below(self, suffix: str) -> list[str]:
        """Relative names in the folders within that end so, ascending; hidden folders are not looked into."""
        found, seen = [], {os.path.realpath(self.path)}
        for at, folders, files in os.walk(self.path, followlinks=True):
            here = Path(at)
            inner = {name: os.path.realpath(here / name) for name in folders if not name.startswith(".")}
            folders[:] = [name for name, real in inner.items() if real not in seen]
            seen.update(inner.values())
            if here != self.path:
                found += [os.path.relpath(here / name, self.path) for name in files if name.endswith(suffix)]
        return sorted(found)

    def has(self, name: str) -> bool:
        """Whether there is such a name, even if what it leads to is gone."""
        return os.path.lexists(self.path / name)

    def need(self, *patterns: str, what: str) -> list[str]:
        """Like :meth:`names`, but at least one.

        Raises:
            InvalidError: MODEL_FOLDER_INVALID naming what is missing.
        """
        found = self.names(*patterns)
        if not found:
            raise fail(
                "MODEL_FOLDER_INVALID", f"{self.what} {self.path} has no {what}",
                expected=" or ".join(patterns), found="none", missing=patterns[0], path=str(self.path),
            )  # fmt: skip
        return found

    def text(self, name: str) -> str:
        """A text file, with the line ends made one kind."""
        try:
            return self._bytes(name).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            raise fail("MODEL_FOLDER_INVALID", f"{self.path / name} is not UTF-8") from None

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return parse_folder_json(self._bytes(name), str(self.path / name))

    def json_if(self, name: str) -> dict[str, Any] | None:
        """A JSON object, or None where there is no such file."""
        return self.json(name) if self.has(name) else None

    def records(self, names: Iterable[str]) -> tuple[FileRecord, ...]:
        """Name, size and digest of files, ascending by name."""
        paths = {name: self.path / name for name in sorted(set(names))}
        facts = self.digests.digest_all(paths.values(), rehash=self.rehash)
        self.stamps |= {path: fact.stamp for path, fact in facts.items()}
        return tuple(FileRecord(name, facts[path].stamp.size, facts[path].digest) for name, path in paths.items())

    def digest(self, name: str) -> Digest:
        """The digest of one file."""
        return self.records([name])[0].digest

    def _bytes(self, name: str) -> bytes:
        path = self.path / name
        try:
            self.stamps[path] = stamp_of(path)
            data = read_file(path, MAX_FOLDER_JSON_BYTES)
        except FileNotFoundError as error:
            raise fail(
                "MODEL_FOLDER_INVALID", f"{self.what} {self.path} has no {name}",
                fix="Name a folder that mlx-lm can load.", missing=name, path=str(self.path),
            ) from error
        except OSError as error:
            raise fail("MODEL_FOLDER_INVALID", f"{path} cannot be read: {error.strerror}", path=str(path)) from error
        return data


@contextmanager
def load_errors(path: Path) -> Iterator[None]:
    """Turn what mlx-lm raises for a folder that it cannot load into one typed error.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    try:
        yield
    except KVStoreError:
        raise
    except (Exception, SystemExit) as error:
        # Anything: transformers has error types of its own, and a model file that lacks a package calls exit.
        text = str(error).strip() or type(error).__name__
        raise fail("MODEL_FOLDER_INVALID", f"mlx-lm cannot load {path}: {text[:500]}", path=str(path)) from error

"""Where a store is, what marks it as one, and how one comes into being.

``kvstore.json`` is written first and is what makes a directory a store: everything else
in it can be made again. A directory that holds anything and lacks the file is somebody
else's, and is refused rather than littered.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.fields import Fields
from kvstore.format.json import canonical_bytes, parse_canonical
from kvstore.store.fs import (
    DIR_MODE,
    make_dir,
    os_error,
    os_errors,
    publish_new,
    read_file,
    require_path,
    sync_path,
    write_file,
)
from kvstore.store.home import user_cache

__all__ = [
    "LAYOUT_VERSION", "STORE_MEDIA_TYPE", "Paths", "StoreConfig", "default_root", "ensure_layout", "open_config",
    "store_root",
]  # fmt: skip

STORE_MEDIA_TYPE: Final = "application/vnd.kvstore.store+json"
LAYOUT_VERSION: Final = 1
_CONFIG_NAME: Final = "kvstore.json"
_CONFIG_LIMIT: Final = 65536
_STORE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CACHEDIR_TAG: Final = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# This directory is a cache made by kvstore; backup programs may leave it out.\n"
)
_TEMPORARY: Final = ".kvstore-"
_NOT_CONTENT: Final = frozenset({"lost+found", ".DS_Store", ".Trashes", ".fseventsd", "CACHEDIR.TAG"})
"""Names that a volume or a half-made store may hold without being anybody's data."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The places in a store, below its root."""

    root: Path

    @property
    def config(self) -> Path:
        """The marker file."""
        return self.root / _CONFIG_NAME

    @property
    def index(self) -> Path:
        """The SQLite index."""
        return self.root / "index.sqlite"

    @property
    def manifests(self) -> Path:
        """Manifests by entry id."""
        return self.root / "manifests"

    @property
    def objects(self) -> Path:
        """Objects by payload digest and stored digest."""
        return self.root / "objects"

    @property
    def receipts(self) -> Path:
        """Receipts by digest."""
        return self.root / "receipts"

    @property
    def tmp(self) -> Path:
        """Sessions of temporary files."""
        return self.root / "tmp"

    @property
    def quarantine(self) -> Path:
        """Files that were proved wrong, each with a reason."""
        return self.root / "quarantine"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Every directory directly below the root."""
        return (self.manifests, self.objects, self.receipts, self.tmp, self.quarantine)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The content of ``kvstore.json``."""

    store_id: str

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return canonical_bytes({
            "features": [], "layout_version": LAYOUT_VERSION, "media_type": STORE_MEDIA_TYPE, "store_id": self.store_id,
        })  # fmt: skip


def default_root() -> Path:
    """``$XDG_CACHE_HOME/kvstore``, else ``~/.cache/kvstore``. Raises as :func:`kvstore.store.home.user_cache`."""
    return user_cache(instead="name the store, by its path or with --store or KVSTORE_DIR") / "kvstore"


def store_root(path: Path) -> Path:
    """A store's path as it is used: absolute, and with ``~`` in words of the system.

    Raises:
        UsageError: USAGE where it names nothing that could be there.
    """
    require_path(path, "the path of a store")
    try:
        root = path.expanduser().absolute()
    except RuntimeError as error:
        raise fail("USAGE", f"the path of a store, {path}: there is no such home", fix="Name it from /.") from error
    except FileNotFoundError as error:
        raise fail("USAGE", f"{path} lies in a working directory that is gone", fix="Name it from /.") from error
    try:
        root.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise fail("USAGE", "the path of a store", expected="one that the system takes", found=str(root)) from error
    return root


def open_config(root: Path, *, create: bool) -> StoreConfig:
    """Read the marker of the store at ``root``, or make one in an absent or empty directory.

    Raises:
        StoreError: STORE_MISSING, STORE_NOT_OURS, STORE_UNREADABLE, STORE_READ_ONLY.
        UnsupportedError: STORE_VERSION_UNSUPPORTED.
    """
    try:
        return _read(root)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise os_error(error, f"reading the store at {root}") from error
    names = _content(root)
    if names:
        raise fail(
            "STORE_NOT_OURS", f"{root} holds files but no {_CONFIG_NAME}", found=names[0],
            fix="Name an empty or new directory, or a store.",
        )  # fmt: skip
    if not create:
        raise fail(
            "STORE_MISSING", f"there is no store at {root}",
            fix="Check the path; `kvstore init`, or a first put, makes a store.",
        )  # fmt: skip
    with os_errors(f"creating a store at {root}", writing=True):
        return write_config(root, StoreConfig(secrets.token_hex(16)))


def write_config(root: Path, config: StoreConfig) -> StoreConfig:
    """Write the marker unless another process was first; returns the one that counts. Raises OSError."""
    root.mkdir(DIR_MODE, parents=True, exist_ok=True)
    temporary = root / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
    write_file(temporary, [config.to_bytes()])
    publish_new(temporary, Paths(root).config)
    sync_path(root)
    with suppress(PermissionError):
        # One may own a directory whose parent one may not read.
        sync_path(root.parent)
    return _read(root)


def ensure_layout(paths: Paths) -> None:
    """Make whichever of the store's directories is not there; raises OSError."""
    for folder in paths.folders:
        make_dir(folder)
    tag = paths.root / "CACHEDIR.TAG"
    if not tag.exists():
        temporary = paths.root / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}"
        write_file(temporary, [_CACHEDIR_TAG], mode=0o600)
        publish_new(temporary, tag)
    sync_path(paths.root)


def _read(root: Path) -> StoreConfig:
    data = read_file(root / _CONFIG_NAME, _CONFIG_LIMIT)
    try:
        return _parse(data, root)
    except KVStoreError as error:
        if error.code == "STORE_VERSION_UNSUPPORTED":
            raise
        raise fail(
            "STORE_NOT_OURS", f"{root / _CONFIG_NAME} is not a store's: {error.message}",
            fix="Name a store, or a new directory.",
        ) from error  # fmt: skip


def _parse(data: bytes, root: Path) -> StoreConfig:
    value: Any = parse_canonical(data, _CONFIG_LIMIT, _CONFIG_NAME)
    head = Fields(value, "", None)
    head.require_media_type(STORE_MEDIA_TYPE)
    version, features = head.integer("layout_version"), head.items("features", limit=256)
    if version != LAYOUT_VERSION:
        raise _newer(root, "layout version", LAYOUT_VERSION, version)
    if features:
        raise _newer(root, "features", "none", [str(name)[:64] for name, _ in features])
    unknown = sorted(set(value) - {"features", "layout_version", "media_type", "store_id"})
    if unknown:
        raise _newer(root, "fields", "those of layout version 1", unknown)
    return StoreConfig(head.text("store_id", grammar=_STORE_ID))


def _newer(root: Path, what: str, expected: Any, found: Any) -> KVStoreError:
    return fail(
        "STORE_VERSION_UNSUPPORTED", f"the store at {root} has other {what}", expected=expected, found=found,
        fix="Upgrade kvstore.",
    )  # fmt: skip


def _content(root: Path) -> list[str]:
    """Names in the directory that may be somebody's; empty where it is not there."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        file = next((path for path in (root, *root.parents) if path.exists()), root)
        raise fail(
            "STORE_NOT_OURS", f"{file} is a file", expected="a directory", found="a file", fix="Name a directory.",
        ) from None  # fmt: skip
    except OSError as error:
        raise os_error(error, f"reading {root}") from error
    return [name for name in names if name not in _NOT_CONTENT and not name.startswith(_TEMPORARY)]

"""Manifests and receipts as files, named by the digest of their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.format.digest import Digest, digest_hex
from kvstore.store.fs import list_files, make_dir, os_errors, publish_file, read_file, remove_file
from kvstore.store.quarantine import clear_place
from kvstore.store.temp import Session

__all__ = ["Documents"]

_NAME: Final = re.compile(r"([0-9a-f]{64})\.json", re.ASCII)


class Documents:
    """One folder of documents, in 256 folders by the first two digits; every method raises typed errors."""

    def __init__(self, root: Path, quarantine: Path, *, full: bool = False) -> None:
        """Use ``root``; nothing is touched yet."""
        self.root = root
        self._quarantine = quarantine
        self._full = full

    def path(self, digest: Digest) -> Path:
        """The file of that digest."""
        name = digest_hex(digest)
        return self.root / name[:2] / f"{name}.json"

    def relative(self, digest: Digest) -> str:
        """Its path below the store's root, as the index notes it."""
        return self.path(digest).relative_to(self.root.parent).as_posix()

    def owns(self, path: str) -> bool:
        """Whether a path below the store's root is that of a document in this folder."""
        match = _NAME.fullmatch(path.rpartition("/")[2])
        return match is not None and path == self.relative(Digest(f"sha256:{match[1]}"))

    def stage(self, session: Session, digest: Digest, data: bytes) -> Path:
        """Write a temporary file, durable after ``session.sync()``; the folder for it is made now."""
        with os_errors("writing a document", writing=True):
            make_dir(self.path(digest).parent)
            return session.write([data])

    def publish(self, temporary: Path, digest: Digest) -> None:
        """Move a staged file to its name; what is no file and stands there is set aside."""
        clear_place(self.path(digest), self._quarantine, full=self._full)
        with os_errors("publishing a document", writing=True):
            publish_file(temporary, self.path(digest))

    def folders(self, digest: Digest) -> set[Path]:
        """Directories to be flushed before it is durable that this document is there."""
        return {self.root, self.path(digest).parent}

    def read(self, digest: Digest, limit: int) -> bytes | None:
        """The bytes, at most ``limit`` and one; None where the file is not there."""
        with os_errors("reading a document"):
            try:
                return read_file(self.path(digest), limit)
            except FileNotFoundError:
                return None

    def remove(self, digest: Digest) -> bool:
        """Unlink the file; tells whether it was there."""
        with os_errors("removing a document", writing=True):
            return remove_file(self.path(digest))

    def files(self) -> Iterator[tuple[Path, Digest | None]]:
        """Every file, with the digest that its name states, or None for a foreign file."""
        with os_errors("listing documents"):
            for path in list_files(self.root):
                match = _NAME.fullmatch(path.name)
                ours = match is not None and path.parent == self.root / match[1][:2]
                yield path, Digest(f"sha256:{match[1]}") if match is not None and ours else None

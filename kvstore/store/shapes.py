"""What models' own caches look like, remembered so that a match need not import the model's library to know it.

A shape follows from the model, the options and the release of mlx-lm. It is remembered in the user's cache folder,
best effort: without it a model is probed, which takes a second or two, most of it for imports. A wrong one could
only make a match miss or find what a load then refuses, because a load looks at the model itself.
"""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kvstore import __version__
from kvstore.format.compat import Signature
from kvstore.format.digest import Digest
from kvstore.store.file_digests import default_memory
from kvstore.store.fs import replace_file

__all__ = ["Shapes", "default_shapes"]

_VERSION: Final = 1
_MOST: Final = 64


def default_shapes() -> Path:
    """Beside the remembered digests of model files."""
    return default_memory().with_name("kvstore-shapes.json")


class Shapes:
    """The signatures in one file; a damaged or foreign file counts as none."""

    def __init__(self, path: Path | None = None) -> None:
        """Use the file at ``path``, by default the user's own."""
        self._path = default_shapes() if path is None else path

    def get(self, model: Digest, options: str) -> Signature | None:
        """The signature of a model's caches under these options, if it is known."""
        found = self._load().get(_key(model, options))
        leaves = found.values() if isinstance(found, dict) else ()
        return found if leaves and all(isinstance(leaf, dict) and "kind" in leaf for leaf in leaves) else None

    def note(self, model: Digest, options: str, signature: Signature) -> None:
        """Remember a signature; where that is not possible it is forgotten."""
        known, key = self._load(), _key(model, options)
        row = {path: dict(leaf) for path, leaf in signature.items()}
        if known.get(key) == row:
            return
        rows = {**{name: item for name, item in known.items() if name != key}, key: row}
        document = {"version": _VERSION, "shapes": dict(list(rows.items())[-_MOST:])}
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(document).encode() + b"\n")

    def _load(self) -> dict[str, Any]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["version"] == _VERSION:
                return dict(document["shapes"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return {}


def _key(model: Digest, options: str) -> str:
    try:
        library = version("mlx-lm")
    except PackageNotFoundError:
        library = "none"
    return f"{model} {options} mlx-lm {library} kvstore {__version__}"

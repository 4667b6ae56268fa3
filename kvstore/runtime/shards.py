"""The names of tensors in a model's weight files, read from their headers alone.

mlx-lm reads the files in the order in which the file system lists them, and of two tensors
of one name the last one counts. So what such a folder loads as is not in its files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from kvstore.errors import fail
from kvstore.runtime.folder import Folder
from kvstore.store.fs import open_plain

__all__ = ["require_distinct_tensors"]

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100 * 2**20
"""The limit of the safetensors library."""
_METADATA: Final = "__metadata__"


def require_distinct_tensors(folder: Folder, files: list[str]) -> None:
    """Prove that no tensor stands in two of the weight files.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID naming the tensor and both files.
    """
    if len(files) < 2:
        return
    seen: dict[str, str] = {}
    for file in files:
        for name in _tensor_names(folder.path / file):
            other = seen.setdefault(name, file)
            if other != file:
                raise fail(
                    "MODEL_FOLDER_INVALID", f"{folder.what} {folder.path} has tensor {name!r} in two weight files",
                    expected="one of them", found=[other, file],
                    fix="Move the files away that are no part of the model; their order is left to chance.",
                    path=str(folder.path),
                )  # fmt: skip


def _tensor_names(path: Path) -> list[str]:
    """The names; none where the file is not what mlx-lm can load, or cannot be read, which others will say."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else None
    except (OSError, ValueError, RecursionError):
        return []
    return [name for name in header if name != _METADATA] if isinstance(header, dict) else []

"""Files that were proved wrong, or stand where none may: out of the way, with the reason beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.store.fs import make_dir, os_errors, sync_path, write_file

__all__ = ["clear_place", "set_aside"]


def set_aside(path: Path, quarantine: Path, reason: Mapping[str, Any], *, full: bool = False) -> None:
    """Move what is at ``path`` to ``quarantine``, where nothing reads it but people; raises typed errors."""
    target = quarantine / f"{time.time_ns()}-{path.name}"
    with os_errors(f"setting {path.name} aside", writing=True):
        make_dir(quarantine)
        if path.exists():
            path.replace(target)
        document = {"file": path.name, "found_at_ns": time.time_ns(), **reason}
        write_file(Path(f"{target}.reason.json"), [json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"])
        sync_path(quarantine, full=full)


def clear_place(path: Path, quarantine: Path, *, full: bool = False) -> None:
    """Set a directory aside that stands where a file is to be moved, which no move would replace."""
    with os_errors(f"looking at {path.name}"):
        stands = path.is_dir()
    if stands:
        set_aside(path, quarantine, {"code": "OBJECT_MISSING", "message": "a directory stood in its place"}, full=full)

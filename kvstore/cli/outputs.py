"""Files that a verb writes where somebody said: one rule for all of them.

Where anything is already, nothing is written without ``--force``. With it a plain file or a
link is replaced, and nothing else: no device is written to, no pipe waited for, and what a
link leads to stays as it is. A file stands under its name only when it is whole, and what was
written until a failure or a signal is removed.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.errors import KVStoreError, fail

__all__ = ["fresh_file", "require_output", "write_file"]

_REPLACE: Final = "Use --force to replace it."
_ELSEWHERE: Final = "Name a path where nothing is."


def require_output(path: Path, *, force: bool = False, replaceable: bool = True) -> None:
    """Refuse to work for a file that could not be written in the end.

    Args:
        force: Whether a plain file or a link there may be replaced.
        replaceable: Whether the verb can be told so.

    Raises:
        UsageError: USAGE where something is there that may not be replaced, or the folder is not there.
    """
    try:
        if not path.parent.is_dir():
            raise fail("USAGE", f"{path} cannot be written: there is no folder {path.parent}", fix="Make it first.")
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from error
    if not force:
        raise fail("USAGE", f"{path} exists", fix=_REPLACE if replaceable and _is_file(mode) else _ELSEWHERE)
    if not _is_file(mode):
        raise fail("USAGE", f"{path} is not replaced: it is neither a plain file nor a link", fix=_ELSEWHERE)


@contextmanager
def fresh_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Where to write what shall stand at ``path``, a file or a folder: beside it; it moves there when the body ends.

    Raises:
        UsageError: as :func:`require_output`, and USAGE where it cannot be written.
    """
    require_output(path, force=force)
    try:
        with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            try:
                yield temporary
            except KVStoreError as error:
                raise _about(path, temporary, error) from error
            _publish(temporary, path, force=force)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Write a file that the user named; raises as :func:`fresh_file`."""
    with fresh_file(path, force=force) as temporary:
        temporary.write_bytes(data)


def _publish(temporary: Path, path: Path, *, force: bool) -> None:
    """Something may have come there while the work was done."""
    from kvstore.store.fs import publish_new

    require_output(path, force=force)
    if force:
        temporary.replace(path)
    elif not publish_new(temporary, path):
        raise fail("USAGE", f"{path} exists", fix=_REPLACE)


def _is_file(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _about(path: Path, temporary: Path, error: KVStoreError) -> KVStoreError:
    """The error of a writer, in the words of who named the file."""
    message = error.message.replace(os.fspath(temporary), os.fspath(path))
    return type(error)(error.code, message, error.detail)


def _unwritable(path: Path, error: OSError) -> KVStoreError:
    return fail("USAGE", f"{path} cannot be written: {error.strerror}")

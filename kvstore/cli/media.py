"""``--media``: what images, sounds and videos stand behind a prompt's tokens, from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvstore.cli.session import PATH
from kvstore.errors import KVStoreError, fail

if TYPE_CHECKING:
    from kvstore.format.digest import Digest
    from kvstore.format.prefix import MediaItem
    from kvstore.runtime.identity import ModelIdentity

__all__ = ["media_option", "read_media"]

F = TypeVar("F", bound=Callable[..., Any])
_MAX_BYTES: Final = 16 * 2**20
_PIECE_BYTES: Final = 2**20


def media_option(function: F) -> F:
    """``--media``."""
    return click.option(
        "--media", type=PATH, metavar="FILE",
        help="JSON array of the media in the prompt: start, length, kind, and digest or file of each.",
    )(function)  # fmt: skip


def read_media(path: Path | None, identity: ModelIdentity, token_count: int) -> tuple[MediaItem, ...]:
    """The media items that a file describes; none without a file.

    An item's bytes are named by ``digest``, or by ``file``, which is read from beside the descriptor. Without a
    ``processor`` the model's own counts.

    Raises:
        UsageError: USAGE where a file cannot be read or is no JSON array, or an item has both names or neither.
        InvalidError: codes of step 3 of the reading order, naming the field.
    """
    if path is None:
        return ()
    from kvstore.format.fields import Fields
    from kvstore.format.prefix import parse_media

    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise fail("USAGE", f"the media file {path} is not JSON: {str(error)[:80]}") from None
    if not isinstance(value, list):
        raise fail("USAGE", f"the media file {path}", expected="a JSON array", found=type(value).__name__)
    items = [_complete(item, f"media[{at}]", path.parent, identity) for at, item in enumerate(value)]
    return parse_media(Fields({"media": items}, "", ("media",)), "media", token_count)


def _complete(item: Any, where: str, folder: Path, identity: ModelIdentity) -> Any:
    """An item with the digest of its file, and the model's processor where none is named."""
    if not isinstance(item, dict):
        return item  # for the parser to refuse
    if ("file" in item) == ("digest" in item):
        raise fail("USAGE", f"{where} names its bytes by digest or by file", expected="one of them", found=sorted(item))
    whole = {key: value for key, value in item.items() if key != "file"}
    if "file" in item:
        whole["digest"] = _digest(folder / str(item["file"]))
    if "processor" not in item:
        if identity.model.processor is None:
            raise fail("USAGE", f"{where} needs a processor's digest: the model's folder has no processor's config")
        whole["processor"] = identity.model.processor
    return whole


def _read(path: Path) -> bytes:
    from kvstore.store.fs import read_file

    try:
        data = read_file(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if len(data) > _MAX_BYTES:
        raise fail("USAGE", f"the media file {path}", expected=f"at most {_MAX_BYTES} bytes", found="more")
    return data


def _digest(path: Path) -> Digest:
    from kvstore.format.digest import sha256_digest
    from kvstore.store.fs import open_plain

    try:
        with os.fdopen(open_plain(path), "rb") as file:
            return sha256_digest(iter(lambda: file.read(_PIECE_BYTES), b""))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> KVStoreError:
    # No path at all is no error of the system's.
    return fail("USAGE", f"{path} cannot be read: {getattr(error, 'strerror', None) or 'that is no path'}")

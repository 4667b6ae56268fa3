"""Tokens that stand for images, sounds and videos: their ids say nothing of what was seen.

Two prompts with the same ids and other pictures have other caches. So where a model's
config says which ids stand for media, a prefix with such ids needs the digests of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvstore.errors import fail
from kvstore.format.prefix import MediaItem, TokenIds

__all__ = ["media_token_ids", "require_media"]

_KINDS: Final = ("image", "video", "audio", "media", "vision", "patch", "image_pad", "image_patch", "media_placeholder")
_NAMES: Final = tuple(f"{kind}_token_{what}" for kind in _KINDS for what in ("id", "index"))


def media_token_ids(config: Mapping[str, Any]) -> dict[int, str]:
    """Ids that stand for media, by the config's own name for them: from it, else from its ``text_config``."""
    inner = config.get("text_config")
    parts = (inner if isinstance(inner, dict) else {}, config)
    return {
        value: name for part in parts for name in _NAMES
        if type(value := part.get(name)) is int and value >= 0
    }  # fmt: skip


def require_media(ids: TokenIds, media: Sequence[MediaItem], known: Mapping[int, str]) -> None:
    """Prove that every token that stands for a medium lies within a media item.

    Raises:
        InvalidError: MEDIA_DIGEST_MISSING, naming the first one that does not.
    """
    if not known:
        return
    bare = np.isin(ids, np.fromiter(known, dtype=np.int64))
    for item in media:
        bare[item.start : item.start + item.length] = False
    found = np.flatnonzero(bare)
    if found.size:
        at = int(found[0])
        raise fail(
            "MEDIA_DIGEST_MISSING", f"token {at} stands for a medium ({known[int(ids[at])]})",
            expected="a media item that covers it", found=f"{found.size} such tokens without one",
            fix="Pass media=[MediaItem(...)] with the digest of all bytes of each.", tokens=int(found.size),
        )  # fmt: skip

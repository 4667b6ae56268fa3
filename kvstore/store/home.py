"""Where the user's own files are: the cache folder, and an account without a home as a typed error."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import fail

__all__ = ["user_cache"]


def user_cache(*, instead: str = "XDG_CACHE_HOME") -> Path:
    """``$XDG_CACHE_HOME``, else ``~/.cache``; a relative XDG path is ignored, as its rules say.

    Args:
        instead: What can be done but to set HOME, for the message.

    Raises:
        UsageError: USAGE where the account has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base)
    try:
        return Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise fail(
            "USAGE", "this account has no home, and so no cache folder", fix=f"Set HOME, or {instead}."
        ) from error

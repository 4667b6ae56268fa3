"""The release of mlx-lm that the tests run with: what is wrong in the older one, and sizes that it can handle."""

from __future__ import annotations

from typing import Any, Final

import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import ChunkedKVCache

from kvstore.runtime.older_mlx_lm import trims_by_buffer

__all__ = ["CHUNK", "OLDER", "held", "wrong_in_older"]

OLDER: Final = trims_by_buffer(ChunkedKVCache)
"""Whether mlx-lm is from before 0.32."""
CHUNK: Final = 256 if OLDER else 32
"""Tokens in a chunk; the older release goes wrong where they are no multiple of its buffers' step."""


def held(cache: Any) -> Any:
    """Keys and values as the next token reads them, head room left out; the older release has no method for it."""
    rows = getattr(cache, "rows", cache.offset - getattr(cache, "start_position", 0))
    return tree_map(lambda array: array[..., :rows, :], (cache.keys, cache.values))


def wrong_in_older(reason: str) -> pytest.MarkDecorator:
    """The older release cannot go on from this state itself, saved or not; it is seen if that ever changes."""
    return pytest.mark.xfail(OLDER, reason=f"mlx-lm before 0.32: {reason}", strict=True)

"""Caches that no model makes by itself: quantized, windowed with pinned rows, concatenated, thinned."""

from __future__ import annotations

from kvstore.runtime.probe import CacheOptions
from tests.families.base import WINDOW, Family

_WIDE = {"head_dim": 32}

SHAPED = (
    *(
        Family("qwen3", _WIDE, options=CacheOptions(kv_bits=bits, kv_group_size=32), label=f"qwen3, {bits} bits")
        for bits in (2, 3, 4, 5, 6, 8)
    ),
    Family("qwen3", options=CacheOptions(max_kv_size=WINDOW), label="qwen3, window"),
    Family("qwen3", options=CacheOptions(concatenated=True), label="qwen3, concatenated"),
    Family("qwen3", thinned=True, label="qwen3, thinned"),
    Family("qwen3", _WIDE, options=CacheOptions(kv_bits=4, kv_group_size=32), thinned=True,
           label="qwen3, thinned, 4 bits"),
)  # fmt: skip

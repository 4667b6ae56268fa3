"""Wrote the files beside it: small caches as old releases of mlx_lm saved them, with each release first on the path.

::

    PYTHONPATH=<mlx-lm 0.28.0> python tests/runtime/prompt_files/make.py 0.28

``main-2026-08`` is release 0.31.3 with ``mlx_lm/models/cache.py`` of the repository's commit 11a6ce75. The files are
kept because no environment holds all of these releases; the tests make the same caches with the installed one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

FOLDER = Path(__file__).parent


def keys_values(rows: int, seed: int, width: int) -> tuple[mx.array, mx.array]:
    shape = (1, 1, rows, width)
    keys, values = (mx.random.normal(shape, key=mx.random.key(at)) for at in (seed, seed + 100))
    return keys.astype(mx.float16), values.astype(mx.float16)


def fed(cache: Any, steps: list[int], width: int = 4) -> Any:
    for at, rows in enumerate(steps):
        cache.update_and_fetch(*keys_values(rows, at, width))
    return cache


def filled(cache: Any) -> Any:
    cache[0] = mx.arange(8, dtype=mx.float32).reshape(1, 2, 4)
    cache[1] = mx.arange(6, dtype=mx.float32).reshape(1, 6)
    return cache


def trimmed_in_front(cache: Any) -> Any:
    """Without head room, of which releases before 0.32 drop valid rows instead."""
    fed(cache, [12])
    cache.keys, cache.values = cache.keys[..., :12, :], cache.values[..., :12, :]
    cache.maybe_trim_front()
    return cache


def padded(cache: Any) -> Any:
    cache.left_padding = mx.array([3])
    return cache


def caches(module: Any, name: str) -> list[Any]:
    """The caches of one file, made with the classes of ``mlx_lm.models.cache``."""
    def arrays() -> Any:
        return filled(module.MambaCache() if name == "mamba" else module.ArraysCache(2))

    plain, few = fed(module.KVCache(), [5]), fed(module.KVCache(), [4])
    if name in ("mamba", "arrays"):
        return [arrays(), few]
    made = {
        "plain": lambda: [plain, fed(module.KVCache(), [3, 2])],
        "quantized": lambda: [fed(module.QuantizedKVCache(group_size=32, bits=4), [5], 32)],
        "ring-open": lambda: [fed(module.RotatingKVCache(8, keep=0), [5])],
        "ring-wrapped": lambda: [fed(module.RotatingKVCache(8, keep=2), [5, *[1] * 7])],
        "chunked": lambda: [fed(module.ChunkedKVCache(8), [5]), plain],
        "chunked-front": lambda: [trimmed_in_front(module.ChunkedKVCache(8)), fed(module.KVCache(), [12])],
        "list": lambda: [
            module.CacheList(plain, fed(module.KVCache(), [5])), module.CacheList(fed(module.KVCache(), [5]), plain),
        ],
        "list-mixed": lambda: [module.CacheList(arrays(), plain)],
        "padded": lambda: [padded(arrays()), few],
    }  # fmt: skip
    return made[name]()


def main(release: str) -> None:
    from mlx_lm.models import cache as module

    for name in (
        "plain", "quantized", "ring-open", "ring-wrapped", "mamba", "arrays", "chunked", "chunked-front", "list",
        "list-mixed", "padded",
    ):  # fmt: skip
        if name == "padded" and release != "main-2026-08":
            continue  # before it, padding was not saved
        try:
            made = caches(module, name)
        except AttributeError:
            continue  # a class that this release does not have
        path = FOLDER / f"{release}-{name}.safetensors"
        module.save_prompt_cache(str(path), made, {"model": "m", "tokenizer_config": "{}"})


if __name__ == "__main__":
    main(sys.argv[1])

"""Live caches in any state, and a model-free stand-in for attention that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstore.errors import KVStoreError

HEADS, SIZE = 2, 64
UINTS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def keys_values(rows: int, seed: int, *, dtype: mx.Dtype = mx.bfloat16, size: int = SIZE) -> tuple[mx.array, mx.array]:
    """Random keys and values of ``rows`` tokens, the same for the same seed."""
    key = mx.random.key(seed)
    first, second = mx.random.split(key)
    shape = (1, HEADS, rows, size)
    return mx.random.normal(shape, key=first).astype(dtype), mx.random.normal(shape, key=second).astype(dtype)


def feed(cache: Any, steps: Sequence[int], *, seed: int = 0, dtype: mx.Dtype = mx.bfloat16, size: int = SIZE) -> Any:
    """Update ``cache`` with ``steps`` tokens at a time."""
    for number, rows in enumerate(steps):
        cache.update_and_fetch(*keys_values(rows, 1000 * seed + number, dtype=dtype, size=size))
    return cache


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    """An array's bits, as unsigned integers."""
    return np.array(array.view(UINTS[array.dtype.size]))


def same_bits(left: Any, right: Any) -> bool:
    """Whether two arrays, or two trees of arrays, are equal to the bit."""
    if isinstance(left, mx.array):
        return left.dtype == right.dtype and left.shape == right.shape and bool((bits(left) == bits(right)).all())
    return len(left) == len(right) and all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def fetched(
    cache: Any, steps: Sequence[int], *, seed: int = 77, dtype: mx.Dtype = mx.bfloat16, size: int = SIZE
) -> list[Any]:
    """What an attention layer would read from ``cache`` at each of the next ``steps``."""
    seen = []
    for number, rows in enumerate(steps):
        read = cache.update_and_fetch(*keys_values(rows, 1000 * seed + number, dtype=dtype, size=size))
        mx.eval(read)
        seen.append(read)
    return seen


def odd_bits(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Random bits: NaN payloads, infinities, subnormals and −0 among them."""
    width = dtype.size
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 2 ** (8 * width), size=shape, dtype=f"<u{width}")
    flat = raw.reshape(-1)
    exponent = {mx.bfloat16: 0x7F80, mx.float16: 0x7C00, mx.float32: 0x7F800000}[dtype]
    special = [exponent, exponent | 1, exponent | 0x15, 1, 1 << (8 * width - 1)]
    flat[: len(special)] = special[: flat.size]
    return mx.array(raw).view(dtype)


def same_future(left: Any, right: Any, steps: list[int], **options: Any) -> bool:
    return same_bits(fetched(left, steps, **options), fetched(right, steps, **options))


def code_of(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(KVStoreError) as caught:
        call(*args, **options)
    return caught.value.code


def state_of(cache: Any) -> dict[str, Any]:
    """Every attribute of a cache, arrays as identities and bits."""
    return {
        name: (value.shape, bits(value).tobytes()) if isinstance(value, mx.array) else value
        for name, value in vars(cache).items()
    }

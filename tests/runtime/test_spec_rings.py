"""The rings that SPEC.md shows are those of mlx-lm, and entries hold their rows and index as it says."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from kvstore.runtime.kinds import describe
from scripts.spec_example import SPEC

BLOCK = re.search(r"<!-- example rings -->\n```text\n[^\n]*\n(.*?)```", SPEC.read_text(), re.DOTALL)
assert BLOCK
ROWS = [re.split(r"\s{2,}", line.strip()) for line in BLOCK[1].splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:3]) for row in ROWS])
def test_a_ring_is_as_the_text_shows_it(row: list[str]) -> None:
    offset, size, keep, index = (int(cell) for cell in row[:4])
    cache = RotatingKVCache(size, keep=keep)
    for position in range(offset):
        cache.update_and_fetch(*[mx.full((1, 1, 1, 2), position, mx.float32)] * 2)
    lying = cache.keys[0, 0, : min(offset, size), 0].tolist()
    assert (cache._idx, [int(value) for value in lying]) == (index, [int(cell) for cell in row[5].split()])
    (record,) = describe([cache])
    assert record.integer("ring_index") == index
    assert record.rows == len(row[4].split())

"""Rows against the plainest way to say the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.runtime.rows import Rows

SIZE = 24


@st.composite
def rows(draw: st.DrawFn) -> tuple[Rows, list[int]]:
    """Disjoint ranges of a buffer in any order, with the buffer's rows that they are."""
    bounds = sorted(draw(st.sets(st.integers(0, SIZE), min_size=2, max_size=8)))
    pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
    ranges = tuple(draw(st.permutations(pairs)))
    axis = draw(st.integers(0, 2))
    shape = [2, 3]
    shape.insert(axis, SIZE)
    buffer = np.arange(6 * SIZE, dtype=np.uint16).reshape(shape)
    return Rows(buffer, axis, ranges), [row for start, stop in ranges for row in range(start, stop)]


@given(rows(), st.integers(0, SIZE), st.integers(0, SIZE))
def test_reading(made: tuple[Rows, list[int]], first: int, count: int) -> None:
    source, order = made
    assert source.count == len(order)
    found = source.read(first, count)
    assert np.array_equal(found, source.buffer.take(order[first : first + count], source.axis))
    window = source.window(first, count)
    assert window is None or np.shares_memory(window, source.buffer) or window.size == 0
    assert window is None or np.array_equal(window, found)


@given(rows(), st.integers(0, SIZE), st.integers(0, SIZE))
def test_writing_drops_what_is_beyond_the_end(made: tuple[Rows, list[int]], first: int, count: int) -> None:
    target, order = made
    before = target.buffer.copy()
    shape = [n if at != target.axis else count for at, n in enumerate(before.shape)]
    target.write(first, np.full(shape, 60000, np.uint16))
    written = order[first : first + count]
    kept = [row for row in range(SIZE) if row not in written]
    assert (target.buffer.take(written, target.axis) == 60000).all()
    assert np.array_equal(target.buffer.take(kept, target.axis), before.take(kept, target.axis))


@given(rows())
def test_clearing_leaves_the_stored_rows(made: tuple[Rows, list[int]]) -> None:
    target, order = made
    before = target.buffer.copy()
    target.clear_rest()
    rest = [row for row in range(SIZE) if row not in order]
    assert not target.buffer.take(rest, target.axis).any()
    assert np.array_equal(target.buffer.take(order, target.axis), before.take(order, target.axis))


def test_a_snapshot_is_read_and_written_whole() -> None:
    snapshot = Rows(np.arange(6, dtype=np.uint32).reshape(2, 3), None, ())
    assert snapshot.count == 0
    assert snapshot.read(0, 0) is snapshot.window(0, 0) is snapshot.buffer
    snapshot.write(0, np.zeros((2, 3), np.uint32))
    snapshot.clear_rest()
    assert not snapshot.buffer.any()

"""Boxes: any tensor, cut anywhere, is its C order again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.boxes import Grid, box_shape, boxes, read_box, write_box
from tests.format.payloads import bits, strided

SHAPES = st.lists(st.integers(0, 7), max_size=5).map(tuple)


@given(SHAPES, st.integers(1, 40), st.integers(0, 3))
def test_boxes_one_after_another_are_the_tensor(shape: tuple[int, ...], limit: int, how: int) -> None:
    array = strided(bits("U16", shape, 3), how)
    copy = strided(np.zeros(shape, np.uint16), how).copy() if how == 0 else strided(np.zeros(shape, np.uint16), how)
    pieces = []
    for box in boxes(box_shape(shape), limit):
        assert 0 < box.size <= limit
        piece = np.empty(box.shape, np.uint16)
        read_box(array, box, piece)
        write_box(copy, box, piece)
        pieces.append(piece.reshape(-1))
    flat = np.concatenate(pieces) if pieces else np.empty(0, np.uint16)
    assert np.array_equal(flat, array.reshape(-1))
    assert np.array_equal(copy, array)


@given(SHAPES, st.integers(1, 40))
def test_the_number_of_boxes_is_known_without_listing_them(shape: tuple[int, ...], limit: int) -> None:
    grid = Grid.of(shape, limit)
    sizes = [grid.box(at).size for at in range(grid.count)]
    assert sum(sizes) == int(np.prod(shape))
    assert grid.sizes().tolist() == sizes


def test_a_box_is_whole_slices_then_whole_rows_then_part_of_a_row() -> None:
    assert [box.shape for box in boxes((3, 4, 5), 45)] == [(2, 4, 5), (1, 4, 5)]
    assert [box.shape for box in boxes((2, 4, 5), 16)] == [(1, 3, 5), (1, 1, 5)] * 2
    assert [box.shape for box in boxes((1, 2, 5), 3)] == [(1, 1, 3), (1, 1, 2)] * 2


def test_leading_axes_that_do_not_fold_are_walked() -> None:
    whole = bits("U32", (4, 3, 5, 2), 1)
    array = whole[::2, 1:]
    out = np.empty((4, 5, 2), np.uint32)
    (box,) = boxes(box_shape(array.shape), 100)
    read_box(array, box, out)
    assert np.array_equal(out, array.reshape(4, 5, 2))

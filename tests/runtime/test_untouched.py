"""Arrays without contents: of the right shape, writable in place, and their own memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvstore.runtime.untouched import untouched

SHAPES = ((1, 2, 4096, 64), (3,), (), (1, 0, 5, 7), (32769,), (2, 70000), (1, 1, 1, 65536))
DTYPES = (mx.uint8, mx.uint16, mx.uint32, mx.uint64)


def test_arrays_have_the_shapes_and_dtypes_that_were_asked_for() -> None:
    wanted = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    assert [(array.shape, array.dtype) for array in untouched(wanted)] == wanted
    assert untouched([]) == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_in_place_is_what_mlx_computes_with(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    first, second = untouched([(shape, dtype)] * 2 + [((2, 2**22), mx.uint16)])[:2]
    views = [np.array(array, copy=False) for array in (first, second)]
    for number, view in enumerate(views):
        view[...] = np.arange(view.size).reshape(view.shape) % 200 + number
    del view, views
    assert bool(mx.all(mx.equal(second - first, mx.array(1, dtype))).item())
    assert first.astype(mx.int64).sum().item() == sum(n % 200 for n in range(first.size))


def test_memory_is_the_arrays_own_and_goes_with_them() -> None:
    before = mx.get_active_memory()
    arrays = untouched([((1, 8, 1024, 64), mx.uint16)] * 4)
    assert mx.get_active_memory() - before >= 4 * 2**20
    del arrays
    assert mx.get_active_memory() - before < 2**20

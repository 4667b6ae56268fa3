"""Filters: reversible for every width, and each in the form that SPEC.md describes."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import KVStoreError
from kvstore.format.filters import FILTERS, boxed, join_planes, parse_filter, split_planes
from tests.format.payloads import bits

WIDTHS = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("name", FILTERS)
def test_joining_undoes_splitting(dtype: str, name: str) -> None:
    kind = FILTERS[name]
    chunks = bits(dtype, (3, 40), 5)
    planes = split_planes(chunks.copy(), kind).copy()
    assert planes.shape == (3, kind.plane_count(WIDTHS[dtype]), 40 * WIDTHS[dtype] // kind.plane_count(WIDTHS[dtype]))
    assert np.array_equal(join_planes(planes, chunks.dtype, kind), chunks)


def test_byte_planes_begin_with_the_most_significant_byte() -> None:
    planes = split_planes(np.array([[0x0102, 0xA0B0]], np.uint16), FILTERS["byte-planes"])
    assert planes.tolist() == [[[0x01, 0xA0], [0x02, 0xB0]]]


def test_exponent_planes_move_the_sign_behind_the_mantissa() -> None:
    # -1.5 in bfloat16 is 1 01111111 1000000.
    planes = split_planes(np.array([[0xBFC0]], np.uint16), FILTERS["exponent-planes"])
    assert planes.tolist() == [[[0b01111111], [0b10000001]]]


def test_exponent_planes_of_float32() -> None:
    # -1.5 in float32 is 1 01111111 1000…0.
    planes = split_planes(np.array([[0xBFC00000]], np.uint32), FILTERS["exponent-planes"])
    assert planes.tolist() == [[[0b01111111], [0b10000000], [0], [1]]]


def test_channel_major_stores_columns() -> None:
    words = np.zeros(6, np.uint16)
    boxed(words, (1, 2, 3), FILTERS["byte-planes+channel-major"])[...] = [[[1, 2, 3], [4, 5, 6]]]
    assert words.tolist() == [1, 4, 2, 5, 3, 6]


@pytest.mark.parametrize(("value", "code"), [(7, "FIELD_TYPE"), ("delta", "FILTER_UNSUPPORTED")])
def test_unknown_filters_are_refused(value: object, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_filter(value, "here")
    assert caught.value.code == code

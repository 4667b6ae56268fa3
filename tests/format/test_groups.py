"""Groups and segments: the split is a function of the layers, and shares what can be shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.fields import Fields
from kvstore.format.groups import (
    Group,
    PayloadRef,
    Segment,
    check_groups,
    parse_groups,
    plan_groups,
    segment_tensors,
    segments,
)
from kvstore.format.layers import LayerRecord, Span, TensorRecord, leaves
from kvstore.format.tensors import TensorSpec
from tests.samples import COUNT, LEAVES, NEVER_WRITTEN, kv_tensors, layer
from tests.strategies import groups_of, layer_lists

SPLITS: dict[str, tuple[Span, list[tuple[int, int, int]]]] = {
    "one row": (Span("tokens", 0, 1, 0), [(0, 1, 0)]),
    "255": (Span("tokens", 0, 255, 0), [(0, 255, 0)]),
    "256": (Span("tokens", 0, 256, 0), [(0, 256, 0)]),
    "257": (Span("tokens", 0, 257, 0), [(0, 256, 0), (256, 1, 256)]),
    "512": (Span("tokens", 0, 512, 0), [(0, 256, 0), (256, 256, 256)]),
    "513": (Span("tokens", 0, 513, 0), [(0, 256, 0), (256, 256, 256), (512, 1, 512)]),
    "window": (Span("tokens", 300, 300, 0), [(300, 212, 0), (512, 88, 212)]),
    "window on a boundary": (Span("tokens", 256, 256, 0), [(256, 256, 0)]),
    "window inside one block": (Span("tokens", 300, 10, 0), [(300, 10, 0)]),
    "kept rows": (Span("tokens", 500, 20, 4), [(0, 4, 0), (500, 12, 4), (512, 8, 16)]),
    "stored rows": (Span("rows", 0, 300, 0), [(0, 256, 0), (256, 44, 256)]),
    "snapshot": (Span("state", 0, 0, 0), [(0, 0, 0)]),
}


@pytest.mark.parametrize(("span", "expected"), SPLITS.values(), ids=SPLITS)
def test_segments(span: Span, expected: list[tuple[int, int, int]]) -> None:
    assert segments(span) == tuple(Segment(*part) for part in expected)


@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(0, 10))
def test_segments_cover_all_rows_once(start: int, rows: int, keep: int) -> None:
    parts = segments(Span("tokens", start, rows, keep))
    assert [p.first for p in parts] == [sum(q.rows for q in parts[:i]) for i in range(len(parts))]
    assert sum(p.rows for p in parts) == rows + keep
    running = parts[1:] if keep else parts
    assert all((p.start // 256 == (p.start + p.rows - 1) // 256) for p in running)
    assert all((p.start + p.rows) % 256 == 0 for p in running[:-1])


def test_a_window_that_moved_on_shares_its_interior_blocks() -> None:
    before = {(p.start, p.rows) for p in segments(Span("tokens", 100, 1024, 0))}
    after = {(p.start, p.rows) for p in segments(Span("tokens", 190, 1024, 0))}
    assert before & after == {(256, 256), (512, 256), (768, 256)}


def test_layers_of_one_span_form_one_group_in_order_of_the_first() -> None:
    kv, ring, state = LEAVES["kv"], LEAVES["kv-rotating"], LEAVES["state"]
    layers = (ring, kv, NEVER_WRITTEN, state, LayerRecord("list", {}, {}, (state, kv)), ring)
    assert plan_groups(layers) == (
        (Span("tokens", 92, 508, 4), ("0", "5")),
        (Span("tokens", 0, COUNT, 0), ("1", "4.1")),
        (Span("state", 0, 0, 0), ("3", "4.0")),
    )


def test_tensors_of_a_segment() -> None:
    layers = (LEAVES["kv-sparse"], LayerRecord("list", {}, {}, (LEAVES["state"],)))
    by_path = dict(leaves(layers))
    assert segment_tensors(["0"], by_path, Segment(0, 40, 0)) == (
        TensorSpec("0.k", "BF16", (1, 2, 40, 8)),
        TensorSpec("0.positions", "I32", (2, 40)),
        TensorSpec("0.v", "BF16", (1, 2, 40, 4)),
    )
    assert segment_tensors(["1.0"], by_path, Segment(0, 0, 0)) == (
        TensorSpec("1.0.slot.0", "BF16", (1, 3, 16)),
        TensorSpec("1.0.slot.2", "F32", (1, 4, 8, 8)),
    )


@given(st.integers(1, 1500).flatmap(layer_lists))
def test_what_is_planned_is_accepted(layers: tuple[LayerRecord, ...]) -> None:
    groups = groups_of(layers)
    check_groups(groups, layers)
    assert parse_groups(Fields({"groups": [g.to_json() for g in groups]}, "", None), "groups") == groups


LAYERS = (LEAVES["kv"], LEAVES["kv-rotating"], LEAVES["kv"])
GROUPS = groups_of(LAYERS)
FULL, RING = GROUPS


def resized(group: Group, index: int, change: int) -> Group:
    refs = list(group.payloads)
    refs[index] = PayloadRef(refs[index].digest, refs[index].size + change)
    return replace(group, payloads=tuple(refs))


WRONG: dict[str, tuple[tuple[Group, ...], str]] = {
    "no groups": ((), "GROUP_INVALID"),
    "one too few": ((FULL,), "GROUP_INVALID"),
    "one twice": ((FULL, RING, RING), "GROUP_INVALID"),
    "other order": ((RING, FULL), "GROUP_INVALID"),
    "a layer less": ((replace(FULL, layers=("0",)), RING), "GROUP_INVALID"),
    "layers in other order": ((replace(FULL, layers=("2", "0")), RING), "GROUP_INVALID"),
    "unknown layer": ((replace(FULL, layers=("0", "7")), RING), "GROUP_INVALID"),
    "other start": ((FULL, replace(RING, span=replace(RING.span, start=93))), "GROUP_INVALID"),
    "other rows": ((FULL, replace(RING, span=replace(RING.span, rows=507))), "GROUP_INVALID"),
    "no kept rows": ((FULL, replace(RING, span=replace(RING.span, keep=0))), "GROUP_INVALID"),
    "other kind of span": ((FULL, replace(RING, span=replace(RING.span, kind="rows"))), "GROUP_INVALID"),
    "a payload less": ((replace(FULL, payloads=FULL.payloads[:-1]), RING), "SEGMENTS_INVALID"),
    "a payload more": ((replace(FULL, payloads=FULL.payloads * 2), RING), "SEGMENTS_INVALID"),
    "no payload": ((replace(FULL, payloads=()), RING), "SEGMENTS_INVALID"),
    "size too large": ((resized(FULL, 0, 8), RING), "PAYLOAD_SIZE_MISMATCH"),
    "size of kept rows too small": ((FULL, resized(RING, 0, -1)), "PAYLOAD_SIZE_MISMATCH"),
    "size of the tail": ((resized(FULL, -1, 1), RING), "PAYLOAD_SIZE_MISMATCH"),
    "payloads in other order": ((replace(FULL, payloads=FULL.payloads[::-1]), RING), "PAYLOAD_SIZE_MISMATCH"),
}


@pytest.mark.parametrize(("groups", "code"), WRONG.values(), ids=WRONG)
def test_refused(groups: tuple[Group, ...], code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        check_groups(groups, LAYERS)
    assert (caught.value.code, caught.value.phase) == (code, "semantic")


def test_tensors_above_every_limit_have_no_right_size() -> None:
    huge = 2**31 - 1
    record = layer("kv", {side: ("F32", [1, huge, COUNT, huge]) for side in "kv"}, offset=COUNT)
    ref = PayloadRef(sha256_digest(b""), 2**40)
    with pytest.raises(KVStoreError) as caught:
        check_groups((Group(Span("tokens", 0, COUNT, 0), ("0",), (ref,) * 3),), (record,))
    assert caught.value.code == "PAYLOAD_SIZE_MISMATCH"


def test_zero_rows_need_no_group() -> None:
    record = layer("kv-sparse", kv_tensors(0), offset=9)
    assert plan_groups((record,)) == ()
    assert record.tensors["k"] == TensorRecord("BF16", (1, 2, 0, 8))

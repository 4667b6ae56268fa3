"""Layer records: parsing, spans, and how far each kind can be cut back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.fields import Fields
from kvstore.format.kinds import KINDS
from kvstore.format.layers import LayerRecord, Span, leaves, parse_layers
from kvstore.limits import MAX_LAYERS, MAX_SLOTS, MAX_TOKENS
from tests.samples import COUNT, LEAVES, NEVER_WRITTEN, kv_tensors, layer
from tests.strategies import LEAF_KINDS, layer_lists


def parse(*layers: Any) -> tuple[LayerRecord, ...]:
    return parse_layers(Fields({"layers": list(layers)}, "", None), "layers")


def edited(kind: str, /, **changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(LEAVES[kind].to_json())), **changes}


def retensored(kind: str, /, **changes: Any) -> dict[str, Any]:
    value = edited(kind)
    value["tensors"].update(changes)
    return value


GOOD = {"dtype": "F32", "shape": [1, 2]}

REFUSED: dict[str, tuple[Any, str]] = {
    "not an object": (1, "FIELD_TYPE"),
    "no kind": ({"offset": 1}, "FIELD_MISSING"),
    "kind is a number": ({"kind": 1}, "FIELD_TYPE"),
    "quantization mode": (edited("kv-quantized", mode="int4"), "QUANTIZATION_UNSUPPORTED"),
    "class name": (edited("kv", kind="KVCache"), "KIND_UNSUPPORTED"),
    "scalar of another kind": (edited("kv", max_size=4), "FIELD_UNKNOWN"),
    "role of another kind": (retensored("kv", positions=GOOD), "FIELD_UNKNOWN"),
    "slot in a kv layer": (retensored("kv", **{"slot.0": GOOD}), "FIELD_UNKNOWN"),
    "k in a state layer": (retensored("state", k=GOOD), "FIELD_UNKNOWN"),
    "slot with leading zero": (retensored("state", **{"slot.00": GOOD}), "FIELD_UNKNOWN"),
    "slot of five digits": (retensored("state", **{"slot.10000": GOOD}), "FIELD_UNKNOWN"),
    "tensors as array": (edited("kv", tensors=[]), "FIELD_TYPE"),
    "dtype": (retensored("kv", k={"dtype": "bfloat16", "shape": [1]}), "DTYPE_UNSUPPORTED"),
    "dtype is a number": (retensored("kv", k={"dtype": 16, "shape": [1]}), "FIELD_TYPE"),
    "negative extent": (retensored("kv", k={"dtype": "F16", "shape": [-1]}), "FIELD_RANGE"),
    "extent 2^31": (retensored("kv", k={"dtype": "F16", "shape": [2**31]}), "FIELD_RANGE"),
    "rank 9": (retensored("kv", k={"dtype": "F16", "shape": [1] * 9}), "LIMIT_EXCEEDED"),
    "tensor field": (retensored("kv", k={**GOOD, "bytes": 8}), "FIELD_UNKNOWN"),
    "offset above the limit": (edited("kv", offset=MAX_TOKENS + 1), "FIELD_RANGE"),
    "negative ring index": (edited("kv-rotating", ring_index=-1), "FIELD_RANGE"),
    "too many slots": (edited("state", slots=MAX_SLOTS + 1), "FIELD_RANGE"),
    "two paddings": (edited("state", left_padding=[0, 0]), "LIMIT_EXCEEDED"),
    "no padding": (edited("state", left_padding=[]), "FIELD_RANGE"),
    "padding as integer": (edited("state", left_padding=0), "FIELD_TYPE"),
    "lengths absent": ({k: v for k, v in edited("state").items() if k != "lengths"}, "FIELD_MISSING"),
    "empty list": ({"kind": "list", "children": []}, "FIELD_RANGE"),
    "list with tensors": ({"kind": "list", "children": [edited("kv")], "tensors": {}}, "FIELD_UNKNOWN"),
    "list without children": ({"kind": "list"}, "FIELD_MISSING"),
    "fault in a child": ({"kind": "list", "children": [edited("kv", offset="1")]}, "FIELD_TYPE"),
}


@pytest.mark.parametrize(("value", "code"), REFUSED.values(), ids=REFUSED)
def test_refused(value: Any, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse(value)
    assert (caught.value.code, caught.value.phase) == (code, "schema")
    assert "layers[0]" in caught.value.message


def test_children_count_towards_the_limit() -> None:
    child = {"kind": "kv", "offset": 0, "tensors": {}}
    parse({"kind": "list", "children": [child] * (MAX_LAYERS - 1)})
    with pytest.raises(KVStoreError) as caught:
        parse({"kind": "list", "children": [child] * MAX_LAYERS})
    assert caught.value.code == "LIMIT_EXCEEDED"


def test_samples_hold_every_kind() -> None:
    assert {*LEAVES, "list"} == set(KINDS) == {*LEAF_KINDS, "list"}


@given(st.integers(1, 700).flatmap(layer_lists))
def test_round_trip(layers: tuple[LayerRecord, ...]) -> None:
    assert parse(*(record.to_json() for record in layers)) == layers


def test_slots_are_ordered_by_number() -> None:
    record = layer("state", {f"slot.{n}": ("F32", [1]) for n in (10, 9, 0)}, slots=11, left_padding=None, lengths=None)
    assert list(parse(record.to_json())[0].tensors) == ["slot.0", "slot.9", "slot.10"]


def test_paths() -> None:
    inner = LayerRecord("list", {}, {}, (LEAVES["state"], LEAVES["kv"]))
    outer = LayerRecord("list", {}, {}, (LEAVES["kv"], inner))
    assert [path for path, _ in leaves((LEAVES["kv"], outer, NEVER_WRITTEN))] == ["0", "1.0", "1.1.0", "1.1.1", "2"]


SPANS: dict[str, tuple[LayerRecord, Span | None]] = {
    "never written": (NEVER_WRITTEN, None),
    "kv": (LEAVES["kv"], Span("tokens", 0, COUNT, 0)),
    "quantized": (LEAVES["kv-quantized"], Span("tokens", 0, COUNT, 0)),
    "wrapped ring with kept rows": (LEAVES["kv-rotating"], Span("tokens", 92, 508, 4)),
    "ring that is not full": (
        layer("kv-rotating", kv_tensors(100), offset=100, max_size=512, keep=4, ring_index=100),
        Span("tokens", 0, 100, 0),
    ),
    "chunked": (LEAVES["kv-chunked"], Span("tokens", 300, 300, 0)),
    "concatenated, with trimmed rows": (LEAVES["kv-concatenated"], Span("tokens", 0, COUNT + 2, 0)),
    "sparse": (LEAVES["kv-sparse"], Span("rows", 0, 40, 0)),
    "sparse, nothing left": (layer("kv-sparse", kv_tensors(0), offset=9), None),
    "compressed": (LEAVES["kv-compressed"], Span("state", 0, 0, 0)),
    "state": (LEAVES["state"], Span("state", 0, 0, 0)),
}


@pytest.mark.parametrize(("record", "span"), SPANS.values(), ids=SPANS)
def test_span(record: LayerRecord, span: Span | None) -> None:
    assert record.span == span


def ring(offset: int, rows: int, size: int, keep: int = 0) -> LayerRecord:
    return layer("kv-rotating", kv_tensors(rows), offset=offset, max_size=size, keep=keep, ring_index=rows)


CUTS: dict[str, tuple[LayerRecord, int]] = {
    "kv: anywhere": (LEAVES["kv"], 0),
    "quantized: anywhere": (LEAVES["kv-quantized"], 0),
    "ring before it is full: anywhere": (ring(100, 100, 512), 0),
    "ring exactly full: anywhere": (ring(512, 512, 512), 0),
    "wrapped ring: one token back": (ring(600, 512, 512), 599),
    "wrapped ring with kept rows: not at all": (ring(600, 512, 512, keep=4), 600),
    "ring already cut back: not at all": (ring(599, 511, 512), 599),
    "chunk at the start: anywhere": (
        layer("kv-chunked", kv_tensors(100), offset=100, chunk_size=256, start=0), 0,
    ),
    "chunk further on: while a whole chunk is there": (
        layer("kv-chunked", kv_tensors(300), offset=600, chunk_size=256, start=300), 556,
    ),
    "chunk further on, short: not at all": (
        layer("kv-chunked", kv_tensors(100), offset=400, chunk_size=256, start=300), 400,
    ),
    "concatenated: not at all": (LEAVES["kv-concatenated"], COUNT),
    "sparse: not at all": (LEAVES["kv-sparse"], COUNT),
    "compressed: not at all": (LEAVES["kv-compressed"], COUNT),
    "state: only where it was saved": (LEAVES["state"], -1),
}  # fmt: skip


@pytest.mark.parametrize(("record", "lowest"), CUTS.values(), ids=CUTS)
def test_lowest_cut(record: LayerRecord, lowest: int) -> None:
    assert record.lowest_cut == lowest


OPEN: dict[str, tuple[LayerRecord, str, tuple[int | None, ...] | None]] = {
    "rows": (LEAVES["kv"], "k", (1, 2, None, 8)),
    "rows of positions": (LEAVES["kv-sparse"], "positions", (2, None)),
    "a window": (LEAVES["kv-compressed"], "window", (1, None, 8)),
    "there at times": (LEAVES["kv-compressed"], "pending.kv", None),
    "a snapshot": (LEAVES["state"], "slot.2", (1, 4, 8, 8)),
    "token ids in a snapshot": (layer("state", {"slot.0": ("I64", [1, 3])}, slots=1), "slot.0", (1, None)),
    "flags in a snapshot": (layer("state", {"slot.0": ("BOOL", [1, 3])}, slots=1), "slot.0", (1, 3)),
}


@pytest.mark.parametrize(("record", "role", "shape"), OPEN.values(), ids=OPEN)
def test_what_the_position_decides_is_open(record: LayerRecord, role: str, shape: Any) -> None:
    assert record.open_shape(role) == shape

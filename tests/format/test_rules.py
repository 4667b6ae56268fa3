"""Step 4: states that no runtime could have produced or could restore."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.layers import LayerRecord, TensorRecord
from kvstore.format.rules import check_layers
from tests.samples import (
    COUNT,
    LEAVES,
    NEVER_WRITTEN,
    QUANTIZATION,
    compressed_tensors,
    kv_tensors,
    layer,
    packed_tensors,
)  # fmt: skip
from tests.strategies import canonical_leaf, layer_lists, unwritten


def with_scalars(kind: str, **changes: Any) -> LayerRecord:
    record = LEAVES[kind]
    return LayerRecord(kind, {**record.scalars, **changes}, record.tensors)


def with_tensors(kind: str, *without: str, **changes: tuple[str, list[int]]) -> LayerRecord:
    tensors = {role: record for role, record in LEAVES[kind].tensors.items() if role not in without}
    tensors.update({role: TensorRecord(dtype, tuple(shape)) for role, (dtype, shape) in changes.items()})
    return canonical_leaf(LayerRecord(kind, LEAVES[kind].scalars, tensors))


def ring(offset: int, rows: int, size: int, keep: int, index: int) -> LayerRecord:
    return layer("kv-rotating", kv_tensors(rows), offset=offset, max_size=size, keep=keep, ring_index=index)


def packed_groups(window: int, groups: int, pending: int, *without: str) -> LayerRecord:
    tensors = {role: spec for role, spec in compressed_tensors(window, groups, pending).items() if role not in without}
    return layer("kv-compressed", tensors, offset=COUNT, max_size=128)


def never(kind: str, **changes: Any) -> LayerRecord:
    return LayerRecord(kind, {**unwritten(LEAVES[kind]).scalars, **changes}, {})


MXFP4: dict[str, Any] = {"bits": 4, "group_size": 32, "mode": "mxfp4"}

WRONG: dict[str, tuple[LayerRecord, str]] = {
    "k alone": (with_tensors("kv", "v"), "TENSOR_SET_MISMATCH"),
    "affine without biases": (with_tensors("kv-quantized", "v.biases"), "TENSOR_SET_MISMATCH"),
    "no scales": (with_tensors("kv-quantized", "k.scales"), "TENSOR_SET_MISMATCH"),
    "positions alone": (
        LayerRecord("kv-sparse", {"offset": COUNT}, {"positions": TensorRecord("I32", (1, 40))}),
        "TENSOR_SET_MISMATCH",
    ),
    "biases in a mode without": (layer("kv-quantized", packed_tensors(COUNT), offset=COUNT, **MXFP4),
                                 "TENSOR_SET_MISMATCH"),
    "one bias in a mode without": (
        LayerRecord("kv-quantized", {"offset": COUNT, **MXFP4}, with_tensors("kv-quantized", "k.biases").tensors),
        "TENSOR_SET_MISMATCH",
    ),
    "slot beyond the slots": (with_scalars("state", slots=2), "TENSOR_SET_MISMATCH"),
    "rank 3": (with_tensors("kv", k=("BF16", [2, COUNT, 8])), "SHAPE_INCONSISTENT"),
    "batch of two": (with_tensors("kv", k=("BF16", [2, 2, COUNT, 8])), "SHAPE_INCONSISTENT"),
    "other rows in v": (with_tensors("kv", v=("BF16", [1, 2, COUNT - 1, 4])), "SHAPE_INCONSISTENT"),
    "other heads in v": (with_tensors("kv", v=("BF16", [1, 3, COUNT, 4])), "SHAPE_INCONSISTENT"),
    "fewer rows than tokens": (layer("kv", kv_tensors(COUNT - 1), offset=COUNT), "SHAPE_INCONSISTENT"),
    "more rows than tokens": (layer("kv", kv_tensors(COUNT + 1), offset=COUNT), "SHAPE_INCONSISTENT"),
    "quantized, other rows": (layer("kv-quantized", packed_tensors(9), offset=COUNT, **QUANTIZATION),
                              "SHAPE_INCONSISTENT"),
    "words of the wrong width": (with_tensors("kv-quantized", **{"k.words": ("U32", [1, 2, COUNT, 9])}),
                                 "SHAPE_INCONSISTENT"),
    "words of the wrong dtype": (with_tensors("kv-quantized", **{"k.words": ("I32", [1, 2, COUNT, 8])}),
                                 "SHAPE_INCONSISTENT"),
    "scales with other heads": (with_tensors("kv-quantized", **{"v.scales": ("F16", [1, 1, COUNT, 2])}),
                                "SHAPE_INCONSISTENT"),
    "biases of another width": (with_tensors("kv-quantized", **{"v.biases": ("F16", [1, 2, COUNT, 3])}),
                                "SHAPE_INCONSISTENT"),
    "biases of another dtype": (with_tensors("kv-quantized", **{"v.biases": ("F32", [1, 2, COUNT, 2])}),
                                "SHAPE_INCONSISTENT"),
    "7 bits": (with_scalars("kv-quantized", bits=7), "CACHE_STATE_INVALID"),
    "group of 48": (with_scalars("kv-quantized", group_size=48), "CACHE_STATE_INVALID"),
    "other offset": (with_scalars("kv", offset=COUNT - 1), "TOKEN_COUNT_MISMATCH"),
    "offset 0 with rows": (with_scalars("kv-sparse", offset=0), "TOKEN_COUNT_MISMATCH"),
    "window larger than its maximum": (ring(COUNT, 513, 512, 4, 513), "CACHE_STATE_INVALID"),
    "window larger than the prefix": (ring(COUNT, 601, 700, 4, 601), "CACHE_STATE_INVALID"),
    "nothing but kept rows": (ring(COUNT, 4, 512, 4, 4), "CACHE_STATE_INVALID"),
    "keeps all": (ring(COUNT, 512, 512, 512, 512), "CACHE_STATE_INVALID"),
    "ring index beyond": (ring(COUNT, 512, 512, 4, 513), "CACHE_STATE_INVALID"),
    "ring index in kept rows": (ring(COUNT, 512, 512, 4, 3), "CACHE_STATE_INVALID"),
    "ring index in a short window": (ring(COUNT, 500, 512, 4, 9), "CACHE_STATE_INVALID"),
    "ring index before the ring turned": (ring(COUNT, COUNT, COUNT, 4, 9), "CACHE_STATE_INVALID"),
    "chunk starts late": (with_scalars("kv-chunked", start=COUNT + 1), "CACHE_STATE_INVALID"),
    "chunk of other length": (with_scalars("kv-chunked", start=299), "CACHE_STATE_INVALID"),
    "chunk size 0": (with_scalars("kv-chunked", chunk_size=0), "CACHE_STATE_INVALID"),
    "concatenated, too few": (layer("kv-concatenated", kv_tensors(COUNT - 1), offset=COUNT), "SHAPE_INCONSISTENT"),
    "sparse, too many": (layer("kv-sparse", kv_tensors(COUNT + 1), offset=COUNT), "SHAPE_INCONSISTENT"),
    "positions of other heads": (with_tensors("kv-sparse", positions=("I32", [3, 40])), "SHAPE_INCONSISTENT"),
    "positions of other rows": (with_tensors("kv-sparse", positions=("I32", [2, 41])), "SHAPE_INCONSISTENT"),
    "positions of other dtype": (with_tensors("kv-sparse", positions=("I64", [2, 40])), "SHAPE_INCONSISTENT"),
    "positions of rank 1": (with_tensors("kv-sparse", positions=("I32", [40])), "SHAPE_INCONSISTENT"),
    "sparse quantized, 7 bits": (with_scalars("kv-sparse-quantized", bits=7), "CACHE_STATE_INVALID"),
    "sparse quantized, too many": (
        layer("kv-sparse-quantized", packed_tensors(COUNT + 1), offset=COUNT, **QUANTIZATION), "SHAPE_INCONSISTENT"
    ),
    "compressed, window too long": (packed_groups(129, 75, 0), "SHAPE_INCONSISTENT"),
    "compressed, window too short": (packed_groups(127, 75, 0), "SHAPE_INCONSISTENT"),
    "compressed, groups that are no groups": (packed_groups(128, 74, 0), "SHAPE_INCONSISTENT"),
    "compressed, a whole group pending": (packed_groups(128, 74, 8), "SHAPE_INCONSISTENT"),
    "compressed, no groups": (packed_groups(128, 0, COUNT), "SHAPE_INCONSISTENT"),
    "compressed, tokens nowhere": (packed_groups(128, 1, 7, "compressed", "index"), "SHAPE_INCONSISTENT"),
    "compressed, index of other rows": (
        with_tensors("kv-compressed", index=("BF16", [1, 74, 4])), "SHAPE_INCONSISTENT"
    ),
    "compressed, gates of other rows": (
        with_tensors("kv-compressed", **{"pending.gate": ("F32", [1, 1, 8])}), "SHAPE_INCONSISTENT"
    ),
    "compressed, no gates": (with_tensors("kv-compressed", "pending.gate"), "TENSOR_SET_MISMATCH"),
    "compressed, index alone": (with_tensors("kv-compressed", "compressed"), "TENSOR_SET_MISMATCH"),
    "compressed, no window": (with_tensors("kv-compressed", "window"), "TENSOR_SET_MISMATCH"),
    "compressed of batch 2": (with_tensors("kv-compressed", window=("BF16", [2, 128, 8])), "SHAPE_INCONSISTENT"),
    "compressed of rank 4": (with_tensors("kv-compressed", window=("BF16", [1, 1, 128, 8])), "SHAPE_INCONSISTENT"),
    "window of 0": (with_scalars("kv-compressed", max_size=0), "CACHE_STATE_INVALID"),
    "state of batch 2": (with_tensors("state", **{"slot.0": ("BF16", [2, 3])}), "SHAPE_INCONSISTENT"),
    "state of rank 0": (with_tensors("state", **{"slot.0": ("BF16", [])}), "SHAPE_INCONSISTENT"),
    "never written with an offset": (never("kv", offset=3), "CACHE_STATE_INVALID"),
    "never written with a ring index": (never("kv-rotating", ring_index=3), "CACHE_STATE_INVALID"),
    "never written with a start": (never("kv-chunked", start=3), "CACHE_STATE_INVALID"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "code"), WRONG.values(), ids=WRONG)
def test_refused(record: LayerRecord, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        check_layers((LEAVES["kv"], LayerRecord("list", {}, {}, (record,))), COUNT)
    assert (caught.value.code, caught.value.phase) == (code, "semantic")
    assert caught.value.message.startswith("layers[1.0]")


@pytest.mark.parametrize("layers", [(), (NEVER_WRITTEN,), (never("state"), NEVER_WRITTEN)])
def test_something_was_written(layers: tuple[LayerRecord, ...]) -> None:
    with pytest.raises(KVStoreError) as caught:
        check_layers(layers, COUNT)
    assert caught.value.code == "CACHE_STATE_INVALID"


ALLOWED: dict[str, LayerRecord] = {
    "full window": ring(COUNT, 512, 512, 4, 512),
    "ring turned once": ring(COUNT, 512, 512, 4, 5),
    "one token back": ring(COUNT, 511, 512, 0, 511),
    "exactly full": ring(COUNT, COUNT, COUNT, 4, COUNT),
    "empty chunk": layer("kv-chunked", kv_tensors(0), offset=COUNT, chunk_size=256, start=COUNT),
    "sparse, all dropped": layer("kv-sparse", kv_tensors(0), offset=COUNT),
    "no positions": with_tensors("kv-sparse", "positions"),
    "compressed, nothing but the window": with_tensors(
        "kv-compressed", "compressed", "index", "pending.kv", "pending.gate"
    ),
    "compressed, one group not full": packed_groups(128, 1, COUNT, "compressed", "index"),
    "compressed, a row a token": packed_groups(128, COUNT, 0, "pending.kv", "pending.gate"),
    "compressed, no index": with_tensors("kv-compressed", "index"),
    "compressed, some pending": packed_groups(128, 85, 5),
    "values without width": with_tensors("kv", v=("BF16", [1, 2, COUNT, 0])),
    "absent slots": with_tensors("state", "slot.0"),
}


@pytest.mark.parametrize("record", ALLOWED.values(), ids=ALLOWED)
def test_allowed(record: LayerRecord) -> None:
    check_layers((record,), COUNT)


@given(st.integers(1, 1500).flatmap(lambda count: layer_lists(count).map(lambda layers: (layers, count))))
def test_every_kind_is_accepted(case: tuple[tuple[LayerRecord, ...], int]) -> None:
    check_layers(*case)


@pytest.mark.parametrize(("kind", "role"), [(kind, role) for kind, record in LEAVES.items() for role in record.tensors])
def test_a_shape_with_fewer_axes_is_refused_and_nothing_else_happens(kind: str, role: str) -> None:
    record = LEAVES[kind].tensors[role]
    for rank in range(1 if kind == "state" else len(record.shape)):  # a slot may have any rank but none
        short = with_tensors(kind, **{role: (record.dtype, list(record.shape[:rank]))})
        with pytest.raises(KVStoreError) as caught:
            check_layers((short,), COUNT)
        assert caught.value.code in ("SHAPE_INCONSISTENT", "CACHE_STATE_INVALID")

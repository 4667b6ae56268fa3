"""Caches as a ``wp30-cache-2`` file that the format's own reader takes.

The format has arrays for keys and values and an offset, and nothing else. A cache that
has more state (a ring, a chunk's start, a recurrent state, another quantization mode)
is refused; the format's own writer would save it and lose that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.errors import KVStoreError, fail, require_choice
from kvstore.format.foreign_tensors import emit_foreign_header
from kvstore.format.layers import LayerRecord, TensorRecord
from kvstore.format.wp30 import (
    LAYERS_KEY,
    MANIFEST_KEY,
    PARTS,
    Wp30Layer,
    build_manifest,
    dtype_text,
    emit_layers,
)
from kvstore.format.wp30_check import tensor_names
from kvstore.format.wp30_codec import CODECS, CodecName, compressed
from kvstore.runtime.kinds import describe, views
from kvstore.runtime.rows import Rows

__all__ = ["Wp30Written", "write_wp30"]

_CLASSES: Final = {
    "kv": "KVCache", "kv-quantized": "QuantizedKVCache", "kv-sparse": "SparseKVCache",
    "kv-sparse-quantized": "SparseQuantizedKVCache",
}  # fmt: skip
_ROLES: Final = {False: ("",), True: (".words", ".scales", ".biases")}


@dataclass(frozen=True, slots=True)
class Wp30Written:
    """A file that was written: its size, and the time that packing and writing took."""

    file_bytes: int
    milliseconds: float


def write_wp30(
    path: Path, cache: Sequence[Any], token_ids: Sequence[int], facts: Mapping[str, Any], *,
    extra: Mapping[str, Any] | None = None, codec: CodecName = "none", level: int | None = None,
) -> Wp30Written:  # fmt: skip
    """Write caches; the file appears under its name only when it is whole.

    Original positions of sparse rows are not written: the format has no place for them, and its reader no use.

    Args:
        token_ids: The ids that the caches are the state of; only their number and hash are written.
        facts: Values of the manifest's own keys, as far as known.
        extra: Further keys.

    Raises:
        UsageError: USAGE for a codec that is none.
        UnsupportedError: CACHE_FILE_EXPORT for what the format cannot express; CACHE_CLASS_UNKNOWN.
        InvalidError: CACHE_INCONSISTENT, CACHE_BATCHED.
        KVStoreError: STORE_IO.
    """
    require_choice("codec", codec, CODECS)
    started = time.perf_counter()
    records = describe(cache)
    layers = [_layer(index, record) for index, record in enumerate(records)]
    for layer in layers:
        if layer.logical_offset != len(token_ids):
            raise fail(
                "CACHE_INCONSISTENT", f"the offset of layer {layer.layer}", expected=len(token_ids),
                found=layer.logical_offset,
            )  # fmt: skip
    manifest = build_manifest(facts, layers, token_ids, extra=extra)
    arrays = list(_arrays(records, views(cache)))
    metadata = {MANIFEST_KEY: manifest.text(), LAYERS_KEY: emit_layers(layers)}
    header = emit_foreign_header([(name, record) for name, record, _ in arrays], metadata)
    parts = [header, *(_bytes(rows) for _, _, rows in arrays)]
    _write(path, compressed(parts, codec, level))
    return Wp30Written(path.stat().st_size, (time.perf_counter() - started) * 1000)


def _layer(index: int, record: LayerRecord) -> Wp30Layer:
    """A layer's record, or the refusal of a layer that the format cannot express."""
    cls = _CLASSES.get(record.kind)
    if cls is None:
        raise _inexpressible(index, "a kind that the format keeps whole", record.kind)
    if record.never_written:
        raise _inexpressible(index, "arrays", "a layer that was never written")
    quantized = "bits" in record.scalars
    roles = _ROLES[quantized]
    if quantized and f"k{roles[-1]}" not in record.tensors:
        raise _inexpressible(index, f"{PARTS} arrays a side, biases among them", f"mode {record.scalars['mode']}")
    sides = [tuple(record.tensors[side + role] for role in roles) for side in "kv"]
    return Wp30Layer(
        layer=index, cls=cls, k_shapes=tuple(t.shape for t in sides[0]), v_shapes=tuple(t.shape for t in sides[1]),
        dtypes=tuple(dtype_text(t.dtype) for t in sides[0]), stored_positions=record.rows,
        logical_offset=record.offset or 0, bits=record.integer("bits") if quantized else None,
        group_size=record.integer("group_size") if quantized else None,
    )  # fmt: skip


def _arrays(
    records: Sequence[LayerRecord], rows: Mapping[str, Mapping[str, Rows]]
) -> Iterator[tuple[str, TensorRecord, Rows]]:
    """Every array with its name in the file."""
    for index, record in enumerate(records):
        quantized = "bits" in record.scalars
        for side, names in zip("kv", tensor_names(index, quantized=quantized), strict=True):
            for role, name in zip(_ROLES[quantized], names, strict=True):
                yield name, record.tensors[side + role], rows[str(index)][side + role]


def _bytes(rows: Rows) -> Any:
    """An array's bytes in order; a copy only where its rows do not lie together."""
    return np.ascontiguousarray(rows.read(0, rows.count)).reshape(-1).view(np.uint8).data


def _write(path: Path, parts: Iterator[Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except OSError as error:
        raise fail("STORE_IO", f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _inexpressible(index: int, expected: str, found: str) -> KVStoreError:
    return fail(
        "CACHE_FILE_EXPORT", f"layer {index} cannot be written as wp30-cache-2", expected=expected, found=found,
        fix="Write a file of another format.",
    )  # fmt: skip

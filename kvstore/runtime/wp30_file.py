"""``wp30-cache-2`` files: looked at without a model, read into live caches, written for their own reader.

The header comes first in every codec. All that it says is checked, against itself, the
token ids and the receiving model, before a byte of the arrays is read. A look at a file
(:func:`inspect_wp30`) yields no arrays and no way to any.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.foreign_tensors import LENGTH_BYTES, ForeignHeader, header_length, parse_foreign_header
from kvstore.format.json import Json
from kvstore.format.manifest import MethodRecord
from kvstore.format.tensors import uint_dtype
from kvstore.format.wp30 import LAYERS_KEY, MANIFEST_KEY, Wp30Layer, Wp30Manifest, parse_layer_lines, parse_wp30
from kvstore.format.wp30_check import Receiver, check_compatible, check_consistent, check_token_ids, tensor_names
from kvstore.format.wp30_codec import CodecName, Decoder, codec_of, open_codec
from kvstore.runtime.device import memory_budget
from kvstore.runtime.registry import DTYPES
from kvstore.runtime.wp30_notes import annotations_of, method_of
from kvstore.store.fs import open_plain

__all__ = ["Wp30Cache", "Wp30Info", "inspect_wp30", "is_wp30", "read_wp30"]

_HEAD_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Wp30Info:
    """What a file says of itself, found consistent. It holds no arrays, and nothing can be restored from it.

    Attributes:
        codec: ``none``, ``gzip`` or ``zstd``.
        file_bytes: Of the file as it lies there.
        payload_bytes: Of all arrays, uncompressed.
    """

    manifest: Wp30Manifest
    codec: CodecName
    file_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Wp30Cache:
    """A file's caches, live and ready for :meth:`kvstore.Store.put`.

    Attributes:
        method: The lossy method that the file names, or None.
        annotations: What the manifest claims, and how the file was packed; facts about the entry, not part of it.
        milliseconds: Time that reading and decompression took.
    """

    cache: list[Any]
    info: Wp30Info
    method: MethodRecord | None
    annotations: Mapping[str, Json]
    milliseconds: float


def is_wp30(path: Path) -> bool:
    """Whether a file is one, by its content: the metadata of the safetensors file inside whatever codec."""
    try:
        with _opened(path) as (_, decoder):
            length = header_length(decoder.take(LENGTH_BYTES))
            return MANIFEST_KEY in parse_foreign_header(decoder.take(length)).metadata
    except KVStoreError:
        return False


def inspect_wp30(path: Path) -> Wp30Info:
    """Look at a file without a model and without reading its arrays.

    Raises:
        InvalidError: CACHE_FILE_INVALID.
        UnsupportedError: MEDIA_TYPE_UNKNOWN, DTYPE_UNSUPPORTED.
    """
    with _opened(path) as (codec, decoder):
        info, _ = _examined(path, codec, decoder)
        return info


def read_wp30(
    path: Path, token_ids: Sequence[int], *, receiver: Receiver | None, limit: int | None = None
) -> Wp30Cache:
    """Read a file's caches.

    Rows that are all there become a plain cache of mlx_lm, the others a sparse one.

    Args:
        token_ids: The ids that the cache was computed from: the file has only their number and their hash.
        receiver: The model that shall receive them, or None where the caller compares in another way.
        limit: Bytes that the arrays may take; by default what the device has free.

    Raises:
        InvalidError: CACHE_FILE_INVALID.
        IncompatibleError: MODEL_MISMATCH, TOKENIZER_MISMATCH.
        SpaceError: DEVICE_MEMORY_SHORT.
        UnsupportedError: MEDIA_TYPE_UNKNOWN, DTYPE_UNSUPPORTED.
    """
    started = time.perf_counter()
    with _opened(path) as (codec, decoder):
        info, header = _examined(path, codec, decoder)
        check_token_ids(info.manifest, token_ids)
        check_compatible(info.manifest, receiver)
        _check_room(info.payload_bytes, memory_budget() if limit is None else limit)
        arrays = {tensor.name: _array(tensor.record.dtype, tensor.record.shape, decoder) for tensor in header.tensors}
        decoder.finish()
    elapsed = (time.perf_counter() - started) * 1000
    caches = [_cache(layer, arrays) for layer in info.manifest.layers]
    notes = annotations_of(info.manifest, codec=codec, milliseconds=elapsed)
    return Wp30Cache(caches, info, method_of(info.manifest), notes, elapsed)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[CodecName, Decoder]]:
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            codec = codec_of(file.read(_HEAD_BYTES))
            file.seek(0)
            yield codec, open_codec(file, codec)
    except OSError as error:
        raise fail("CACHE_FILE_INVALID", f"{path.name} cannot be read: {error.strerror}") from error


def _examined(path: Path, codec: CodecName, decoder: Decoder) -> tuple[Wp30Info, ForeignHeader]:
    """The header, checked against itself."""
    length = header_length(decoder.take(LENGTH_BYTES))
    header = parse_foreign_header(decoder.take(length))
    for key in (MANIFEST_KEY, LAYERS_KEY):
        if key not in header.metadata:
            raise fail("CACHE_FILE_INVALID", f"{path.name} is no wp30-cache-2 file: its metadata lacks {key}")
    for tensor in header.tensors:
        if tensor.record.dtype not in DTYPES:
            raise fail("DTYPE_UNSUPPORTED", tensor.name, expected=sorted(DTYPES), found=tensor.record.dtype)
    manifest = parse_wp30(header.metadata[MANIFEST_KEY])
    check_consistent(manifest, parse_layer_lines(header.metadata[LAYERS_KEY]), header.records)
    size = path.stat().st_size
    if codec == "none" and size != LENGTH_BYTES + length + header.data_bytes:
        expected = LENGTH_BYTES + length + header.data_bytes
        raise fail("CACHE_FILE_INVALID", f"{path.name}: bytes of the file", expected=expected, found=size)
    return Wp30Info(manifest, codec, size, header.data_bytes), header


def _check_room(needed: int, allowed: int | None) -> None:
    if allowed is not None and needed > allowed:
        raise fail(
            "DEVICE_MEMORY_SHORT", "the arrays of the file do not fit into memory", expected=f"at most {allowed} bytes",
            found=f"{needed} bytes", allowed=allowed, needed=needed,
        )  # fmt: skip


def _array(dtype: str, shape: tuple[int, ...], decoder: Decoder) -> mx.array:
    """The next array of the file, bit by bit."""
    bits = np.empty(shape, uint_dtype(dtype))
    decoder.fill(bits.reshape(-1).view(np.uint8).data)
    return mx.array(bits).view(DTYPES[dtype])


def _cache(layer: Wp30Layer, arrays: Mapping[str, mx.array]) -> Any:
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    from kvstore.runtime.sparse import SparseKVCache, SparseQuantizedKVCache

    whole = layer.stored_positions == layer.logical_offset
    names = tensor_names(layer.layer, quantized=layer.quantized)
    sides = [tuple(arrays[name] for name in side) for side in names]
    cache: Any
    if layer.bits is not None and layer.group_size is not None:
        make = QuantizedKVCache if whole else SparseQuantizedKVCache
        cache = make(group_size=layer.group_size, bits=layer.bits)
        cache.keys, cache.values = sides
    else:
        cache = KVCache() if whole else SparseKVCache()
        cache.keys, cache.values = (side[0] for side in sides)
    cache.offset = layer.logical_offset
    if not whole:
        cache.rows = layer.stored_positions
    return cache

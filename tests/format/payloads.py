"""Payloads for tests: bit patterns that floats would lose, strides, and data that looks like a cache."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvstore.format.object import encode_object, parse_object
from kvstore.format.tensors import DTYPE_SIZES, Payload, uint_dtype

Array = np.ndarray[Any, Any]

EDGES = {
    "F16": (0x8000, 0x7C00, 0xFC00, 0x7C01, 0xFE55, 0x0001, 0x83FF),
    "BF16": (0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFC7, 0x0001, 0x807F),
    "F32": (0x80000000, 0x7F800000, 0x7F800001, 0xFFC12345, 0x00000001, 0x807FFFFF),
    "F64": (1 << 63, 0x7FF << 52, 0x7FF0000000000001, 0xFFF8000000012345, 1),
}
"""−0, infinities, signalling and quiet NaNs with payloads, subnormals."""


def bits(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """Random bits, a few of the dtype's edge cases among them."""
    rng = np.random.default_rng(seed)
    kind = uint_dtype(dtype)
    array = rng.integers(0, 2 ** (8 * kind.itemsize), shape, np.uint64).astype(kind)
    flat = array.reshape(-1)
    edges = EDGES.get(dtype, ())[: flat.size]
    flat[: len(edges)] = edges
    return array


def cache_like(shape: tuple[int, ...], seed: int, dtype: str = "BF16") -> Array:
    """Values as keys have them: each channel at a scale of its own. BF16, F16 or F32 as unsigned integers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 5, shape[-1])).astype(np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.view(np.uint32) if dtype == "F32" else values.astype(np.float16).view(np.uint16)


def strided(array: Array, how: int) -> Array:
    """The same values over other memory: as they are, a slice of a longer buffer, reversed, or axes swapped."""
    if array.ndim < 2 or how == 0:
        return array
    if how == 1:
        room = np.zeros((*array.shape[:-2], array.shape[-2] + 3, array.shape[-1]), array.dtype)
        room[..., 2 : 2 + array.shape[-2], :] = array
        return room[..., 2 : 2 + array.shape[-2], :]
    if how == 2:
        return np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :]
    return np.ascontiguousarray(array.swapaxes(0, -1)).swapaxes(0, -1)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    """Payloads of a few tensors of any dtype, shape and stride, zero-size and rank-0 ones included."""
    count = draw(st.integers(0, 4))
    tensors = {}
    for _ in range(count):
        name = draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8))
        dtype = draw(st.sampled_from(list(DTYPE_SIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        array = bits(dtype, shape, draw(st.integers(0, 99)))
        if draw(st.booleans()):
            array &= np.asarray(3, array.dtype)
        tensors[name] = (dtype, strided(array, draw(st.integers(0, 3))))
    return Payload.make(tensors)


def encoded(payload: Payload, **options: Any) -> bytes:
    """An object's bytes."""
    return b"".join(encode_object(payload, digest=payload.digest(), **options).parts)


def decoded(data: bytes, payload: Payload) -> Payload:
    """The payload that an object holds."""
    return parse_object(memoryview(data), digest=payload.digest(), size=payload.size).read_payload()


def split_object(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """An object taken apart: header document and data frames. Independent of the reader."""
    length = int.from_bytes(data[4:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 32
    starts = [at for at in range(8 + length, end) if data[at : at + 4] == b"\x51\x2a\x4d\x18"]
    table = next(at for at in starts if at + 8 + int.from_bytes(data[at + 4 : at + 8], "little") == len(data))
    sizes = np.frombuffer(data[table + 8 : end], "<u4").tolist()
    frames, at = [], 8 + length
    for size in sizes:
        frames.append(data[at : at + size])
        at += size
    return header, frames


def join_object(header: dict[str, Any] | bytes, frames: list[bytes], sizes: list[int] | None = None) -> bytes:
    """An object put together from what :func:`split_object` gave, digest and sizes made right."""
    text = header
    if isinstance(text, dict):
        text = json.dumps(text, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    head = b"\x50\x2a\x4d\x18" + len(text).to_bytes(4, "little") + text
    body = np.array([len(frame) for frame in frames] if sizes is None else sizes, "<u4").tobytes()
    body += hashlib.sha256(head + body).digest()
    return head + b"".join(frames) + b"\x51\x2a\x4d\x18" + len(body).to_bytes(4, "little") + body

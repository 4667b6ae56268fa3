"""Zstandard frames: how planes become frames and back, and what a reader demands of one.

Many frames are made or decoded in one call, outside the interpreter lock: with 64 KiB
tensors two threads that make a call per frame are slower than one. A data frame states
its content size and carries a checksum; it needs no dictionary, a window of at most
8 MiB, and fills its slot in the frame table to the byte. All of this is checked before
anything is decoded, since the library ignores an output limit where a frame states its
size and silently drops what follows a frame.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import zstandard

from kvstore.errors import KVStoreError, fail
from kvstore.format.filters import scratch
from kvstore.limits import MAX_ZSTD_WINDOW

__all__ = ["Coding", "check_frames", "compress_planes", "decompress_frames", "frame_end", "frame_fault", "joined"]

Coding: TypeAlias = Literal["raw", "entropy", "repeats"]
"""How a plane is compressed: not at all, by its byte frequencies, or by repeats as well. Readers need not know."""

Array = np.ndarray[Any, Any]


def _parameters(**changes: int) -> zstandard.ZstdCompressionParameters:
    base = {
        "compression_level": 1, "strategy": zstandard.STRATEGY_FAST, "window_log": 17, "target_length": 0,
        "write_content_size": 1, "write_checksum": 1,
    }  # fmt: skip
    return zstandard.ZstdCompressionParameters(**(base | changes))


_PARAMETERS: Final = {
    # Any acceleration turns literal compression off; this much of it steps over the data without looking.
    "raw": _parameters(hash_log=6, min_match=7, target_length=131072),
    # Short matches only break the literals up: a tiny table finds no more than the long runs.
    "entropy": _parameters(hash_log=7, min_match=7),
    "repeats": _parameters(hash_log=14, min_match=6, window_log=20),
}


class _Contexts(threading.local):
    """Per thread: zstd contexts, which are costly to make and must not be shared."""

    def __init__(self) -> None:
        self.compressors = {
            coding: zstandard.ZstdCompressor(compression_params=parameters)
            for coding, parameters in _PARAMETERS.items()
        }
        self.decompressor = zstandard.ZstdDecompressor()


_CONTEXTS = _Contexts()


def compress_planes(planes: Array, codings: Sequence[Coding]) -> list[Any]:
    """Make a frame of each plane.

    Args:
        planes: Bytes ``[chunks, planes, bytes per plane]``, contiguous.
        codings: One for each plane of a chunk.

    Returns:
        The frames as buffers, chunk by chunk, plane by plane.
    """
    chunks, count, size = planes.shape
    frames: list[Any] = [None] * (chunks * count)
    for coding in dict.fromkeys(codings):
        places = [at for at, wanted in enumerate(codings) if wanted == coding]
        segments = np.empty((chunks, len(places), 2), np.uint64)
        segments[:, :, 0] = np.arange(chunks)[:, None] * (count * size) + np.array(places) * size
        segments[:, :, 1] = size
        source = zstandard.BufferWithSegments(planes.data, segments.tobytes())
        made = _CONTEXTS.compressors[coding].multi_compress_to_buffer(source)
        for at, place in enumerate(places):
            frames[place::count] = [made[index] for index in range(at, len(made), len(places))]
    return frames


def joined(frames: Sequence[Any]) -> memoryview:
    """The frames one after another, in this thread's scratch ``"frames"``: memory that need not be touched anew."""
    room = scratch("frames", (sum(map(len, frames)),), np.uint8).data
    at = 0
    for frame in frames:
        room[at : at + len(frame)] = memoryview(frame).cast("B")
        at += len(frame)
    return room


def decompress_frames(frames: memoryview, size: int) -> Array:
    """Decode frames that follow one another, ``size`` bytes of content in all, and check their checksums.

    The frames must have passed :func:`check_frames`, so that each of them is whole and nothing else is there.

    Returns:
        The bytes, in this thread's scratch ``"decoded"``.

    Raises:
        IntegrityError: ZSTD_CORRUPT.
    """
    # With a byte to spare the decoder cannot stop before the last frame's checksum.
    room = scratch("decoded", (size + 1,), np.uint8)
    try:
        reader = _CONTEXTS.decompressor.stream_reader(frames, read_across_frames=True)
        count = reader.readinto(room)
    except (zstandard.ZstdError, ValueError) as error:
        raise _corrupt(f"a frame does not decode ({error})") from None
    if count != size:
        raise _corrupt(f"frames of {size} bytes decode to {count}")
    return room[:size]


def _corrupt(what: str) -> KVStoreError:
    return fail("ZSTD_CORRUPT", what, fix="The file is damaged; verify the store.")


_MAGIC: Final = 0xFD2FB528
_SINGLE_SEGMENT, _RESERVED, _CHECKSUM, _DICTIONARY = 0x20, 0x08, 0x04, 0x03
_HEADER_BYTES: Final = 14
"""Longest header without a dictionary id: magic, descriptor, window, eight bytes of content size."""
_CHECKSUM_BYTES: Final = 4
_MIN_FRAME_BYTES: Final = 4 + 1 + 1 + 3 + _CHECKSUM_BYTES
_LARGEST_SHORT: Final = 256 + 0xFFFF
_SLICE: Final = 4096
_MAX_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class _Header:
    """What a frame header says; ``blocks`` is where its blocks begin."""

    window: int
    content: int
    blocks: int


def check_frames(data: memoryview, starts: Array, sizes: Array, contents: Array) -> None:
    """Prove that each slot of the frame table holds one frame as required, without decoding it.

    Args:
        data: The whole object.
        starts: Where each slot begins; int64, the slots lie within ``data``.
        sizes: Bytes of each slot; int64.
        contents: Bytes that each frame must decode to; int64.

    Raises:
        InvalidError: ZSTD_SIZE_UNDECLARED, ZSTD_WINDOW_TOO_LARGE, ZSTD_DICTIONARY_REQUIRED, FRAME_TABLE_INVALID.
        IntegrityError: ZSTD_CORRUPT.
    """
    raw = np.frombuffer(data, np.uint8)
    for at in range(0, len(starts), _SLICE):
        part = slice(at, at + _SLICE)
        sound = _sound(raw, starts[part], sizes[part], contents[part])
        for index in np.flatnonzero(~sound) + at:
            fault = frame_fault(data, int(starts[index]), int(sizes[index]), int(contents[index]))
            if fault is not None:
                raise fault


def _sound(raw: Array, starts: Array, sizes: Array, contents: Array) -> Array:
    """Which slots surely hold a right frame: the checks of :func:`frame_fault`, for many frames at once.

    False asks for the exact check; it need not mean a fault.
    """
    if len(starts) and 256 <= contents[0] <= _LARGEST_SHORT and (contents == contents[0]).all():
        # Nearly always: frames of one size, whose headers are therefore the same.
        wanted = np.frombuffer(_short_header(int(contents[0])), np.uint8)
        if int(starts[-1]) + len(wanted) <= len(raw):
            sound: Array = (raw[starts[:, None] + np.arange(len(wanted))] == wanted).all(axis=1)
            sound &= sizes >= _MIN_FRAME_BYTES
            if sound.all():
                return sound & _blocks_end(raw, starts + len(wanted), starts + sizes - 4, sound)
    return _sound_of_any(raw, starts, sizes, contents)


def _short_header(content: int) -> bytes:
    """The header of a frame in one segment, with a content size of two bytes and a checksum."""
    descriptor = 1 << 6 | _SINGLE_SEGMENT | _CHECKSUM
    return _MAGIC.to_bytes(4, "little") + bytes((descriptor,)) + (content - 256).to_bytes(2, "little")


def _sound_of_any(raw: Array, starts: Array, sizes: Array, contents: Array) -> Array:
    head = raw[np.minimum(starts[:, None] + np.arange(_HEADER_BYTES), len(raw) - 1)].astype(np.int64)
    descriptor = head[:, 4]
    single = (descriptor & _SINGLE_SEGMENT) != 0
    sound = (sizes >= _MIN_FRAME_BYTES) & (head[:, :4] == (0x28, 0xB5, 0x2F, 0xFD)).all(axis=1)
    sound &= (descriptor & (_RESERVED | _CHECKSUM | _DICTIONARY)) == _CHECKSUM
    # Windows of up to 4 MiB and content sizes in one, two or four bytes: all that our parameters and chunks lead to.
    sound &= single | (head[:, 5] < (22 - 10) << 3)
    flag = descriptor >> 6
    at = 6 - single
    low, high = _take(head, at) | _take(head, at + 1) << 8, _take(head, at + 2) << 16 | _take(head, at + 3) << 24
    stated = np.choose(flag, (low & 0xFF, low + 256, low | high, -1))
    sound &= (stated == contents) & ((flag > 0) | single)
    blocks = starts + at + np.choose(flag, (1, 2, 4, 8))
    result: Array = sound & _blocks_end(raw, blocks, starts + sizes - 4, sound)
    return result


def _take(head: Array, columns: Array) -> Array:
    taken: Array = head[np.arange(len(head)), columns]
    return taken


def _blocks_end(raw: Array, position: Array, end: Array, active: Array) -> Array:
    """Which frames' last block ends exactly at ``end``; follows the ``active`` ones, some steps far."""
    active, done = active.copy(), np.zeros(len(position), bool)
    for _ in range(_MAX_STEPS):
        active &= position + 3 <= end
        if not active.any():
            break
        at = np.minimum(position, len(raw) - 3)
        block = raw[at].astype(np.int64) | raw[at + 1].astype(np.int64) << 8 | raw[at + 2].astype(np.int64) << 16
        kind = block >> 1 & 3
        position = np.where(active, position + 3 + np.where(kind == 1, 1, block >> 3), position)
        done |= active & (block & 1 == 1) & (kind != 3) & (position == end)
        active &= (block & 1 == 0) & (kind != 3)
    return done


def frame_fault(data: memoryview, start: int, size: int, content: int) -> KVStoreError | None:
    """The error for the slot of ``size`` bytes at ``start``, or None where it holds one frame of ``content`` bytes."""
    slot = data[start : start + size]
    header = _parse_header(slot)
    if isinstance(header, KVStoreError):
        return header
    if header.window > MAX_ZSTD_WINDOW:
        return fail("ZSTD_WINDOW_TOO_LARGE", "a frame's window", expected=MAX_ZSTD_WINDOW, found=header.window)
    if header.content != content:
        return fail("FRAME_TABLE_INVALID", "a frame's content size", expected=content, found=header.content)
    end = _walk(slot, header.blocks)
    if isinstance(end, KVStoreError):
        return end
    if end != size:
        return fail("FRAME_TABLE_INVALID", "the end of a frame in its slot", expected=size, found=end)
    return None


def frame_end(data: memoryview, start: int) -> int | KVStoreError:
    """Where the frame at ``start`` ends, whatever its header asks for; or the error if it ends nowhere in ``data``."""
    if len(data) - start < _MIN_FRAME_BYTES:
        return fail("ZSTD_TRUNCATED", "the data ends where a frame was to begin", found=len(data) - start)
    if int.from_bytes(data[start : start + 4], "little") != _MAGIC:
        return fail("FRAME_TABLE_INVALID", "there are fewer frames than the header leads to", found=start)
    descriptor = data[start + 4]
    single = bool(descriptor & _SINGLE_SEGMENT)
    size, dictionary = (1 if single else 0, 2, 4, 8)[descriptor >> 6], (0, 1, 2, 4)[descriptor & _DICTIONARY]
    blocks = start + (5 if single else 6) + dictionary + size
    end = _walk(data, blocks, tail=_CHECKSUM_BYTES if descriptor & _CHECKSUM else 0)
    if isinstance(end, KVStoreError):
        return fail("FRAME_TABLE_INVALID", "a frame that ends nowhere", found=start)
    if end > len(data):
        return fail("ZSTD_TRUNCATED", "the data ends within a frame", expected=end, found=len(data))
    return end


def _walk(data: memoryview, position: int, *, tail: int = _CHECKSUM_BYTES) -> int | KVStoreError:
    """From a frame's first block to its end, ``tail`` bytes after the last one; it may lie past that of ``data``."""
    last = 0
    while not last and position + 3 <= len(data):
        block = int.from_bytes(data[position : position + 3], "little")
        last, kind = block & 1, block >> 1 & 3
        if kind == 3:
            return fail("ZSTD_CORRUPT", "a frame has a block of the reserved type")
        position += 3 + (1 if kind == 1 else block >> 3)
    # A frame that runs off without a last block ends past the data, wherever exactly.
    return position + tail if last else max(position, len(data)) + 1


def _parse_header(slot: memoryview) -> _Header | KVStoreError:
    if len(slot) < _MIN_FRAME_BYTES:
        return fail("FRAME_TABLE_INVALID", "a slot's size", expected=f"at least {_MIN_FRAME_BYTES}", found=len(slot))
    if int.from_bytes(slot[:4], "little") != _MAGIC:
        return fail("ZSTD_CORRUPT", "the magic number of a frame", expected=f"{_MAGIC:#x}", found=slot[:4].hex())
    descriptor = slot[4]
    single = bool(descriptor & _SINGLE_SEGMENT)
    if descriptor & _RESERVED:
        return fail("ZSTD_CORRUPT", "a frame header uses a reserved bit")
    if descriptor & _DICTIONARY:
        return fail("ZSTD_DICTIONARY_REQUIRED", "a frame asks for a dictionary")
    width = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    if not width or not descriptor & _CHECKSUM:
        return fail("ZSTD_SIZE_UNDECLARED", "a frame header", expected="content size and checksum", found=descriptor)
    at = 5 if single else 6
    content = int.from_bytes(slot[at : at + width], "little") + (256 if width == 2 else 0)
    exponent, mantissa = slot[5] >> 3, slot[5] & 7
    window = content if single else (1 << 10 + exponent) + (1 << 7 + exponent) * mantissa
    return _Header(window, content, at + width)

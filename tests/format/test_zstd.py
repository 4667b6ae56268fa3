"""Frames: what a reader demands of them before it decodes, frame by frame and many at once."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.zstd import Coding, check_frames, compress_planes, decompress_frames, frame_end, frame_fault

NOISE = np.random.default_rng(4).integers(0, 256, 300_000, np.uint8)
SKEWED = (np.random.default_rng(5).standard_normal(300_000) * 6).astype(np.int8).view(np.uint8)
CODINGS: tuple[Coding, ...] = get_args(Coding)


def frame(data: bytes, **options: int) -> bytes:
    base = {"compression_level": 3, "write_content_size": 1, "write_checksum": 1, "window_log": 17}
    parameters = zstandard.ZstdCompressionParameters(**(base | options))
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def check(slots: list[bytes], contents: list[int]) -> None:
    sizes = np.array([len(slot) for slot in slots], np.int64)
    starts = np.cumsum(sizes) - sizes
    check_frames(memoryview(b"".join(slots)), starts, sizes, np.array(contents, np.int64))


def fault(slot: bytes, content: int) -> str | None:
    found = frame_fault(memoryview(slot), 0, len(slot), content)
    return None if found is None else found.code


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 65791, 65792, 131072, 300_000])
def test_planes_become_sound_frames_and_come_back(coding: Coding, size: int) -> None:
    planes = np.stack([NOISE[:size], SKEWED[:size]])[None]
    frames = [bytes(made) for made in compress_planes(planes, (coding, coding))]
    check(frames, [size, size])
    for made, plane in zip(frames, planes[0], strict=True):
        assert zstandard.ZstdDecompressor().decompress(made, allow_extra_data=False) == plane.tobytes()
    decoded = decompress_frames(memoryview(b"".join(frames)), 2 * size)
    assert np.array_equal(decoded.reshape(2, size), planes[0])


def test_planes_may_differ_in_coding_and_keep_their_order() -> None:
    planes = np.stack([np.stack([SKEWED[at : at + 5000], NOISE[at : at + 5000]]) for at in (0, 7000, 20_000)])
    frames = [memoryview(bytes(made)) for made in compress_planes(planes, ("entropy", "raw"))]
    decoded = decompress_frames(memoryview(b"".join(frames)), planes.size)
    assert np.array_equal(decoded.reshape(planes.shape), planes)
    assert all(len(made) > 5000 for made in frames[1::2])
    assert all(len(made) < 4000 for made in frames[0::2])


FAULTS = {
    "no content size": (frame(b"abc" * 50, write_content_size=0), "ZSTD_SIZE_UNDECLARED"),
    "no checksum": (frame(b"abc" * 50, write_checksum=0), "ZSTD_SIZE_UNDECLARED"),
    "window": (
        b"\x28\xb5\x2f\xfd" + bytes([0x84, 14 << 3]) + (150).to_bytes(4, "little") + bytes(10), "ZSTD_WINDOW_TOO_LARGE",
    ),
    "window of 9 MiB": (
        b"\x28\xb5\x2f\xfd" + bytes([0x84, 13 << 3 | 1]) + (150).to_bytes(4, "little") + bytes(10),
        "ZSTD_WINDOW_TOO_LARGE",
    ),
    "dictionary": (b"\x28\xb5\x2f\xfd" + bytes([0x65, 7, 150]) + bytes(10), "ZSTD_DICTIONARY_REQUIRED"),
    "reserved bit": (b"\x28\xb5\x2f\xfd" + bytes([0x2C, 150]) + bytes(10), "ZSTD_CORRUPT"),
    "reserved block": (b"\x28\xb5\x2f\xfd" + bytes([0x24, 150, 7, 0, 0]) + bytes(10), "ZSTD_CORRUPT"),
    "magic": (b"\x27\xb5\x2f\xfd" + frame(b"abc" * 50)[4:], "ZSTD_CORRUPT"),
    "skippable": (b"\x50\x2a\x4d\x18" + (12).to_bytes(4, "little") + bytes(12), "ZSTD_CORRUPT"),
    "another size": (frame(b"abc" * 51), "FRAME_TABLE_INVALID"),
    "a bomb": (frame(bytes(1 << 26)), "FRAME_TABLE_INVALID"),
    "empty": (b"", "FRAME_TABLE_INVALID"),
    "cut": (frame(b"abc" * 50)[:-1], "FRAME_TABLE_INVALID"),
    "a byte more": (frame(b"abc" * 50) + b"\0", "FRAME_TABLE_INVALID"),
    "two frames": (frame(b"abc" * 50) + frame(b""), "FRAME_TABLE_INVALID"),
    "a skippable frame more": (frame(b"abc" * 50) + b"\x50\x2a\x4d\x18" + bytes(4), "FRAME_TABLE_INVALID"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_frame_that_breaks_a_rule_is_refused(name: str) -> None:
    slot, code = FAULTS[name]
    good = frame(b"xyz" * 50)
    assert fault(slot, 150) == code
    with pytest.raises(KVStoreError) as caught:
        check([good, slot, good], [150, 150, 150])
    assert caught.value.code == code


def test_windows_of_8_mib_and_sizes_of_8_bytes_are_allowed() -> None:
    blocks = (150 << 3 | 1).to_bytes(3, "little") + b"x" * 150 + bytes(4)
    for head in (bytes([0x84, 13 << 3]) + (150).to_bytes(4, "little"), bytes([0xE4]) + (150).to_bytes(8, "little")):
        slot = b"\x28\xb5\x2f\xfd" + head + blocks
        assert fault(slot, 150) is None
        check([slot], [150])


def test_frames_of_very_many_blocks_are_followed_to_the_end() -> None:
    slot = frame(NOISE.tobytes(), window_log=10)
    check([slot, slot], [len(NOISE)] * 2)
    with pytest.raises(KVStoreError):
        check([slot, slot[:-5] + bytes(5)], [len(NOISE), len(NOISE) - 1])


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3), st.integers(0, 2))
def test_the_check_of_many_agrees_with_the_exact_one(flips: list[tuple[int, int]], which: int) -> None:
    good = [frame(b"abcd" * 40), frame(NOISE[:300].tobytes()), frame(bytes(2000))]
    contents = [160, 300, 2000]
    slot = bytearray(good[which])
    for at, value in flips:
        slot[at % len(slot)] = value
    slots = [bytes(slot) if at == which else data for at, data in enumerate(good)]
    wanted = fault(bytes(slot), contents[which])
    if wanted is None:
        check(slots, contents)
        return
    with pytest.raises(KVStoreError) as caught:
        check(slots, contents)
    assert caught.value.code == wanted


@given(st.binary(min_size=0, max_size=60))
def test_any_bytes_are_a_fault_or_a_frame(data: bytes) -> None:
    slot = b"\x28\xb5\x2f\xfd" + data
    assert fault(slot, 5) in {
        None, "ZSTD_CORRUPT", "ZSTD_SIZE_UNDECLARED", "ZSTD_WINDOW_TOO_LARGE", "ZSTD_DICTIONARY_REQUIRED",
        "FRAME_TABLE_INVALID",
    }  # fmt: skip


def test_a_wrong_checksum_or_block_is_corrupt() -> None:
    good = frame(NOISE[:5000].tobytes())
    for at in (len(good) - 1, 300):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(KVStoreError) as caught:
            decompress_frames(memoryview(good + bytes(bad)), 10_000)
        assert caught.value.code == "ZSTD_CORRUPT"


@pytest.mark.parametrize("cut", [0, 3, 13, 100, -1])
def test_the_end_of_a_frame_that_is_cut_is_not_found(cut: int) -> None:
    good = frame(NOISE[:5000].tobytes())
    assert frame_end(memoryview(b"--" + good + b"more"), 2) == 2 + len(good)
    found = frame_end(memoryview(good[:cut]), 0)
    assert isinstance(found, KVStoreError)
    assert found.code == "ZSTD_TRUNCATED"

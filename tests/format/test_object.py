"""Objects: what goes in comes out, whatever it is, and nothing that was tampered with does."""

from __future__ import annotations

import io
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.format.boxes import Grid
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.object import Codec, encode_object, parse_object
from kvstore.format.object_header import checked_layout, parse_header, table_bytes
from kvstore.format.tensors import Payload, TensorSpec, payload_size
from kvstore.limits import MAX_CHUNK_BYTES
from tests.format.payloads import (
    Array,
    bits,
    cache_like,
    decoded,
    encoded,
    join_object,
    payloads,
    split_object,
    strided,
)

CODECS: tuple[Codec, ...] = ("small", "fast")


def same(left: Payload, right: Payload) -> bool:
    return left.specs == right.specs and all(
        np.array_equal(a, b) for a, b in zip(left.arrays, right.arrays, strict=True)
    )


def cache(rows: int = 256, layers: int = 3, dtype: str = "BF16") -> Payload:
    return Payload.make({
        f"{layer}.{part}": (dtype, cache_like((1, 2, rows, 16), 10 * layer + at, dtype))
        for layer in range(layers)
        for at, part in enumerate(("keys", "values"))
    })


def code_of(data: bytes, payload: Payload, **options: Any) -> str:
    arguments: dict[str, Any] = {"digest": payload.digest(), "size": payload.size} | options
    with pytest.raises(KVStoreError) as caught:
        parse_object(memoryview(data), **arguments).verify_payload()
    return caught.value.code


@given(payloads(), st.sampled_from(CODECS))
def test_any_payload_comes_back(payload: Payload, codec: Codec) -> None:
    data = encoded(payload, codec=codec)
    assert same(decoded(data, payload), payload)
    parse_object(memoryview(data), digest=payload.digest(), size=payload.size).verify_payload()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 512])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_caches_of_any_length_come_back(rows: int, dtype: str, codec: Codec) -> None:
    payload = cache(rows, dtype=dtype)
    assert same(decoded(encoded(payload, codec=codec), payload), payload)


@pytest.mark.parametrize("how", range(4))
@pytest.mark.parametrize(
    "shape", [(5000, 257), (3, 700, 300), (2, 2, 2, 100_000), (1, 1, MAX_CHUNK_BYTES + 5), (600_000,)]
)
def test_tensors_larger_than_a_chunk_come_back(shape: tuple[int, ...], how: int) -> None:
    array = cache_like(shape, 1)
    payload = Payload.make({"a": ("BF16", strided(array, how)), "b": ("U8", bits("U8", (7,), 1))})
    data = encoded(payload)
    assert same(decoded(data, payload), payload)
    _, frames = split_object(data)
    sizes = [zstandard.get_frame_parameters(frame).content_size for frame in frames]
    assert max(sizes) <= MAX_CHUNK_BYTES
    parse_object(memoryview(data), digest=payload.digest(), size=payload.size).verify_payload()


def test_keys_and_values_shrink_and_noise_does_not_grow() -> None:
    payload = cache()
    assert len(encoded(payload)) < 0.75 * payload.size
    noise = Payload.make({f"{layer}.k": ("U16", bits("U16", (1, 2, 256, 64), layer)) for layer in range(8)})
    assert len(encoded(noise)) < noise.size * 1.001


def test_repeating_rows_are_found() -> None:
    rows = cache_like((1, 1, 16, 64), 1)
    array = rows[:, :, np.random.default_rng(1).integers(0, 16, 256)]
    payload = Payload.make({"0.values": ("BF16", array), "1.values": ("BF16", cache_like((1, 1, 256, 64), 2))})
    alone = Payload.make({"0.values": ("BF16", array)})
    assert len(encoded(alone)) < 0.2 * alone.size
    assert len(encoded(payload)) < 0.45 * payload.size


def test_fast_stores_tensors_unfiltered_and_uncompressed() -> None:
    payload = cache()
    result = encode_object(payload, digest=payload.digest(), codec="fast")
    assert dict(result.filters) == {"none": payload.size - len(payload.header)}
    assert payload.size < result.size < 1.05 * payload.size


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_payload_gives_the_same_bytes(codec: Codec) -> None:
    payload = cache()
    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(lambda _: encoded(payload, codec=codec), range(8)))
    again = Payload.make({
        spec.name: (spec.dtype, strided(array, 1)) for spec, array in zip(payload.specs, payload.arrays, strict=True)
    })
    assert results == {encoded(again, codec=codec)}


def test_an_encoded_object_says_its_size_digest_and_filters() -> None:
    payload = cache()
    result = encode_object(payload, digest=payload.digest())
    data = b"".join(result.parts)
    assert (result.size, result.stored_digest) == (len(data), sha256_digest(data))
    assert sum(result.filters.values()) == payload.size - len(payload.header)


def test_an_object_is_a_zstd_stream() -> None:
    payload = cache()
    data = encoded(payload, codec="fast")
    stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
    assert sorted(stream.read()) == sorted(payload.to_bytes()[len(payload.header) :])


def test_encoding_can_be_stopped_between_chunks() -> None:
    payload = Payload.make({"a": ("U8", bits("U8", (3 * MAX_CHUNK_BYTES,), 1))})
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        encode_object(payload, digest=payload.digest(), checkpoint=stop)


def test_chunks_are_decoded_into_strided_views_by_several_threads() -> None:
    payload = cache(512, layers=6)
    data = memoryview(encoded(payload))
    reader = parse_object(data, digest=payload.digest(), size=payload.size)
    buffers = {spec.name: np.zeros((1, 2, 700, 16), np.uint16) for spec in payload.specs}
    views = {name: buffer[:, :, 100:612] for name, buffer in buffers.items()}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda chunk: reader.decode_chunk(chunk, views), reader.chunks))
    for spec, array in zip(payload.specs, payload.arrays, strict=True):
        assert np.array_equal(views[spec.name], array)
        assert not buffers[spec.name][:, :, :100].any()
        assert not buffers[spec.name][:, :, 612:].any()


def test_threads_do_not_share_scratch() -> None:
    made = [cache(200, layers=1), cache(256, layers=2), cache(256, layers=2, dtype="F32")]
    start = threading.Barrier(3)

    def work(payload: Payload) -> bool:
        start.wait()
        return all(same(decoded(encoded(payload), payload), payload) for _ in range(10))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, made))


@pytest.mark.parametrize(
    "destination", [None, np.zeros((1, 2, 256, 15), np.uint16), np.zeros((1, 2, 256, 16), np.int16)]
)
def test_destinations_must_fit(destination: Array | None) -> None:
    payload = cache(layers=1)
    reader = parse_object(memoryview(encoded(payload)), digest=payload.digest(), size=payload.size)
    arrays = {spec.name: np.zeros(spec.shape, np.uint16) for spec in payload.specs}
    if destination is None:
        del arrays["0.values"]
    else:
        arrays["0.values"] = destination
    with pytest.raises(KVStoreError) as caught:
        reader.decode_into(arrays)
    assert caught.value.code == "USAGE"


def test_read_only_destinations_are_refused() -> None:
    payload = cache(layers=1)
    reader = parse_object(memoryview(encoded(payload)), digest=payload.digest(), size=payload.size)
    arrays = {spec.name: np.zeros(spec.shape, np.uint16) for spec in payload.specs}
    arrays["0.keys"].flags.writeable = False
    with pytest.raises(KVStoreError):
        reader.decode_into(arrays)


SMALL = Payload.make({
    "0.k": ("BF16", cache_like((1, 1, 24, 8), 1)),
    "0.v": ("BF16", bits("BF16", (1, 1, 24, 8), 2)),
    "x": ("U8", np.arange(9, dtype=np.uint8)),
})
SMALL_BYTES = encoded(SMALL)


def test_no_flipped_byte_leads_to_wrong_data() -> None:
    digest, size = SMALL.digest(), SMALL.size
    for at in range(len(SMALL_BYTES)):
        for flip in (0x01, 0x80, 0xFF):
            data = bytearray(SMALL_BYTES)
            data[at] ^= flip
            try:
                payload = parse_object(memoryview(data), digest=digest, size=size).read_payload()
            except KVStoreError:
                continue
            assert same(payload, SMALL), at


def test_every_truncation_is_refused() -> None:
    for cut in range(len(SMALL_BYTES)):
        assert code_of(SMALL_BYTES[:cut], SMALL) == "ZSTD_TRUNCATED", cut


@pytest.mark.parametrize("tail", [b"\0", b"\x50\x2a\x4d\x18\0\0\0\0", SMALL_BYTES[:-1]])
def test_trailing_data_is_refused(tail: bytes) -> None:
    assert code_of(SMALL_BYTES + tail, SMALL) == "ZSTD_TRAILING_DATA"


def test_an_object_twice_ends_in_a_table_that_contradicts_it() -> None:
    assert code_of(SMALL_BYTES + SMALL_BYTES, SMALL) == "FRAME_TABLE_INVALID"


def test_names_on_the_outside_must_be_those_on_the_inside() -> None:
    other = Digest("sha256:" + "0" * 64)
    assert code_of(SMALL_BYTES, SMALL, digest=other) == "OBJECT_NAME_MISMATCH"
    assert code_of(SMALL_BYTES, SMALL, size=SMALL.size + 8) == "OBJECT_NAME_MISMATCH"
    assert code_of(SMALL_BYTES, SMALL, namespace="team-a") == "NAMESPACE_MISMATCH"
    ours = encoded(SMALL, namespace="team-a")
    parse_object(memoryview(ours), digest=SMALL.digest(), size=SMALL.size, namespace="team-a").verify_payload()


def test_a_payload_under_a_false_digest_is_found() -> None:
    other = Digest("sha256:" + "0" * 64)
    data = b"".join(encode_object(SMALL, digest=other).parts)
    parse_object(memoryview(data), digest=other, size=SMALL.size).read_payload()
    assert code_of(data, SMALL, digest=other) == "PAYLOAD_DIGEST_MISMATCH"


Change = Callable[[dict[str, Any]], Any]


def group(key: str, value: Any) -> Change:
    return lambda header: header["groups"][0].__setitem__(key, value)


HEADERS: dict[str, tuple[Change, str]] = {
    "newer version": (
        lambda h: h.__setitem__("media_type", "application/vnd.kvstore.object.v2+json"), "OBJECT_VERSION_UNSUPPORTED",
    ),
    "other document": (lambda h: h.__setitem__("media_type", "text/plain"), "OBJECT_HEADER_INVALID"),
    "no media type": (lambda h: h.pop("media_type"), "OBJECT_HEADER_INVALID"),
    "unknown field": (lambda h: h.__setitem__("level", 3), "OBJECT_HEADER_INVALID"),
    "missing field": (lambda h: h.pop("namespace"), "OBJECT_HEADER_INVALID"),
    "unknown codec": (lambda h: h.__setitem__("codec", "tiny"), "FILTER_UNSUPPORTED"),
    "codec of another type": (lambda h: h.__setitem__("codec", 1), "OBJECT_HEADER_INVALID"),
    "chunks of nothing": (lambda h: h.__setitem__("chunk_bytes", 0), "OBJECT_HEADER_INVALID"),
    "chunks too large": (lambda h: h.__setitem__("chunk_bytes", MAX_CHUNK_BYTES + 1), "OBJECT_HEADER_INVALID"),
    "digest": (lambda h: h["payload"].__setitem__("digest", "sha256:00"), "OBJECT_HEADER_INVALID"),
    "digest algorithm": (lambda h: h["payload"].__setitem__("digest", "md5:00"), "DIGEST_ALGORITHM_UNSUPPORTED"),
    "size": (lambda h: h["payload"].__setitem__("size", -1), "OBJECT_HEADER_INVALID"),
    "another size": (lambda h: h["payload"].__setitem__("size", SMALL.size + 8), "OBJECT_NAME_MISMATCH"),
    "size is a boolean": (lambda h: h["payload"].__setitem__("size", True), "OBJECT_HEADER_INVALID"),
    "payload is text": (lambda h: h.__setitem__("payload", "x"), "OBJECT_HEADER_INVALID"),
    "groups is an object": (lambda h: h.__setitem__("groups", {}), "OBJECT_HEADER_INVALID"),
    "group is a number": (lambda h: h["groups"].append(1), "OBJECT_HEADER_INVALID"),
    "group missing": (lambda h: h["groups"].pop(), "OBJECT_HEADER_INVALID"),
    "group twice": (lambda h: h["groups"].append(h["groups"][0]), "ST_HEADER_INVALID"),
    "unknown field of a group": (group("level", 3), "OBJECT_HEADER_INVALID"),
    "unknown filter": (group("filter", "delta"), "FILTER_UNSUPPORTED"),
    "filter of another type": (group("filter", ["none"]), "OBJECT_HEADER_INVALID"),
    "unknown dtype": (group("dtype", "F4"), "DTYPE_UNSUPPORTED"),
    "no names": (group("names", []), "OBJECT_HEADER_INVALID"),
    "name is a number": (group("names", [1]), "OBJECT_HEADER_INVALID"),
    "empty name": (group("names", [""]), "ST_HEADER_INVALID"),
    "long name": (group("names", ["a" * 256]), "OBJECT_HEADER_INVALID"),
    "negative extent": (group("shape", [1, 1, -24, 8]), "OBJECT_HEADER_INVALID"),
    "fraction": (group("shape", [1, 1, 24.5, 8]), "OBJECT_HEADER_INVALID"),
    "rank": (group("shape", [1] * 9), "OBJECT_HEADER_INVALID"),
    "terabytes": (group("shape", [2**31 - 1, 2**20]), "ST_SHAPE_OVERFLOW"),
    "half a terabyte in small chunks": (group("shape", [2**18, 2**20]), "OBJECT_HEADER_INVALID"),
    "a row less": (group("shape", [1, 1, 23, 8]), "OBJECT_HEADER_INVALID"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_breaks_a_rule_is_refused(name: str) -> None:
    change, code = HEADERS[name]
    header, frames = split_object(SMALL_BYTES)
    change(header)
    assert code_of(join_object(header, frames), SMALL) == code


def test_an_object_of_too_many_frames_is_refused() -> None:
    """Though its sizes agree with each other and with what is asked for."""
    header, frames = split_object(SMALL_BYTES)
    tensor = TensorSpec("x", "U8", (2**19, 2**20))
    header["chunk_bytes"] = 65536
    header["groups"] = [{"dtype": "U8", "filter": "none", "names": ["x"], "shape": list(tensor.shape)}]
    header["payload"]["size"] = payload_size([tensor])
    assert code_of(join_object(header, frames), SMALL, size=payload_size([tensor])) == "FRAME_TABLE_INVALID"


MANY: dict[str, tuple[str, str, tuple[int, ...], int]] = {
    "long rows": ("U8", "none", (2**18, 2**20), 1),
    "one long row": ("U8", "none", (2**31 - 1,), 8),
    "planes": ("F64", "byte-planes", (2**12, 2**20), 1),
    "many names": ("BF16", "exponent-planes", (2**10, 2**15), 1000),
}
"""Dtype, filter, shape and number of tensors that lead to as many frames as an object may have, or nearly so."""
ENDS: dict[str, tuple[Callable[[int], list[bytes]], Callable[[int], list[int] | None], str]] = {
    "nothing": (lambda count: [], lambda count: None, "ZSTD_TRUNCATED"),
    "a table of nothing": (lambda count: [], lambda count: [0] * count, "FRAME_TABLE_INVALID"),
    "a table of one frame": (
        lambda count: [bytes(13)], lambda count: [13] + [0] * (count - 1), "ZSTD_CORRUPT"
    ),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", MANY)
def test_an_object_that_names_more_chunks_than_it_holds_costs_no_more_than_it_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    dtype, how, shape, count = MANY[name]
    names = [f"t{number:04}" for number in range(count)]
    header, _ = split_object(SMALL_BYTES)
    size = payload_size([TensorSpec(tensor, dtype, shape) for tensor in names])
    header |= {"chunk_bytes": 65536, "groups": [{"dtype": dtype, "filter": how, "names": names, "shape": list(shape)}]}
    header["payload"]["size"] = size
    frames = checked_layout(parse_header(memoryview(join_object(header, [])))[0]).frame_count
    assert 2**17 < frames <= 2**22
    made, sizes, code = ENDS[end]
    data = join_object(header, made(frames), sizes(frames))
    if end == "nothing":
        data = data[: -table_bytes(0)]

    def listed(*_: object) -> Any:
        raise AssertionError("a chunk was looked at that is not there")

    monkeypatch.setattr(Grid, "box", listed)
    tracemalloc.start()
    assert code_of(data, SMALL, size=size) == code
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * len(data) + 2**22


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b'{"a":1,"a":2}', b"\xff", b"[" * 50_000, b'{ "media_type":1}', b"1e999"]
)
def test_a_header_that_is_no_canonical_object_is_refused(text: bytes) -> None:
    _, frames = split_object(SMALL_BYTES)
    assert code_of(join_object(text, frames), SMALL) == "OBJECT_HEADER_INVALID"


def test_what_is_not_an_object_is_refused() -> None:
    assert code_of(zstandard.ZstdCompressor().compress(b"x" * 100), SMALL) == "OBJECT_HEADER_INVALID"
    assert code_of(b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + bytes(100), SMALL) == "OBJECT_HEADER_INVALID"
    assert code_of(b"", SMALL) == "ZSTD_TRUNCATED"


def test_the_helpers_that_tamper_keep_what_they_do_not_touch() -> None:
    assert join_object(*split_object(SMALL_BYTES)) == SMALL_BYTES


def test_sizes_that_contradict_the_frames_are_refused() -> None:
    header, frames = split_object(SMALL_BYTES)
    sizes = [len(frame) for frame in frames]
    moved = [sizes[0] - 1, sizes[1] + 1, *sizes[2:]]
    assert code_of(join_object(header, frames, moved), SMALL) == "FRAME_TABLE_INVALID"
    assert code_of(join_object(header, frames, [*sizes[:-1], sizes[-1] + 1]), SMALL) == "FRAME_TABLE_INVALID"
    assert code_of(join_object(header, frames, [2**32 - 1] * len(sizes)), SMALL) == "FRAME_TABLE_INVALID"
    assert code_of(join_object(header, frames[:-1]), SMALL) == "FRAME_TABLE_INVALID"
    assert code_of(join_object(header, [*frames, frames[0]]), SMALL) == "FRAME_TABLE_INVALID"
    swapped = [frames[-1], *frames[1:-1], frames[0]]
    assert code_of(join_object(header, swapped), SMALL) == "FRAME_TABLE_INVALID"


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    header, frames = split_object(SMALL_BYTES)
    parameters = zstandard.ZstdCompressionParameters(compression_level=1, write_checksum=1)
    frames[0] = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(1 << 28))
    assert len(frames[0]) < 20_000
    with pytest.raises(KVStoreError) as caught:
        parse_object(memoryview(join_object(header, frames)), digest=SMALL.digest(), size=SMALL.size)
    assert caught.value.code == "FRAME_TABLE_INVALID"


def test_a_frame_that_holds_more_than_it_states_is_corrupt() -> None:
    header, frames = split_object(SMALL_BYTES)
    content = zstandard.get_frame_parameters(frames[0]).content_size
    head = b"\x28\xb5\x2f\xfd\xa4" + content.to_bytes(4, "little")
    frames[0] = head + ((1 << 17) << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0" + bytes(4)
    data = join_object(header, frames)
    reader = parse_object(memoryview(data), digest=SMALL.digest(), size=SMALL.size)
    with pytest.raises(KVStoreError) as caught:
        reader.read_payload()
    assert caught.value.code == "ZSTD_CORRUPT"


@settings(max_examples=200)
@given(st.data())
def test_tampered_objects_with_right_digests_are_refused_or_read(data: st.DataObject) -> None:
    header, frames = split_object(SMALL_BYTES)
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[which])
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[which] = bytes(frame)
    try:
        payload = parse_object(
            memoryview(join_object(header, frames)), digest=SMALL.digest(), size=SMALL.size
        ).read_payload()
    except KVStoreError:
        return
    assert same(payload, SMALL)


def test_an_empty_payload_is_an_object_too() -> None:
    payload = Payload.make({})
    assert same(decoded(encoded(payload), payload), payload)


def test_tensors_without_elements_have_no_frames() -> None:
    payload = Payload.make({"a": ("F32", np.zeros((0, 3), np.uint32)), "b": ("U8", np.zeros((4, 0), np.uint8))})
    data = encoded(payload)
    assert split_object(data)[1] == []
    assert same(decoded(data, payload), payload)

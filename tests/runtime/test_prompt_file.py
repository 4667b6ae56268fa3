"""mlx_lm's prompt-cache files: what it wrote is read, what it could not have written is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache

from kvstore.errors import KVStoreError
from kvstore.runtime.kinds import describe
from kvstore.runtime.prompt_file import read_prompt_file, write_prompt_file
from tests.releases import OLDER, wrong_in_older
from tests.runtime.driving import feed, fetched, keys_values, same_bits

KV, Ring, Arrays, List = (
    mlx_cache.KVCache, mlx_cache.RotatingKVCache, mlx_cache.ArraysCache, mlx_cache.CacheList,
)  # fmt: skip


def arrays_cache() -> Any:
    cache = Arrays(3)
    cache[0], cache[2] = mx.ones((1, 4, 2)), mx.full((1, 3), 7.0, dtype=mx.bfloat16)
    return cache


CASES = {
    "plain": lambda: [feed(KV(), [5])],
    "plain, trimmed": lambda: [trimmed(feed(KV(), [9]), 4)],
    "several blocks": lambda: [feed(KV(), [256, 1]), feed(KV(), [257])],
    "quantized": lambda: [feed(mlx_cache.QuantizedKVCache(group_size=32, bits=4), [5])],
    "ring not full": lambda: [feed(Ring(max_size=8, keep=0), [3, 1])],
    "ring wrapped": lambda: [feed(Ring(max_size=8, keep=2), [6, *[1] * 7])],
    "ring after a long prompt": lambda: [feed(Ring(max_size=8, keep=0), [20])],
    "chunked": lambda: [feed(mlx_cache.ChunkedKVCache(chunk_size=8), [5])],
    "concatenated": lambda: [feed(mlx_cache.ConcatenateKVCache(), [5])],
    "state": lambda: [arrays_cache()],
    "list": lambda: [List(feed(KV(), [5]), arrays_cache()), feed(KV(), [5])],
    "more than ten layers": lambda: [feed(KV(), [2], seed=i) for i in range(12)],
}


def trimmed(cache: Any, count: int) -> Any:
    cache.trim(count)
    return cache


NO_PLACE = wrong_in_older("its files have no place for an empty slot")


@pytest.mark.parametrize("make", [
    pytest.param(make, marks=NO_PLACE if name in ("state", "list") else (), id=name) for name, make in CASES.items()
])  # fmt: skip
@pytest.mark.parametrize("writer", ["mlx_lm", "kvstore"])
def test_round_trip_keeps_the_state(tmp_path: Path, make: Callable[[], list[Any]], writer: str) -> None:
    path = tmp_path / "cache.safetensors"
    original = make()
    if writer == "mlx_lm":
        mlx_cache.save_prompt_cache(str(path), original, {"model": "m"})
    else:
        write_prompt_file(path, original, {"model": "m"})
    found = read_prompt_file(path)
    assert found.metadata == {"model": "m"}
    assert describe(found.cache) == describe(original)
    again = mlx_cache.load_prompt_cache(str(path))
    for ours, theirs, first in zip(found.cache, again, original, strict=True):
        if isinstance(first, (Arrays, List)):
            continue
        assert same_bits(fetched(ours, [2, 1]), fetched(first, [2, 1]))
        assert type(theirs) is type(ours)


@NO_PLACE
def test_state_slots_come_back(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    write_prompt_file(path, [arrays_cache()], {})
    cache = read_prompt_file(path).cache[0]
    assert cache[1] is None
    assert same_bits([cache[0], cache[2]], [arrays_cache()[0], arrays_cache()[2]])


def test_nothing_that_was_trimmed_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    marked = mx.full((1, 2, 1, 64), 1.5, dtype=mx.bfloat16)
    cache = feed(KV(), [3])
    cache.update_and_fetch(marked, marked)
    cache.trim(1)
    secret = struct.pack("<H", 0x3FC0) * 64
    mlx_cache.save_prompt_cache(str(path), [cache])
    assert (secret in path.read_bytes()) is not OLDER
    write_prompt_file(path, [cache], {})
    assert secret not in path.read_bytes()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "taken.safetensors"
    target.mkdir()
    for place in (target, tmp_path / "none" / "cache.safetensors"):
        with pytest.raises(KVStoreError) as error:
            write_prompt_file(place, [feed(KV(), [2])], {})
        assert error.value.code == "USAGE"
    assert list(tmp_path.iterdir()) == [target]


def test_the_name_must_tell_the_format(tmp_path: Path) -> None:
    with pytest.raises(KVStoreError) as error:
        write_prompt_file(tmp_path / "cache.npz", [feed(KV(), [2])], {})
    assert error.value.code == "USAGE"


def test_a_class_of_another_module_has_no_such_file(tmp_path: Path) -> None:
    other: Any = type("Other", (KV,), {})
    with pytest.raises(KVStoreError) as error:
        write_prompt_file(tmp_path / "cache.safetensors", [feed(other(), [2])], {})
    assert error.value.code == "CACHE_FILE_EXPORT"


def parts(tmp_path: Path) -> Any:
    """Header and data of a sound file."""
    path = tmp_path / "sound.safetensors"
    if OLDER:
        write_prompt_file(path, [feed(KV(), [256])], {"model": "m"}, shape="0.32")
    else:
        mlx_cache.save_prompt_cache(str(path), [feed(KV(), [2])], {"model": "m"})
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def shift(header: Any, by: Any) -> Any:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [n + by for n in entry["data_offsets"]]


def overlap(header: Any) -> Any:
    header["0.1"]["data_offsets"] = header["0.0"]["data_offsets"]


def set_in(*path: str, value: Any) -> Any:
    def change(header: Any) -> Any:
        target = header
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


def rename(old: str, new: str) -> Any:
    def change(header: Any) -> Any:
        header[new] = header.pop(old)

    return change


META = "__metadata__"
BAD_HEADERS = {
    "offsets past the end": lambda h: shift(h, 8),
    "offsets before the start": lambda h: shift(h, -8),
    "overlap": overlap,
    "huge shape": set_in("0.0", "shape", value=[2**31, 2**31, 1, 1]),
    "negative shape": set_in("0.0", "shape", value=[-1, -2, 256, 64]),
    "float shape": set_in("0.0", "shape", value=[1.0, 2, 256, 64]),
    "float offset": set_in("0.0", "data_offsets", value=[0.0, 65536]),
    "unknown key": set_in("0.0", "more", value=1),
    "unknown dtype": set_in("0.0", "dtype", value="F8_E4M3"),
    "dtype of no kind": set_in("0.0", "dtype", value=16),
    "no metadata": lambda h: h.pop(META),
    "metadata no texts": set_in(META, "1.0", value=1),
    "unknown class": set_in(META, "1.0", value="Popen"),
    "a function": set_in(META, "1.0", value="load_prompt_cache"),
    "a foreign name": set_in(META, "1.0", value="deque"),
    "a class without kind": set_in(META, "1.0", value="PromptTrie"),
    "a batch class": set_in(META, "1.0", value="BatchKVCache"),
    "another class": set_in(META, "1.0", value="RotatingKVCache"),
    "list without pairs": set_in(META, "1.0", value="CacheList"),
    "scalar of another kind": set_in(META, "2.1.1", value="string"),
    "scalar of no kind": set_in(META, "2.1.1", value="pickle"),
    "scalar nowhere": set_in(META, "2.1.0", value="0.9"),
    "too few classes": lambda h: h[META].pop("1.0"),
    "an index of a billion": rename("0.0", "0.1000000000"),
    "a layer of a billion": rename("0.0", "1000000000.0"),
    "an index with a sign": rename("0.0", "0.-1"),
    "an index in other digits": rename("0.0", "0.\u0661"),
    "a deep place": rename("0.0", "0" + ".0" * 5000),
    "a billion classes": set_in(META, "1.1000000000", value="KVCache"),
    "a billion scalars": set_in(META, "2.1000000000.0", value="0.0"),
    "array where the offset was": lambda h: (h[META].pop("2.1.0"), h[META].pop("2.1.1")),
}


@pytest.mark.parametrize("change", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_what_mlx_lm_cannot_have_written_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header, data = parts(tmp_path)
    change(header)
    text = json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(KVStoreError) as error:
        read_prompt_file(path)
    assert error.value.code in (
        "CACHE_FILE_INVALID", "CACHE_CLASS_UNKNOWN", "CACHE_BATCHED", "DTYPE_UNSUPPORTED", "CACHE_INCONSISTENT",
    )  # fmt: skip


BAD_BYTES = {
    "empty": b"",
    "short": b"\x08\0\0",
    "length beyond the file": struct.pack("<Q", 1 << 60) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"{{{{",
    "not an object": struct.pack("<Q", 2) + b"[]",
    "a key twice": struct.pack("<Q", 15) + b'{"a":1,"a":1}  ',
    "deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bytes_that_are_no_such_file_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(KVStoreError) as error:
        read_prompt_file(path)
    assert error.value.code == "CACHE_FILE_INVALID"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    mlx_cache.save_prompt_cache(str(path), [feed(KV(), [2])])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(KVStoreError) as error:
        read_prompt_file(path)
    assert error.value.code == "CACHE_FILE_INVALID"


def test_a_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    cache = KV()
    keys, values = keys_values(3, 0)
    cache.update_and_fetch(mx.concatenate([keys] * 2), mx.concatenate([values] * 2))
    mlx_cache.save_prompt_cache(str(path), [cache])
    with pytest.raises(KVStoreError) as error:
        read_prompt_file(path)
    assert error.value.code == "CACHE_BATCHED"

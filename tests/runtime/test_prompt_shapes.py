"""Prompt-cache files in every shape that mlx_lm has written: read from real files, written for real readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as module

from kvstore.errors import InvalidError, KVStoreError, UnsupportedError
from kvstore.runtime.kinds import describe
from kvstore.runtime.prompt_file import read_prompt_file, write_prompt_file
from kvstore.runtime.prompt_shapes import SHAPES, PromptShape, installed_shape
from tests.releases import held
from tests.runtime.driving import feed, same_bits
from tests.runtime.prompt_files.make import FOLDER, caches, filled, padded, trimmed_in_front

FILES = sorted(path.name for path in FOLDER.glob("*.safetensors"))
SWIFT = {
    "plain": (["", ""], ["KVCache", "KVCache"]),
    "without meta states": ([], ["KVCache", "KVCache"]),
    "another name": ([[""], [""]], ["KVCacheSimple", "KVCacheSimple"]),
}


def expected(name: str) -> list[Any]:
    """The same caches with the installed classes, which have no MambaCache any more."""
    return caches(module, "arrays" if name == "mamba" else name)


def arrays_of(cache: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in cache:
        if isinstance(item, module.CacheList):
            found += arrays_of(list(item.caches))
        elif isinstance(item, module.ArraysCache):
            found += [slot for slot in item.cache if slot is not None]
        else:
            found += list(held(item))
    return found


def same_state(left: list[Any], right: list[Any]) -> bool:
    return describe(left) == describe(right) and same_bits(arrays_of(left), arrays_of(right))


def raw(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def written(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("file", FILES)
def test_files_of_old_releases_are_read(file: str) -> None:
    release, _, name = file.removesuffix(".safetensors").partition("-")
    if release == "main":
        name = name.removeprefix("2026-08-")
    wanted = expected(name)
    found = read_prompt_file(FOLDER / file, wanted)
    assert found.metadata == {"model": "m", "tokenizer_config": "{}"}
    assert same_state(found.cache, wanted)
    assert [type(item) for item in found.cache] == [type(item) for item in wanted]


@pytest.mark.parametrize("file", [name for name in FILES if "list" in name and name < "0.31"])
def test_lists_that_do_not_name_their_children_need_the_model(file: str) -> None:
    with pytest.raises(InvalidError) as error:
        read_prompt_file(FOLDER / file)
    assert error.value.code == "CACHE_FILE_INVALID"
    assert "Name the model" in str(error.value)
    other = [module.CacheList(module.RotatingKVCache(8), module.KVCache())] * 2
    with pytest.raises(InvalidError):
        read_prompt_file(FOLDER / file, other[: 1 if "mixed" in file else 2])


@pytest.mark.parametrize("file", ["0.21-plain.safetensors", "0.31-list.safetensors", "main-2026-08-arrays.safetensors"])
def test_as_many_caches_as_the_model_makes(file: str) -> None:
    for count in (1, 3):
        with pytest.raises(InvalidError) as error:
            read_prompt_file(FOLDER / file, [module.KVCache()] * count)
        assert error.value.code == "CACHE_FILE_INVALID"


@pytest.mark.parametrize(("metas", "names"), SWIFT.values(), ids=SWIFT)
def test_what_mlx_swift_lm_writes(tmp_path: Path, metas: list[Any], names: list[str]) -> None:
    header, data = raw(FOLDER / "0.31-plain.safetensors")
    texts = {"1.model": "m"} | {f"2.{at}": name for at, name in enumerate(names)}
    for at, meta in enumerate(metas):
        texts |= {f"0.{at}.0": meta[0]} if isinstance(meta, list) else {f"0.{at}": meta}
    header["__metadata__"] = texts
    found = read_prompt_file(written(tmp_path / "swift.safetensors", header, data))
    assert same_state(found.cache, expected("plain"))


def test_lists_and_quantized_caches_of_mlx_swift_lm(tmp_path: Path) -> None:
    """Arrays in a row, children by counts, a step among the numbers."""
    header, data = raw(FOLDER / "0.30-list-mixed.safetensors")
    counts = ["2", "MambaCache", "2", "0", "KVCache", "2", "1", ""]
    header["__metadata__"] = {f"0.0.{at}": text for at, text in enumerate(counts)} | {"2.0": "CacheList"}
    found = read_prompt_file(written(tmp_path / "list.safetensors", header, data))
    assert same_state(found.cache, expected("list-mixed"))
    header, data = raw(FOLDER / "0.28-quantized.safetensors")
    flat = {f"0.{side * 3 + part}": header[f"0.{side}.{part}"] for side in (0, 1) for part in (0, 1, 2)}
    header = flat | {"__metadata__": header["__metadata__"]}
    found = read_prompt_file(written(tmp_path / "quantized.safetensors", header, data))
    assert same_state(found.cache, expected("quantized"))


META = "__metadata__"
BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a class less": ("0.31-plain", lambda h: h[META].pop("2.1")),
    "a class more": ("0.31-plain", lambda h: h[META].update({"2.2": "KVCache"})),
    "a meta state more": ("0.31-plain", lambda h: h[META].update({"0.2": "", "0.3": ""})),
    "no classes": ("0.31-plain", lambda h: [h[META].pop(key) for key in ("2.0", "2.1")]),
    "an unknown class": ("0.31-plain", lambda h: h[META].update({"2.0": "Popen"})),
    "a function": ("0.31-plain", lambda h: h[META].update({"2.0": "load_prompt_cache"})),
    "a batch": ("0.31-plain", lambda h: h[META].update({"2.0": "BatchKVCache"})),
    "numbers where none are": ("0.31-plain", lambda h: (h[META].pop("0.0"), h[META].update({"0.0.0": "5"}))),
    "no window": ("0.31-ring-wrapped", lambda h: h[META].update({"0.0.1": "None"})),
    "a negative offset": ("0.31-ring-wrapped", lambda h: h[META].update({"0.0.2": "-1"})),
    "a huge offset": ("0.31-ring-wrapped", lambda h: h[META].update({"0.0.2": "9" * 400})),
    "digits of another script": ("0.31-ring-wrapped", lambda h: h[META].update({"0.0.2": "\u0665"})),
    "an index outside": ("0.31-ring-wrapped", lambda h: h[META].update({"0.0.3": "9"})),
    "a number less": ("0.31-ring-wrapped", lambda h: h[META].pop("0.0.3")),
    "two numbers more": ("0.28-ring-wrapped", lambda h: h[META].update({"0.0.5": "1"})),
    "7 numbers of quantization": ("0.28-quantized", lambda h: h[META].update({f"0.0.{n}": "1" for n in (4, 5, 6)})),
    "a side less": ("0.28-quantized", lambda h: [h.pop(f"0.1.{part}") for part in range(3)]),
    "no arrays": ("0.31-arrays", lambda h: h[META].update({"2.0": "QuantizedKVCache"})),
    "a chunk alone": ("0.31-chunked-front", lambda h: h[META].update({"2.1": "ArraysCache"})),
    "children without classes": ("0.31-list-mixed", lambda h: [h[META].pop(f"0.0.0.{n}") for n in (0, 1)]),
    "another child": ("0.31-list-mixed", lambda h: h[META].update({"0.0.0.0": "CacheList"})),
    "texts as lists": ("0.31-list-mixed", lambda h: h[META].update({"0.0.1.1.0": "7"})),
}


@pytest.mark.parametrize(("file", "change"), BAD.values(), ids=BAD)
def test_what_no_release_can_have_written(
    tmp_path: Path, file: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    header, data = raw(FOLDER / f"{file}.safetensors")
    change(header)
    sizes = sorted((entry["data_offsets"] for name, entry in header.items() if name != META), key=lambda span: span[0])
    at = 0
    for span in sizes:  # no holes, where a tensor was taken out
        span[:], at = [at, at + span[1] - span[0]], at + span[1] - span[0]
    with pytest.raises(KVStoreError) as error:
        read_prompt_file(written(tmp_path / "bad.safetensors", header, data[:at]))
    assert error.value.code in ("CACHE_FILE_INVALID", "CACHE_CLASS_UNKNOWN", "CACHE_INCONSISTENT")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plain", "quantized", "ring-open", "ring-wrapped", "arrays", "chunked", "list"])
def test_every_shape_is_written_and_read(tmp_path: Path, name: str, shape: PromptShape) -> None:
    wanted, path = expected(name), tmp_path / "cache.safetensors"
    if shape == "0.30" and name == "list":
        with pytest.raises(UnsupportedError) as error:
            write_prompt_file(path, wanted, {}, shape=shape)
        assert error.value.code == "CACHE_FILE_EXPORT"
        return
    write_prompt_file(path, wanted, {"model": "m"}, shape=shape)
    found = read_prompt_file(path)
    assert found.metadata == {"model": "m"}
    assert same_state(found.cache, wanted)


@pytest.mark.parametrize("name", ["plain", "quantized", "ring-open", "ring-wrapped", "arrays", "chunked", "list"])
def test_the_installed_shape_is_read_by_the_installed_release(tmp_path: Path, name: str) -> None:
    wanted, path = expected(name), tmp_path / "cache.safetensors"
    write_prompt_file(path, wanted, {"model": "m"})
    found, metadata = module.load_prompt_cache(str(path), return_metadata=True)
    assert metadata == {"model": "m"}
    assert same_state(found, wanted)


@pytest.mark.parametrize("file", [name for name in FILES if name.startswith(("0.30-", "0.31-", "main"))])
def test_an_old_shape_is_byte_for_byte_what_its_release_wrote(tmp_path: Path, file: str) -> None:
    """Where the release could write what it then could not read, we refuse."""
    shape = next(shape for shape in SHAPES if file.startswith(shape))
    name = file.removeprefix(shape + "-").removesuffix(".safetensors")
    path = tmp_path / "cache.safetensors"
    try:
        write_prompt_file(path, expected(name), {"model": "m", "tokenizer_config": "{}"}, shape=shape)
    except UnsupportedError:
        assert name in ("chunked-front",) or (shape == "0.30" and "list" in name)
        return
    ours, theirs = raw(path), raw(FOLDER / file)
    assert ours[0][META] == theirs[0][META]
    assert ours == theirs


def unwritten() -> list[Any]:
    return [module.KVCache(), feed(module.KVCache(), [3])]


def empty_slot() -> list[Any]:
    cache = module.ArraysCache(3)
    cache[0] = mx.ones((1, 2))
    return [cache]


def trimmed() -> list[Any]:
    cache = feed(module.ConcatenateKVCache(), [5])
    cache.trim(2)
    return [cache]


NO_PLACE: dict[str, tuple[Callable[[], list[Any]], tuple[PromptShape, ...]]] = {
    "never written": (unwritten, ("0.30", "0.31", "main-2026-08")),
    "an empty slot": (empty_slot, ("0.30", "0.31", "main-2026-08")),
    "padding": (lambda: [padded(filled(module.ArraysCache(2)))], ("0.30", "0.31")),
    "a chunk further on": (lambda: [trimmed_in_front(module.ChunkedKVCache(8))], ("0.30", "0.31", "main-2026-08")),
    "trimmed rows that come back": (trimmed, SHAPES),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("make", "refused"), NO_PLACE.values(), ids=NO_PLACE)
def test_what_a_shape_has_no_place_for_is_refused(
    tmp_path: Path, make: Callable[[], list[Any]], refused: tuple[PromptShape, ...], shape: PromptShape
) -> None:
    path = tmp_path / "cache.safetensors"
    if shape not in refused:
        write_prompt_file(path, make(), {}, shape=shape)
        assert same_written(read_prompt_file(path).cache, make())
        return
    with pytest.raises(UnsupportedError) as error:
        write_prompt_file(path, make(), {}, shape=shape)
    assert error.value.code == "CACHE_FILE_EXPORT"
    assert list(tmp_path.iterdir()) == []


def same_written(left: list[Any], right: list[Any]) -> bool:
    return describe(left) == describe(right)


def test_the_installed_shape() -> None:
    from importlib import metadata

    release = metadata.version("mlx-lm")
    assert installed_shape() == ("0.32" if release >= "0.32" else "0.31")

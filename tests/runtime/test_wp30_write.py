"""Caches as wp30-cache-2 files: read by a reader that knows nothing of kvstore; what would lose state is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from safetensors import safe_open

import kvstore
from kvstore.format.wp30_check import Receiver
from kvstore.runtime.kinds import handler_for_class
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.registry import register_kind
from kvstore.runtime.sparse import drop_positions
from kvstore.runtime.wp30_file import inspect_wp30, read_wp30
from kvstore.runtime.wp30_notes import claims_in, config_facts, extra_in
from kvstore.runtime.wp30_write import write_wp30
from tests.releases import held
from tests.runtime import wp30_reference as reference
from tests.runtime.driving import bits, code_of, feed, same_bits
from tests.runtime.test_wp30_file import CODECS, dense, read, written
from tests.runtime.tiny import NEXT, logits, prefilled, tiny, tokens
from tests.runtime.wp30_reference import Layer


def caches() -> list[Any]:
    quantized = feed(QuantizedKVCache(group_size=32, bits=4), [20])
    return [
        feed(KVCache(), [20]), drop_positions([feed(KVCache(), [20])], [range(0, 20, 3)])[0], quantized,
        drop_positions([quantized], [[1, 5, 19]])[0], drop_positions([feed(KVCache(), [20])], [[]])[0],
    ]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_written_another_reads_to_the_bit(tmp_path: Path, codec: Any) -> None:
    path = tmp_path / "c"
    facts = {"created_utc": "2026-03-04T05:06:07Z", "document_id": "doc-é", "method_id": "m", "num_kv_heads": 2,
             "compression_config": {"b": 0.1, "a": 1}}  # fmt: skip
    done = write_wp30(path, caches(), tokens(20), facts, extra={"zz": 1, "method_id": "over"}, codec=codec)
    assert done.file_bytes == path.stat().st_size
    layers, document, metadata = reference.deserialize(reference.unpack(path.read_bytes(), codec))
    for cache, layer in zip(caches(), layers, strict=True):
        keys, values = held(cache)
        assert same_bits(keys, layer.k)
        assert same_bits(values, layer.v)
        assert (layer.offset, layer.n_kept) == (cache.offset, getattr(cache, "rows", cache.offset))
        assert (layer.bits, layer.group_size) == (getattr(cache, "bits", None), getattr(cache, "group_size", None))
    assert document["method_id"] == "over"
    assert metadata["wp30_manifest"] == json.dumps(document, separators=(",", ":"))
    assert metadata["wp30_layers"] == json.dumps(json.loads(metadata["wp30_layers"]))
    again = inspect_wp30(path)
    assert again.codec == codec


def test_documents_byte_for_byte(tmp_path: Path) -> None:
    """The same state and the same facts, written by the other writer."""
    names = {"KVCache": "KVCache", "SparseKVCache": "SparseKVCache"}
    made = [feed(KVCache(), [20]), drop_positions([feed(KVCache(), [20])], [range(0, 20, 3)])[0],
            feed(QuantizedKVCache(group_size=32, bits=4), [20])]  # fmt: skip
    layers = []
    for cache in made:
        keys, values = held(cache)
        layers.append(Layer(
            names.get(type(cache).__name__, type(cache).__name__), keys, values, 20, getattr(cache, "rows", 20),
            getattr(cache, "bits", None), getattr(cache, "group_size", None),
        ))  # fmt: skip
    document = reference.manifest(layers, tokens(20), {"new": [1, 2.5], "document_id": "over"})
    facts = {name: value for name, value in document.items() if name != "document_id"}
    write_wp30(tmp_path / "c", made, tokens(20), facts, extra={"new": [1, 2.5], "document_id": "over"})
    _, _, ours = reference.deserialize((tmp_path / "c").read_bytes())
    _, _, theirs = reference.deserialize(reference.serialize(layers, document))
    assert ours["wp30_manifest"] == theirs["wp30_manifest"]
    assert ours["wp30_layers"] == theirs["wp30_layers"]
    with safe_open(str(tmp_path / "c"), "np") as opened:
        assert sorted(opened.keys()) == sorted(f"L{i}.{s}{p}" for i in range(3) for s in "kv"
                                               for p in (range(3) if i == 2 else [""]))  # fmt: skip


class _NoBiases(QuantizedKVCache):  # type: ignore[misc]
    """A cache of a mode without biases, as a later mlx_lm may have."""

    mode = "mxfp4"


INEXPRESSIBLE: dict[str, Any] = {
    "rotating": lambda: feed(RotatingKVCache(max_size=8), [20]), "chunked": lambda: feed(ChunkedKVCache(8), [20]),
    "list": lambda: CacheList(feed(KVCache(), [20])), "never written": KVCache,
}  # fmt: skip


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_what_the_format_cannot_express(tmp_path: Path, name: str) -> None:
    mixed = [feed(KVCache(), [20]), INEXPRESSIBLE[name]()]
    assert code_of(write_wp30, tmp_path / "c", mixed, tokens(20), {}) == "CACHE_FILE_EXPORT"
    assert list(tmp_path.iterdir()) == []


def test_a_state_cannot_be_expressed(tmp_path: Path) -> None:
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 4))
    assert code_of(write_wp30, tmp_path / "c", [state], tokens(20), {}) == "CACHE_FILE_EXPORT"


def test_a_mode_without_biases(tmp_path: Path) -> None:
    cache = _NoBiases(group_size=32, bits=4)
    parts: Any = mx.quantize(mx.ones((1, 2, 20, 32)), 32, 4, mode="mxfp4")
    assert len(parts) == 2
    cache.keys, cache.values, cache.offset = parts, parts, 20
    handler: Any = type(handler_for_class(QuantizedKVCache))
    register_kind(_NoBiases, handler(_NoBiases))
    assert code_of(write_wp30, tmp_path / "c", [cache], tokens(20), {}) == "CACHE_FILE_EXPORT"


def test_other_ids_than_the_cache_has_read(tmp_path: Path) -> None:
    assert code_of(write_wp30, tmp_path / "c", [feed(KVCache(), [20])], tokens(19), {}) == "CACHE_INCONSISTENT"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    cache = [feed(KVCache(), [20])]
    assert code_of(write_wp30, tmp_path / "no" / "c", cache, tokens(20), {}) == "STORE_IO"


@pytest.mark.parametrize(("config", "expected"), [
    ({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "rope_theta": 1e4}, (2, 16, 1e4)),
    ({"text_config": {"num_attention_heads": 4, "head_dim": 8, "rope_parameters": {"rope_theta": 5}}}, (4, 8, 5)),
    ({}, (None, None, None)),
])  # fmt: skip
def test_geometry_from_a_config(config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    facts = config_facts(config)
    assert (facts["num_kv_heads"], facts["head_dim"], facts["rope_theta"]) == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def store(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvstore.Store]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(models / "cache"))
    mx.disable_compile()
    with kvstore.Store.open(tmp_path / "store") as opened:
        yield opened
    mx.enable_compile()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [None, CacheOptions(kv_bits=8, kv_group_size=32)])
@pytest.mark.parametrize("sparse", [False, True])
def test_from_file_to_store_to_model_to_file(
    store: kvstore.Store, models: Path, tmp_path: Path, codec: Any, options: CacheOptions | None, sparse: bool
) -> None:
    model = tiny(models, "llama")
    made, twin = (prefilled(model, 70, options) for _ in range(2))
    if sparse:
        made, twin = (drop_positions(c, [range(0, 70, 2)] * 4, record_positions=False) for c in (made, twin))
    facts = {"method_id": "halves" if sparse else None, "num_kv_heads": 2, "head_dim": 32, "config_hash": "c"}
    write_wp30(tmp_path / "in", made, tokens(70), facts, codec=codec)
    found = read_wp30(tmp_path / "in", tokens(70), receiver=Receiver(4, 2, 32))
    receipt = store.put(
        found.cache, token_ids=tokens(70), model=model, method=found.method, annotations=found.annotations
    )
    back = store.load(
        store.match(tokens(71), model=model, options=options, method="halves" if sparse else None), into=model
    )
    assert back.receipt.subject == receipt.subject
    claims = claims_in(store.show(receipt.subject).info.annotations)
    write_wp30(tmp_path / "out", back.cache, tokens(70), claims, extra=extra_in(claims), codec=codec)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert logits(model, back.cache, NEXT) == logits(model, twin, NEXT)


def test_random_bits_survive_the_file(tmp_path: Path) -> None:
    layer = dense()
    (cache,) = read(written(tmp_path / "c", [layer])).cache
    assert (bits(cache.keys) == bits(layer.k)).all()
    assert np.isnan(np.array(cache.keys.astype(mx.float32))).any()

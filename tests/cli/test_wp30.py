"""``put`` of wp30-cache-2 files, a look at them, and ``get`` of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvstore
from kvstore.runtime.sparse import drop_positions
from tests.cli.conftest import Run, runner
from tests.releases import held
from tests.runtime import wp30_reference as reference
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS
from tests.runtime.tiny import run as prefill_by_hand
from tests.runtime.wp30_reference import Layer

IDS = [n % 61 for n in range(40)]


@pytest.fixture(scope="module")
def caches(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Layer]]:
    """Layers of a real model, whole and thinned, in the terms of the other writer."""
    bound = kvstore.load_model(model)
    whole = prefill_by_hand(bound, make_prompt_cache(bound.model), IDS)
    thin = drop_positions(whole, [range(0, 40, 3)] * len(whole))
    return {"whole": [_layer(item, 40) for item in whole], "thin": [_layer(item, item.rows) for item in thin]}


def _layer(cache: Any, kept: int) -> Layer:
    keys, values = held(cache)
    return Layer(type(cache).__name__, keys, values, 40, kept)


def file_of(path: Path, layers: list[Layer], codec: str = "none", **facts: Any) -> Path:
    path.write_bytes(reference.pack(reference.serialize(layers, reference.manifest(layers, IDS, **facts)), codec))
    return path


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    return file


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_put_takes_in_a_file_by_its_content(
    kv: Run, model: Path, ids: Path, tmp_path: Path, caches: dict[str, list[Layer]], codec: str
) -> None:
    file = file_of(tmp_path / "cache.bin", caches["whole"], codec)
    ran = kv("put", file, "--model", model, "--tokens", ids, "--json")
    assert ran.code == 0, ran.err
    assert ran.document["entry_id"] == kv("put", "--model", model, "--tokens", ids, "--json").document["entry_id"]
    entry = kv("ls", "--json").document["entries"][0]
    notes = entry["annotations"]
    assert (notes["wp30.document_id"], notes["wp30.codec"]) == ("doc-é", codec)
    assert notes["wp30.created_utc"] == "2026-03-04T05:06:07Z"


def test_a_thinned_cache_keeps_its_method(
    kv: Run, model: Path, ids: Path, tmp_path: Path, caches: dict[str, list[Layer]]
) -> None:
    facts = {"method_id": "thirds", "compression_config": {"keep": 0.33}}
    file = file_of(tmp_path / "cache.bin", caches["thin"], "zstd", **facts)
    entry = kv("put", file, "--model", model, "--tokens", ids, "--json").document["entry_id"]
    shown = json.loads(kv("show", entry, "--raw", "manifest").out)["method"]
    assert (shown["name"], shown["config"]) == ("thirds", '{"keep":0.33}')
    nameless = file_of(tmp_path / "nameless.bin", caches["thin"])
    ran = kv("put", nameless, "--model", model, "--tokens", ids, "--json")
    assert (ran.code, ran.document["error"]["code"]) == (4, "METHOD_MISSING")


def test_an_entry_of_a_lossy_method_is_found_where_the_method_is_named(
    kv: Run, model: Path, ids: Path, tmp_path: Path, caches: dict[str, list[Layer]]
) -> None:
    file = file_of(tmp_path / "cache.bin", caches["thin"], method_id="thirds")
    entry = kv("put", file, "--model", model, "--tokens", ids, "--json").document["entry_id"]
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps([*IDS, 7]))
    for shape in ([], ["--any-shape"]):
        asked = ["match", "--model", model, "--tokens", longer, *shape, "--json"]
        for other in ([], ["--method", "halves"]):
            ran = kv(*asked, *other)
            assert (ran.code, ran.document["error"]["code"]) == (3, "NO_PREFIX")
        found = kv(*asked, "--method", "thirds").document
        assert (found["entry_id"], found["token_count"]) == (entry, 40)
    explained = kv("explain", "--model", model, "--tokens", longer, "--method", "thirds", "--json").document
    assert explained["entry_id"] == entry


def test_from_file_to_file(
    kv: Run, model: Path, ids: Path, tmp_path: Path, caches: dict[str, list[Layer]]
) -> None:
    for name, codec in (("whole", "none"), ("thin", "gzip")):
        facts = {"method_id": None if name == "whole" else "thirds", "config_hash": "c9"}
        file = file_of(tmp_path / f"{name}.in", caches[name], codec, **facts)
        entry = kv("put", file, "--model", model, "--tokens", ids, "--json").document["entry_id"]
        out = tmp_path / f"{name}.out"
        get = ["get", entry, "--model", model, "-o", out, "--format", "wp30-cache-2", "--file-codec", codec, "--json"]
        if name == "thin":
            refused = kv(*get)
            assert (refused.code, refused.document["error"]["code"]) == (6, "METHOD_MISMATCH")
            get += ["--method", "thirds"]
        ran = kv(*get)
        assert ran.code == 0, ran.err
        theirs = reference.deserialize(reference.unpack(file.read_bytes(), codec))
        ours = reference.deserialize(reference.unpack(out.read_bytes(), codec))
        assert ours[2] == theirs[2]
        assert ran.document["file_bytes"] == out.stat().st_size


def test_an_entry_of_our_own_as_such_a_file(kv: Run, model: Path, ids: Path, tmp_path: Path) -> None:
    entry = kv("put", "--model", model, "--tokens", ids, "--json").document["entry_id"]
    out = tmp_path / "out"
    ran = kv(
        "get", entry, "--model", model, "-o", out, "--format", "wp30-cache-2", "--set", "document_id=a b",
        "--set", "weight_files_sha256=null", "--set", "note={\"n\": 1.5}",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    layers, document, _ = reference.deserialize(out.read_bytes())
    assert reference.check(document, None, IDS) is None
    assert (document["document_id"], document["note"]) == ("a b", {"n": 1.5})
    assert (document["num_kv_heads"], document["head_dim"], document["rope_theta"]) == (2, 32, 10000.0)
    assert document["mlx_version"]
    assert {layer.n_kept for layer in layers} == {40}


def test_a_file_may_be_packed_harder(kv: Run, model: Path, ids: Path, tmp_path: Path) -> None:
    entry = kv("put", "--model", model, "--tokens", ids, "--json").document["entry_id"]
    for codec, low, high in (("gzip", 1, 9), ("zstd", 1, 19)):
        sizes, payloads = [], []
        for level in (low, high):
            out = tmp_path / f"{codec}-{level}"
            get = ["get", entry, "--model", model, "-o", out, "--format", "wp30-cache-2", "--file-codec", codec]
            assert kv(*get, "--file-level", level).code == 0
            data = out.read_bytes()
            sizes.append(len(data))
            payloads.append(reference.deserialize(reference.unpack(data, codec))[0])
        assert sizes[0] > sizes[1]
        assert [layer.n_kept for layer in payloads[0]] == [layer.n_kept for layer in payloads[1]]


def test_get_refuses_what_cannot_be_expressed(models: Path, kv: Run, tmp_path: Path, ids: Path) -> None:
    windowed = real_folder(models / "gemma3-for-wp30", CONFIGS["gemma3"])
    entry = kv("put", "--model", windowed, "--tokens", ids, "--json").document["entry_id"]
    ran = kv("get", entry, "--model", windowed, "-o", tmp_path / "out", "--format", "wp30-cache-2", "--json")
    assert ran.code == 7
    assert ran.document["error"]["code"] == "CACHE_FILE_EXPORT"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more", [
        ["--set", "a=1"], ["--file-codec", "gzip"], ["--file-level", "3"], ["--format", "wp30-cache-2", "--set", "a"],
        ["--format", "wp30-cache-2", "--file-level", "1"],
        ["--format", "wp30-cache-2", "--file-codec", "gzip", "--file-level", "10"],
    ], ids=str,
)  # fmt: skip
def test_settings_that_do_not_fit(kv: Run, model: Path, tmp_path: Path, more: list[str]) -> None:
    assert kv("get", "x", "--model", model, "-o", tmp_path / "o.safetensors", *more).code == 2


def test_other_ids_and_other_models_are_refused(
    kv: Run, model: Path, ids: Path, tmp_path: Path, caches: dict[str, list[Layer]]
) -> None:
    file = file_of(tmp_path / "cache.bin", caches["whole"])
    ids.write_text(json.dumps(IDS[:-1]))
    ran = kv("put", file, "--model", model, "--tokens", ids, "--json")
    assert ran.document["error"]["code"] == "CACHE_FILE_INVALID"
    ids.write_text(json.dumps(IDS))
    wide = file_of(tmp_path / "wide.bin", caches["whole"], head_dim=64)
    ran = kv("put", wide, "--model", model, "--tokens", ids, "--json")
    assert (ran.code, ran.document["error"]["code"]) == (6, "MODEL_MISMATCH")


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_a_look_needs_no_model_and_stores_nothing(
    kv: Run, tmp_path: Path, caches: dict[str, list[Layer]], codec: str
) -> None:
    file = file_of(tmp_path / "cache.bin", caches["thin"], codec)
    document = kv("put", file, "--inspect-only", "--json").document
    assert (document["type"], document["codec"]) == ("inspect", codec)
    assert document["manifest"] == reference.manifest(caches["thin"], IDS)
    lines = kv("put", file, "--inspect-only").out
    assert "14/40" in lines
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("more", [["--model", "m"], ["--tokens", "t"], ["--label", "l"]])
def test_a_look_takes_nothing_else(kv: Run, tmp_path: Path, more: list[str]) -> None:
    assert kv("put", tmp_path / "f", "--inspect-only", *more).code == 2
    assert kv("put", "--inspect-only").code == 2


def test_a_look_at_another_file(kv: Run, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"text")
    ran = runner(tmp_path / "store")("put", tmp_path / "f", "--inspect-only", "--json")
    assert (ran.code, ran.document["error"]["code"]) == (4, "CACHE_FILE_INVALID")

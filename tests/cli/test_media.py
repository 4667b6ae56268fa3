"""``--media``: prompts in which tokens stand for images, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import kvstore
from tests.cli.conftest import Run
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS
from tests.runtime.tiny import run as prefill_by_hand

IMAGE = 90
IDS = [*range(10), IMAGE, IMAGE, IMAGE, *range(20, 27)]
PROCESSOR = "sha256:" + "ab" * 32
Describe = Callable[..., Path]


@pytest.fixture(scope="module")
def seeing(models: Path) -> Path:
    """A model whose config says which token stands for an image."""
    return real_folder(models / "seeing", {**CONFIGS["llama"], "image_token_id": IMAGE})


@pytest.fixture
def cache(seeing: Path, tmp_path: Path) -> Path:
    """A file that mlx-lm wrote."""
    file, bound = tmp_path / "cache.safetensors", kvstore.load_model(seeing)
    save_prompt_cache(str(file), prefill_by_hand(bound, make_prompt_cache(bound.model), IDS), {})
    return file


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    return file


@pytest.fixture
def describe(tmp_path: Path) -> Describe:
    """Write a media file with one item."""
    (tmp_path / "cat.png").write_bytes(b"a cat")

    def write(**changes: Any) -> Path:
        item = {"start": 10, "length": 3, "kind": "image", "file": "cat.png", "processor": PROCESSOR, **changes}
        file = tmp_path / "media.json"
        file.write_text(json.dumps([{key: value for key, value in item.items() if value is not None}]))
        return file

    return write


def test_put_match_and_explain_know_the_picture(
    kv: Run, seeing: Path, cache: Path, ids: Path, describe: Describe, tmp_path: Path
) -> None:
    put = ["put", cache, "--model", seeing, "--tokens", ids, "--json"]
    bare = kv(*put)
    assert (bare.code, bare.document["error"]["code"]) == (4, "MEDIA_DIGEST_MISSING")
    entry = kv(*put, "--media", describe()).document["entry_id"]
    shown = json.loads(kv("show", entry, "--raw", "manifest").out)["prefix"]["media"]
    digest = "sha256:" + sha256(b"a cat").hexdigest()
    assert shown == [{"start": 10, "length": 3, "kind": "image", "digest": digest, "processor": PROCESSOR}]
    asked = ["--model", seeing, "--tokens", ids, "--json"]
    for media in (describe(), describe(file=None, digest=digest)):
        assert kv("match", *asked, "--media", media).document["token_count"] == 19
        assert kv("match", *asked, "--any-shape", "--media", media).document["token_count"] == 19
        assert kv("explain", *asked, "--media", media).document["token_count"] == 19
    (tmp_path / "cat.png").write_bytes(b"a cat, but another")
    assert kv("match", *asked, "--media", describe()).document["token_count"] == 10
    assert kv("match", *asked).document["token_count"] == 10
    out = tmp_path / "back.safetensors"
    assert kv("get", entry, "--model", seeing, "-o", out).code == 0


def test_a_prompt_with_media_is_not_prefilled_as_text(kv: Run, seeing: Path, ids: Path, describe: Describe) -> None:
    ran = kv("put", "--model", seeing, "--tokens", ids, "--media", describe())
    assert ran.code == 2
    assert "prefills text alone" in ran.err


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both names": ({"digest": PROCESSOR}, "USAGE"),
    "no name": ({"file": None}, "USAGE"),
    "no such file": ({"file": "dog.png"}, "USAGE"),
    "no processor": ({"processor": None}, "USAGE"),
    "beyond the end": ({"length": 30}, "FIELD_RANGE"),
    "no digest": ({"file": None, "digest": "abc"}, "FIELD_FORMAT"),
    "a field too many": ({"name": "cat"}, "FIELD_UNKNOWN"),
    "no kind": ({"kind": None}, "FIELD_MISSING"),
}


@pytest.mark.parametrize(("changes", "code"), WRONG.values(), ids=WRONG)
def test_items_that_are_none(
    kv: Run, seeing: Path, cache: Path, ids: Path, describe: Describe, changes: dict[str, Any], code: str
) -> None:
    ran = kv("put", cache, "--model", seeing, "--tokens", ids, "--media", describe(**changes), "--json")
    assert ran.document["error"]["code"] == code
    assert kv("ls", "--json").document["entries"] == []


@pytest.mark.parametrize("text", ["{}", "[1]", "[", "[" * 100_000], ids=["object", "number", "cut", "deep"])
def test_files_that_are_none(kv: Run, seeing: Path, cache: Path, ids: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "media.json"
    file.write_text(text)
    ran = kv("put", cache, "--model", seeing, "--tokens", ids, "--media", file, "--json")
    assert ran.code in (2, 4)
    assert ran.document["error"]["code"] in ("USAGE", "FIELD_TYPE")


def test_the_models_own_processor_counts_where_none_is_named(
    kv: Run, models: Path, ids: Path, describe: Describe, cache: Path
) -> None:
    folder = real_folder(models / "seeing-with-processor", {**CONFIGS["llama"], "image_token_id": IMAGE})
    (folder / "preprocessor_config.json").write_text('{"size": 224}')
    put = ["put", cache, "--model", folder, "--tokens", ids, "--media", describe(processor=None), "--json"]
    entry = kv(*put).document["entry_id"]
    manifest = json.loads(kv("show", entry, "--raw", "manifest").out)
    assert manifest["prefix"]["media"][0]["processor"] == manifest["model"]["processor"] is not None

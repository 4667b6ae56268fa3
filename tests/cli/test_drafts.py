"""``--draft-model``: a model and its draft model on the command line; both, or a miss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache

import kvstore
from tests.cli.conftest import Run
from tests.releases import held
from tests.runtime.driving import same_bits
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS
from tests.runtime.tiny import run as prefill_by_hand

IDS = [n % 61 for n in range(90)]


@pytest.fixture(scope="module")
def main(models: Path) -> Path:
    return real_folder(models / "main", CONFIGS["qwen3"])


@pytest.fixture(scope="module")
def draft(models: Path) -> Path:
    return real_folder(models / "draft", {**CONFIGS["llama"], "num_hidden_layers": 2})


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    return file


def test_a_prompt_is_read_by_both(kv: Run, main: Path, draft: Path, ids: Path, tmp_path: Path) -> None:
    both = ["--model", main, "--draft-model", draft]
    put = kv("put", *both, "--tokens", ids, "--label", "talk", "--json").document
    assert put["token_count"] == put["draft"]["token_count"] == 90
    found = kv("match", *both, "--tokens", ids, "--json").document
    assert (found["entry_id"], found["token_count"]) == (put["entry_id"], 89)
    assert found["draft"] == {"entry_id": put["draft"]["entry_id"], "token_count": 89}
    out = tmp_path / "both.safetensors"
    got = kv("get", "talk", *both, "-o", out, "--json").document
    assert got["draft"] == put["draft"]
    assert len(load_prompt_cache(str(out))) == 4 + 2
    alone = kv("get", "talk", "--model", main, "-o", tmp_path / "main.safetensors")
    assert "--draft-model writes both" in alone.err
    assert len(load_prompt_cache(str(tmp_path / "main.safetensors"))) == 4
    command = [sys.executable, "-m", "mlx_lm", "generate", "--model", main, "--draft-model", draft, "--prompt", "w3 w4"]
    done = subprocess.run(
        [*map(str, command), "--prompt-cache-file", str(out), "--max-tokens", "4", "--ignore-chat-template"],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_file_with_both_is_taken_in(kv: Run, main: Path, draft: Path, ids: Path, tmp_path: Path) -> None:
    caches = []
    for folder, count in ((main, 90), (draft, 89)):
        bound = kvstore.load_model(folder)
        caches += prefill_by_hand(bound, make_prompt_cache(bound.model), IDS[:count])
    file, both = tmp_path / "in.safetensors", ["--model", main, "--draft-model", draft]
    save_prompt_cache(str(file), caches, {})
    put = kv("put", file, *both, "--tokens", ids, "--label", "talk", "--json").document
    assert (put["token_count"], put["draft"]["token_count"]) == (90, 89)
    assert kv("put", file, *both, "--tokens", ids, "--json").document["created"] is False
    out = tmp_path / "out.safetensors"
    assert kv("get", "talk", *both, "-o", out, "--json").document["token_count"] == 89
    trim_prompt_cache(caches[:4], 1)
    for ours, theirs in zip(load_prompt_cache(str(out)), caches, strict=True):
        assert same_bits(held(ours), held(theirs))
    alone = kv("put", file, "--model", main, "--tokens", ids, "--json")
    assert (alone.code, alone.document["error"]["code"]) == (4, "CACHE_FILE_INVALID")


@pytest.mark.parametrize("gone", [0, 1], ids=["main", "draft"])
def test_half_a_pair_is_a_miss(kv: Run, main: Path, draft: Path, ids: Path, tmp_path: Path, gone: int) -> None:
    both = ["--model", main, "--draft-model", draft]
    put = kv("put", *both, "--tokens", ids, "--json").document
    entries = [put["entry_id"], put["draft"]["entry_id"]]
    assert kv("rm", entries[gone], "--yes").code == 0
    ran = kv("match", *both, "--tokens", ids, "--json")
    assert (ran.code, ran.document["error"]["code"]) == (3, "NO_PREFIX")
    ran = kv("get", entries[0], *both, "-o", tmp_path / "out.safetensors", "--json")
    assert (ran.code, ran.document["error"]["code"]) == (3, ("NOT_FOUND", "NO_PREFIX")[gone])
    assert not (tmp_path / "out.safetensors").exists()


def test_both_stop_where_one_of_them_has_to(kv: Run, models: Path, draft: Path, ids: Path) -> None:
    state = real_folder(models / "state", CONFIGS["mamba2"])
    for both in ((state, draft), (draft, state)):
        asked = ["--model", both[0], "--draft-model", both[1], "--tokens", ids, "--json"]
        put = kv("put", *asked).document
        assert put["token_count"] == put["draft"]["token_count"] == 89
        assert kv("match", *asked).document["token_count"] == 89


@pytest.mark.parametrize(
    "more", [["--if-covered", "skip"], ["--checkpoint-every", "20"], ["--media", "m.json"]], ids=str
)
def test_what_a_pair_cannot_have(kv: Run, main: Path, draft: Path, ids: Path, more: list[str]) -> None:
    ran = kv("put", "--model", main, "--draft-model", draft, "--tokens", ids, *more)
    assert ran.code == 2
    assert "--draft-model does not go with" in ran.err


@pytest.mark.parametrize("more", [["--any-shape"], ["--method", "m"]], ids=str)
def test_what_a_pair_cannot_be_asked_for(kv: Run, main: Path, draft: Path, ids: Path, more: list[str]) -> None:
    ran = kv("match", "--model", main, "--draft-model", draft, "--tokens", ids, *more)
    assert ran.code == 2
    assert "--draft-model does not go with" in ran.err

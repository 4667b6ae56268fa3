"""The demo keeps its promises on any model, and says so with its exit code when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with full and with windowed attention."""
    return real_folder(tmp_path_factory.mktemp("models") / "tiny", CONFIGS["gemma3"], dtype="bfloat16")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is longer than the model's windows."""
    file = tmp_path_factory.mktemp("documents") / "document.txt"
    file.write_text(" ".join(f"w{number}" for number in range(50)))
    return file


def demo(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MLX_DISABLE_COMPILE": "1", "XDG_CACHE_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(DEMO), *[str(arg) for arg in args]], capture_output=True, text=True, check=False, env=env,
        cwd=ROOT,
    )  # fmt: skip


def test_the_demo_runs_and_every_promise_is_kept(tmp_path: Path, model: Path, document: Path) -> None:
    done = demo(tmp_path, "--model", model, "--document", document)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("identical") == 2
    assert "[MODEL_MISMATCH]" in done.stdout
    assert done.stdout.endswith("Every promise was kept.\n")


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "~/none", "no/such/folder", "tests/none"])
def test_a_path_that_leads_nowhere_is_not_looked_up_on_the_hub(tmp_path: Path, model: str) -> None:
    done = demo(tmp_path, "--model", model)
    assert (done.returncode, done.stderr) == (2, f"error: there is no such folder: {model!r}\n")


def test_a_model_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    done = demo(tmp_path, "--model", "nobody/nothing")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'nobody/nothing' is no folder, and the hub does not give it")
    assert "Traceback" not in done.stderr


def test_other_logits_are_an_error(tmp_path: Path, model: Path, document: Path) -> None:
    step = ("--model", model, "--document", document, "--work", tmp_path, "--step")
    assert demo(tmp_path, *step, "save").returncode == 0
    found = json.loads((tmp_path / "save.json").read_text())
    found["answers"][1]["logits"] = "0" * 64
    (tmp_path / "save.json").write_text(json.dumps(found))
    done = demo(tmp_path, *step, "restore")
    assert done.returncode == 1
    assert "NOT KEPT: the logits after" in done.stderr


def test_a_model_that_is_the_same_is_not_refused_and_that_is_an_error(
    tmp_path: Path, model: Path, document: Path
) -> None:
    step = ("--model", model, "--document", document, "--work", tmp_path, "--step")
    assert demo(tmp_path, *step, "save").returncode == 0
    done = demo(tmp_path, *step, "refuse")
    assert done.returncode == 1
    assert "a model with other weights found the entry" in done.stderr


def thin(home: Path, model: Path, document: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO.with_name("thin.py")), "--model", model, "--document", document,
         "--store", home / "store"], capture_output=True, text=True, check=False,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1", "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_compression_experiment_needs_layers_that_keep_every_token(
    tmp_path: Path, model: Path, document: Path
) -> None:
    done = thin(tmp_path, model, document)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {model} has layers with a RotatingKVCache; all must have a KVCache\n"
    assert not (tmp_path / "store").exists()


def test_the_compression_experiment(tmp_path: Path, document: Path) -> None:
    done = thin(tmp_path, real_folder(tmp_path / "model", CONFIGS["qwen3"]), document)
    assert done.returncode == 0, done.stderr
    entry, without, restored = done.stdout.splitlines()
    assert entry.endswith(": 17 of 49 positions")
    assert without == "without the method's name: 0 tokens"
    assert restored == "restored as it was"

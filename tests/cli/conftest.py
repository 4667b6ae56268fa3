"""The command line as people meet it: in this process through click's runner, and in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from kvstore.cli.main import cli
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "schemas" / "cli-output.v1.schema.json").read_text())
PROMPT = " ".join(f"w{n % 61}" for n in range(300))


def checked(text: str) -> dict[str, Any]:
    """A ``--json`` document, once its schema has accepted it."""
    document: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document


@dataclass(frozen=True)
class Ran:
    """What a call left behind."""

    code: int
    out: str
    err: str
    raw: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The result or the error, checked against the schema."""
        return checked(self.out if self.code == 0 or self.out else self.err.splitlines()[-1])


Run = Callable[..., Ran]


def runner(store: Path) -> Run:
    def run(*args: Any, stdin: str | None = None, env: dict[str, str] | None = None) -> Ran:
        result = CliRunner().invoke(
            cli, [str(arg) for arg in args], input=stdin, env={"KVSTORE_DIR": str(store), **(env or {})}
        )
        return Ran(result.exit_code, result.stdout, result.stderr, result.stdout_bytes)

    return run


@pytest.fixture(scope="session", autouse=True)
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No compiled kernels (they take a C++ compiler seconds), and no file of the user's home."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MLX_DISABLE_COMPILE", "1")
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
    import mlx.core as mx

    mx.disable_compile()
    yield
    mx.enable_compile()
    patch.undo()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for model folders."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model(models: Path) -> Path:
    """A tiny llama in a folder."""
    return real_folder(models / "tiny", CONFIGS["llama"])


@pytest.fixture(scope="session")
def other_model(models: Path) -> Path:
    """The same shape with other weights."""
    return real_folder(models / "other", CONFIGS["llama"], seed=1)


@pytest.fixture(scope="session")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt of 300 tokens."""
    file = tmp_path_factory.mktemp("prompts") / "prompt.txt"
    file.write_text(PROMPT)
    return file


@pytest.fixture
def kv(tmp_path: Path) -> Run:
    """Run the command line in this process, on a store that is not there yet."""
    return runner(tmp_path / "store")


@pytest.fixture(scope="module")
def filled_store(tmp_path_factory: pytest.TempPathFactory, model: Path, prompt: Path) -> Path:
    """A store with one entry, labelled ``long``; not to be changed."""
    store = tmp_path_factory.mktemp("filled") / "store"
    ran = runner(store)("put", "--model", model, "--prompt", prompt, "--label", "long")
    assert ran.code == 0, ran.err
    return store


@pytest.fixture
def filled(filled_store: Path) -> Run:
    """Run the command line on a store with one entry, labelled ``long``; not to be changed."""
    return runner(filled_store)


def process(*args: Any, store: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"}
    if store is not None:
        env["KVSTORE_DIR"] = str(store)
    return subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", *[str(arg) for arg in args]], text=True, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip


def run_process(*args: Any, store: Path | None = None) -> Ran:
    """Run the command line in a process of its own, to its end."""
    running = process(*args, store=store)
    out, err = running.communicate(timeout=120)
    return Ran(running.returncode, out, err, out.encode())

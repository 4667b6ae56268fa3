"""Entries go from one release of mlx-lm to another: the same bits, and then what the reading one itself computes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.older_mlx_lm import exchange
from tests.older_mlx_lm.exchange import CASES

ROOT = Path(__file__).parents[2]
OTHERWISE = ("states and tokens", "another layout", "chunks in turns", "chunks token by token")
"""Cases in which the two releases do not compute the same to the last bit."""


def newer(act: str, folder: Path, store: Path) -> dict[str, dict[str, Any]]:
    """The other half, run with the newest release: in the environment that `make` sets up, or the one that is named."""
    python = Path(os.environ.get("KVSTORE_NEWER_PYTHON", ROOT / ".venv" / "bin" / "python"))
    assert python.exists(), "make setup, or set KVSTORE_NEWER_PYTHON"
    ran = subprocess.run(
        [python, "-m", "tests.older_mlx_lm.exchange", act, folder, store], cwd=ROOT, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()[-3000:]
    said: dict[str, dict[str, Any]] = json.loads(ran.stdout)
    return said


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What the writing and the reading half said, by who wrote."""
    folder = tmp_path_factory.mktemp("exchange")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        mx.disable_compile()
        try:
            return {
                "newer": (newer("write", folder, folder / "newer"), exchange.read(folder, folder / "newer")),
                "older": (exchange.write(folder, folder / "older"), newer("read", folder, folder / "older")),
            }
        finally:
            mx.enable_compile()


WRITERS = pytest.mark.parametrize("writer", ["newer", "older"])


@WRITERS
@pytest.mark.parametrize("case", [case for case in CASES if case not in OTHERWISE])
def test_the_same_bits_and_the_tokens_of_the_release(both: Any, writer: str, case: str) -> None:
    written, found = (half[case] for half in both[writer])
    assert found.get("refused") is None
    assert found["state"] == written["state"] == found["own state"]
    assert found["own entry"] == written["entry"]
    assert found["same logits"]


@WRITERS
def test_the_same_bits_where_the_releases_round_otherwise(both: Any, writer: str) -> None:
    """The formula of qwen3_next was rewritten."""
    written, found = (half["states and tokens"] for half in both[writer])
    assert found["state"] == written["state"] != found["own state"]
    assert found["apart"] < 1e-5


@WRITERS
def test_a_model_that_was_given_another_cache(both: Any, writer: str) -> None:
    """deepseek_v32 keeps other shapes since 0.32; each release refuses the entries of the other."""
    _, found = (half["another layout"] for half in both[writer])
    assert found["refused"] == "SIGNATURE_MISMATCH"


def test_chunks_of_the_older_release_go_on_in_the_newer(both: Any) -> None:
    """Which masked rows are still there is all that is otherwise: equal but for rounding."""
    for case in ("chunks in turns", "chunks token by token"):
        written, found = (half[case] for half in both["older"])
        assert found["state"] == written["state"]
        assert found["apart"] < 1e-5
    # The buffer's length is state in one of them only.
    assert both["older"][1]["chunks in turns"]["own entry"] != both["older"][0]["chunks in turns"]["entry"]


def test_chunks_of_the_newer_release_in_the_older(both: Any) -> None:
    """Trimmed in front where no step of a buffer ends, the older one would drop rows that it needs."""
    written, found = (half["chunks in turns"] for half in both["newer"])
    assert found["state"] == written["state"]
    assert found["apart"] < 1e-5
    assert both["newer"][1]["chunks token by token"]["refused"] == "CUT_NOT_POSSIBLE"

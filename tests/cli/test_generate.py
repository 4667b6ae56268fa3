"""``mlx_lm.generate --prompt-cache-file`` goes on from what ``get`` wrote: the real command, in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import load, stream_generate

from kvstore.runtime.prefill import prefill
from kvstore.runtime.prompt_shapes import SHAPES, installed_shape
from tests.cli.conftest import Run
from tests.tiny_models import TINY, make_tiny_model

TEXT = "In the beginning there was a prompt, and it was long enough to be worth keeping."
SUFFIX = " And then?"
MORE = 24


def generated(model: Path, file: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", "--model", str(model), "--prompt-cache-file", str(file),
         "--prompt", SUFFIX, *options, "--max-tokens", str(MORE), "--temp", "0", "--verbose", "F"],
        capture_output=True, check=False,
    )  # fmt: skip


def chat(tokenizer: Any, text: str, **options: bool) -> list[int]:
    return list(tokenizer.apply_chat_template([{"role": "user", "content": text}], **options))


def never_saved(path: Path, count: int, *, in_turn: bool = False) -> str:
    """What the same release makes of the same tokens, with a cache that was never saved."""
    loaded: Any = load(str(path))
    model, tokenizer = loaded[0], loaded[1]
    begun = chat(tokenizer, TEXT, continue_final_message=True) if in_turn else tokenizer.encode(TEXT)
    filled = prefill(model, begun)
    assert filled.token_ids.size == count
    ids = tokenizer.encode(SUFFIX)
    if in_turn:
        whole = chat(tokenizer, TEXT + SUFFIX, add_generation_prompt=True)
        assert whole[:count] == begun
        ids = whole[count:]
    return "".join(
        part.text for part in stream_generate(model, tokenizer, ids, max_tokens=MORE, prompt_cache=filled.cache)
    )


@pytest.mark.parametrize(
    ("family", "in_turn"),
    [("llama", False), ("gemma3_text", False), ("mamba2", False), ("qwen3_next", False), ("llama", True)],
)
def test_it_continues(models: Path, kv: Run, tmp_path: Path, family: str, in_turn: bool) -> None:
    """A text; and a user's turn, which mlx-lm ends after the question."""
    model = make_tiny_model(models / f"text {family} {in_turn}", TINY[family], dtype="float32")
    more = ["--chat"] if in_turn else []
    put = kv("put", "--model", model, "--prompt", "-", *more, "--label", "a", "--json", stdin=TEXT)
    assert put.code == 0, put.err
    file = tmp_path / "cache.safetensors"
    got = kv("get", "a", "--model", model, "-o", file, "--json")
    assert got.code == 0, got.err
    ran = generated(model, file, *([] if in_turn else ["--ignore-chat-template"]))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.decode().removesuffix("\n") == never_saved(
        model, got.document["token_count"], in_turn=in_turn
    )


def test_another_shape_is_another_release(filled: Run, model: Path, tmp_path: Path) -> None:
    from kvstore.runtime.prompt_file import read_prompt_file

    sizes = set()
    for shape in SHAPES:
        file = tmp_path / f"{shape}.safetensors"
        ran = filled("get", "long", "--model", model, "-o", file, "--mlx-lm-shape", shape)
        assert ran.code == 0, ran.err
        sizes.add(file.read_bytes())
        assert read_prompt_file(file).metadata["model"] == str(model)
    plain = tmp_path / "plain.safetensors"
    filled("get", "long", "--model", model, "-o", plain)
    assert plain.read_bytes() == (tmp_path / f"{installed_shape()}.safetensors").read_bytes()
    assert len(sizes) == 2  # for plain caches nothing changed before 0.32
    ran = filled("get", "long", "--model", model, "-o", tmp_path / "r1", "--format", "wp30-cache-2",
                 "--mlx-lm-shape", "0.31")  # fmt: skip
    assert ran.code != 0


def test_old_files_are_taken_in(models: Path, kv: Run, tmp_path: Path, model: Path) -> None:
    """An old shape through ``put``, and a file with another number of layers refused."""
    file, tokens = tmp_path / "old.safetensors", tmp_path / "tokens.json"
    first = kv("put", "--model", model, "--prompt", "-", "--label", "a", "--json", stdin="w1 w2 w3 w4 w5 w6 w7")
    kv("get", "a", "--model", model, "-o", file, "--mlx-lm-shape", "0.31")
    tokens.write_text(str(list(range(1, 8))))
    again = kv("put", file, "--model", model, "--tokens", tokens, "--json")
    assert again.code == 0, again.err
    assert again.document["entry_id"] == first.document["entry_id"]
    other = make_tiny_model(models / "two layers", {**TINY["llama"], "num_hidden_layers": 2})
    refused = kv("put", file, "--model", other, "--tokens", tokens, "--json")
    assert refused.document["error"]["code"] == "CACHE_FILE_INVALID"

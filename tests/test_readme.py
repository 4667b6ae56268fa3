"""README.md is executed: its tour, its Python, its tables; figures may differ, sentences may not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.cli.main import VERBS
from tests.runtime.model_folders import edit_json, real_folder
from tests.runtime.tiny import CONFIGS
from tests.tiny_models import TINY, make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
CONSOLE = re.findall(r"^```console\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def calls() -> Iterator[tuple[str, str]]:
    """Each command of the tour, with what it prints."""
    for block in CONSOLE:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's paths lead to a tiny model and a short document."""
    folder = tmp_path_factory.mktemp("readme")
    tiny = real_folder(folder / "models" / "gemma-3-270m", CONFIGS["gemma3"], dtype="bfloat16")
    assert tiny.is_dir()
    (folder / "examples").mkdir()
    (folder / "examples" / "document.txt").write_text(" ".join(f"w{n % 60}" for n in range(29)))
    return folder


def run(place: Path, *command: str) -> str:
    """Run a program there; both streams as one, as a terminal shows them."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_DIR": str(place / "store"), "MLX_DISABLE_COMPILE": "1",
        "XDG_CACHE_HOME": str(place / "home"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    return done.stdout


def shape(text: str) -> list[str]:
    """A text without its figures: digests, ids, times, sizes, counts and column widths."""
    text = re.sub(r"[0-9a-f]{64}", "DIGEST", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "ID", text)
    text = re.sub(r"\d+(\.\d+)*", "N", text)
    text = re.sub(r"\b(k|M|G)?B\b", "BYTES", text)
    return [re.sub(r" +", " ", line).strip() for line in text.strip().splitlines()]


def test_the_tour_prints_what_the_readme_says(place: Path) -> None:
    tour = list(calls())
    assert len(tour) >= 8
    for command, printed in tour:
        program, *args = command.split()
        assert program == "kvstore"
        assert shape(run(place, "-m", "kvstore.cli", *args)) == shape(printed), command


def test_the_library_example_runs(place: Path) -> None:
    assert len(PYTHON) == 3
    printed = run(place, "-c", PYTHON[0])
    assert "Traceback" not in printed, printed
    assert (place / "my-store" / "kvstore.json").is_file()


@pytest.mark.parametrize("chat", [False, True])
def test_the_ids_are_those_that_cache_prompt_makes(tmp_path: Path, chat: bool) -> None:
    model = make_tiny_model(tmp_path / "models" / "gemma-3-270m", TINY["gemma3_text"])
    if not chat:
        edit_json(model / "tokenizer_config.json", chat_template=...)
    text = "In the beginning there was a prompt."
    (tmp_path / "prompt.txt").write_text(text + "\n")
    assert run(tmp_path, "-W", "ignore", "-c", PYTHON[1]) == ""
    ids = json.loads((tmp_path / "ids.json").read_text())
    assert len(ids) == 1 + chat + len(text)
    cache = "cache.safetensors"
    run(tmp_path, "-m", "mlx_lm", "cache_prompt", "--model", str(model), "--prompt", text, "--prompt-cache-file", cache)
    put = run(tmp_path, "-m", "kvstore.cli", "put", cache, "--model", str(model), "--tokens", "ids.json")
    assert put.startswith("sha256:"), put


def test_a_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "models" / "chat", TINY["qwen3"])
    first, second = run(tmp_path, "-W", "ignore", "-c", PYTHON[2]).splitlines()
    assert first.startswith("0 of ")
    turn, follow = int(first.split()[2]), second.split()
    assert turn <= int(follow[0]) < int(follow[2])
    # In another process the same conversation is there up to the last token.
    again = run(tmp_path, "-W", "ignore", "-c", PYTHON[2]).splitlines()[0].split()
    assert int(again[0]) == int(again[2]) - 1


def test_every_verb_is_listed() -> None:
    section = README.partition("| verb | |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(VERBS)


def test_the_exit_codes_are_those_of_the_classes() -> None:
    section = README.partition("| exit code |")[2].partition("\n\n")[0]
    listed = {int(number) for number in re.findall(r"\| (\d+) \|", section)}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.KVStoreError)]
    assert listed == {0, *(cls.exit_code for cls in classes)}


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

"""The program in docs/writing-a-writer.md runs by itself, and writes what the guide says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from kvstore.conformance.index import load_index
from kvstore.conformance.protocol import Implementation
from kvstore.store.entry_store import EntryStore
from scripts import spec_example

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "writing-a-writer.md").read_text()


def block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
    assert found
    return found[1]


def test_the_smallest_bundle(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    # Isolated: nothing of ours, nor any package, can be imported.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", block("program"), str(folder)], capture_output=True, text=True, check=True
    )
    entry = spec_example.manifest().entry_id
    assert done.stdout.strip() == entry
    assert f"`{entry}`" in GUIDE
    there = [f"{path.stat().st_size} {path.relative_to(folder).as_posix()}" for path in sorted(folder.rglob("*"))
             if path.is_file()]  # fmt: skip
    assert there == block("smallest").splitlines()
    with EntryStore.open(tmp_path / "store") as store:
        assert store.import_bundle(folder).written.entry_id == entry


def test_the_commands_do_what_the_guide_says(tmp_path: Path) -> None:
    """With our own implementation in the place of the reader's."""
    (shell,) = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    lines = [line.partition(" #")[0].strip() for line in shell.splitlines()]
    assert lines[0] == "pip install ."
    program = tmp_path / "my-writer"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvstore.conformance "$@"\n')
    program.chmod(0o700)
    for line in lines[1:]:
        command = [sys.executable, "-m", "kvstore.cli", *shlex.split(line)[1:]]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(path.name for path in (tmp_path / "fixtures").iterdir())[:3] == ["LICENSE", "README.md", "cases"]
    assert [text.split()[:2] for text in ran.stdout.splitlines()] == [[n, "L3"] for n in ("canon", "prefix", "writer")]


def test_the_description_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r'```json\n(\{"protocol".*?)\n```', GUIDE)
    program = tmp_path / "my-writer"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o700)
    described = Implementation([str(program)]).description
    assert described.language == "Rust"
    assert set(described.roles) == {"canon", "prefix", "writer"}


def test_cases_that_are_named_exist() -> None:
    ids = {case.id for case in load_index().cases}
    areas = {case.split("/")[0] for case in ids}
    named = set(re.findall(r"`((?:canon|prefix|write|kinds|cases/kinds)/[a-z0-9*-]+)`", GUIDE))
    assert named
    for name in named:
        short = name.removeprefix("cases/")
        assert short in ids or (short.endswith("/*") and short[:-2] in areas), name

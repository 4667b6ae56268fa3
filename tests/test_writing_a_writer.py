"""The program in docs/writing-a-writer.md runs by itself, and writes what the guide says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvstore.conformance.index import load_index
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


def test_cases_that_are_named_exist() -> None:
    ids = {case.id for case in load_index().cases}
    areas = {case.split("/")[0] for case in ids}
    named = set(re.findall(r"`((?:canon|prefix|write|kinds|cases/kinds)/[a-z0-9*-]+)`", GUIDE))
    assert named
    for name in named:
        short = name.removeprefix("cases/")
        assert short in ids or (short.endswith("/*") and short[:-2] in areas), name

"""The kit as an engine author gets it: from a wheel, where no library of models can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvstore.format.digest import sha256_digest
from kvstore.format.receipt import parse_receipt

ROOT = Path(__file__).parents[2]
ABSENT = ("mlx", "mlx_lm", "transformers")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the wheel's files first in its path."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True,
                   capture_output=True)  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    for name in ABSENT:
        (folder / "absent" / name).mkdir(parents=True)
        (folder / "absent" / name / "__init__.py").write_text("raise ImportError('it is not to be imported')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder / "absent"), str(folder / "site")))}


def run(env: dict[str, str], folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvstore.cli", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_kit_runs_from_a_wheel(installed: dict[str, str], tmp_path: Path) -> None:
    where = [sys.executable, "-P", "-c", "import kvstore; print(kvstore.__file__)"]
    at = subprocess.run(where, cwd=tmp_path, env=installed, capture_output=True, text=True, check=True).stdout
    assert "wheel" in at
    ran = run(installed, tmp_path, "conformance", "run", "--entrypoint", "self", "--level", "3", "--report", "report",
              "--filter", "kinds/kv*", "--filter", "write/kv*", "--filter", "c*/*", "--filter", "prefix/*")  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[:2] for line in ran.stdout.splitlines()] == [
        [role, "L3"] for role in ("canon", "reader", "prefix", "writer")
    ]
    receipt = parse_receipt((tmp_path / "report" / "report.json").read_bytes())
    assert set(receipt.checks.values()) == {"verified"}


def test_the_cases_can_be_listed_and_taken_along(installed: dict[str, str], tmp_path: Path) -> None:
    listed = json.loads(run(installed, tmp_path, "conformance", "list", "--json").stdout)["cases"]
    assert run(installed, tmp_path, "conformance", "copy", "mine").returncode == 0
    index = json.loads((tmp_path / "mine" / "index.json").read_bytes())
    assert [case["id"] for case in listed] == [case["id"] for case in index["cases"]]
    named = {path: digest for case in index["cases"] for path, digest in case["files"].items()}
    there = {path: sha256_digest((tmp_path / "mine" / path).read_bytes()) for path in named}
    assert there == named
    assert (tmp_path / "mine" / "LICENSE").read_text() == (ROOT / "fixtures" / "LICENSE").read_text()
    names = {path.name for path in (ROOT / "schemas").iterdir()}
    site = Path(installed["PYTHONPATH"].split(os.pathsep)[1])
    assert {path.name for path in (site / "kvstore" / "schemas").iterdir()} == names

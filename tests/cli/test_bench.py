"""``bench`` measures and remembers; ``match`` judges by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import runner

IDS = [n % 61 for n in range(300)]


@pytest.mark.usefixtures("plain")
def test_a_hit_is_judged_once_the_machine_was_measured(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    run = runner(tmp_path / "store")
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    assert run("put", "--model", model, "--tokens", ids).code == 0
    asked = ("match", "--model", model, "--tokens", ids, "--json")
    assert run(*asked).document["worth"] is None

    measured = run("bench", "--model", model, "--tokens", 64, "--rounds", 1, "--json").document
    assert measured["tokens"] == 64
    assert measured["prefill_tokens_per_second"] > 0
    assert measured["restore_bytes_per_second"] > 0

    assert " s to restore, " in run(*asked[:-1]).err
    worth = run(*asked).document["worth"]
    assert worth["pays"] == (worth["restore_seconds"] < worth["prefill_seconds"])
    assert worth["prefill_seconds"] == pytest.approx(299 / measured["prefill_tokens_per_second"], rel=0.01)


def test_nothing_is_left_in_the_store(tmp_path: Path, model: Path) -> None:
    run = runner(tmp_path / "store")
    text = run("bench", "--model", model, "--tokens", 64, "--rounds", 1).out
    assert [line.split()[0] for line in text.splitlines()] == ["prefill", "put", "restore"]
    assert run("ls", "--json").document["entries"] == []
    assert not list((tmp_path / "store" / "tmp").iterdir())
    assert not [path for path in (tmp_path / "store" / "objects").rglob("*") if path.is_file()]

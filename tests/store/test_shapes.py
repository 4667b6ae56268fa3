"""Shapes of caches are remembered by model, options and releases; a bad file is no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.format.digest import sha256_digest
from kvstore.store.shapes import Shapes

MODEL, OTHER = sha256_digest(b"model"), sha256_digest(b"other")
SHAPE: dict[str, dict[str, Any]] = {"0": {"kind": "kv", "tensors.k": {"dtype": "BF16", "shape": [1, 2, None, 4]}}}


def test_what_was_noted_is_known_by_model_and_options(tmp_path: Path) -> None:
    shapes = Shapes(tmp_path / "shapes.json")
    assert shapes.get(MODEL, "plain") is None
    shapes.note(MODEL, "plain", SHAPE)
    assert Shapes(tmp_path / "shapes.json").get(MODEL, "plain") == SHAPE
    assert shapes.get(OTHER, "plain") is None
    assert shapes.get(MODEL, "8 bits") is None
    changed = {"0": {"kind": "kv-concatenated"}}
    shapes.note(MODEL, "plain", changed)
    assert shapes.get(MODEL, "plain") == changed


def test_another_release_of_the_library_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes(tmp_path / "shapes.json")
    shapes.note(MODEL, "plain", SHAPE)
    monkeypatch.setattr("kvstore.store.shapes.version", lambda name: "99.0")
    assert shapes.get(MODEL, "plain") is None


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    shapes = Shapes(tmp_path / "shapes.json")
    for number in range(70):
        shapes.note(MODEL, str(number), SHAPE)
    assert [number for number in range(70) if shapes.get(MODEL, str(number)) is None] == list(range(6))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version": 2, "shapes": {}}', '{"version": 1}', '{"version": 1, "shapes": 3}', "[" * 9999]
)
def test_a_bad_file_is_no_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(text)
    shapes = Shapes(path)
    assert shapes.get(MODEL, "plain") is None
    shapes.note(MODEL, "plain", SHAPE)
    assert shapes.get(MODEL, "plain") == SHAPE


@pytest.mark.parametrize("row", [None, 3, [], {}, {"0": 3}, {"0": {}}])
def test_a_bad_row_is_no_row(tmp_path: Path, row: Any) -> None:
    path = tmp_path / "shapes.json"
    shapes = Shapes(path)
    shapes.note(MODEL, "plain", SHAPE)
    document = json.loads(path.read_text())
    document["shapes"] = dict.fromkeys(document["shapes"], row)
    path.write_text(json.dumps(document))
    assert shapes.get(MODEL, "plain") is None


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Shapes(tmp_path / "file" / "shapes.json").note(MODEL, "plain", SHAPE)
    assert Shapes(tmp_path / "file" / "shapes.json").get(MODEL, "plain") is None

"""Folders and archives that were made to do harm: each is refused by a typed error, at a bounded cost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.store.bundle_files import open_bundle
from tests.store.kit import code_of


def opened(path: Path) -> list[str]:
    with open_bundle(path) as files:
        return [file.path for file in files.files]


@contextmanager
def nested(top: Path, name: str, depth: int) -> Iterator[None]:
    """Folders in folders, deeper than any path reaches; taken away step by step, as they were made."""
    here, made = os.open(top, os.O_RDONLY), 0
    try:
        while made < depth:
            os.mkdir(name, dir_fd=here)
            inner = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here, made = inner, made + 1
        yield
    finally:
        os.close(here)
        while (top / name).exists():
            # Bring what is below the first one up, and remove that.
            (top / name).rename(top / "old")
            if (top / "old" / name).exists():
                (top / "old" / name).rename(top / name)
            (top / "old").rmdir()


@pytest.mark.parametrize(("name", "depth"), [("d", 129), ("d", 3000), ("d" * 100, 3), ("d" * 255, 400)])
def test_a_folder_that_is_too_deep_is_not_walked(tmp_path: Path, name: str, depth: int) -> None:
    with nested(tmp_path, name, depth):
        assert code_of(opened, tmp_path) == "PATH_UNSAFE"


def test_a_folder_as_deep_as_a_path_may_be_is_walked(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*["d"] * 126)
    deepest.mkdir(parents=True)
    (deepest / "xyz").touch()
    assert opened(tmp_path) == ["d/" * 126 + "xyz"]
    (deepest / "wxyz").touch()
    assert code_of(opened, tmp_path) == "PATH_UNSAFE"
    shutil.rmtree(tmp_path / "d")


@pytest.mark.parametrize("name", ["a:b", "a\\b", "a\nb", "a\x7fb"])
def test_names_of_folders_are_checked_as_those_of_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert code_of(opened, tmp_path) == "PATH_UNSAFE"

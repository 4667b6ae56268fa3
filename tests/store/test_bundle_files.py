"""Folders and archives that were made to do harm: each is refused by a typed error, at a bounded cost."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.store.bundle_files import open_bundle, write_folder, write_tar
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


MIB = 2**20
FILES = {"layout.json": b"layout", "manifest.json": bytes(range(256)) * 8192, "empty": b""}


def written(path: Path, archive: bool) -> Path:
    (write_tar if archive else write_folder)(path, FILES.items())
    return path


@pytest.mark.parametrize("archive", [False, True])
def test_files_are_read_whole_or_up_to_a_limit(tmp_path: Path, archive: bool) -> None:
    with open_bundle(written(tmp_path / "bundle", archive)) as files:
        for name, data in FILES.items():
            assert files.read(name, 2**40) == files.read(name, len(data)) == data
            assert files.read(name, 0) == data[:1]
        kept = files.read("manifest.json", 1000)
    assert kept == FILES["manifest.json"][:1001]


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("size", [0, 1, 700, 4096, MIB])
def test_what_is_cut_off_behind_our_back_is_an_error(tmp_path: Path, archive: bool, size: int) -> None:
    """Not a signal, and not other bytes either."""
    path = written(tmp_path / "bundle", archive)
    with open_bundle(path) as files:
        kept = files.read("manifest.json", 2**40)
        os.truncate(path if archive else path / "manifest.json", size)
        assert kept == FILES["manifest.json"]
        if archive:
            assert code_of(files.read, "manifest.json", 2**40) == "STORE_IO"
        else:
            assert files.read("manifest.json", 2**40) == FILES["manifest.json"][:size]


@pytest.mark.parametrize("archive", [False, True])
def test_what_is_cut_off_while_it_is_read(tmp_path: Path, archive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pread = written(tmp_path / "bundle", archive), os.pread

    def cut(fd: int, size: int, at: int) -> bytes:
        os.truncate(path if archive else path / "manifest.json", 1000)
        return pread(fd, size, at)

    with open_bundle(path) as files:
        monkeypatch.setattr(os, "pread", cut)
        assert code_of(files.read, "manifest.json", 2**40) == "STORE_IO"


@pytest.mark.parametrize("kind", ["nothing", "link", "folder", "pipe"])
def test_what_takes_a_file_s_place(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / "bundle", False)
    with open_bundle(path) as files:
        (path / "manifest.json").rename(tmp_path / "old")
        if kind == "link":
            (path / "manifest.json").symlink_to(tmp_path / "old")
        elif kind == "folder":
            (path / "manifest.json").mkdir()
        elif kind == "pipe":
            os.mkfifo(path / "manifest.json")
        assert code_of(files.read, "manifest.json", 10) in ("STORE_IO", "PATH_UNSAFE")


@pytest.mark.parametrize("archive", [False, True])
def test_only_what_is_asked_for_takes_memory(tmp_path: Path, archive: bool) -> None:
    large = bytes(64 * MIB)
    (write_tar if archive else write_folder)(tmp_path / "bundle", [("large", large), ("small", b"x" * MIB)])
    tracemalloc.start()
    try:
        with open_bundle(tmp_path / "bundle") as files:
            for _ in range(8):
                assert len(files.read("small", 2**40)) == MIB
            assert len(files.read("large", MIB)) == MIB + 1
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("archive", [False, True])
def test_memory_that_there_is_not(tmp_path: Path, archive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(_: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr("kvstore.store.bundle_files.bytearray", short, raising=False)
    with open_bundle(written(tmp_path / "bundle", archive)) as files:
        assert code_of(files.read, "manifest.json", 2**40) == "DEVICE_MEMORY_SHORT"

"""Tar archives of bundles: what tar programs write, and what was cut off or tampered with."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.format.archive import members
from scripts.fixtures.tree import FIXTURES

FOLDER = FIXTURES / "cases" / "kinds" / "kv"
LONG = "objects/" + "0" * 64 + "." + "1" * 64 + ".kvo"


def archive(*names: str, form: int = tarfile.PAX_FORMAT, kind: bytes = tarfile.REGTYPE) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.type = (3 if kind == tarfile.REGTYPE else 0), kind
            tar.addfile(info, io.BytesIO(b"abc"))
    return made.getvalue()


def found(data: bytes) -> dict[str, bytes | None]:
    """Content by name; None for what is no plain file."""
    return {
        item.file.path: data[item.start : item.start + item.size] if item.file.plain else None
        for item in members(io.BytesIO(data), "it")
    }


def code_of(data: bytes) -> str | None:
    try:
        list(members(io.BytesIO(data), "it"))
    except KVStoreError as error:
        return error.code
    return None


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_in_both_formats(form: int) -> None:
    assert found(archive("layout.json", LONG, form=form)) == {"layout.json": b"abc", LONG: b"abc"}


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar program")
def test_what_the_tar_program_writes(tmp_path: Path) -> None:
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", "-C", FOLDER, "."], check=True)
    files = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert found((tmp_path / "a.tar").read_bytes()) == files


def test_an_end_is_required_and_nothing_behind_it_is_looked_at() -> None:
    whole = archive("a", "b")
    assert len(whole) == tarfile.RECORDSIZE
    members_end = 4 * 512
    assert code_of(whole[: members_end + 512]) is None
    assert code_of(whole[:members_end] + bytes(512) + b"anything") is None
    for cut in (1, 511, 512, 513, 1024, members_end - 1, members_end, members_end + 511):
        assert code_of(whole[:cut]) == "BUNDLE_LAYOUT_INVALID", cut


def test_a_header_that_cannot_be_read_is_no_end() -> None:
    whole = bytearray(archive("a", "b"))
    whole[1024] ^= 1
    assert code_of(bytes(whole)) == "BUNDLE_LAYOUT_INVALID"
    assert code_of(b"") == code_of(b"x" * 2000) == "BUNDLE_LAYOUT_INVALID"


def with_size(size: bytes) -> bytes:
    """An archive whose second member states this size in base 256."""
    whole = bytearray(archive("a", "b", "c"))
    header = whole[1024:1536]
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\x00 " % sum(header)
    whole[1024:1536] = header
    return bytes(whole)


def test_sizes_in_base_256() -> None:
    assert found(with_size(b"\x80" + (3).to_bytes(11, "big")))["b"] == b"abc"
    assert code_of(with_size(b"\x80" + (2**40).to_bytes(11, "big"))) == "BUNDLE_LAYOUT_INVALID"


@pytest.mark.parametrize("size", [-(2**80), -1, -512, -513, -1024, -1536, -4096, -(2**40)])
def test_a_negative_size_leads_nowhere(size: int) -> None:
    """It must neither be taken nor go round for ever."""
    assert code_of(with_size(size.to_bytes(12, "big", signed=True))) == "BUNDLE_LAYOUT_INVALID"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"Z"])
def test_what_is_no_plain_file_is_named(kind: bytes) -> None:
    assert found(archive("x", kind=kind)) == {"x": None}


def test_folders_are_passed_over_once_their_names_have_passed() -> None:
    assert found(archive("./", "./objects", kind=tarfile.DIRTYPE)) == {}
    assert code_of(archive("../x", kind=tarfile.DIRTYPE)) == "PATH_UNSAFE"
    assert code_of(archive("\udcff", form=tarfile.GNU_FORMAT, kind=tarfile.DIRTYPE)) == "PATH_UNSAFE"

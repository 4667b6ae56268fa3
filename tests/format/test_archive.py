"""Tar archives of bundles: what tar programs write, and what was cut off or tampered with."""

from __future__ import annotations

import io
import random
import resource
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.format.archive import members
from scripts.fixtures.tree import FIXTURES
from tests.store.kit import child

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


def extended(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    """A pax header or a long name, which may state a size that is not its own."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(str(length)) + len(key) + len(value) + 3 != length:
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


@pytest.mark.parametrize(
    "headers",
    [
        extended(b"x", record(b"path", b"other")), extended(b"L", b"other\0"),
        extended(b"L", b"no\0") + extended(b"x", record(b"path", b"other")),
        extended(b"g", record(b"path", b"no")) + extended(b"L", b"other\0"),
        extended(b"g", record(b"comment", b"x")) + extended(b"K", b"x\0") + extended(b"L", b"other"),
    ],
)  # fmt: skip
def test_extended_headers_hold_for_one_member(headers: bytes) -> None:
    assert found(headers + archive("a")) == {"other": b"abc"}
    once = headers if headers[156:157] != b"g" else headers[1024:]
    assert found(once + archive("a", "b")) == {"other": b"abc", "b": b"abc"}


def test_sizes_and_sparse_files_of_extended_headers() -> None:
    assert found(extended(b"x", record(b"size", b"2")) + archive("a")) == {"a": b"ab"}
    for key in (b"GNU.sparse.major", b"GNU.sparse.map"):
        assert found(extended(b"x", record(key, b"1")) + archive("a")) == {"a": None}


CHAINS = [extended(b"L", b"x\0"), extended(b"x", record(b"path", b"x")), extended(b"g", record(b"comment", b"x")),
          extended(b"K", b"x\0")]  # fmt: skip


@pytest.mark.parametrize("one", CHAINS)
def test_chains_of_headers_are_followed_to_their_end(one: bytes) -> None:
    assert list(found(one * 5000 + archive("a")).values()) == [b"abc"]
    assert code_of(one * 5000) == "BUNDLE_LAYOUT_INVALID"


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"X", b"0", b"S", b"Z"])
@pytest.mark.parametrize("size", [2**20, 8 * 2**30, 2**62, 2**63, 2**64 + 512, 2**80])
def test_sizes_that_the_archive_does_not_have(kind: bytes, size: int) -> None:
    assert code_of(extended(kind, b"", size) + archive("a")) == "BUNDLE_LAYOUT_INVALID"
    stated = extended(b"x", record(b"size", str(size).encode()))
    assert code_of(stated + extended(kind, b"") + archive("a")) == "BUNDLE_LAYOUT_INVALID"


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_extended_headers_that_are_there_but_too_long(kind: bytes, tmp_path: Path) -> None:
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(extended(kind, b"", 2**40))
        file.truncate(2**41)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (tmp_path / "a.tar").open("rb") as file, pytest.raises(KVStoreError) as caught:
        list(members(file, "it"))
    assert caught.value.code == "BUNDLE_LAYOUT_INVALID"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16


@pytest.mark.parametrize(
    "data",
    [b"1" * 2**19, b"0 path=x\n", b"7 path=\n", b"9 path=\n", b"99 path=x\n", b"9 path=xx", b"9 pathxxx\n",
     b" path=x\n", b"-1 path=x\n",
     b"1" * 5000 + b" path=x\n", record(b"size", b"-1"), record(b"size", b"1" * 5000), record(b"size", b"1e9"),
     record(b"size", b"0x3")],
)  # fmt: skip
@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_records_that_are_none(kind: bytes, data: bytes) -> None:
    assert code_of(extended(kind, data) + archive("a")) == "BUNDLE_LAYOUT_INVALID"


def test_any_damage_is_refused_by_name_or_harmless() -> None:
    """With right checksums, so that it is the fields that are judged."""
    pick = random.Random(1)
    whole = (
        extended(b"g", record(b"comment", b"x")) + archive("a", LONG, "b") + archive("c", LONG, form=tarfile.GNU_FORMAT)
    )
    for _ in range(3000):
        data = bytearray(whole)
        at = pick.randrange(len(whole) // 512) * 512
        for _ in range(pick.randint(1, 12)):
            data[at + pick.randrange(512)] = pick.choice((0, 32, 48, 55, 128, 255, pick.randrange(256)))
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
        assert code_of(bytes(data)) in (None, "BUNDLE_LAYOUT_INVALID", "PATH_UNSAFE")


def test_many_members_take_little_memory() -> None:
    """A header with many keys holds for every member that follows, and is kept once."""
    grown = child("""
import io, resource
from kvstore.format.archive import members
from tests.format.test_archive import archive, extended, record
many = extended(b"g", b"".join(record(b"k%d" % at, b"") for at in range(50000)))
data = many + (extended(b"x", record(b"path", b"x")) + archive("a")[:1024]) * 3000 + bytes(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(1 for _ in members(io.BytesIO(data), "it")) == 3000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
""")
    assert int(grown) < 32 * 2**20

"""Files: whole or not there, typed errors, sessions that die with their process."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kvstore.store.fs import os_error, publish_new, write_file
from kvstore.store.temp import Session, boot_id, garbage_sessions, is_live, sweep_sessions
from tests.store.kit import child


@pytest.mark.parametrize(
    ("number", "writing", "code"),
    [
        (errno.ENOSPC, True, "NO_SPACE"), (errno.EDQUOT, True, "NO_SPACE"), (errno.EFBIG, True, "NO_SPACE"),
        (errno.EROFS, True, "STORE_READ_ONLY"), (errno.EACCES, True, "STORE_READ_ONLY"),
        (errno.EPERM, False, "STORE_UNREADABLE"), (errno.EACCES, False, "STORE_UNREADABLE"),
        (errno.EIO, False, "STORE_IO"), (errno.EMFILE, False, "STORE_IO"), (errno.ENOENT, True, "STORE_IO"),
    ],
)  # fmt: skip
def test_every_errno_has_its_code(number: int, writing: bool, code: str) -> None:
    error = os_error(OSError(number, os.strerror(number), "/a/b"), "doing", writing=writing)
    assert error.code == code
    assert error.detail == {"errno": errno.errorcode[number], "path": "/a/b"}
    assert error.message.startswith(f"doing at /a/b: {errno.errorcode[number]}")


def test_a_file_that_cannot_be_written_whole_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_file(tmp_path / "f", [b"abc", 5])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []
    assert write_file(tmp_path / "f", [b"abc", memoryview(b"de")]) == 5
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "f", [b"other"])
    assert (tmp_path / "f").read_bytes() == b"abcde"


def test_only_the_first_gets_a_name(tmp_path: Path) -> None:
    write_file(tmp_path / "a", [b"a"])
    write_file(tmp_path / "b", [b"b"])
    assert publish_new(tmp_path / "a", tmp_path / "final")
    assert not publish_new(tmp_path / "b", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final").read_bytes() == b"a"


def test_dead_sessions_are_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.write([b"x"])
        dead = tmp_path / f"{boot_id()}-999999999-00"
        other_boot = tmp_path / "ffff-1-00"
        young = tmp_path / f"{boot_id()}-{os.getpid()}-00"
        for path in (dead, other_boot, young):
            path.mkdir()
            (path / "file").write_bytes(b"x")
        assert sweep_sessions(tmp_path) == 2
        assert sorted(tmp_path.iterdir()) == sorted([session.path, young])
        # Not locked and not young any more: its owner has gone and another process has its id.
        assert sweep_sessions(tmp_path, young=-1) == 1
        assert list(tmp_path.iterdir()) == [session.path]
    assert list(tmp_path.iterdir()) == []
    assert sweep_sessions(tmp_path / "none") == 0


def test_two_who_look_at_a_dead_session_do_not_take_each_other_for_its_owner(tmp_path: Path) -> None:
    dead = tmp_path / f"{boot_id()}-999999999-00"
    dead.mkdir()
    fd = os.open(dead, os.O_RDONLY)
    try:
        # As another process that looks, too.
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert not is_live(dead)
        assert garbage_sessions(tmp_path) == [dead]
        # As one that removes it: nobody else may.
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert sweep_sessions(tmp_path) == 0
    finally:
        os.close(fd)
    assert sweep_sessions(tmp_path) == 1


def test_a_session_that_cannot_be_opened_is_none_and_leaves_nothing(tmp_path: Path) -> None:
    """Nor is one that cannot be looked into taken for ended: without a free descriptor nothing is proved."""
    script = """
import errno, os, resource, sys
from pathlib import Path
from kvstore.store.temp import Session, boot_id, garbage_sessions
tmp = Path(sys.argv[1])
(tmp / f"{boot_id()}-999999999-00").mkdir()
def refused(call, *args):
    try:
        return call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
def unlockable(call):
    before = set(os.listdir(tmp))
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What lists the folder has its descriptor; what locks a session has none.
    listed = sorted(tmp.iterdir())
    Path.iterdir = lambda path: iter(listed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        print(call())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(os.listdir(tmp)) == before
unlockable(lambda: refused(Session, tmp))
unlockable(lambda: garbage_sessions(tmp))
print(len(garbage_sessions(tmp)))
"""
    assert child(script, tmp_path) == "EMFILE\n[]\n1\n"

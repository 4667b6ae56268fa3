"""Where the user's own files are, and what becomes of an account that has no home."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.format.digest import sha256_digest
from kvstore.store.config import default_root
from kvstore.store.entry_store import EntryStore
from kvstore.store.file_digests import FileDigests, default_memory
from kvstore.store.home import user_cache
from kvstore.store.rates import PrefillRate, Rates
from kvstore.store.shapes import Shapes


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user id is in no list of users."""

    def unknown(key: object) -> None:
        raise KeyError(key)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("base", ["", "relative", "~/x", "./x"])
def test_a_relative_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert user_cache() == tmp_path / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert user_cache() == tmp_path / "x"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_the_store_has_to_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for call in (default_root, EntryStore.open):
        with pytest.raises(UsageError, match=r"no home.*Set HOME, or name the store.*--store") as caught:
            call()
        assert caught.value.code == "USAGE"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "kvstore"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, digest = tmp_path / "file", sha256_digest(b"one")
    file.write_bytes(b"one")
    later = file.stat().st_ctime_ns + 3 * 10**9
    monkeypatch.setattr("kvstore.store.file_digests.time.time_ns", lambda: later)
    assert FileDigests().digest_all([file])[file].digest == digest
    Shapes().note(digest, "options", {"0": {"kind": "kv"}})
    Rates().note(prefill={digest: PrefillRate(1.0)})
    assert FileDigests()._load() == {}
    assert Shapes().get(digest, "options") is None
    assert Rates().prefill(digest) is None
    assert not default_memory().exists()
    assert list(tmp_path.iterdir()) == [file]

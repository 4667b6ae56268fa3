"""What tests with live models share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

import kvstore


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Fused kernels are built by a C++ compiler on a CPU, seconds for each; nothing here depends on them."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny models that lives as long as the module's tests."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def own_cache(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File digests are remembered beside the models, not in the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(models / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    """A new store."""
    with kvstore.Store.open(tmp_path / "store") as opened:
        yield opened

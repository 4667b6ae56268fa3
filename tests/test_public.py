"""The public surface: every name is there, listed in order, and imported only when it is used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import kvstore
import kvstore.runtime


@pytest.mark.parametrize("module", [kvstore, kvstore.runtime])
def test_names_are_sorted_and_all_there(module: Any) -> None:
    names = module.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = module.nothing_such


def test_dir_lists_the_names() -> None:
    assert dir(kvstore) == sorted(kvstore.__all__)


def loaded_after(code: str) -> set[str]:
    heavy = ("mlx", "mlx_lm", "transformers", "sqlalchemy", "numpy", "click")
    script = f"import sys\n{code}\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import kvstore; kvstore.KVStoreError; kvstore.__version__", set()),
        ("import kvstore.runtime", set()),
        ("import kvstore; kvstore.EntryStore", {"sqlalchemy", "numpy"}),
        ("import kvstore; kvstore.Store", {"sqlalchemy", "numpy", "mlx"}),
        ("import kvstore; kvstore.load_model; kvstore.ModelIdentity", {"numpy", "mlx"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, allowed: set[str]) -> None:
    assert loaded_after(code) <= allowed

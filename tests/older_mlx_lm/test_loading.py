"""The older loader runs a model's own code unasked; through kvstore it runs where it is trusted, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidError
from kvstore.runtime.binding import bind, load_model
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.lazy import caches_of_folder, open_model
from kvstore.runtime.probe import probe_folder
from tests.runtime.model_folders import edit_json, real_folder
from tests.runtime.tiny import CONFIGS

pytestmark = pytest.mark.usefixtures("own_cache")

WAYS: dict[str, Callable[[Path], Any]] = {
    "load": load_model,
    "open": open_model,
    "probe": probe_folder,
    "caches": caches_of_folder,
    "bind": lambda path: bind(load_model(path, trust_remote_code=True).model, ModelIdentity.from_path(path)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = real_folder(tmp_path / "model", CONFIGS["llama"])
    edit_json(path / "config.json", model_file="own.py")
    (path / "own.py").write_text(
        "from pathlib import Path\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
        "with Path(__file__).with_name('ran').open('a') as file:\n    file.write('x')\n"
    )
    return path


@pytest.mark.parametrize("way", WAYS)
def test_untrusted_code_does_not_run(folder: Path, way: str) -> None:
    with pytest.raises(InvalidError, match="trust_remote_code") as refused:
        WAYS[way](folder)
    assert refused.value.code == "MODEL_FOLDER_INVALID"
    # Binding was given a model that was loaded with trust.
    assert (folder / "ran").exists() is (way == "bind")


def test_trusted_code_does(folder: Path) -> None:
    bound = load_model(folder, trust_remote_code=True)
    assert bind(bound.model, bound.identity, trust_remote_code=True).compared > 2
    assert (folder / "ran").read_text() == "xx"

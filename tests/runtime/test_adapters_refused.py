"""Models with an adapter that computes something else each time are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from kvstore.errors import IncompatibleError
from kvstore.runtime.binding import bind, load_model
from tests.runtime.model_folders import edit_json, real_adapter, real_folder
from tests.runtime.tiny import CONFIGS

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def base(models: Path) -> Path:
    return real_folder(models / "base", CONFIGS["llama"])


def adapter_with_dropout(path: Path, base: Path, dropout: float) -> Path:
    parameters = {"rank": 2, "scale": 20.0, "dropout": dropout, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    adapter = real_adapter(path, base)
    edit_json(adapter / "adapter_config.json", lora_parameters=parameters)
    return adapter


DROPOUTS: dict[str, tuple[float, Callable[[Any], object], bool]] = {
    "that is active": (0.5, lambda m: m.train(), True),
    "that is active in one layer": (0.5, lambda m: m.layers[-1].train(), True),
    "that drops nothing": (0.0, lambda m: m.train(), False),
    "of a model in evaluation mode": (0.5, lambda m: m.eval(), False),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_a_dropout(base: Path, tmp_path: Path, name: str) -> None:
    dropout, change, refused = DROPOUTS[name]
    adapter = adapter_with_dropout(tmp_path / "adapter", base, dropout)
    bound = load_model(base, adapter)
    live = mlx_lm.load(str(base), adapter_path=str(adapter))[0]
    for model, check in ((bound.model, bound.require_same), (live, lambda: bind(live, bound.identity))):
        change(model)
        if not refused:
            check()
            continue
        with pytest.raises(IncompatibleError, match="Call its eval") as caught:
            check()
        assert caught.value.code == "BINDING_MISMATCH"
        assert caught.value.detail["module"].endswith("dropout")
        model.eval()
        check()

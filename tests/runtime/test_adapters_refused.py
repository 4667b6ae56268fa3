"""Models with an adapter that computes something else each time are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from kvstore.errors import IncompatibleError, InvalidError
from kvstore.runtime.binding import BoundModel, bind, load_model
from kvstore.runtime.identity import ModelIdentity
from tests.runtime.model_folders import edit_json, read_arrays, real_adapter, real_folder
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


Edit = Callable[[dict[str, mx.array], str], object]
HALVES: dict[str, tuple[Edit, bool]] = {
    "both": (lambda arrays, name: None, False),
    "neither": (lambda arrays, name: (arrays.pop(name + "lora_a"), arrays.pop(name + "lora_b")), False),
    "the first alone": (lambda arrays, name: arrays.pop(name + "lora_b"), False),
    "the second alone": (lambda arrays, name: arrays.pop(name + "lora_a"), True),
    "the second alone, and it is zero": (
        lambda arrays, name: (
            arrays.pop(name + "lora_a"), arrays.update({name + "lora_b": 0 * arrays[name + "lora_b"]})
        ), False,
    ),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_halves_of_an_adapter(base: Path, tmp_path: Path, kind: str, name: str) -> None:
    edit, refused = HALVES[name]
    adapter = real_adapter(tmp_path / "adapter", base, kind=kind)
    weights = str(adapter / "adapters.safetensors")
    arrays = read_arrays(weights)
    edit(arrays, "model.layers.3.self_attn.q_proj.")
    mx.save_safetensors(weights, arrays)
    identity = ModelIdentity.from_path(base, adapter)
    live = mlx_lm.load(str(base), adapter_path=str(adapter))[0]
    checks: list[Callable[[], BoundModel]] = [lambda: load_model(base, adapter), lambda: bind(live, identity)]
    for check in checks:
        if refused:
            with pytest.raises(InvalidError, match="lora_b without its other half") as caught:
                check()
            assert caught.value.code == "MODEL_FOLDER_INVALID"
            assert caught.value.detail["missing"] == "model.layers.3.self_attn.q_proj.lora_a"
        else:
            check().require_same()

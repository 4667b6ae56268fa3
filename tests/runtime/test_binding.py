"""A live model is what its identity says, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from kvstore.errors import IncompatibleError, InvalidError, UsageError
from kvstore.runtime.binding import BoundModel, _parameters, bind, identity_of, load_model, require_bound
from kvstore.runtime.identity import ModelIdentity
from tests.families.folders import family_folder
from tests.families.tables import FAMILIES
from tests.runtime.model_folders import CONFIG, edit_json, fake_folder, read_arrays, real_adapter, real_folder

TINY = {key: value for key, value in CONFIG.items() if not key.startswith("_")}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_folder(tmp_path_factory.mktemp("models") / "base", TINY)


def live(path: Path, adapter: Path | None = None) -> Any:
    return mlx_lm.load(str(path), adapter_path=None if adapter is None else str(adapter))[0]


def test_a_bound_model_is_shown_in_one_line(base: Path) -> None:
    bound = load_model(base)
    assert repr(bound) == f"<BoundModel {base} {bound.identity.digest[:19]} loaded>"


def names(model: Any) -> list[str]:
    return [name for name, _ in tree_flatten(model.parameters())]


def change(model: Any, name: str, at: int = 0) -> None:
    """Turn the least bit of one element of one parameter."""
    array = dict(tree_flatten(model.parameters()))[name]
    bits = array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]).flatten()
    bits[at] = bits[at] ^ 1
    model.update(tree_unflatten([(name, bits.reshape(array.shape).view(array.dtype))]))


def mismatch(model: Any, identity: ModelIdentity, **options: Any) -> IncompatibleError:
    with pytest.raises(IncompatibleError) as caught:
        bind(model, identity, **options)
    assert caught.value.code == "BINDING_MISMATCH"
    return caught.value


def test_load_model(base: Path) -> None:
    bound = load_model(base)
    assert bound.identity == ModelIdentity.from_path(base)
    assert bound.tokenizer.encode("w3 w5") == [3, 5]
    assert (bound.evidence, bound.compared) == ("loaded", 0)
    assert require_bound(bound) is bound
    assert identity_of(bound) is identity_of(bound.identity) is bound.identity
    logits = bound.model(mx.array([[3, 5]]))
    assert mx.array_equal(logits, live(base)(mx.array([[3, 5]])))


def test_bind_compares_a_sample_or_everything(base: Path) -> None:
    model, identity = live(base), ModelIdentity.from_path(base)
    count = len(names(model))
    assert bind(model, identity, sample=None).compared == count
    assert bind(model, identity, sample=0).compared == 2
    bound = bind(model, identity, "a tokenizer", sample=3)
    assert 3 <= bound.compared <= 5 < count
    assert (bound.model, bound.tokenizer, bound.evidence) == (model, "a tokenizer", "compared")
    assert require_bound(bound) is bound


def test_every_changed_parameter_is_caught_by_a_full_comparison(base: Path) -> None:
    model, identity = live(base), ModelIdentity.from_path(base)
    for name in names(model):
        change(model, name, at=-1)
        error = mismatch(model, identity, sample=None)
        assert error.detail["parameter"] == name
        assert name in str(error)
        change(model, name, at=-1)
    bind(model, identity, sample=None)


def test_the_first_and_the_last_parameter_are_always_compared(base: Path) -> None:
    identity = ModelIdentity.from_path(base)
    for at in (0, -1):
        model = live(base)
        change(model, names(model)[at])
        mismatch(model, identity, sample=0)


def test_another_model_of_the_same_shape_is_caught(base: Path, tmp_path: Path) -> None:
    other = real_folder(tmp_path / "other", TINY, seed=1)
    error = mismatch(live(other), ModelIdentity.from_path(base))
    assert "parameter" in error.detail


def test_bits_are_compared_not_values(tmp_path: Path) -> None:
    """A NaN weight equals itself; −0 does not equal 0."""
    path = real_folder(tmp_path / "odd", TINY)
    file, name = str(path / "model.safetensors"), "model.norm.weight"
    arrays = read_arrays(file)
    arrays[name] = mx.array([float("nan"), 0.0] * (arrays[name].size // 2))
    mx.save_safetensors(file, arrays)
    model, identity = live(path), ModelIdentity.from_path(path)
    bind(model, identity, sample=None)
    model.update(tree_unflatten([(name, mx.array([float("nan"), -0.0] * (arrays[name].size // 2)))]))
    assert mismatch(model, identity, sample=None).detail["parameter"] == name


def test_a_comparison_needs_the_memory_of_one_parameter(tmp_path: Path) -> None:
    """And finds one bit in the last piece of a large one."""
    path = real_folder(tmp_path / "large", {**TINY, "vocab_size": 200_000})
    model, identity = live(path), ModelIdentity.from_path(path)
    largest = max(array.nbytes for _, array in tree_flatten(model.parameters()))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    bind(model, identity, sample=None)
    assert mx.get_active_memory() - before < 1024
    assert largest <= mx.get_peak_memory() - before < 1.5 * largest
    change(model, "model.embed_tokens.weight", at=-1)
    assert mismatch(model, identity, sample=None).detail["parameter"] == "model.embed_tokens.weight"


SETTINGS: dict[str, tuple[Callable[[Any], object], str]] = {
    "rope base": (lambda m: setattr(m.model.layers[1].self_attn.rope, "base", 10001.0), "layers.1.self_attn.rope"),
    "attention scale": (lambda m: setattr(m.model.layers[0].self_attn, "scale", 1.0), "setting scale"),
    "epsilon": (lambda m: setattr(m.model.norm, "eps", 1e-5), "model.norm"),
    "arguments": (lambda m: setattr(m.args, "rope_theta", 1.0), "setting args.rope_theta"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_is_caught(base: Path, name: str) -> None:
    """Half of what a config says is in no parameter."""
    model = live(base)
    edit, said = SETTINGS[name]
    edit(model)
    assert said in str(mismatch(model, ModelIdentity.from_path(base)))


def test_rope_frequencies_are_caught(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    path = real_folder(tmp_path / "scaled", {**TINY, "rope_scaling": scaling})
    model, identity = live(path), ModelIdentity.from_path(path)
    bind(model, identity)
    rope = model.model.layers[0].self_attn.rope
    rope._freqs = rope._freqs * 2
    assert "setting _freqs" in str(mismatch(model, identity))


def test_a_config_edited_after_loading_is_caught(tmp_path: Path) -> None:
    path = real_folder(tmp_path / "edited", TINY)
    model = live(path)
    edit_json(path / "config.json", rope_theta=5000.0)
    assert "rope" in str(mismatch(model, ModelIdentity.from_path(path)))


def test_dtype_and_class_are_compared(base: Path) -> None:
    identity = ModelIdentity.from_path(base)
    model = live(base)
    model.set_dtype(mx.bfloat16)
    assert "bfloat16" in str(mismatch(model, identity, sample=0))
    model = live(base)
    model.model.layers.pop()
    assert "layers.1" in str(mismatch(model, identity, sample=0))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_models(base: Path, tmp_path: Path, bits: int) -> None:
    path = real_folder(tmp_path / "quantized", TINY, bits=bits)
    model, identity = live(path), ModelIdentity.from_path(path)
    assert bind(model, identity, sample=None).compared == len(names(model))
    assert "QuantizedLinear" in str(mismatch(model, ModelIdentity.from_path(base)))
    assert identity.digest != ModelIdentity.from_path(base).digest
    name = "model.layers.0.self_attn.k_proj.weight"
    change(model, name)
    assert mismatch(model, identity, sample=None).detail["parameter"] == name


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters(base: Path, tmp_path: Path, kind: str) -> None:
    adapter = real_adapter(tmp_path / "adapter", base, kind=kind)
    plain, adapted = ModelIdentity.from_path(base), ModelIdentity.from_path(base, adapter)
    assert plain.digest != adapted.digest
    model = live(base, adapter)
    bind(model, adapted, sample=None)
    mismatch(model, plain)
    mismatch(live(base), adapted)
    # All of an adapter is compared, whatever the sample: training changes nothing else.
    change(model, "model.layers.1.self_attn.v_proj.lora_b")
    assert mismatch(model, adapted, sample=0).detail["parameter"] == "model.layers.1.self_attn.v_proj.lora_b"


def test_another_adapter_scale_is_another_binding(base: Path, tmp_path: Path) -> None:
    adapters = [real_adapter(tmp_path / str(scale), base, scale=scale) for scale in (20.0, 10.0)]
    identities = [ModelIdentity.from_path(base, adapter) for adapter in adapters]
    assert (adapters[0] / "adapters.safetensors").read_bytes() == (adapters[1] / "adapters.safetensors").read_bytes()
    assert identities[0].digest != identities[1].digest
    assert "setting scale" in str(mismatch(live(base, adapters[0]), identities[1]))


def test_an_adapter_that_fills_fewer_layers_than_it_names(base: Path, tmp_path: Path) -> None:
    """mlx-lm makes the others from random numbers times zero; they differ each time and do nothing."""
    adapter = real_adapter(tmp_path / "adapter", base)
    file = str(adapter / "adapters.safetensors")
    mx.save_safetensors(file, {n: a for n, a in read_arrays(file).items() if "layers.1" in n})
    identity = ModelIdentity.from_path(base, adapter)
    model = live(base, adapter)
    bind(model, identity, sample=None)
    change(model, "model.layers.0.self_attn.q_proj.lora_b")
    mismatch(model, identity, sample=None)


def test_load_model_with_an_adapter(base: Path, tmp_path: Path) -> None:
    adapter = real_adapter(tmp_path / "adapter", base)
    bound = load_model(base, adapter)
    assert bound.identity == ModelIdentity.from_path(base, adapter)
    # Nothing is left to be read from a file that may change by then.
    (adapter / "adapters.safetensors").write_bytes(b"")
    assert mx.array_equal(bound.model(mx.array([[1]])), bound.model(mx.array([[1]])))
    bare = load_model(base)
    assert not mx.array_equal(bound.model(mx.array([[1]])), bare.model(mx.array([[1]])))


def test_an_unbound_model_is_refused(base: Path) -> None:
    for value in (live(base), None, str(base), ModelIdentity.from_path(base)):
        with pytest.raises(IncompatibleError) as caught:
            require_bound(value)
        assert caught.value.code == "MODEL_UNBOUND"
        assert "kvstore.bind" in str(caught.value)
    with pytest.raises(IncompatibleError):
        identity_of(live(base))


def test_a_model_changed_after_binding_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = real_adapter(tmp_path / "adapter", base)
    changes: dict[str, Callable[[BoundModel], object]] = {
        "weights replaced": lambda b: b.model.load_weights(str(base / "model.safetensors")),
        "one weight replaced": lambda b: change(b.model, "model.layers.0.mlp.up_proj.weight"),
        "adapter applied": lambda b: mlx_lm.utils.load_adapters(b.model, str(adapter)),
        "quantized": lambda b: mlx_lm.utils.quantize_model(b.model, dict(TINY), 32, 4),
        "an array scaled in place": lambda b: write_to(b.model.model.layers[1].mlp.up_proj.weight),
        "memory written to": lambda b: overwrite(b.model.model.layers[1].mlp.up_proj.weight),
        "another scale": lambda b: setattr(b.model.model.layers[1].self_attn, "scale", 0.5),
        "another rope base": lambda b: setattr(b.model.model.layers[0].self_attn.rope, "base", 5.0),
        "another rope": lambda b: setattr(b.model.model.layers[0].self_attn, "rope", nn.Identity()),
        "another norm": lambda b: setattr(b.model.model.norm, "eps", 0.1),
    }
    for name, edit in changes.items():
        bound = load_model(base)
        bound.model(mx.array([[1, 2]]))
        require_bound(bound)
        edit(bound)
        with pytest.raises(IncompatibleError) as caught:
            require_bound(bound)
        assert caught.value.code == "BINDING_MISMATCH", name


def write_to(array: mx.array) -> None:
    array *= 2
    mx.eval(array)


def overwrite(array: mx.array) -> None:
    np.array(array, copy=False)[...] = 0


def test_a_lazy_model_is_read_before_its_files_can_change(base: Path, tmp_path: Path) -> None:
    """Weights that are not evaluated are read when they are first used, from whatever lies there by then."""
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    identity = ModelIdentity.from_path(folder)
    model, _ = mlx_lm.utils.load_model(folder, lazy=True)
    bound = bind(model, identity)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(file.stat().st_size - opened.tell()))
    expected = load_model(base).model(mx.array([[1, 2, 3]]))
    assert mx.array_equal(bound.model(mx.array([[1, 2, 3]])), expected)


def test_binding_keeps_no_weights_alive(base: Path) -> None:
    bound = load_model(base)
    before = mx.get_active_memory()
    bound.model.update(tree_unflatten([("model.embed_tokens.weight", mx.zeros((0,)))]))
    assert before - mx.get_active_memory() > 4 * 128 * 64 - 1024


def test_a_folder_that_changed_since_its_identity_was_read(tmp_path: Path) -> None:
    path = real_folder(tmp_path / "model", TINY)
    model, identity = live(path), ModelIdentity.from_path(path)
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert str(path / "model.safetensors") in str(mismatch(model, identity))


def test_files_that_mlx_lm_cannot_load(tmp_path: Path) -> None:
    broken = {
        "unknown": {**TINY, "model_type": "no_such_model"},
        "arguments": {"model_type": "llama"},
        "weights": TINY,
        "own code": {**TINY, "model_file": "own.py"},
    }
    for name, config in broken.items():
        path = fake_folder(tmp_path / name, config=config)
        (path / "own.py").write_text("raise SystemExit")
        with pytest.raises(InvalidError) as caught:
            load_model(path)
        assert caught.value.code == "MODEL_FOLDER_INVALID"
        assert str(path) in str(caught.value)


def test_custom_code_runs_only_where_it_is_trusted(base: Path, tmp_path: Path) -> None:
    path = real_folder(tmp_path / "model", TINY)
    edit_json(path / "config.json", model_file="own.py")
    (path / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    with pytest.raises(InvalidError, match="trust_remote_code"):
        load_model(path)
    bound = load_model(path, trust_remote_code=True)
    assert [item.name for item in bound.identity.model.code] == ["own.py"]
    assert bind(bound.model, bound.identity, sample=None, trust_remote_code=True).compared > 2


def test_only_a_module_can_be_bound(base: Path) -> None:
    not_a_module: Any = "model"
    with pytest.raises(UsageError):
        bind(not_a_module, ModelIdentity.from_path(base))


RANK = """
import sys
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from kvstore.errors import UnsupportedError
from kvstore.runtime.binding import load_model
from kvstore.runtime.capture import capture
from kvstore.runtime.identity import ModelIdentity
cache = KVCache()
cache.update_and_fetch(mx.zeros((1, 1, 2, 8)), mx.zeros((1, 1, 2, 8)))
for act in (lambda: load_model(sys.argv[1]), lambda: capture([cache], [1, 2], ModelIdentity.from_path(sys.argv[1]))):
    try:
        act()
    except UnsupportedError as error:
        print(error.code, error.detail["found"])
"""


@pytest.mark.race
def test_a_sharded_run_is_refused(base: Path, tmp_path: Path) -> None:
    """Two real ranks over the ring backend."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (first, second)]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(base)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.communicate(timeout=120)[0].split() for rank in ranks] == [["SHARD_UNSUPPORTED", "2"] * 2] * 2


def test_a_model_that_puts_a_parameter_anew_at_each_pass_stays_bound(tmp_path: Path) -> None:
    """gemma3n clips two small matrices and makes them float32; its other weights are the very arrays."""
    bound = load_model(family_folder(tmp_path, FAMILIES["gemma3n"]))
    bound.model(mx.array([[1, 2, 3]]))
    assert require_bound(bound) is bound
    name = "model.language_model.layers.0.altup.correction_coefs.weight"
    value = dict(tree_flatten(bound.model.parameters()))[name]
    bound.model.update(tree_unflatten([(name, value + 1)]))
    with pytest.raises(IncompatibleError) as error:
        require_bound(bound)
    assert error.value.code == "BINDING_MISMATCH"


def test_a_small_model_in_another_dtype_is_another(tmp_path: Path) -> None:
    """Values alone would not tell: every parameter was put anew."""
    small = {**TINY, "hidden_size": 16, "vocab_size": 32, "intermediate_size": 16}
    bound = load_model(real_folder(tmp_path / "model", small, dtype="bfloat16"))
    bound.model.set_dtype(mx.float32)
    with pytest.raises(IncompatibleError) as error:
        require_bound(bound)
    assert error.value.code == "BINDING_MISMATCH"


@pytest.mark.parametrize("name", ["llama", "gemma3n", "mamba2", "deepseek_v3"])
def test_parameters_are_those_that_mlx_names(name: str, tmp_path: Path) -> None:
    model = live(family_folder(tmp_path, FAMILIES[name]))
    expected = tree_flatten(model.parameters())
    found = list(_parameters(model).items())
    assert [key for key, _ in found] == [key for key, _ in expected]
    assert all(array is there for (_, array), (_, there) in zip(found, expected, strict=True))

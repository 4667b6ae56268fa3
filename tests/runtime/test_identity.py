"""Model identity from files: what makes another model, what does not, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvstore.errors import IncompatibleError, InvalidError, UsageError
from kvstore.format.json import canonical_bytes, parse_canonical
from kvstore.format.model import parse_model, parse_tokenizer
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.loading import load_unread
from kvstore.store.file_digests import FileDigests
from tests.runtime.model_folders import edit_json, fake_adapter, fake_folder, write_json

Edit = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


SECOND = "model-00002-of-00002.safetensors"

SAME_MODEL: dict[str, Edit] = {
    "a name in the config": lambda d: edit_json(d / "config.json", _name_or_path="another/name"),
    "a version in the config": lambda d: edit_json(d / "config.json", transformers_version="5.1", dtype="float32"),
    "the order of keys": lambda d: write_json(
        d / "config.json", dict(reversed(json.loads((d / "config.json").read_text()).items()))
    ),
    "an integral rope base": lambda d: edit_json(d / "config.json", rope_theta=10000),
    "files that mlx-lm does not load": lambda d: (d / "consolidated.safetensors").write_bytes(b"x"),
    "a weight index": lambda d: write_json(d / "model.safetensors.index.json", {"weight_map": {}}),
    "generation defaults": lambda d: edit_json(d / "generation_config.json", eos_token_id=7),
    "code that no config names": lambda d: (d / "modeling_x.py").write_text("x = 1"),
    "times": lambda d: os.utime(d / SECOND, ns=(1, 1)),
    "a read-me": lambda d: (d / "README.md").write_text("x"),
}
OTHER_MODEL: dict[str, Edit] = {
    "one weight bit": lambda d: flip(d / "model-00001-of-00002.safetensors", 1000),
    "the last weight byte": lambda d: flip(d / SECOND, -1),
    "a weight file more": lambda d: (d / "model-extra.safetensors").write_bytes(b""),
    "a weight file less": lambda d: (d / SECOND).unlink(),
    "a weight file's name": lambda d: (d / SECOND).rename(d / "model.safetensors"),
    "rope base": lambda d: edit_json(d / "config.json", rope_theta=10001.0),
    "epsilon": lambda d: edit_json(d / "config.json", rms_norm_eps=1e-5),
    "null and absent": lambda d: edit_json(d / "config.json", rope_scaling=...),
    "a list in the config": lambda d: edit_json(d / "config.json", architectures=[]),
    "quantization settings": lambda d: edit_json(d / "config.json", quantization={"bits": 4, "group_size": 64}),
    "quantization beside the config": lambda d: write_json(d / "hf_quant_config.json", {"quant_algo": "NVFP4"}),
    "the media processor": lambda d: write_json(d / "preprocessor_config.json", {"image_mean": [0.5]}),
}
OTHER_TOKENIZER: dict[str, Edit] = {
    "vocabulary": lambda d: (d / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}'),
    "a setting": lambda d: edit_json(d / "tokenizer_config.json", add_bos_token=True),
    "added tokens": lambda d: write_json(d / "added_tokens.json", {"<x>": 7}),
    "special tokens": lambda d: write_json(d / "special_tokens_map.json", {"bos_token": "<s>"}),
    "merges": lambda d: (d / "merges.txt").write_text("a b"),
    "a second model": lambda d: (d / "tokenizer.model").write_bytes(b"sp"),
}
SAME_TOKENIZER: dict[str, Edit] = {
    "names": lambda d: edit_json(d / "tokenizer_config.json", name_or_path="x", is_local=True, processor_class="P"),
    "code that no config names": lambda d: (d / "tokenization_x.py").write_text("x = 1"),
}


def identity(path: Path, adapter: Path | None = None) -> ModelIdentity:
    return ModelIdentity.from_path(path, adapter)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_folder(tmp_path / "model")


def test_copies_in_other_folders_are_one_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "deeper" / "under another name")
    a, b = identity(folder), identity(copy)
    assert a == b
    assert a.digest == b.digest
    assert a.names != b.names
    assert hash(a) == hash(b)


def test_the_records_are_those_that_a_manifest_parses(folder: Path, tmp_path: Path) -> None:
    write_json(folder / "processor_config.json", {"x": 1})
    edit_json(folder / "config.json", model_file="code/own.py")
    (folder / "code").mkdir()
    (folder / "code" / "own.py").write_text("x = 1")
    (folder / "helper.py").write_text("x = 2")
    found = identity(folder, fake_adapter(tmp_path / "adapter"))
    for record, parse in ((found.model, parse_model), (found.tokenizer, parse_tokenizer)):
        data = canonical_bytes(record.to_json())
        assert parse(parse_canonical(data, len(data))) == record
    assert [item.name for item in found.model.code] == ["code/own.py", "helper.py"]
    assert dict(found.model.geometry)["num_key_value_heads"] == 2
    assert [(item.name, item.size) for item in found.model.weights] == [
        ("model-00001-of-00002.safetensors", 2048), (SECOND, 11),
    ]  # fmt: skip


@pytest.mark.parametrize("name", SAME_MODEL)
def test_same_model(folder: Path, name: str) -> None:
    before = identity(folder)
    SAME_MODEL[name](folder)
    assert identity(folder) == before


@pytest.mark.parametrize("name", OTHER_MODEL)
def test_another_model(folder: Path, name: str) -> None:
    before = identity(folder)
    OTHER_MODEL[name](folder)
    after = identity(folder)
    assert after.digest != before.digest
    assert after.tokenizer == before.tokenizer


@pytest.mark.parametrize("name", OTHER_TOKENIZER)
def test_another_tokenizer_is_not_another_model(folder: Path, name: str) -> None:
    before = identity(folder)
    OTHER_TOKENIZER[name](folder)
    after = identity(folder)
    assert after.tokenizer.digest != before.tokenizer.digest
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    assert after.digest == before.digest


@pytest.mark.parametrize("name", SAME_TOKENIZER)
def test_same_tokenizer(folder: Path, name: str) -> None:
    before = identity(folder)
    SAME_TOKENIZER[name](folder)
    assert identity(folder) == before


def test_tokenizer_code_counts_where_the_config_names_it(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    (folder / "own.py").write_text("x = 1")
    before = identity(folder)
    (folder / "own.py").write_text("x = 2")
    assert identity(folder).tokenizer.digest != before.tokenizer.digest
    assert identity(folder).digest == before.digest


def test_custom_model_code_counts(folder: Path) -> None:
    edit_json(folder / "config.json", model_file="own.py")
    (folder / "own.py").write_text("x = 1")
    (folder / "helper.py").write_text("x = 1")
    seen = {identity(folder).digest}
    for name in ("own.py", "helper.py"):
        (folder / name).write_text("x = 2")
        seen.add(identity(folder).digest)
    assert len(seen) == 3


CODE: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "beside the config": ("own.py", ("helper.py",), True),
    "the named file within": ("code/own.py", ("helper.py",), True),
    "the named file within, spelt otherwise": ("./code//own.py", (), True),
    "beside the named file within": ("code/own.py", ("code/helper.py",), False),
    "a package within": ("own.py", ("parts/__init__.py", "parts/deeper/layer.py"), False),
    "hidden": ("own.py", (".git/hooks/own.py",), True),
}


@pytest.mark.parametrize("name", CODE)
def test_code_that_would_not_count_is_refused(folder: Path, name: str) -> None:
    """The format hashes code that is directly in the folder, so a helper further down could change unseen."""
    named, others, fits = CODE[name]
    for file in (named, *others):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("x = 1")
    (folder / "loop").symlink_to(".")
    assert identity(folder).model.code == ()
    edit_json(folder / "config.json", model_file=named)
    if fits:
        assert named in {item.name for item in identity(folder).model.code}
    else:
        refused(min(others), folder)


def test_the_chat_template_stands_alone(folder: Path) -> None:
    before = identity(folder)
    edit_json(folder / "tokenizer_config.json", chat_template="{{ other }}")
    after = identity(folder)
    assert after.tokenizer.digest == before.tokenizer.digest
    assert after.tokenizer.chat_template not in (None, before.tokenizer.chat_template)
    assert after.digest == before.digest
    edit_json(folder / "tokenizer_config.json", chat_template=...)
    assert identity(folder).tokenizer.chat_template is None


def test_one_template_in_any_place_is_one_template(folder: Path) -> None:
    expected = identity(folder).tokenizer.chat_template
    edit_json(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "{{ messages }}"}])
    assert identity(folder).tokenizer.chat_template == expected
    edit_json(folder / "tokenizer_config.json", chat_template="{{ overridden }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert identity(folder).tokenizer.chat_template == expected
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert identity(folder).tokenizer.chat_template != expected


def test_adapters(folder: Path, tmp_path: Path) -> None:
    """Base model, adapter, scale, rank, bytes, kind: each its own identity; what only training reads is not."""
    base = fake_adapter(tmp_path / "a")
    scaled = {"rank": 8, "scale": 20.5, "dropout": 0.1, "keys": ["self_attn.q_proj"]}
    others = [
        fake_adapter(tmp_path / "scale", lora_parameters=scaled),
        fake_adapter(tmp_path / "rank", lora_parameters={**scaled, "scale": 20.0, "rank": 4}),
        fake_adapter(tmp_path / "dora", fine_tune_type="dora"),
        fake_adapter(tmp_path / "full", fine_tune_type="full"),
        fake_adapter(tmp_path / "layers", num_layers=1),
        fake_adapter(tmp_path / "bytes"),
    ]
    (others[-1] / "adapters.safetensors").write_bytes(b"trained longer")
    digests = {identity(folder).digest, *(identity(folder, adapter).digest for adapter in (base, *others))}
    assert len(digests) == 2 + len(others)
    trained_otherwise = {**scaled, "scale": 20, "dropout": 0}
    same = fake_adapter(tmp_path / "same", iters=7, data="elsewhere", lora_parameters=trained_otherwise)
    assert identity(folder, same) == identity(folder, base)
    record = identity(folder, others[0]).model.adapter
    assert record is not None
    assert (record.kind, record.scale) == ("lora", "20.5")


def test_an_adapter_reloaded_under_its_name_is_another(folder: Path, tmp_path: Path) -> None:
    adapter = fake_adapter(tmp_path / "adapter")
    before = identity(folder, adapter)
    flip(adapter / "adapters.safetensors", 0)
    assert identity(folder, adapter).digest != before.digest
    assert before.changed_files() == [adapter / "adapters.safetensors"]


MISSING: dict[str, tuple[tuple[str, ...], str]] = {
    "weights": (("model-00001-of-00002.safetensors", SECOND), "model*.safetensors"),
    "tokenizer": (("tokenizer.json",), "tokenizer.json"),
    "config": (("config.json",), "config.json"),
}


@pytest.mark.parametrize("name", MISSING)
def test_an_incomplete_folder_is_refused_by_the_missing_file(folder: Path, name: str) -> None:
    files, missing = MISSING[name]
    for file in files:
        (folder / file).unlink()
    refused(missing, folder, missing=missing)


def test_an_incomplete_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("adapters.safetensors", "adapter_config.json"):
        adapter = fake_adapter(tmp_path / name)
        (adapter / name).unlink()
        refused(name, folder, adapter, missing=name)


def nest(name: str, depth: int, folder: Path) -> None:
    (folder / name).write_text('{"x":' * depth + "1" + "}" * depth)


BROKEN: dict[str, tuple[Edit, str]] = {
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "JSON object"),
    **{
        f"config is {depth} levels deep": (partial(nest, "config.json", depth), "nested too deeply")
        for depth in (65, 900, 100_000)
    },
    "tokenizer's settings are 900 levels deep": (partial(nest, "tokenizer_config.json", 900), "nested too deeply"),
    "no model type": (lambda d: edit_json(d / "config.json", model_type=...), "model_type"),
    "named code is no name": (lambda d: edit_json(d / "config.json", model_file=["own.py"]), "model_file"),
    "named code no file can have": (lambda d: edit_json(d / "config.json", model_file="own\0.py"), "model_file"),
    "named code is gone": (lambda d: edit_json(d / "config.json", model_file="gone.py"), "gone.py"),
    "a weight file is a folder": (lambda d: (d / "model.safetensors").mkdir(), "model.safetensors cannot be read"),
    "a weight file's blob is gone": (lambda d: (d / "model.safetensors").symlink_to("gone"), "cannot be read"),
    "config's blob is gone": (lambda d: link(d / "config.json", "gone"), "no config.json"),
    "config leads to itself": (lambda d: link(d / "config.json", "config.json"), "cannot be read"),
    "config is a pipe": (lambda d: pipe(d / "config.json"), "no config.json"),
    "a weight file is a pipe": (lambda d: pipe(d / "model.safetensors"), "model.safetensors cannot be read"),
    "the tokenizer is a pipe": (lambda d: pipe(d / "tokenizer.json"), "tokenizer.json cannot be read"),
    "template is not text": (lambda d: (d / "chat_template.jinja").write_bytes(b"\xff"), "not UTF-8"),
}  # fmt: skip


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused(folder: Path, name: str) -> None:
    edit, said = BROKEN[name]
    edit(folder)
    refused(said, folder)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "__metadata__"), ("c", "a"), ("b", "a", "c")], ids=str)
def test_a_tensor_that_stands_in_two_weight_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Which of the two counts would depend on the order in which the file system lists them."""
    folder = fake_folder(tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    write_header(folder / "model-00001-of-00002.safetensors", "a", "__metadata__")
    assert identity(folder)
    write_header(folder / SECOND, *names)
    if "a" in names:
        refused("tensor 'a' in two weight files", folder)
    else:
        assert identity(folder)


def write_header(path: Path, *names: str) -> None:
    one = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({name: {} if name == "__metadata__" else one for name in names}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    "changes", [{"fine_tune_type": "ia3"}, {"lora_parameters": {"rank": 8, "alpha": 16}}, {"lora_parameters": None},
                {"lora_parameters": {"scale": True}}],
)  # fmt: skip
def test_a_broken_adapter_is_refused(folder: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    refused("adapter_config.json", folder, fake_adapter(tmp_path / "adapter", **changes))


def test_no_folder_there(tmp_path: Path, folder: Path) -> None:
    refused("no model folder", tmp_path / "nowhere")
    refused("is a file", folder / "config.json")
    refused("no model folder", folder, tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["model[1]", "model*", "mode?", "[x]/model"])
def test_a_folder_that_mlx_lm_would_take_for_a_pattern(tmp_path: Path, folder: Path, name: str) -> None:
    """It globs the path, so that the weights of a folder beside it would be loaded under this one's digests."""
    odd = fake_folder(tmp_path / name)
    refused("Rename the folder", odd)
    with pytest.raises(InvalidError, match="Rename the folder"):
        load_unread(odd)
    assert identity(folder, fake_adapter(tmp_path / "adapter[1]")).adapter_path == tmp_path / "adapter[1]"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(folder: Path) -> None:
    folder.chmod(0)
    try:
        refused("cannot be read", folder)
    finally:
        folder.chmod(0o700)


def refused(said: str, *paths: Path, **detail: str) -> None:
    with pytest.raises(InvalidError) as caught:
        identity(*paths)
    assert caught.value.code == "MODEL_FOLDER_INVALID"
    assert said in str(caught.value)
    assert detail.items() <= caught.value.detail.items()


def hub_folder(root: Path, folder: Path, *, revision: str = "a" * 40, main: str | None = "a" * 40) -> Path:
    """A hub cache with this model in it: links to blobs, large ones named by their SHA-256."""
    repo = root / "models--some-org--some-model"
    snapshot = repo / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in folder.iterdir():
        data = file.read_bytes()
        large = file.suffix == ".safetensors"
        name = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(data, usedforsecurity=False).hexdigest()
        (repo / "blobs" / name).write_bytes(data)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    if main is not None:
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(main)
    return snapshot


def test_a_hub_cache_holds_the_same_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_folder(tmp_path / "hub", folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in (snapshot, snapshot.parent.parent, "some-org/some-model"):
        found = ModelIdentity.from_path(path)
        assert found == identity(folder)
        assert found.names == {"path": str(snapshot), "repo": "some-org/some-model", "revision": "a" * 40}
    # A large blob's name is what its digest should be, and is not taken for it.
    flip((snapshot / SECOND).resolve(), 0)
    assert ModelIdentity.from_path(snapshot) != identity(folder)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_hub_cache_is_where_the_environment_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(variable, "")
    hub_folder(tmp_path / "there" / below, folder)
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    assert ModelIdentity.from_path("some-org/some-model") == identity(folder)


def test_a_model_that_is_not_in_the_hub_cache(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(InvalidError, match="`hf download some-org/some-model` fetches it; kvstore does not use"):
        ModelIdentity.from_path("some-org/some-model")
    hub_folder(tmp_path / "hub", folder, main="b" * 40)
    with pytest.raises(InvalidError, match="no whole snapshot"):
        ModelIdentity.from_path("some-org/some-model")
    for name in ("../escape", "/nowhere", "a/b/c"):
        with pytest.raises(InvalidError) as caught:
            ModelIdentity.from_path(name)
        assert caught.value.code == "MODEL_FOLDER_INVALID"


@pytest.mark.parametrize("name", ["a" * 5000, "/" + "a" * 5000, "~no-such-user/model"], ids=["id", "path", "home"])
def test_a_name_that_the_system_does_not_take(name: str) -> None:
    with pytest.raises(InvalidError) as caught:
        ModelIdentity.from_path(name)
    assert caught.value.code == "MODEL_FOLDER_INVALID"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("pointer", [b"\xff\xfe", b"a" * 5000, b"a\0b"], ids=["no text", "long", "zero"])
def test_a_pointer_that_is_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pointer: bytes
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = hub_folder(tmp_path / "hub", folder)
    (snapshot.parents[1] / "refs" / "main").write_bytes(pointer)
    for name in ("some-org/some-model", snapshot.parents[1]):
        with pytest.raises(InvalidError) as caught:
            ModelIdentity.from_path(name)
        assert caught.value.code == "MODEL_FOLDER_INVALID"


def test_an_account_without_a_home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(key: object) -> None:
        raise KeyError(key)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert ModelIdentity.from_path(folder) == identity(folder)
    with pytest.raises(UsageError, match=r"no home.*Set HOME, or HF_HOME"):
        ModelIdentity.from_path("some-org/some-model")
    with pytest.raises(InvalidError, match="Name it from /"):
        ModelIdentity.from_path("~/model")
    hub_folder(tmp_path / "hub", folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert ModelIdentity.from_path("some-org/some-model") == identity(folder)


def test_a_single_snapshot_needs_no_pointer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_folder(tmp_path / "hub", folder, main=None)
    assert ModelIdentity.from_path("some-org/some-model") == identity(folder)


def test_changed_files_are_seen(folder: Path) -> None:
    found = identity(folder)
    found.require_unchanged()
    flip(folder / SECOND, 0)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(IncompatibleError) as caught:
        found.require_unchanged()
    assert caught.value.code == "BINDING_MISMATCH"
    assert caught.value.detail["files"] == [str(folder / SECOND), str(folder / "tokenizer.json")]


def test_the_memory_of_digests_is_used(folder: Path, tmp_path: Path) -> None:
    """A second identity reads no weights: they may as well lie, as long as the stamps agree."""
    memory = tmp_path / "memory.json"
    first = ModelIdentity.from_path(folder, digests=FileDigests(memory))
    rows = {str(path): ["sha256:" + "0" * 64, *stamp] for path, stamp in first.stamps.items()}
    write_json(memory, {"files": rows, "version": 1})
    second = ModelIdentity.from_path(folder, digests=FileDigests(memory))
    assert {item.digest for item in second.model.weights} == {"sha256:" + "0" * 64}
    assert ModelIdentity.from_path(folder, digests=FileDigests(memory), rehash=True) == first


def test_an_identity_needs_no_mlx() -> None:
    code = "import sys, kvstore.runtime.identity; print([m for m in sys.modules if m.startswith('mlx')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

"""One model in its variants, adapted, fused and quantized: a cache of one is refused by every other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils

import kvstore
from kvstore.errors import IncompatibleError
from kvstore.runtime.binding import BoundModel
from tests.runtime.model_folders import real_adapter, real_folder
from tests.runtime.tiny import CONFIGS, NEXT, logits, prefilled, tokens

COUNT = 40
CONFIG = CONFIGS["llama"]


def fused(path: Path, base: Path, adapter: Path) -> Path:
    """The base model with its adapter's product added to its weights, as ``mlx_lm.fuse`` writes it."""
    shutil.copytree(base, path)
    model, _ = utils.load_model(base)
    model = utils.load_adapters(model, str(adapter))
    layers = [(name, part.fuse()) for name, part in model.named_modules() if hasattr(part, "fuse")]
    assert layers
    model.update_modules(tree_unflatten(layers))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return path


def build(root: Path) -> Mapping[str, Callable[[], BoundModel]]:
    base = real_folder(root / "base", CONFIG)
    four, eight = (real_folder(root / f"{bits} bits", CONFIG, bits=bits) for bits in (4, 8))
    lora, dora = (real_adapter(root / kind, base, kind=kind) for kind in ("lora", "dora"))
    scaled, retrained = real_adapter(root / "scaled", base, scale=10.0), real_adapter(root / "retrained", base, seed=2)
    merged = fused(root / "fused", base, lora)
    return {
        "base": lambda: kvstore.load_model(base),
        "lora": lambda: kvstore.load_model(base, lora),
        "lora, another scale": lambda: kvstore.load_model(base, scaled),
        "lora, trained again": lambda: kvstore.load_model(base, retrained),
        "dora": lambda: kvstore.load_model(base, dora),
        "fused": lambda: kvstore.load_model(merged),
        "4 bits": lambda: kvstore.load_model(four),
        "8 bits": lambda: kvstore.load_model(eight),
        "lora on 4 bits": lambda: kvstore.load_model(four, real_adapter(root / "q", four)),
    }


NAMES = (
    "base", "lora", "lora, another scale", "lora, trained again", "dora", "fused", "4 bits", "8 bits", "lora on 4 bits",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No compiled kernels (they take a C++ compiler seconds), and no file of the user's home."""
    mx.disable_compile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def variants(plain: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BoundModel]:
    made = build(tmp_path_factory.mktemp("variants"))
    assert tuple(made) == NAMES
    return {name: load() for name, load in made.items()}


@pytest.fixture(scope="module")
def entries(variants: dict[str, BoundModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store with an entry of each variant, all of the same tokens and, but for the values, alike."""
    root = tmp_path_factory.mktemp("entries") / "store"
    with kvstore.Store.open(root) as store:
        return root, {
            name: store.put(prefilled(model, COUNT), token_ids=tokens(COUNT), model=model).subject
            for name, model in variants.items()
        }


def test_each_finds_its_own(variants: dict[str, BoundModel], entries: tuple[Path, dict[str, str]]) -> None:
    root, ids = entries
    assert len(set(ids.values())) == len({model.identity.digest for model in variants.values()}) == len(NAMES)
    with kvstore.Store.open(root) as store:
        for name, model in variants.items():
            hit = store.match([*tokens(COUNT), 1], model=model)
            assert hit.entry_id == ids[name]
            restored = store.load(hit, into=model).cache
            assert logits(model, restored, NEXT) == logits(model, prefilled(model, COUNT), NEXT)


@pytest.mark.parametrize(("made_by", "receiver"), list(permutations(NAMES, 2)))
def test_a_cache_of_one_is_refused_by_the_other(
    variants: dict[str, BoundModel], entries: tuple[Path, dict[str, str]], made_by: str, receiver: str
) -> None:
    root, ids = entries
    with kvstore.Store.open(root) as store, pytest.raises(IncompatibleError) as caught:
        store.load(ids[made_by], into=variants[receiver])
    ours, theirs = (variants[name].identity.model for name in (made_by, receiver))
    # The gravest difference decides: quantization stands in the config, which comes before an adapter.
    adapter = ours.config == theirs.config and ours.adapter != theirs.adapter
    assert caught.value.code == ("ADAPTER_MISMATCH" if adapter else "MODEL_MISMATCH")
    assert caught.value.detail["expected"] != caught.value.detail["found"]

"""Parts of a model for acts that compute nothing: its caches without weights, its tokenizer without a model."""

from __future__ import annotations

import os
from typing import Any

from kvstore.format.layers import LayerRecord, leaves
from kvstore.runtime.binding import BoundModel, bind_unread
from kvstore.runtime.folder import load_errors, locate
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.loading import load_unread
from kvstore.runtime.probe import CacheOptions, make_cache

__all__ = ["caches_of_folder", "load_tokenizer", "open_model", "options_of"]


def open_model(path: str | os.PathLike[str], adapter_path: str | os.PathLike[str] | None = None) -> BoundModel:
    """A bound model whose weights stay on disk: enough to restore into, in a second and without their memory.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
        IncompatibleError: BINDING_MISMATCH where a file changed meanwhile.
    """
    identity = ModelIdentity.from_path(path, adapter_path)
    return bind_unread(load_unread(identity.path, identity.adapter_path), identity)


def caches_of_folder(path: str | os.PathLike[str]) -> list[Any]:
    """The empty caches that the model in a folder makes; its weights are not read.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    return make_cache(load_unread(locate(path).path))


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer that mlx-lm makes of a model's files.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    from mlx_lm import utils

    folder = locate(path).path
    with load_errors(folder):
        return utils.load_tokenizer(folder)


def options_of(layers: tuple[LayerRecord, ...], model: Any) -> CacheOptions:
    """The options under which a model makes caches like these: an entry's own quantization and window.

    Args:
        model: The receiving model. Where it makes its own caches, their windows are its own, too.
    """
    found = [leaf for _, leaf in leaves(layers)]
    quantized = next((leaf for leaf in found if leaf.kind in ("kv-quantized", "kv-sparse-quantized")), None)
    window = next((leaf for leaf in found if leaf.kind == "kv-rotating"), None)
    return CacheOptions(
        max_kv_size=None if window is None or hasattr(model, "make_cache") else window.integer("max_size"),
        kv_bits=None if quantized is None else quantized.integer("bits"),
        kv_group_size=64 if quantized is None else quantized.integer("group_size"),
        concatenated=any(leaf.kind == "kv-concatenated" for leaf in found),
    )

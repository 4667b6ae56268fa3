"""Models made by mlx-lm from the files in a folder: whole, or with their weights still on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.runtime.folder import load_errors, require_no_pattern

if TYPE_CHECKING:
    import mlx.nn as nn

__all__ = ["load_unread", "load_whole"]


def load_whole(
    path: Path, adapter_path: Path | None = None, *, trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """The model, evaluated, and its tokenizer.

    Args:
        trust_remote_code: Run the code that the model's config names.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    import mlx.core as mx
    import mlx_lm

    from kvstore.runtime.older_mlx_lm import loader_options

    require_no_pattern(path)
    with load_errors(path):
        model, tokenizer = mlx_lm.load(
            str(path), adapter_path=None if adapter_path is None else str(adapter_path),
            **loader_options(path, trust_remote_code=trust_remote_code),
        )[:2]  # fmt: skip
        mx.eval(model.parameters())
    return model, tokenizer


def load_unread(path: Path, adapter_path: Path | None = None, *, trust_remote_code: bool = False) -> nn.Module:
    """The model with every weight still unread. Arguments and errors as of :func:`load_whole`."""
    from mlx_lm import utils

    from kvstore.runtime.older_mlx_lm import loader_options

    require_no_pattern(path)
    with load_errors(path):
        model, _ = utils.load_model(path, lazy=True, **loader_options(path, trust_remote_code=trust_remote_code))
        if adapter_path is not None:
            model = utils.load_adapters(model, str(adapter_path))
            model.eval()
    return model

"""Models made by mlx-lm from the files in a folder: whole, or with their weights still on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import fail
from kvstore.runtime.folder import load_errors, require_no_pattern
from kvstore.runtime.identity import ADAPTER_WEIGHTS

if TYPE_CHECKING:
    import mlx.nn as nn

__all__ = ["load_unread", "load_whole"]

_FIRST: Final = "lora_a"
_SECOND: Final = "lora_b"


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
        if adapter_path is not None:
            _require_both_halves(adapter_path)
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
            _require_both_halves(adapter_path)
            model = utils.load_adapters(model, str(adapter_path))
            model.eval()
    return model


def _require_both_halves(adapter_path: Path) -> None:
    """Refuse an adapter that lacks the first half of a layer whose second is not zero: mlx-lm makes that at random.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID naming the tensor.
    """
    import mlx.core as mx

    arrays: Any = mx.load(str(adapter_path / ADAPTER_WEIGHTS))
    for name, array in arrays.items():
        first = name.removesuffix(_SECOND) + _FIRST
        if name.endswith(_SECOND) and first not in arrays and mx.any(array != 0).item():
            raise fail(
                "MODEL_FOLDER_INVALID", f"adapter folder {adapter_path} has {name} without its other half",
                expected=first, found="nothing", missing=first, path=str(adapter_path),
                fix="Fetch or train the adapter again; without that half the model is another one each time.",
            )  # fmt: skip

"""Folders of tiny models whose every part matters: random weights, also where a model starts from zeros and ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from tests.families.base import Family
from tests.runtime.model_folders import real_folder


def family_folder(root: Path, family: Family) -> Path:
    """The folder of a family's tiny model; the same at each call."""
    path = root / family.title
    if not path.exists():
        real_folder(path, family.config, bits=family.bits, dtype=family.dtype, prepare=_shake)
    return path


def _shake(model: Any) -> None:
    """Move parameters that are all one number: gates and decays of zero would let a wrong cache pass."""
    model.update(tree_map(_moved, model.parameters()))


def _moved(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating) or array.size < 2 or not bool((array == array.reshape(-1)[0]).all()):
        return array
    return array + 0.1 * mx.random.normal(array.shape, array.dtype)

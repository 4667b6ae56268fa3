"""Could this model have made this cache? Asked at put, where the answer is cheap and a wrong one is for good.

The caller's word joins a cache to a model. A cache of another model mostly has other
shapes or another number of layers, and then the mistake is seen here. Windows and
quantization are the caller's choice, so they may differ from what the model does alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import KVStoreError, fail
from kvstore.format.json import Json
from kvstore.format.layers import LayerRecord, leaves

__all__ = ["require_fit"]


def require_fit(layers: Sequence[LayerRecord], made: Sequence[LayerRecord]) -> None:
    """Prove that ``layers`` can be caches of the model whose own caches are ``made``.

    Raises:
        InvalidError: CACHE_INCONSISTENT, naming the layer and both sides.
    """
    have, want = dict(leaves(tuple(layers))), dict(leaves(tuple(made)))
    if len(layers) != len(made) or have.keys() != want.keys():
        raise _misfit("the number of caches", len(want), len(have))
    for path, layer in have.items():
        for role in layer.tensors:
            if role in want[path].tensors:
                expected, found = _open(want[path], role), _open(layer, role)
                if expected != found:
                    raise _misfit(f"layers[{path}].{role}", expected, found)


def _open(layer: LayerRecord, role: str) -> str:
    """Dtype and shape in text, open where the position decides."""
    shape = layer.open_shape(role)
    known = "" if shape is None else f" [{', '.join('any' if n is None else str(n) for n in shape)}]"
    return layer.tensors[role].dtype + known


def _misfit(what: str, expected: Json, found: Json) -> KVStoreError:
    return fail(
        "CACHE_INCONSISTENT", f"{what}: not a cache of this model", expected=expected, found=found,
        fix="Name the model that made the cache.",
    )  # fmt: skip

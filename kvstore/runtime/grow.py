"""What a layer looks like after any number of tokens, from what it looked like after one.

Most kinds need nothing else: a row for each token, up to a window. Two do not show in
one token what they grow to, and are looked at once more after many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord, Scalar, TensorRecord

__all__ = ["MANY_TOKENS", "grown", "grows_unseen"]

MANY_TOKENS: Final = 4099
"""More than any layer looks back or compresses into one row; a lazy pass costs no more for it."""
_EVERY_TOKEN: Final = ("kv", "kv-quantized", "kv-concatenated")


def grows_unseen(layer: LayerRecord) -> bool:
    """Whether one token does not show what the layer grows to."""
    return layer.kind == "kv-compressed" or (
        layer.kind == "state" and any(None in (layer.open_shape(role) or ()) for role in layer.tensors)
    )


def grown(layer: LayerRecord, later: LayerRecord, count: int) -> LayerRecord:
    """The layer after ``count`` tokens, from the ones after one token and after :data:`MANY_TOKENS`."""
    if layer.kind == "list":
        pairs = zip(layer.children, later.children, strict=True)
        return replace(layer, children=tuple(grown(*pair, count) for pair in pairs))
    if layer.never_written:
        return layer
    if layer.kind == "kv-compressed":
        return _compressed(later, count)
    if layer.offset is None:
        # Token ids that the model looks back at: one more for each token, until there are enough.
        shapes = {role: _extents(tensor, later.tensors[role], count) for role, tensor in layer.tensors.items()}
        return _with_shapes(layer, {}, shapes)
    rows, scalars = count, dict[str, Scalar](offset=count)
    if layer.kind == "kv-rotating":
        rows = min(count, layer.integer("max_size"))
        scalars["ring_index"] = rows
    elif layer.kind == "kv-chunked":
        rows = min(count, layer.integer("chunk_size"))
        scalars["start"] = count - rows
    elif layer.kind not in _EVERY_TOKEN:
        raise fail("KIND_UNSUPPORTED", "probe", expected=list(_EVERY_TOKEN), found=layer.kind)
    return layer.with_rows(rows, **scalars)


def _extents(first: TensorRecord, later: TensorRecord, count: int) -> tuple[int, ...]:
    return tuple(min(a * count, b) if a < b else a for a, b in zip(first.shape, later.shape, strict=True))


def _compressed(later: LayerRecord, count: int) -> LayerRecord:
    """A window, and behind it one row for each full group of tokens; how large a group is shows after many tokens."""
    rows = {role: tensor.shape[1] for role, tensor in later.tensors.items()}
    group = (MANY_TOKENS - rows.get("pending.kv", 0)) // rows["compressed"] if "compressed" in rows else 1
    now = {"window": min(count, later.integer("max_size"))}
    now |= dict.fromkeys(("pending.kv", "pending.gate"), count % group)
    now |= dict.fromkeys(("compressed", "index"), count // group)
    shapes = {
        role: (1, now[role], tensor.shape[2])
        for role, tensor in later.tensors.items()
        if now[role] or role not in ("compressed", "index")
    }
    return _with_shapes(later, {"offset": count}, shapes)


def _with_shapes(
    layer: LayerRecord, scalars: Mapping[str, Scalar], shapes: Mapping[str, tuple[int, ...]]
) -> LayerRecord:
    tensors = {role: replace(layer.tensors[role], shape=shape) for role, shape in shapes.items()}
    return replace(
        layer, scalars=MappingProxyType({**layer.scalars, **scalars}), tensors=MappingProxyType(tensors)
    )

"""Cross-field rules of one entry: what a schema cannot say about layers and token count.

Step 4 of the reading order. Every rule is about a state that no runtime could have
produced or could restore; each failure names the layer, both values and the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvstore.errors import fail
from kvstore.format.kinds import BIASED_MODES, KINDS, QUANTIZATION_BITS, QUANTIZATION_GROUPS, UNBIASED_MODES
from kvstore.format.layers import LayerRecord, leaves

__all__ = ["check_layers"]


def check_layers(layers: tuple[LayerRecord, ...], token_count: int) -> None:
    """Check each layer by itself and against the entry's token count.

    Raises:
        InvalidError: TENSOR_SET_MISMATCH, SHAPE_INCONSISTENT, TOKEN_COUNT_MISMATCH, CACHE_STATE_INVALID.
    """
    written = False
    for path, layer in leaves(layers):
        where = f"layers[{path}]"
        if layer.never_written:
            _check_never_written(layer, where)
            continue
        written = True
        _check_set(layer, where)
        _check_shapes(layer, where)
        if layer.offset is not None and layer.offset != token_count:
            raise fail("TOKEN_COUNT_MISMATCH", f"{where}.offset", expected=token_count, found=layer.offset)
        check = _BY_KIND.get(layer.kind)
        if check is not None:
            check(layer, where)
    if not written:
        raise fail("CACHE_STATE_INVALID", "layers", expected="at least one layer with tensors", found="none")


def _check_set(layer: LayerRecord, where: str) -> None:
    """All required roles; biases exactly where the mode has them."""
    required = {role for role, rule in KINDS[layer.kind].roles.items() if rule.required}
    if "mode" in layer.scalars and layer.scalars["mode"] in BIASED_MODES:
        required |= {"k.biases", "v.biases"}
    missing = sorted(required - set(layer.tensors))
    if missing:
        raise fail("TENSOR_SET_MISMATCH", f"{where} lacks a tensor", expected=sorted(required), found=missing)
    biases = sorted({"k.biases", "v.biases"} & set(layer.tensors))
    if layer.scalars.get("mode") in UNBIASED_MODES and biases:
        raise fail("TENSOR_SET_MISMATCH", f"{where} has biases", expected="none in this mode", found=biases)
    if layer.kind == "kv-compressed":
        _check_pairs(layer, where)


def _check_pairs(layer: LayerRecord, where: str) -> None:
    """An open group has rows and gates, and an index is one of compressed rows."""
    found = set(layer.tensors)
    if ("pending.kv" in found) != ("pending.gate" in found) or ("index" in found and "compressed" not in found):
        raise fail(
            "TENSOR_SET_MISMATCH", f"{where} lacks a tensor",
            expected="both pending ones or none, compressed beside index", found=sorted(found),
        )  # fmt: skip


def _check_never_written(layer: LayerRecord, where: str) -> None:
    if layer.offset:
        raise fail("CACHE_STATE_INVALID", f"{where} has no tensors", expected="offset 0", found=layer.offset)
    if layer.scalars.get("ring_index") or layer.scalars.get("start"):
        raise fail("CACHE_STATE_INVALID", f"{where} has no tensors", expected="index 0", found=dict(layer.scalars))


def _check_shapes(layer: LayerRecord, where: str) -> None:
    """Ranks, batch size one, and one number of rows for all tensors that run over tokens."""
    rows = layer.rows
    for role, record in layer.tensors.items():
        rule = KINDS[layer.kind].roles.get(role)
        shape = list(record.shape)
        if rule is None:
            continue
        if rule.rank is not None and len(shape) != rule.rank:
            raise fail("SHAPE_INCONSISTENT", f"{where}.{role}", expected=f"{rule.rank} axes", found=shape)
        if rule.axis is not None and shape[rule.axis] != rows:
            raise fail("SHAPE_INCONSISTENT", f"{where}.{role}", expected=f"{rows} rows", found=shape)
        if role != "positions" and shape[0] != 1:
            raise fail("SHAPE_INCONSISTENT", f"{where}.{role}", expected="a batch of 1", found=shape)
    _check_heads(layer, where)


def _check_heads(layer: LayerRecord, where: str) -> None:
    """Keys and values, and the parts of a quantized array, have the same number of heads."""
    heads: int | None = None
    for role, record in layer.tensors.items():
        rule = KINDS[layer.kind].roles.get(role)
        if rule is None or rule.rank != 4:
            continue
        heads = record.shape[1] if heads is None else heads
        if record.shape[1] != heads:
            raise fail("SHAPE_INCONSISTENT", f"{where}.{role}", expected=f"{heads} heads", found=list(record.shape))


def _exact_rows(layer: LayerRecord, where: str) -> None:
    if layer.rows != layer.offset:
        raise fail("SHAPE_INCONSISTENT", f"{where} rows", expected=layer.offset, found=layer.rows)


def _quantized(layer: LayerRecord, where: str) -> None:
    bits, group = layer.integer("bits"), layer.integer("group_size")
    if bits not in QUANTIZATION_BITS or group not in QUANTIZATION_GROUPS:
        raise fail(
            "CACHE_STATE_INVALID", f"{where} quantization",
            expected=f"bits in {QUANTIZATION_BITS}, group size in {QUANTIZATION_GROUPS}",
            found=f"bits {bits}, group size {group}",
        )  # fmt: skip
    for side in ("k", "v"):
        words, scales = layer.tensors[f"{side}.words"], layer.tensors[f"{side}.scales"]
        if words.dtype != "U32" or words.shape[-1] * 32 != scales.shape[-1] * group * bits:
            raise fail(
                "SHAPE_INCONSISTENT", f"{where}.{side}.words",
                expected=f"U32 with {scales.shape[-1] * group * bits}/32 words a row",
                found=f"{words.dtype} {list(words.shape)}",
            )  # fmt: skip
        biases = layer.tensors.get(f"{side}.biases", scales)
        if biases != scales:
            raise fail(
                "SHAPE_INCONSISTENT", f"{where}.{side}.biases", expected=f"{scales.dtype} {list(scales.shape)}",
                found=f"{biases.dtype} {list(biases.shape)}",
            )  # fmt: skip


def _quantized_full(layer: LayerRecord, where: str) -> None:
    _quantized(layer, where)
    _exact_rows(layer, where)


def _rotating(layer: LayerRecord, where: str) -> None:
    """Rows in temporal order; at most ``max_size`` of them; a ring index only in a full ring."""
    offset, rows = layer.offset or 0, layer.rows
    size, keep, ring = layer.integer("max_size"), layer.integer("keep"), layer.integer("ring_index")
    if keep >= size or rows > min(offset, size) or (rows < offset and rows <= keep):
        raise fail(
            "CACHE_STATE_INVALID", f"{where} window", expected="keep < max_size, rows <= min(offset, max_size)",
            found=f"offset {offset}, rows {rows}, max_size {size}, keep {keep}",
        )  # fmt: skip
    if ring != rows and not (rows == size < offset and keep <= ring < rows):
        raise fail("CACHE_STATE_INVALID", f"{where}.ring_index", expected=f"{rows} or {keep} to {rows}", found=ring)


def _chunked(layer: LayerRecord, where: str) -> None:
    offset, start = layer.offset or 0, layer.integer("start")
    if not start <= offset or layer.rows != offset - start or layer.integer("chunk_size") < 1:
        raise fail("CACHE_STATE_INVALID", f"{where} chunk", expected=f"{offset - start} rows", found=layer.rows)


def _concatenated(layer: LayerRecord, where: str) -> None:
    if layer.rows < (layer.offset or 0):
        raise fail("SHAPE_INCONSISTENT", f"{where} rows", expected=f"at least {layer.offset}", found=layer.rows)


def _sparse(layer: LayerRecord, where: str) -> None:
    if layer.rows > (layer.offset or 0):
        raise fail("SHAPE_INCONSISTENT", f"{where} rows", expected=f"at most {layer.offset}", found=layer.rows)
    positions, keys = layer.tensors.get("positions"), layer.tensors.get("k") or layer.tensors["k.words"]
    if positions is not None and (positions.dtype != "I32" or positions.shape[0] not in (1, keys.shape[1])):
        raise fail(
            "SHAPE_INCONSISTENT", f"{where}.positions", expected=f"I32 [1 or {keys.shape[1]}, {layer.rows}]",
            found=f"{positions.dtype} {list(positions.shape)}",
        )  # fmt: skip


def _sparse_quantized(layer: LayerRecord, where: str) -> None:
    _quantized(layer, where)
    _sparse(layer, where)


def _compressed(layer: LayerRecord, where: str) -> None:
    """A window, one row for every full group of tokens, and the tokens of the group that is not full yet."""
    offset, size = layer.offset or 0, layer.integer("max_size")
    if size < 1:
        raise fail("CACHE_STATE_INVALID", f"{where}.max_size", expected="at least 1", found=size)
    rows = {role: record.shape[1] for role, record in layer.tensors.items()}
    if rows["window"] != min(offset, size):
        raise fail("SHAPE_INCONSISTENT", f"{where}.window rows", expected=min(offset, size), found=rows["window"])
    groups, pending = rows.get("compressed"), rows.get("pending.kv", 0)
    if rows.get("index", groups) != groups or rows.get("pending.gate", 0) != pending:
        raise fail("SHAPE_INCONSISTENT", f"{where}: rows that go together", expected="one number", found=dict(rows))
    if not _is_grouping(offset, groups, pending):
        raise fail(
            "SHAPE_INCONSISTENT", f"{where}: groups and pending rows", expected=f"equal groups of {offset} tokens",
            found=f"{groups or 0} groups, {pending} pending",
        )  # fmt: skip


def _is_grouping(offset: int, groups: int | None, pending: int) -> bool:
    """Whether so many groups of one size and a rest below that size are ``offset`` tokens."""
    if groups is None:
        return pending in (0, offset)
    return groups > 0 and (offset - pending) % groups == 0 and pending < (offset - pending) // groups


def _state(layer: LayerRecord, where: str) -> None:
    slots = layer.integer("slots")
    for role, record in layer.tensors.items():
        if int(role.removeprefix("slot.")) >= slots:
            raise fail("TENSOR_SET_MISMATCH", f"{where}.{role}", expected=f"slots 0 to {slots - 1}", found=role)
        if not record.shape or record.shape[0] != 1:
            raise fail("SHAPE_INCONSISTENT", f"{where}.{role}", expected="a batch of 1", found=list(record.shape))


_BY_KIND: Final[Mapping[str, Callable[[LayerRecord, str], None]]] = {
    "kv": _exact_rows,
    "kv-quantized": _quantized_full,
    "kv-rotating": _rotating,
    "kv-chunked": _chunked,
    "kv-concatenated": _concatenated,
    "kv-sparse": _sparse,
    "kv-sparse-quantized": _sparse_quantized,
    "kv-compressed": _compressed,
    "state": _state,
}

"""Layer records: what one layer of a cache is, of one of the kinds in ``kvstore.format.kinds``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.fields import Fields, expect_object
from kvstore.format.json import Json
from kvstore.format.kinds import (
    BIASED_MODES,
    KINDS,
    UNBIASED_MODES,
    Kind,
    SpanKind,
)
from kvstore.format.tensors import parse_dtype
from kvstore.limits import MAX_DIM, MAX_LAYERS, MAX_RANK, MAX_SLOTS, MAX_TOKENS

__all__ = ["LayerRecord", "Scalar", "Span", "TensorRecord", "leaves", "lowest_cut", "parse_layers"]

Scalar = int | str | tuple[int, ...] | None
Window = tuple[int, ...]
"""What bounds a layer's rows: (max size, keep) of a ring, (chunk size) of a chunk, () where nothing does."""


_INTEGERS: Final = frozenset({"U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})
_SLOT: Final = re.compile(r"slot\.(0|[1-9][0-9]{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a layer: dtype and full logical shape."""

    dtype: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class Span:
    """What a layer's rows cover: ``keep`` rows from position 0, then ``rows`` from ``start``."""

    kind: SpanKind
    start: int
    rows: int
    keep: int


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer of the cache: its kind, scalars, tensors by role, and for a list its children."""

    kind: str
    scalars: Mapping[str, Scalar]
    tensors: Mapping[str, TensorRecord]
    children: tuple[LayerRecord, ...] = ()

    @property
    def offset(self) -> int | None:
        """Logical token count, or None where the kind has none."""
        return self.integer("offset") if "offset" in self.scalars else None

    @property
    def never_written(self) -> bool:
        """Whether the layer has not seen any token: no tensors at all."""
        return self.kind != "list" and not self.tensors

    @property
    def rows(self) -> int:
        """Stored rows along the token axis; 0 for snapshots and for layers never written."""
        for role, record in self.tensors.items():
            axis = self.axis(role)
            # A shape too short for its axis has no rows; ``rules`` refuses its rank.
            if axis is not None and axis < len(record.shape):
                return record.shape[axis]
        return 0

    @property
    def span(self) -> Span | None:
        """The rows that payloads must hold for this layer, or None where there are none."""
        if KINDS[self.kind].span == "state":
            return Span("state", 0, 0, 0) if self.tensors else None
        rows = self.rows
        if rows == 0:
            return None
        if KINDS[self.kind].span == "rows":
            return Span("rows", 0, rows, 0)
        start, keep = self._running()
        return Span("tokens", start, rows - keep, keep)

    @property
    def window(self) -> Window:
        """The settings that move this layer's span apart from others': window and kept rows, or chunk."""
        return tuple(self.integer(name) for name in ("max_size", "keep", "chunk_size") if name in self.scalars)

    @property
    def lowest_cut(self) -> int:
        """The least token count that this layer can be cut back to; its offset where it cannot be cut.

        -1 where the kind has no offset: only the saved position itself.
        """
        offset = self.offset
        if offset is None:
            return -1
        if self.kind in ("kv", "kv-quantized"):
            return 0
        if self.kind == "kv-rotating":
            # A full ring has overwritten what an earlier position would read. One token
            # back, the only row that is missing is the one that the next update replaces.
            if offset == self.rows:
                return 0
            return offset if self.integer("keep") or self.rows != self.integer("max_size") else offset - 1
        if self.kind == "kv-chunked":
            start = self.integer("start")
            return min(offset, start + self.integer("chunk_size")) if start else 0
        return offset

    def axis(self, role: str) -> int | None:
        """The axis of ``role`` that runs over tokens, or None."""
        known = KINDS[self.kind].roles.get(role)
        return None if known is None else known.axis

    def open_shape(self, role: str) -> tuple[int | None, ...] | None:
        """The shape of ``role`` with None for every extent that follows from the position.

        None instead of a shape where it depends on the position whether the tensor is there at all. Integers in a
        slot are token ids that a model looks back at, fewer of them near the start.
        """
        record, rule = self.tensors[role], KINDS[self.kind].roles.get(role)
        if rule is None:
            held = 1 if record.dtype in _INTEGERS else len(record.shape)
            return tuple(extent if at < held else None for at, extent in enumerate(record.shape))
        if not rule.steady:
            return None
        return tuple(None if at in (rule.axis, rule.open) else extent for at, extent in enumerate(record.shape))

    def integer(self, name: str) -> int:
        """An integer scalar."""
        value = self.scalars[name]
        assert isinstance(value, int)  # noqa: S101 - parse_layers proved it
        return value

    def _running(self) -> tuple[int, int]:
        """First absolute position of the running rows, and the number of kept rows before them."""
        offset = self.offset or 0
        if self.kind == "kv-rotating" and offset > self.rows:
            keep = self.integer("keep")
            return offset - (self.rows - keep), keep
        if self.kind == "kv-chunked":
            return self.integer("start"), 0
        return 0, 0

    def with_rows(self, rows: int, **scalars: Scalar) -> LayerRecord:
        """The layer with so many rows in each tensor that runs over tokens, and with these scalars."""
        tensors = {}
        for role, record in self.tensors.items():
            shape = tuple(rows if at == self.axis(role) else extent for at, extent in enumerate(record.shape))
            tensors[role] = replace(record, shape=shape)
        return replace(self, scalars=MappingProxyType({**self.scalars, **scalars}), tensors=MappingProxyType(tensors))

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        if self.kind == "list":
            return {"children": [child.to_json() for child in self.children], "kind": self.kind}
        scalars: dict[str, Json] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.scalars.items()}
        return {**scalars, "kind": self.kind, "tensors": {r: t.to_json() for r, t in self.tensors.items()}}


def leaves(layers: tuple[LayerRecord, ...], prefix: str = "") -> Iterator[tuple[str, LayerRecord]]:
    """Every layer that holds tensors itself, depth first, with its path (``3``, ``3.0``)."""
    for index, layer in enumerate(layers):
        if layer.kind == "list":
            yield from leaves(layer.children, f"{prefix}{index}.")
        else:
            yield f"{prefix}{index}", layer


def lowest_cut(found: Iterable[LayerRecord], token_count: int) -> int:
    """The least token count that leaf layers of ``token_count`` tokens can all be cut back to; that count if none."""
    cuts = [token_count if leaf.lowest_cut < 0 else leaf.lowest_cut for leaf in found if not leaf.never_written]
    return max(cuts, default=token_count)


def parse_layers(fields: Fields, name: str) -> tuple[LayerRecord, ...]:
    """Parse the array of layer records; structure only, see ``rules`` for what must agree."""
    budget = [MAX_LAYERS]
    return tuple(_layer(item, where, budget) for item, where in fields.items(name, limit=MAX_LAYERS))


def _layer(value: Any, where: str, budget: list[int]) -> LayerRecord:
    budget[0] -= 1
    if budget[0] < 0:
        raise fail("LIMIT_EXCEEDED", where, expected=f"at most {MAX_LAYERS} layers", found="more")
    kind_name = Fields(value, where, None).text("kind", limit=None)
    kind = KINDS.get(kind_name)
    if kind is None:
        raise fail(
            "KIND_UNSUPPORTED", f"{where}.kind", expected="one of " + ", ".join(KINDS), found=kind_name,
            fix="Upgrade kvstore, or recompute the cache.",
        )  # fmt: skip
    if kind_name == "list":
        return _list(value, where, budget)
    fields = Fields(value, where, ("kind", "tensors", *kind.scalars))
    scalars = {name: _scalar(fields, name, kind.scalars[name]) for name in sorted(kind.scalars)}
    return LayerRecord(kind_name, MappingProxyType(scalars), _tensors(fields, kind))


def _list(value: Any, where: str, budget: list[int]) -> LayerRecord:
    fields = Fields(value, where, ("children", "kind"))
    children = tuple(_layer(item, path, budget) for item, path in fields.items("children", limit=MAX_LAYERS))
    if not children:
        # It would leave no trace in groups and signatures, so no rule could see it.
        raise fail("FIELD_RANGE", fields.path("children"), expected="at least one child", found="none")
    return LayerRecord("list", MappingProxyType({}), MappingProxyType({}), children)


def _scalar(fields: Fields, name: str, kind: str) -> Scalar:
    if kind == "int":
        return fields.integer(name, high=MAX_SLOTS if name == "slots" else MAX_TOKENS)
    if kind == "mode":
        return _mode(fields, name)
    return fields.nullable(name, lambda n: _one_integer(fields, n))


def _mode(fields: Fields, name: str) -> str:
    text = fields.text(name, limit=None)
    known = BIASED_MODES + UNBIASED_MODES
    if text not in known:
        raise fail(
            "QUANTIZATION_UNSUPPORTED", fields.path(name), expected="one of " + ", ".join(known), found=text,
            fix="Upgrade kvstore, or recompute the cache.",
        )  # fmt: skip
    return text


def _one_integer(fields: Fields, name: str) -> tuple[int, ...]:
    """An array with one integer: one for each sequence of the batch, which is one."""
    values = fields.integers(name, limit=1, low=-MAX_TOKENS, high=MAX_TOKENS)
    if not values:
        raise fail("FIELD_RANGE", fields.path(name), expected="one item", found="none")
    return values


def _tensors(fields: Fields, kind: Kind) -> Mapping[str, TensorRecord]:
    where = fields.path("tensors")
    value = expect_object(fields.get("tensors"), where)
    unknown = sorted(r for r in value if r not in kind.roles and not (kind.name == "state" and _SLOT.fullmatch(r)))
    if unknown:
        raise fail(
            "FIELD_UNKNOWN", f"{where}.{unknown[0]} is not a tensor of {kind.name}", field=unknown[0],
            fix="Upgrade kvstore, or ask the writer for format v1.",
        )  # fmt: skip
    order = sorted(value, key=lambda role: (len(role), role) if kind.name == "state" else (0, role))
    return MappingProxyType({role: _tensor(value[role], f"{where}.{role}") for role in order})


def _tensor(value: Any, where: str) -> TensorRecord:
    fields = Fields(value, where, ("dtype", "shape"))
    dtype = parse_dtype(fields.get("dtype"), fields.path("dtype"))
    return TensorRecord(dtype, fields.integers("shape", limit=MAX_RANK, high=MAX_DIM))

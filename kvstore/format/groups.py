"""Cache groups: which layers share rows, and how those rows are cut into segments.

Leaf layers with the same span and the same window form one group, in the order of their
first layer. The rows of a group are split at multiples of 256 *absolute* positions, so a
window that moved on shares its whole interior blocks with the one before. Kept rows
(attention sinks) are a segment of their own, before the others. State snapshots are one
payload. The split is a function of the layers alone: a writer has no choice, so equal
caches have equal payloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest
from kvstore.format.fields import Fields, expect_text
from kvstore.format.json import Json
from kvstore.format.kinds import SpanKind
from kvstore.format.layers import LayerRecord, Span, Window, leaves
from kvstore.format.tensors import TensorSpec, payload_size
from kvstore.limits import BLOCK_TOKENS, MAX_LAYERS, MAX_PAYLOAD_BYTES, MAX_TOKENS

__all__ = [
    "Group", "PayloadRef", "Segment", "parse_groups", "parse_payload_ref", "plan_groups", "segment_tensors", "segments",
]  # fmt: skip

_MAX_SEGMENTS: Final = MAX_TOKENS // BLOCK_TOKENS + 2


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """A payload by the digest and size in bytes of its canonical, uncompressed form."""

    digest: Digest
    size: int

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one group that lie in one payload.

    Attributes:
        start: Absolute position of the first row (stored row for sparse groups; 0 for kept rows and snapshots).
        rows: Number of rows; 0 for a snapshot.
        first: Index of the first row in the layer's stored rows, kept rows counted.
    """

    start: int
    rows: int
    first: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that hold the same span of rows, and the payloads that hold those rows.

    Attributes:
        span: The rows: see :class:`kvstore.format.layers.Span`.
        layers: Paths of the leaf layers (``3``, ``3.0``), in cache order.
        payloads: One for each of :func:`segments`.
    """

    span: Span
    layers: tuple[str, ...]
    payloads: tuple[PayloadRef, ...]

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "keep": self.span.keep,
            "layers": list(self.layers),
            "payloads": [p.to_json() for p in self.payloads],
            "rows": self.span.rows,
            "span": self.span.kind,
            "start": self.span.start,
        }


def segments(span: Span) -> tuple[Segment, ...]:
    """The segments of a span, kept rows first, then split at multiples of 256."""
    if span.kind == "state":
        return (Segment(0, 0, 0),)
    result = [Segment(0, span.keep, 0)] if span.keep else []
    position, end = span.start, span.start + span.rows
    while position < end:
        boundary = min(end, (position // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        result.append(Segment(position, boundary - position, span.keep + position - span.start))
        position = boundary
    return tuple(result)


def plan_groups(layers: tuple[LayerRecord, ...]) -> tuple[tuple[Span, tuple[str, ...]], ...]:
    """The groups that these layers must have: span and layer paths, in order.

    A window is a group of its own even while it still holds every token: when it moves on,
    the payloads of the layers beside it stay what they were.
    """
    found: dict[tuple[Span, Window], list[str]] = {}
    for path, layer in leaves(layers):
        span = layer.span
        if span is not None:
            found.setdefault((span, layer.window), []).append(path)
    return tuple((span, tuple(paths)) for (span, _), paths in found.items())


def segment_tensors(
    paths: Sequence[str], layers: Mapping[str, LayerRecord], segment: Segment
) -> tuple[TensorSpec, ...]:
    """The tensors of one payload, unsorted: ``<path>.<role>``, the token axis cut to the segment's rows."""
    specs = []
    for path in paths:
        layer = layers[path]
        for role, record in layer.tensors.items():
            axis = layer.axis(role)
            shape = record.shape
            if axis is not None:
                shape = (*shape[:axis], segment.rows, *shape[axis + 1 :])
            specs.append(TensorSpec(f"{path}.{role}", record.dtype, shape))
    return tuple(specs)


def parse_groups(fields: Fields, name: str) -> tuple[Group, ...]:
    """Parse the array of groups; structure only."""
    return tuple(_group(item, where) for item, where in fields.items(name, limit=MAX_LAYERS))


def parse_payload_ref(value: Any, where: str) -> PayloadRef:
    """Parse one payload reference."""
    fields = Fields(value, where, ("digest", "size"))
    return PayloadRef(fields.digest("digest"), fields.integer("size", low=8, high=MAX_PAYLOAD_BYTES))


def _group(value: Any, where: str) -> Group:
    fields = Fields(value, where, ("keep", "layers", "payloads", "rows", "span", "start"))
    bounds = {n: fields.integer(n, high=MAX_TOKENS) for n in ("keep", "rows", "start")}
    return Group(
        span=Span(_span_kind(fields), bounds["start"], bounds["rows"], bounds["keep"]),
        layers=tuple(expect_text(v, p, grammar=None, limit=64) for v, p in fields.items("layers", limit=MAX_LAYERS)),
        payloads=tuple(parse_payload_ref(v, p) for v, p in fields.items("payloads", limit=_MAX_SEGMENTS)),
    )


def _span_kind(fields: Fields) -> SpanKind:
    text = fields.text("span", limit=None)
    for kind in get_args(SpanKind):
        if text == kind:
            return cast("SpanKind", kind)
    raise fail("FIELD_FORMAT", fields.path("span"), expected="one of " + ", ".join(get_args(SpanKind)), found=text)


def check_groups(groups: tuple[Group, ...], layers: tuple[LayerRecord, ...]) -> None:
    """Prove that the groups are those that the layers require, and that every size is right.

    Raises:
        InvalidError: GROUP_INVALID, SEGMENTS_INVALID or PAYLOAD_SIZE_MISMATCH.
    """
    planned = plan_groups(layers)
    actual = tuple((g.span, g.layers) for g in groups)
    if planned != actual:
        raise fail(
            "GROUP_INVALID", "groups are not those of the layers", expected=[_show(*p) for p in planned],
            found=[_show(*a) for a in actual],
        )  # fmt: skip
    by_path = dict(leaves(layers))
    for index, group in enumerate(groups):
        _check_payloads(index, group, by_path)


def _check_payloads(index: int, group: Group, layers: Mapping[str, LayerRecord]) -> None:
    parts = segments(group.span)
    if len(parts) != len(group.payloads):
        raise fail(
            "SEGMENTS_INVALID", f"groups[{index}].payloads", expected=f"{len(parts)} segments",
            found=len(group.payloads),
        )  # fmt: skip
    sizes: dict[int, int] = {}
    for number, (part, ref) in enumerate(zip(parts, group.payloads, strict=True)):
        if part.rows not in sizes:
            sizes[part.rows] = _expected_size(f"groups[{index}].payloads[{number}]", group, layers, part)
        if ref.size != sizes[part.rows]:
            raise fail(
                "PAYLOAD_SIZE_MISMATCH", f"groups[{index}].payloads[{number}].size", expected=sizes[part.rows],
                found=ref.size,
            )  # fmt: skip


def _expected_size(where: str, group: Group, layers: Mapping[str, LayerRecord], part: Segment) -> int:
    """The size in canonical form. A payload above the format's limits has none that a reference could give."""
    try:
        return payload_size(segment_tensors(group.layers, layers, part))
    except KVStoreError as error:
        raise fail("PAYLOAD_SIZE_MISMATCH", f"{where} can hold no such tensors: {error.message}") from None


def _show(span: Span, paths: tuple[str, ...]) -> str:
    kept = f"{span.keep} kept + " if span.keep else ""
    return f"{span.kind} {kept}{span.rows} from {span.start}: layers {','.join(paths)}"

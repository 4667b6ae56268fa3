"""What is left of a layer when an entry is restored at an earlier position.

Whether a cut is possible is the format's rule (``LayerRecord.lowest_cut``); what the
record then says, and which stored rows are still needed, is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.errors import fail
from kvstore.format.groups import PayloadRef, segments
from kvstore.format.layers import LayerRecord
from kvstore.format.manifest import Manifest
from kvstore.format.prefix import before_media

__all__ = ["Cut", "cut_layer", "cut_layers", "needed_payloads", "require_cut"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A leaf layer at the position to restore.

    Attributes:
        record: The layer as it shall be restored.
        placed: The record by which rows find their places: the stored one for a ring, whose rows stay where they were.
        rows: Stored rows that are needed, from the first.
    """

    record: LayerRecord
    placed: LayerRecord
    rows: int

    @property
    def hole(self) -> bool:
        """Whether one row of a ring is missing: the one that the next token overwrites."""
        return self.record.rows > self.rows


def require_cut(manifest: Manifest, tokens: int) -> None:
    """Prove that the entry can be restored at ``tokens``.

    Raises:
        IncompatibleError: CUT_NOT_POSSIBLE.
    """
    low, high = manifest.lowest_cut, manifest.token_count
    whole = before_media(tokens, manifest.prefix.media)
    if whole != tokens:
        raise fail(
            "CUT_NOT_POSSIBLE", "that token lies within a media item", expected=f"{whole}, where the item begins",
            found=tokens, fix="Restore it before or after the item.",
        )  # fmt: skip
    if not manifest.can_cut(tokens):
        raise fail(
            "CUT_NOT_POSSIBLE", "the entry cannot be restored at that token",
            expected=str(high) if low >= high else f"{max(low, 1)} to {high}", found=tokens,
            fix="Restore it where it can be cut, or compute the cache from the start.",
        )  # fmt: skip


def cut_layer(layer: LayerRecord, tokens: int) -> Cut:
    """The leaf layer at ``tokens``, which :func:`require_cut` has allowed."""
    if layer.never_written or layer.offset is None or layer.offset == tokens:
        return Cut(layer, layer, layer.rows)
    if layer.kind == "kv-rotating" and layer.offset > layer.rows:
        # One token back in a full ring with nothing pinned. The newest row goes; the place
        # that it had is the next to be written, so the row that it displaced is never missed.
        ring = (layer.integer("ring_index") - 1) % layer.rows
        record = layer.with_rows(layer.rows, offset=tokens, ring_index=ring)
        return Cut(record, layer, layer.rows - 1)
    rows = tokens - (layer.integer("start") if layer.kind == "kv-chunked" else 0)
    ring_index = {"ring_index": rows} if layer.kind == "kv-rotating" else {}
    record = layer.with_rows(rows, offset=tokens, **ring_index)
    return Cut(record, record, rows)


def needed_payloads(manifest: Manifest, tokens: int) -> tuple[PayloadRef, ...]:
    """The payloads that must be read to restore the entry at ``tokens``, each once, in group order."""
    rows = {path: cut_layer(layer, tokens).rows for path, layer in manifest.leaves.items()}
    return tuple(dict.fromkeys(
        ref
        for group in manifest.groups
        for segment, ref in zip(segments(group.span), group.payloads, strict=True)
        if segment.rows == 0 or any(segment.first < rows[path] for path in group.layers)
    ))  # fmt: skip


def cut_layers(layers: Sequence[LayerRecord], tokens: int) -> tuple[LayerRecord, ...]:
    """All layers at ``tokens``, lists included."""
    return tuple(
        replace(layer, children=cut_layers(layer.children, tokens))
        if layer.kind == "list"
        else cut_layer(layer, tokens).record
        for layer in layers
    )

"""The layout: the ordered buffers that a materialized entry needs, and their digest.

A layout answers "what will be allocated" before anything is. It is derived from a
manifest's layers, or from a model without weights, by the same function; a load
receipt carries the digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.digest import Digest, Readable, tagged_digest
from kvstore.format.fields import Fields
from kvstore.format.json import Json, canonical_bytes, parse_canonical
from kvstore.format.layers import LayerRecord, leaves
from kvstore.format.tensors import TensorSpec, parse_dtype
from kvstore.limits import MAX_DIM, MAX_LAYERS, MAX_LAYOUT_BYTES, MAX_PAYLOAD_BYTES, MAX_RANK, MAX_SLOTS, MAX_TOKENS

__all__ = ["LAYOUT_MEDIA_TYPE", "Buffer", "Layout", "layout_of", "parse_layout"]

LAYOUT_MEDIA_TYPE: Final = "application/vnd.kvstore.layout.v1+json"
_LAYOUT_TAG: Final = "kvstore layout v1"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer: role ``<path>.<tensor role>``, shape, dtype; size in bytes follows."""

    role: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def byte_len(self) -> int:
        """Bytes of the buffer."""
        return TensorSpec(self.role, self.dtype, self.shape).nbytes

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"byte_len": self.byte_len, "dtype": self.dtype, "role": self.role, "shape": list(self.shape)}


@dataclass(frozen=True)
class Layout:
    """Buffers in cache order, for ``token_count`` tokens."""

    token_count: int
    buffers: tuple[Buffer, ...]

    @property
    def total_bytes(self) -> int:
        """Sum over all buffers."""
        return sum(buffer.byte_len for buffer in self.buffers)

    @cached_property
    def digest(self) -> Digest:
        """Tagged digest of the canonical list of buffers."""
        return tagged_digest(_LAYOUT_TAG, canonical_bytes([b.to_json() for b in self.buffers]))

    def to_json(self) -> dict[str, Json]:
        """The layout document."""
        return {
            "buffers": [buffer.to_json() for buffer in self.buffers],
            "layout_digest": self.digest,
            "media_type": LAYOUT_MEDIA_TYPE,
            "token_count": self.token_count,
            "total_bytes": self.total_bytes,
        }


def layout_of(layers: Iterable[LayerRecord], token_count: int) -> Layout:
    """The layout of an entry's layers."""
    return Layout(
        token_count,
        tuple(
            Buffer(f"{path}.{role}", record.shape, record.dtype)
            for path, layer in leaves(tuple(layers))
            for role, record in layer.tensors.items()
        ),
    )


def parse_layout(data: Readable) -> Layout:
    """Parse a layout document and prove that its sizes and its digest are those of its buffers.

    Raises:
        InvalidError: json and schema codes, SHAPE_INCONSISTENT, LAYOUT_DIGEST_MISMATCH.
        UnsupportedError: MEDIA_TYPE_UNKNOWN, DTYPE_UNSUPPORTED.
    """
    value = parse_canonical(data, MAX_LAYOUT_BYTES, "layout")
    Fields(value, "", None).require_media_type(LAYOUT_MEDIA_TYPE)
    fields = Fields(value, "", ("buffers", "layout_digest", "media_type", "token_count", "total_bytes"))
    total, digest = fields.integer("total_bytes"), fields.digest("layout_digest")
    layout = Layout(
        fields.integer("token_count", high=MAX_TOKENS),
        tuple(_buffer(item, where) for item, where in fields.items("buffers", limit=MAX_LAYERS * MAX_SLOTS)),
    )
    if total != layout.total_bytes:
        raise fail("SHAPE_INCONSISTENT", "total_bytes", expected=layout.total_bytes, found=total)
    if digest != layout.digest:
        raise fail("LAYOUT_DIGEST_MISMATCH", "layout_digest", expected=layout.digest, found=digest)
    return layout


def _buffer(value: Any, where: str) -> Buffer:
    fields = Fields(value, where, ("byte_len", "dtype", "role", "shape"))
    dtype = parse_dtype(fields.get("dtype"), fields.path("dtype"))
    size = fields.integer("byte_len", high=MAX_PAYLOAD_BYTES)
    buffer = Buffer(fields.text("role"), fields.integers("shape", limit=MAX_RANK, high=MAX_DIM), dtype)
    if size != buffer.byte_len:
        raise fail("SHAPE_INCONSISTENT", fields.path("byte_len"), expected=buffer.byte_len, found=size)
    return buffer

"""The normative limits of format v1; SPEC.md's limits table is held equal by a test."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BLOCK_TOKENS", "MAX_BUNDLE_LAYOUT_BYTES", "MAX_CHUNK_BYTES", "MAX_DIM", "MAX_EXACT_INT", "MAX_JSON_DEPTH",
    "MAX_LAYERS", "MAX_LAYOUT_BYTES", "MAX_MANIFEST_BYTES", "MAX_MEDIA_ITEMS", "MAX_NAME_CHARS",
    "MAX_OBJECT_HEADER_BYTES", "MAX_PATH_CHARS", "MAX_PAYLOAD_BYTES", "MAX_RANK", "MAX_RECEIPT_BYTES",
    "MAX_SLOTS", "MAX_TENSORS_PER_PAYLOAD", "MAX_TENSOR_HEADER_BYTES", "MAX_TOKEN_ID", "MAX_TOKENS",
    "MAX_ZSTD_WINDOW",
]  # fmt: skip

BLOCK_TOKENS: Final = 256
"""Tokens of a full prefix block and rows of a full segment. Part of v1, never a setting."""
MAX_TOKEN_ID: Final = 2**32 - 1
MAX_TOKENS: Final = 2**26
MAX_EXACT_INT: Final = 2**53 - 1
MAX_JSON_DEPTH: Final = 16
MAX_MANIFEST_BYTES: Final = 16 * 2**20
MAX_RECEIPT_BYTES: Final = 16 * 2**20
MAX_LAYOUT_BYTES: Final = 16 * 2**20
MAX_BUNDLE_LAYOUT_BYTES: Final = 65536
"""Bytes of a bundle's layout.json."""
MAX_PATH_CHARS: Final = 255
"""Characters of a path in a bundle."""
MAX_LAYERS: Final = 4096
"""Layer records of one entry, children of lists included."""
MAX_SLOTS: Final = 4096
"""Slots of one state layer, absent ones included."""
MAX_MEDIA_ITEMS: Final = 4096
MAX_NAME_CHARS: Final = 255
MAX_RANK: Final = 8
MAX_DIM: Final = 2**31 - 1
"""Largest extent of one axis: MLX shapes are signed 32-bit."""
MAX_PAYLOAD_BYTES: Final = 2**40
MAX_TENSORS_PER_PAYLOAD: Final = 65536
MAX_TENSOR_HEADER_BYTES: Final = 16 * 2**20
MAX_OBJECT_HEADER_BYTES: Final = 16 * 2**20
"""Limit of the header frame and, separately, of the frame table."""
MAX_CHUNK_BYTES: Final = 2**20
"""Unfiltered bytes of one chunk: what a decoder needs as scratch."""
MAX_ZSTD_WINDOW: Final = 8 * 2**20

"""The kinds of cache that the format knows, as rows of a table.

Kinds are named by what they are, never after a library's classes. A kind is a row of
:data:`KINDS`: its scalars, the tensors it holds and which of their axes runs over
tokens. Adding a kind is adding a row here, its rule in ``kvstore.format.rules``, a
handler in ``kvstore.runtime.kinds_*``, and a section of SPEC.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

__all__ = [
    "BIASED_MODES", "KINDS", "LOSSY_KINDS", "QUANTIZATION_BITS", "QUANTIZATION_GROUPS", "UNBIASED_MODES", "Kind",
    "Role", "SpanKind",
]  # fmt: skip

SpanKind = Literal["tokens", "rows", "state"]


@dataclass(frozen=True, slots=True)
class Role:
    """One tensor of a kind.

    Attributes:
        axis: The axis that runs over tokens; None for a snapshot.
        required: Whether a written layer must have it.
        open: An axis of a snapshot whose extent follows from the position.
        steady: Whether it is there at every position or at none, so that signatures can name it.
    """

    axis: int | None
    rank: int | None = None
    required: bool = True
    open: int | None = None
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the registry of kinds.

    Attributes:
        scalars: Field name to its type: ``int``, ``mode`` (of quantization), ``ints?`` (array or null).
        roles: Tensor role to :class:`Role`; empty for ``list``.
        span: How token rows are grouped: by absolute position, by stored row, or as one snapshot.
    """

    name: str
    scalars: Mapping[str, str]
    roles: Mapping[str, Role]
    span: SpanKind


_KV: Final = {"k": Role(2, 4), "v": Role(2, 4)}
_QUANTIZED: Final = {
    f"{side}.{part}": Role(2, 4, part != "biases") for side in "kv" for part in ("words", "scales", "biases")
}
_SPARSE: Final = {"positions": Role(1, 2, required=False)}
_AT_TIMES: Final = Role(None, 3, required=False, steady=False)
_COMPRESSED: Final = {
    "window": Role(None, 3, open=1), "compressed": _AT_TIMES, "index": _AT_TIMES, "pending.kv": _AT_TIMES,
    "pending.gate": _AT_TIMES,
}  # fmt: skip
_QUANTIZATION: Final = {"bits": "int", "group_size": "int", "mode": "mode"}

KINDS: Final[Mapping[str, Kind]] = MappingProxyType({
    kind.name: kind
    for kind in (
        Kind("kv", {"offset": "int"}, _KV, "tokens"),
        Kind("kv-quantized", {"offset": "int", **_QUANTIZATION}, _QUANTIZED, "tokens"),
        Kind("kv-rotating", {"offset": "int", "max_size": "int", "keep": "int", "ring_index": "int"}, _KV, "tokens"),
        Kind("kv-chunked", {"offset": "int", "chunk_size": "int", "start": "int"}, _KV, "tokens"),
        Kind("kv-concatenated", {"offset": "int"}, _KV, "tokens"),
        Kind("kv-sparse", {"offset": "int"}, {**_KV, **_SPARSE}, "rows"),
        Kind("kv-sparse-quantized", {"offset": "int", **_QUANTIZATION}, {**_QUANTIZED, **_SPARSE}, "rows"),
        Kind("kv-compressed", {"offset": "int", "max_size": "int"}, _COMPRESSED, "state"),
        Kind("state", {"slots": "int", "left_padding": "ints?", "lengths": "ints?"}, {}, "state"),
        Kind("list", {}, {}, "state"),
    )
})  # fmt: skip

QUANTIZATION_BITS: Final = (2, 3, 4, 5, 6, 8)
QUANTIZATION_GROUPS: Final = (16, 32, 64, 128)
LOSSY_KINDS: Final = frozenset({"kv-sparse", "kv-sparse-quantized"})
"""Kinds of layers that a lossy method has dropped rows from."""
BIASED_MODES: Final = ("affine",)
UNBIASED_MODES: Final = ("mxfp4", "mxfp8", "nvfp4")

"""What reading a bundle or a document ends with, in the form that all implementations report it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstore.errors import KVStoreError
from kvstore.format.digest import Digest

__all__ = ["Result", "TensorResult", "rejected"]


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One restored tensor: dtype, shape, and the SHA-256 of its elements in C order, each little-endian."""

    dtype: str
    shape: tuple[int, ...]
    digest: Digest

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return {"digest": self.digest, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class Result:
    """The result object of the plug-in contract.

    Attributes:
        phase, code, detail: Of a refusal: step, error code, and a text for people.
        entry: Entry id, where it was accepted.
        token_count: Tokens restored.
        tensors: What was given out, by ``<path>.<role>``; empty on a refusal.
    """

    verdict: Literal["accept", "reject"]
    phase: str | None = None
    code: str | None = None
    detail: str | None = None
    entry: Digest | None = None
    token_count: int | None = None
    tensors: Mapping[str, TensorResult] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        tensors = {name: tensor.to_json() for name, tensor in self.tensors.items()}
        if self.verdict == "reject":
            return {
                "code": self.code, "detail": self.detail, "phase": self.phase, "released": len(tensors),
                "tensors": tensors, "verdict": "reject",
            }  # fmt: skip
        return {
            "entry": self.entry, "released": len(tensors), "tensors": tensors, "token_count": self.token_count,
            "verdict": "accept",
        }  # fmt: skip


def rejected(error: KVStoreError) -> Result:
    """The result of a refusal. Nothing has been given out."""
    return Result("reject", error.phase, error.code, error.message)

"""An entry's tensors put together from its payloads, whole or cut back to fewer tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.conformance.result import TensorResult
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.layers import LayerRecord
from kvstore.format.manifest import Manifest
from kvstore.format.tensors import Payload

__all__ = ["entry_tensors"]

Array = np.ndarray[Any, Any]


def entry_tensors(manifest: Manifest, payloads: Mapping[Digest, Payload], tokens: int) -> dict[str, TensorResult]:
    """Every tensor of the entry as it is at ``tokens``, in cache order, by ``<path>.<role>``.

    Rows are in the order in which they are stored: temporal, kept rows first.
    """
    parts: dict[str, list[Array]] = {}
    for group in manifest.groups:
        for ref in group.payloads:
            payload = payloads[ref.digest]
            for spec, array in zip(payload.specs, payload.arrays, strict=True):
                parts.setdefault(spec.name, []).append(array)
    return {
        f"{path}.{role}": _tensor(leaf, role, parts.get(f"{path}.{role}", []), manifest.token_count - tokens)
        for path, leaf in manifest.leaves.items()
        for role in leaf.tensors
    }


def _tensor(leaf: LayerRecord, role: str, parts: list[Array], dropped: int) -> TensorResult:
    """One tensor from its segments, without the rows of the last ``dropped`` tokens; none where it has no rows."""
    record, axis = leaf.tensors[role], leaf.axis(role)
    if not parts:
        return TensorResult(record.dtype, record.shape, sha256_digest(b""))
    if axis is None:
        whole = parts[0]
    else:
        whole = np.concatenate(parts, axis=axis)
        whole = whole.take(np.arange(whole.shape[axis] - dropped), axis=axis)
    return TensorResult(record.dtype, whole.shape, sha256_digest(np.ascontiguousarray(whole).tobytes()))

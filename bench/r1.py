"""The pipeline to beat, made again from its description: a temporary file, then one codec over all of its bytes.

Save: the arrays as one safetensors file in a temporary place, read back whole, compressed whole
(zstd at level 3, one thread), written. Load: read whole, decompressed whole, written to a temporary
file, ``mx.load``, evaluated. No digest is made or checked, and nothing is flushed to the device.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import zstandard

__all__ = ["load", "save"]

LEVEL: Final = 3


def save(path: Path, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
    """Write the arrays of a cache; returns bytes written."""
    import mlx.core as mx

    handle, name = tempfile.mkstemp(suffix=".safetensors", dir=path.parent)
    os.close(handle)
    try:
        mx.save_safetensors(name, dict(arrays), metadata={"wp30_manifest": json.dumps(facts)})
        data = Path(name).read_bytes()
    finally:
        Path(name).unlink()
    return path.write_bytes(zstandard.ZstdCompressor(level=LEVEL).compress(data))


def load(path: Path) -> dict[str, Any]:
    """The arrays, evaluated."""
    import mlx.core as mx

    data = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    handle, name = tempfile.mkstemp(suffix=".safetensors", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        loaded: Any = mx.load(name)
        arrays = dict(loaded)
        mx.eval(list(arrays.values()))
    finally:
        Path(name).unlink()
    return arrays

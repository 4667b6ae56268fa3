"""Half of the exchange between releases: writes a store with one release, or reads what another one wrote.

::

    python -m tests.older_mlx_lm.exchange write|read FOLDER STORE
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm import utils

import kvstore
from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.json import canonical_bytes
from kvstore.format.manifest import Manifest
from kvstore.runtime.capture import capture
from kvstore.runtime.kinds import describe
from kvstore.runtime.probe import make_cache
from tests.families.base import Family
from tests.families.folders import family_folder
from tests.families.tables import FAMILIES

__all__ = ["CASES", "read", "write"]

CHUNK: Final = 256
FOLLOWING: Final = [n * 7 % 90 for n in range(16)]
CASES: Final[dict[str, tuple[str, list[int]]]] = {
    "plain": ("llama", [40, 20]),
    "windows": ("gemma3_text", [60, 1, 1, 5]),
    "quantized": ("qwen3, 4 bits", [60, 1]),
    "concatenated": ("qwen3, concatenated", [9, 4]),
    "pinned window": ("qwen3, window", [50, *[1] * 9]),
    "states": ("mamba2", [30, 7]),
    "states and tokens": ("qwen3_next", [30, 7]),
    "lists of states": ("baichuan_m1", [40, 1, 1]),
    "lists of tokens": ("longcat_flash", [30, 7]),
    "another layout": ("deepseek_v32", [30, 7]),
    "several states": ("longcat_flash_ngram", [30, 7]),
    "more caches than layers": ("nemotron-nas", [30]),
    "a chunk": ("llama4", [100, 20]),
    "chunks in whole steps": ("llama4", [256, 256, 3]),
    "chunks in turns": ("llama4", [60, 190, 20]),
    "chunks token by token": ("llama4", [250, *[1] * 20]),
}
"""Family, and how many tokens are read at a time."""


def model_of(folder: Path, case: str) -> tuple[kvstore.BoundModel, Family]:
    family = FAMILIES[CASES[case][0]]
    text = family.changes.get("text_config", {})
    if "attention_chunk_size" in text:
        changed = {**family.changes, "text_config": {**text, "attention_chunk_size": CHUNK}}
        family = replace(family, changes=changed, label=f"{family.name}, chunks of {CHUNK}")
    path = family_folder(folder, family)
    return kvstore.bind(utils.load_model(path)[0], kvstore.ModelIdentity.from_path(path)), family


def run(model: Any, family: Family, case: str) -> tuple[list[Any], list[int]]:
    """Caches that were never saved, and what they read."""
    caches: list[Any] = make_cache(model.model, family.options)
    ids: list[int] = []
    for count in CASES[case][1]:
        piece = [(n * 37 + n * n * 11 + 5) % 90 for n in range(len(ids), len(ids) + count)]
        mx.eval(model.model(mx.array([piece]), cache=caches))
        ids += piece
    return caches, ids


def go_on(model: Any, caches: list[Any]) -> np.ndarray[Any, Any]:
    """Logits of what follows, token by token."""
    found = [model.model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32) for token in FOLLOWING]
    mx.eval(found)
    return np.array(mx.stack(found))


def state(manifest: Manifest) -> str:
    """One digest for all records and for the bits of all arrays."""
    document = manifest.to_json()
    return sha256_digest(canonical_bytes({name: document[name] for name in ("layers", "groups")}))


def write(folder: Path, path: Path) -> dict[str, dict[str, Any]]:
    """Put every case, by its name; says what was put."""
    said = {}
    with kvstore.Store.open(path) as store:
        for case in CASES:
            model, family = model_of(folder, case)
            caches, ids = run(model, family, case)
            entry = store.put(caches, token_ids=ids, model=model, label=case.replace(" ", "-"), codec="fast").subject
            said[case] = {"entry": entry, "state": state(store.show(entry).manifest)}
    return said


def read(folder: Path, path: Path) -> dict[str, dict[str, Any]]:
    """Load every case into this release's own model and go on, beside a run that was never saved."""
    return {case: _read(folder, path, case) for case in CASES}


def _read(folder: Path, path: Path, case: str) -> dict[str, Any]:
    model, family = model_of(folder, case)
    caches, ids = run(model, family, case)
    own = capture(caches, ids, model.identity).manifest
    said: dict[str, Any] = {"own state": state(own), "own entry": own.entry_id}
    with kvstore.Store.open(path, read_only=True) as store:
        try:
            loaded = store.load(case.replace(" ", "-"), into=model, options=family.options).cache
        except KVStoreError as refused:
            return {**said, "refused": refused.code, "why": str(refused)}
    said["state"] = state(capture(loaded, ids, model.identity).manifest)
    said["offsets"] = [layer.offset for layer in describe(loaded)]
    ours, theirs = go_on(model, caches), go_on(model, loaded)
    said["same logits"] = ours.tobytes() == theirs.tobytes()
    said["apart"] = float(np.abs(ours - theirs).max() / np.abs(ours).max())
    return said


if __name__ == "__main__":
    mx.disable_compile()  # fused kernels are built by a compiler on a CPU, seconds for each
    done = {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps(done))

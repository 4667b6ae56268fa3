"""Giving a cache of the real Gemma back, against the prefill that made it, at several lengths.

The prefill was timed once, when the caches were made, on the stock CPU wheel; its seconds lie with them. Restoring is
a load of stored objects through the whole store, in fresh processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench import gemma
from bench.bench_speed import medians
from bench.cases import CASES
from bench.child import run_task

__all__ = ["codecs", "restore"]


def restore(*, rounds: int) -> dict[str, Any]:
    """Seconds to prefill and, as medians, to restore."""
    gemma.prepare()
    names = [f"gemma-{tokens}" for tokens in gemma.LENGTHS]
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        for name in names:
            run_task("put", case=name, store=str(Path(folder, name)), codec="small")
        found = [[run_task("load", case=name, store=str(Path(folder, name))) for name in names] for _ in range(rounds)]
    return {
        "rounds": rounds,
        "lengths": [
            {"tokens": CASES[name].tokens, "prefill_seconds": gemma.prefill_seconds(CASES[name].tokens),
             **medians(runs)}
            for name, runs in zip(names, zip(*found, strict=True), strict=True)
        ],
    }  # fmt: skip


def codecs(*, name: str, rounds: int) -> dict[str, Any]:
    """Ratio and speed of codecs on one cache, in one fresh process."""
    CASES[name].prepare()
    return {"case": name, **run_task("codecs", case=name, rounds=rounds)}

"""Put and load through the whole store against R1's pipeline and a plain safetensors file, in one interleaved run.

Every piece of work runs in a fresh process; one round runs each side once, so that drift of the machine meets all.
R1 keeps no digest and flushes nothing; put does both. ``first`` is the first read of a store, in which each object's
digest is checked; ``later`` are the reads after it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from bench.child import run_task

__all__ = ["AGAINST_R1", "medians", "run"]

AGAINST_R1: Final = ("r1 save", "put small", "r1 load", "load small, first", "load small, later")
"""The tasks that tell size and speed of one codec; without a first read there is no later one."""
_CODECS: Final = ("small", "fast")


def run(*, name: str, rounds: int, tasks: Collection[str] | None = None) -> dict[str, Any]:
    """Medians of seconds and peak bytes for each task on one case, or for these tasks alone; and the sizes."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
            _round(Path(folder), name, tasks, found)
    return {"case": name, "rounds": rounds, "tasks": {task: medians(runs) for task, runs in found.items()}}


def medians(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each fact; and the cores that others took while the work was measured, over all runs together.

    Together, because a single run is too short for the system's count of processor time.
    """
    names = results[0].keys() - {"watched_seconds", "other_seconds"}
    facts: dict[str, Any] = {name: statistics.median(one[name] for one in results) for name in sorted(names)}
    counted = all(one["other_seconds"] is not None for one in results)
    watched = sum(one["watched_seconds"] for one in results)
    facts["other_cores"] = max(0.0, sum(one["other_seconds"] for one in results) / watched) if counted else None
    return facts


def _round(
    folder: Path, name: str, tasks: Collection[str] | None, found: dict[str, list[dict[str, Any]]]
) -> None:  # fmt: skip
    def take(label: str, task: str, **arguments: str) -> None:
        if tasks is None or label in tasks:
            found[label].append(run_task(task, case=name, **arguments))

    r1, raw = str(folder / "r1"), str(folder / "raw.safetensors")
    take("r1 save", "r1_save", path=r1)
    take("raw save", "raw_save", path=raw)
    for codec in _CODECS:
        take(f"put {codec}", "put", store=str(folder / codec), codec=codec)
    take("r1 load", "r1_load", path=r1)
    take("raw load", "raw_load", path=raw)
    for codec in _CODECS:
        for read in ("first", "later"):
            take(f"load {codec}, {read}", "load", store=str(folder / codec))

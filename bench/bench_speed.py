"""Put and load through the whole store against R1's pipeline and a plain safetensors file, in one interleaved run.

Every piece of work runs in a fresh process; one round runs each side once, so that drift of the machine meets all.
R1 keeps no digest and flushes nothing; put does both. ``first`` is the first read of a store, in which each object's
digest is checked; ``later`` are the reads after it.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from bench.child import run_task
from bench.machine import Others

__all__ = ["print_table", "run"]

CODECS: Final = ("small", "fast")


def run(*, name: str, rounds: int) -> dict[str, Any]:
    """Medians of seconds and peak bytes for each task on one case, and the sizes."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with Others() as others:
        for _ in range(rounds):
            folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-"))
            try:
                _round(folder, name, found)
            finally:
                shutil.rmtree(folder)
    medians = {
        task: {key: statistics.median(one[key] for one in results) for key in results[0]}
        for task, results in found.items()
    }
    return {"case": name, "rounds": rounds, "other_cores": others.cores, "tasks": medians}


def _round(folder: Path, name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    found["r1 save"].append(run_task("r1_save", case=name, path=str(folder / "r1")))
    found["raw save"].append(run_task("raw_save", case=name, path=str(folder / "raw.safetensors")))
    for codec in CODECS:
        found[f"put {codec}"].append(run_task("put", case=name, store=str(folder / codec), codec=codec))
    found["r1 load"].append(run_task("r1_load", case=name, path=str(folder / "r1")))
    found["raw load"].append(run_task("raw_load", case=name, path=str(folder / "raw.safetensors")))
    for codec in CODECS:
        for read in ("first", "later"):
            found[f"load {codec}, {read}"].append(run_task("load", case=name, store=str(folder / codec)))


def print_table(result: dict[str, Any]) -> None:
    """Each task against R1's side of the same work."""
    tasks = result["tasks"]
    others = result["other_cores"]
    noise = "unknown" if others is None else f"{others:.2f} cores"
    print(f"\n{result['case']}: medians of {result['rounds']} rounds; others took {noise}")
    print(f"{'task':22}{'ms':>9}{'R1 / this':>11}{'peak MB':>9}{'ratio':>8}{'size / R1':>11}")
    for task, facts in tasks.items():
        side = "r1 save" if "save" in task or "put" in task else "r1 load"
        size = ""
        if "stored_bytes" in facts:
            ratio = facts["raw_bytes"] / facts["stored_bytes"]
            size = f"{ratio:>8.3f}{facts['stored_bytes'] / tasks['r1 save']['stored_bytes']:>11.3f}"
        speed = tasks[side]["seconds"] / facts["seconds"]
        print(f"{task:22}{facts['seconds'] * 1e3:>9.1f}{speed:>11.2f}{facts['peak_bytes'] / 1e6:>9.1f}{size}")

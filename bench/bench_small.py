"""Two more questions, in fresh processes: entries of one block each, and what a load takes beyond the codec."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from bench.bench_speed import medians
from bench.cases import CASES
from bench.child import run_task

__all__ = ["overhead", "small"]

_SMALL: Final = "small-256"


def small(*, processes: int, entries: int) -> dict[str, Any]:
    """Medians over processes of the medians over single calls; each process fills a store of its own."""
    CASES[_SMALL].prepare()
    found = []
    for _ in range(processes):
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
            found.append(run_task("small", case=_SMALL, store=str(Path(folder) / "store"), count=entries))
    return {"case": _SMALL, "processes": processes, **medians(found)}


def overhead(*, name: str, processes: int) -> dict[str, Any]:
    """Match and load against the codec alone, on the same store."""
    CASES[name].prepare()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        store = str(Path(folder) / "store")
        run_task("put", case=name, store=store, codec="small")
        found = [run_task("overhead", case=name, store=store) for _ in range(processes)]
    return {"case": name, "processes": processes, **medians(found)}

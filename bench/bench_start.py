"""How long the command line takes to start, against an interpreter that does nothing; and what it imports for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from bench.bench_speed import medians
from bench.cases import CASES
from bench.child import run_task
from bench.machine import Others, wait_until_quiet

__all__ = ["COMMANDS", "HEAVY", "run"]

ROOT: Final = Path(__file__).resolve().parents[1]
HEAVY: Final = ("mlx", "mlx_lm", "transformers", "sqlalchemy")
COMMANDS: Final = ("kvstore --help", "kvstore ls", "kvstore match --tokens", "kvstore match --tokens --any-shape")
"""In a store that holds an entry, so that there is something to list and to find."""
_CASE: Final = CASES["small-256"]
_IMPORTED: Final = re.compile(r"^import time:.*\| +(\S+)$", re.MULTILINE)


def run(*, rounds: int) -> dict[str, Any]:
    """Medians of seconds in turns, and the heavy modules that each command imports."""
    _CASE.prepare()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        store, ids = Path(folder) / "store", Path(folder) / "ids.json"
        run_task("put", case=_CASE.name, store=str(store), codec="small")
        ids.write_text(str([*_CASE.ids(), 0]))
        match = ["match", "--store", str(store), "--model", str(_CASE.model), "--tokens", str(ids)]
        arguments = (["--help"], ["ls", "--store", str(store)], match, [*match, "--any-shape"])
        calls = {"python -c pass": ["-c", "pass"]} | {
            name: ["-m", "kvstore.cli", *given] for name, given in zip(COMMANDS, arguments, strict=True)
        }
        imports = {name: _imports(call) for name, call in calls.items()}
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(rounds):
            for name, call in calls.items():
                found[name].append(_timed(call))
    return {
        "rounds": rounds,
        "commands": {name: {**medians(times), "imports": imports[name]} for name, times in found.items()},
    }


def _timed(call: list[str]) -> dict[str, Any]:
    wait_until_quiet()
    with Others() as others:
        _start(call, stderr=subprocess.DEVNULL)
    return {"seconds": others.wall, "watched_seconds": others.wall, "other_seconds": others.seconds}


def _imports(call: list[str]) -> list[str]:
    """Which of the heavy modules the command imports; this also warms what it reads."""
    text = _start(["-X", "importtime", *call], stderr=subprocess.PIPE)
    return [name for name in HEAVY if name in _IMPORTED.findall(text)]


def _start(call: list[str], *, stderr: int) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *call], stdout=subprocess.DEVNULL, stderr=stderr, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(call)} ended with {done.returncode}: {done.stderr}")
    return done.stderr or ""


def main() -> None:
    """Print what was measured."""
    began = time.perf_counter()
    for name, facts in run(rounds=7)["commands"].items():
        print(f"{name:24}{facts['seconds'] * 1e3:8.1f} ms  imports {', '.join(facts['imports']) or 'nothing heavy'}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

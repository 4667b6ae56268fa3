"""Every figure, each against its baseline in one run: ``make bench``, or ``python -m bench --quick``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any, Final

from bench import bench_speed
from bench.cases import CASES

_OTHERS: Final = ("bench.bench_match", "bench.bench_conversation")
_DEFAULT: Final = ("gemma-2000", "qwen-8000")


def main() -> int:
    """Run what is asked for; print tables, or one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="caches to measure; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--quick", action="store_true", help="one small cache, three rounds, nothing else")
    parser.add_argument("--json", action="store_true", help="print one JSON document for each cache")
    given = parser.parse_args()
    names, rounds = given.case or list(_DEFAULT), given.rounds
    if given.quick:
        names, rounds = given.case or ["gemma-500"], 3
    for name in names:
        CASES[name].prepare()
        _show(bench_speed.run(name=name, rounds=rounds), as_json=given.json)
    if given.quick or given.case:
        return 0
    return max(_run(module, as_json=given.json) for module in _OTHERS)


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
    else:
        bench_speed.print_table(result)


def _run(module: str, *, as_json: bool) -> int:
    command = [sys.executable, "-m", module, *(["--json"] if as_json else [])]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

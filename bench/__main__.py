"""Every figure, each against its baseline in one run: ``make bench``, or ``python -m bench --quick``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench import machine, report
from bench.cases import CASES
from bench.figures import figures
from bench.gemma import OUT, ROOT
from bench.parts import PARTS, Extent

_PAGE: Final = ROOT / "docs" / "figures.md"
_FORMAT: Final = "kvstore-bench/1"
_LAST: Final = OUT / "last.json"


def main() -> int:
    """Run what is asked for; print tables, or one JSON document."""
    parser = _parser()
    given = parser.parse_args()
    machine.set_quiet_wait(given.quiet_wait)
    try:
        document = _run(given) if given.read is None else _read(given.read)
    except _NoDocumentError as error:
        parser.error(f"--read: expected a document that --json printed: {error}")
    if given.write:
        from bench import plots

        _PAGE.write_text(report.markdown(document))
        plots.draw_all(document)
    print(json.dumps(document, indent=1) if given.json else report.text(document))
    return 0


class _NoDocumentError(Exception):
    """What ``--read`` names holds no measurements."""


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _NoDocumentError(error) from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise _NoDocumentError(f"{path} is of another format than {_FORMAT}")
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 7)")
    parser.add_argument("--quick", action="store_true", help="small caches, three rounds, not the parts of minutes")
    parser.add_argument("--large", action="store_true", help="the cache of 1 GB too, for the bounds of memory")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="this part alone; may be repeated")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="these caches for `speed`")
    parser.add_argument("--quiet-wait", type=float, default=machine.QUIET_WAIT, metavar="SECONDS",
                        help="how long each piece of work waits at most for a quiet machine (default 5)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document with everything")
    parser.add_argument("--write", action="store_true", help="write docs/figures.md and the plots")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing; take a JSON document of before")
    return parser


def _run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure; the document is kept as ``bench/out/last.json`` too."""
    extent = Extent(given.rounds or (3 if given.quick else 7), given.quick, given.large, tuple(given.case or ()))
    began = time.perf_counter()
    document: dict[str, Any] = {"format": _FORMAT, "machine": machine.facts(), "rounds": extent.rounds}
    OUT.mkdir(exist_ok=True)
    with machine.Others() as others:
        for name in given.only or (["speed"] if given.case else PARTS):
            print(f"{time.perf_counter() - began:6.0f} s  {name}", file=sys.stderr)
            result = PARTS[name](extent)
            if result is not None:
                document |= {name: result, "seconds": time.perf_counter() - began}
                document["figures"] = [figure.document() for figure in figures(document)]
                # Part by part: what took minutes is not lost when a later part fails.
                _LAST.write_text(json.dumps(document, indent=1))
    return document | {"other_cores": others.cores}


if __name__ == "__main__":
    sys.exit(main())

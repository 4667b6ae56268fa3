"""The parts of a run, by name: what each measures in a full run and in a quick one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import bench_restore, bench_small, bench_speed, bench_start
from bench.cases import CASES
from bench.machine import Others

__all__ = ["PARTS", "Extent"]

_WHOLE: Final = ("gemma-2000", "qwen-8000")
_QUANTIZED_ROUNDS: Final = 3
_LARGE: Final = "llama-8192"
_LARGE_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Extent:
    """How much to measure.

    Attributes:
        rounds: Interleaved rounds.
        quick: One small cache, few entries, and nothing that takes minutes.
        large: The cache of 1 GB too.
        cases: The caches for ``speed``, where the caller names them.
    """

    rounds: int
    quick: bool = False
    large: bool = False
    cases: tuple[str, ...] = ()


def _speed(extent: Extent) -> dict[str, Any]:
    """By cache: what R1, a plain file and the store take."""
    names = extent.cases or (("gemma-500",) if extent.quick else (*_WHOLE, *_quantized(), *_big(extent)))
    found = {}
    for name in names:
        CASES[name].prepare()
        few = {_LARGE: _LARGE_ROUNDS, **dict.fromkeys(_quantized(), _QUANTIZED_ROUNDS)}.get(name, extent.rounds)
        tasks = bench_speed.AGAINST_R1 if name in _quantized() else None
        found[name] = bench_speed.run(name=name, rounds=min(few, extent.rounds), tasks=tasks)
    return found


def _quantized() -> tuple[str, ...]:
    return tuple(name for name, case in CASES.items() if case.bits)


def _big(extent: Extent) -> tuple[str, ...]:
    return (_LARGE,) if extent.large else ()


def _overhead(extent: Extent) -> dict[str, Any]:
    return bench_small.overhead(name="qwen-8000", processes=1 if extent.quick else 3)


def _small(extent: Extent) -> dict[str, Any]:
    return bench_small.small(processes=1 if extent.quick else 3, entries=100 if extent.quick else 1000)


def _start(extent: Extent) -> dict[str, Any]:
    return bench_start.run(rounds=extent.rounds)


def _restore(extent: Extent) -> dict[str, Any]:
    return bench_restore.restore(rounds=extent.rounds)


def _codecs(extent: Extent) -> dict[str, Any]:
    return bench_restore.codecs(name="gemma-500" if extent.quick else "gemma-2000", rounds=extent.rounds)


def _module(name: str) -> Callable[[Extent], dict[str, Any] | None]:
    """A part that is a module of its own, in a fresh process; it takes minutes."""

    def run(extent: Extent) -> dict[str, Any] | None:
        if extent.quick:
            return None
        with Others() as others:
            done = subprocess.run(
                [sys.executable, "-m", name, "--json"], stdout=subprocess.PIPE, check=True,
                cwd=Path(__file__).parents[1],
            )  # fmt: skip
        return {**json.loads(done.stdout), "other_cores": others.cores}

    return run


PARTS: Final[dict[str, Callable[[Extent], dict[str, Any] | None]]] = {
    "speed": _speed, "overhead": _overhead, "small": _small, "start": _start, "restore": _restore, "codecs": _codecs,
    "conversation": _module("bench.bench_conversation"), "match": _module("bench.bench_match"),
}  # fmt: skip
"""In the order in which they are run."""

"""The machine: what it is, and how much processor time others take while something is measured."""

from __future__ import annotations

import os
import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

from kvstore.store.parallel import worker_count

__all__ = ["NOISY_CORES", "QUIET_WAIT", "Others", "facts", "quiet_wait", "set_quiet_wait", "wait_until_quiet"]

NOISY_CORES: Final = 0.2
"""More than this taken by others, and a row is marked."""
QUIET_WAIT: Final = 5.0
"""Seconds for which a piece of work waits, at most, for others to end theirs."""

_STAT: Final = Path("/proc/stat")
_BUSY_FIELDS: Final = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, and what other guests of the same host stole."""
_VARIABLE: Final = "KVSTORE_BENCH_QUIET_WAIT"
"""Passed on to the processes that measure."""


def facts() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": _processor(), "cores": worker_count(), "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "numpy", "zstandard")},
    }  # fmt: skip


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Others:
    """Processor time that others took during a ``with`` block; neither this process nor its children are others.

    Children count once they have been waited for.

    Attributes:
        wall: Seconds that the block took.
        seconds: Core-seconds that others took, None where the system does not tell. The system counts in hundredths
            of a second, so a short block may show some too many or too few, even less than none; sums of many don't.
    """

    wall: float = 0.0
    seconds: float | None = None

    def __enter__(self) -> Self:
        self._wall, self._own, self._busy = time.perf_counter(), _own(), _busy()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall, own, busy = time.perf_counter() - self._wall, _own() - self._own, _busy()
        if busy is not None and self._busy is not None:
            self.seconds = busy - self._busy - own

    @property
    def cores(self) -> float | None:
        """Cores that others kept busy."""
        return None if self.seconds is None else max(0.0, self.seconds / self.wall)


def _own() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _busy() -> float | None:
    if not _STAT.exists():
        return None
    fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[index]) for index in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def set_quiet_wait(seconds: float) -> None:
    """For this process and those that it starts from now on."""
    os.environ[_VARIABLE] = str(seconds)


def quiet_wait() -> float:
    """Seconds for which to wait at most; 0 for not at all."""
    return float(os.environ.get(_VARIABLE, QUIET_WAIT))


def wait_until_quiet(*, most: float = 0.1, limit_seconds: float | None = None, sample_seconds: float = 0.3) -> bool:
    """Wait until others take no more than ``most`` cores, or the limit is over; tells whether it is quiet."""
    limit = quiet_wait() if limit_seconds is None else limit_seconds
    deadline = time.monotonic() + limit
    while limit > 0:
        with Others() as others:
            time.sleep(sample_seconds)
        if others.cores is None or others.cores <= most:
            return True
        if time.monotonic() >= deadline:
            break
    return False

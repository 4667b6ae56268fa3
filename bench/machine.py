"""How quiet the machine is: the processor time that other processes take meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, Self

__all__ = ["Others", "cores", "wait_until_quiet"]

_STAT: Final = Path("/proc/stat")
_BUSY_FIELDS: Final = (0, 1, 2, 5, 6)
"""user, nice, system, irq and softirq; steal and guest time are not ours to count."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Others:
    """Cores that processes outside this one kept busy during a ``with`` block; None where the system does not tell."""

    cores: float | None = None

    def __enter__(self) -> Self:
        self._wall, self._own, self._busy = time.perf_counter(), time.process_time(), _busy()
        return self

    def __exit__(self, *exc: object) -> None:
        wall, own, busy = time.perf_counter() - self._wall, time.process_time() - self._own, _busy()
        if busy is not None and self._busy is not None:
            self.cores = max(0.0, (busy - self._busy - own) / wall)


def _busy() -> float | None:
    if not _STAT.exists():
        return None
    fields = _STAT.read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[index]) for index in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(*, most: float = 0.1, limit_seconds: float = 60.0, sample_seconds: float = 0.3) -> bool:
    """Wait until others take no more than ``most`` cores, or the limit is over; tells whether it is quiet."""
    deadline = time.monotonic() + limit_seconds
    while True:
        with Others() as others:
            time.sleep(sample_seconds)
        if others.cores is None or others.cores <= most:
            return True
        if time.monotonic() >= deadline:
            return False

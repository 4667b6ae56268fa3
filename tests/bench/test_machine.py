"""What counts as the work of others; no test here depends on how busy the machine is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import machine
from bench.machine import Others, quiet_wait, set_quiet_wait, wait_until_quiet

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_the_time_of_children_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system whose processors ran for just as long as a child did had no others."""
    before = machine._own()
    monkeypatch.setattr(machine, "_busy", machine._own)
    with Others() as others:
        subprocess.run([sys.executable, "-c", BURN], check=True)
    assert machine._own() - before >= 0.3
    assert others.cores == pytest.approx(0, abs=0.01)


def test_where_the_system_does_not_tell_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_busy", lambda: None)
    with Others() as others:
        pass
    assert others.cores is None
    assert wait_until_quiet(limit_seconds=1, sample_seconds=0)


def test_the_wait_is_handed_on_and_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_BENCH_QUIET_WAIT", raising=False)
    assert quiet_wait() == machine.QUIET_WAIT
    monkeypatch.setenv("KVSTORE_BENCH_QUIET_WAIT", "1")
    set_quiet_wait(0)
    assert quiet_wait() == 0
    assert not wait_until_quiet()


def test_a_wait_ends_on_a_machine_that_is_never_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(machine, "_busy", lambda: float(next(ticks)))
    assert not wait_until_quiet(limit_seconds=0.01, sample_seconds=0)

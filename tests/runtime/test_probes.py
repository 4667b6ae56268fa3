"""Probes are remembered while the model lives, whoever asks meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvstore.runtime import probes as module
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.probe import CacheOptions, Probe
from kvstore.runtime.probes import Probes
from tests.runtime.trips import IDENTITY


class NoShapes:
    """A memory that forgets."""

    def note(self, *what: object) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CacheOptions]:
    """The options of each probe that is made; of a model's folder that is not there."""
    found: list[CacheOptions] = []

    def stub(path: Path, options: CacheOptions) -> Probe:
        found.append(options)
        return Probe((), options)

    monkeypatch.setattr(module, "probe_folder", stub)
    monkeypatch.setattr(module, "Shapes", NoShapes)
    return found


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_probe_is_made_once_for_each_model_and_options(made: list[CacheOptions]) -> None:
    probes, models = Probes(), [replace(IDENTITY), replace(IDENTITY)]
    for _ in range(3):
        for model in models:
            for options in (CacheOptions(), CacheOptions(kv_bits=8)):
                assert probes(model, options).options == options
    assert len(made) == 4


def test_a_model_that_is_gone_is_forgotten(made: list[CacheOptions]) -> None:
    probes, kept = Probes(), replace(IDENTITY)
    probes(replace(IDENTITY), CacheOptions())
    gc.collect()
    probes(kept, CacheOptions())
    assert len(probes._known) == 1
    assert len(made) == 2


@pytest.mark.usefixtures("restless")
def test_threads_share_one_memory(made: list[CacheOptions]) -> None:
    probes, sizes = Probes(), count(1)

    def ask(model: ModelIdentity) -> None:
        for _ in range(300):
            options = CacheOptions(max_kv_size=next(sizes))
            assert probes(model, options).options == options

    models = [replace(IDENTITY) for _ in range(8)]
    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(ask, models))
    assert len(made) == 8 * 300

"""Device facts, and limits that are checked before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from kvstore.errors import SpaceError
from kvstore.format.json import canonical_bytes
from kvstore.format.layout import Buffer, Layout
from kvstore.runtime import device
from kvstore.runtime.device import check_device_limits, device_facts, library_versions, memory_budget

LAYOUT = Layout(100, (Buffer("0.k", (1, 2, 100, 32), "BF16"), Buffer("0.v", (1, 2, 100, 64), "F32")))


def test_facts_fit_into_a_receipt() -> None:
    facts = device_facts()
    canonical_bytes(facts)
    assert facts["backend"] == {mx.DeviceType.cpu: "cpu"}.get(mx.default_device().type, facts["backend"])
    assert facts["name"]
    assert list(facts) == sorted(facts)
    for name in ("max_buffer_bytes", "memory_bytes", "working_set_bytes"):
        value = facts[name]
        assert value is None or (isinstance(value, int) and value > 0)


def test_library_versions() -> None:
    versions = library_versions()
    assert {"kvstore", "mlx", "mlx-lm", "numpy", "python", "zstandard"} <= versions.keys()
    assert versions["mlx"] == vars(mx)["__version__"]


def test_a_layout_that_fits() -> None:
    total = 100 * 2 * (32 * 2 + 64 * 4)
    assert LAYOUT.total_bytes == total
    assert check_device_limits(LAYOUT, budget=total)["device_memory"] == "verified"


def test_over_the_budget_by_a_byte() -> None:
    total = LAYOUT.total_bytes
    with pytest.raises(SpaceError) as caught:
        check_device_limits(LAYOUT, budget=total - 1)
    assert caught.value.code == "DEVICE_MEMORY_SHORT"
    assert caught.value.detail["needed"] == total
    assert caught.value.detail["allowed"] == total - 1


def test_more_than_this_machine_has() -> None:
    """A cache of a terabyte, refused without an array made."""
    huge = Layout(2**26, (Buffer("0.k", (1, 128, 2**26, 128), "F32"),))
    before = mx.get_active_memory()
    with pytest.raises(SpaceError) as caught:
        check_device_limits(huge)
    assert caught.value.code in ("DEVICE_MEMORY_SHORT", "DEVICE_BUFFER_TOO_LARGE")
    assert mx.get_active_memory() == before


def test_a_buffer_larger_than_the_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no such limit, so one is put in MLX's place."""
    largest = max(buffer.byte_len for buffer in LAYOUT.buffers)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_buffer_length": largest})
    assert check_device_limits(LAYOUT, budget=2**40)["device_buffer"] == "verified"
    assert device_facts()["max_buffer_bytes"] == largest
    monkeypatch.setattr(mx, "device_info", lambda: {"max_buffer_length": largest - 1})
    with pytest.raises(SpaceError) as caught:
        check_device_limits(LAYOUT, budget=2**40)
    assert caught.value.code == "DEVICE_BUFFER_TOO_LARGE"
    assert caught.value.detail["role"] == "0.v"


def test_what_no_one_tells_is_not_observable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", dict)
    monkeypatch.setattr(device, "memory_budget", lambda: None)
    assert check_device_limits(LAYOUT) == {"device_buffer": "not observable", "device_memory": "not observable"}
    assert device_facts()["max_buffer_bytes"] is None


def test_the_budget_of_this_machine() -> None:
    budget = memory_budget()
    assert budget is None or 2**20 < budget < 2**50


def test_a_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("on a GPU the device's memory counts")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    mx.clear_cache()
    free = memory_budget()
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 3500000\ninactive_file 400000\n")
    assert memory_budget() == 1_400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free is None or memory_budget() not in (None, 1_400_000)

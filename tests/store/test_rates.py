"""Rates of this machine: remembered, judged by, and worth nothing where the file is not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.format.digest import sha256_digest
from kvstore.store.rates import PrefillRate, Rates, RestoreRate

MODEL = sha256_digest(b"model")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "rates.json"


def judged(path: Path) -> bool | None:
    worth = Rates(path).worth("ab" * 16, MODEL, payload_bytes=3_000_000, tokens=100)
    return None if worth is None else worth.pays


def test_both_rates_are_needed(path: Path) -> None:
    assert judged(path) is None
    Rates(path).note(restore={"ab" * 16: RestoreRate(0.5, 1e6)})
    assert judged(path) is None
    Rates(path).note(prefill={MODEL: PrefillRate(10.0)})
    worth = Rates(path).worth("ab" * 16, MODEL, payload_bytes=3_000_000, tokens=100)
    assert worth is not None
    assert (worth.restore_seconds, worth.prefill_seconds, worth.pays) == (3.5, 10.0, True)
    assert Rates(path).worth("cd" * 16, MODEL, payload_bytes=1, tokens=1) is None


def test_a_fast_machine_has_no_use_for_a_slow_disk(path: Path) -> None:
    Rates(path).note(restore={"ab" * 16: RestoreRate(0.5, 1e6)}, prefill={MODEL: PrefillRate(1000.0)})
    assert judged(path) is False


def test_the_last_measurement_counts(path: Path) -> None:
    Rates(path).note(restore={"ab" * 16: RestoreRate(0.5, 1e6)}, prefill={MODEL: PrefillRate(1000.0)})
    Rates(path).note(prefill={MODEL: PrefillRate(1.0)})
    assert judged(path) is True


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "nonsense", '{"version": 2, "restore": {}, "prefill": {}}', '{"version": 1, "restore": []}',
    '{"version": 1, "restore": {"%s": {"fixed_seconds": 1}}, "prefill": {}}',
    '{"version": 1, "restore": {"%s": {"fixed_seconds": 1, "bytes_per_second": 0}}, "prefill": {"%s": 5}}',
    '{"version": 1, "restore": {"%s": {"fixed_seconds": -1, "bytes_per_second": 5}}, "prefill": {"%s": null}}',
    '{"version": 1, "restore": {"%s": {"fixed_seconds": NaN, "bytes_per_second": 5}}, "prefill": {}}',
    "[" * 100_000,
    *(
        '{"version": 1, "restore": {"%s": {"fixed_seconds": 1, "bytes_per_second": ODD}}, "prefill": {"%s": '
        '{"tokens_per_second": 1}}}'.replace("ODD", odd)
        for odd in ("1" + "0" * 400, "1e400", "Infinity", "-Infinity", "1e-320", "1e19", "[]", '"nan"', "[" * 100_000)
    ),
], ids=range(20))  # fmt: skip
def test_a_file_that_is_not_ours_is_no_rate(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text.replace("%s", "ab" * 16, 1).replace("%s", MODEL))
    assert judged(path) is None
    assert Rates(path).restore("ab" * 16) is None
    Rates(path).note(restore={"ab" * 16: RestoreRate(0.5, 1e6)}, prefill={MODEL: PrefillRate(1.0)})
    assert judged(path) is True


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    Rates(tmp_path / "file" / "rates.json").note(prefill={MODEL: PrefillRate(1.0)})
    assert Rates(tmp_path / "file" / "rates.json").prefill(MODEL) is None

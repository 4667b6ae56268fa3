"""``plan --profile`` and ``prepare``: the profile's own documents, byte for byte, and refusals by code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.profiles import PROFILES
from kvstore.format.qwen35_plan import PROFILE
from kvstore.format.receipt import parse_receipt
from tests.cli.conftest import Run, run_process
from tests.format.test_qwen35_plan import FLAT, derived

ASK = ("--profile", PROFILE, "--max-sequence-tokens")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": FLAT}))
    return file


def test_the_names_are_the_formats() -> None:
    assert PROFILES == (PROFILE,)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_plan_is_the_document_and_nothing_else(kv: Run, config: Path, more: list[str]) -> None:
    ran = kv("plan", *ASK, 16, "--config", config, *more)
    assert ran.code == 0
    assert ran.raw.decode() == derived(FLAT, 16)
    assert ran.err == ""


def test_the_plan_of_a_process(config: Path, tmp_path: Path) -> None:
    ran = run_process("plan", *ASK, 300, "--config", config, store=tmp_path / "store")
    assert (ran.code, ran.out) == (0, derived(FLAT, 300))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("changes", "tokens", "code"), [
    ({}, 0, "PLAN_SEQUENCE"), ({}, 4097, "PLAN_SEQUENCE"), ({}, -3, "PLAN_CONFIG_INVALID"),
    ({"num_experts": 4}, 16, "PLAN_NOT_DENSE"), ({"num_hidden_layers": 300}, 16, "PLAN_SCHEDULE"),
    ({"head_dim": 0}, 16, "PLAN_DIMENSIONS"), ({"head_dim": 1.5}, 16, "PLAN_CONFIG_INVALID"),
    ({"full_attention_interval": 9}, 16, "PLAN_KIND_MISSING"), ({"head_dim": 2**31}, 16, "PLAN_TOTAL_LIMIT"),
])  # fmt: skip
@pytest.mark.parametrize("verb", ["plan", "prepare"])
def test_refusals_have_their_codes(
    kv: Run, config: Path, verb: str, changes: dict[str, Any], tokens: int, code: str
) -> None:
    config.write_text(json.dumps({**FLAT, **changes}))
    ran = kv(verb, *ASK, tokens, "--config", config, "--json")
    assert ran.code == 4
    assert ran.out == ""
    assert ran.document["error"]["code"] == code
    assert ran.document["error"]["phase"] == "profile"


@pytest.mark.parametrize("args", [
    ["plan", "--profile", PROFILE], ["plan", "--profile", PROFILE, "--config", "c"], ["plan", "ref", *ASK, "4"],
    ["plan", *ASK, "4", "--model", "m"], ["plan", "--config", "c"], ["plan", "--max-sequence-tokens", "4", "ref"],
    ["plan", "--profile", "another"], ["prepare"], ["plan", *ASK, "4", "--config", "not-there.json"],
    ["prepare", *ASK, "4", "--config", "not-there.json"], ["plan", *ASK, "1.5", "--config", "c"],
])  # fmt: skip
def test_wrong_calls(kv: Run, args: list[str]) -> None:
    ran = kv(*args, "--json")
    assert ran.code == 2
    assert ran.document["error"]["code"] == "USAGE"


def test_prepare_prints_the_evidence(kv: Run, config: Path, tmp_path: Path) -> None:
    ran = kv("prepare", *ASK, 16, "--config", config, "--receipt", tmp_path / "receipt.json", "--json")
    assert ran.code == 0
    document = ran.document
    plan = json.loads(derived(FLAT, 16))
    assert (document["layout_sha256"], document["total_bytes"]) == (plan["layout_sha256"], plan["total_payload_bytes"])
    receipt = parse_receipt((tmp_path / "receipt.json").read_bytes())
    assert receipt.to_json() == document["receipt"]
    assert receipt.checks["fresh"] == receipt.checks["totals"] == "verified"
    lines = kv("prepare", *ASK, 16, "--config", config).out
    assert "14 buffers" in lines
    assert "fresh: verified" in lines


def test_the_profiles_receipt_where_there_is_a_registry_id(kv: Run, config: Path, tmp_path: Path) -> None:
    from kvstore.runtime.prepare import this_device

    ran = kv("prepare", *ASK, 16, "--config", config, "--profile-receipt", tmp_path / "p.json", "--json")
    if this_device().registry_id is None:
        assert ran.document["error"]["code"] == "PREPARED_NO_REGISTRY_ID"
        assert ran.code == 7
        assert not (tmp_path / "p.json").exists()
    else:
        assert json.loads((tmp_path / "p.json").read_bytes()) == ran.document["profile_receipt"]

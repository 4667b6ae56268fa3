"""Our own implementation behind the contract: whatever it is asked, it answers, and says what was wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance import plugin
from kvstore.conformance.index import load_index
from kvstore.conformance.inputs import INPUT_DEPTH, parse_input
from kvstore.errors import KVStoreError
from scripts.fixtures.contexts import BASES
from scripts.fixtures.kinds import CACHES
from scripts.fixtures.tree import FIXTURES
from tests.conformance.odd import mutants

INDEX = load_index(FIXTURES)
def code_of(data: bytes) -> str | None:
    try:
        parse_input(data)
    except KVStoreError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"a": 1.5, "b": 1e400, "c": 123456789012345678901234567890, "\xc3\xa9": [null]} ', None),
        (b"[" * INPUT_DEPTH + b"]" * INPUT_DEPTH, None),
        (b"[" * (INPUT_DEPTH + 1) + b"]" * (INPUT_DEPTH + 1), "JSON_TOO_DEEP"),
        (b"[" * 1_000_000, "JSON_TOO_DEEP"),
        (b"\xef\xbb\xbf1", "JSON_BOM"),
        (b'"\xff"', "JSON_NOT_UTF8"),
        (b"", "JSON_SYNTAX"),
        (b"[1,]", "JSON_SYNTAX"),
        (b'{"a": 1, "a": 1}', "JSON_DUPLICATE_KEY"),
        (b"[NaN]", "JSON_NON_FINITE"),
        (rb'["\ud800"]', "JSON_LONE_SURROGATE"),
        (rb'{"\ud800": 1}', "JSON_LONE_SURROGATE"),
        (b"9" * 5000, None),
    ],
)
def test_inputs(data: bytes, code: str | None) -> None:
    assert code_of(data) == code


RECIPES = {cache.name: cache.recipe for cache in CACHES} | BASES


@pytest.mark.parametrize("name", ["kv-sparse-quantized", "kv-rotating-keep", "list", "state-lengths", "media", "files"])
def test_no_recipe_ends_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is either written or refused with a code of a known phase."""
    monkeypatch.setattr(plugin, "write_bundle", lambda folder, made: None)
    document = {**RECIPES[name], "continuation": {"tag": 1}}
    verdicts = set()
    for mutant in mutants(document):
        reply = plugin.answer({"command": "write", "recipe": mutant, "out": "/nowhere"})
        verdicts.add(reply["verdict"])
        assert reply["verdict"] == "accept" or (reply["code"] and reply["phase"]), mutant
    assert verdicts == {"accept", "reject"}


def test_no_prefix_input_ends_it() -> None:
    document = json.loads(INDEX.path("cases/prefix/media/input.json").read_bytes())
    verdicts = {plugin.answer({"command": "prefix", "input": mutant})["verdict"] for mutant in mutants(document)}
    assert verdicts == {"accept", "reject"}


@pytest.mark.parametrize(
    "request_",
    [None, [], "x", {}, {"command": "sell"}, {"command": "read"}, {"command": ["read"]},
     {"command": "canon", "as": "x", "data": ""}],
)  # fmt: skip
def test_what_is_no_request_gets_no_verdict(request_: Any) -> None:
    reply = plugin.answer(request_)
    assert "error" in reply
    assert "verdict" not in reply


def test_a_context_that_is_wrong_is_no_verdict_on_the_bundle(tmp_path: Path) -> None:
    context = tmp_path / "context.json"
    bundle = str(INDEX.path("cases/kinds/kv"))
    for text in ("", "[]", "{}", '{"model": 1}'):
        context.write_text(text)
        reply = plugin.answer({"command": "read", "context": str(context), "bundle": bundle})
        assert "verdict" not in reply
        ran = subprocess.run(
            [sys.executable, "-m", "kvstore.conformance", "read", "--context", context, bundle], capture_output=True,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 2


def test_serve_goes_on_after_what_it_did_not_understand() -> None:
    lines = b'{"command": "describe"}\n{\n[]\n{"command": "canon", "as": "json", "data": "IHt9"}\n'
    replies = io.BytesIO()
    assert plugin._serve(io.BytesIO(lines), replies) == 0
    answers = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [sorted(answers[at]) for at in (1, 2)] == [["error"], ["error"]]
    assert answers[0]["protocol"] == 1
    assert answers[3] == {"data": "e30=", "verdict": "accept"}

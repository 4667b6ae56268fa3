"""Every requirement of SPEC.md is tested, by a fixture or by a test of ours, or says why it is not."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvstore.codes import CODES
from kvstore.conformance.index import Case, load_index
from scripts import requirements
from scripts.fixtures.tree import FIXTURES

ROOT = Path(__file__).parents[1]
REQUIREMENTS: dict[str, Any] = {item["id"]: item for item in requirements.recorded()}
WAIVERS: dict[str, Any] = {item["id"]: item for item in json.loads((ROOT / "spec" / "waivers.json").read_text())}
INDEX = load_index(FIXTURES)
CASES: dict[str, list[Case]] = defaultdict(list)
for _case in INDEX.cases:
    for _key in _case.requirements:
        CASES[_key].append(_case)


def verdicts(key: str) -> set[str]:
    return {case.expect["verdict"] for case in CASES[key]}


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_list_is_that_of_the_text() -> None:
    """After a change of SPEC.md: python -m scripts.requirements."""
    assert requirements.updated(set()) == requirements.recorded()


def test_no_id_is_lost() -> None:
    """An id that was given once is in the text still, or among those that were retired."""
    appendix = requirements.SPEC.read_text().partition("## Appendix C")[2].partition("## ")[0]
    retired = set(appendix.split()) & set(REQUIREMENTS)
    assert set(REQUIREMENTS) - set(requirements.sentences()) - retired == set()


def test_every_sentence_was_compared_with_its_cases() -> None:
    """A reworded sentence keeps no stale tests: look at them, then python -m scripts.requirements --reviewed ID."""
    assert [key for key, item in REQUIREMENTS.items() if item["reviewed"] != item["sha256"]] == []


@pytest.mark.parametrize("key", REQUIREMENTS)
def test_a_requirement_is_tested_or_waived(key: str) -> None:
    assert CASES[key] or REQUIREMENTS[key]["tests"] or key in WAIVERS
    assert not (key in WAIVERS and (CASES[key] or REQUIREMENTS[key]["tests"])), "a waiver that is not needed"


@pytest.mark.parametrize("key", [key for key, item in REQUIREMENTS.items() if item["tests"]])
def test_tests_that_are_named_exist(key: str) -> None:
    for name in REQUIREMENTS[key]["tests"]:
        path, _, function = name.partition("::")
        assert function in functions_in(path), name


@pytest.mark.parametrize("key", [key for key, item in REQUIREMENTS.items() if item["codes"]])
def test_codes_of_a_sentence_are_what_its_cases_expect(key: str) -> None:
    """Each code in a sentence is the outcome of a case that cites it, or a test of ours stands for it."""
    seen = {case.expect.get("code") for case in CASES[key]}
    missing = set(REQUIREMENTS[key]["codes"]) & set(CODES) - seen
    assert not missing or REQUIREMENTS[key]["tests"] or key in WAIVERS, missing


@pytest.mark.parametrize("key", [key for key in REQUIREMENTS if "reject" in verdicts(key)])
def test_what_is_refused_has_a_counterpart_that_is_accepted(key: str) -> None:
    """Else a program that refuses everything would pass."""
    assert "accept" in verdicts(key)


@pytest.mark.parametrize(
    "key", [key for key, item in REQUIREMENTS.items() if item["level"] == "MUST" and "reader" in item["roles"]]
)
def test_what_a_reader_must_refuse_has_a_case_that_is_refused(key: str) -> None:
    if "refuse" in requirements.sentences()[key] and not REQUIREMENTS[key]["tests"] and key not in WAIVERS:
        assert "reject" in verdicts(key) or key == "KV-CNF-003"  # which is all cases together


@pytest.mark.parametrize(
    "key", [key for key, item in REQUIREMENTS.items() if item["level"] == "MUST" and item["roles"] == ["writer"]]
)
def test_what_a_writer_must_do_has_a_recipe(key: str) -> None:
    written = any(case.role in ("writer", "prefix") or case.expect["verdict"] == "accept" for case in CASES[key])
    assert written or REQUIREMENTS[key]["tests"] or key in WAIVERS


def test_cases_cite_requirements_that_exist() -> None:
    assert set(CASES) - set(REQUIREMENTS) == set()


def test_waivers_say_why() -> None:
    for item in WAIVERS.values():
        assert set(item) == {"id", "owner", "reason", "why"}
        assert item["reason"] in ("untestable", "operational")
        assert item["owner"]
        assert item["why"]
    assert set(WAIVERS) - set(REQUIREMENTS) == set()
    assert len(WAIVERS) <= 0.06 * len(REQUIREMENTS)

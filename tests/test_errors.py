"""Errors: one tree, one code each, and all that a program or a person needs to know."""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path

import pytest

import kvstore.errors
from kvstore.codes import CODES, PHASES
from kvstore.conformance.index import load_index
from kvstore.errors import KVStoreError, fail

PACKAGE = Path(kvstore.errors.__file__).parent
CLASSES = {name: getattr(kvstore.errors, name) for name in kvstore.errors.__all__ if name.endswith("Error")}


@pytest.mark.parametrize("code", CODES)
def test_every_code_makes_its_error(code: str) -> None:
    error = fail(code, "what is wrong", expected=1, found="x", fix="Do this.", where="here")
    assert type(error).__name__ == CODES[code].error
    assert (error.code, error.phase) == (code, CODES[code].phase)
    assert str(error) == error.message == "what is wrong: expected 1, found 'x'. Do this."
    assert error.detail == {"expected": 1, "found": "x", "where": "here"}
    assert json.loads(json.dumps(error.to_json()))["exit_code"] == error.exit_code
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.to_json()) == (type(error), error.to_json())


def test_phases_and_sentences() -> None:
    assert {code.phase for code in CODES.values()} == set(PHASES)
    assert all(code.sentence.endswith(".") and "  " not in code.sentence for code in CODES.values())
    assert len({code.sentence for code in CODES.values()}) == len(CODES)


def test_exit_codes_are_one_to_a_class() -> None:
    exits = [cls.exit_code for cls in CLASSES.values()]
    assert len(exits) == len(set(exits))
    assert 0 not in exits
    assert all(issubclass(cls, KVStoreError) for cls in CLASSES.values())


def test_a_message_never_holds_a_page() -> None:
    assert len(str(fail("FIELD_RANGE", "x", found="y" * 10_000))) < 300


def test_what_is_expected_is_quoted_where_it_is_a_value_and_not_where_it_is_words() -> None:
    assert str(fail("FIELD_RANGE", "x", expected="BF16", found="F16")) == "x: expected 'BF16', found 'F16'"
    assert str(fail("FIELD_RANGE", "x", expected="a name", found="a b")) == "x: expected a name, found 'a b'"
    assert len(str(fail("FIELD_RANGE", "x", expected="a name " * 1000))) < 300


def test_every_code_is_used_and_tested() -> None:
    """One that nothing raises is a promise that nobody keeps; one that no test meets may be wrong."""
    sources = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path.name != "codes.py")
    assert [name for name in CODES if f'"{name}"' not in sources] == []
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    met = set(re.findall(r"[A-Z][A-Z0-9_]+", tests)) | {case.expect.get("code") for case in load_index().cases}
    assert [name for name in CODES if name not in met] == []


def test_codes_that_are_raised_exist() -> None:
    """A misspelt code would only show when its fault occurs."""
    used = {
        (path.name, node.lineno, node.args[0].value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fail"
        and node.args and isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
    assert {item for item in used if item[2] not in CODES} == set()

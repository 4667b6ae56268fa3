"""The runner: grades, known failures, programs that misbehave, reports, the matrix."""

from __future__ import annotations

import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvstore.conformance.index import Index, load_index
from kvstore.conformance.judge import judge
from kvstore.conformance.protocol import OWN, Implementation, NoAnswerError, known_failures, split_command
from kvstore.conformance.report import conformance_receipt, grades, junit, report_files, summary_lines
from kvstore.conformance.runner import Outcome, read_xfails, run_cases, run_matrix, select
from kvstore.errors import KVStoreError
from kvstore.format.receipt import parse_receipt
from scripts.fixtures.tree import FIXTURES
from tests.conformance.own import InProcess

INDEX = load_index(FIXTURES)
FEW = ["kinds/kv", "json/bom", "object/frame-checksum", "canon/spaces", "prefix/count-257", "write/kv", "write/batch"]


class Changed(InProcess):
    """Our own implementation with one thing changed in its answers."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        reply = super().ask(request)
        return {**reply, **{name: value for name, value in self.changes.items() if name in reply}}


def run(program: Implementation, *patterns: str, **options: Any) -> dict[str, Outcome]:
    return {item.id: item for item in run_cases(INDEX, select(INDEX, patterns=patterns), program, **options)}


@pytest.mark.parametrize("serve", [True, False], ids=["served", "a process a case"])
def test_our_own_program(serve: bool) -> None:
    with Implementation(OWN, serve=serve) as program:
        assert program.description.name == "kvstore"
        outcomes = run(program, *FEW, level=3)
    assert {name: (item.status, item.grade) for name, item in outcomes.items()} == dict.fromkeys(FEW, ("passed", 3))


def test_grades() -> None:
    coarse = run(Changed(code="REFUSED"), "json/*", level=2)
    assert {(item.status, item.grade) for item in coarse.values()} == {("passed", 2)}
    coarser = run(Changed(code="REFUSED", phase="json"), "json/bom", "object/frame-checksum", level=2)
    assert {name: (item.status, item.grade) for name, item in coarser.items()} == {
        "json/bom": ("passed", 2), "object/frame-checksum": ("failed", 1),
    }  # fmt: skip
    assert grades(coarser.values()) == {"reader": 1}


@pytest.mark.parametrize(
    ("changes", "case", "words"),
    [
        ({"verdict": "accept"}, "json/bom", "expected reject (JSON_BOM), got accept"),
        ({"verdict": "reject", "code": "X"}, "kinds/kv", "expected accept, got reject"),
        ({"verdict": "perhaps"}, "kinds/kv", "got perhaps"),
        ({"released": 1}, "json/bom", "only after 1 tensors"),
        ({"tensors": {"0.k": {}}}, "json/bom", "had been given out"),
        ({"entry": "sha256:00"}, "kinds/kv", "entry is 'sha256:00'"),
        ({"token_count": 2}, "kinds/kv", "token_count is 2 instead of 3"),
        ({"tensors": {}}, "kinds/kv", "tensors.0.k is None"),
        ({"data": "AAAA"}, "canon/spaces", "output is"),
        ({"data": "!"}, "canon/spaces", "output is None"),
        ({"chain": []}, "prefix/count-257", "chain is []"),
        ({"entry": "sha256:00"}, "write/kv", "entry is 'sha256:00'"),
    ],
)
def test_wrong_answers(changes: dict[str, Any], case: str, words: str) -> None:
    (outcome,) = run(Changed(**changes), case).values()
    assert (outcome.status, outcome.grade) == ("failed", 0)
    assert words in outcome.message


def test_a_difference_is_named_where_it_lies() -> None:
    expect = {"verdict": "accept", "entry": "e", "token_count": 1, "tensors": {"0.k": {"dtype": "F16", "shape": [1]}}}
    found = judge("reader", expect, {**expect, "tensors": {"0.k": {"dtype": "F16", "shape": [2]}}})
    assert found.message == "accepted, but tensors.0.k.shape is [2] instead of [1]"


def test_a_choice_is_right_either_way() -> None:
    expect = next(case.expect for case in INDEX.cases if case.id == "tar/after-end")
    accepted, refused = expect["either"]
    assert [judge("reader", expect, reply).grade for reply in (accepted, refused)] == [3, 3]
    assert judge("reader", expect, {**refused, "code": "PATH_UNSAFE"}).grade == 2
    assert judge("reader", expect, {**accepted, "token_count": 2}).grade == 0
    assert judge("reader", expect, {"error": "crashed"}).grade == 0


class Unwritten(InProcess):
    """Says that it wrote, and did not, or wrote something else."""

    def __init__(self, other: bytes | None = None) -> None:
        super().__init__()
        self.other = other

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        reply = super().ask(request)
        for path in Path(request["out"]).rglob("*.kvo"):
            path.unlink()
            if self.other is not None:
                path.write_bytes(self.other)
        return reply


@pytest.mark.parametrize(("other", "code"), [(None, "OBJECT_MISSING"), (b"x", "STORED_DIGEST_MISMATCH")])
def test_what_a_writer_wrote_is_read(other: bytes | None, code: str) -> None:
    (outcome,) = run(Unwritten(other), "write/kv").values()
    assert outcome.status == "failed"
    assert code in outcome.message


def test_roles_and_features_that_are_not_claimed_are_not_run() -> None:
    program = InProcess()
    object.__setattr__(program.description, "roles", frozenset({"reader"}))
    object.__setattr__(program.description, "features", frozenset())
    found = run(program, "kinds/kv", "tar/plain", "canon/spaces", level=3)
    assert {name: item.status for name, item in found.items()} == {
        "kinds/kv": "passed", "tar/plain": "unsupported", "canon/spaces": "unsupported",
    }  # fmt: skip
    assert grades(found.values()) == {"reader": 3}


def test_known_failures_are_strict(tmp_path: Path) -> None:
    file = tmp_path / "x.xfails"
    file.write_text("# known\njson/b*   # a reason\n\nkinds/kv\n")
    globs = read_xfails(file)
    assert globs == ["json/b*", "kinds/kv"]
    found = run(Changed(code="REFUSED"), "json/bom", "json/nan", "kinds/kv", level=3, xfails=globs)
    assert {name: item.status for name, item in found.items()} == {
        "json/bom": "xfailed", "json/nan": "failed", "kinds/kv": "xpassed",
    }  # fmt: skip
    assert [item.bad for item in found.values()] == [False, True, True]
    assert known_failures(("/a/prog", "--x")) == Path("/a/prog.xfails")


DESCRIBE = '{"protocol": 1, "name": "x", "version": "1", "language": "sh", "roles": ["canon", "reader", "prefix"], "features": [], %s "spec": ["1.0"]}'  # noqa: E501


def script(tmp_path: Path, body: str, *, serve: bool = False) -> Path:
    """A program that describes itself and does ``body`` for anything else."""
    path = tmp_path / "program"
    described = DESCRIBE % ('"serve": true,' if serve else "")
    path.write_text(f"#!/bin/sh\nif [ \"$1\" = describe ]; then echo '{described}'; exit 0; fi\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo oops >&2; exit 3", "exit code 3: oops"),
        ("kill -9 $$", "exit code -9"),
        ("echo nothing; exit 1", "no JSON"),
        ("echo '[]'; exit 1", "no object"),
        ("""echo '{"verdict": "accept"}'; exit 1""", "exit code 1 with verdict 'accept'"),
        ("""echo '{"verdict": "reject"}'; exit 0""", "exit code 0 with verdict 'reject'"),
        ("sleep 60 & wait", "no answer within 0.5 seconds"),
    ],
)
def test_what_is_no_answer(tmp_path: Path, body: str, words: str) -> None:
    with Implementation([str(script(tmp_path, body))], timeout=0.5) as program:
        (outcome,) = run(program, "json/bom").values()
    assert (outcome.status, outcome.grade) == ("error", 0)
    assert words in outcome.message


@pytest.mark.parametrize(
    ("body", "words"),
    [("exit 3", "exit code 3"), ("echo x; cat", "no JSON"), ("sleep 60 & wait", "no answer within"),
     ("echo '{\"verdict\": \"accept\"}'; exec cat >/dev/null", "")],
)  # fmt: skip
def test_a_served_program_that_fails_gets_a_fresh_process(tmp_path: Path, body: str, words: str) -> None:
    with Implementation([str(script(tmp_path, body, serve=True))], timeout=0.5) as program:
        for outcome in run(program, "json/bom", "json/nan").values():
            assert outcome.status in ("error", "failed")
            assert words in outcome.message or "has ended" in outcome.message


@pytest.mark.parametrize(
    "body", ["exit 0", "echo '{\"protocol\": 2}'", "echo '{\"protocol\": 1}'", "sleep 60"]
)  # fmt: skip
def test_a_program_that_does_not_describe_itself(tmp_path: Path, body: str) -> None:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    with pytest.raises(NoAnswerError):
        Implementation([str(path)], timeout=0.5)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(NoAnswerError, match="cannot be started"):
        Implementation(["/nowhere/at/all"])


def test_commands_are_split_as_a_shell_does() -> None:
    assert split_command("node 'my file.js' --x") == ("node", "my file.js", "--x")
    assert split_command("self") == OWN == (sys.executable, "-m", "kvstore.conformance")


def test_everybody_reads_what_everybody_wrote() -> None:
    outcomes = run_matrix(INDEX, [InProcess(), Changed(token_count=1)], patterns=["write/kv", "write/mixed"])
    assert len(outcomes) == 8
    assert [outcome.status for outcome in outcomes] == ["passed", "failed"] * 4
    assert {outcome.role for outcome in outcomes} == {"matrix"}
    unwritten = run_matrix(INDEX, [Unwritten2()], patterns=["write/kv"])
    assert [(outcome.status, outcome.grade) for outcome in unwritten] == [("failed", 0)]


class Unwritten2(InProcess):
    """A writer that refuses."""

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        refusal = {"verdict": "reject", "code": "X", "phase": "capture", "released": 0, "tensors": {}}
        return refusal if request["command"] == "write" else super().ask(request)


def outcomes_of_all_kinds() -> list[Outcome]:
    return [
        Outcome(f"a/{status}", "reader", "MUST", status, 3 if status == "passed" else 0, "why \x00 <&> \ud800")
        for status in ("passed", "failed", "error", "unsupported", "xfailed", "xpassed")
    ]


def test_the_receipt_says_what_was_run() -> None:
    outcomes = outcomes_of_all_kinds()
    receipt = conformance_receipt(INDEX, InProcess(), outcomes, level=2)
    made = report_files({"report": receipt}, outcomes)
    assert sorted(made) == ["junit.xml", "report.json"]
    read = parse_receipt(made["report.json"])
    assert (read.type, read.subject, read.checks) == ("conformance", INDEX.digest, {"reader": "failed"})
    facts: Any = read.facts
    assert (facts["spec"], facts["level"], facts["grades"]) == ("1.0", 2, {"reader": "L0"})
    assert facts["totals"] == dict.fromkeys(("passed", "failed", "error", "unsupported", "xfailed", "xpassed"), 1)
    assert facts["results"]["a/failed"]["status"] == "failed"
    assert facts["implementation"]["name"] == "kvstore"
    suite = ElementTree.fromstring(made["junit.xml"])
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "2", "errors": "1", "skipped": "2",
    }  # fmt: skip


def test_junit_holds_every_case() -> None:
    suite = ElementTree.fromstring(junit(outcomes_of_all_kinds(), "x"))
    kinds = {case.get("name"): [child.tag for child in case] for case in suite}
    assert kinds == {
        "a/passed": [], "a/failed": ["failure"], "a/error": ["error"], "a/unsupported": ["skipped"],
        "a/xfailed": ["skipped"], "a/xpassed": ["failure"],
    }  # fmt: skip


def test_lines_for_people() -> None:
    lines = summary_lines(outcomes_of_all_kinds())
    assert [line.split()[0] for line in lines] == ["FAILED", "ERROR", "XPASSED", "reader"]
    assert lines[-1].split()[1] == "-"


def test_what_is_not_known_is_passed_over(tmp_path: Path) -> None:
    from kvstore.format.json import canonical_bytes

    case: dict[str, Any] = {
        "as": None, "comment": "", "context": None, "expect": {}, "features": [], "files": {}, "flags": [], "id": "x",
        "input": "x", "level": "MUST", "requirements": [], "role": "reader", "since": "1.0",
    }  # fmt: skip
    document: Any = {
        "cases": [case, {**case, "new_key": 1}, {**case, "role": "composer"}], "notes": {}, "version": "1.0",
        "media_type": "application/vnd.kvstore.fixture-index.v1+json",
    }  # fmt: skip
    (tmp_path / "index.json").write_bytes(canonical_bytes(document))
    index: Index = load_index(tmp_path)
    assert (len(index.cases), index.unknown) == (1, 2)
    document["media_type"] = document["media_type"].replace("v1", "v2")
    (tmp_path / "index.json").write_bytes(canonical_bytes(document))
    with pytest.raises(KVStoreError, match="media_type"):
        load_index(tmp_path)
    with pytest.raises(KVStoreError, match="there are no fixtures"):
        load_index(tmp_path / "none")


def test_cases_are_selected_by_role_and_pattern() -> None:
    assert len(select(INDEX)) == len(INDEX.cases)
    assert {case.role for case in select(INDEX, roles=["prefix"])} == {"prefix"}
    found = select(INDEX, roles=["reader"], patterns=["*/bom", "*/nan"])
    assert [case.id for case in found] == ["json/bom", "json/nan"]

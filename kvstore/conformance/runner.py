"""Running cases against a program, and the matrix in which every program reads what every one wrote."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

from kvstore.conformance.context import parse_context
from kvstore.conformance.files import load_bundle
from kvstore.conformance.index import Case, Index
from kvstore.conformance.judge import Verdict, judge
from kvstore.conformance.protocol import Implementation, NoAnswerError
from kvstore.conformance.reader import read_bundle
from kvstore.conformance.recipe import make_entry
from kvstore.conformance.result import rejected
from kvstore.conformance.state import entry_tensors
from kvstore.errors import KVStoreError

__all__ = ["Outcome", "Status", "read_xfails", "run_cases", "run_matrix", "select"]

Status = Literal["passed", "failed", "error", "unsupported", "xfailed", "xpassed"]
BAD: Final = frozenset({"failed", "error", "xpassed"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    Attributes:
        role: The case's role, or ``matrix``.
        grade: 0 to 3.
        message: What was wrong.
    """

    id: str
    role: str
    level: str
    status: Status
    grade: int
    message: str = ""

    @property
    def bad(self) -> bool:
        """Whether the run fails because of it."""
        return self.status in BAD


def select(index: Index, *, roles: Iterable[str] = (), patterns: Iterable[str] = ()) -> list[Case]:
    """The cases of these roles whose id fits one of these patterns; nothing given means all."""
    wanted, globs = set(roles), list(patterns)
    return [
        case for case in index.cases
        if (not wanted or case.role in wanted) and (not globs or any(fnmatchcase(case.id, glob) for glob in globs))
    ]  # fmt: skip


def read_xfails(path: Path) -> list[str]:
    """Patterns of case ids that are known to fail, a line each."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def run_cases(
    index: Index,
    cases: Iterable[Case],
    program: Implementation,
    *,
    level: int = 1,
    xfails: Sequence[str] = (),
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Ask a program every case.

    Args:
        level: The grade that a case must reach to be passed.
        xfails: Patterns of cases that must fail; one that passes is reported as ``xpassed``.
        progress: Called with each outcome.
    """
    result = []
    for case in cases:
        outcome = _expected_to_fail(_run(index, case, program, level), xfails)
        result.append(outcome)
        if progress is not None:
            progress(outcome)
    return result


def _run(index: Index, case: Case, program: Implementation, level: int) -> Outcome:
    described = program.description
    if case.role not in described.roles or set(case.features) - described.features:
        return Outcome(case.id, case.role, case.level, "unsupported", 0)
    try:
        verdict = _ask(index, case, program)
    except NoAnswerError as error:
        return Outcome(case.id, case.role, case.level, "error", 0, str(error))
    status: Status = "passed" if verdict.grade >= level else "failed"
    return Outcome(case.id, case.role, case.level, status, verdict.grade, verdict.message)


def _expected_to_fail(outcome: Outcome, xfails: Sequence[str]) -> Outcome:
    if outcome.status == "unsupported" or not any(fnmatchcase(outcome.id, glob) for glob in xfails):
        return outcome
    status: Status = "xpassed" if outcome.status == "passed" else "xfailed"
    message = "is listed as a known failure, but passes" if status == "xpassed" else outcome.message
    return Outcome(outcome.id, outcome.role, outcome.level, status, outcome.grade, message)


def _ask(index: Index, case: Case, program: Implementation) -> Verdict:
    path = index.path(case.input)
    if case.role == "writer":
        return _ask_writer(case, json.loads(path.read_bytes()), program)
    if case.role == "reader":
        context = index.path(case.context or "")
        request: dict[str, Any] = {"command": "read", "context": str(context), "bundle": str(path)}
    elif case.role == "canon":
        request = {"command": "canon", "as": case.form, "data": base64.b64encode(path.read_bytes()).decode()}
    else:
        request = {"command": "prefix", "input": json.loads(path.read_bytes())}
    return judge(case.role, case.expect, program.ask(request))


def _ask_writer(case: Case, recipe: Mapping[str, Any], program: Implementation) -> Verdict:
    """Let a program write, and read with our own reader what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        reply = program.ask({"command": "write", "recipe": recipe, "out": folder})
        verdict = judge("writer", case.expect, reply)
        if verdict.grade == 0 or case.expect["verdict"] == "reject":
            return verdict
        wanted = expected_reading(recipe)
        return judge("reader", wanted, _read(Path(folder), recipe))


def _read(folder: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return read_bundle(load_bundle(folder), parse_context(recipe_context(recipe))).to_json()
    except KVStoreError as error:
        return rejected(error).to_json()


def expected_reading(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What reading a recipe's entry must give."""
    entry = make_entry(recipe)
    manifest = entry.manifest
    tensors = entry_tensors(manifest, entry.payloads, manifest.token_count)
    return {
        "entry": manifest.entry_id, "tensors": {name: tensor.to_json() for name, tensor in tensors.items()},
        "token_count": manifest.token_count, "verdict": "accept",
    }  # fmt: skip


def recipe_context(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The context that a recipe's entry fits into."""
    method = recipe["method"]
    return {
        "device": {"max_buffer_bytes": None, "memory_bytes": None}, "media": [],
        "method": None if method is None else method["name"], "model": recipe["model"],
        "namespace": recipe["namespace"], "policy": "strict", "signature": None, "token_count": None,
        "token_ids": None, "tokenizer": recipe["tokenizer"],
    }  # fmt: skip


def run_matrix(
    index: Index, programs: Sequence[Implementation], *, patterns: Iterable[str] = (),
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Let every writer write every recipe and every reader read it; ids are ``writer -> reader: case``."""
    result = []
    cases = [case for case in select(index, roles=["writer"], patterns=patterns) if case.expect["verdict"] == "accept"]
    for case in cases:
        recipe = json.loads(index.path(case.input).read_bytes())
        for writer in programs:
            if "writer" in writer.description.roles:
                for outcome in _cross(case, recipe, writer, programs):
                    result.append(outcome)
                    if progress is not None:
                        progress(outcome)
    return result


def _cross(
    case: Case, recipe: Mapping[str, Any], writer: Implementation, readers: Sequence[Implementation]
) -> Iterator[Outcome]:
    wanted = expected_reading(recipe)
    with tempfile.TemporaryDirectory() as scratch:
        bundle, context = Path(scratch, "bundle"), Path(scratch, "context.json")
        bundle.mkdir()
        context.write_text(json.dumps(recipe_context(recipe)))
        written = _answer("writer", case.expect, writer, {"command": "write", "recipe": recipe, "out": str(bundle)})
        for reader in readers:
            if "reader" not in reader.description.roles:
                continue
            request = {"command": "read", "context": str(context), "bundle": str(bundle)}
            status, verdict = written if written[0] != "passed" else _answer("reader", wanted, reader, request)
            name = f"{writer.description.name} -> {reader.description.name}: {case.id}"
            yield Outcome(name, "matrix", case.level, status, verdict.grade, verdict.message)


def _answer(
    role: str, expect: Mapping[str, Any], program: Implementation, request: Mapping[str, Any]
) -> tuple[Status, Verdict]:
    try:
        verdict = judge(role, expect, program.ask(request))
    except NoAnswerError as error:
        return "error", Verdict(0, str(error))
    return "passed" if verdict.grade else "failed", verdict

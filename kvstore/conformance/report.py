"""Reports of a run: a conformance receipt, JUnit's XML for CI, and lines for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from xml.etree import ElementTree

from kvstore import __version__
from kvstore.conformance.index import Index
from kvstore.conformance.protocol import Implementation
from kvstore.conformance.runner import Outcome
from kvstore.format.json import Json, canonical_bytes
from kvstore.format.receipt import Receipt

__all__ = ["conformance_receipt", "grades", "junit", "matrix_receipts", "report_files", "summary_lines"]

_NOT_XML: Final = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NOT_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_NAME_CHARS: Final = 64
_MESSAGE_CHARS: Final = 500
_ELEMENTS: Final = {
    "error": "error", "failed": "failure", "unsupported": "skipped", "xfailed": "skipped", "xpassed": "failure",
}  # fmt: skip
"""The element of a test case that was not simply passed."""


def grades(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """For each role the lowest grade of its MUST cases; those that are unsupported do not count."""
    result: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.status != "unsupported" and outcome.level == "MUST":
            result[outcome.role] = min(result.get(outcome.role, 3), outcome.grade)
    return result


def conformance_receipt(
    index: Index, program: Implementation, outcomes: Sequence[Outcome], *, level: int, now: datetime | None = None
) -> Receipt:
    """The evidence that a program was run over all or some of the cases of an index."""
    moment = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    described = program.description
    facts: dict[str, Json] = {
        "grades": {role: f"L{grade}" for role, grade in grades(outcomes).items()},
        "implementation": {"language": described.language, "name": described.name, "version": described.version},
        "level": level,
        "results": {outcome.id: _result(outcome) for outcome in outcomes},
        "spec": index.version,
        "totals": dict(Counter(outcome.status for outcome in outcomes)),
    }
    return Receipt(
        type="conformance", subject=index.digest, made_at=moment,
        producer={"name": "kvstore", "version": __version__}, libraries={}, device=None,
        checks=_checks(outcomes), facts=facts,
    )  # fmt: skip


def matrix_receipts(
    index: Index, programs: Sequence[Implementation], outcomes: Sequence[Outcome]
) -> dict[str, Receipt]:
    """A receipt for each program over the pairs that it was one of, by a name for its file."""
    result = {}
    for number, program in enumerate(programs, 1):
        name = program.description.name
        own = [outcome for outcome in outcomes if name in outcome.id.partition(": ")[0].split(" -> ")]
        label = _NOT_A_NAME.sub("_", name)[:_NAME_CHARS]
        result[f"report-{number}-{label}"] = conformance_receipt(index, program, own, level=3)
    return result


def junit(outcomes: Sequence[Outcome], name: str) -> bytes:
    """The run as a JUnit test suite."""
    counts = Counter(outcome.status for outcome in outcomes)
    suite = ElementTree.Element(
        "testsuite", name=name, tests=str(len(outcomes)), failures=str(counts["failed"] + counts["xpassed"]),
        errors=str(counts["error"]), skipped=str(counts["unsupported"] + counts["xfailed"]),
    )  # fmt: skip
    for outcome in outcomes:
        case = ElementTree.SubElement(suite, "testcase", classname=outcome.role, name=outcome.id)
        if outcome.status in _ELEMENTS:
            ElementTree.SubElement(case, _ELEMENTS[outcome.status], message=_NOT_XML.sub("?", outcome.message))
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def summary_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each case that went wrong, and one for each role."""
    lines = [f"{outcome.status.upper()} {outcome.id}: {outcome.message}" for outcome in outcomes if outcome.bad]
    reached = grades(outcomes)
    for role in dict.fromkeys(outcome.role for outcome in outcomes):
        counts = Counter(outcome.status for outcome in outcomes if outcome.role == role)
        grade = f"L{reached[role]}" if reached.get(role) else "-"
        totals = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        lines.append(f"{role:8} {grade:3} {totals}")
    return lines


def report_files(receipts: Mapping[str, Receipt], outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """The files of a report by name: ``<name>.json`` for each receipt, and ``junit.xml``."""
    found = {f"{name}.json": canonical_bytes(receipt.to_json()) for name, receipt in receipts.items()}
    return {**found, "junit.xml": junit(outcomes, "kvstore conformance")}


def _checks(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """By role: verified where nothing went wrong and something was tried."""
    result: dict[str, str] = {}
    for role in dict.fromkeys(outcome.role for outcome in outcomes):
        tried = [outcome for outcome in outcomes if outcome.role == role and outcome.status != "unsupported"]
        wrong = any(outcome.status != "passed" for outcome in tried)
        result[role] = "failed" if wrong else "verified" if tried else "skipped"
    return result


def _result(outcome: Outcome) -> Json:
    result: dict[str, Json] = {"grade": outcome.grade, "status": outcome.status}
    if outcome.message:
        result["message"] = outcome.message[:_MESSAGE_CHARS].encode(errors="replace").decode()
    return result

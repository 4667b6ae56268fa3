"""What an answer is worth: no point, or a grade from 1 to 3."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.format.digest import sha256_digest

__all__ = ["Verdict", "judge"]

VERDICT, PHASE, CODE = 1, 2, 3
_ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "canon": ("output",), "prefix": ("chain",), "reader": ("entry", "token_count", "tensors"), "writer": ("entry",),
}  # fmt: skip
"""What an accepted answer of a role must have in common with what is expected."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of an answer: 0 (wrong), 1 (verdict), 2 (and phase), 3 (and code); and what was wrong."""

    grade: int
    message: str = ""


def judge(role: str, expect: Mapping[str, Any], reply: Mapping[str, Any]) -> Verdict:
    """Compare an answer with what is expected; of two right answers the better one counts."""
    if expect["verdict"] == "either":
        return max((judge(role, choice, reply) for choice in expect["either"]), key=lambda verdict: verdict.grade)
    verdict = reply.get("verdict")
    if verdict != expect["verdict"]:
        said = f"{verdict} ({reply.get('code')}: {reply.get('detail')})" if verdict == "reject" else str(verdict)
        return Verdict(0, f"expected {_expected(expect)}, got {said}")
    if verdict == "accept":
        return _accepted(role, expect, reply)
    if reply.get("released", 0) or reply.get("tensors"):
        return Verdict(0, f"refused, but only after {reply.get('released')} tensors had been given out")
    wanted = f"expected {expect['phase']}/{expect['code']}, got {reply.get('phase')}/{reply.get('code')}"
    if reply.get("phase") != expect["phase"]:
        return Verdict(VERDICT, wanted)
    return Verdict(CODE) if reply.get("code") == expect["code"] else Verdict(PHASE, wanted)


def _accepted(role: str, expect: Mapping[str, Any], reply: Mapping[str, Any]) -> Verdict:
    answer = {**reply, "output": _output(reply)} if role == "canon" else reply
    for name in _ACCEPTED[role]:
        if answer.get(name) != expect[name]:
            return Verdict(0, f"accepted, but {_difference(name, expect[name], answer.get(name))}")
    return Verdict(CODE)


def _output(reply: Mapping[str, Any]) -> str | None:
    try:
        return sha256_digest(base64.b64decode(reply["data"], validate=True))
    except (KeyError, TypeError, binascii.Error):
        return None


def _difference(name: str, expected: Any, found: Any) -> str:
    """The first place where two values differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*expected, *found]):
            if expected.get(key) != found.get(key):
                return _difference(f"{name}.{key}", expected.get(key), found.get(key))
    return f"{name} is {found!r} instead of {expected!r}"


def _expected(expect: Mapping[str, Any]) -> str:
    return "accept" if expect["verdict"] == "accept" else f"reject ({expect['code']})"

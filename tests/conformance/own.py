"""Our own implementation asked in this process, without a program around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.conformance.plugin import answer
from kvstore.conformance.protocol import Description, Implementation, NoAnswerError


class InProcess(Implementation):
    """Answers like ``python -m kvstore.conformance serve``; a crash is no answer."""

    def __init__(self) -> None:
        described = answer({"command": "describe"})
        self.description = Description(
            described["name"], described["version"], described["language"], frozenset(described["roles"]),
            frozenset(described["features"]), serve=True,
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return answer(request)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, OSError,
                RecursionError, TypeError, ValueError) as error:  # fmt: skip
            raise NoAnswerError(repr(error)) from error

    def close(self) -> None:
        pass

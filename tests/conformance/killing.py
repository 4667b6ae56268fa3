"""Switching checks off, one of them or all of an error code, to see whether any fixture notices.

Every ``raise`` and every ``return fail(...)`` of the reading code goes through a switch:
the functions get the bytecode of the same source with just that changed, once. Nothing in
the product knows of it.
"""

from __future__ import annotations

import ast
import gc
import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import kvstore
from kvstore.errors import KVStoreError

PACKAGE = Path(kvstore.__file__).parent
LAYERS = ("format", "conformance")
SUBJECTS = [
    f"kvstore.{layer}.{path.stem}"
    for layer in LAYERS
    for path in sorted((PACKAGE / layer).glob("*.py"))
    if path.stem not in ("__init__", "__main__", "protocol", "runner", "report", "judge", "index")
]
"""Modules that decide what a reader refuses."""


class Switch:
    """What is not raised now, if anything.

    Attributes:
        off: An error code.
        off_check: One check: module, function, and which of those in it.
        met: Checks that have refused something.
    """

    def __init__(self) -> None:
        self.off: str | None = None
        self.off_check: str | None = None
        self.met: set[str] = set()

    def raised(self, error: Any, check: str) -> None:
        if not self.silenced(error, check):
            raise error

    def returned(self, value: Any, check: str) -> Any:
        return None if self.silenced(value, check) else value

    def silenced(self, value: Any, check: str) -> bool:
        if not isinstance(value, KVStoreError):
            return False
        self.met.add(check)
        return value.code == self.off or check == self.off_check


SWITCH = Switch()


class _Reroute(ast.NodeTransformer):
    """``raise X`` to a call of the switch, ``return fail(...)`` through it."""

    def __init__(self, module: str) -> None:
        self.module, self.function = module.removeprefix("kvstore."), ""
        self.counts: Counter[str] = Counter()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self.function = self.function, node.name
        self.generic_visit(node)
        self.function = outer
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if node.exc is None:
            return node
        return ast.copy_location(ast.Expr(self.call("raised", node.exc)), node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        match node.value:
            case ast.Call(func=ast.Name(id="fail" | "_missing_table")):
                node.value = self.call("returned", node.value)
        return node

    def call(self, name: str, argument: ast.expr) -> ast.Call:
        place = f"{self.module}.{self.function}"
        self.counts[place] += 1
        method = ast.Attribute(ast.Name("_SWITCH", ast.Load()), name, ast.Load())
        return ast.Call(method, [argument, ast.Constant(f"{place} {self.counts[place]}")], [])


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


@contextmanager
def rerouted() -> Iterator[Switch]:
    """All subjects with their errors going through :data:`SWITCH`."""
    modules = {name: importlib.import_module(name) for name in SUBJECTS}
    functions = [item for item in gc.get_objects() if isinstance(item, FunctionType) and item.__module__ in modules]
    kept: list[tuple[FunctionType, CodeType]] = []
    for name, module in modules.items():
        fresh = {code.co_qualname: code for code in _codes(_compiled(module))}
        vars(module)["_SWITCH"] = SWITCH
        for function in functions:
            code = fresh.get(function.__qualname__)
            if function.__module__ == name and code is not None and code.co_freevars == function.__code__.co_freevars:
                kept.append((function, function.__code__))
                function.__code__ = code
    try:
        yield SWITCH
    finally:
        for function, code in kept:
            function.__code__ = code


def _compiled(module: ModuleType) -> CodeType:
    assert module.__file__
    tree = _Reroute(module.__name__).visit(ast.parse(Path(module.__file__).read_text()))
    return compile(ast.fix_missing_locations(tree), module.__file__, "exec")

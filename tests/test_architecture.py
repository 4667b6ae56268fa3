"""The layers hold: imports go downwards, each library has one home, and modules stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvstore"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MAX_LINES = 400

LEVELS = ("base", "format", "conformance", "store", "runtime", "cli", "top")
"""From the bottom up; conformance and store both rest on format, and know nothing of each other."""
BASE = frozenset({"kvstore.codes", "kvstore.errors", "kvstore.limits"})
MAY_IMPORT = {
    "base": {"base"},
    "format": {"base", "format"},
    "conformance": {"base", "format", "conformance"},
    "store": {"base", "format", "store"},
    "runtime": {"base", "format", "store", "runtime"},
    "cli": {"base", "format", "conformance", "store", "runtime", "cli", "top"},
    "top": {"base", "format", "store", "runtime"},
}
HOMES = {
    "mlx": {"runtime"}, "mlx_lm": {"runtime"}, "transformers": {"runtime"}, "click": {"cli"},
    "sqlalchemy": {"store"}, "sqlite3": {"store"}, "zstandard": {"format"},
}  # fmt: skip
"""Libraries that only one layer may import."""
IMPURE = frozenset((
    "datetime", "glob", "importlib", "io", "os", "pathlib", "random", "secrets", "shutil", "socket", "sqlite3",
    "subprocess", "tempfile", "time", "urllib", "uuid",
))  # fmt: skip
"""What format, a function from bytes to objects, has no use for."""
NEVER = frozenset({"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"})
"""Formats that run code when they are read."""


def level(module: str) -> str:
    parts = module.split(".")
    if module in BASE:
        return "base"
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else "top"


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Every imported module's full name, inside functions too, with its line."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            source = node.module or ""
            for alias in node.names:
                full = f"{source}.{alias.name}"
                if full == "kvstore.__version__":  # a plain fact, which every layer may state
                    continue
                yield (full if full in MODULES else source), node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    allowed = MAY_IMPORT[level(module)]
    wrong = [
        f"line {line}: {level(module)} imports {name}"
        for name, line in imports(module)
        if name.split(".")[0] == "kvstore" and level(name) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_each_library_has_one_home(module: str) -> None:
    homes = {name: HOMES.get(name.split(".")[0], {level(module)}) for name, _ in imports(module)}
    assert [name for name, allowed in homes.items() if level(module) not in allowed] == []


@pytest.mark.parametrize("module", [m for m in MODULES if level(m) in ("base", "format")])
def test_format_is_pure(module: str) -> None:
    assert [name for name, _ in imports(module) if name.split(".")[0] in IMPURE] == []
    calls = {node.func.id for node in ast.walk(tree(module)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name)}  # fmt: skip
    assert calls & {"open", "print", "input"} == set()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_is_read_can_run(module: str) -> None:
    assert [name for name, _ in imports(module) if name.split(".")[0] in NEVER] == []
    calls = {node.func.id for node in ast.walk(tree(module)) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name)}  # fmt: skip
    assert calls & {"eval", "exec", "compile", "globals", "__import__"} == set()


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_small_and_say_what_they_are(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES
    assert ast.get_docstring(tree(module))


def public(module: str) -> list[str]:
    """The names in ``__all__``."""
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def definitions(module: str) -> dict[str, ast.stmt]:
    return {node.name: node for node in tree(module).body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_listed_and_described(module: str) -> None:
    names, defined = public(module), definitions(module)
    assert len(names) == len(set(names))
    undescribed = [name for name in names if name in defined
                   and not ast.get_docstring(defined[name])]  # type: ignore[arg-type]  # fmt: skip
    assert undescribed == []


@pytest.mark.parametrize("module", [m for m in MODULES if public(m)])
def test_names_that_others_use_are_public(module: str) -> None:
    """A name without underscore that another layer imports stands in ``__all__`` of its module."""
    listed = set(public(module))
    used = {
        alias.name
        for other in MODULES if level(other) != level(module)
        for node in ast.walk(tree(other))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }  # fmt: skip
    assert {name for name in used if f"{module}.{name}" not in MODULES} - listed == set()

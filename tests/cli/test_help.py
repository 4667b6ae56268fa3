"""Every verb has help, a summary, the global options and a document; nothing heavy is imported for it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from kvstore import errors
from kvstore.cli.main import VERBS, cli
from tests.cli.conftest import ROOT, SCHEMA, Run, run_process, runner

HEAVY = ("mlx", "mlx_lm", "transformers", "sqlalchemy", "numpy", "zstandard")


def command(name: str) -> Any:
    return getattr(import_module(f"kvstore.cli.{VERBS[name].module}"), name)


def test_help_lists_every_verb(kv: Run) -> None:
    ran = kv("--help")
    assert ran.code == 0
    for name, verb in VERBS.items():
        assert f"  {name} " in ran.out
        assert " ".join(verb.summary.split()) in " ".join(ran.out.split())


@pytest.mark.parametrize("name", VERBS)
def test_the_summary_is_that_of_the_verb(name: str) -> None:
    assert command(name).help.split("\n\n")[0] == VERBS[name].summary


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_and_the_global_options(kv: Run, name: str) -> None:
    ran = kv(name, "--help")
    assert ran.code == 0
    for option in ("--store DIR", "--json", "-q, --quiet", "-v, --verbose", "--progress"):
        assert option in ran.out
    undescribed = [p.name for p in command(name).params if isinstance(p, click.Option) and not p.help]
    assert undescribed == []


def test_version(kv: Run) -> None:
    from kvstore import __version__

    assert kv("--version").out == __version__ + "\n"


def test_without_a_verb_the_help_is_shown_and_no_error_claimed(kv: Run) -> None:
    ran = kv()
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == kv("--help").out
    assert kv("--json").document["error"]["message"] == "Missing command."


def test_a_verb_that_is_none_names_those_that_are_like_it(kv: Run) -> None:
    assert kv("list").err == "error: No such command 'list'. Did you mean 'ls'? [USAGE]\nTry 'kvstore --help'.\n"
    assert kv("frobnicate").err == "error: No such command 'frobnicate'. [USAGE]\nTry 'kvstore --help'.\n"


def loaded_after(*args: Any, store: Path) -> Any:
    """Which heavy modules the command line has imported when it exits."""
    program = (
        "import sys, json\n"
        "from kvstore.cli.main import cli\n"
        f"try: cli.main({[str(a) for a in args]!r}, prog_name='kvstore')\n"
        "except SystemExit as e: code = e.code\n"
        f"print(json.dumps([code, [m for m in {HEAVY!r} if m in sys.modules]]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "KVSTORE_DIR": str(store), "PATH": "", "XDG_CACHE_HOME": str(store.parent)},
    )  # fmt: skip
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


@pytest.mark.parametrize(
    "args", [["--help"], ["put", "--help"], ["codes"], ["schema"], ["completion", "zsh"]], ids=" ".join
)
def test_help_and_reference_import_nothing_heavy(tmp_path: Path, args: list[str]) -> None:
    assert loaded_after(*args, store=tmp_path / "store") == set()


@pytest.mark.parametrize(
    "args", [["ls"], ["show", "long"], ["info"], ["label"], ["plan", "long"], ["verify"], ["rm", "-n", "long"]],
    ids=" ".join,
)  # fmt: skip
def test_verbs_about_stored_entries_need_no_mlx(filled_store: Path, args: list[str]) -> None:
    assert loaded_after(*args, store=filled_store) & {"mlx", "mlx_lm", "transformers"} == set()


def test_match_by_token_ids_needs_no_model_library(
    filled_store: Path, model: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([n % 61 for n in range(300)]))
    asked = ["match", "--model", model, "--tokens", ids]
    heavy = {"mlx", "mlx_lm", "transformers"}
    assert loaded_after(*asked, "--any-shape", store=filled_store) & heavy == set()
    assert heavy >= loaded_after(*asked, store=filled_store) & heavy > set(), "the first time the model is looked at"
    assert loaded_after(*asked, store=filled_store) & heavy == set(), "then its shape is known"


def test_exit_codes_are_those_that_are_documented() -> None:
    codes = {
        cls.__name__: cls.exit_code
        for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.KVStoreError)
    }  # fmt: skip
    assert codes == {
        "KVStoreError": 1, "UsageError": 2, "NotFoundError": 3, "InvalidError": 4, "IntegrityError": 5,
        "IncompatibleError": 6, "UnsupportedError": 7, "BusyError": 8, "SpaceError": 9, "StoreError": 10,
        "CancelledError": 130,
    }  # fmt: skip


def test_every_document_type_of_the_schema_is_told_apart_by_its_type() -> None:
    documents = [SCHEMA["$defs"][item["$ref"].removeprefix("#/$defs/")] for item in SCHEMA["oneOf"]]
    kinds = [document["properties"]["type"]["const"] for document in documents]
    assert len(kinds) == len(set(kinds))
    assert set(VERBS) - {"schema"} <= set(kinds)


def test_an_unknown_verb_is_a_usage_error(kv: Run) -> None:
    assert kv("frobnicate").code == 2
    assert kv("--json", "frobnicate").document["error"]["code"] == "USAGE"


def test_a_wrong_option_is_a_document_wherever_json_stands(kv: Run) -> None:
    ran = kv("ls", "--frobnicate", "--json")
    assert ran.code == 2
    assert ran.document["error"]["code"] == "USAGE"
    assert ran.out == ""


def test_the_program_runs_as_a_module(tmp_path: Path) -> None:
    ran = run_process("codes", store=tmp_path / "store")
    assert ran.code == 0
    assert "MODEL_MISMATCH" in ran.out
    assert ran.err == ""


def test_store_option_wins_over_the_environment_in_either_place(filled_store: Path, tmp_path: Path) -> None:
    wrong = runner(tmp_path / "none")
    assert wrong("ls").code == 10
    assert wrong("--store", filled_store, "ls").code == 0
    assert wrong("ls", "--store", filled_store).code == 0


def test_cli_is_click() -> None:
    assert isinstance(cli, click.Group)


# Commands that texts advise


def _texts() -> Iterator[tuple[str, str, bool]]:
    """Every text that people read: where it stands, and whether it is one that says what to do."""
    for file in sorted((ROOT / "kvstore").rglob("*.py")):
        tree = ast.parse(file.read_text())
        advice = {
            id(part)
            for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "fix"
            for part in ast.walk(node.value)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value, id(node) in advice
    for file in (ROOT / "README.md", ROOT / "SPEC.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            yield f"{file.name}:{number}", line, False


MARKED = re.compile(r"`kvstore (?![a-z ]+ v\d)([^`]+)`|^\s*\$? ?kvstore ((?:[a-z]+ )+--?[a-z].*)$", re.MULTILINE)
"""A command in quotes, or on a line of its own; not the tag of a digest, which ends in a version."""
WITH_OPTION = re.compile(r"kvstore ((?:-[-\w]+ )*[a-z][-a-z]*(?: [a-z]+)? --?[a-z][-\w]*)")
ADVISED = re.compile(r"kvstore ([a-z][-a-z]*)")
PROSE = {"does"}
"""Words after the name where an advice speaks of the program."""


def mentions() -> list[tuple[str, str]]:
    found = []
    for where, text, advice in _texts():
        found += [(where, command or line) for command, line in MARKED.findall(text)]
        found += [(where, command) for command in WITH_OPTION.findall(text)]
        found += [(where, word) for word in ADVISED.findall(text) if advice and word not in PROSE]
    return found


MENTIONS = mentions()


def fault(text: str) -> str | None:
    """What is wrong with a command line, as far as its verb and the names of its options go."""
    parts = re.split(r"[\s=]+", text.split("|")[0].split("#")[0].strip())
    node: click.Command = cli
    named = {flag for param in cli.params for flag in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
    for part in parts:
        if part.startswith("-"):
            if re.sub(r"[^-\w].*", "", part) not in named and not part.startswith("-v"):
                return f"{node.name} has no option {part}"
        elif isinstance(node, click.Group):
            found = node.get_command(click.Context(node), part)
            if found is None:
                return f"{node.name} has no verb {part}"
            node = found
            named |= {flag for param in node.params for flag in (*param.opts, *param.secondary_opts)}
    return None


def test_commands_are_found_and_checked() -> None:
    """The test below would be none, did it find nothing or let everything pass."""
    assert len({text for _, text in MENTIONS}) > 30
    assert fault("verify --rebuild-index") is None
    assert fault("conformance run --level 3") is None
    for wrong in ("repair", "repair --reindex", "verify --reindex", "conformance walk", "gc"):
        assert fault(wrong) is not None
    assert WITH_OPTION.findall("Rebuild it: kvstore repair --reindex.") == ["repair --reindex"]


@pytest.mark.parametrize(("where", "text"), MENTIONS, ids=[f"{where} {text}"[:80] for where, text in MENTIONS])
def test_every_command_that_is_named_is_there(where: str, text: str) -> None:
    assert fault(text) is None, where

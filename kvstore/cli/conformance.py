"""``kvstore conformance``: run the fixtures against a program, or be such a program.

The fixtures and the runner need neither a store nor MLX.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.cli.output import human_count, table
from kvstore.cli.outputs import fresh_file, require_output, write_file
from kvstore.cli.session import PATH, Session, global_options, stacked, verb
from kvstore.errors import InvalidError, fail

if TYPE_CHECKING:
    from kvstore.conformance.index import Case, Index
    from kvstore.conformance.protocol import Implementation
    from kvstore.conformance.runner import Outcome

__all__ = ["conformance"]

_LONGEST: Final = 86400.0
_ROLES: Final = ("reader", "writer", "canon", "prefix")
_PLUGIN: Final = {
    "describe": "Say what our own implementation does.",
    "canon": "Read bytes and give canonical bytes, as the contract says.",
    "read": "Restore an entry from a bundle, as the contract says.",
    "write": "Make an entry from a recipe, as the contract says.",
    "prefix": "Compute a prefix chain, as the contract says.",
    "serve": "Answer requests line by line, as the contract says.",
}


@click.group("conformance", context_settings={"help_option_names": ["-h", "--help"]})
@global_options
def conformance() -> None:
    """Prove an implementation of the format with the fixtures.

    The contract between the runner and a program, and every case, are described in the fixtures'
    README.md; `kvstore conformance copy DIR` puts it all into a folder.
    """


_select = stacked(
    click.option(
        "--role", "roles", multiple=True, type=click.Choice(_ROLES), help="Only cases of this role.  [default: all]"
    ),
    click.option("--filter", "patterns", multiple=True, metavar="GLOB", help="Only cases whose id fits."),
    click.option(
        "--fixtures", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
        help="Other fixtures than our own.",
    ),
)  # fmt: skip


@verb("run")
@click.option(
    "--entrypoint", "entrypoints", multiple=True, required=True, metavar="CMD",
    help="The program, with arguments, in quotes; `self` is our own. Given more than once, everybody reads what "
    "everybody, we included, wrote.",
)  # fmt: skip
@_select
@click.option("--xfail", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="Cases that are known to fail.  [default: CMD.xfails, if there is one]")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Write a receipt for each program and junit.xml; earlier ones are replaced.")  # fmt: skip
@click.option("--level", type=click.IntRange(1, 3), default=1, show_default=True,
              help="What passes: the right verdict (1), and phase (2), and code (3).")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
              help="Seconds for an answer.")  # fmt: skip
@click.option("--one-process-a-case", is_flag=True, help="Do not use the program's `serve`.")
def run(session: Session, entrypoints: Sequence[str], **options: Any) -> None:
    """Run the cases against a program.

    The exit code is 4 where a case went wrong.
    """
    from kvstore.conformance.index import load_index
    from kvstore.conformance.protocol import Implementation, NoAnswerError, split_command

    if not options["timeout"] <= _LONGEST:  # which a NaN is not, either
        raise fail("USAGE", "--timeout", expected=f"at most {_LONGEST:.0f} seconds", found=str(options["timeout"]))
    index = load_index(options["fixtures"])
    commands = [split_command(text) for text in entrypoints]
    if not all(commands):
        raise fail("USAGE", "--entrypoint", expected="a program", found="nothing")
    matrix = len(commands) > 1
    if matrix:
        commands = list(dict.fromkeys([split_command("self"), *commands]))
    serve = not options["one_process_a_case"]
    with ExitStack() as stack:
        try:
            programs = [
                stack.enter_context(Implementation(command, timeout=options["timeout"], serve=serve))
                for command in commands
            ]
        except NoAnswerError as error:
            raise fail("USAGE", f"a program does not describe itself: {error}") from None
        run_them = _matrix if matrix else _single
        outcomes = run_them(session, index, programs, options)
    _show(session, index, programs, outcomes)
    if any(outcome.bad for outcome in outcomes):
        raise click.exceptions.Exit(InvalidError.exit_code)


def _single(session: Session, index: Index, programs: list[Implementation], options: dict[str, Any]) -> list[Outcome]:
    from kvstore.conformance.protocol import known_failures
    from kvstore.conformance.report import conformance_receipt, report_files
    from kvstore.conformance.runner import read_xfails, run_cases, select

    (program,) = programs
    cases = select(index, roles=options["roles"], patterns=options["patterns"])
    beside = known_failures(program.command)
    xfail = options["xfail"] or (beside if beside.is_file() else None)
    with session.output.progress("conformance", total=len(cases), unit="cases") as bar:
        done = Counter[str]()

        def progress(_: Outcome) -> None:
            done["cases"] += 1
            bar.update(done["cases"])

        outcomes = run_cases(
            index, cases, program, level=options["level"], xfails=read_xfails(xfail) if xfail else (), progress=progress
        )
    if options["report"] is not None:
        receipt = conformance_receipt(index, program, outcomes, level=options["level"])
        _write_report(options["report"], report_files({"report": receipt}, outcomes))
    return outcomes


def _matrix(session: Session, index: Index, programs: list[Implementation], options: dict[str, Any]) -> list[Outcome]:
    from kvstore.conformance.report import matrix_receipts, report_files
    from kvstore.conformance.runner import run_matrix

    if options["roles"] or options["xfail"]:
        raise fail("USAGE", "with several programs there are no roles and no known failures")
    outcomes = run_matrix(index, programs, patterns=options["patterns"])
    if options["report"] is not None:
        _write_report(options["report"], report_files(matrix_receipts(index, programs, outcomes), outcomes))
    return outcomes


def _write_report(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put the files into the folder, which was named for reports: what an earlier run wrote there is replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail("USAGE", f"{folder} cannot be made: {error.strerror}") from error
    for name, data in files.items():
        write_file(folder / name, data, force=True)


def _show(session: Session, index: Index, programs: list[Implementation], outcomes: list[Outcome]) -> None:
    from kvstore.conformance.report import grades, summary_lines

    counts = Counter(outcome.status for outcome in outcomes)
    document = {
        "fixtures": index.digest, "grades": {role: f"L{grade}" for role, grade in grades(outcomes).items()},
        "programs": [
            {"command": list(item.command), "name": item.description.name, "version": item.description.version}
            for item in programs
        ],
        "totals": dict(counts),
        "wrong": [
            {"id": item.id, "message": item.message, "status": item.status} for item in outcomes if item.bad
        ],
    }  # fmt: skip
    session.output.result("conformance", document, summary_lines(outcomes))


@verb("list")
@_select
def list_cases(session: Session, roles: Sequence[str], patterns: Sequence[str], fixtures: Path | None) -> None:
    """List the cases."""
    from kvstore.conformance.index import load_index
    from kvstore.conformance.runner import select

    index = load_index(fixtures)
    cases = select(index, roles=roles, patterns=patterns)
    rows = [(case.id, case.role, _wanted(case), case.comment) for case in cases]
    listed = [{"id": case.id, "requirements": list(case.requirements), "role": case.role} for case in cases]
    session.output.result("conformance-list", {"cases": listed}, table(("CASE", "ROLE", "EXPECTED", "WHAT"), rows))


def _wanted(case: Case) -> str:
    return str(case.expect.get("code", case.expect["verdict"]))


@verb("copy")
@click.argument("folder", type=PATH)
def copy(session: Session, folder: Path) -> None:
    """Copy the fixtures into a new folder."""
    from kvstore.conformance.index import fixtures_folder

    require_output(folder, replaceable=False)
    with fresh_file(folder) as whole:
        shutil.copytree(fixtures_folder(), whole)
    files = sum(1 for path in folder.rglob("*") if path.is_file())
    session.output.result("conformance-copy", {"path": str(folder), "files": files}, [str(folder)])
    session.output.say(f"copied {human_count(files, 'file')}")


def _plugin(name: str, summary: str) -> click.Command:
    """A command of the contract; its arguments are handed on as they are."""

    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(args: tuple[str, ...]) -> None:
        from kvstore.conformance.plugin import main

        raise click.exceptions.Exit(main([name, *args]))

    settings = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
    return click.command(name, help=summary, context_settings=settings)(command)


for _command in (run, list_cases, copy, *(_plugin(name, summary) for name, summary in _PLUGIN.items())):
    conformance.add_command(_command)

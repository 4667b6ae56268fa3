"""Verbs that need no store: ``schema``, ``codes``, ``completion``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

import kvstore
from kvstore import errors
from kvstore.cli.output import table
from kvstore.cli.session import Session, verb
from kvstore.codes import CODES

__all__ = ["codes", "completion", "schema"]

_SUFFIX: Final = ".schema.json"
_SHELLS: Final = ("bash", "zsh", "fish")


@verb("schema")
@click.argument("name", required=False)
def schema(session: Session, name: str | None) -> None:
    """Print a JSON Schema of the format or of --json output.

    NAME is one of those that `kvstore schema` lists, with or without its version.
    """
    folder = schema_folder()
    names = sorted(path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}"))
    if name is None:
        session.output.result("schemas", {"names": names}, names)
        return
    wanted = [known for known in names if name in (known, known.rsplit(".v", 1)[0])]
    if not wanted:
        raise errors.fail("USAGE", "schema", expected="one of " + ", ".join(names), found=name)
    session.output.raw((folder / (wanted[-1] + _SUFFIX)).read_bytes())


@verb("codes")
def codes(session: Session) -> None:
    """List every error code with its exit code."""
    rows = [(code, row.phase, exit_code(row.error), row.sentence) for code, row in CODES.items()]
    document = [
        {"code": code, "phase": phase, "exit_code": number, "error": CODES[code].error, "sentence": sentence}
        for code, phase, number, sentence in rows
    ]
    lines = table(
        ("CODE", "PHASE", "EXIT", "MEANING"), [(c, p, str(n), text) for c, p, n, text in rows], right=(2,)
    )
    session.output.result("codes", {"codes": document}, lines)


@verb("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(session: Session, shell: str) -> None:
    """Print a shell completion script.

    For instance: eval "$(kvstore completion bash)"
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    if found is None:
        raise errors.fail("USAGE", "shell", expected="one of " + ", ".join(_SHELLS), found=shell)
    script = found(root, {}, "kvstore", "_KVSTORE_COMPLETE").source()
    session.output.result("completion", {"shell": shell, "script": script}, script.rstrip("\n").split("\n"))


def exit_code(class_name: str) -> int:
    """The exit code of an error class."""
    cls: type[errors.KVStoreError] = getattr(errors, class_name)
    return cls.exit_code


def schema_folder() -> Path:
    """Where the schemas lie: in the package when installed, beside it in a checkout."""
    package = Path(kvstore.__file__).parent
    inside = package / "schemas"
    return inside if inside.is_dir() else package.parent / "schemas"

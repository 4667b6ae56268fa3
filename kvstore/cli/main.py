"""The ``kvstore`` command: global options, verbs loaded when used, errors to exit codes.

Nothing heavy is imported here. ``kvstore --help`` knows the verbs from :data:`VERBS`
alone; a verb's module is imported when the verb is asked for, and that module imports
numpy, SQLAlchemy or MLX only inside the functions that need them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import click

from kvstore import __version__
from kvstore.cli.output import unwritable, write_message
from kvstore.cli.session import Session, global_options
from kvstore.errors import KVStoreError, fail

__all__ = ["VERBS", "cli"]

EXIT_UNFORESEEN: Final = 1
EXIT_USAGE: Final = 2
EXIT_PIPE_CLOSED: Final = 141


class Verb(NamedTuple):
    """Where a verb lives, and its line in ``kvstore --help`` (held equal to the verb's own by a test)."""

    module: str
    summary: str


VERBS: Final[dict[str, Verb]] = {
    "put": Verb("put", "Store a KV cache: prefill a prompt, or take in an mlx-lm file."),
    "get": Verb("get", "Write an entry as a file that mlx_lm.generate reads."),
    "match": Verb("inspect", "Find the entry that holds the longest prefix of a prompt."),
    "explain": Verb("explain", "Say why a prompt hits or misses."),
    "ls": Verb("inspect", "List entries."),
    "show": Verb("inspect", "Show one entry."),
    "plan": Verb("plan", "Show the buffers that a cache needs, before there is one."),
    "prepare": Verb("profiles", "Allocate a profile's cache on this device, prove it fresh, and print the evidence."),
    "verify": Verb("maintain", "Check stored bytes against their digests."),
    "rm": Verb("maintain", "Remove entries."),
    "label": Verb("maintain", "Give an entry a name."),
    "unlabel": Verb("maintain", "Take a name away; the entry stays."),
    "export": Verb("bundles", "Write an entry as a bundle that `kvstore import` reads."),
    "import": Verb("bundles", "Take in a bundle that `kvstore export`, or another program, wrote."),
    "init": Verb("maintain", "Make an empty store."),
    "bench": Verb("bench", "Measure how fast this machine prefills and restores."),
    "info": Verb("inspect", "Show the store's path, sizes and versions."),
    "conformance": Verb("conformance", "Prove an implementation of the format with the fixtures."),
    "schema": Verb("reference", "Print a JSON Schema of the format or of --json output."),
    "codes": Verb("reference", "List every error code with its exit code."),
    "completion": Verb("reference", "Print a shell completion script."),
}


class _PipeClosedError(Exception):
    """Whoever read standard output has gone away."""


class VerbGroup(click.Group):
    """A group whose commands are imported on use, and whose ``main`` turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module = import_module(f"kvstore.cli.{verb.module}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; for a name that is none, say which ones are like it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            close = " or ".join(repr(name) for name in get_close_matches(args[0], VERBS, n=2))
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run, report an error where there is one, and exit with its code."""
        given = sys.argv[1:] if args is None else list(args)
        # Known before parsing, so that a parser's own error is a document too.
        session = Session(as_json="--json" in given)
        extra.update(obj=session, standalone_mode=False)
        sys.exit(_guarded(lambda: super(VerbGroup, self).main(args, *rest, **extra), session))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; a closed reader must not reach click, which would exit 1, nor Ctrl-C: it would write a line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None
        except BrokenPipeError as error:
            raise _PipeClosedError from error


@click.command(cls=VerbGroup, name="kvstore", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
@global_options
def cli() -> None:
    """Keep the KV caches of language models, and get them back exact to the bit.

    Results go to standard output; progress, messages and errors to standard error.
    """


def _guarded(run: Any, session: Session) -> int:
    """Run the command line; whatever goes wrong becomes a message and an exit code."""
    try:
        result = run()
        sys.stdout.flush()
    except click.UsageError as error:
        return _usage(error, session)
    except click.ClickException as error:
        return _report(fail("USAGE", error.format_message()), session, EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _report(fail("CANCELLED", "stopped; nothing was left behind"), session)
    except KVStoreError as error:
        return _report(error, session)
    except (BrokenPipeError, _PipeClosedError):
        return _pipe_closed()
    except OSError as error:
        return _report(_refused(error), session)
    except Exception as error:  # the last line of defence: a message, not a traceback
        return _unforeseen(error, session)
    return result if isinstance(result, int) else 0


def _usage(error: click.UsageError, session: Session) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not session.as_json:
        click.echo(error.format_message(), err=True)  # the help is no error message
        return EXIT_USAGE
    # Click puts what may be chosen into lines of their own.
    refusal = fail("USAGE", error.format_message().replace("\n\t", " "))
    hint = "" if error.ctx is None else f"Try '{error.ctx.command_path} --help'."
    _traceback(session)
    session.output.error(refusal.to_json(), f"{refusal.message} [{refusal.code}]", hint)
    return EXIT_USAGE


def _report(error: KVStoreError, session: Session, code: int | None = None) -> int:
    _traceback(session)
    session.output.error(error.to_json(), f"{error.message} [{error.code}]")
    return error.exit_code if code is None else code


def _refused(error: OSError) -> KVStoreError:
    """The typed error for what the system refused and no verb expected."""
    from kvstore.store.fs import os_error

    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    # Help and version are written by click itself.
    if last is not None and last.tb_frame.f_code is click.echo.__code__:
        return unwritable(error)
    return os_error(error, "the system refused a read or a write")


def _unforeseen(error: Exception, session: Session) -> int:
    text = f"{type(error).__name__}: {error}"
    _traceback(session)
    document: dict[str, Any] = {
        "code": None, "phase": None, "exit_code": EXIT_UNFORESEEN, "message": text, "detail": {},
    }  # fmt: skip
    session.output.error(document, text if session.verbose > 1 else f"{text} (-vv shows where)")
    return EXIT_UNFORESEEN


def _traceback(session: Session) -> None:
    if session.verbose > 1:
        write_message(traceback.format_exc())


def _pipe_closed() -> int:
    """The reader went away: say nothing, and keep the interpreter's own flush at exit from saying it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return EXIT_PIPE_CLOSED

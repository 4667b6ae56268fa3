"""What every verb shares: the global options, the store that they name, and common arguments.

Global options are accepted before and after the verb (``kvstore --json ls`` and
``kvstore ls --json`` are one); the last one given wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from kvstore.cli.output import Output

if TYPE_CHECKING:
    from kvstore.runtime.store import Store
    from kvstore.store.entry_store import EntryStore

__all__ = ["PATH", "Session", "global_options", "stacked", "verb"]

F = TypeVar("F", bound=Callable[..., Any])


class _NamedPath(click.Path):
    """A path that somebody named. An empty one, as of a variable that is not set, would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("expected a path, found ''.", param, ctx)
        return super().convert(value, param, ctx)


PATH: Final = _NamedPath(path_type=Path)
"""The type of every argument and option that names a file or a folder."""


@dataclass
class Session:
    """The global options of one call, filled in as they are parsed."""

    store: Path | None = None
    as_json: bool = False
    quiet: bool = False
    verbose: int = 0
    progress: str = "auto"

    @property
    def output(self) -> Output:
        """Where this call writes."""
        return Output(as_json=self.as_json, quiet=self.quiet, verbose=self.verbose, progress=self.progress)

    @property
    def path(self) -> Path:
        """The store's path."""
        from kvstore.store.config import default_root

        return self.store or default_root()

    def open_store(self, *, create: bool = False, writable: bool = False) -> Store:
        """Open the store with MLX behind it.

        Raises:
            StoreError: STORE_MISSING and the other STORE_* codes.
        """
        from kvstore.runtime.store import Store

        return Store(self.open_entries(create=create, writable=writable))

    def open_entries(
        self, *, create: bool = False, read_only: bool = False, writable: bool = False
    ) -> EntryStore:
        """Open the store without MLX; with ``writable``, a store that cannot be written is refused at once.

        Raises:
            StoreError: STORE_MISSING and the other STORE_* codes.
        """
        from kvstore.store.entry_store import EntryStore

        store = EntryStore.open(self.path, create=create, read_only=read_only)
        if writable and store.read_only:
            with store:
                store.require_writable()
        return store


_pass_session = click.make_pass_decorator(Session, ensure=True)


def _setter(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Store an option's value in the session; one that was not given, or only by the environment, changes nothing."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        session = ctx.ensure_object(Session)
        from_environment = ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
        if value and not (from_environment and getattr(session, name)):
            setattr(session, name, value)

    return callback


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


global_options = stacked(
    click.option(
        "--store", type=PATH, envvar="KVSTORE_DIR", show_envvar=True,
        metavar="DIR", help="The store's directory.  [default: ~/.cache/kvstore]", expose_value=False,
        callback=_setter("store"),
    ),
    click.option(
        "--json", is_flag=True, help="Write one JSON document.", expose_value=False, callback=_setter("as_json")
    ),
    click.option(
        "-q", "--quiet", is_flag=True, help="No messages, no progress.", expose_value=False, callback=_setter("quiet")
    ),
    click.option(
        "-v", "--verbose", count=True, help="More messages; -vv shows tracebacks.", expose_value=False,
        callback=_setter("verbose"),
    ),
    click.option(
        "--progress", type=click.Choice(["auto", "never"]), help="Progress bars.  [default: auto]", expose_value=False,
        callback=_setter("progress"),
    ),
)  # fmt: skip
"""Adds the global options to a command."""


def verb(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a verb: a command that takes the global options too and gets the session first.

    Put it above all other decorators. Indented paragraphs of the docstring keep their lines in the help.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(f"\b\n{part}" if part.startswith(" ") else part for part in paragraphs)
        command = click.command(name, help=text, context_settings={"help_option_names": ["-h", "--help"]})
        return command(_with_session(global_options(function)))

    return decorate


def _with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    wrapped: Callable[..., Any] = _pass_session(function)
    return wrapped

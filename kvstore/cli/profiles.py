"""The dense-Qwen3.5 profile on the command line: ``plan --profile``, and ``prepare``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.outputs import require_output, write_file
from kvstore.cli.session import PATH, Session, stacked, verb
from kvstore.errors import fail
from kvstore.format.qwen35_plan import PROFILE, make_plan

if TYPE_CHECKING:
    from kvstore.format.qwen35_config import Qwen35Config

__all__ = ["PROFILES", "prepare", "print_plan", "profile_options"]

F = TypeVar("F", bound=Callable[..., Any])
PROFILES: Final = (PROFILE,)


def profile_options(*, required: bool) -> Callable[[F], F]:
    """``--profile``, ``--config`` and ``--max-sequence-tokens``."""
    return stacked(
        click.option("--profile", type=click.Choice(PROFILES), required=required, help="Rules of a named profile."),
        click.option("--config", type=PATH, required=required, metavar="CONFIG.json",
                     help="The model's config.json; the profile needs nothing else of it."),
        click.option("--max-sequence-tokens", type=int, required=required, metavar="N",
                     help="Tokens that the profile's cache has room for."),
    )  # fmt: skip


def print_plan(session: Session, config: Path | None, max_sequence_tokens: int | None) -> None:
    """Print the profile's plan document, byte for byte, with ``--json`` or without.

    Raises:
        UsageError: USAGE where an option is missing.
        InvalidError: PLAN_* codes.
    """
    if config is None or max_sequence_tokens is None:
        raise fail("USAGE", "plan --profile needs --config and --max-sequence-tokens")
    data = make_plan(read_config(config), max_sequence_tokens).data
    # The document has no line end; a terminal wants one.
    session.output.raw(data + b"\n" if sys.stdout.isatty() else data)


@verb("prepare")
@profile_options(required=True)
@click.option("--receipt", type=PATH, metavar="FILE",
              help="Write our load receipt to this file.")
@click.option("--profile-receipt", type=PATH, metavar="FILE",
              help="Write the profile's own receipt; needs a device with a registry id.")
@click.option("--force", is_flag=True, help="Replace files that are there; plain ones, or links.")
def prepare(
    session: Session, profile: str, config: Path, max_sequence_tokens: int, receipt: Path | None,
    profile_receipt: Path | None, force: bool,  # noqa: FBT001 - click calls by name
) -> None:  # fmt: skip
    """Allocate a profile's cache on this device, prove it fresh, and print the evidence.

      kvstore prepare --profile P --config CONFIG.json --max-sequence-tokens N

    The cache itself ends with the command; programs that use it call kvstore.runtime.prepare.
    """
    from kvstore.runtime.prepare import prepare as prepare_cache

    for file in filter(None, (receipt, profile_receipt)):
        require_output(file, force=force)
    made = prepare_cache(read_config(config), max_sequence_tokens)
    if profile_receipt is not None:
        write_file(profile_receipt, made.require_profile_receipt().data, force=force)
    if receipt is not None:
        write_file(receipt, made.receipt.data, force=force)
    plan, issued = made.plan, made.profile_receipt
    document = {
        "profile": profile, "layout_sha256": plan.layout_sha256, "total_bytes": plan.total_bytes,
        "receipt": made.receipt.to_json(), "profile_receipt": None if issued is None else issued.to_json(),
    }  # fmt: skip
    count = human_count(len(plan.records), "buffer")
    lines = [f"{count}, {human_bytes(plan.total_bytes)}, layout {plan.layout_sha256}"]
    lines += [f"{name.replace('_', ' ')}: {result}" for name, result in sorted(made.receipt.checks.items())]
    session.output.result("prepare", document, lines)


def read_config(path: Path) -> Qwen35Config:
    """The typed config in a file.

    Raises:
        UsageError: USAGE where it cannot be read.
        InvalidError: PLAN_CONFIG_INVALID.
    """
    from kvstore.format.qwen35_config import MAX_CONFIG_BYTES, config_from_bytes
    from kvstore.store.fs import read_file

    try:
        data = read_file(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise fail("USAGE", f"the config {path} cannot be read: {error.strerror}") from error
    return config_from_bytes(data)

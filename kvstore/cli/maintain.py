"""Verbs that change the store's content or check it: ``init``, ``label``, ``unlabel``, ``rm``, ``verify``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.entries import entry_document, entry_table
from kvstore.cli.output import human_bytes, human_count, table
from kvstore.cli.session import Session, verb
from kvstore.errors import IntegrityError, fail

if TYPE_CHECKING:
    from kvstore.store.findings import Finding, Report

__all__ = ["init", "label", "rm", "unlabel", "verify"]


@verb("init")
def init(session: Session) -> None:
    """Make an empty store.

    `kvstore put` does so by itself. A store that is there already is left as it is.
    """
    from kvstore.store.config import store_root

    there = (store_root(session.path) / "kvstore.json").exists()
    with session.open_entries(create=True) as store:
        path, document = str(store.root), {"store_id": store.store_id, "created": not there}
    session.output.result("init", {"path": path, **document}, [path])
    session.output.say("already there" if there else "made an empty store")


@verb("label")
@click.argument("ref", required=False)
@click.argument("name", required=False)
def label(session: Session, ref: str | None, name: str | None) -> None:
    """Give an entry a name.

    A label that is taken moves to this entry. Without arguments all labels are listed.
    """
    if ref is None:
        with session.open_entries(read_only=True) as store:
            found = dict(store.labels())
        rows = [(key, value) for key, value in sorted(found.items())]
        session.output.result("labels", {"labels": found}, table(("LABEL", "ENTRY"), rows) if rows else [])
        return
    if name is None:
        raise fail("USAGE", "label needs REF and NAME", fix="To take a label away, use `kvstore unlabel`.")
    with session.open_entries() as store:
        entry_id = store.resolve(ref)
        store.set_label(name, entry_id)
    session.output.result("label", {"name": name, "entry_id": entry_id}, [])
    session.output.say(f"{name} -> {entry_id}")


@verb("unlabel")
@click.argument("name")
def unlabel(session: Session, name: str) -> None:
    """Take a name away; the entry stays."""
    with session.open_entries() as store:
        store.remove_label(name)
    session.output.result("unlabel", {"name": name}, [])
    session.output.say(f"{name} is no label any more")


@verb("rm")
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@click.option("-n", "--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also remove what a process is working from.")
def rm(
    session: Session, refs: tuple[str, ...], dry_run: bool, yes: bool, force: bool,  # noqa: FBT001 - click calls by name
) -> None:  # fmt: skip
    """Remove entries.

    What they share with other entries stays. Unless -y is given the plan is shown and a question
    asked; away from a terminal -y or -n is required. An entry that a process is loading, or has
    leased, is not removed without --force: the exit code is then 8, and nothing is removed.
    """
    out = session.output
    with session.open_entries(read_only=dry_run) as store:
        items = [store.info(entry_id) for entry_id in dict.fromkeys(store.resolve(ref) for ref in refs)]
        if not dry_run and not yes:
            _ask(session, items)
        freed, ids = 0, [item.entry_id for item in items]
        held = store.holders(ids) if dry_run else []
        if not dry_run:
            freed = store.remove(ids, force=force).stored_bytes
    document = {
        "dry_run": dry_run, "entries": [entry_document(item) for item in items], "freed_bytes": freed,
        "leases": [holder.to_json() for holder in held],
    }  # fmt: skip
    out.result("rm", document, entry_table(items) if dry_run else ids)
    count = human_count(len(items), "entry", "entries")
    for holder in held:
        out.say(holder.message)
    if held and not force:
        out.say(f"would remove nothing of {count} without --force")
        return
    out.say(f"would remove {count}" if dry_run else f"removed {count}, freed {human_bytes(freed)}")


def _ask(session: Session, items: Sequence[Any]) -> None:
    """Show the plan and ask; raises where the answer is no or cannot be given."""
    if session.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise fail("USAGE", "rm asks before it removes, and there is no terminal", fix="Use -y, or -n to see the plan.")
    for line in entry_table(items):
        click.echo(line, err=True)
    if not click.confirm(f"Remove {human_count(len(items), 'entry', 'entries')}?", err=True):
        raise fail("CANCELLED", "nothing was removed")


@verb("verify")
@click.argument("refs", nargs=-1, metavar="[REF]...")
@click.option("--deep", is_flag=True, help="Decode every object and check the payload digests too.")
@click.option("--rebuild-index", is_flag=True, help="Make the index anew from the files first.")
def verify(
    session: Session, refs: tuple[str, ...], deep: bool, rebuild_index: bool,  # noqa: FBT001 - click calls by name
) -> None:  # fmt: skip
    """Check stored bytes against their digests.

    Without REF the whole store is checked. The exit code is 5 where something is wrong.

    An index that is damaged, or contradicts the files, is made anew with --rebuild-index: manifests,
    receipts and objects stay as they are, the old index goes to quarantine/, and labels and leases
    are taken over as far as it can still be read. An entry that cannot be taken in is reported.
    """
    out = session.output
    lost = _rebuild(session) if rebuild_index else []
    with session.open_entries() as store:
        wanted = [store.resolve(ref) for ref in refs] or None
        with out.progress("verify", total=1, unit="bytes") as bar:
            report = store.verify(wanted, deep=deep, progress=bar.update)
    report.findings.extend(lost)
    lines = [f"{item.severity}: {item.code} {item.subject}: {item.message}. {item.action}" for item in report.findings]
    counts = f"{human_count(report.entries, 'entry', 'entries')}, {human_count(report.objects, 'object')}"
    lines.append(f"{counts}, {human_bytes(report.bytes_read)}: {_verdict(report)}")
    out.result("verify", report.to_json(), lines)
    if not report.ok:
        raise click.exceptions.Exit(IntegrityError.exit_code)


def _rebuild(session: Session) -> list[Finding]:
    """Make the index anew; gives the entries that could not be taken in."""
    from kvstore.store.findings import Finding
    from kvstore.store.rebuild import rebuild_index

    found = rebuild_index(session.path)
    session.output.say(f"made the index anew: {human_count(found.entries, 'entry', 'entries')}")
    return [Finding.make(code, entry_id, message, (entry_id,)) for entry_id, code, message in found.skipped]


def _verdict(report: Report) -> str:
    if not report.ok:
        return "damaged"
    return "all payloads are what they should be" if report.deep else "all stored bytes are what they should be"

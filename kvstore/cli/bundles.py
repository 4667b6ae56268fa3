"""Verbs that carry entries from store to store: ``export`` and ``import``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.outputs import require_output
from kvstore.cli.session import PATH, Session, verb

__all__ = ["export", "import_"]


@verb("export")
@click.argument("ref")
@click.option("-o", "--output", type=PATH, required=True, metavar="PATH",
              help="Where to write: nothing may be there yet.")  # fmt: skip
@click.option("--tar", "archive", is_flag=True,
              help="Write a tar archive, not a folder.  [default: if PATH ends in .tar]")  # fmt: skip
@click.option("--no-receipts", is_flag=True, help="Leave the receipts out.")
def export(session: Session, ref: str, output: Path, archive: bool, no_receipts: bool) -> None:  # noqa: FBT001 - click calls by name
    """Write an entry as a bundle that `kvstore import` reads.

    A bundle is a folder, or a tar archive, with the manifest, the objects and the receipts.
    Whoever has it can read the prompt out of it.
    """
    require_output(output, replaceable=False)
    archive = archive or output.suffix == ".tar"
    with session.open_entries(read_only=True) as store:
        entry_id = store.resolve(ref)
        with session.output.progress("export", total=1, unit="objects") as bar:
            done = store.export_bundle(
                entry_id, output, archive=archive, receipts=not no_receipts, progress=bar.update
            )
    document = {
        "archive": archive, "bytes": done.size, "entry_id": entry_id, "objects": done.objects, "path": str(done.path),
        "receipts": done.receipts,
    }  # fmt: skip
    session.output.result("export", document, [str(done.path)])
    session.output.say(f"wrote {human_count(done.objects, 'object')}, {human_bytes(done.size)}")


@verb("import")
@click.argument("path", type=PATH)
@click.option("--label", metavar="NAME", help="A name for the entry.")
def import_(session: Session, path: Path, label: str | None) -> None:
    """Take in a bundle that `kvstore export`, or another program, wrote.

    Every payload is decoded and proved before the entry is there. A digest proves that bytes are
    whole, not that whoever made them is honest.
    """
    with (
        session.open_entries(create=True, writable=True) as store,
        session.output.progress("import", total=1, unit="bytes") as bar,
    ):
        done = store.import_bundle(path, label=label, progress=bar.update)
    written = done.written
    document = {
        "created": written.created, "entry_id": written.entry_id, "objects_reused": written.objects_reused,
        "objects_written": written.objects_written, "receipts": done.receipts,
        "receipts_left_out": done.receipts_left_out, "stored_bytes": written.stored_bytes,
    }  # fmt: skip
    session.output.result("import", document, [written.entry_id])
    if done.receipts_left_out:
        left_out = human_count(done.receipts_left_out, "receipt")
        session.output.say(f"left out {left_out}: not what its name says, or not about this entry")
    session.output.say(f"wrote {human_bytes(written.stored_bytes)}" if written.created else "already there")


def __getattr__(name: str) -> Any:
    """The verb ``import``, which no function can be named."""
    if name == "import":
        return import_
    raise AttributeError(name)

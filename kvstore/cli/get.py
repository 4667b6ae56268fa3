"""``get``: an entry as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.drafts import draft_document, draft_option, load_named_pair
from kvstore.cli.inputs import model_options
from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.outputs import fresh_file, require_output
from kvstore.cli.session import PATH, Session, verb
from kvstore.cli.wp30 import parse_settings, write_out
from kvstore.errors import fail

__all__ = ["get"]


@verb("get")
@click.argument("ref")
@model_options(required=True)
@click.option("-o", "--output", required=True, type=PATH, metavar="FILE", help="File to write.")
@click.option("--format", "form", type=click.Choice(["mlx-lm", "wp30-cache-2"]), default="mlx-lm", show_default=True,
              help="What kind of file.")
@click.option("--mlx-lm-shape", "shape", type=click.Choice(["0.30", "0.31", "main-2026-08", "0.32"]),
              help="Releases of mlx_lm that shall read the file; by default the installed one.")
@draft_option
@click.option("--method", metavar="NAME", help="The lossy method that made the entry, if one did.")
@click.option("--file-codec", type=click.Choice(["none", "gzip", "zstd"]), default="none", show_default=True,
              help="Compression of a wp30-cache-2 file.")
@click.option("--file-level", type=click.IntRange(1, 22), metavar="N",
              help="Its level; by default 6 for gzip, which has 9, and 3 for zstd.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="A value of a wp30-cache-2 manifest, text or JSON; may be given often.")
@click.option("--force", is_flag=True, help="Replace the file if it is there; a plain one, or a link.")
def get(
    session: Session, ref: str, model: str, adapter_path: Path | None, output: Path, form: str, shape: Any,
    draft_model: str | None, method: str | None, file_codec: str, file_level: int | None, settings: tuple[str, ...],
    force: bool,  # noqa: FBT001 - click calls by name
) -> None:  # fmt: skip
    """Write an entry as a file that mlx_lm.generate reads.

    REF is an entry id, at least 8 hex digits of one, or a label. The entry is checked against the
    model first; then `mlx_lm.generate --prompt-cache-file FILE` goes on from it.
    With --draft-model the file holds both models' caches, the model's own first, as mlx_lm wants them.
    A wp30-cache-2 file takes its metadata from the entry's annotations, and from --set. An entry that a
    lossy method made is written where --method names it, so that nobody takes it for the whole state.
    """
    given = parse_settings(settings)
    if form == "mlx-lm" and (given or file_codec != "none"):
        raise fail("USAGE", "--set and --file-codec are for --format wp30-cache-2")
    if file_level is not None and file_level > {"none": 0, "gzip": 9, "zstd": 22}[file_codec]:
        raise fail("USAGE", "--file-level", expected="1 to 9 for gzip, 1 to 22 for zstd", found=file_level)
    if form != "mlx-lm" and shape is not None:
        raise fail("USAGE", "--mlx-lm-shape is for --format mlx-lm")
    if draft_model and (method or form != "mlx-lm"):
        raise fail("USAGE", "--draft-model does not go with --method and other formats than mlx-lm")
    require_output(output, force=force)
    with session.open_store() as store:
        from kvstore.runtime.lazy import open_model, options_of
        from kvstore.runtime.pairs import DRAFT_NOTE
        from kvstore.runtime.prompt_file import write_prompt_file

        entry_id = store.entries.resolve(ref)
        manifest = store.entries.manifest(entry_id)
        bound = open_model(model, adapter_path)
        with session.output.progress("reading", total=1, unit="bytes") as bar:
            pair = load_named_pair(store, ref, bound, draft_model, bar.update) if draft_model else None
            restored = pair.main if pair else store.load(
                entry_id, into=bound, options=options_of(manifest.layers, bound.model), namespace=manifest.namespace,
                method=method, progress=bar.update,
            )  # fmt: skip
        cache = pair.cache if pair else restored.cache
        notes = store.entries.info(entry_id).annotations
        with fresh_file(output, force=force) as file:
            if form == "mlx-lm":
                # mlx_lm compares the model's name as a string, so it has to be the one that was typed.
                names = {"model": model, "tokenizer_config": "{}"}
                size = write_prompt_file(file, cache, names, shape=shape)
            else:
                size = write_out(
                    file, cache, store.entries.token_ids(manifest).tolist(), manifest=manifest,
                    identity=bound.identity, annotations=notes, settings=given,
                    codec=file_codec, level=file_level,
                )  # fmt: skip
    session.output.result(
        "get",
        {
            "entry_id": restored.receipt.subject, "path": str(output), "format": form,
            "token_count": restored.token_count, "file_bytes": size,
            "draft": draft_document(pair.draft.receipt if pair else None),
        },
        [],
    )  # fmt: skip
    if not pair and DRAFT_NOTE in notes:
        session.output.say("note: a draft model's cache belongs to this one; --draft-model writes both")
    session.output.say(f"wrote {output}: {human_count(restored.token_count, 'token')}, {human_bytes(size)}")

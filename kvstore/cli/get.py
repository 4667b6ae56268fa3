"""``get``: an entry as a file for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore.cli.inputs import model_options
from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.session import Session, verb
from kvstore.errors import fail

__all__ = ["get"]


@verb("get")
@click.argument("ref")
@model_options(required=True)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="File to write.")
@click.option("--format", "form", type=click.Choice(["mlx-lm"]), default="mlx-lm", show_default=True,
              help="What kind of file.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
def get(
    session: Session, ref: str, model: str, adapter_path: Path | None, output: Path, form: str,
    force: bool,  # noqa: FBT001 - click calls by name
) -> None:  # fmt: skip
    """Write an entry as a file that mlx_lm.generate reads.

    REF is an entry id, at least 8 hex digits of one, or a label. The entry is checked against the
    model first; then `mlx_lm.generate --prompt-cache-file FILE` goes on from it.
    """
    if output.exists() and not force:
        raise fail("USAGE", f"{output} exists", fix="Use --force to replace it.")
    with session.open_store() as store:
        from kvstore.runtime.lazy import open_model, options_of
        from kvstore.runtime.prompt_file import write_prompt_file

        entry_id = store.entries.resolve(ref)
        manifest = store.entries.manifest(entry_id)
        bound = open_model(model, adapter_path)
        with session.output.progress("reading", total=1, unit="bytes") as bar:
            restored = store.load(
                entry_id, into=bound, options=options_of(manifest.layers), namespace=manifest.namespace,
                method=None if manifest.method is None else manifest.method.name, progress=bar.update,
            )  # fmt: skip
        # mlx_lm compares the model's name as a string, so it has to be the one that was typed.
        size = write_prompt_file(output, restored.cache, {"model": model, "tokenizer_config": "{}"})
    session.output.result(
        "get",
        {
            "entry_id": restored.receipt.subject, "path": str(output), "format": form,
            "token_count": restored.token_count, "file_bytes": size,
        },
        [],
    )  # fmt: skip
    session.output.say(f"wrote {output}: {human_count(restored.token_count, 'token')}, {human_bytes(size)}")

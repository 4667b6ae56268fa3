"""``plan``: what a cache will need, from a model without weights or from an entry without its objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.inputs import cache_options, model_options
from kvstore.cli.output import human_bytes, human_count, table
from kvstore.cli.profiles import print_plan, profile_options
from kvstore.cli.session import Session, verb
from kvstore.errors import fail

if TYPE_CHECKING:
    from kvstore.format.layers import LayerRecord

__all__ = ["plan"]


@verb("plan")
@click.argument("ref", required=False)
@model_options(required=False)
@click.option("--token-count", type=click.IntRange(min=1), metavar="N", help="Tokens that the cache shall hold.")
@cache_options
@profile_options(required=False)
def plan(
    session: Session, ref: str | None, model: str | None, adapter_path: Path | None, token_count: int | None,
    max_kv_size: int | None, kv_bits: int | None, kv_group_size: int, profile: str | None, config: Path | None,
    max_sequence_tokens: int | None,
) -> None:  # fmt: skip
    """Show the buffers that a cache needs, before there is one.

      kvstore plan --model M --token-count N   for a model; its weights are not read
      kvstore plan REF                         for a stored entry
      kvstore plan --profile P --config CONFIG.json --max-sequence-tokens N
                                               the document of a named profile, byte for byte

    A model is only asked what its caches would be: nothing is computed and no cache is allocated.
    """
    if profile is not None and ref is None and model is None:
        print_plan(session, config, max_sequence_tokens)
        return
    if (profile, config, max_sequence_tokens) != (None, None, None):
        raise fail("USAGE", "--profile, --config and --max-sequence-tokens go together, and with nothing else")
    if (ref is None) == (model is None) or (model is None) != (token_count is None):
        raise fail("USAGE", "plan needs either REF, or --model and --token-count")
    if ref is not None:
        layers, count = _of_entry(session, ref)
    else:
        from kvstore.runtime.probe import CacheOptions, probe_folder

        assert model is not None and token_count is not None  # noqa: PT018, S101 - proved above
        options = CacheOptions(max_kv_size=max_kv_size, kv_bits=kv_bits, kv_group_size=kv_group_size)
        layers, count = probe_folder(model, options).layers_at(token_count), token_count
    _show(session, layers, count)


def _of_entry(session: Session, ref: str) -> tuple[tuple[LayerRecord, ...], int]:
    with session.open_entries(read_only=True) as store:
        manifest = store.manifest(store.resolve(ref))
        return manifest.layers, manifest.token_count


def _show(session: Session, layers: tuple[LayerRecord, ...], count: int) -> None:
    from kvstore.format.layout import layout_of

    layout = layout_of(layers, count)
    kinds = layer_kinds(layers)
    rows = [
        (kind, str(item["layers"]), human_bytes(item["bytes"])) for kind, item in sorted(kinds.items())
    ]  # fmt: skip
    size = f"{human_bytes(layout.total_bytes)} ({layout.total_bytes} bytes)"
    lines = [
        f"{human_count(count, 'token')}, {human_count(len(layout.buffers), 'buffer')}, {size}",
        *table(("KIND", "LAYERS", "BYTES"), rows, right=(1, 2)),
        f"layout {layout.digest}",
    ]
    session.output.result("plan", {"kinds": kinds, "layout": layout.to_json()}, lines)


def layer_kinds(layers: tuple[LayerRecord, ...]) -> dict[str, dict[str, Any]]:
    """Layers and bytes by kind."""
    from kvstore.format.layers import leaves
    from kvstore.format.layout import layout_of

    result: dict[str, dict[str, Any]] = {}
    for _, leaf in leaves(layers):
        item = result.setdefault(leaf.kind, {"layers": 0, "bytes": 0})
        item["layers"] += 1
        item["bytes"] += layout_of((leaf,), 1).total_bytes
    return result

"""``plan``: what a cache will need, from a model without weights or from an entry without its objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvstore.cli.inputs import cache_options, cache_shape, model_options
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
@click.option("--tokens", "--token-count", "token_count", type=click.IntRange(min=1), metavar="N",
              help="Tokens that the cache shall hold.")
@cache_options
@profile_options(required=False)
def plan(
    session: Session, ref: str | None, model: str | None, adapter_path: Path | None, token_count: int | None,
    profile: str | None, config: Path | None, max_sequence_tokens: int | None, **shape: Any,
) -> None:  # fmt: skip
    """Show the buffers that a cache needs, before there is one.

      kvstore plan --model M --tokens N        for a model; its weights are not read
      kvstore plan REF                         for a stored entry
      kvstore plan --profile P --config CONFIG.json --max-sequence-tokens N
                                               the document of a named profile, byte for byte

    A model is only asked what its caches would be: nothing is computed and no cache is allocated. Bytes per
    token are those that one more adds while no window is full; a cache can be cut back as far as it says.
    """
    if profile is not None and ref is None and model is None:
        print_plan(session, config, max_sequence_tokens)
        return
    if (profile, config, max_sequence_tokens) != (None, None, None):
        raise fail("USAGE", "--profile, --config and --max-sequence-tokens go together, and with nothing else")
    if (ref is None) == (model is None) or (model is None) != (token_count is None):
        raise fail("USAGE", "plan needs either REF, or --model and --tokens")
    if ref is not None:
        _show(session, _of_entry(session, ref))
        return
    from kvstore.runtime.probe import probe_folder

    assert model is not None and token_count is not None  # noqa: PT018, S101 - proved above
    found = probe_folder(model, cache_shape(shape))
    _show(session, _Planned(
        found.layers_at(token_count), token_count, found.lowest_cut(token_count), found.bytes_per_token,
    ))  # fmt: skip


class _Planned(NamedTuple):
    """What is shown: an entry says nothing of the bytes that another token would take."""

    layers: tuple[LayerRecord, ...]
    token_count: int
    lowest_cut: int
    bytes_per_token: int | None


def _of_entry(session: Session, ref: str) -> _Planned:
    with session.open_entries(read_only=True) as store:
        manifest = store.manifest(store.resolve(ref))
        return _Planned(manifest.layers, manifest.token_count, manifest.lowest_cut, None)


def _show(session: Session, planned: _Planned) -> None:
    from kvstore.format.layout import layout_of

    layers, count, low, per_token = planned
    layout = layout_of(layers, count)
    size = f"{human_bytes(layout.total_bytes)} ({layout.total_bytes} bytes)"
    each = "" if per_token is None else f", {per_token} bytes for each token"
    lines = [
        f"{human_count(count, 'token')}, {human_count(len(layout.buffers), 'buffer')}, {size}{each}",
        "cannot be cut back" if low >= count else f"can be cut back to {human_count(max(low, 1), 'token')} or more",
        *table(("KIND", "ROLE", "BUFFERS", "SHAPE", "DTYPE", "BYTES"), _buffer_rows(layers), right=(2, 5)),
        f"layout {layout.digest}",
    ]
    document = {
        "bytes_per_token": per_token, "kinds": layer_kinds(layers), "layout": layout.to_json(),
        "lowest_cut": min(low, count),
    }  # fmt: skip
    session.output.result("plan", document, lines)


def _buffer_rows(layers: tuple[LayerRecord, ...]) -> list[tuple[str, ...]]:
    """Buffers that are alike in one row each, in the order in which they first come."""
    from kvstore.format.layers import leaves
    from kvstore.format.layout import layout_of

    found: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for _, leaf in leaves(layers):
        for buffer in layout_of((leaf,), 1).buffers:
            shape = "x".join(map(str, buffer.shape))
            alike = leaf.kind, buffer.role.partition(".")[2] or buffer.role, shape, buffer.dtype
            number, size = found.get(alike, (0, 0))
            found[alike] = number + 1, size + buffer.byte_len
    return [
        (kind, role, str(number), shape, dtype, human_bytes(size))
        for (kind, role, shape, dtype), (number, size) in found.items()
    ]  # fmt: skip


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

"""Filling a cache from token ids, in steps that can report and be stopped.

An exact repeat of a prompt must hit, and a model needs at least one token left to
evaluate. So a cache whose state cannot go back a token is saved at the prompt's last
token but one; all others are saved at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord, leaves
from kvstore.format.prefix import TokenIds, as_token_ids
from kvstore.limits import MAX_TOKEN_ID
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.kinds import arrays_of, describe, evaluate
from kvstore.runtime.probe import CacheOptions, Probe, make_cache, probe, quantize_cache

__all__ = ["Prefilled", "default_step", "prefill", "shape_of"]

_GPU_STEP: Final = 2048
_CPU_STEP: Final = 32


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Caches, and the token ids that they are the state of."""

    cache: list[Any]
    token_ids: TokenIds


def prefill(
    model: Any,
    token_ids: Sequence[int] | TokenIds,
    *,
    options: CacheOptions | None = None,
    quantized_kv_start: int = 0,
    step: int | None = None,
    checkpoint_every: int | None = None,
    checkpoint: Callable[[Prefilled], object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """Run ``model`` over the ids, on the calling thread.

    Args:
        model: A bound model, or any model of mlx_lm.
        options: How the caches are shaped.
        quantized_kv_start: Tokens after which the caches are quantized, where the options ask for that.
        step: Tokens for each evaluation; the state's bits can depend on it.
        checkpoint_every: Tokens between checkpoints, best a multiple of 256 so that they share segments.
        checkpoint: Called at each with the caches as they are there, to put them. Not called for caches that can be
            cut back to any token: their last state is enough. The caches are those that the prefill goes on with.
        progress: Called with tokens done and tokens in all.

    Raises:
        InvalidError: CACHE_EMPTY where there are no ids; TOKEN_ID_RANGE, also for an id that the model does not have.
        UsageError: USAGE where the model cannot have its caches quantized, for a checkpoint without the other half, or
            for a count of tokens that is none.
    """
    _require_count("step", step)
    _require_count("checkpoint_every", checkpoint_every)
    if (checkpoint_every is None) != (checkpoint is None):
        raise fail("USAGE", "prefill", expected="checkpoint_every and checkpoint, or neither", found="one")
    ids = as_token_ids(token_ids)
    if ids.size == 0:
        raise fail("CACHE_EMPTY", "there are no token ids", fix="Give a prompt of at least one token.")
    module: Any = model.model if isinstance(model, BoundModel) else model
    _require_embedded(module, ids)
    wanted = options or CacheOptions()
    if wanted.kv_bits is not None and quantized_kv_start <= ids.size:
        probe(module, wanted)  # refuses what cannot be quantized; the first piece, which would tell, takes seconds
    cache = make_cache(module, replace(wanted, kv_bits=None))
    width, done, total = step or default_step(), 0, int(ids.size)
    every = checkpoint_every or total
    report = progress or (lambda done, total: None)
    report(0, total)
    while done < total:
        if done and total - done == 1 and not _may_go_on(describe(cache)):
            break
        # The last token goes alone: only before it can be seen whether it may go at all.
        count = min(width, total - done - 1, every - done % every) or 1
        module(mx.array(ids[done : done + count])[None], cache=cache)
        done += count
        if done >= quantized_kv_start:
            quantize_cache(cache, wanted)
        evaluate(arrays_of(cache))
        mx.clear_cache()
        report(done, total)
        if checkpoint is not None and done % every == 0 and done < total - 1 and not _cut_anywhere(describe(cache)):
            checkpoint(Prefilled(cache, ids[:done]))
    if done < total:
        report(total, total)
    return Prefilled(cache, ids[:done])


def default_step() -> int:
    """Tokens for each evaluation: as mlx_lm does on a GPU, few on a CPU so that progress is seen."""
    return _GPU_STEP if mx.default_device().type == mx.DeviceType.gpu else _CPU_STEP


def _require_count(what: str, count: Any) -> None:
    if count is not None and (type(count) is not int or count < 1):
        raise fail("USAGE", f"prefill: {what}", expected="a count of tokens, at least 1", found=repr(count)[:80])


def _require_embedded(module: Any, ids: TokenIds) -> None:
    """No id lies beyond the model's largest table: MLX does not check, and reads whatever is there, or crashes."""
    # By name, for models bring tables of their own; one too many only lets more pass.
    tables = [part for _, part in module.named_modules() if "Embedding" in type(part).__name__ and "weight" in part]
    rows = max((int(table["weight"].shape[0]) for table in tables), default=MAX_TOKEN_ID + 1)
    beyond = np.flatnonzero(ids >= rows).tolist()
    if beyond:
        at = beyond[0]
        raise fail(
            "TOKEN_ID_RANGE", f"token ids at position {at}: the model has no such token", expected=f"0 to {rows - 1}",
            found=int(ids[at]), fix="Take the ids from this model's tokenizer.",
        )  # fmt: skip


def shape_of(
    made: Callable[[CacheOptions], Probe], total: int, options: CacheOptions, *, quantized_kv_start: int = 0
) -> tuple[CacheOptions, int]:
    """What a prefill of ``total`` ids will leave, computing none: the options it ends under, and its token count.

    Args:
        made: The model's probe under options.
    """
    before = made(options).layers_at(max(total - 1, 1))
    count = total if total == 1 or _may_go_on(before) else total - 1
    return (options if count >= quantized_kv_start else replace(options, kv_bits=None)), count


def _may_go_on(layers: Sequence[LayerRecord]) -> bool:
    """Whether the last token may be read too: the state after it must lead back to this one."""
    return all(_can_go_back(leaf) for _, leaf in leaves(tuple(layers)))


def _cut_anywhere(layers: Sequence[LayerRecord]) -> bool:
    """Whether a later state can be cut back to here, however much later."""
    return all(leaf.kind in ("kv", "kv-quantized") for _, leaf in leaves(tuple(layers)))


def _can_go_back(layer: LayerRecord) -> bool:
    """Whether the layer, one token further on, could be restored where it is now."""
    if layer.kind in ("kv", "kv-quantized"):
        return True
    if layer.kind == "kv-rotating":
        return layer.integer("keep") == 0 or layer.integer("offset") < layer.integer("max_size")
    if layer.kind == "kv-chunked":
        return layer.integer("start") == 0 and layer.integer("offset") < layer.integer("chunk_size")
    return layer.never_written and layer.kind != "list"

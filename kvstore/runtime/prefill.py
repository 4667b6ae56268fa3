"""Filling a cache from token ids, in steps that can report and be stopped.

An exact repeat of a prompt must hit, and a model needs at least one token left to
evaluate. So a cache whose state cannot go back a token is saved at the prompt's last
token but one; all others are saved at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord, leaves
from kvstore.format.prefix import TokenIds, as_token_ids
from kvstore.runtime.kinds import describe

__all__ = ["Prefilled", "default_step", "prefill", "quantize"]

_GPU_STEP: Final = 2048
_CPU_STEP: Final = 64


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Caches, and the token ids that they are the state of."""

    cache: list[Any]
    token_ids: TokenIds


def prefill(
    model: Any,
    token_ids: Sequence[int] | TokenIds,
    *,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    step: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prefilled:
    """Run ``model`` over the ids, on the calling thread.

    Args:
        model: An mlx_lm model.
        max_kv_size: Window of the caches, for models that leave the choice.
        kv_bits: Quantize keys and values to so many bits, or None.
        kv_group_size: Elements that share a scale.
        quantized_kv_start: Token from which on the cache is quantized.
        step: Tokens for each evaluation; the state's bits can depend on it.
        progress: Called with tokens done and tokens in all.

    Raises:
        InvalidError: CACHE_EMPTY where there are no ids; TOKEN_ID_RANGE.
        UnsupportedError: CACHE_CLASS_UNKNOWN where a cache has no quantized form.
    """
    from mlx_lm.models.cache import make_prompt_cache

    ids = as_token_ids(token_ids)
    if ids.size == 0:
        raise fail("CACHE_EMPTY", "there are no token ids", fix="Give a prompt of at least one token.")
    cache: list[Any] = make_prompt_cache(model, max_kv_size)
    width, done, total = step or default_step(), 0, int(ids.size)
    report = progress or (lambda done, total: None)
    report(0, total)
    while done < total:
        if done and total - done == 1 and not all(_can_go_back(leaf) for _, leaf in leaves(describe(cache))):
            break
        # The last token goes alone: only before it can be seen whether it may go at all.
        count = min(width, total - done - 1) or 1
        model(mx.array(ids[done : done + count])[None], cache=cache)
        done += count
        if kv_bits is not None and done >= quantized_kv_start:
            cache = quantize(cache, bits=kv_bits, group_size=kv_group_size)
        mx.eval([item.state for item in cache])
        mx.clear_cache()
        report(done, total)
    report(total, total)
    return Prefilled(cache, ids[:done])


def quantize(cache: Sequence[Any], *, bits: int, group_size: int) -> list[Any]:
    """The caches with keys and values quantized; those that are already stay as they are.

    Raises:
        UnsupportedError: CACHE_CLASS_UNKNOWN where a class says that it has no quantized form.
    """
    try:
        return [
            item.to_quantized(group_size=group_size, bits=bits) if hasattr(item, "to_quantized") else item
            for item in cache
        ]
    except NotImplementedError as error:
        raise fail(
            "CACHE_CLASS_UNKNOWN", f"a cache of this model has no quantized form ({error})",
            fix="Leave the KV cache unquantized for this model.",
        ) from error  # fmt: skip


def default_step() -> int:
    """Tokens for each evaluation: as mlx_lm does on a GPU, few on a CPU so that progress is seen."""
    return _GPU_STEP if mx.default_device().type == mx.DeviceType.gpu else _CPU_STEP


def _can_go_back(layer: LayerRecord) -> bool:
    """Whether the layer, one token further on, could be restored where it is now."""
    if layer.kind in ("kv", "kv-quantized"):
        return True
    if layer.kind == "kv-rotating":
        return layer.integer("keep") == 0 or layer.integer("offset") < layer.integer("max_size")
    if layer.kind == "kv-chunked":
        return layer.integer("start") == 0 and layer.integer("offset") < layer.integer("chunk_size")
    return layer.never_written and layer.kind != "list"

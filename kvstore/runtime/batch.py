"""One sequence out of a batch of caches.

A server decodes several prompts at once, in caches whose rows belong to all of them.
An entry is one sequence. :func:`extract_sequence` takes one out, as copies: padding that
others made necessary is left behind.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from kvstore.errors import KVStoreError, fail
from kvstore.runtime.registry import handler_for_class

__all__ = ["extract_sequence"]

_PADDED: Final = {"BatchKVCache": "_right_padding", "BatchRotatingKVCache": "_lengths"}
"""The batch classes of mlx_lm, and the attribute that is set while rows still have to be moved."""
_ALONE: Final = ("kv-sparse", "kv-sparse-quantized")
"""Kinds whose caches never hold more than one sequence."""


def extract_sequence(cache: Sequence[Any], index: int) -> list[Any]:
    """The caches of one sequence of a batch, ready to be put with the ids that this sequence has read.

    What the arithmetic of a batch gave is kept as it is: a ring begins with its oldest row, and keys computed in a
    batch can differ in their last bits from those of a run alone.

    Args:
        cache: One cache object for each layer, batched or not.
        index: Which sequence, from 0.

    Raises:
        UsageError: USAGE where the batch has no such sequence.
        InvalidError: CACHE_BATCHED where a layer has rows that its batch has not put in order yet.
        UnsupportedError: CACHE_CLASS_UNKNOWN.
    """
    return [_extract(item, index, f"layers[{number}]") for number, item in enumerate(cache)]


def _extract(cache: Any, index: int, where: str) -> Any:
    name = type(cache).__name__
    if name in _PADDED:
        return _unpadded(cache, index, where, pending=getattr(cache, _PADDED[name], None))
    handler = handler_for_class(type(cache), where)
    if handler.kind == "list":
        return type(cache)(*(_extract(child, index, f"{where}.{at}") for at, child in enumerate(cache.caches)))
    found = copy.copy(cache)
    if handler.kind in _ALONE:
        _check_index(index, 1, where)
        return found
    for attribute, value in vars(cache).items():
        setattr(found, attribute, tree_map(lambda item: _row(item, index, where), value))
    if handler.kind == "state":
        found.cache = list(found.cache)
        # Padding that was all read is none any more, and a mask of it would hide nothing.
        if found.left_padding is not None and found.left_padding.item() <= 0:
            found.left_padding = None
    return found


def _row(value: Any, index: int, where: str) -> Any:
    """One sequence's part of an array; whatever else a cache holds belongs to all of them."""
    if not isinstance(value, mx.array) or value.ndim == 0:
        return value
    _check_index(index, int(value.shape[0]), where)
    return value[index : index + 1]


def _unpadded(cache: Any, index: int, where: str, *, pending: Any) -> Any:
    _check_index(index, int(cache.left_padding.size), where)
    if pending is not None:
        raise fail(
            "CACHE_BATCHED", f"{where} is a {type(cache).__name__} with rows that are padded on the right",
            expected="rows in order", found="a prompt that is being read", fix="Call its finalize() first.",
        )  # fmt: skip
    if cache.keys is None:
        raise _nothing_read(where)
    found = cache.extract(index)
    mx.eval([array for _, array in tree_flatten((found.keys, found.values))])
    return found


def _nothing_read(where: str) -> KVStoreError:
    return fail("CACHE_EMPTY", f"{where} holds no tokens", fix="Read the prompts first.")


def _check_index(index: int, size: int, where: str) -> None:
    if type(index) is not int or not 0 <= index < size:
        raise fail("USAGE", f"sequence of the batch in {where}", expected=f"0 to {size - 1}", found=repr(index)[:40])

"""The shapes that prompt-cache files of mlx_lm have had: what is written for each.

``0.32`` holds everything an object knows in its arrays. Before it, numbers stood as text
beside the arrays (``meta_state``), and some were nowhere: where a chunk that has dropped
rows stands, padding and lengths of a recurrent state, a layer that was never written,
until 0.30 also the classes in a list. What a shape has no place for is refused, never
left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from kvstore.errors import KVStoreError, fail
from kvstore.runtime.kinds import handler_for_class

__all__ = ["SHAPES", "PromptShape", "flattened", "installed_shape"]

PromptShape = Literal["0.30", "0.31", "main-2026-08", "0.32"]
SHAPES: Final[tuple[PromptShape, ...]] = get_args(PromptShape)
"""``0.30``: releases 0.30.x. ``0.31``: releases 0.31.x, and mlx-swift-lm. ``main-2026-08``: the repository in August
2026, before release 0.32.0. ``0.32``: from release 0.32.0 on."""

_Parts = tuple[Any, Any]
"""The arrays of a layer as a tree, and its numbers as texts."""


def installed_shape() -> PromptShape:
    """The shape that the installed mlx_lm reads and writes."""
    from mlx_lm.models import cache as module

    if not hasattr(module.KVCache, "meta_state"):
        return "0.32"
    if isinstance(module.ArraysCache(1).state, tuple):
        return "main-2026-08"
    return "0.31" if "from_state" in vars(module.CacheList) else "0.30"


def flattened(
    cache: Sequence[Any], metadata: Mapping[str, str], shape: PromptShape
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The arrays and the metadata of a file of that shape; buffers are cut to their state.

    Raises:
        UnsupportedError: CACHE_FILE_EXPORT for what the shape has no place for, and for classes that are not mlx_lm's.
    """
    layers = [_layer(item, f"layers[{index}]", shape) for index, item in enumerate(cache)]
    classes = [type(item).__name__ for item in cache]
    states = dict(tree_flatten([state for state, _ in layers]))
    if shape == "0.32":
        kinds = [(place, _scalar_kind(value)) for place, value in states.items() if not isinstance(value, mx.array)]
        arrays = {place: _as_array(value) for place, value in states.items()}
        texts = tree_flatten([dict(metadata), classes, ["", *kinds]])
    else:
        arrays = states
        texts = tree_flatten([[meta for _, meta in layers], dict(metadata), classes])
    return arrays, dict(texts)


def _layer(cache: Any, where: str, shape: PromptShape) -> _Parts:
    from mlx_lm.models import cache as module

    if type(cache).__module__ != module.__name__:
        raise fail(
            "CACHE_FILE_EXPORT", f"{where} is a {type(cache).__qualname__}", expected="a class of mlx_lm",
            found=type(cache).__module__, fix="Load the entry in a program that knows the class.",
        )  # fmt: skip
    handler = handler_for_class(type(cache), where)
    if handler.kind == "list":
        return _list(cache, where, shape)
    if handler.kind == "state":
        return _state(cache, where, shape)
    if cache.keys is None or not cache.offset:
        return _unwritten(handler.kind, cache, where, shape)
    arrays = _arrays(handler.kind, cache, where)
    return _numbered(handler.kind, cache, arrays, where, shape)


def _arrays(kind: str, cache: Any, where: str) -> Any:
    """Keys and values without head room."""
    rows = cache.offset
    if kind == "kv-concatenated" and rows != cache.keys.shape[2]:
        raise _no_place(where, "trimmed rows of a ConcatenateKVCache, which come back with its next update")
    if kind == "kv-chunked":
        rows -= cache.start_position
    if kind == "kv-rotating" and cache._idx != rows:  # noqa: SLF001 - the class has no other name for it
        return cache.keys, cache.values
    return tree_map(lambda array: array[..., :rows, :], (cache.keys, cache.values))


def _numbered(kind: str, cache: Any, arrays: Any, where: str, shape: PromptShape) -> _Parts:
    """The numbers of a layer, beside its arrays or among them."""
    numbers: tuple[int, ...]
    if shape == "0.32":
        return (*arrays, *_numbers(kind, cache)), None
    if kind == "kv-chunked" and cache.start_position:
        raise _no_place(where, "the position of a chunk that has dropped rows", shape)
    if kind == "kv-rotating":
        numbers = (cache.keep, cache.max_size, cache.offset, cache._idx)  # noqa: SLF001
    elif kind == "kv-chunked":
        numbers = (cache.chunk_size, cache.start_position)
    else:
        numbers = _numbers(kind, cache) if kind == "kv-quantized" else ()
    return arrays, [str(number) for number in numbers] or ""


def _numbers(kind: str, cache: Any) -> tuple[int, ...]:
    """In the order of release 0.32."""
    if kind == "kv":
        return (cache.offset,)
    if kind == "kv-quantized":
        return cache.offset, cache.group_size, cache.bits
    if kind == "kv-rotating":
        return cache.offset, cache.keep, cache.max_size, cache._idx  # noqa: SLF001
    return (cache.offset, cache.chunk_size, cache.start_position) if kind == "kv-chunked" else ()


def _unwritten(kind: str, cache: Any, where: str, shape: PromptShape) -> _Parts:
    if shape != "0.32":
        raise _no_place(where, "a layer that was never written", shape)
    numbers = _numbers(kind, cache)
    if kind == "kv-rotating":
        numbers = (0, cache.keep, cache.max_size, 0)
    return (None, None, *numbers), None


def _state(cache: Any, where: str, shape: PromptShape) -> _Parts:
    slots, rest = list(cache.cache), (cache.left_padding, cache.lengths)
    if shape == "0.32":
        return (slots, *rest), None
    if any(slot is None for slot in slots):
        raise _no_place(where, "an empty slot", shape)
    if shape == "main-2026-08":
        return (slots, *(mx.array([]) if value is None else value for value in rest)), ""
    if any(value is not None for value in rest):
        raise _no_place(where, "left padding or lengths", shape)
    return slots, ""


def _list(cache: Any, where: str, shape: PromptShape) -> _Parts:
    if shape == "0.30":
        raise _no_place(where, "the classes of a list", shape)
    children = [_layer(child, f"{where}.{index}", shape) for index, child in enumerate(cache.caches)]
    names = [type(child).__name__ for child in cache.caches]
    if shape == "0.32":
        return [(state, name) for (state, _), name in zip(children, names, strict=True)], None
    return [state for state, _ in children], (names, [meta for _, meta in children])


def _scalar_kind(value: Any) -> str:
    return "none" if value is None else "string" if isinstance(value, str) else "scalar"


def _as_array(value: Any) -> mx.array:
    if isinstance(value, mx.array):
        return value
    if value is None:
        return mx.array([])
    return mx.array([ord(char) for char in value]) if isinstance(value, str) else mx.array(value)


def _no_place(where: str, what: str, shape: PromptShape | None = None) -> KVStoreError:
    return fail(
        "CACHE_FILE_EXPORT", f"{where}: prompt-cache files have no place for {what}",
        expected="something that a file of this shape can hold", found=shape or "any",
        fix="Write a file of another shape, or load the entry itself.",
    )  # fmt: skip

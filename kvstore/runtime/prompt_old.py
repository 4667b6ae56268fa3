"""Prompt-cache files from before release 0.32 of mlx_lm, and those of mlx-swift-lm, read without trust.

Their metadata is ``[meta states, the writer's own, class names]``. A meta state is empty,
a list of numbers as texts, or for a list of caches the classes and meta states of its
children. Arrays are cut to their rows, so positions follow from them, but for a chunk
that has dropped rows: its position is that of the layers beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from kvstore.errors import KVStoreError, fail
from kvstore.limits import MAX_TOKENS

__all__ = ["revive_old"]

_ALIASES: Final = {"MambaCache": "ArraysCache", "KVCacheSimple": "KVCache"}
_SIDE: Final = (2, 3)
"""Arrays of one side of a quantized cache, without and with biases."""


def revive_old(
    names: Sequence[str], states: Sequence[Any], metas: Sequence[Any], templates: Sequence[Any] | None
) -> list[Any]:
    """Live caches from the parts of a file.

    Args:
        templates: The model's own caches. Needed for lists of files up to 0.30, which do not name their children.

    Raises:
        InvalidError: CACHE_FILE_INVALID.
        UnsupportedError: CACHE_CLASS_UNKNOWN.
    """
    if templates is not None and len(templates) != len(names):
        raise _invalid("the number of caches", f"{len(templates)}, as the model makes", len(names))
    caches = [
        _revive(name, state, meta, None if templates is None else templates[index], f"layers[{index}]")
        for index, (name, state, meta) in enumerate(zip(names, states, metas, strict=True))
    ]
    _place_chunks(caches)
    return caches


def _revive(name: str, state: Any, meta: Any, template: Any, where: str) -> Any:
    from mlx_lm.models import cache as module

    known = _ALIASES.get(name, name)
    if known == "CacheList":
        return _list(state, meta, template, where)
    make = _MAKERS.get(known)
    if make is None:
        raise fail(
            "CACHE_CLASS_UNKNOWN", f"{where} is of class {name!r}, which no release of mlx_lm wrote",
            expected=sorted([*_MAKERS, *_ALIASES, "CacheList"]), found=name,
            fix="Import it with the program that wrote it, and put the cache from there.",
        )  # fmt: skip
    return make(getattr(module, known), state, _texts(meta, where), where)


def _plain(cls: Any, state: Any, meta: list[str], where: str) -> Any:
    _require_no_numbers(meta, where)
    cache = cls()
    cache.keys, cache.values = _pair(state, where)
    cache.offset = int(cache.keys.shape[2])
    return cache


def _quantized(cls: Any, state: Any, meta: list[str], where: str) -> Any:
    numbers = _integers(meta[-3:], 3, where)
    if len(meta) not in (3, 4):
        raise _invalid(f"numbers of {where}", "3 or 4", len(meta))
    cache = cls(group_size=numbers[1], bits=numbers[2])
    cache.keys, cache.values = _sides(state, where)
    cache.offset = numbers[0]
    return cache


def _rotating(cls: Any, state: Any, meta: list[str], where: str) -> Any:
    # Up to 0.28, and in mlx-swift-lm, a step by which nothing is decided stands in the middle.
    numbers = _integers(meta[:2] + meta[-2:], 4, where)
    if len(meta) not in (4, 5):
        raise _invalid(f"numbers of {where}", "4 or 5", len(meta))
    cache = cls(max_size=numbers[1], keep=numbers[0])
    cache.keys, cache.values = _pair(state, where)
    cache.offset, cache._idx = numbers[2:]
    return cache


def _chunked(cls: Any, state: Any, meta: list[str], where: str) -> Any:
    chunk, start = _integers(meta, 2, where)
    cache = cls(chunk_size=chunk)
    cache.keys, cache.values = _pair(state, where)
    cache.start_position = start
    # With rows dropped, the buffer may end in head room; until the position is known, no row counts.
    cache.offset = int(cache.keys.shape[2]) if start == 0 else -1
    return cache


def _arrays(cls: Any, state: Any, meta: list[str], where: str) -> Any:
    _require_no_numbers(meta, where)
    slots: Any = state
    rest: tuple[Any, Any] = (None, None)
    if isinstance(state, list) and len(state) == 3 and isinstance(state[0], list):
        slots, rest = state[0], (state[1], state[2])
    if not isinstance(slots, list) or not slots or not all(isinstance(slot, mx.array) for slot in slots):
        raise _invalid(f"state of {where}", "arrays", _shown(state))
    cache = cls(len(slots))
    cache.cache = list(slots)
    for name, value in zip(("left_padding", "lengths"), rest, strict=True):
        setattr(cache, name, value if isinstance(value, mx.array) and value.size else None)
    return cache


_MAKERS: Final = {
    "KVCache": _plain, "ConcatenateKVCache": _plain, "QuantizedKVCache": _quantized, "RotatingKVCache": _rotating,
    "ChunkedKVCache": _chunked, "ArraysCache": _arrays,
}  # fmt: skip


def _list(state: Any, meta: Any, template: Any, where: str) -> Any:
    from mlx_lm.models.cache import CacheList

    if not isinstance(state, list):
        raise _invalid(f"state of {where}", "a list", _shown(state))
    found = meta if isinstance(meta, list) else []
    if len(found) == 2 and all(isinstance(part, list) for part in found):
        parts = _children(state, found[0], found[1], where)
    elif found and str(found[0]).isdecimal():
        parts = list(_counted(state, _texts(found, where), where))
    else:
        parts = list(_as_template(state, template, where))
    inner = [None] * len(parts) if template is None else list(getattr(template, "caches", ()))
    if len(inner) != len(parts) or not parts:
        raise _invalid(f"children of {where}", len(inner), len(parts))
    return CacheList(*(
        _revive(*part, child, f"{where}.{index}") for index, (part, child) in enumerate(zip(parts, inner, strict=True))
    ))  # fmt: skip


def _children(state: list[Any], names: list[Any], metas: list[Any], where: str) -> list[tuple[str, Any, Any]]:
    """Children as 0.31 nests them."""
    if not len(state) == len(names) == len(metas):
        raise _invalid(f"children of {where}", f"{len(names)} states and meta states", [len(state), len(metas)])
    return [(str(names[at]), state[at], metas[at]) for at in range(len(names))]


def _counted(state: list[Any], meta: list[str], where: str) -> Iterator[tuple[str, Any, Any]]:
    """Children as mlx-swift-lm writes them: how many; for each its class, how many arrays and numbers, the numbers."""
    rest, at = meta[1:], 0
    for _ in range(_integers(meta[:1], 1, where)[0]):
        if len(rest) < 3:
            raise _invalid(f"meta state of {where}", "a class and two counts for each child", len(rest))
        arrays, numbers = _integers(rest[1:3], 2, where)
        yield rest[0], state[at : at + arrays], rest[3 : 3 + numbers]
        rest, at = rest[3 + numbers :], at + arrays
    if rest or at != len(state):
        raise _invalid(f"children of {where}", f"{len(state)} arrays", at)


def _as_template(state: list[Any], template: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Children as up to 0.30: arrays in a row, and which class they are of only the model knows."""
    children = getattr(template, "caches", None)
    if not children:
        raise fail(
            "CACHE_FILE_INVALID", f"prompt-cache file: {where} is a list that does not name its children",
            fix="Name the model: its own caches tell which ones they are.",
        )  # fmt: skip
    at = 0
    for child in children:
        name = type(child).__name__
        if name not in ("KVCache", "ArraysCache"):
            raise _invalid(f"{where} holds a {name}, whose position such a file does not have")
        count = len(child.cache) if name == "ArraysCache" else 2
        yield name, state[at : at + count], ""
        at += count
    if at != len(state):
        raise _invalid(f"arrays of {where}", at, len(state))


def _place_chunks(caches: Sequence[Any]) -> None:
    """Give chunks that have dropped rows the position of the other layers."""
    chunks = [cache for cache in caches if type(cache).__name__ == "ChunkedKVCache" and cache.offset < 0]
    if not chunks:
        return
    offsets = {cache.offset for cache in caches if getattr(cache, "offset", -1) >= 0}
    if len(offsets) != 1:
        raise _invalid("the position of a chunk that has dropped rows", "one, told by other layers", sorted(offsets))
    for cache in chunks:
        cache.offset = next(iter(offsets))


def _pair(state: Any, where: str) -> tuple[mx.array, mx.array]:
    if not (isinstance(state, list) and len(state) == 2 and all(_is_rows(array) for array in state)):
        raise _invalid(f"state of {where}", "keys and values of [1, heads, rows, size]", _shown(state))
    return state[0], state[1]


def _sides(state: Any, where: str) -> list[tuple[mx.array, ...]]:
    if isinstance(state, list) and len(state) in (4, 6):  # mlx-swift-lm writes them in a row
        state = [state[: len(state) // 2], state[len(state) // 2 :]]
    sides = state if isinstance(state, list) and len(state) == 2 else []
    if not sides or not all(
        isinstance(side, list) and len(side) in _SIDE and all(_is_rows(array) for array in side) for side in sides
    ):
        raise _invalid(f"state of {where}", "words, scales and biases of keys and values", _shown(state))
    return [tuple(side) for side in sides]


def _is_rows(value: Any) -> bool:
    return isinstance(value, mx.array) and value.ndim == 4


def _texts(meta: Any, where: str) -> list[str]:
    if meta in ("", {}, [""], None):
        return []
    if not (isinstance(meta, list) and all(isinstance(text, str) for text in meta)):
        raise _invalid(f"meta state of {where}", "texts", _shown(meta))
    return meta


def _integers(texts: list[str], count: int, where: str) -> list[int]:
    if len(texts) != count or not all(t.isdecimal() and t.isascii() and int(t) <= MAX_TOKENS for t in texts):
        raise _invalid(f"meta state of {where}", f"{count} numbers", [text[:20] for text in texts[:8]])
    return [int(text) for text in texts]


def _require_no_numbers(meta: list[str], where: str) -> None:
    if meta:
        raise _invalid(f"numbers of {where}", 0, len(meta))


def _shown(value: Any) -> Any:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else str(value)[:40]


def _invalid(what: str, expected: Any = None, found: Any = None) -> KVStoreError:
    return fail(
        "CACHE_FILE_INVALID", f"prompt-cache file: {what}", expected=expected, found=found,
        fix="Write it again with mlx_lm.cache_prompt, or put the prompt itself.",
    )  # fmt: skip

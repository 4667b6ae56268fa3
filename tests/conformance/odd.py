"""Documents with one place that is gone, or that holds something odd."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**64, 0.5, "", "x", "x" * 300, "\x00", [], {}, [[]], ["x"], {"a": 1}, [None],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutants(document: Any) -> Iterator[Any]:
    """The document with each of its places taken away, or something odd in it."""
    yield from ODD
    for path in places(document):
        for odd in (..., *ODD):
            changed = copy.deepcopy(document)
            node = changed
            for step in path[:-1]:
                node = node[step]
            if odd is ...:
                del node[path[-1]]
            else:
                node[path[-1]] = odd
            yield changed

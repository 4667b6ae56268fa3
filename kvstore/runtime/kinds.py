"""Live caches as records, as zero-copy rows, and back again, whatever their classes.

What each class needs is in its handler (``registry``, ``kinds_*``);
here whole caches are walked, lists of caches included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.layers import LayerRecord
from kvstore.runtime.registry import (
    DTYPE_NAMES,
    DTYPES,
    UINTS,
    Continuation,
    KindHandler,
    Placement,
    Source,
    handler_for_class,
    handler_for_kind,
    register_kind,
)
from kvstore.runtime.rows import Rows

__all__ = [
    "DTYPES", "KindHandler", "Placement", "Source", "arrays_of", "describe", "evaluate", "handler_for_class",
    "handler_for_kind", "objects", "place", "register_kind", "restore", "views",
]  # fmt: skip


def describe(caches: Sequence[Any]) -> tuple[LayerRecord, ...]:
    """The layer records of live caches, lazy or not; nothing is evaluated.

    Raises:
        UnsupportedError: CACHE_CLASS_UNKNOWN, DTYPE_UNSUPPORTED.
        InvalidError: CACHE_INCONSISTENT, CACHE_BATCHED.
    """
    return tuple(_describe(cache, str(index)) for index, cache in enumerate(caches))


def _describe(cache: Any, path: str) -> LayerRecord:
    where = f"layers[{path}]"
    handler = handler_for_class(type(cache), where)
    children = handler.children(cache)
    if handler.kind == "list":
        records = tuple(_describe(child, f"{path}.{index}") for index, child in enumerate(children))
        return LayerRecord("list", MappingProxyType({}), MappingProxyType({}), records)
    sources = _sources(handler, cache, where)
    scalars = handler.scalars(cache)
    return LayerRecord(
        handler.kind,
        MappingProxyType({name: scalars[name] for name in sorted(scalars)}),
        MappingProxyType({role: source.record for role, source in sources.items()}),
    )


def _sources(handler: KindHandler, cache: Any, where: str) -> dict[str, Source]:
    """A handler's tensors in the order in which the format lists roles, each proved to be an array it can store."""
    found = handler.sources(cache, where)
    for role, source in found.items():
        if source.array.dtype not in DTYPE_NAMES:
            raise fail("DTYPE_UNSUPPORTED", f"{where}.{role}", expected=sorted(DTYPES), found=str(source.array.dtype))
    by_number = handler.kind == "state"  # slot.10 after slot.9
    return dict(sorted(found.items(), key=lambda item: (len(item[0]) if by_number else 0, item[0])))


def objects(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf cache with its path (``3``, ``3.0``), as ``format.layers.leaves`` walks records."""
    for index, cache in enumerate(caches):
        handler = handler_for_class(type(cache), f"layers[{prefix}{index}]")
        if handler.kind == "list":
            yield from objects(handler.children(cache), f"{prefix}{index}.")
        else:
            yield f"{prefix}{index}", cache


def views(caches: Sequence[Any]) -> dict[str, dict[str, Rows]]:
    """Zero-copy rows of every tensor, by path and role. Evaluates the caches, on this thread.

    MLX streams belong to threads, so whoever hands these views to workers hands them plain memory.

    Raises:
        InvalidError: as :func:`describe`, CACHE_INCONSISTENT also where the arrays cannot be evaluated here.
    """
    found = [
        (path, role, source, source.array.view(UINTS[source.array.dtype.size]))
        for path, cache in objects(caches)
        for role, source in _sources(handler_for_class(type(cache)), cache, f"layers[{path}]").items()
    ]
    evaluate([bits for *_, bits in found])
    result: dict[str, dict[str, Rows]] = {path: {} for path, _ in objects(caches)}
    for path, role, source, bits in found:
        result[path][role] = Rows(np.asarray(bits), source.axis, source.ranges)
    for path, cache in objects(caches):
        handler_for_class(type(cache)).require_whole(cache, result[path], f"layers[{path}]")
    return result


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of live caches, head room included. ``state`` would do, were it there before the first token."""
    return [
        source.array
        for path, cache in objects(caches)
        for source in _sources(handler_for_class(type(cache)), cache, f"layers[{path}]").values()
    ]


def evaluate(arrays: list[mx.array]) -> None:
    """Evaluate, and say what to do where MLX cannot on this thread."""
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        raise fail(
            "CACHE_INCONSISTENT", f"the cache's arrays cannot be evaluated on this thread ({error})",
            fix="Evaluate the cache on the thread that made it, then put it.",
        ) from error  # fmt: skip


def continuation_of(caches: Sequence[Any]) -> tuple[tuple[str, int | str], ...]:
    """What beside the records decides how the caches go on, ascending by name; mostly nothing.

    Raises:
        InvalidError: CACHE_INCONSISTENT where layers say different things.
    """
    said: dict[KindHandler, Continuation] = {}
    for path, cache in objects(caches):
        handler = handler_for_class(type(cache))
        if handler.sources(cache, f"layers[{path}]"):
            mine = dict(handler.continuation(cache))
            first = said.setdefault(handler, mine)
            if first != mine:
                raise fail("CACHE_INCONSISTENT", f"layers[{path}]: buffers", expected=dict(first), found=mine)
    return tuple(sorted((name, value) for each in said.values() for name, value in each.items()))


def place(record: LayerRecord, template: Any = None, continuation: Continuation = MappingProxyType({})) -> Placement:
    """Where a leaf record's rows go in new buffers; see :class:`Placement`."""
    return _handler(record, template).room(record, continuation)


def restore(
    records: Sequence[LayerRecord], arrays: Mapping[str, Mapping[str, mx.array]], templates: Sequence[Any] | None = None
) -> list[Any]:
    """Live caches from records and filled arrays.

    Args:
        arrays: By leaf path and role, of the dtypes of the records.
        templates: The receiving model's own (empty or lazy) caches, whose classes are restored.
    """
    return [
        _restore(record, str(index), arrays, None if templates is None else templates[index])
        for index, record in enumerate(records)
    ]


def _restore(record: LayerRecord, path: str, arrays: Mapping[str, Mapping[str, mx.array]], template: Any) -> Any:
    handler = _handler(record, template)
    inner = handler.children(template) if template is not None and record.kind == "list" else None
    children = [
        _restore(child, f"{path}.{index}", arrays, None if inner is None else inner[index])
        for index, child in enumerate(record.children)
    ]
    return handler.restore(record, arrays.get(path, {}), children)


def _handler(record: LayerRecord, template: Any) -> KindHandler:
    """The handler of the receiving object's class where that holds this kind, else the kind's first."""
    if template is not None:
        try:
            handler = handler_for_class(type(template))
        except KVStoreError:
            return handler_for_kind(record.kind)
        if handler.kind == record.kind:
            return handler
    return handler_for_kind(record.kind)

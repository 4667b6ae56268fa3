"""The registry that joins the format's kinds to live cache classes.

A class is looked up exactly (``type(cache) is cls``): a subclass may keep state that its
parent's handler knows nothing of, so it is refused until someone registers it. The
built-in handlers are in ``kinds_kv`` and ``kinds_state``; :func:`register_kind` adds one.

A handler never evaluates anything: it reads shapes and Python integers, so the same code
describes a cache with gigabytes in it and a lazy one that no kernel has touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as memo
from types import MappingProxyType
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.layers import KINDS, LayerRecord, Scalar, TensorRecord
from kvstore.runtime.rows import Ranges, Rows

__all__ = [
    "DTYPES", "KindHandler", "Placement", "Source", "describe", "handler_for_class", "handler_for_kind", "objects",
    "place", "register_kind", "restore", "views",
]  # fmt: skip

DTYPES: Final[Mapping[str, mx.Dtype]] = MappingProxyType({
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "I16": mx.int16, "U16": mx.uint16, "F16": mx.float16,
    "BF16": mx.bfloat16, "I32": mx.int32, "U32": mx.uint32, "F32": mx.float32, "C64": mx.complex64,
    "I64": mx.int64, "U64": mx.uint64,
})  # fmt: skip
"""The format's dtypes that MLX has (it has no F64 buffers on all devices, so F64 is not among them)."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_UINTS: Final = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_BATCH_CLASSES: Final = frozenset({"BatchKVCache", "BatchRotatingKVCache"})


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a live cache: the array, its token axis, and its stored rows (see :class:`Rows`)."""

    array: mx.array
    axis: int | None = None
    ranges: Ranges = ()

    @property
    def record(self) -> TensorRecord:
        """Dtype and logical shape."""
        shape = tuple(self.array.shape)
        if self.axis is not None:
            rows = sum(stop - start for start, stop in self.ranges)
            shape = (*shape[: self.axis], rows, *shape[self.axis + 1 :])
        return TensorRecord(_NAMES[self.array.dtype], shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where stored rows go in new buffers.

    Attributes:
        capacity: Rows of the buffers, head room included; None where the tensors have no token axis.
        ranges: Place of each stored row, in stored order.
    """

    capacity: int | None
    ranges: Ranges = ()


class KindHandler(ABC):
    """How one cache class is read and rebuilt. Subclass it and call :func:`register_kind`.

    Attributes:
        kind: The format's kind, a key of :data:`kvstore.format.layers.KINDS`.
        step: Rows by which the class grows its buffers.
    """

    kind: ClassVar[str]
    step: ClassVar[int] = 256

    @abstractmethod
    def scalars(self, cache: Any) -> dict[str, Scalar]:
        """The kind's scalars, as the format names them."""

    @abstractmethod
    def sources(self, cache: Any, where: str) -> dict[str, Source]:
        """The tensors by role; empty where the cache was never written.

        Raises:
            InvalidError: CACHE_INCONSISTENT for a state that cannot be continued, CACHE_BATCHED.
        """

    @abstractmethod
    def restore(self, record: LayerRecord, arrays: Mapping[str, mx.array], children: Sequence[Any]) -> Any:
        """The live object for ``record``.

        Args:
            record: The state; its offset is the position that is restored.
            arrays: By role, of the shapes that :meth:`place` led to; the object owns them from now on.
            children: Restored children of a list.
        """

    def children(self, cache: Any) -> Sequence[Any]:
        """The caches within a list."""
        del cache
        return ()

    def place(self, record: LayerRecord) -> Placement:
        """Room for the rows and for at least one more, so that the next token copies nothing."""
        rows = record.rows
        return Placement((rows // self.step + 1) * self.step, ((0, rows),))


@dataclass(slots=True)
class _Registry:
    by_class: dict[type, KindHandler] = field(default_factory=dict)
    by_kind: dict[str, KindHandler] = field(default_factory=dict)


_registry: Final = _Registry()


def register_kind(cls: type, handler: KindHandler) -> None:
    """Teach kvstore a cache class.

    The first handler of a kind also restores entries whose receiving model says nothing of
    the class. Registering a class again replaces its handler.

    Raises:
        UsageError: USAGE, where the format has no such kind.
    """
    _load_builtin()
    _register(cls, handler)


def _register(cls: type, handler: KindHandler) -> None:
    if handler.kind not in KINDS:
        raise fail("USAGE", f"the handler for {cls.__qualname__}", expected=sorted(KINDS), found=handler.kind)
    _registry.by_class[cls] = handler
    _registry.by_kind.setdefault(handler.kind, handler)


@memo
def _load_builtin() -> None:
    """Register the classes of mlx_lm on first use: it takes a second to import, and whoever has a cache has done it."""
    from kvstore.runtime import kinds_kv, kinds_state

    for cls, handler in (*kinds_kv.builtin(), *kinds_state.builtin()):
        _register(cls, handler)


def handler_for_class(cls: type, where: str = "cache") -> KindHandler:
    """The handler of exactly this class.

    Raises:
        UnsupportedError: CACHE_CLASS_UNKNOWN.
        InvalidError: CACHE_BATCHED for the batch classes of mlx_lm.
    """
    _load_builtin()
    handler = _registry.by_class.get(cls)
    if handler is not None:
        return handler
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__name__ in _BATCH_CLASSES:
        raise fail(
            "CACHE_BATCHED", f"{where} is a {name}", expected="one sequence", found="a batch",
            fix="Take each sequence out with its extract(index), and put them one by one.",
        )  # fmt: skip
    raise fail(
        "CACHE_CLASS_UNKNOWN", f"{where} is a {name}, which has no registered kind",
        fix="Write a handler for it and call kvstore.runtime.register_kind(cls, handler).",
        cache_class=name, known=sorted(c.__qualname__ for c in _registry.by_class),
    )  # fmt: skip


def handler_for_kind(kind: str) -> KindHandler:
    """The handler that restores a kind where no receiving object says which class.

    Raises:
        UnsupportedError: KIND_UNSUPPORTED.
    """
    _load_builtin()
    handler = _registry.by_kind.get(kind)
    if handler is None:
        raise fail(
            "KIND_UNSUPPORTED", "no cache class is registered for a layer's kind", expected=sorted(_registry.by_kind),
            found=kind, fix="Register one with kvstore.runtime.register_kind(cls, handler).",
        )  # fmt: skip
    return handler


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
        if source.array.dtype not in _NAMES:
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
        InvalidError: as :func:`describe`; MATERIALIZE_FAILED where the arrays cannot be evaluated here.
    """
    found = [
        (path, role, source, source.array.view(_UINTS[source.array.dtype.size]))
        for path, cache in objects(caches)
        for role, source in _sources(handler_for_class(type(cache)), cache, f"layers[{path}]").items()
    ]
    evaluate([bits for *_, bits in found])
    result: dict[str, dict[str, Rows]] = {path: {} for path, _ in objects(caches)}
    for path, role, source, bits in found:
        result[path][role] = Rows(np.asarray(bits), source.axis, source.ranges)
    return result


def evaluate(arrays: list[mx.array]) -> None:
    """Evaluate, and say what to do where MLX cannot on this thread."""
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        raise fail(
            "CACHE_INCONSISTENT", f"the cache's arrays cannot be evaluated on this thread ({error})",
            fix="Evaluate the cache on the thread that made it, then put it.",
        ) from error  # fmt: skip


def place(record: LayerRecord, template: Any = None) -> Placement:
    """Where a leaf record's rows go in new buffers; see :class:`Placement`."""
    return _handler(record, template).place(record)


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

"""Which live cache class holds which kind of the format: the registry, and what a handler must do.

A class is looked up exactly (``type(cache) is cls``): a subclass may keep state that its
parent's handler knows nothing of, so it is refused until someone registers it. The
built-in handlers are in the modules ``kinds_*``; :func:`register_kind` adds one.

A handler never evaluates anything: it reads shapes and Python integers, so the same code
describes a cache with gigabytes in it and a lazy one that no kernel has touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as memo
from types import MappingProxyType
from typing import Any, ClassVar, Final

import mlx.core as mx

from kvstore.errors import fail
from kvstore.format.kinds import KINDS
from kvstore.format.layers import LayerRecord, Scalar, TensorRecord
from kvstore.runtime.rows import Ranges, Rows

__all__ = [
    "DTYPES", "DTYPE_NAMES", "UINTS", "Continuation", "KindHandler", "Placement", "Source", "handler_for_class",
    "handler_for_kind", "register_kind",
]  # fmt: skip

DTYPES: Final[Mapping[str, mx.Dtype]] = MappingProxyType({
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "I16": mx.int16, "U16": mx.uint16, "F16": mx.float16,
    "BF16": mx.bfloat16, "I32": mx.int32, "U32": mx.uint32, "F32": mx.float32, "C64": mx.complex64,
    "I64": mx.int64, "U64": mx.uint64,
})  # fmt: skip
"""The format's dtypes that MLX has (it has no F64 buffers on all devices, so F64 is not among them)."""
DTYPE_NAMES: Final[Mapping[mx.Dtype, str]] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
UINTS: Final[Mapping[int, mx.Dtype]] = MappingProxyType({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64})
"""By width in bytes, the dtype that carries bits as they are: numpy has no bfloat16."""
Continuation = Mapping[str, int | str]
"""Scalars that a class needs to go on and that no record has a place for, by name; of the entry as a whole."""
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
        return TensorRecord(DTYPE_NAMES[self.array.dtype], shape)


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
        kind: The format's kind, a key of :data:`kvstore.format.kinds.KINDS`.
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

    def require_whole(self, cache: Any, rows: Mapping[str, Rows], where: str) -> None:
        """Refuse evaluated rows that no forward pass can have left; most classes have no such state.

        Raises:
            InvalidError: CACHE_INCONSISTENT.
        """
        del cache, rows, where

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

    def continuation(self, cache: Any) -> Continuation:
        """What else of the object decides how it goes on; nothing for most classes."""
        del cache
        return {}

    def room(self, record: LayerRecord, continuation: Continuation) -> Placement:
        """:meth:`place`, for classes that a continuation says something to; empty where the state was cut."""
        del continuation
        return self.place(record)


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
    _load_last()
    _register(cls, handler)


def _register(cls: type, handler: KindHandler) -> None:
    if handler.kind not in KINDS:
        raise fail("USAGE", f"the handler for {cls.__qualname__}", expected=sorted(KINDS), found=handler.kind)
    _registry.by_class[cls] = handler
    _registry.by_kind.setdefault(handler.kind, handler)


@memo
def _load_builtin() -> None:
    """Register mlx_lm's classes and ours on first use: it takes a second to import, and whoever has a cache did it."""
    from kvstore.runtime import kinds_kv, kinds_sparse, kinds_state

    for module in (kinds_kv, kinds_state, kinds_sparse):
        for cls, handler in module.builtin():
            _register(cls, handler)


@memo
def _load_last() -> None:
    """Register a class that lies in its model's module, which few need and all would have to wait for."""
    from kvstore.runtime import kinds_compressed

    for cls, handler in kinds_compressed.builtin():
        _register(cls, handler)


def handler_for_class(cls: type, where: str = "cache") -> KindHandler:
    """The handler of exactly this class.

    Raises:
        UnsupportedError: CACHE_CLASS_UNKNOWN.
        InvalidError: CACHE_BATCHED for the batch classes of mlx_lm.
    """
    _load_builtin()
    if cls not in _registry.by_class:
        _load_last()
    handler = _registry.by_class.get(cls)
    if handler is not None:
        return handler
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__name__ in _BATCH_CLASSES:
        raise fail(
            "CACHE_BATCHED", f"{where} is a {name}", expected="one sequence", found="a batch",
            fix="Take each sequence out with kvstore.runtime.extract_sequence(cache, index), and put them one by one.",
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
    if kind not in _registry.by_kind:
        _load_last()
    handler = _registry.by_kind.get(kind)
    if handler is None:
        raise fail(
            "KIND_UNSUPPORTED", "no cache class is registered for a layer's kind", expected=sorted(_registry.by_kind),
            found=kind, fix="Register one with kvstore.runtime.register_kind(cls, handler).",
        )  # fmt: skip
    return handler

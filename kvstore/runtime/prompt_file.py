"""Prompt-cache files of mlx_lm, in all shapes that they have had: read without trust, written without residue.

mlx_lm's own loader looks class names up among its module's globals and trusts ``mx.load``,
which accepts offsets that overlap, wrap or leave holes. Here a file is taken apart by
hand: its header is checked before an array is made, a class is used only if a kind is
registered for it, and each scalar has to be what the class needs. Such a file says nothing
of token ids or of weights; whoever imports one vouches for both.

Writing cuts the buffers to the rows that count: ``save_prompt_cache`` writes them whole,
with trimmed tokens and head room in them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from kvstore.errors import KVStoreError, fail
from kvstore.format.foreign_tensors import (
    LENGTH_BYTES,
    ForeignHeader,
    ForeignTensor,
    header_length,
    parse_foreign_header,
)
from kvstore.format.tensors import uint_dtype
from kvstore.runtime.kinds import DTYPES, describe, handler_for_class
from kvstore.runtime.prompt_old import revive_old
from kvstore.runtime.prompt_shapes import PromptShape, flattened, installed_shape
from kvstore.store.fs import open_plain

__all__ = ["PromptFile", "read_prompt_file", "write_prompt_file"]

_SUFFIX: Final = ".safetensors"
_MAX_DEPTH: Final = 16
_PARTS: Final = 3
_SHOWN_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class PromptFile:
    """What a prompt-cache file holds: live caches, and the writer's metadata (``model``, ``tokenizer_config``)."""

    cache: list[Any]
    metadata: Mapping[str, str]


def read_prompt_file(path: Path, templates: Sequence[Any] | None = None) -> PromptFile:
    """Read a file that any release of mlx_lm since 0.21 wrote with ``save_prompt_cache``, or mlx-swift-lm.

    Args:
        templates: The model's own caches, which must be as many. Files up to 0.30 need them for layers of several
            caches, whose classes they do not name.

    Raises:
        InvalidError: CACHE_FILE_INVALID; CACHE_INCONSISTENT, CACHE_BATCHED.
        UnsupportedError: CACHE_CLASS_UNKNOWN, DTYPE_UNSUPPORTED.
    """
    with _mapped(path) as data:
        header, start = _header(data)
        arrays = {tensor.name: _array(tensor, data, start) for tensor in header.tensors}
    envelope = _envelope(header.metadata)
    states = _unflatten({**arrays, **_scalars(arrays, envelope.kinds)}, "the states")
    if not isinstance(states, list) or len(states) != len(envelope.classes):
        raise _invalid("the states", f"{len(envelope.classes)}, one for each class", _length(states))
    if envelope.metas is not None:
        cache = revive_old(envelope.classes, states, envelope.metas, templates)
    else:
        pairs = zip(envelope.classes, states, strict=True)
        cache = [_revive(name, state, f"layers[{index}]") for index, (name, state) in enumerate(pairs)]
    if templates is not None and len(templates) != len(cache):
        raise _invalid("the number of caches", f"{len(templates)}, as the model makes", len(cache))
    describe(cache)
    return PromptFile(cache, envelope.metadata)


def write_prompt_file(
    path: Path, cache: Sequence[Any], metadata: Mapping[str, str], *, shape: PromptShape | None = None
) -> int:
    """Write caches as ``mlx_lm.generate --prompt-cache-file`` reads them; returns the file's size in bytes.

    The file appears under its name only when it is whole.

    Args:
        metadata: For ``mlx_lm.generate``: ``model``, exactly as it will be given there, and ``tokenizer_config``.
        shape: Of which releases; by default what the installed mlx_lm reads.

    Raises:
        UsageError: USAGE, where the name does not end in ``.safetensors`` (mlx_lm tells formats by it), or cannot be
            written.
        UnsupportedError: CACHE_FILE_EXPORT, for classes that are not mlx_lm's, and state that the shape cannot hold.
    """
    if path.suffix != _SUFFIX:
        raise fail("USAGE", "name of the prompt-cache file", expected=f"a name that ends in {_SUFFIX}", found=path.name)
    arrays, texts = flattened(cache, metadata, shape or installed_shape())
    describe(cache)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{_SUFFIX}")
    try:
        mx.save_safetensors(str(temporary), arrays, texts)
        temporary.replace(path)
    except (RuntimeError, OSError) as error:
        raise fail("USAGE", f"{path} cannot be written: {error}", fix="Name a file that can be.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    """The file's bytes. Arrays are copied out, so nothing outlives the mapping."""
    try:
        with os.fdopen(open_plain(path), "rb") as file, _map(file.fileno()) as mapping:
            view = memoryview(mapping)
            try:
                yield view
            finally:
                view.release()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise fail("CACHE_FILE_INVALID", f"{path.name} cannot be read: {why}", fix="Check the path.") from error


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)


def _header(data: memoryview) -> tuple[ForeignHeader, int]:
    """The header, and where the data begins; the data fills the rest of the file."""
    start = LENGTH_BYTES + header_length(bytes(data[:LENGTH_BYTES]))
    if start > len(data):
        raise _invalid("the header's length", f"at most {len(data) - LENGTH_BYTES}", start - LENGTH_BYTES)
    header = parse_foreign_header(bytes(data[LENGTH_BYTES:start]))
    if header.data_bytes != len(data) - start:
        raise _invalid("bytes of tensor data", header.data_bytes, len(data) - start)
    for tensor in header.tensors:
        if tensor.record.dtype not in DTYPES:
            raise fail("DTYPE_UNSUPPORTED", tensor.name, expected=sorted(DTYPES), found=tensor.record.dtype)
    return header, start


def _array(tensor: ForeignTensor, data: memoryview, start: int) -> mx.array:
    """One tensor, copied out of the file bit by bit."""
    dtype = tensor.record.dtype
    bits = np.frombuffer(data[start + tensor.begin : start + tensor.end], uint_dtype(dtype))
    return mx.array(bits.reshape(tensor.record.shape).copy()).view(DTYPES[dtype])


@dataclass(frozen=True, slots=True)
class _Envelope:
    """What the metadata says: the writer's own, class names, which arrays are scalars; meta states before 0.32."""

    metadata: dict[str, str]
    classes: list[str]
    kinds: list[tuple[str, str]]
    metas: list[Any] | None = None


def _envelope(texts: Mapping[str, str]) -> _Envelope:
    parts = _unflatten(texts, "metadata")
    if not (isinstance(parts, list) and len(parts) in (2, 3)):
        raise _invalid("metadata", "3 parts", _length(parts))
    if len(parts) == 2:  # an empty dict of the writer's own leaves no trace
        parts = [{}, *parts]
    # The list of scalars begins with an empty text; before 0.32 the last part was that of class names.
    return _now(*parts) if texts.get("2.0") == "" else _before(*parts)


def _now(own: Any, classes: Any, scalars: Any) -> _Envelope:
    own = own or {}
    if not (isinstance(own, dict) and isinstance(classes, list) and isinstance(scalars, list)):
        raise _invalid("metadata", "a mapping and two lists", [type(p).__name__ for p in (own, classes, scalars)])
    kinds = [(str(item[0]), str(item[1])) for item in scalars[1:] if isinstance(item, list) and len(item) == 2]
    if len(kinds) != len(scalars) - 1 or not classes or not all(isinstance(c, str) for c in classes):
        raise _invalid("metadata", "class names, and pairs of a place and a kind", scalars)
    return _Envelope(own, classes, kinds)


def _before(metas: Any, own: Any, classes: Any) -> _Envelope:
    own, metas = own or {}, metas or []
    if not (isinstance(metas, list) and isinstance(own, dict) and isinstance(classes, list)):
        raise _invalid("metadata", "a list, a mapping and a list", [type(p).__name__ for p in (metas, own, classes)])
    if not classes or not all(isinstance(c, str) for c in classes) or len(metas) > len(classes):
        raise _invalid("metadata", "a class name for each meta state", f"{len(classes)} for {len(metas)}")
    # mlx-swift-lm leaves out meta states that hold nothing.
    return _Envelope(own, classes, [], [*metas, *[""] * (len(classes) - len(metas))])


def _scalars(arrays: Mapping[str, mx.array], kinds: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {place: _scalar(arrays, place, kind) for place, kind in kinds}


def _scalar(arrays: Mapping[str, mx.array], place: str, kind: str) -> Any:
    array = arrays.get(place)
    if array is None:
        raise _invalid(f"scalar {place}", "an array", None)
    if kind == "none" and array.size == 0:
        return None
    if kind == "scalar" and array.size == 1:
        return array.item()
    if kind == "string" and array.ndim == 1 and array.size <= 255:
        return "".join(chr(number & 0xFFFF) for number in np.asarray(array).astype(np.int64).tolist())
    raise _invalid(f"scalar {place}", "one of scalar, string, none", f"{kind} of shape {list(array.shape)}")


def _revive(name: str, state: Any, where: str) -> Any:
    """An object of the class of that name, where a kind is registered for the class; children first."""
    from mlx_lm.models import cache as module

    cls = vars(module).get(name) if isinstance(name, str) else None
    if not (isinstance(cls, type) and cls.__module__ == module.__name__):
        raise fail(
            "CACHE_CLASS_UNKNOWN", f"{where} is of class {name!r}, which mlx_lm.models.cache does not have",
            fix="Import it with the mlx_lm release that wrote it, and put the cache from there.",
        )  # fmt: skip
    kind = handler_for_class(cls, where).kind
    if kind == "list":
        pairs = state if isinstance(state, list) else []
        if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise _invalid(f"state of {where}", "pairs of a state and a class name", _length(state))
        return cls(*(_revive(child, inner, f"{where}.{i}") for i, (inner, child) in enumerate(pairs)))
    names = _STATE[kind]
    if not (isinstance(state, list) and len(state) == len(names)):
        raise _invalid(f"state of {where} ({name})", f"{len(names)} values", _length(state))
    return _with(cls, kind, dict(zip(names, state, strict=True)), where)


_STATE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    "kv": ("keys", "values", "offset"),
    "kv-concatenated": ("keys", "values"),
    "kv-quantized": ("keys", "values", "offset", "group_size", "bits"),
    "kv-rotating": ("keys", "values", "offset", "keep", "max_size", "_idx"),
    "kv-chunked": ("keys", "values", "offset", "chunk_size", "start_position"),
    "state": ("cache", "left_padding", "lengths"),
})  # fmt: skip
"""What the state of a class of mlx_lm 0.32 holds, in its order."""


def _with(cls: Any, kind: str, state: dict[str, Any], where: str) -> Any:
    """An object with these attributes, made without a word of the file's being believed."""
    cache = cls.__new__(cls)
    for name, value in state.items():
        if name in ("keys", "values"):
            known = _is_array_or_none(value) or (isinstance(value, list) and all(map(_is_array_or_none, value)))
        elif kind == "state":
            known = _is_array_or_none(value) or (name == "cache" and isinstance(value, list) and bool(value))
        else:
            known = type(value) is int and value >= 0
        if not known:
            raise _invalid(f"{name} of {where}", "an array, or a count where it is one", _length(value))
        setattr(cache, name, tuple(value) if kind == "kv-quantized" and isinstance(value, list) else value)
    if kind == "kv-concatenated":
        cache.offset = 0 if state["keys"] is None else int(state["keys"].shape[-2])
    return cache


def _is_array_or_none(value: Any) -> bool:
    return value is None or isinstance(value, mx.array)


def _unflatten(flat: Mapping[str, Any], what: str) -> Any:
    # A part that holds nothing leaves no trace, so a file's three parts may come to one text.
    places = max(len(flat), _PARTS)
    for key in flat:
        _check_place(key, places, what)
    try:
        return tree_unflatten(list(flat.items()))
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, KVStoreError) as error:
        raise _invalid(f"{what} cannot be put together: {str(error)[:80]}") from None


def _check_place(key: str, count: int, what: str) -> None:
    """MLX fills a list up to any index that it is given, so an index must be one that so many values can have."""
    parts = key.split(".")
    numbers = [part for part in parts if _is_index(part)]
    if len(parts) > _MAX_DEPTH or not all(n.isascii() and n.isdigit() and int(n) < count for n in numbers):
        raise _invalid(f"a place in {what}", f"numbers below {count}, at most {_MAX_DEPTH}", key[:_SHOWN_CHARS])


def _is_index(part: str) -> bool:
    """Whether MLX takes it for a number: it asks ``int``, which takes signs, underscores and digits of any script."""
    try:
        int(part)
    except ValueError:
        return False
    return True


def _length(value: Any) -> Any:
    return len(value) if isinstance(value, (list, dict)) else type(value).__name__


def _invalid(what: str, expected: Any = None, found: Any = None) -> KVStoreError:
    return fail(
        "CACHE_FILE_INVALID", f"prompt-cache file: {what}", expected=expected, found=found,
        fix="Write it again with mlx_lm.cache_prompt, or put the prompt itself.",
    )  # fmt: skip

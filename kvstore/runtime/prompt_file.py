"""Prompt-cache files of mlx_lm 0.32: read without trust, written without residue.

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
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map, tree_unflatten

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
from kvstore.store.fs import open_plain

__all__ = ["PromptFile", "read_prompt_file", "write_prompt_file"]

_SUFFIX: Final = ".safetensors"
_MAX_DEPTH: Final = 16
_SHOWN_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class PromptFile:
    """What a prompt-cache file holds: live caches, and the writer's metadata (``model``, ``tokenizer_config``)."""

    cache: list[Any]
    metadata: Mapping[str, str]


def read_prompt_file(path: Path) -> PromptFile:
    """Read a file that ``mlx_lm.models.cache.save_prompt_cache`` wrote.

    Raises:
        InvalidError: CACHE_FILE_INVALID; CACHE_INCONSISTENT, CACHE_BATCHED.
        UnsupportedError: CACHE_CLASS_UNKNOWN, DTYPE_UNSUPPORTED.
    """
    with _mapped(path) as data:
        header, start = _header(data)
        arrays = {tensor.name: _array(tensor, data, start) for tensor in header.tensors}
    metadata, classes, kinds = _envelope(header.metadata)
    states = _unflatten({**arrays, **_scalars(arrays, kinds)}, "the states")
    if not isinstance(states, list) or len(states) != len(classes):
        raise _invalid("the states", f"{len(classes)}, one for each class", _length(states))
    cache = [_revive(name, state, f"layers[{i}]") for i, (name, state) in enumerate(zip(classes, states, strict=True))]
    describe(cache)
    return PromptFile(cache, metadata)


def write_prompt_file(path: Path, cache: Sequence[Any], metadata: Mapping[str, str]) -> int:
    """Write caches as ``mlx_lm.generate --prompt-cache-file`` reads them; returns the file's size in bytes.

    The file appears under its name only when it is whole.

    Raises:
        UsageError: USAGE, where the name does not end in ``.safetensors`` (mlx_lm tells formats by it), or cannot be
            written.
        UnsupportedError: CACHE_FILE_EXPORT, for classes that are not mlx_lm's.
    """
    from mlx_lm.models.cache import save_prompt_cache

    if path.suffix != _SUFFIX:
        raise fail("USAGE", "name of the prompt-cache file", expected=f"a name that ends in {_SUFFIX}", found=path.name)
    trimmed = [_logical(item, str(index)) for index, item in enumerate(cache)]
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{_SUFFIX}")
    try:
        save_prompt_cache(str(temporary), trimmed, dict(metadata))
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
        raise fail("CACHE_FILE_INVALID", f"{path.name} cannot be read: {error}") from error


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


def _envelope(texts: Mapping[str, str]) -> tuple[dict[str, str], list[str], list[tuple[str, str]]]:
    """The three parts of mlx_lm's metadata: the writer's own, class names, and which arrays stand for scalars."""
    parts = _unflatten(texts, "metadata")
    if not (isinstance(parts, list) and len(parts) in (2, 3)):
        raise _invalid("metadata", "3 parts", _length(parts))
    if len(parts) == 2:  # an empty dict of the writer's own leaves no trace
        parts = [{}, *parts]
    own, classes, scalars = parts
    own = own or {}
    if not (isinstance(own, dict) and isinstance(classes, list) and isinstance(scalars, list)):
        raise _invalid("metadata", "a mapping and two lists", [type(p).__name__ for p in parts])
    kinds = [(str(item[0]), str(item[1])) for item in scalars[1:] if isinstance(item, list) and len(item) == 2]
    if len(kinds) != len(scalars) - 1 or not classes or not all(isinstance(c, str) for c in classes):
        raise _invalid("metadata", "class names, and pairs of a place and a kind", scalars)
    return own, classes, kinds


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
    if handler_for_class(cls, where).kind == "list":
        pairs = state if isinstance(state, list) else []
        if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise _invalid(f"state of {where}", "pairs of a state and a class name", _length(state))
        return cls(*(_revive(child, inner, f"{where}.{i}") for i, (inner, child) in enumerate(pairs)))
    try:
        return cls.from_state(state)  # type: ignore[attr-defined]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise _invalid(f"state of {where} ({name}): {str(error)[:120]}") from None


def _logical(cache: Any, path: str) -> Any:
    """A twin of ``cache`` whose buffers hold nothing but its state."""
    from mlx_lm.models import cache as module

    if type(cache).__module__ != module.__name__:
        raise fail(
            "CACHE_FILE_EXPORT", f"layers[{path}] is a {type(cache).__qualname__}", expected="a class of mlx_lm",
            found=type(cache).__module__, fix="Load the entry in a program that knows the class.",
        )  # fmt: skip
    handler = handler_for_class(type(cache), f"layers[{path}]")
    if handler.kind == "list":
        return type(cache)(*(_logical(child, f"{path}.{i}") for i, child in enumerate(cache.caches)))
    rows = _rows(handler.kind, cache)
    if rows is None:
        return cache
    cut = tree_map(lambda array: array[..., :rows, :], (cache.keys, cache.values))
    return type(cache).from_state((*cut, *cache.state[2:]))


def _rows(kind: str, cache: Any) -> int | None:
    """Rows at the front of the buffers that are state; None where all of them are, or where there are none."""
    if kind not in ("kv", "kv-quantized", "kv-chunked", "kv-rotating") or cache.keys is None:
        return None
    if kind == "kv-rotating":
        index: int = cache._idx  # noqa: SLF001 - the class has no other name for it
        return index if index == cache.offset else None
    return int(cache.offset) - (int(cache.start_position) if kind == "kv-chunked" else 0)


def _unflatten(flat: Mapping[str, Any], what: str) -> Any:
    for key in flat:
        _check_place(key, len(flat), what)
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

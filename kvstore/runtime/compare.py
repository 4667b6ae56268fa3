"""Is this live model the one in those files? Two module trees compared, cheaply.

The second model is lazy: a parameter is read from disk only when its bits are
compared, and dropped at once, so the memory needed is about that of one parameter.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from kvstore.errors import KVStoreError, fail

__all__ = ["compare_models", "same_bits"]

_ADAPTER_LEAVES: Final = ("lora_a", "lora_b", "m")
_UINTS: Final = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_PIECE_BYTES: Final = 2**24
_IGNORED: Final = ("_no_grad", "_training")
_Plain = (bool, int, float, str)


def compare_models(
    live: nn.Module, files: nn.Module, *, sample: int | None, untrained: frozenset[str] = frozenset()
) -> int:
    """Prove that ``live`` is the model of the files; returns how many parameters were compared bit by bit.

    Args:
        live: The model in use.
        files: The same model, lazily loaded; its parameters are consumed.
        sample: Parameters to compare beside the first, the last and the adapter's; None for all.
        untrained: Parameters that are random in each of the two and cannot act.

    Raises:
        IncompatibleError: BINDING_MISMATCH.
    """
    _compare_settings(live, files)
    mine, theirs = dict(tree_flatten(live.parameters())), dict(tree_flatten(files.parameters()))
    _compare_tables(mine, theirs)
    names = _sampled([name for name in theirs if name not in untrained], sample)
    # Whatever is not compared is let go, lest evaluating one array keep another alive.
    theirs = {name: theirs[name] for name in names}
    files.update(_nothing(files.parameters()))
    for name in names:
        if not same_bits(mine[name], theirs.pop(name)):
            raise _mismatch(f"parameter {name} has other bits than the files", None, None, parameter=name)
    mx.clear_cache()  # MLX would keep the copies' memory for reuse.
    return len(names)


def _compare_tables(mine: dict[str, mx.array], theirs: dict[str, mx.array]) -> None:
    for name in (*theirs, *mine):
        a, b = theirs.get(name), mine.get(name)
        if a is None or b is None:
            expected, found = ("no such parameter", "one") if a is None else ("a parameter", "none")
            raise _mismatch(f"parameter {name}", expected, found, parameter=name)
        want, have = f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}"
        if want != have:
            raise _mismatch(f"parameter {name}", want, have, parameter=name)


def _sampled(names: list[str], sample: int | None) -> list[str]:
    if sample is None or sample >= len(names):
        return names
    wanted = {name for name in names if name.rpartition(".")[2] in _ADAPTER_LEAVES}
    wanted |= {names[0], names[-1], *secrets.SystemRandom().sample(names, sample)}
    return [name for name in names if name in wanted]


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Bits, not values: a NaN equals itself, and −0 is not 0."""
    if a.size == 0:
        return True
    kind = _UINTS[a.dtype.size]
    left, right = ((array if array.ndim else array.reshape(1)).view(kind) for array in (a, b))
    # In pieces, because comparing makes an array of booleans as long as its operands.
    rows = max(1, _PIECE_BYTES * left.shape[0] // left.nbytes)
    return all(
        bool(mx.array_equal(left[at : at + rows], right[at : at + rows]).item())
        for at in range(0, left.shape[0], rows)
    )


def _compare_settings(live: nn.Module, files: nn.Module) -> None:
    """Classes and settings of all modules: half of what a config says is in no parameter."""
    mine, theirs = dict(live.named_modules()), dict(files.named_modules())
    for name in (*theirs, *mine):
        a, b = theirs.get(name), mine.get(name)
        want, have = _class_name(a), _class_name(b)
        where = f"module {name or '(root)'}"
        if a is None or b is None or want != have:
            raise _mismatch(where, want, have)
        found = dict(_settings(b))
        for key, value in _settings(a):
            # What only one side has, a forward pass may have left there.
            if key in found and not _equal(value, found[key]):
                raise _mismatch(f"{where}, setting {key}", _short(value), _short(found[key]))


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain values, dataclasses of arguments, and private arrays such as rope frequencies, by attribute name."""
    for key, value in (*vars(module).items(), *module.items()):
        if key in _IGNORED or isinstance(value, nn.Module):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from ((f"{key}.{name}", item) for name, item in dataclasses.asdict(value).items())
        elif isinstance(value, mx.array):
            if key.startswith("_"):
                yield key, value
        elif not key.startswith("_") and _is_plain(value):
            yield key, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, _Plain)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return bool(a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b))
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, mx.array) else str(value)[:200]


def _class_name(module: nn.Module | None) -> str:
    return "none" if module is None else f"{type(module).__module__}.{type(module).__qualname__}"


def _nothing(tree: Any) -> Any:
    """The tree with every array replaced by an empty one."""
    if isinstance(tree, dict):
        return {key: _nothing(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_nothing(value) for value in tree]
    return mx.zeros((0,))


def _mismatch(what: str, expected: Any, found: Any, **detail: Any) -> KVStoreError:
    return fail(
        "BINDING_MISMATCH", f"the live model is not that of the files: {what}", expected=expected, found=found,
        fix="Read the identity of the files that the model was loaded from, or load it with kvstore.load_model.",
        **detail,
    )  # fmt: skip

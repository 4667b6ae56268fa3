"""What a model was when it was bound: its settings, and a few bytes of each array.

A put or a load looks at it again each time, so it takes about a millisecond: no array is
read whole. Arrays that were put in another's place are seen by :mod:`kvstore.runtime.binding`;
here it is seen that one and the same array was written to, or that a scale or a rope base,
which are in no array, is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

__all__ = ["Snapshot", "active_dropout"]

_IGNORED: Final = ("_no_grad", "_training")
# None is not among them: it stands for what a forward pass has yet to make.
_PLAIN: Final = (bool, int, float, str)
_KEPT: Final = "_p_1"
"""Attribute of MLX's dropouts: the part that is kept."""
_SPOTS: Final = 4
_SPOT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Settings by module and name, and samples of parameters by name."""

    settings: Mapping[tuple[str, str], Any]
    samples: Mapping[str, bytes]

    @classmethod
    def take(cls, model: nn.Module, parameters: Mapping[str, mx.array]) -> Snapshot:
        """Remember a model whose parameters are evaluated."""
        return cls(dict(_settings(model)), {name: _sample(array) for name, array in parameters.items()})

    def other_setting(self, model: nn.Module) -> str | None:
        """The first setting that is another one now. What a forward pass has added or dropped is none."""
        live = dict(_settings(model))
        for place, value in self.settings.items():
            if place in live and not _same(live[place], value):
                return f"{place[0] or 'the model'}: {place[1]}"
        known = {module for module, _ in self.settings}
        found = {module for module, _ in live}
        return next(iter(sorted(known ^ found)), None)

    def written_to(self, parameters: Mapping[str, mx.array]) -> list[str]:
        """Names of those of the parameters that hold other bytes where it was looked."""
        return [name for name, array in parameters.items() if _sample(array) != self.samples.get(name)]


def active_dropout(model: nn.Module) -> str | None:
    """The first module that zeroes a random part of what goes through it: a dropout of a model that is being trained.

    Training says nothing by itself: it is what a model is made in, and most models compute the same in it.
    """
    if not _any_active(model):
        return None
    return next(path or type(module).__name__ for path, module in _modules(model, "") if _is_active(module))


def _any_active(model: nn.Module) -> bool:
    """As a walk over :func:`_modules`, which also makes their names: asked before every match, put and load."""
    left: list[Any] = [model]
    while left:
        item = left.pop()
        if isinstance(item, nn.Module) and _is_active(item):
            return True
        inner = item if isinstance(item, (list, tuple)) else item.values()
        left += [each for each in inner if isinstance(each, (nn.Module, list, tuple, dict))]
    return False


def _is_active(module: nn.Module) -> bool:
    return bool(vars(module).get(_KEPT, 1) != 1 and module.training)


def _settings(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, module in _modules(model, ""):
        yield (path, "class"), type(module)
        for key, value in (*vars(module).items(), *module.items()):
            if key in _IGNORED:
                continue
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                yield from (((path, f"{key}.{name}"), item) for name, item in vars(value).items() if _is_plain(item))
            elif isinstance(value, mx.array):
                if key.startswith("_"):
                    yield (path, key), _sample(value)
            elif _is_plain(value):
                yield (path, key), value


def _modules(value: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module, as :meth:`named_modules` finds them, in a fifth of its time."""
    if isinstance(value, nn.Module):
        yield path, value
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        return
    for key, item in items:
        if isinstance(item, (nn.Module, list, tuple, dict)):
            yield from _modules(item, f"{path}.{key}" if path else str(key))


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= 256 and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def _same(a: Any, b: Any) -> bool:
    # NaN is itself here.
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _sample(array: mx.array) -> bytes:
    """Dtype, shape, and the bytes at the ends of the array and between."""
    head = f"{array.dtype} {array.shape} ".encode()
    # Arrays are buffers, of any dtype and without a copy; their stub does not say so.
    view = memoryview(array)  # type: ignore[arg-type]
    if not view.c_contiguous or not view.nbytes:
        return head
    data = view.cast("B") if view.ndim else view.cast("B", (view.nbytes,))
    step = max(1, (len(data) - _SPOT_BYTES) // (_SPOTS - 1))
    return head + b"".join(data[at * step : at * step + _SPOT_BYTES] for at in range(_SPOTS))

"""Joining a live model to its identity, and refusing one that has none.

A model object says nothing of where it came from, so a cache made by it proves nothing
either. :func:`load_model` loads a model from the files that the identity was read
from. :func:`bind` takes a model that is already there and compares it with a second,
lazy copy built from those files: every parameter's name, shape and dtype, every
module's class and settings (rope base, scales, windows), and the bits of a sample of
the parameters.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from kvstore.errors import fail
from kvstore.runtime.folder import load_errors
from kvstore.runtime.identity import ADAPTER_WEIGHTS, ModelIdentity
from kvstore.runtime.loading import load_unread, load_whole

if TYPE_CHECKING:
    import mlx.nn as nn

    from kvstore.runtime.snapshot import Snapshot

__all__ = ["DEFAULT_SAMPLE", "BoundModel", "bind", "bind_unread", "identity_of", "load_model", "require_bound"]

_SMALL_BYTES: Final = 2**12
_ABSENT: Final = object()
DEFAULT_SAMPLE: Final = 16
"""Parameters that :func:`bind` compares beside the first, the last and all of the adapter's."""


@dataclass(frozen=True)
class BoundModel:
    """A live model whose identity is known.

    Attributes:
        model: The ``mlx.nn.Module``.
        tokenizer: What mlx-lm made of the tokenizer files, or what the caller gave; may be None.
        identity: The identity of the files that the model was loaded from or compared with.
        evidence: ``loaded`` by kvstore from those files, or ``compared`` with them.
        compared: Parameters whose bits were compared; 0 where kvstore loaded the model.
    """

    model: nn.Module
    tokenizer: Any
    identity: ModelIdentity
    evidence: Literal["loaded", "compared"]
    compared: int = 0
    _parameters: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False, compare=False)
    _snapshot: Snapshot | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """Name and digest: the whole would be every line of the model and every file of the folder."""
        name = self.identity.names.get("repo") or str(self.identity.path)
        return f"<BoundModel {name} {self.identity.digest[:19]} {self.evidence}>"

    def _replaced(self, live: Mapping[str, Any]) -> list[str]:
        """Names of parameters that are others than at binding: new weights, an adapter, a quantization.

        A few models put a small parameter anew at each forward pass, clipped and in float32, with its value as it
        was (gemma3n): that is no replacement, as long as others of its parameters are the very arrays.
        """
        moved = [name for name, ref in self._parameters.items() if ref() is not live.get(name, _ABSENT)]
        if len(moved) < len(self._parameters):
            moved = [name for name in moved if not _same_value(self._parameters[name](), live.get(name))]
        return moved + [name for name in live if name not in self._parameters]

    def require_same(self) -> None:
        """Prove that parameters, settings, and what a sample shows of the arrays are as at binding.

        Raises:
            IncompatibleError: BINDING_MISMATCH; also while a dropout is active, for then the model is like no other.
        """
        _require_no_dropout(self.model)
        live = _parameters(self.model)
        replaced = self._replaced(live)
        if replaced:
            raise fail(
                "BINDING_MISMATCH", f"parameter {replaced[0]} was replaced after the model was bound",
                fix="Bind the model again, with the adapter that it has now.", parameters=replaced[:64],
            )  # fmt: skip
        altered = self._altered(live)
        if altered is not None:
            raise fail(
                "BINDING_MISMATCH", f"{altered} was changed after the model was bound",
                fix="Load the model again: its files say otherwise.", changed=altered,
            )  # fmt: skip

    def _altered(self, live: Mapping[str, Any]) -> str | None:
        """What else is other than at binding: a setting, or an array that was written to where a sample shows it."""
        if self._snapshot is None:
            return None
        setting = self._snapshot.other_setting(self.model)
        if setting is not None:
            return f"setting {setting}"
        written = self._snapshot.written_to({
            name: array for name, array in live.items() if self._parameters[name]() is array
        })  # fmt: skip
        return f"parameter {written[0]}" if written else None


def load_model(
    path: str | os.PathLike[str],
    adapter_path: str | os.PathLike[str] | None = None,
    *,
    trust_remote_code: bool = False,
) -> BoundModel:
    """Load a model with mlx-lm, bound to the identity of the very files that were loaded.

    Args:
        path: A folder, a folder of the hub cache, or the id of a model in the hub cache; no network is used.
        adapter_path: Folder of a LoRA, DoRA or full adapter.
        trust_remote_code: Run the code that the model's config names. Its files in the folder are part of the
            identity; what it imports from elsewhere is not, as the libraries are not.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID, also where mlx-lm cannot load what is there.
        IncompatibleError: BINDING_MISMATCH where a file changed while it was loaded.
        UnsupportedError: SHARD_UNSUPPORTED.
    """
    require_one_rank()
    identity = ModelIdentity.from_path(path, adapter_path)
    model, tokenizer = load_whole(identity.path, identity.adapter_path, trust_remote_code=trust_remote_code)
    # After the last byte was read: mlx-lm leaves an adapter's arrays lazy.
    identity.require_unchanged()
    return BoundModel(model, tokenizer, identity, "loaded", 0, _references(model), _snapshot(model))


def bind(
    model: nn.Module,
    identity: ModelIdentity,
    tokenizer: Any = None,
    *,
    sample: int | None = DEFAULT_SAMPLE,
    trust_remote_code: bool = False,
) -> BoundModel:
    """Bind a live model to ``identity`` after comparing the two.

    Args:
        model: The model as mlx-lm loads it, adapter included; what is lazy of it is evaluated.
        identity: From :meth:`ModelIdentity.from_path`; its files are read again.
        tokenizer: Kept as it is.
        sample: How many parameters to compare bit by bit, beside the first, the last and all of the adapter's; they
            are drawn anew each time. None compares every one, which reads all weight files. A changed
            weight outside the sample is not seen.
        trust_remote_code: Run the code that the model's config names, for the copy to compare with.

    Raises:
        UsageError: USAGE where ``model`` is not an ``mlx.nn.Module``.
        IncompatibleError: BINDING_MISMATCH naming the parameter or setting.
        UnsupportedError: SHARD_UNSUPPORTED.
    """
    import mlx.core as mx

    compared = _compare(model, identity, sample=sample, trust_remote_code=trust_remote_code)
    with load_errors(identity.path):
        # What is lazy still would be read from whatever lies there by then.
        mx.eval(model.parameters())
    identity.require_unchanged()
    return BoundModel(model, tokenizer, identity, "compared", compared, _references(model), _snapshot(model))


def bind_unread(model: nn.Module, identity: ModelIdentity) -> BoundModel:
    """Bind a model whose weights are not to be read: to restore into, never to compute with. Raises as :func:`bind`."""
    compared = _compare(model, identity, sample=0, trust_remote_code=False)
    identity.require_unchanged()
    return BoundModel(model, None, identity, "compared", compared, _references(model))


def _compare(model: nn.Module, identity: ModelIdentity, *, sample: int | None, trust_remote_code: bool) -> int:
    import mlx.nn as nn

    from kvstore.runtime.compare import compare_models

    if not isinstance(model, nn.Module):
        raise fail("USAGE", "bind: model", expected="an mlx.nn.Module", found=type(model).__name__)
    require_one_rank()
    _require_no_dropout(model)
    identity.require_unchanged()
    reference = load_unread(identity.path, identity.adapter_path, trust_remote_code=trust_remote_code)
    return compare_models(model, reference, sample=sample, untrained=_untrained(reference, identity))


def require_bound(value: Any) -> BoundModel:
    """The bound model, once it is proved that its parameters and settings are still those that were bound.

    Arrays put in others' place are seen; arrays written to in place are seen where a sample of their bytes shows it.

    Raises:
        IncompatibleError: MODEL_UNBOUND for anything but a bound model, BINDING_MISMATCH for one that was changed.
    """
    if not isinstance(value, BoundModel):
        raise fail(
            "MODEL_UNBOUND", "the model has no identity", expected="a BoundModel", found=type(value).__name__,
            fix="Use kvstore.load_model(path), or kvstore.bind(model, kvstore.ModelIdentity.from_path(path)).",
        )  # fmt: skip
    value.require_same()
    return value


def identity_of(value: Any) -> ModelIdentity:
    """The identity of a bound model (proved as by :func:`require_bound`), or a bare identity as it is.

    Raises:
        IncompatibleError: MODEL_UNBOUND, BINDING_MISMATCH.
    """
    return value if isinstance(value, ModelIdentity) else require_bound(value).identity


def require_one_rank() -> None:
    """Refuse a process that is one of several ranks: its model may be a shard.

    Raises:
        UnsupportedError: SHARD_UNSUPPORTED.
    """
    import mlx.core as mx

    # init() also joins a group that another part of the process has made; alone it takes a millisecond.
    size = mx.distributed.init().size()
    if size > 1:
        raise fail(
            "SHARD_UNSUPPORTED", "mx.distributed", expected="1 rank", found=size,
            fix="Run the model in one process; sharded caches are not part of format v1.",
        )  # fmt: skip


def _require_no_dropout(model: nn.Module) -> None:
    from kvstore.runtime.snapshot import active_dropout

    module = active_dropout(model)
    if module is not None:
        raise fail(
            "BINDING_MISMATCH", f"module {module} drops values at random, for the model is in training mode",
            expected="a model in evaluation mode", found="training mode",
            fix="Call its eval(), and compute the cache anew.", module=module,
        )  # fmt: skip


def _untrained(reference: nn.Module, identity: ModelIdentity) -> frozenset[str]:
    """Random halves of adapter layers that the adapter's file does not fill: their other halves are zero."""
    if identity.adapter_path is None:
        return frozenset()
    import mlx.core as mx

    filled: Any = mx.load(str(identity.adapter_path / ADAPTER_WEIGHTS))
    return frozenset(
        name for name in _parameters(reference) if name.endswith(".lora_a") and name not in filled
    )


def _parameters(model: nn.Module) -> dict[str, Any]:
    """The parameters by name, as ``tree_flatten(model.parameters())`` gives them, in half of its time."""
    import mlx.core as mx
    import mlx.nn as nn

    found: dict[str, Any] = {}
    _walk(_public(model), "", found, mx.array, nn.Module)
    return found


def _walk(items: Iterable[tuple[Any, Any]], path: str, found: dict[str, Any], array: type, module: type) -> None:
    # A function inside the other would be a cycle with itself, and keep the arrays until it is collected.
    for key, item in items:
        if isinstance(item, array):
            found[f"{path}{key}"] = item
        elif isinstance(item, module):
            _walk(_public(item), f"{path}{key}.", found, array, module)
        elif isinstance(item, (dict, list)):
            _walk(item.items() if isinstance(item, dict) else enumerate(item), f"{path}{key}.", found, array, module)


def _public(module: Any) -> list[tuple[str, Any]]:
    return [pair for pair in module.items() if not pair[0].startswith("_")]


def _references(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """How to get at each parameter as it was at binding; small ones are kept, so that their values can be compared."""
    return {
        name: partial(_itself, array) if array.nbytes <= _SMALL_BYTES else weakref.ref(array)
        for name, array in _parameters(model).items()
    }


def _snapshot(model: nn.Module) -> Snapshot:
    from kvstore.runtime.snapshot import Snapshot

    return Snapshot.take(model, _parameters(model))


def _itself(array: Any) -> Any:
    return array


def _same_value(bound: Any, live: Any) -> bool:
    """Whether a parameter that was put anew still has the value that it had, its dtype widened at most."""
    from kvstore.runtime.compare import same_bits

    return (
        bound is not None and live is not None and bound.shape == live.shape and live.dtype.size >= bound.dtype.size
        and same_bits(bound.astype(live.dtype), live)
    )  # fmt: skip

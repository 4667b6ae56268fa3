"""What caches a model makes, found without computing any.

The model's own caches are run through one lazy forward pass of one token (and of many,
where that shows too little). MLX builds the graph and with it every shape and dtype;
nothing is evaluated, so a model of any size costs some kilobytes and a tenth of a second.
What a layer looks like after more tokens follows from its kind. So ``plan``, ``match``
and ``load`` know the cache signature and the layout before a byte is allocated.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import fail
from kvstore.format.compat import Signature, signature
from kvstore.format.kinds import QUANTIZATION_BITS
from kvstore.format.layers import LayerRecord, leaves, lowest_cut
from kvstore.format.layout import Layout, layout_of
from kvstore.limits import MAX_TOKENS
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.folder import Folder, load_errors, locate
from kvstore.runtime.grow import MANY_TOKENS, grown, grows_unseen
from kvstore.runtime.identity import WEIGHT_PATTERN, effective_config
from kvstore.runtime.loading import load_unread
from kvstore.store.file_digests import FileDigests

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

__all__ = ["CacheOptions", "Probe", "make_cache", "probe", "probe_config", "probe_folder", "quantize_cache"]

_CONFIG_DTYPES: Final = ("bfloat16", "float16", "float32")
_MLX_GROUPS: Final = (32, 64, 128)
"""Group sizes that MLX can compute: one fewer than the format has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What a caller may choose about a cache, named as in mlx-lm.

    Attributes:
        max_kv_size: Window of every layer; refused for models that make their own caches, where it has no effect.
        kv_bits: Bits of keys and values, or None for no quantization.
        kv_group_size: Elements that share a scale.
        concatenated: ``ConcatenateKVCache`` instead of ``KVCache``, for callers that make their caches so.
    """

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    concatenated: bool = False


@dataclass(frozen=True)
class Probe:
    """The caches of one model under one set of options.

    Attributes:
        layers: Layer records after one token.
        options: What they were made with.
        later: Layer records after many tokens, where one does not show what a layer grows to; else empty.
    """

    layers: tuple[LayerRecord, ...]
    options: CacheOptions
    later: tuple[LayerRecord, ...] = ()

    @cached_property
    def signature(self) -> Signature:
        """The cache signature, as entries carry it."""
        return signature(self.layers)

    def layers_at(self, token_count: int) -> tuple[LayerRecord, ...]:
        """Layer records after a prefill of ``token_count`` tokens (at least 1).

        Raises:
            UsageError: USAGE for a count out of range.
        """
        if not 1 <= token_count <= MAX_TOKENS:
            raise fail("USAGE", "token count", expected=f"1 to {MAX_TOKENS}", found=token_count)
        late = self.later or self.layers
        return tuple(grown(first, then, token_count) for first, then in zip(self.layers, late, strict=True))

    def layout_at(self, token_count: int) -> Layout:
        """The buffers that an entry of ``token_count`` tokens holds."""
        return layout_of(self.layers_at(token_count), token_count)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds while no window is full."""
        return self.layout_at(2).total_bytes - self.layout_at(1).total_bytes

    def lowest_cut(self, token_count: int) -> int:
        """The least token count that a cache of ``token_count`` tokens can be cut back to; that count if it cannot."""
        return lowest_cut((leaf for _, leaf in leaves(self.layers_at(token_count))), token_count)


def probe(model: BoundModel | nn.Module, options: CacheOptions | None = None) -> Probe:
    """Probe a model, bound or bare, with caches of its own that are thrown away.

    Raises:
        UnsupportedError: CACHE_CLASS_UNKNOWN, DTYPE_UNSUPPORTED.
        UsageError: USAGE where the model cannot have its caches quantized, or no window of the caller's.
    """
    from kvstore.runtime.kinds import describe

    module: Any = model.model if isinstance(model, BoundModel) else model
    wanted = options or CacheOptions()

    def after(tokens: int) -> tuple[LayerRecord, ...]:
        caches = _fresh(module, wanted)
        _run_lazily(module, caches, tokens)
        # Not before: a cache made quantized refuses bits that one quantized later takes.
        quantize_cache(caches, wanted)
        return describe(caches)

    first = after(1)
    return Probe(first, wanted, after(MANY_TOKENS) if any(grows_unseen(leaf) for _, leaf in leaves(first)) else ())


def probe_folder(path: str | os.PathLike[str], options: CacheOptions | None = None) -> Probe:
    """Probe the model in a folder; weights are mapped but not read, and need not be there.

    Without weight files the dtype is the one that the config names, else bfloat16.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    folder = Folder(locate(path).path, "model folder", FileDigests())
    config = effective_config(folder)
    if not folder.names(WEIGHT_PATTERN):
        return probe_config(config, options)
    return probe(load_unread(folder.path), options)


def probe_config(config: Mapping[str, Any], options: CacheOptions | None = None) -> Probe:
    """Probe the model that a config describes, without weights.

    The caches have the dtype that the config names (``dtype`` or ``torch_dtype``), else bfloat16;
    with weight files at hand those decide, so prefer :func:`probe_folder` there.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID where mlx-lm knows no such model.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm import utils

    with load_errors(Path("config.json")):
        # A copy: building a model fills in and shares parts of its config.
        own = copy.deepcopy(dict(config))
        model_class, arguments = utils._get_classes(own)  # noqa: SLF001 - the one way from a config to a class
        model = model_class(arguments.from_dict(own))
    dtype = getattr(mx, _config_dtype(config))
    keeps = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if keeps(name) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))
    return probe(model, options)


def make_cache(model: nn.Module, options: CacheOptions | None = None) -> list[Any]:
    """Empty caches as ``mlx_lm.generate`` makes them, quantized from the first token where asked.

    Raises:
        UsageError: USAGE where the model cannot have its caches quantized, or no window of the caller's.
    """
    wanted = options or CacheOptions()
    caches = _fresh(model, wanted)
    quantize_cache(caches, wanted)
    return caches


def quantize_cache(caches: list[Any], options: CacheOptions) -> None:
    """Quantize in place the caches that can be, as mlx-lm does once its ``quantized_kv_start`` is reached.

    Raises:
        UsageError: USAGE for bits or groups that MLX lacks or that do not divide a head, and for a windowed cache,
            which mlx-lm cannot quantize; naming the layer, what would do and what is there.
    """
    if options.kv_bits is None:
        return
    if options.kv_bits not in QUANTIZATION_BITS:
        raise fail(
            "USAGE", "bits of a quantized KV cache", expected=list(QUANTIZATION_BITS), found=options.kv_bits,
            fix="Set kv_bits to one of them.",
        )  # fmt: skip
    if options.kv_group_size not in _MLX_GROUPS:
        raise fail(
            "USAGE", "group size of a quantized KV cache", expected=list(_MLX_GROUPS), found=options.kv_group_size,
            fix="Set kv_group_size to one of them.",
        )  # fmt: skip
    for index, cache in enumerate(caches):
        if hasattr(cache, "to_quantized"):
            caches[index] = _quantized(cache, options, f"layers[{index}]")


def _quantized(cache: Any, options: CacheOptions, where: str) -> Any:
    name, group = type(cache).__name__, options.kv_group_size
    for role in ("keys", "values"):
        size = getattr(getattr(cache, role, None), "shape", (0,))[-1]
        if size % group:
            fits = [n for n in _MLX_GROUPS if size % n == 0]
            raise fail(
                "USAGE", f"{where} ({name}) cannot be quantized: size of a head's {role}",
                expected=f"a multiple of the group size, {group}", found=size,
                fix=f"Set kv_group_size to {fits[-1]}." if fits else "Leave kv_bits out for this model.",
            )  # fmt: skip
    try:
        return cache.to_quantized(group_size=group, bits=options.kv_bits)
    except NotImplementedError:
        raise fail(
            "USAGE", f"{where} cannot be quantized: mlx-lm has no quantized form of its class", expected="KVCache",
            found=name, fix="Leave kv_bits out for this model.",
        ) from None  # fmt: skip


def _require_choice_of_window(model: Any, options: CacheOptions) -> None:
    """mlx-lm asks the model first, and says nothing where that leaves the wish for a window without effect."""
    if options.max_kv_size is not None and hasattr(model, "make_cache"):
        raise fail(
            "USAGE", f"max_kv_size has no effect on {type(model).__module__}, which makes its own caches",
            expected="a model whose caches mlx-lm makes", found=options.max_kv_size,
            fix="Leave max_kv_size out for this model.",
        )  # fmt: skip


def _config_dtype(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key)).removeprefix("torch.")
            if name in _CONFIG_DTYPES:
                return name
    return _CONFIG_DTYPES[0]


def _fresh(model: Any, options: CacheOptions) -> list[Any]:
    from mlx_lm.models import cache as module

    _require_choice_of_window(model, options)
    made = module.make_prompt_cache(model, options.max_kv_size)
    if not options.concatenated:
        return list(made)
    return [module.ConcatenateKVCache() if type(item) is module.KVCache else item for item in made]


def _run_lazily(model: Any, caches: list[Any], tokens: int) -> None:
    import mlx.core as mx

    token = mx.zeros((1, tokens), dtype=mx.uint32)
    forward = _FORWARDS.get(type(model).__module__)
    if forward is None:
        model(token, cache=caches)
    else:
        forward(model, token, caches)


def _dbrx(model: Any, token: mx.array, caches: list[Any]) -> None:
    """Without the experts: dbrx evaluates its router to pick them, and attention blocks alone write caches."""
    hidden = model.transformer.wte(token)
    for block, cache in zip(model.layers, caches, strict=True):
        _, hidden = block.norm_attn_norm(hidden, None, cache)


_FORWARDS: Final[Mapping[str, Callable[[Any, Any, list[Any]], None]]] = MappingProxyType({"mlx_lm.models.dbrx": _dbrx})
"""Models whose forward pass evaluates something, by module: how to reach their caches without."""

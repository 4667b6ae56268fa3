"""States from which the older release cannot go on rightly by itself: what it does there, and what kvstore does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models import cache as module

import kvstore
from kvstore.errors import KVStoreError
from kvstore.runtime import extract_sequence
from kvstore.runtime.binding import BoundModel, load_model
from kvstore.runtime.kinds import describe
from kvstore.runtime.prompt_file import write_prompt_file
from tests.runtime.driving import feed, same_bits
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS, tiny, tokens
from tests.runtime.trips import captured, restored

__all__ = ["CHUNKS", "FILES", "Seen", "all_limits", "chunk", "file", "masked", "padded_batch"]

FOLLOWING: Final = [n * 7 % 90 for n in range(20)]
WRONG: Final = 1e-3
"""How far apart logits are, as a part of the largest, that are not the same but for rounding."""


@dataclass(frozen=True)
class Seen:
    """A row of the table: a state, what the release itself makes of it, and what becomes of it in a store."""

    cls: str
    state: str
    itself: str
    put: str
    load: str


CHUNKS: Final[dict[str, tuple[int, list[int]]]] = {
    "a chunk is a multiple of 256, the prompt was read in one piece": (256, [300]),
    "a chunk is a multiple of 256, pieces left a buffer that is none": (256, [60, 190, 20]),
    "a chunk is shorter than 256": (24, [10]),
    "a chunk is no multiple of 256, and the buffer is longer": (300, [280]),
    "pieces so long that the next trim takes rows of the last chunk": (256, [60, 250, 40]),
    "rows of the last chunk are gone already": (256, [60, 250, 40, 1]),
    "a prompt was trimmed back below a chunk": (256, [300, -200]),
}
"""Chunk size, and the steps that lead to a state; a negative one trims."""


def chunk(root: Path, state: str) -> Seen:
    """A state of llama4's chunks."""
    size, steps = CHUNKS[state]
    model = _with_chunks(root, size)
    caches, ids = model.model.make_cache(), list[int]()
    for step in steps:
        if step > 0:
            piece = tokens(len(ids) + step)[len(ids) :]
            mx.eval(model.model(mx.array([piece]), cache=caches))
            ids += piece
        else:
            module.trim_prompt_cache(caches, -step)
            ids = ids[:step]
    put, load = _stored(root, model, caches, ids)
    return Seen("ChunkedKVCache", state, _going_on(model, caches, ids), put, load)


def padded_batch(root: Path) -> Seen:
    """A state out of a batch whose other prompts were longer, read as mlx_lm's server reads prompts."""
    model, ids = tiny(root, "mamba2"), tokens(11, seed=1)
    batch = PromptProcessingBatch(model.model, [0, 1], [module.make_prompt_cache(model.model) for _ in range(2)])
    batch.prompt([list(ids), tokens(37, seed=2)])
    caches = extract_sequence(batch.prompt_cache, 0)
    put, load = _stored(root, model, caches, ids)
    return Seen("ArraysCache", "mamba2, out of a batch with padding", _going_on(model, caches, ids), put, load)


def masked() -> Seen:
    """Left padding and a length at once."""
    cache = module.ArraysCache(1, left_padding=[2])
    cache[0], cache.lengths = mx.ones((1, 4)), mx.array([5])
    right = [at >= 2 and at < 5 for at in range(7)]
    itself = "right" if cache.make_mask(7).tolist() == [right] else "wrong mask: the length is not looked at"
    put = _code(lambda: captured([cache], 3))
    (back,) = restored([cache], 3)
    exact = same_bits(back.make_mask(7), cache.make_mask(7)) and same_bits(back.lengths, cache.lengths)
    return Seen("ArraysCache", "left padding and a length at once", itself, put, "as itself" if exact else "wrong")


def _arrays(padding: list[int] | None = None, slots: int = 1) -> Any:
    cache = module.ArraysCache(slots, left_padding=padding)
    cache[0] = mx.ones((1, 4))
    return cache


def _trimmed() -> Any:
    cache = feed(module.ChunkedKVCache(256), [300])
    cache.maybe_trim_front()
    return cache


FILES: Final[dict[str, Callable[[], list[Any]]]] = {
    "a layer that was never written": lambda: [module.KVCache(), feed(module.KVCache(), [5])],
    "a slot that is empty": lambda: [_arrays(slots=2)],
    "left padding": lambda: [_arrays([2])],
    "a chunk that was trimmed in front": lambda: [_trimmed()],
}


def file(root: Path, state: str) -> Seen:
    """A state that the release's own prompt-cache file has no place for."""
    caches = FILES[state]()
    count = max((layer.offset or 0 for layer in describe(caches)), default=0) or 3
    ours = _code(lambda: write_prompt_file(root / "ours.safetensors", caches, {}))
    back = restored(caches, count)
    load = "exact" if describe(back) == describe(caches) else "wrong"
    name = type(caches[0]).__name__
    return Seen(name, f"{state}, in a prompt-cache file", _own_file(root / "own.safetensors", caches), ours, load)


def _own_file(path: Path, caches: list[Any]) -> str:
    try:
        module.save_prompt_cache(str(path), caches)
        back = module.load_prompt_cache(str(path))
    except (RuntimeError, AttributeError, ValueError) as error:
        return type(error).__name__
    try:
        same = describe(back) == describe(caches)
    except KVStoreError:
        same = False
    return "right" if same else "comes back as another state"


def all_limits(root: Path) -> list[Seen]:
    """Every row."""
    chunks = [chunk(root, state) for state in CHUNKS]
    return [*chunks, padded_batch(root), masked(), *(file(root, state) for state in FILES)]


def _with_chunks(root: Path, size: int) -> BoundModel:
    folder = root / f"chunks of {size}"
    if not folder.exists():
        text = {**CONFIGS["llama4"]["text_config"], "attention_chunk_size": size}
        real_folder(folder, {"model_type": "llama4", "text_config": text})
    return load_model(folder)


def _stored(root: Path, model: BoundModel, caches: Sequence[Any], ids: list[int]) -> tuple[str, str]:
    """What a put and a load say; a load that succeeds must go on as the cache that was never saved."""
    with kvstore.Store.open(root / "store") as store:
        entry: list[str] = []
        put = _code(lambda: entry.append(store.put(caches, token_ids=ids, model=model).subject))
        if not entry:
            return put, "–"
        found: list[Any] = []
        load = _code(lambda: found.extend(store.load(entry[0], into=model).cache))
    if not found:
        return put, load
    twin = _twin(caches)
    same = [bits.tobytes() for bits in _logits(model, found)] == [bits.tobytes() for bits in _logits(model, twin)]
    return put, "as itself" if same else "wrong"


def _twin(caches: Sequence[Any]) -> list[Any]:
    """Copies that can be read further while the originals stay as they are."""
    return [copy.deepcopy(cache) for cache in caches]


def _going_on(model: BoundModel, caches: Sequence[Any], ids: list[int]) -> str:
    """What the release makes of the next tokens, beside one pass over all of them, which trims nothing."""
    expected: Any = model.model(mx.array([[*ids, *FOLLOWING]]), cache=model.model.make_cache())[0, len(ids) :]
    try:
        found = np.stack(list(_logits(model, _twin(caches))))
    except ValueError as error:
        return type(error).__name__
    apart = np.abs(found - np.array(expected.astype(mx.float32))).max() / np.abs(found).max()
    return "right" if apart < WRONG else "wrong tokens"


def _logits(model: BoundModel, caches: list[Any]) -> Iterator[np.ndarray[Any, Any]]:
    for token in FOLLOWING:
        yield np.array(model.model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32))


def _code(act: Callable[[], Any]) -> str:
    try:
        act()
    except KVStoreError as refused:
        return f"refused, `{refused.code}`"
    return "yes"

"""Large caches with the statistics of real ones.

Made from the real cache of Gemma (2,000 tokens, its layers with full attention): a synthetic channel takes the
values of one real channel in a new random order. So each channel keeps its own distribution of signs and exponents,
which is what filters and entropy coders live on; what is lost is how neighbouring tokens resemble each other, of which
those codecs use little. The seven mantissa bits are drawn anew, since real ones are noise and a repeat of a real
value must not be found by a search for repeats. The first layer's values depend on their token alone, so there whole
rows are drawn, one for each token, with the frequencies of the real text; a text of ``n`` times its length gets ``n``
times as many different tokens, which is more than a real text has, so repeats are rather too rare. How close this
comes is to be seen in the figures: the ratios that R1 and a put reach on the real ``gemma-2000`` and on ``qwen-8000``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.gemma import OUT, load_cache, token_ids

__all__ = ["SHAPES", "Shape", "ids_of", "live_cache", "model_folder", "stamp"]

Words = np.ndarray[Any, np.dtype[np.uint16]]
SOURCE_TOKENS: Final = 2000
_MANTISSA: Final = 0x7F
_VOCABULARY: Final = 262_144


@dataclass(frozen=True)
class Shape:
    """The cache of a model with full attention: layers, key-value heads, channels of a head."""

    layers: int
    heads: int
    channels: int

    def bytes(self, tokens: int) -> int:
        """Bytes of keys and values, 16 bits each."""
        return 4 * self.layers * self.heads * self.channels * tokens


SHAPES: Final = {"small": Shape(6, 2, 64), "qwen2-0.5b": Shape(24, 2, 64), "llama-8b": Shape(32, 8, 128)}


def model_folder(name: str) -> Path:
    """A folder with a model of few weights whose cache has this shape."""
    folder = OUT / f"model-{name}"
    if not (folder / "done").exists():
        _make_model(folder, SHAPES[name])
    return folder


def _make_model(folder: Path, shape: Shape) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils
    from tokenizers import Tokenizer, models

    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads, "head_dim": shape.channels,
        "vocab_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 1 << 20,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    get_classes: Any = utils._get_classes  # noqa: SLF001 - the only way to a model without a download
    model_class, arguments = get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}')
    (folder / "done").touch()


def ids_of(tokens: int, *, seed: int = 0) -> list[int]:
    """Token ids with the frequencies of the real text."""
    random = np.random.default_rng(seed)
    drawn = random.choice(np.array(token_ids(SOURCE_TOKENS)), tokens)
    variants = random.integers(0, -(-tokens // SOURCE_TOKENS), tokens)
    return [int(token) for token in drawn + _VOCABULARY * variants]


def live_cache(shape: Shape, tokens: int, *, seed: int = 0) -> list[Any]:
    """Live caches, evaluated, with the head room that ``mlx_lm`` gives them."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    source, first = _source()
    random = np.random.default_rng(seed + 1)
    room = -(-tokens // KVCache.step) * KVCache.step
    caches = []
    for layer in range(shape.layers):
        cache = KVCache()
        for role in ("keys", "values"):
            words = np.zeros((1, shape.heads, room, shape.channels), np.uint16)
            for head in range(shape.heads):
                if layer == 0 and role == "values":
                    words[0, head, :tokens] = _by_token(first[:, : shape.channels], ids_of(tokens, seed=seed), random)
                else:
                    words[0, head, :tokens] = _resampled(source[role], shape.channels, tokens, random)
            setattr(cache, role, mx.array(words).view(mx.bfloat16))
        cache.offset = tokens
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def stamp(caches: list[Any], number: int) -> None:
    """Change one row of each layer in place, so that each entry made of these caches has payloads of its own."""
    import mlx.core as mx

    for cache in caches:
        for role in ("keys", "values"):
            array = getattr(cache, role)
            array[..., 7, :2] = mx.array([number % 251 + 1, number // 251 + 1]).astype(array.dtype)
            mx.eval(array)
            setattr(cache, role, array)


def _by_token(rows: Words, ids: list[int], random: np.random.Generator) -> Words:
    """``[tokens, channels]``: the same row for the same token, a real one with new mantissas."""
    _, places = np.unique(np.array(ids), return_inverse=True)
    table = _with_new_mantissas(rows[random.integers(0, len(rows), int(places.max()) + 1)], random)
    result: Words = table[places]
    return result


def _source() -> tuple[dict[str, Words], Words]:
    """Real channels ``[channels, tokens]`` of keys and values, and the first layer's values ``[tokens, channels]``."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    cache = load_cache(SOURCE_TOKENS)
    full = [layer for layer in cache if isinstance(layer, KVCache)]

    def words(array: mx.array) -> Words:
        found = np.array(array[0, :, :SOURCE_TOKENS].view(mx.uint16))
        return np.ascontiguousarray(found.swapaxes(-1, -2)).reshape(-1, SOURCE_TOKENS)

    source = {
        "keys": np.concatenate([words(layer.keys) for layer in full]),
        "values": np.concatenate([words(layer.values) for layer in full]),
    }
    first: Any = cache[0]
    # The first layer has a window, so these are the rows of its last tokens; their order does not matter here.
    return source, np.array(first.values[0, 0].view(mx.uint16))


def _resampled(source: Words, channels: int, tokens: int, random: np.random.Generator) -> Words:
    """``[tokens, channels]``: channels of one real layer, each in an order of its own, with new mantissas."""
    begin = int(random.integers(0, len(source) // channels)) * channels
    picks = random.integers(0, source.shape[1], (channels, tokens), dtype=np.int32)
    result: Words = _with_new_mantissas(np.take_along_axis(source[begin : begin + channels], picks, axis=1), random).T
    return result


def _with_new_mantissas(words: Words, random: np.random.Generator) -> Words:
    mantissas = random.integers(0, _MANTISSA + 1, words.shape, dtype=np.uint16)
    result: Words = (words & np.uint16(~_MANTISSA & 0xFFFF)) | mantissas
    return result

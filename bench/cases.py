"""The caches that are measured, by name, as files that a fresh process reads in a moment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import gemma, synthetic

__all__ = ["CASES", "Case", "case"]


@dataclass(frozen=True)
class Case:
    """One cache: where it comes from, how it is shaped."""

    name: str
    tokens: int
    shape: str | None = None
    bits: int | None = None

    @property
    def model(self) -> Path:
        """The folder of the model that could have made it."""
        return gemma.MODEL if self.shape is None else synthetic.model_folder(self.shape)

    @property
    def path(self) -> Path:
        """The file of the cache, as ``mlx_lm`` writes it; the token ids lie beside it."""
        if self.shape is None:
            return gemma.cache_path(self.tokens)
        return gemma.OUT / f"{self.shape}-{self.tokens}.safetensors"

    def prepare(self) -> None:
        """Make model and cache unless they are there."""
        gemma.prepare()
        if self.shape is None or self.path.exists():
            return
        from mlx_lm.models.cache import save_prompt_cache

        _ = self.model
        partial = self.path.with_suffix(".part.safetensors")
        save_prompt_cache(str(partial), synthetic.live_cache(synthetic.SHAPES[self.shape], self.tokens))
        ids = synthetic.ids_of(self.tokens)
        self.path.with_suffix(".ids.json").write_text(json.dumps(ids))
        partial.rename(self.path)

    def ids(self) -> list[int]:
        """The token ids that it is the state of."""
        if self.shape is None:
            return gemma.token_ids(self.tokens)
        return list(json.loads(self.path.with_suffix(".ids.json").read_text()))

    def cache(self) -> list[Any]:
        """The live caches, evaluated; quantized where the case says so."""
        import mlx.core as mx
        from mlx_lm.models.cache import load_prompt_cache

        found: Any = load_prompt_cache(str(self.path))
        if self.bits is not None:
            found = [
                layer.to_quantized(group_size=64, bits=self.bits) if type(layer).__name__ == "KVCache" else layer
                for layer in found
            ]
        mx.eval([layer.state for layer in found])
        mx.clear_cache()
        return list(found)

    def options(self) -> Any:
        """How the receiving caches are shaped."""
        from kvstore import CacheOptions

        return CacheOptions(kv_bits=self.bits)

    def arrays(self, cache: list[Any]) -> dict[str, Any]:
        """The rows that count, trimmed and in temporal order, by R1's names: what both sides store."""
        import mlx.core as mx
        import numpy as np

        from kvstore.runtime.kinds import describe, views

        names = {"keys": "k", "values": "v"}
        found = {}
        for (path, roles), layer in zip(views(cache).items(), describe(cache), strict=True):
            for role, rows in roles.items():
                stored = np.ascontiguousarray(rows.read(0, rows.count))
                array = mx.array(stored)
                dtype = layer.tensors[role].dtype
                found[f"L{path}.{names.get(role, role)}"] = array.view(mx.bfloat16) if dtype == "BF16" else array
        mx.eval(list(found.values()))
        return found


_ALL: Final = (
    *(Case(f"gemma-{tokens}", tokens) for tokens in gemma.LENGTHS),
    Case("qwen-8000", 8000, shape="qwen2-0.5b"),
    Case("qwen-8000-q8", 8000, shape="qwen2-0.5b", bits=8),
    Case("qwen-8000-q4", 8000, shape="qwen2-0.5b", bits=4),
    Case("small-256", 256, shape="small"),
    Case("llama-8192", 8192, shape="llama-8b"),
    Case("llama-16384", 16384, shape="llama-8b"),
)
CASES: Final = {item.name: item for item in _ALL}


def case(name: str) -> Case:
    """The case of that name, with its files made."""
    found = CASES[name]
    found.prepare()
    return found

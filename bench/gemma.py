"""Caches of the real Gemma-3-270M, prefilled once and kept in ``bench/out/``.

The text is the demo's document and then the licence: both lie in the repository. The state is kept
at several lengths on the way, each with the seconds that it took to get there, so that restoring
can be compared with prefilling on the same machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["LENGTHS", "MODEL", "cache_path", "load_cache", "prefill_seconds", "prepare", "token_ids"]

ROOT: Final = Path(__file__).resolve().parents[1]
OUT: Final = Path(__file__).with_name("out")
MODEL: Final = ROOT / "models" / "gemma-3-270m"
LENGTHS: Final = (256, 500, 1000, 2000)
STEP: Final = 128
"""Tokens for each evaluation; the stock CPU wheel is about as fast at any."""


def cache_path(tokens: int) -> Path:
    """Where the state after so many tokens is kept, as ``mlx_lm`` writes it."""
    return OUT / f"gemma-{tokens}.safetensors"


def prepare(lengths: Sequence[int] = LENGTHS) -> None:
    """Prefill to the longest length, and keep the state at each, unless they are there."""
    if all(cache_path(count).exists() for count in lengths):
        return
    from scripts.make_model import make

    make(MODEL)
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    OUT.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(str(MODEL))
    ids = _encode(tokenizer)[: max(lengths)]
    (OUT / "gemma-ids.json").write_text(json.dumps(ids))
    cache: Any = make_prompt_cache(model)
    seconds, done = 0.0, 0
    for target in sorted(lengths):
        while done < target:
            count = min(STEP, target - done)
            began = time.perf_counter()
            model(mx.array(ids[done : done + count])[None], cache=cache)
            mx.eval([layer.state for layer in cache])
            seconds += time.perf_counter() - began
            done += count
            print(f"\rprefilling Gemma: {done} of {max(lengths)} tokens, {done / seconds:.1f} tokens/s", end="",
                  file=sys.stderr)
        facts = {"seconds": f"{seconds:.3f}", "load": f"{os.getloadavg()[0]:.2f}"}
        partial = cache_path(target).with_suffix(".part.safetensors")
        save_prompt_cache(str(partial), cache, facts)
        partial.rename(cache_path(target))
    print(file=sys.stderr)


def token_ids(tokens: int) -> list[int]:
    """The ids that the cache of this length is the state of."""
    return list(json.loads((OUT / "gemma-ids.json").read_text())[:tokens])


def load_cache(tokens: int) -> list[Any]:
    """The live caches, evaluated."""
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache

    cache: Any = load_prompt_cache(str(cache_path(tokens)))
    mx.eval([layer.state for layer in cache])
    return list(cache)


def prefill_seconds(tokens: int) -> float:
    """Seconds that this machine took to prefill so many tokens, when it did."""
    from mlx_lm.models.cache import load_prompt_cache

    _, facts = load_prompt_cache(str(cache_path(tokens)), return_metadata=True)
    return float(facts["seconds"])


def _encode(tokenizer: Any) -> list[int]:
    texts = [(ROOT / name).read_text() for name in ("examples/document.txt", "LICENSE")]
    return [int(token) for token in tokenizer.encode("\n\n".join(texts))]

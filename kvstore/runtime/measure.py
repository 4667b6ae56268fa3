"""Measuring this machine: how fast a model prefills, and how fast a store on this volume gives the state back.

The state is a real one, but of token ids that mean nothing: how long a forward pass takes
does not depend on them. It is put into a store of its own on the same volume, which is
removed at the end, so nothing of it is ever found by a match.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from kvstore.runtime.binding import BoundModel
from kvstore.runtime.prefill import prefill
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.store import Store
from kvstore.store.rates import PrefillRate, RestoreRate

__all__ = ["Measured", "measure"]

_SHORT: Final = 8
_IDS: Final = 61
"""Different token ids; every vocabulary has as many."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        tokens: Tokens of the long state.
        payload_bytes, stored_bytes: Its size, decoded and on disk.
        put_seconds, restore_seconds: For it; the median of several restores.
    """

    tokens: int
    payload_bytes: int
    stored_bytes: int
    put_seconds: float
    restore_seconds: float
    prefill: PrefillRate
    restore: RestoreRate


def measure(
    model: BoundModel, *, folder: Path, tokens: int, rounds: int = 5, options: CacheOptions | None = None,
    progress: Progress | None = None,
) -> Measured:  # fmt: skip
    """Prefill, put, and restore several times.

    Args:
        folder: An empty directory on the store's volume; what is made there is the caller's to remove.
        tokens: Tokens to prefill, at least 64 for a rate that means something.
        rounds: Restores; the median counts.
        options: How the caches are shaped.
        progress: Called with tokens prefilled and in all.

    Raises:
        KVStoreError: as :func:`prefill`, :meth:`Store.put` and :meth:`Store.load` raise.
    """
    chosen = options or CacheOptions()
    # What the first call of a model costs once is not part of a rate.
    short = prefill(model, _ids(_SHORT), options=chosen)
    began = time.perf_counter()
    long = prefill(model, _ids(tokens), options=chosen, progress=progress)
    prefill_seconds = time.perf_counter() - began
    with Store.open(folder / "store") as store:
        low = store.put(short.cache, token_ids=short.token_ids, model=model)
        began = time.perf_counter()
        high = store.put(long.cache, token_ids=long.token_ids, model=model)
        put_seconds = time.perf_counter() - began
        fixed = _restore(store, low.subject, model, chosen, rounds)
        restore_seconds = _restore(store, high.subject, model, chosen, rounds)
    facts: dict[str, Any] = dict(high.facts)
    size = facts["payload_bytes"]
    # Where the state is so small that reading it takes no time that can be told, all time counts as reading.
    gained = restore_seconds - fixed
    bytes_per_second = size / (gained if gained > restore_seconds / 10 else restore_seconds)
    return Measured(
        len(long.token_ids), size, facts["stored_bytes"], put_seconds, restore_seconds,
        PrefillRate(len(long.token_ids) / prefill_seconds), RestoreRate(fixed, bytes_per_second),
    )  # fmt: skip


def _restore(store: Store, entry_id: str, model: BoundModel, options: CacheOptions, rounds: int) -> float:
    """Median seconds of a load; the first one, which checks stored digests, does not count."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        restored: Any = store.load(entry_id, into=model, options=options)
        taken.append(time.perf_counter() - began)
        del restored
        mx.clear_cache()
    return statistics.median(taken[1:])


def _ids(count: int) -> Sequence[int]:
    return [n * n % _IDS for n in range(count)]

"""Measured work, each piece in a fresh process: ``python -m bench.child TASK JSON`` prints one JSON document.

What a task prepares is not timed. Memory is the highest resident size while the task ran, beyond what it was just
before; on Linux the kernel's own mark is reset for that, so that what the preparation needed does not count.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final, Self

from bench import codecs, r1, synthetic
from bench.cases import Case, case
from bench.machine import Others, wait_until_quiet

__all__ = ["TASKS", "run_task"]

_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_STATUS: Final = Path("/proc/self/status")


def run_task(name: str, **arguments: Any) -> dict[str, Any]:
    """Run a task in a fresh process; its document."""
    command = [sys.executable, "-m", "bench.child", name, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"the task {name} {arguments} failed")
    return dict(json.loads(done.stdout))


class Meter:
    """Seconds and memory of a piece of work, which begins when others have ended theirs or the wait for it is over."""

    def __enter__(self) -> Self:
        wait_until_quiet()
        if _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5")
        self._before = _resident("VmRSS")
        self._others = Others()
        self._others.__enter__()
        self._cpu, self._began = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._others.__exit__()
        self.peak_bytes = _resident("VmHWM") - self._before

    def facts(self, **more: Any) -> dict[str, Any]:
        """What was measured, and more."""
        times = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, **_other_facts(self._others)}
        return {**times, "peak_bytes": self.peak_bytes, **more}


def _other_facts(others: Others) -> dict[str, Any]:
    return {"watched_seconds": others.wall, "other_seconds": others.seconds}


def _resident(field: str) -> int:
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def r1_save(found: Case, path: str) -> dict[str, Any]:
    """R1's save: no digest, no flush."""
    arrays = found.arrays(found.cache())
    facts = {"layers": [{"layer": name, "shape": list(a.shape)} for name, a in arrays.items()]}
    raw = sum(a.nbytes for a in arrays.values())
    with Meter() as meter:
        size = r1.save(Path(path), arrays, facts)
    return meter.facts(raw_bytes=raw, stored_bytes=size)


def r1_load(found: Case, path: str) -> dict[str, Any]:
    """R1's load."""
    import mlx.core as mx

    mx.eval(mx.zeros(8))
    with Meter() as meter:
        arrays = r1.load(Path(path))
    return meter.facts(raw_bytes=sum(a.nbytes for a in arrays.values()))


def raw_save(found: Case, path: str) -> dict[str, Any]:
    """The same arrays as a plain safetensors file."""
    import mlx.core as mx

    arrays = found.arrays(found.cache())
    with Meter() as meter:
        mx.save_safetensors(path, arrays)
    return meter.facts()


def raw_load(found: Case, path: str) -> dict[str, Any]:
    """``mx.load`` and evaluation."""
    import mlx.core as mx

    mx.eval(mx.zeros(8))
    with Meter() as meter:
        arrays: Any = mx.load(path)
        mx.eval(list(arrays.values()))
    return meter.facts()


def put(found: Case, store: str, codec: Any) -> dict[str, Any]:
    """Put through the whole store: digests, objects, manifest, receipt, index, flushes."""
    import kvstore

    cache, ids = found.cache(), found.ids()
    identity = kvstore.ModelIdentity.from_path(found.model)
    with kvstore.Store.open(store) as opened:
        opened.match(ids, model=identity, options=found.options())
        with Meter() as meter:
            receipt = opened.put(cache, token_ids=ids, model=identity, codec=codec)
        more = {} if found.bits is None else {"plain_bytes": _plain_bytes(opened.entries, receipt.subject)}
    facts = receipt.facts
    return meter.facts(raw_bytes=facts["payload_bytes"], stored_bytes=facts["stored_bytes"], **more)


def _plain_bytes(entries: Any, entry_id: Any) -> int:
    """Bytes of an entry's payloads, each compressed by itself with zstd at level 3."""
    import zstandard

    manifest, compressor = entries.manifest(entry_id), zstandard.ZstdCompressor(level=r1.LEVEL)
    total = 0
    for ref in {*manifest.payloads(), manifest.prefix.token_ids}:
        with entries.open_object(ref, manifest.namespace) as reader:
            total += len(compressor.compress(reader.read_payload().to_bytes()))
    return total


def load(found: Case, store: str, verification: Any = "auto") -> dict[str, Any]:
    """Load through the whole store: manifest, index, verification, objects, live caches; the store is open."""
    import kvstore
    from kvstore.runtime.lazy import open_model

    bound, ids = open_model(found.model), found.ids()
    began = time.perf_counter()
    with kvstore.Store.open(store) as opened:
        open_seconds = time.perf_counter() - began
        hit = opened.match([*ids, 0], model=bound, options=found.options())
        began = time.perf_counter()
        hit = opened.match([*ids, 0], model=bound, options=found.options())
        match_seconds = time.perf_counter() - began
        with Meter() as meter:
            restored = opened.load(hit, into=bound, verification=verification)
    if restored.token_count != found.tokens:
        raise SystemExit("the load restored another number of tokens")
    arrays = sum(layer.nbytes for layer in restored.cache)
    return meter.facts(open_seconds=open_seconds, match_seconds=match_seconds, array_bytes=arrays)


def overhead(found: Case, store: str, rounds: int = 7) -> dict[str, Any]:
    """What a match and a load take beyond the codec: the same objects decoded into the same arrays.

    For the codec's side they are open and checked already. Both in turns, in one process; medians.
    """
    import kvstore
    from kvstore.runtime.lazy import open_model
    from kvstore.runtime.materialize import fill, plan_restore

    bound, ids = open_model(found.model), found.ids()
    times: dict[str, list[float]] = {"load": [], "codec": []}
    with kvstore.Store.open(store) as opened, ExitStack() as stack:
        hit = opened.match([*ids, 0], model=bound, options=found.options())
        opened.load(hit, into=bound)
        manifest = opened.entries.manifest(opened.entries.resolve(str(hit.entry_id)))
        ready = _Ready({
            ref.digest: stack.enter_context(opened.entries.open_object(ref, manifest.namespace))
            for ref in manifest.payloads()
        })  # fmt: skip
        plan = plan_restore(manifest, hit.token_count, bound, options=found.options())
        wait_until_quiet()
        with Others() as others:
            for _ in range(rounds):
                began = time.perf_counter()
                hit = opened.match([*ids, 0], model=bound, options=found.options())
                opened.load(hit, into=bound, remember=False)
                times["load"].append(time.perf_counter() - began)
                began = time.perf_counter()
                fill(ready, plan)
                times["codec"].append(time.perf_counter() - began)
    return {
        **{f"{name}_seconds": statistics.median(taken) for name, taken in times.items()}, **_other_facts(others),
    }  # fmt: skip


class _Ready:
    """Objects that are open already."""

    def __init__(self, readers: dict[Any, Any]) -> None:
        self._readers = readers

    def open_object(self, ref: Any, namespace: str, *, verification: Any = "auto") -> Any:
        return nullcontext(self._readers[ref.digest])


def small(found: Case, store: str, count: int) -> dict[str, Any]:
    """Entries of one block each: put, then match and load; medians of single calls.

    R1 saves and loads every tenth of them to its files, in the same turns.
    """
    import kvstore
    from kvstore.runtime.lazy import open_model

    bound, ids = open_model(found.model), found.ids()
    caches = [found.cache() for _ in range(2)]
    prompts = [[number, *ids[1:]] for number in range(count)]
    taken: dict[str, list[float]] = {"put": [], "load": [], "r1_save": [], "r1_load": []}

    def timed(name: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = work(*args, **options)
        taken[name].append(time.perf_counter() - began)
        return result

    def restore(prompt: list[int]) -> Any:
        return opened.load(opened.match([*prompt, 0], model=bound), into=bound)

    wait_until_quiet()
    with kvstore.Store.open(store) as opened, Others() as others:
        for number, prompt in enumerate(prompts):
            cache = caches[number % 2]
            synthetic.stamp(cache, number)
            timed("put", opened.put, cache, token_ids=prompt, model=bound)
            if number % 10 == 0:
                timed("r1_save", r1.save, Path(f"{store}-r1-{number}"), found.arrays(cache), {})
        for number, prompt in enumerate(prompts):
            if timed("load", restore, prompt).token_count != found.tokens:
                raise SystemExit("a small entry was restored in part")
            if number % 10 == 0:
                timed("r1_load", r1.load, Path(f"{store}-r1-{number}"))
    medians = {f"{name}_seconds": statistics.median(times) for name, times in taken.items()}
    return {**medians, "entries": count, **_other_facts(others)}


TASKS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "r1_save": r1_save, "r1_load": r1_load, "raw_save": raw_save, "raw_load": raw_load, "put": put, "load": load,
    "overhead": overhead, "small": small, "codecs": codecs.measure,
}  # fmt: skip

if __name__ == "__main__":
    arguments = json.loads(sys.argv[2])
    result = TASKS[sys.argv[1]](case(arguments.pop("case")), **arguments)
    print(json.dumps(result))

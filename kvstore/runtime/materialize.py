"""From a stored entry to live caches in a bound model: everything is proved first, then all or nothing.

Steps 5 to 7 of the reading order need no object and no array. Only after the last of
them are arrays made; then objects are opened, checked and decoded into them in several
threads. If anything fails, or the caller stops it, the arrays are dropped and the
caller's own cache is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvstore.errors import fail
from kvstore.format.compat import Policy, Wanted, mismatches, require_compatible
from kvstore.format.groups import PayloadRef, Segment, segment_tensors, segments
from kvstore.format.layout import Buffer, Layout
from kvstore.format.manifest import Manifest
from kvstore.format.object import Batch, ObjectReader
from kvstore.format.prefix import DEFAULT_NAMESPACE
from kvstore.format.tensors import canonical_order
from kvstore.runtime.binding import BoundModel, require_bound
from kvstore.runtime.buffers import Buffers, Need, Target, needs
from kvstore.runtime.cut import require_cut
from kvstore.runtime.device import check_device_limits
from kvstore.runtime.probe import CacheOptions, Probe, make_cache, probe
from kvstore.store.parallel import Stop, map_parallel, run_parallel, worker_count

if TYPE_CHECKING:
    from kvstore.store.read import Verification  # needs SQLAlchemy

__all__ = ["Filled", "Objects", "Plan", "fill", "plan_restore"]

Progress = Callable[[int, int], None]
_MANY: Final = 4
"""Payloads for each worker from which on one payload is one piece of work; below, a chunk is."""


class Objects(Protocol):
    """Where objects are read from: :class:`kvstore.store.EntryStore`, or anything that keeps its promise."""

    def open_object(
        self, ref: PayloadRef, namespace: str, *, verification: Verification = "auto"
    ) -> AbstractContextManager[ObjectReader]:
        """A checked object of this payload; called from several threads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A restore that may go ahead: nothing is opened and nothing is made yet.

    Attributes:
        tokens: The position to restore.
        needs: The arrays, head room included.
        templates: Empty caches of the receiving model, whose classes are restored; None for the usual ones.
        checks: What was proved, for the receipt.
    """

    manifest: Manifest
    tokens: int
    needs: tuple[Need, ...]
    templates: list[Any] | None
    checks: Mapping[str, str]

    @property
    def layout(self) -> Layout:
        """The arrays as a layout."""
        return Layout(self.tokens, tuple(Buffer(f"{n.path}.{n.role}", n.shape, n.dtype) for n in self.needs))


@dataclass(frozen=True, slots=True)
class Filled:
    """Caches that hold the state, and what it took.

    Attributes:
        payload_bytes: Bytes of the payloads that were decoded.
        buffer_bytes: Bytes of the arrays, head room included.
        objects: Objects that were read.
    """

    cache: list[Any]
    payload_bytes: int
    buffer_bytes: int
    objects: int


def plan_restore(
    manifest: Manifest,
    tokens: int,
    into: BoundModel,
    *,
    options: CacheOptions | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    policy: Policy = "strict",
    method: str | None = None,
    names: Callable[[], Mapping[str, Any]] = dict,
    prober: Callable[[BoundModel, CacheOptions], Probe] = probe,
    budget: int | None = None,
) -> Plan:
    """Steps 5 to 7: prove that the entry may be restored into the model, at that token, on this device.

    Args:
        method: Name of the lossy method whose entries are acceptable.
        names: Gives names of the entry's model, shown in a refusal beside the receiver's.
        prober: Probes the model; a caller that has done it before gives what it found.
        budget: Bytes that the caches may take, by default what the device has free.

    Raises:
        IncompatibleError: MODEL_UNBOUND, BINDING_MISMATCH, MODEL_MISMATCH, ADAPTER_MISMATCH, TOKENIZER_MISMATCH,
            NAMESPACE_MISMATCH, METHOD_MISMATCH, SIGNATURE_MISMATCH, LAYER_COUNT_MISMATCH, CUT_NOT_POSSIBLE.
        SpaceError: DEVICE_BUFFER_TOO_LARGE, DEVICE_MEMORY_SHORT.
    """
    bound = require_bound(into)
    wanted = Wanted(bound.identity.model, bound.identity.tokenizer, namespace, policy, None, method)
    # The identity first: a model of another shape should be named as another model, not as other shapes.
    _require_compatible(manifest, wanted, bound, names)
    chosen = options or CacheOptions()
    _require_compatible(manifest, replace(wanted, signature=prober(bound, chosen).signature), bound, names)
    require_cut(manifest, tokens)
    templates = make_cache(bound.model, chosen)
    plan = Plan(manifest, tokens, needs(manifest.layers, tokens, templates), templates, {})
    device = check_device_limits(plan.layout, budget=budget)
    template = "verified" if policy == "strict" else "skipped"
    checks = {
        "model": "verified", "tokenizer": "verified", "chat_template": template, "signature": "verified",
        "cut": "verified", "token_count": "not observable" if manifest.asserted else "verified", **device,
    }  # fmt: skip
    return Plan(manifest, tokens, plan.needs, templates, checks)


def _require_compatible(
    manifest: Manifest, wanted: Wanted, bound: BoundModel, names: Callable[[], Mapping[str, Any]]
) -> None:
    """Names cost a query, so they are asked for only where there is something to tell."""
    if mismatches(manifest, wanted):
        require_compatible(manifest, wanted, names={"entry": dict(names()), "model": dict(bound.identity.names)})


@dataclass(frozen=True, slots=True)
class _Job:
    """One payload to read, and where it goes."""

    ref: PayloadRef
    paths: tuple[str, ...]
    segment: Segment
    target: Target


def fill(
    objects: Objects,
    plan: Plan,
    *,
    verification: Verification = "auto",
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Filled:
    """Steps 8 to 12: read, check and decode every object that the plan needs, and make the caches.

    Must run on the thread that will use the caches: MLX streams belong to threads.

    Args:
        verification: ``auto`` or ``always``, as :meth:`Objects.open_object` takes it.
        progress: Called on this thread with payload bytes done and in all.
        cancelled: Asked between chunks, from several threads.

    Raises:
        IntegrityError, InvalidError, UnsupportedError: codes of the phases ``integrity`` and ``payload``.
        CancelledError: CANCELLED.
        KVStoreError: MATERIALIZE_FAILED where MLX could not make the arrays.
    """
    buffers = _allocate(plan)
    jobs = list(_jobs(plan.manifest, buffers))
    total, done = sum(job.ref.size for job in jobs), 0
    report = progress or (lambda done, total: None)
    report(0, total)
    reader = _Reading(objects, plan.manifest, verification, Stop(cancelled))
    with closing(reader.run(jobs)) as pieces:
        for size in pieces:
            done += size
            report(min(done, total), total)
    nbytes = buffers.nbytes
    # The jobs hold views of the arrays, and no view may outlive the release.
    count = len(jobs)
    jobs.clear()
    del pieces, reader
    buffers.clear_head_room()
    caches = buffers.release(plan.manifest.layers, plan.tokens, plan.templates)
    report(total, total)
    return Filled(caches, total, nbytes, count)


def _allocate(plan: Plan) -> Buffers:
    try:
        return Buffers(plan.needs)
    except (RuntimeError, MemoryError, ValueError) as error:
        raise fail(
            "MATERIALIZE_FAILED", f"MLX could not make the arrays ({error})", fix="Free memory and try again.",
            needed=plan.layout.total_bytes,
        ) from error  # fmt: skip


def _jobs(manifest: Manifest, buffers: Buffers) -> Iterator[_Job]:
    for group in manifest.groups:
        for segment, ref in zip(segments(group.span), group.payloads, strict=True):
            target = buffers.target(group.layers, manifest.leaves, segment)
            if target is not None:
                yield _Job(ref, group.layers, segment, target)


class _Held:
    """An object that stays open while several threads decode its chunks.

    What fails is told to the object that it happened to, and to no other: a store sets
    objects aside by what is raised while they are open.
    """

    def __init__(self, context: AbstractContextManager[ObjectReader], job: _Job) -> None:
        self.reader = context.__enter__()
        self.job = job
        self._context = context
        self._error: BaseException | None = None

    def decode(self, chunk: Batch) -> int:
        """Decode one chunk; returns its bytes."""
        try:
            self.reader.decode_chunk(chunk, self.job.target.destinations)
        except BaseException as error:
            self._error = error
            raise
        return chunk.nbytes

    def close(self) -> None:
        """Release the object. May raise a graver error than the one that :meth:`decode` met."""
        error = self._error
        self._context.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


class _Reading:
    """Reads jobs in parallel: whole payloads where there are many, else chunk by chunk."""

    def __init__(self, objects: Objects, manifest: Manifest, verification: Verification, stop: Stop) -> None:
        self._objects = objects
        self._manifest = manifest
        self._verification = verification
        self._stop = stop

    def run(self, jobs: list[_Job]) -> Generator[int, None, None]:
        """Yield payload bytes as they are done."""
        if len(jobs) >= _MANY * worker_count():
            yield from map_parallel(self._whole, jobs, stop=self._stop, ordered=False)
            return
        held: list[_Held] = []
        with ExitStack() as stack:
            stack.callback(_close_all, held)
            run_parallel(lambda job: held.append(_Held(self._open(job), job)), jobs, stop=self._stop)
            work = [(item, chunk) for item in held for chunk in item.reader.chunks]
            yield from map_parallel(lambda piece: piece[0].decode(piece[1]), work, stop=self._stop, ordered=False)
            for job in jobs:
                job.target.finish()

    @contextmanager
    def _open(self, job: _Job) -> Iterator[ObjectReader]:
        """Steps 8, 9 and 11: the object is the named one, is well-formed, and holds what the manifest says."""
        with self._objects.open_object(job.ref, self._manifest.namespace, verification=self._verification) as reader:
            self._check(reader, job)
            yield reader

    def _whole(self, job: _Job) -> int:
        with self._open(job) as reader:
            for chunk in reader.chunks:
                self._stop.checkpoint()
                reader.decode_chunk(chunk, job.target.destinations)
        job.target.finish()
        return job.ref.size

    def _check(self, reader: ObjectReader, job: _Job) -> None:
        expected = canonical_order(segment_tensors(job.paths, self._manifest.leaves, job.segment))
        if tuple(reader.specs) != tuple(expected):
            differing = sorted({s.name for s in set(expected) ^ set(reader.specs)})
            raise fail(
                "PAYLOAD_TENSORS_MISMATCH", f"payload {job.ref.digest}", expected=f"{len(expected)} tensors as planned",
                found=f"other tensors: {', '.join(differing[:8])}", fix="The writer was faulty: remove the entry.",
            )  # fmt: skip


def _close_all(held: list[_Held]) -> None:
    """Close every object, whatever closing one of them raises."""
    with ExitStack() as stack:
        for item in held:
            stack.callback(item.close)

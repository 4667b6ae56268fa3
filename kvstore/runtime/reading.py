"""Reading and decoding the objects of an entry into new buffers, in several threads.

Steps 8, 9 and 11 of the reading order, for each payload that the plan needs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import fail
from kvstore.format.groups import PayloadRef, Segment, segment_tensors, segments
from kvstore.format.manifest import Manifest
from kvstore.format.object import Batch, ObjectReader
from kvstore.format.seal import Place
from kvstore.format.tensors import TensorSpec, canonical_order
from kvstore.runtime.buffers import Buffers, Target
from kvstore.store.parallel import Stop, map_parallel, run_parallel, worker_count

if TYPE_CHECKING:
    from kvstore.store.read import Verification  # needs SQLAlchemy

__all__ = ["Job", "Objects", "Reading", "plan_jobs"]

Prints = dict[Place, bytes]
_MANY: Final = 4
"""Payloads for each worker from which on one payload is one piece of work; below, a chunk is."""
_LITTLE_BYTES: Final = 2 * 2**20
"""Payloads of so many bytes in all are decoded before another thread is awake."""


class Objects(Protocol):
    """Where objects are read from: :class:`kvstore.store.EntryStore`, or anything that keeps its promise."""

    def open_object(
        self, ref: PayloadRef, namespace: str, *, verification: Verification = "auto"
    ) -> AbstractContextManager[ObjectReader]:
        """A checked object of this payload; called from several threads."""


@dataclass(frozen=True, slots=True)
class Job:
    """One payload to read, and where it goes."""

    ref: PayloadRef
    paths: tuple[str, ...]
    segment: Segment
    target: Target


def plan_jobs(manifest: Manifest, buffers: Buffers) -> Iterator[Job]:
    """The payloads of which rows are needed, in group order."""
    for group in manifest.groups:
        for segment, ref in zip(segments(group.span), group.payloads, strict=True):
            target = buffers.target(group.layers, manifest.leaves, segment)
            if target is not None:
                yield Job(ref, group.layers, segment, target)


class _Held:
    """An object that stays open while several threads decode its chunks.

    What fails is told to the object that it happened to, and to no other: a store sets
    objects aside by what is raised while they are open.
    """

    def __init__(self, context: AbstractContextManager[ObjectReader], job: Job, prints: Prints | None) -> None:
        self.reader = context.__enter__()
        self.job = job
        self.prints = prints
        self._context = context
        self._error: BaseException | None = None

    def decode(self, chunk: Batch) -> int:
        """Decode one chunk; returns its bytes."""
        try:
            self.reader.decode_chunk(chunk, self.job.target.destinations, self.prints)
        except BaseException as error:
            self._error = error
            raise
        return chunk.nbytes

    def close(self) -> None:
        """Release the object. May raise a graver error than the one that :meth:`decode` met."""
        error = self._error
        self._context.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


class Reading:
    """Reads jobs in parallel: whole payloads where there are many, else chunk by chunk."""

    def __init__(
        self, objects: Objects, manifest: Manifest, verification: Verification, remember: bool, stop: Stop  # noqa: FBT001
    ) -> None:
        self.marks: dict[PayloadRef, bytes] = {}
        self._objects = objects
        self._manifest = manifest
        self._verification = verification
        self._remember = remember
        self._stop = stop
        self._right: dict[tuple[tuple[str, ...], int], tuple[TensorSpec, ...]] = {}

    def run(self, jobs: list[Job]) -> Generator[int, None, None]:
        """Yield payload bytes as they are done."""
        alone = sum(job.ref.size for job in jobs) <= _LITTLE_BYTES
        if len(jobs) >= _MANY * worker_count():
            yield from map_parallel(self._whole, jobs, stop=self._stop, ordered=False, alone=alone)
            return
        held: list[_Held] = []
        with ExitStack() as stack:
            stack.callback(_close_all, held)
            run_parallel(
                lambda job: held.append(_Held(self._open(job), job, self._prints(job))), jobs, stop=self._stop,
                alone=alone,
            )  # fmt: skip
            work = [(item, chunk) for item in held for chunk in item.reader.chunks]
            yield from map_parallel(
                lambda piece: piece[0].decode(piece[1]), work, stop=self._stop, ordered=False, alone=alone
            )
            for item in held:
                self._finish(item.job, item.reader, item.prints)

    @contextmanager
    def _open(self, job: Job) -> Iterator[ObjectReader]:
        """Steps 8, 9 and 11: the object is the named one, is well-formed, and holds what the manifest says."""
        with self._objects.open_object(job.ref, self._manifest.namespace, verification=self._verification) as reader:
            self._check(reader, job)
            yield reader

    def _whole(self, job: Job) -> int:
        prints = self._prints(job)
        with self._open(job) as reader:
            for chunk in reader.chunks:
                self._stop.checkpoint()
                reader.decode_chunk(chunk, job.target.destinations, prints)
            self._finish(job, reader, prints)
        return job.ref.size

    def _prints(self, job: Job) -> Prints | None:
        """Room for the fingerprints of what is decoded, where they are of use."""
        return {} if self._remember and job.target.whole else None

    def _finish(self, job: Job, reader: ObjectReader, prints: Prints | None) -> None:
        job.target.finish()
        mark = None if prints is None else reader.mark(prints)
        if mark is not None:
            self.marks[job.ref] = mark

    def _check(self, reader: ObjectReader, job: Job) -> None:
        kind = job.paths, job.segment.rows
        if self._right.get(kind) is reader.specs:  # objects that are cut alike share them
            return
        expected = canonical_order(segment_tensors(job.paths, self._manifest.leaves, job.segment))
        if reader.specs != expected:
            differing = sorted({s.name for s in set(expected) ^ set(reader.specs)})
            raise fail(
                "PAYLOAD_TENSORS_MISMATCH", f"payload {job.ref.digest}", expected=f"{len(expected)} tensors as planned",
                found=f"other tensors: {', '.join(differing[:8])}", fix="The writer was faulty: remove the entry.",
            )  # fmt: skip
        self._right[kind] = reader.specs


def _close_all(held: list[_Held]) -> None:
    """Close every object, whatever closing one of them raises."""
    with ExitStack() as stack:
        for item in held:
            stack.callback(item.close)

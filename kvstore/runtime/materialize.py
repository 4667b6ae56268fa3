"""From a stored entry to live caches in a bound model: everything is proved first, then all or nothing.

Steps 5 to 7 of the reading order need no object and no array. Only after the last of
them are arrays made; then objects are opened, checked and decoded into them in several
threads. If anything fails, or the caller stops it, the arrays are dropped and the
caller's own cache is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import fail, require_choice
from kvstore.format.compat import Policy, Wanted, mismatches, require_compatible
from kvstore.format.layout import Buffer, Layout
from kvstore.format.manifest import Manifest
from kvstore.format.prefix import DEFAULT_NAMESPACE
from kvstore.runtime.base import Base
from kvstore.runtime.binding import BoundModel, require_bound
from kvstore.runtime.buffers import Buffers, Need, needs
from kvstore.runtime.cut import require_cut
from kvstore.runtime.device import check_device_limits
from kvstore.runtime.probe import CacheOptions, Probe, make_cache, probe
from kvstore.runtime.reading import Objects, Reading, plan_jobs
from kvstore.store.parallel import Stop

if TYPE_CHECKING:
    from kvstore.store.read import Verification  # needs SQLAlchemy

__all__ = ["Filled", "Plan", "fill", "plan_restore"]

Progress = Callable[[int, int], None]


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
        base: What a later put of the cache may start from; empty where that was not asked for.
    """

    cache: list[Any]
    payload_bytes: int
    buffer_bytes: int
    objects: int
    base: Base


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
    plan = Plan(manifest, tokens, needs(manifest, tokens, templates), templates, {})
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


def fill(
    objects: Objects,
    plan: Plan,
    *,
    verification: Verification = "auto",
    remember: bool = False,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Filled:
    """Steps 8 to 12: read, check and decode every object that the plan needs, and make the caches.

    Must run on the thread that will use the caches: MLX streams belong to threads.

    Args:
        verification: ``auto`` or ``always``, as :meth:`Objects.open_object` takes it.
        remember: Take a fingerprint of each segment, for a put that has this entry as its base.
        progress: Called on this thread with payload bytes done and in all.
        cancelled: Asked between chunks, from several threads.

    Raises:
        IntegrityError, InvalidError, UnsupportedError: codes of the phases ``integrity`` and ``payload``.
        CancelledError: CANCELLED.
        KVStoreError: MATERIALIZE_FAILED where MLX could not make the arrays.
    """
    require_choice("verification", verification, ("auto", "always"))
    buffers = _allocate(plan)
    jobs = list(plan_jobs(plan.manifest, buffers))
    total, done = sum(job.ref.size for job in jobs), 0
    report = progress or (lambda done, total: None)
    report(0, total)
    reader = Reading(objects, plan.manifest, verification, remember, Stop(cancelled))
    with closing(reader.run(jobs)) as pieces:
        for size in pieces:
            done += size
            report(min(done, total), total)
    nbytes = buffers.nbytes
    # The jobs hold views of the arrays, and no view may outlive the release.
    count, base = len(jobs), Base.of(plan.manifest, reader.marks)
    jobs.clear()
    del pieces, reader
    buffers.clear_head_room()
    caches = buffers.release(plan.manifest.layers, plan.tokens, plan.templates)
    report(total, total)
    return Filled(caches, total, nbytes, count, base)


def _allocate(plan: Plan) -> Buffers:
    try:
        return Buffers(plan.needs)
    except (RuntimeError, MemoryError, ValueError) as error:
        raise fail(
            "MATERIALIZE_FAILED", f"MLX could not make the arrays ({error})", fix="Free memory and try again.",
            needed=plan.layout.total_bytes,
        ) from error  # fmt: skip

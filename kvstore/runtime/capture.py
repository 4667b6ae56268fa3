"""From a live cache to a manifest and its payloads, without a copy of the cache.

Everything that can be wrong with a cache is found before anything is hashed. What is
hashed, and later encoded, are views of the live buffers: the caller must leave the cache
alone until the entry is published. Token ids are few, and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from kvstore.errors import fail
from kvstore.format.fields import Fields
from kvstore.format.groups import Group, PayloadRef, Segment, plan_groups, segments
from kvstore.format.kinds import LOSSY_KINDS
from kvstore.format.layers import LayerRecord, leaves, parse_layers
from kvstore.format.manifest import Manifest, MethodRecord, PrefixRecord, check_manifest, token_spec
from kvstore.format.prefix import DEFAULT_NAMESPACE, MediaItem, TokenIds, as_token_ids, parse_namespace, prefix_digest
from kvstore.format.rules import check_layers
from kvstore.format.seal import mark_of, seal
from kvstore.format.tensors import DTYPE_SIZES, Payload, Seal
from kvstore.runtime.base import Base, place_of
from kvstore.runtime.binding import require_one_rank
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.kinds import continuation_of, describe, views
from kvstore.runtime.media import require_media
from kvstore.runtime.rows import Rows
from kvstore.store.parallel import Stop, map_parallel

if TYPE_CHECKING:
    from kvstore.format.object import Plan
    from kvstore.store.staging import Staging  # needs SQLAlchemy

__all__ = ["Captured", "capture"]

Views = dict[str, dict[str, Rows]]


@dataclass(frozen=True, slots=True)
class Captured:
    """A cache as an entry that is ready to be published.

    Attributes:
        token_ids: The prefix, as its payload holds it.
        source: The payload of each reference in the manifest, token ids included; views, made anew at each call.
        base: What a later put of this cache may start from; None where this one had no base either.
    """

    manifest: Manifest
    token_ids: TokenIds
    source: Callable[[PayloadRef], Payload]
    base: Base | None = None


def capture(
    cache: Sequence[Any],
    token_ids: Sequence[int] | TokenIds,
    identity: ModelIdentity,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    method: MethodRecord | None = None,
    media: Sequence[MediaItem] = (),
    base: Base | None = None,
    staging: Staging | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Captured:
    """Read a live cache.

    The cache is evaluated on the calling thread; digests are computed in others.

    Args:
        cache: One cache object for each layer, as ``make_prompt_cache`` returns them.
        token_ids: The tokens that the cache is the state of, all of them and no more.
        method: The lossy method that made the state, if one did.
        media: Images and the like within the prefix; all of them, where the model's config says which ids are media.
        base: What the cache was before: segments that are still the same are not hashed again.
        staging: Where payloads are encoded as they are hashed.
        progress: Called with bytes staged and in all, on this thread.
        cancelled: Asked between payloads.

    Raises:
        InvalidError: CACHE_EMPTY, CACHE_INCONSISTENT, CACHE_BATCHED, METHOD_MISSING, MEDIA_DIGEST_MISSING,
            TOKEN_ID_RANGE.
        UnsupportedError: CACHE_CLASS_UNKNOWN, DTYPE_UNSUPPORTED; SHARD_UNSUPPORTED in a process that is one of several
            ranks, whoever's word the identity is.
        CancelledError: CANCELLED.
    """
    require_one_rank()
    ids = as_token_ids(token_ids)
    name = parse_namespace(namespace)
    layers = describe(cache)
    _check_layers_agree(layers, int(ids.size))
    require_media(ids, media, identity.media_tokens)
    _check_method(layers, method)
    _check_records(layers, int(ids.size))
    jobs = _jobs(layers, views(cache))
    total = sum(
        prod(record.shape) * DTYPE_SIZES[record.dtype] for _, leaf in leaves(layers) for record in leaf.tensors.values()
    )
    marked: list[tuple[PayloadRef, bytes | None, Seal | None]] = []
    done = 0
    stop = Stop(cancelled) if staging is None else staging.stop
    with closing(map_parallel(lambda piece: _ref(piece, base, staging), _pieces(jobs, staging), stop=stop)) as results:
        for result in results:
            marked.append(result)
            done += result[0].size
            if progress is not None and staging is not None and staging.needed:
                progress(done, total)
    refs = [ref for ref, _, _ in marked]
    tokens = Payload.make({token_spec(ids.size).name: ("U32", ids)})
    token_ref = PayloadRef(tokens.digest(), tokens.size)
    manifest = check_manifest(
        Manifest(
            model=identity.model,
            tokenizer=identity.tokenizer,
            namespace=name,
            prefix=PrefixRecord(
                int(ids.size), prefix_digest(identity.digest, name, ids, tuple(media)), token_ref, tuple(media)
            ),
            layers=layers,
            groups=_groups(layers, refs),
            method=method,
            continuation=continuation_of(cache),
        )
    )
    makers: dict[PayloadRef, Callable[[], Payload]] = {
        ref: partial(_make, job, sealed) for job, (ref, _, sealed) in zip(jobs, marked, strict=True)
    }
    makers[token_ref] = lambda: tokens
    known = None if base is None else Base.of(manifest, {ref: mark for ref, mark, _ in marked if mark is not None})
    return Captured(manifest, ids, lambda ref: makers[ref](), known)


def _check_layers_agree(layers: tuple[LayerRecord, ...], token_count: int) -> None:
    """Every layer that was written has read exactly the token ids, and at least one was written.

    Raises:
        InvalidError: CACHE_EMPTY or CACHE_INCONSISTENT, naming the layer and both values.
    """
    written = [(path, layer) for path, layer in leaves(layers) if not layer.never_written]
    if not written or token_count == 0:
        raise fail(
            "CACHE_EMPTY", "the cache holds no tokens" if not written else "there are no token ids",
            fix="Prefill the model first, and pass the ids that it read.", layers=len(layers),
        )  # fmt: skip
    offsets = [(path, layer.offset) for path, layer in written if layer.offset is not None]
    for path, offset in offsets:
        if offset == token_count:
            continue
        first_path, first = offsets[0]
        if offset != first:
            raise fail(
                "CACHE_INCONSISTENT", f"layers[{path}].offset differs from layers[{first_path}].offset",
                expected=first, found=offset, fix="Put caches of one model, all at one position.",
            )  # fmt: skip
        raise fail(
            "CACHE_INCONSISTENT", f"layers[{path}].offset differs from the number of token ids",
            expected=token_count, found=offset,
            fix="Pass every id that the model has read into this cache, the last sampled one not among them.",
        )  # fmt: skip


def _check_records(layers: tuple[LayerRecord, ...], token_count: int) -> None:
    """The format's own rules, before anything is planned by these numbers: they may come out of anybody's file.

    Raises:
        InvalidError, UnsupportedError: codes of steps 3 and 4 of the reading order.
    """
    parse_layers(Fields({"layers": [layer.to_json() for layer in layers]}, "", ("layers",)), "layers")
    check_layers(layers, token_count)


def _check_method(layers: tuple[LayerRecord, ...], method: MethodRecord | None) -> None:
    """Without a method's name, nobody who asks for lossless state could be kept from a sparse entry."""
    sparse = [path for path, layer in leaves(layers) if layer.kind in LOSSY_KINDS]
    if sparse and method is None:
        raise fail(
            "METHOD_MISSING", f"layers[{sparse[0]}] holds fewer rows than tokens, and no method is named",
            fix="Pass method=MethodRecord.make(name, config).", layers=sparse,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Job:
    """One payload: the rows of a segment in all layers of its group."""

    paths: tuple[str, ...]
    tensors: Sequence[tuple[str, str, Rows]]
    segment: Segment
    keep: int

    def make(self) -> Payload:
        """The payload, as views wherever the rows lie together."""
        first, count = self.segment.first, self.segment.rows
        return Payload.make({name: (dtype, rows.read(first, count)) for name, dtype, rows in self.tensors})


def _jobs(layers: tuple[LayerRecord, ...], rows: Views) -> list[_Job]:
    by_path, jobs = dict(leaves(layers)), []
    for span, paths in plan_groups(layers):
        tensors = [
            (f"{path}.{role}", record.dtype, rows[path][role])
            for path in paths for role, record in by_path[path].tensors.items()
        ]  # fmt: skip
        jobs += [_Job(paths, tensors, segment, span.keep) for segment in segments(span)]
    return jobs


_Piece = tuple[_Job, Payload, "Sequence[Plan] | None"]


def _pieces(jobs: Sequence[_Job], staging: Staging | None) -> Iterator[_Piece]:
    """Payloads, and how they shall be encoded ahead."""
    for job in jobs:
        payload = job.make()
        yield job, payload, None if staging is None else staging.plans(payload)


def _ref(
    piece: _Piece, base: Base | None, staging: Staging | None
) -> tuple[PayloadRef, bytes | None, Seal | None]:
    """A payload's reference, its mark where there is a base, and, where it is to be encoded later, its seal."""
    job, payload, plans = piece
    ahead = staging if plans is not None else None
    with nullcontext(payload) if ahead is None else ahead.copied(payload) as held:
        mark = None if base is None else mark_of(held)
        if base is not None and mark is not None:
            known = base.ref(place_of(job.paths, job.segment, keep=job.keep), mark)
            if known is not None:
                return known, mark, None
        if ahead is not None and plans is not None:
            return PayloadRef(ahead.encode(held, plans), payload.size), mark, None
        sealed = seal(held)
        return PayloadRef(sealed.digest, payload.size), mark, sealed


def _make(job: _Job, sealed: Seal | None) -> Payload:
    return replace(job.make(), seal=sealed)


def _groups(layers: tuple[LayerRecord, ...], refs: Sequence[PayloadRef]) -> tuple[Group, ...]:
    remaining = iter(refs)
    return tuple(
        Group(span, paths, tuple(islice(remaining, len(segments(span))))) for span, paths in plan_groups(layers)
    )

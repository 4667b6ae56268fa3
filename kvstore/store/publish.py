"""Putting an entry: encode and hash with no lock held, publish under the index's lock, rows last.

1. Which payloads are not there, in good order? One query, one look at each file.
2. Those are encoded, hashed, written to a session of temporary files and flushed, by a
   pool of threads; memory is bounded by the payloads in flight.
3. Under the write lock each payload is looked at again. One that is live is used, a
   doomed one is raised, the others are moved to their names. Then the manifest, the
   receipt, and the rows.
4. Where a payload has gone since step 1, the lock is given back and step 1 begins anew.

An entry that is there already costs one query and writes nothing. Whatever ends a put
early, a signal included, leaves no temporary file and no visible half of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kvstore.errors import NotFoundError, fail
from kvstore.format.digest import Digest
from kvstore.format.groups import PayloadRef
from kvstore.format.manifest import check_prefix, parse_manifest, token_spec
from kvstore.format.object import Choice, ObjectParts, Plan
from kvstore.format.receipt import Receipt
from kvstore.format.seal import changed, seal
from kvstore.format.tensors import Payload
from kvstore.store.clock import now_micros
from kvstore.store.commit import commit, survey
from kvstore.store.entries import annotate_entry, label_entry, touch
from kvstore.store.naming import parse_label
from kvstore.store.objects import Staged
from kvstore.store.opening import Opened
from kvstore.store.parallel import Stop, map_parallel
from kvstore.store.put import Put
from kvstore.store.staging import Staging
from kvstore.store.temp import Session

__all__ = ["PayloadSource", "Progress", "Written", "publish"]

PayloadSource: TypeAlias = Callable[[PayloadRef], Payload]
"""Gives a payload on demand; called on the putting thread, only for what is not stored yet."""
Progress: TypeAlias = Callable[[int, int], None]
"""Called with payload bytes done and to do, on the putting thread."""
_MOST_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Written:
    """What a put did.

    Attributes:
        created: Whether the entry is new.
        receipt: The write receipt; kept in the store only where something was written.
        raw_bytes: Of all payloads of the entry, token ids included.
        stored_bytes: Written now.
        objects_written, objects_reused: Payloads that were encoded now, and that were there.
    """

    entry_id: Digest
    created: bool
    receipt: Receipt
    raw_bytes: int
    stored_bytes: int
    objects_written: int
    objects_reused: int


def publish(
    opened: Opened, put: Put, source: PayloadSource, *, staging: Staging | None = None,
    progress: Progress | None = None, cancelled: Callable[[], bool] | None = None,
) -> Written:  # fmt: skip
    """Store an entry durably.

    Args:
        staging: Payloads of the entry that have been encoded already.

    Raises:
        InvalidError: the manifest breaks a rule, or the token ids are not its own.
        IntegrityError: PAYLOAD_DIGEST_MISMATCH, where the source gave another payload than the manifest names.
        CancelledError: CANCELLED.
        StoreError, SpaceError, BusyError: of the store.
    """
    opened.index.refuse_read_only()
    tokens = _check(put)
    stop = Stop(cancelled)
    absent, unchanged = survey(opened, put)
    if unchanged:
        # Removed by another process just now: then it is put like a new one.
        with suppress(NotFoundError):
            return _nothing_new(opened, put)
    ahead = {} if staging is None else staging.staged
    staged: dict[Digest, Staged] = {}
    with opened.session() if staging is None else nullcontext(staging.session) as session:
        for _ in range(_MOST_TRIES):
            staged |= {ref.digest: ahead[ref.digest] for ref in absent if ref.digest in ahead}
            wanted = [ref for ref in absent if ref.digest not in staged]
            for item in _stage(opened, session, put, source, tokens, wanted, stop, progress):
                staged[item.name.payload] = item
            outcome = commit(opened, session, put, staged, stop.checkpoint)
            if outcome is not None:
                return Written(
                    put.entry_id, outcome.created, outcome.receipt, put.raw_bytes, outcome.stored_bytes,
                    outcome.objects_written, outcome.objects_reused,
                )  # fmt: skip
            absent, _ = survey(opened, put)
    raise fail("STORE_BUSY", "objects of this entry are removed as fast as they are put", fix="Try again.")


def _nothing_new(opened: Opened, put: Put) -> Written:
    """The entry is there: at most its label and annotations are set."""
    now = now_micros()
    if put.label is not None or put.annotations:
        with opened.index.write() as connection:
            if put.label is not None:
                label_entry(connection, put.label, put.entry_id, now)
            annotate_entry(connection, put.entry_id, put.annotations)
    touch(opened, put.entry_id)
    receipt = put.receipt(now, stored_bytes=0, written=0, reused=len(put.refs))
    return Written(put.entry_id, False, receipt, put.raw_bytes, 0, 0, len(put.refs))  # noqa: FBT003


def _check(put: Put) -> Payload:
    """Refuse what no reader would accept; gives the token ids as a payload."""
    parse_manifest(put.manifest.data)
    check_prefix(put.manifest, put.token_ids)
    if put.label is not None:
        parse_label(put.label)
    spec = token_spec(put.manifest.token_count)
    tokens = Payload.make({spec.name: (spec.dtype, put.token_ids)})
    if tokens.digest() != put.manifest.prefix.token_ids.digest:
        raise fail(
            "PAYLOAD_DIGEST_MISMATCH", "the digest of the token ids", expected=put.manifest.prefix.token_ids.digest,
            found=tokens.digest(), fix="Make the manifest from these token ids.",
        )  # fmt: skip
    return tokens


def _stage(
    opened: Opened, session: Session, put: Put, source: PayloadSource, tokens: Payload, wanted: list[PayloadRef],
    stop: Stop, progress: Progress | None,
) -> Iterator[Staged]:  # fmt: skip
    """Encode and write payloads in the pool; the source is asked on this thread, as room appears."""
    total, done = sum(ref.size for ref in wanted), 0
    token_ref = put.manifest.prefix.token_ids
    choice = Choice()

    def pieces() -> Iterator[tuple[PayloadRef, Payload, Sequence[Plan] | None]]:
        for ref in wanted:
            payload = tokens if ref == token_ref else source(ref)
            # Chosen here, in order: in the pool whoever is first would choose for all.
            yield ref, payload, choice.plans(payload) if put.codec == "small" else None

    def work(piece: tuple[PayloadRef, Payload, Sequence[Plan] | None]) -> Staged:
        return _encode(opened, session, put, *piece, stop)

    with closing(map_parallel(work, pieces(), stop=stop)) as results:
        for ref, staged in zip(wanted, results, strict=True):
            done += ref.size
            if progress is not None:
                progress(done, total)
            yield staged


def _encode(
    opened: Opened, session: Session, put: Put, ref: PayloadRef, payload: Payload, plans: Sequence[Plan] | None,
    stop: Stop,
) -> Staged:  # fmt: skip
    # Whatever its source says, what is encoded is proved to be what was hashed.
    sealed = seal(payload) if payload.seal is None else payload.seal
    if sealed.digest != ref.digest:
        raise changed(ref.digest, sealed.digest)
    stop.checkpoint()
    parts = ObjectParts(
        replace(payload, seal=sealed), digest=ref.digest, namespace=put.manifest.namespace, codec=put.codec,
        plans=plans, checkpoint=stop.checkpoint,
    )  # fmt: skip
    return opened.objects.stage(session, ref.digest, parts)

"""``kvstore.Store``: live caches in, live caches out; what people use.

Bytes, manifests and receipts are the business of :class:`kvstore.store.EntryStore`,
which needs no MLX and is at hand as :attr:`Store.entries`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from kvstore.errors import KVStoreError, NotFoundError, fail, require_choice
from kvstore.format.compat import Policy, signature
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.manifest import MethodRecord
from kvstore.format.object import Codec
from kvstore.format.prefix import DEFAULT_NAMESPACE, MediaItem, TokenIds, as_token_ids, parse_namespace
from kvstore.format.receipt import Receipt
from kvstore.runtime.base import Base, Bases
from kvstore.runtime.binding import BoundModel, identity_of
from kvstore.runtime.capture import capture
from kvstore.runtime.device import device_facts, library_versions
from kvstore.runtime.evidence import load_receipt
from kvstore.runtime.find import covering_receipt, find, in_full
from kvstore.runtime.fit import require_fit
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.kinds import describe
from kvstore.runtime.materialize import fill, plan_restore
from kvstore.runtime.prefill import shape_of
from kvstore.runtime.prefix_proof import require_prefix
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.probes import Probes
from kvstore.runtime.results import Details, Hit, Restored, entry_of
from kvstore.store.entries import EntryInfo, check_annotations
from kvstore.store.entry_store import EntryStore
from kvstore.store.explain import Asked
from kvstore.store.findings import Report
from kvstore.store.leases import LEASE_SECONDS, Lease, refreshing
from kvstore.store.naming import parse_label
from kvstore.store.read import Verification
from kvstore.store.remove import Removed

__all__ = ["Store"]

Progress = Callable[[int, int], None]
"""Called with payload bytes done and in all, on the calling thread."""
_BRIEF_BYTES = 16 * 2**20
_NAME_NOTE = "model."
"""Annotations that begin so are names of the model: shown in refusals, compared never."""


class Store:
    """A store of KV caches. Make one with :meth:`open`; may be shared between threads."""

    def __init__(self, entries: EntryStore) -> None:
        """Put live caches into ``entries``, and take them out."""
        self.entries = entries
        self._probes = Probes()
        self._bases = Bases()

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None = None, *, create: bool = True, read_only: bool = False) -> Store:
        """Open the store in a directory, by default the user's own.

        Raises:
            StoreError, UnsupportedError, IntegrityError: STORE_* codes.
        """
        return cls(EntryStore.open(None if path is None else Path(path), create=create, read_only=read_only))

    def close(self) -> None:
        """Release the index."""
        self.entries.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def put(
        self, cache: Sequence[Any], *, token_ids: Sequence[int] | TokenIds, model: BoundModel | ModelIdentity,
        namespace: str = DEFAULT_NAMESPACE, label: str | None = None, annotations: Mapping[str, Json] | None = None,
        codec: Codec = "small", method: MethodRecord | None = None, media: Sequence[MediaItem] = (),
        base: Hit | Restored | Receipt | None = None, remember: bool = False,
        if_covered: Literal["store", "skip"] = "store", progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Receipt:  # fmt: skip
        """Store a cache; when this returns, it survives a power cut. The same cache again writes nothing.

        Leave the cache alone meanwhile: its arrays are read where they are.

        Args:
            cache: The model's caches, evaluated or not.
            token_ids: The tokens that the cache is the state of, all of them and no more.
            model: What made the cache.
            label: A name for the entry; one that another entry had moves here.
            annotations: Facts about the entry, by name.
            codec: ``small`` or ``fast``; no part of the entry's identity.
            method: The lossy method that made the state, if one did.
            media: Images and the like within the prefix.
            base: What the cache was loaded from or last put as; what is still the same is not hashed again. The
                result is the same with and without it, whatever became of the arrays and of that entry meanwhile.
            remember: Keep fingerprints as a load does, so that the receipt can be the next put's base; always done
                where there is a base.
            if_covered: ``skip`` to write nothing where an entry of the same shape and method holds all of these
                tokens; with a label or annotations, one that ends where they do.
            cancelled: Asked between steps, from several threads.

        Returns:
            The write receipt; its subject is the entry id. With ``skip`` it may be that of a longer entry.

        Raises:
            UsageError: USAGE, LABEL_INVALID.
            InvalidError: CACHE_EMPTY, CACHE_INCONSISTENT, CACHE_BATCHED, TOKEN_ID_RANGE; FIELD_RANGE, JSON_* for
                annotations.
            UnsupportedError: CACHE_CLASS_UNKNOWN, DTYPE_UNSUPPORTED.
            IncompatibleError: MODEL_UNBOUND, BINDING_MISMATCH.
            StoreError, SpaceError, BusyError, CancelledError: from the store.
        """
        require_choice("if_covered", if_covered, ("store", "skip"))
        before = None if base is None else entry_of(base)
        check_annotations({} if annotations is None else annotations)
        if label is not None:
            parse_label(label)
        identity, layers = identity_of(model), describe(cache)
        made = self._probes.layers(model)
        if made is not None:
            require_fit(layers, made)
        if if_covered == "skip":
            asked = Asked(identity.model, namespace, as_token_ids(token_ids), signature(layers), tuple(media))
            there = covering_receipt(self.entries, asked, method, label=label, annotations=annotations)
            if there is not None:
                return there
        known = self._bases.get(before) if before is not None else Base() if remember else None
        names = {_NAME_NOTE + name: text for name, text in identity.names.items()}
        with self._kept(before) as lease, self.entries.staging(
            namespace=parse_namespace(namespace), codec=codec, cancelled=cancelled
        ) as staging:
            report = refreshing(lease, progress)
            captured = capture(
                cache, token_ids, identity, namespace=namespace, method=method, media=media, base=known,
                staging=staging, progress=report, cancelled=cancelled,
            )  # fmt: skip
            receipt = self.entries.publish(
                captured.manifest, captured.source, token_ids=captured.token_ids, codec=codec, label=label,
                annotations={**names, **(annotations or {})}, libraries=library_versions(),
                device=device_facts() if isinstance(model, BoundModel) else None, staging=staging, progress=report,
                cancelled=cancelled,
            ).receipt  # fmt: skip
        if captured.base is not None:
            self._bases.keep(receipt.subject, captured.base)
        return receipt

    def covered(
        self, token_ids: Sequence[int] | TokenIds, *, model: BoundModel | ModelIdentity,
        options: CacheOptions | None = None, quantized_kv_start: int = 0, namespace: str = DEFAULT_NAMESPACE,
        label: str | None = None,
    ) -> Receipt | None:  # fmt: skip
        """What a :meth:`put` with ``skip`` would return of a prefill of these ids, before that is computed.

        A label goes to the entry, which then ends where the prefill would.

        Returns:
            The receipt, or None where the ids have to be read.

        Raises:
            InvalidError: TOKEN_ID_RANGE, LABEL_INVALID.
            IncompatibleError: MODEL_UNBOUND, BINDING_MISMATCH.
        """
        ids = as_token_ids(token_ids)
        if ids.size == 0:
            return None
        shape, count = shape_of(
            lambda chosen: self._probes(model, chosen), int(ids.size), options or CacheOptions(),
            quantized_kv_start=quantized_kv_start,
        )  # fmt: skip
        asked, _ = self._asked(ids[:count], model, shape, namespace, ())
        return covering_receipt(self.entries, asked, None, label=label, annotations=None)

    def match(
        self, token_ids: Sequence[int] | TokenIds, *, model: BoundModel | ModelIdentity,
        options: CacheOptions | None = None, namespace: str = DEFAULT_NAMESPACE, method: str | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Hit:  # fmt: skip
        """Find the entry that restores the most of these ids; no payload is read.

        The last id is never part of a match: a model needs one token to evaluate. The hit says what a load will
        read, and why it does not reach further; a miss says whose prefix it would have been.

        Args:
            options: How the receiving caches shall be shaped; entries of another shape do not match.
            method: Lossy method whose entries are acceptable beside lossless ones.

        Raises:
            InvalidError: TOKEN_ID_RANGE.
            IncompatibleError: MODEL_UNBOUND, BINDING_MISMATCH.
        """
        asked, chosen = self._asked(token_ids, model, options, namespace, media)
        hit = replace(find(self.entries, asked, options=chosen, method=method), asked=asked)
        return hit if hit else in_full(self.entries, asked, hit)

    def explain(
        self, token_ids: Sequence[int] | TokenIds, *, model: BoundModel | ModelIdentity,
        options: CacheOptions | None = None, namespace: str = DEFAULT_NAMESPACE, method: str | None = None,
        media: Sequence[MediaItem] = (), other_namespaces: bool = False,
    ) -> Hit:  # fmt: skip
        """:meth:`match`, with every reason in full: the field by which a model or a cache's shape differs.

        Args:
            other_namespaces: Also say what other namespaces hold; not for those whom namespaces shall keep apart.

        Raises:
            InvalidError, IncompatibleError: as :meth:`match`.
        """
        asked, chosen = self._asked(token_ids, model, options, namespace, media)
        hit = replace(find(self.entries, asked, options=chosen, method=method), asked=asked)
        return in_full(self.entries, asked, hit, namespaces=other_namespaces)

    def load(
        self, wanted: Hit | str, *, into: BoundModel, policy: Policy = "strict", options: CacheOptions | None = None,
        namespace: str | None = None, method: str | None = None, verification: Verification = "auto",
        remember: bool = True, progress: Progress | None = None, cancelled: Callable[[], bool] | None = None,
        budget: int | None = None,
    ) -> Restored:  # fmt: skip
        """Restore caches for a model, all or nothing, on the thread that will use them.

        Args:
            wanted: A hit, which is restored at its token count; or an entry's id, prefix of an id, or label, which is
                restored whole.
            into: The receiving model.
            policy: ``strict``, or ``tokens`` where the chat template may differ.
            options, namespace, method: As for :meth:`match`; a hit brings its own.
            verification: ``auto``, or ``always`` to check the digest of every payload too.
            remember: Keep a fingerprint of each segment in memory, for a put that has this load as its base.
            cancelled: Asked between steps, from several threads.
            budget: Bytes that the caches may take; by default what the device has free.

        Raises:
            NotFoundError: NO_PREFIX for a miss, NOT_FOUND.
            IncompatibleError: the entry is of another model, or cannot be restored there; before anything is read.
                PREFIX_NOT_MATCHED where the index named an entry that does not begin the ids of the hit.
            SpaceError: DEVICE_BUFFER_TOO_LARGE, DEVICE_MEMORY_SHORT; likewise.
            IntegrityError: bytes are missing or damaged.
            CancelledError: CANCELLED.
        """
        hit = self._hit(wanted, options, namespace, method)
        entry_id = hit.entry_id
        if entry_id is None:
            raise _miss(hit)
        manifest = self.entries.manifest(entry_id)
        tokens = hit.token_count or manifest.token_count
        plan = plan_restore(
            manifest, tokens, into, options=hit.options, namespace=hit.namespace, policy=policy, method=hit.method,
            names=lambda: self._names(entry_id), prober=self._probes, budget=budget,
        )  # fmt: skip
        # A load of little that calls nobody meanwhile has ended before a lease of it could be seen.
        brief = progress is None and cancelled is None and plan.layout.total_bytes <= _BRIEF_BYTES
        with nullcontext() if brief else self.entries.while_leased(entry_id) as lease:
            if hit.asked is not None:
                require_prefix(self.entries, manifest, hit.asked, tokens)
            filled = fill(
                self.entries, plan, verification=verification, remember=remember,
                progress=refreshing(lease, progress), cancelled=cancelled,
            )  # fmt: skip
        if remember:
            self._bases.keep(entry_id, filled.base)
        self.entries.touch(entry_id)
        return Restored(filled.cache, tokens, load_receipt(plan, filled, verification=verification))

    def list(self, *, namespace: str | None = None, limit: int | None = None) -> list[EntryInfo]:
        """Entries, the one made or used last first; use is noted once an hour."""
        return self.entries.entries(namespace=namespace, limit=limit)

    def show(self, ref: str) -> Details:
        """One entry with its manifest and receipts. Raises NOT_FOUND, REF_AMBIGUOUS."""
        entry_id = self.entries.resolve(ref)
        return Details(
            self.entries.info(entry_id), self.entries.manifest(entry_id), tuple(self.entries.receipts(entry_id))
        )

    def verify(
        self, refs: Sequence[str] | None = None, *, deep: bool = False, progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Report:  # fmt: skip
        """Check entries, or the whole store; ``deep`` also decodes every payload and checks its digest.

        Raises:
            NotFoundError, UsageError: NOT_FOUND, REF_AMBIGUOUS. What is wrong with the store is in the report.
        """
        ids = None if refs is None else [self.entries.resolve(ref) for ref in refs]
        return self.entries.verify(ids, deep=deep, progress=progress, cancelled=cancelled)

    def lease(self, wanted: Hit | str, *, seconds: float = LEASE_SECONDS) -> Lease:
        """Protect an entry from removal inside a ``with``, from a match to the put of what became of it.

        A put with a base holds one by itself for as long as it runs, and so does a load, but for one that has ended
        in a moment. It ends with the process.

        Args:
            wanted: A hit; or an entry's id, prefix of an id, or label.
            seconds: How long it holds, if it is neither renewed nor released.

        Raises:
            NotFoundError: NO_PREFIX for a miss, NOT_FOUND.
            UsageError: REF_AMBIGUOUS; USAGE for a time that is none.
            StoreError, SpaceError, BusyError: of the store; STORE_READ_ONLY where nothing can be written.
        """
        hit = self._hit(wanted, None, None, None)
        if hit.entry_id is None:
            raise _miss(hit)
        return self.entries.lease(hit.entry_id, seconds=seconds)

    def remove(self, *refs: str, force: bool = False) -> Removed:
        """Remove entries, and the objects that no other entry needs.

        Raises:
            NotFoundError, UsageError: NOT_FOUND, REF_AMBIGUOUS.
            BusyError: ENTRY_LEASED, where somebody works from an entry and it is not to be removed by ``force``.
        """
        return self.entries.remove([self.entries.resolve(ref) for ref in refs], force=force)

    def label(self, name: str, ref: str) -> None:
        """Let a label mean an entry. Raises LABEL_INVALID, NOT_FOUND, REF_AMBIGUOUS."""
        self.entries.set_label(name, self.entries.resolve(ref))

    def labels(self) -> Mapping[str, Digest]:
        """All labels, with the entries that they mean."""
        return self.entries.labels()

    @contextmanager
    def _kept(self, entry_id: Digest | None) -> Iterator[Lease | None]:
        """A lease on the entry that a put starts from, if it is still there: what has gone is encoded again."""
        with ExitStack() as stack:
            lease = None
            if entry_id is not None:
                with suppress(NotFoundError):
                    lease = stack.enter_context(self.entries.while_leased(entry_id))
            yield lease

    def _hit(self, wanted: Hit | str, options: CacheOptions | None, namespace: str | None, method: str | None) -> Hit:
        """What to restore: a hit with whatever the caller says otherwise, or a reference as a hit on a whole entry."""
        hit = wanted if isinstance(wanted, Hit) else Hit(self.entries.resolve(wanted), 0, 0, ())
        return replace(
            hit, namespace=namespace or hit.namespace, options=options or hit.options or CacheOptions(),
            method=method or hit.method,
        )  # fmt: skip

    def _asked(
        self, token_ids: Sequence[int] | TokenIds, model: BoundModel | ModelIdentity, options: CacheOptions | None,
        namespace: str, media: Sequence[MediaItem],
    ) -> tuple[Asked, CacheOptions]:  # fmt: skip
        identity, chosen = identity_of(model), options or CacheOptions()
        shape = self._probes(model, chosen).signature
        # A copy: a load compares the hit with its ids, and the caller's array may change until then.
        return Asked(identity.model, namespace, as_token_ids(token_ids).copy(), shape, tuple(media)), chosen

    def _names(self, entry_id: Digest) -> dict[str, Json]:
        """The names of the model that an entry was made with."""
        notes = self.entries.info(entry_id).annotations
        return {name.removeprefix(_NAME_NOTE): text for name, text in notes.items() if name.startswith(_NAME_NOTE)}


def _miss(hit: Hit) -> KVStoreError:
    return fail(
        "NO_PREFIX", "nothing that is stored begins these token ids", fix="Prefill the model, and put the cache.",
        reasons=[reason.to_json() for reason in hit.reasons],
    )  # fmt: skip

"""A model's caches and those of its draft model, as two entries that belong together.

mlx_lm's server keeps both in one list, the main model's first. Each is an entry of its
own model; an annotation on each names the other, its *companion*, and so does the write
receipt of each. A pair is found and restored whole, at one position, or not at all: a
draft model without its cache would have to read everything again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.layers import LayerRecord, leaves
from kvstore.format.prefix import DEFAULT_NAMESPACE, TokenIds, as_token_ids
from kvstore.format.receipt import Receipt
from kvstore.runtime.binding import BoundModel, identity_of
from kvstore.runtime.capture import capture
from kvstore.runtime.fit import require_fit
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.kinds import describe
from kvstore.runtime.lazy import options_of
from kvstore.runtime.probe import CacheOptions, probe, probe_folder
from kvstore.runtime.results import Hit, Restored
from kvstore.runtime.store import Store

__all__ = [
    "DRAFT_NOTE", "MAIN_NOTE", "PairHit", "RestoredPair", "load_pair", "match_pair",
    "pair_of", "put_pair",
]  # fmt: skip

DRAFT_NOTE: Final = "companion.draft"
"""Annotation of a main entry: the entry id of its draft model's."""
MAIN_NOTE: Final = "companion.main"
"""Annotation of a draft model's entry: the entry id of the main one."""


@dataclass(frozen=True, slots=True)
class PairHit:
    """What :func:`match_pair` found; falsy on a miss.

    Attributes:
        main, draft: One hit of each model, both at one position; on a miss what each would have had by itself.
        token_count: That position; 0 on a miss.
    """

    main: Hit
    draft: Hit
    token_count: int

    def __bool__(self) -> bool:
        return self.token_count > 0


@dataclass(frozen=True, slots=True)
class RestoredPair:
    """Both models' caches at one position.

    Attributes:
        cache: One list, the main model's caches first, as mlx_lm's server keeps them.
        token_count: Tokens that both are the state of.
    """

    main: Restored
    draft: Restored
    token_count: int

    @property
    def cache(self) -> list[Any]:
        """All caches."""
        return [*self.main.cache, *self.draft.cache]


def put_pair(
    store: Store, cache: Sequence[Any], *, token_ids: Sequence[int] | TokenIds, model: BoundModel | ModelIdentity,
    draft: BoundModel | ModelIdentity, label: str | None = None, annotations: Mapping[str, Json] | None = None,
    **options: Any,
) -> tuple[Receipt, Receipt]:  # fmt: skip
    """Store both models' caches, each as an entry that names the other.

    A draft model may be some tokens behind, as speculation leaves it: its entry is that of the ids which it has read.
    Stopped between the two, it leaves the main entry alone, which is no pair; the next call completes it.

    Args:
        cache: One list, the main model's caches first.
        token_ids: What the main model has read.
        label, annotations: Of the main entry.
        options: ``namespace``, ``codec``, ``progress``, ``cancelled``, for both; see :meth:`Store.put`.

    Returns:
        The write receipts of the main entry and of the draft model's.

    Raises:
        InvalidError: CACHE_INCONSISTENT where the list is not as long as what both models make; as :meth:`Store.put`.
        KVStoreError: as :meth:`Store.put`.
    """
    ids, count, made = as_token_ids(token_ids), len(_own_layers(model)), _own_layers(draft)
    if len(cache) != count + len(made):
        raise fail(
            "CACHE_INCONSISTENT", "caches of a model and its draft model", expected=f"{count} + {len(made)}",
            found=len(cache), fix="Pass one list, the main model's caches first.",
        )  # fmt: skip
    main, behind = cache[:count], cache[count:]
    read = ids[: _tokens_of(behind, int(ids.size))]
    require_fit(describe(behind), made)
    # Each receipt names the other's entry, so one id has to be known before its entry is there: the draft model's,
    # whose cache is the small one, is worked out twice.
    identity, namespace = identity_of(draft), options.get("namespace", DEFAULT_NAMESPACE)
    named = capture(behind, read, identity, namespace=namespace, cancelled=options.get("cancelled")).manifest.entry_id
    notes = {**(annotations or {}), DRAFT_NOTE: named}
    first = store.put(main, token_ids=ids, model=model, label=label, annotations=notes, **options)
    second = store.put(behind, token_ids=read, model=draft, annotations={MAIN_NOTE: first.subject}, **options)
    return first, second


def match_pair(
    store: Store, token_ids: Sequence[int] | TokenIds, *, model: BoundModel | ModelIdentity,
    draft: BoundModel | ModelIdentity, options: CacheOptions | None = None, namespace: str = DEFAULT_NAMESPACE,
) -> PairHit:  # fmt: skip
    """Find the pair that restores the most of these ids, or nothing.

    Raises:
        InvalidError, IncompatibleError: as :meth:`Store.match`.
    """
    ids = as_token_ids(token_ids)
    main = store.match(ids, model=model, options=options, namespace=namespace)
    behind = store.match(ids, model=draft, options=options, namespace=namespace)
    return max(_pairs(store, main, behind), key=lambda pair: pair.token_count, default=PairHit(main, behind, 0))


def pair_of(store: Store, ref: str, *, into: BoundModel, draft_into: BoundModel) -> PairHit:
    """The pair of a main entry that is named, at the last position that both can be restored at.

    Args:
        ref: The main entry's id, prefix of an id, or label.

    Returns:
        Hits that :func:`load_pair` takes, each with its entry's own quantization and window.

    Raises:
        NotFoundError: NOT_FOUND; NO_PREFIX where the entry has no companion here, or none at a common position.
        UsageError: REF_AMBIGUOUS.
    """
    main = store.entries.resolve(ref)
    draft = _companion(store, main, DRAFT_NOTE)
    manifests = [] if draft is None else [store.entries.manifest(entry_id) for entry_id in (main, draft)]
    tokens = min((manifest.token_count for manifest in manifests), default=0)
    if not tokens or not all(manifest.can_cut(tokens) for manifest in manifests):
        raise fail(
            "NO_PREFIX", f"{ref} has no cache of a draft model beside it at one position", expected="a whole pair",
            found="a main entry alone" if draft is None else "entries of other positions",
            fix="Put both again, or load the entry alone.",
        )  # fmt: skip
    hits = [
        Hit(manifest.entry_id, tokens, tokens, (), manifest.namespace, options_of(manifest.layers, model.model))
        for manifest, model in zip(manifests, (into, draft_into), strict=True)
    ]
    return PairHit(hits[0], hits[1], tokens)


def load_pair(
    store: Store, wanted: PairHit, *, into: BoundModel, draft_into: BoundModel, **options: Any
) -> RestoredPair:
    """Restore both models' caches at one position; if one cannot be, none is.

    Args:
        options: As for :meth:`Store.load`, for both.

    Raises:
        NotFoundError: NO_PREFIX for a miss.
        KVStoreError: as :meth:`Store.load`.
    """
    if not wanted:
        raise fail("NO_PREFIX", "no pair that is stored begins these token ids", fix="Prefill both models.")
    main = store.load(wanted.main, into=into, **options)
    return RestoredPair(main, store.load(wanted.draft, into=draft_into, **options), wanted.token_count)


def _pairs(store: Store, main: Hit, draft: Hit) -> Iterator[PairHit]:
    """The pairs that the two models' own best hits belong to, where both can be restored at one position."""
    for hit, note in ((main, DRAFT_NOTE), (draft, MAIN_NOTE)):
        other = None if hit.entry_id is None else _companion(store, hit.entry_id, note)
        if other is None or hit.entry_id is None:
            continue
        ids = (hit.entry_id, other) if note == DRAFT_NOTE else (other, hit.entry_id)
        try:
            manifests = [store.entries.manifest(entry_id) for entry_id in ids]
        except KVStoreError:
            continue  # removed meanwhile: a miss
        tokens = min(hit.token_count, *(manifest.token_count for manifest in manifests))
        if tokens and all(manifest.can_cut(tokens) for manifest in manifests):
            both = [
                replace(one, entry_id=entry_id, token_count=tokens, _measure=None)
                for one, entry_id in zip((main, draft), ids, strict=True)
            ]
            yield PairHit(both[0], both[1], tokens)


def _own_layers(model: BoundModel | ModelIdentity) -> tuple[LayerRecord, ...]:
    """One record for each cache that a model makes, which may be more or fewer than its layers."""
    return (probe(model) if isinstance(model, BoundModel) else probe_folder(model.path)).layers


def _companion(store: Store, entry_id: Digest, note: str) -> Digest | None:
    """The entry that an entry names, where it is there."""
    named = store.entries.info(entry_id).annotations.get(note)
    try:
        return None if named is None else store.entries.resolve(str(named))
    except KVStoreError:
        return None


def _tokens_of(cache: Sequence[Any], most: int) -> int:
    """Tokens that caches have read, by their own offsets; ``most`` where none of them has one."""
    offsets = [leaf.offset for _, leaf in leaves(describe(cache)) if leaf.offset and not leaf.never_written]
    return min(offsets[0], most) if offsets else most

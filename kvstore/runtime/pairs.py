"""A model's caches and those of its draft model, as two entries that belong together.

mlx_lm's server keeps both in one list, the main model's first. Each is an entry of its
own model; an annotation on each names the other, its *companion*, and the main entry's
write receipt holds that too. A pair is found and restored whole, at one position, or not
at all: a draft model without its cache would have to read everything again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.layers import leaves
from kvstore.format.prefix import DEFAULT_NAMESPACE, TokenIds, as_token_ids
from kvstore.format.receipt import Receipt
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.kinds import describe
from kvstore.runtime.probe import CacheOptions, make_cache
from kvstore.runtime.results import Hit, Restored
from kvstore.runtime.store import Store

__all__ = ["DRAFT_NOTE", "MAIN_NOTE", "PairHit", "RestoredPair", "load_pair", "match_pair", "put_pair"]

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
    store: Store, cache: Sequence[Any], *, token_ids: Sequence[int] | TokenIds, model: BoundModel, draft: BoundModel,
    label: str | None = None, annotations: Mapping[str, Json] | None = None, **options: Any,
) -> tuple[Receipt, Receipt]:  # fmt: skip
    """Store both models' caches, each as an entry that names the other.

    A draft model may be some tokens behind, as speculation leaves it: its entry is that of the ids which it has read.

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
    ids, count = as_token_ids(token_ids), len(make_cache(model.model))
    total = count + len(make_cache(draft.model))
    if len(cache) != total:
        raise fail(
            "CACHE_INCONSISTENT", "caches of a model and its draft model", expected=f"{count} + {total - count}",
            found=len(cache), fix="Pass one list, the main model's caches first.",
        )  # fmt: skip
    main, behind = cache[:count], cache[count:]
    read = ids[: _tokens_of(behind, int(ids.size))]
    # The draft model's first: once the main entry can be found, what it names is there.
    second = store.put(behind, token_ids=read, model=draft, **options)
    notes = {**(annotations or {}), DRAFT_NOTE: second.subject}
    first = store.put(main, token_ids=ids, model=model, label=label, annotations=notes, **options)
    store.entries.annotate(first.subject, {DRAFT_NOTE: second.subject})
    store.entries.annotate(second.subject, {MAIN_NOTE: first.subject})
    return first, second


def match_pair(
    store: Store, token_ids: Sequence[int] | TokenIds, *, model: BoundModel, draft: BoundModel,
    options: CacheOptions | None = None, namespace: str = DEFAULT_NAMESPACE,
) -> PairHit:  # fmt: skip
    """Find the pair that restores the most of these ids, or nothing.

    Raises:
        InvalidError, IncompatibleError: as :meth:`Store.match`.
    """
    ids = as_token_ids(token_ids)
    main = store.match(ids, model=model, options=options, namespace=namespace)
    behind = store.match(ids, model=draft, options=options, namespace=namespace)
    return max(_pairs(store, main, behind), key=lambda pair: pair.token_count, default=PairHit(main, behind, 0))


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
        other = _companion(store, hit, note)
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


def _companion(store: Store, hit: Hit, note: str) -> Digest | None:
    """The entry that a hit's entry names, where it is there."""
    if hit.entry_id is None:
        return None
    named = store.entries.info(hit.entry_id).annotations.get(note)
    try:
        return None if named is None else store.entries.resolve(str(named))
    except KVStoreError:
        return None


def _tokens_of(cache: Sequence[Any], most: int) -> int:
    """Tokens that caches have read, by their own offsets; ``most`` where none of them has one."""
    offsets = [leaf.offset for _, leaf in leaves(describe(cache)) if leaf.offset and not leaf.never_written]
    return min(offsets[0], most) if offsets else most

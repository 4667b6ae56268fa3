"""What :class:`kvstore.Store` answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.manifest import Manifest
from kvstore.format.prefix import DEFAULT_NAMESPACE
from kvstore.format.receipt import Receipt
from kvstore.runtime.probe import CacheOptions
from kvstore.store.entries import EntryInfo
from kvstore.store.explain import Asked
from kvstore.store.match import Reason
from kvstore.store.rates import Worth

__all__ = ["Details", "Hit", "Reads", "Restored", "entry_of"]


@dataclass(frozen=True, slots=True)
class Reads:
    """What a load will read: entries, segments, and their bytes decoded and on disk."""

    entries: int
    segments: int
    payload_bytes: int
    stored_bytes: int

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "entries": self.entries, "payload_bytes": self.payload_bytes, "segments": self.segments,
            "stored_bytes": self.stored_bytes,
        }  # fmt: skip


@dataclass(frozen=True)
class Hit:
    """What :meth:`Store.match` found; falsy on a miss.

    Attributes:
        entry_id: The entry to restore from, or None.
        token_count: How many of the ids can be restored; 0 on a miss.
        common_tokens: How many the ids share with anything stored, restorable or not.
        reasons: Why it is not more.
        namespace, options, method: As the match was asked for; a load goes by them.
        asked: What the match was asked for; a load proves that the entry begins these ids.
    """

    entry_id: Digest | None
    token_count: int
    common_tokens: int
    reasons: tuple[Reason, ...]
    namespace: str = DEFAULT_NAMESPACE
    asked: Asked | None = field(default=None, kw_only=True, repr=False, compare=False)
    options: CacheOptions | None = None
    method: str | None = None
    _measure: Callable[[], Reads] | None = field(default=None, repr=False, compare=False)
    _judge: Callable[[Reads], Worth | None] | None = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.entry_id is not None

    @cached_property
    def reads(self) -> Reads | None:
        """What a load will read; None on a miss. Reads the entry's manifest when it is first asked for.

        Raises:
            NotFoundError: NOT_FOUND where the entry was removed meanwhile.
        """
        return None if self._measure is None else self._measure()

    @cached_property
    def worth(self) -> Worth | None:
        """What the hit saves, by what ``kvstore bench`` measured on this machine; None on a miss or where it did not.

        Raises:
            NotFoundError: as :attr:`reads`.
        """
        return None if self._judge is None or self.reads is None else self._judge(self.reads)


@dataclass(frozen=True, slots=True)
class Restored:
    """Live caches at a position, to be given to the model as ``cache=``.

    Attributes:
        cache: One object for each cache that the model makes.
        token_count: Tokens that they are the state of: go on with the ids after these.
        receipt: The load receipt.
    """

    cache: list[Any]
    token_count: int
    receipt: Receipt


def entry_of(source: Hit | Restored | Receipt) -> Digest | None:
    """The entry that a cache was found in, loaded from, or put as; None for a miss. Raises USAGE for anything else."""
    if isinstance(source, Hit):
        return source.entry_id
    if not isinstance(source, (Restored, Receipt)):
        raise fail("USAGE", "base", expected="a hit, a load or a receipt", found=type(source).__name__)
    return source.receipt.subject if isinstance(source, Restored) else source.subject


@dataclass(frozen=True, slots=True)
class Details:
    """All that is known of one entry."""

    info: EntryInfo
    manifest: Manifest
    receipts: tuple[Receipt, ...]

"""What :class:`kvstore.Store` answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.format.digest import Digest
from kvstore.format.manifest import Manifest
from kvstore.format.prefix import DEFAULT_NAMESPACE
from kvstore.format.receipt import Receipt
from kvstore.runtime.probe import CacheOptions
from kvstore.store.entries import EntryInfo
from kvstore.store.match import Reason

__all__ = ["Details", "Hit", "Restored"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What :meth:`Store.match` found; falsy on a miss.

    Attributes:
        entry_id: The entry to restore from, or None.
        token_count: How many of the ids can be restored; 0 on a miss.
        common_tokens: How many the ids share with anything stored, restorable or not.
        reasons: Why it is not more.
        namespace, options, method: As the match was asked for; a load goes by them.
    """

    entry_id: Digest | None
    token_count: int
    common_tokens: int
    reasons: tuple[Reason, ...]
    namespace: str = DEFAULT_NAMESPACE
    options: CacheOptions | None = None
    method: str | None = None

    def __bool__(self) -> bool:
        return self.entry_id is not None


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


@dataclass(frozen=True, slots=True)
class Details:
    """All that is known of one entry."""

    info: EntryInfo
    manifest: Manifest
    receipts: tuple[Receipt, ...]

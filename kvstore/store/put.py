"""What a put is: one entry and what is said about it, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from kvstore import __version__
from kvstore.errors import fail, require_choice
from kvstore.format.digest import Digest
from kvstore.format.fields import Fields
from kvstore.format.groups import PayloadRef
from kvstore.format.json import Json, canonical_bytes
from kvstore.format.manifest import Manifest
from kvstore.format.object import Codec
from kvstore.format.prefix import TokenIds, as_token_ids
from kvstore.format.receipt import Receipt
from kvstore.store.clock import micros_text
from kvstore.store.entries import check_annotations
from kvstore.store.opening import Durability

__all__ = ["Put"]


@dataclass(frozen=True)
class Put:
    """One entry to be stored.

    Attributes:
        manifest: What the entry is.
        token_ids: Its token ids; a copy of those given, as of the annotations and libraries.
        codec: How payloads that are new are encoded.
        label, annotations: Mutable facts about it.
        libraries, device: For the receipt: what the cache was computed with.
        durability: For the receipt.
    """

    manifest: Manifest
    token_ids: TokenIds
    codec: Codec = "small"
    label: str | None = None
    annotations: Mapping[str, Json] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Json] | None = None
    durability: Durability = "normal"

    def __post_init__(self) -> None:
        """Take ids and facts that nobody else can write to: what is checked and hashed first is then what is stored.

        Raises:
            UsageError, InvalidError: for a codec, libraries or a device that is none; as :func:`check_annotations`.
        """
        require_choice("codec", self.codec, get_args(Codec))
        check_annotations(self.annotations)
        _check_libraries(self.libraries)
        if self.device is not None:
            _check_facts("device", self.device)
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))
        for name in ("annotations", "libraries"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    @property
    def entry_id(self) -> Digest:
        """The manifest's digest."""
        return self.manifest.entry_id

    @cached_property
    def refs(self) -> tuple[PayloadRef, ...]:
        """Every payload of the entry, the token ids last, each once."""
        return self.manifest.all_payloads()

    @cached_property
    def raw_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(ref.size for ref in self.refs)

    def receipt(self, made_at: int, *, stored_bytes: int, written: int, reused: int) -> Receipt:
        """The write receipt.

        Args:
            made_at: Microseconds since 1970, UTC.
            stored_bytes: Bytes of the objects written.
            written, reused: Numbers of objects.
        """
        manifest = self.manifest
        return Receipt(
            type="write",
            subject=self.entry_id,
            made_at=micros_text(made_at),
            producer={"name": "kvstore", "version": __version__},
            libraries=dict(self.libraries),
            device=self.device,
            checks={"manifest": "verified", "payload_digests": "verified", "prefix": "verified"},
            facts={
                "annotations": dict(self.annotations),
                "codec": self.codec,
                "durability": self.durability,
                "label": self.label,
                "lowest_cut": manifest.lowest_cut,
                "objects_reused": reused,
                "objects_written": written,
                "payload_bytes": self.raw_bytes,
                "stored_bytes": stored_bytes,
                "token_count": manifest.token_count,
                "token_count_is": "asserted" if manifest.asserted else "verified",
            },
        )


def _check_libraries(libraries: Mapping[str, str]) -> None:
    _check_facts("libraries", libraries)
    fields = Fields(dict(libraries), "libraries", None)
    for name in libraries:
        fields.text(name)


def _check_facts(what: str, facts: object) -> None:
    """Refuse what a receipt cannot hold, before anything is done for it."""
    if not isinstance(facts, Mapping):
        raise fail("USAGE", what, expected="JSON values by names", found=repr(facts)[:80])
    canonical_bytes(dict(facts))

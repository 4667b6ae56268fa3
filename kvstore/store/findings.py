"""What a check of a store can find, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvstore.errors import KVStoreError
from kvstore.format.digest import Digest
from kvstore.format.json import Json

__all__ = ["FINDINGS", "REBUILD", "Finding", "Report"]

Severity = Literal["error", "notice"]

REBUILD: Final = "Rebuild the index from the files: `kvstore verify --rebuild-index`."
"""What to do about an index that is damaged or contradicts the files."""

FINDINGS: Final[Mapping[str, tuple[Severity, str]]] = {
    "INDEX_MISMATCH": ("error", REBUILD),
    "RECEIPT_MISSING": ("error", "None: what the receipt said is lost."),
    "RECEIPT_CORRUPT": ("error", "None: what the receipt said is lost."),
    "ORPHAN_OBJECT": ("notice", "None needed: it takes space only, and may be deleted."),
    "ORPHAN_MANIFEST": ("notice", "Take the entry in with `kvstore verify --rebuild-index`, or delete the file."),
    "ORPHAN_RECEIPT": ("notice", "Take it in with `kvstore verify --rebuild-index`, or delete the file."),
    "FOREIGN_FILE": ("notice", "Move it elsewhere: kvstore did not write it."),
    "DOOMED_LEFT": ("notice", "None needed: the next removal finishes it."),
    "LEASE_LEFT": ("notice", "None needed: the next removal drops it."),
    "TEMP_LEFT": ("notice", "None needed: opening the store for writing sweeps it."),
}
"""Codes that only a check gives; all others are those of ``kvstore.codes``, and errors."""

_ACTIONS: Final = {
    "STORE_CORRUPT": REBUILD,
    "STORED_DIGEST_MISMATCH": "It was set aside; put the cache again.",
    "STORED_SIZE_MISMATCH": "It was set aside; put the cache again.",
    "PAYLOAD_DIGEST_MISMATCH": "It was set aside; put the cache again.",
}
_PUT_AGAIN: Final = "Put the cache again, or remove the entry."


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        code: Of ``kvstore.codes.CODES`` or of :data:`FINDINGS`.
        subject: Entry id, payload digest, or path below the store's root.
        entries: The entries that it harms.
        action: What to do about it.
    """

    code: str
    severity: Severity
    subject: str
    message: str
    action: str
    entries: tuple[Digest, ...] = ()

    @classmethod
    def make(cls, code: str, subject: str, message: str, entries: tuple[Digest, ...] = ()) -> Finding:
        """A finding with its severity and action looked up."""
        severity, action = FINDINGS.get(code, ("error", _ACTIONS.get(code, _PUT_AGAIN)))
        return cls(code, severity, subject, message, action, entries)

    @classmethod
    def of_error(cls, error: KVStoreError, subject: str, entries: tuple[Digest, ...] = ()) -> Finding:
        """A finding from the error that reading gave."""
        return cls.make(error.code, subject, error.message, entries)

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "action": self.action, "code": self.code, "entries": list(self.entries), "message": self.message,
            "severity": self.severity, "subject": self.subject,
        }  # fmt: skip


@dataclass(slots=True)
class Report:
    """What was checked, and what was found.

    Attributes:
        entries, objects, receipts: How many of each.
        bytes_read: Stored bytes of the objects.
        deep: Whether payloads were decoded.
    """

    deep: bool
    entries: int = 0
    objects: int = 0
    receipts: int = 0
    bytes_read: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing harms any entry."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "bytes_read": self.bytes_read, "deep": self.deep, "entries": self.entries,
            "findings": [finding.to_json() for finding in self.findings], "objects": self.objects, "ok": self.ok,
            "receipts": self.receipts,
        }  # fmt: skip

"""Receipts: canonical JSON evidence that something was done with an entry.

Four types: ``write``, ``load``, ``verify``, ``conformance``. A receipt points at its
subject, never the reverse, so receipts add nothing to an entry's identity. Receipts
are monotonic: unknown fields are ignored, and nothing in a receipt can turn a refusal
into an acceptance. They are not signed in v1 and prove nothing about who made them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.digest import Digest, Readable, sha256_digest
from kvstore.format.fields import Fields, expect_object
from kvstore.format.json import Json, canonical_bytes, parse_canonical
from kvstore.limits import MAX_RECEIPT_BYTES

__all__ = ["CHECK_RESULTS", "RECEIPT_MEDIA_TYPE", "RECEIPT_TYPES", "Receipt", "parse_receipt"]

RECEIPT_MEDIA_TYPE: Final = "application/vnd.kvstore.receipt.v1+json"
RECEIPT_TYPES: Final = ("write", "load", "verify", "conformance")
CHECK_RESULTS: Final = ("verified", "not observable", "failed", "skipped")
_KNOWN: Final = frozenset((
    "checks", "device", "facts", "libraries", "made_at", "media_type", "producer", "subject", "type",
))  # fmt: skip
_TIME: Final = re.compile(
    r"([0-9]{4})-(0[1-9]|1[0-2])-([0-9]{2})T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?Z", re.ASCII
)
_DAYS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True)
class Receipt:
    """One receipt.

    Attributes:
        type: One of :data:`RECEIPT_TYPES`.
        subject: Entry id (for ``conformance``, the digest of the fixture index).
        made_at: RFC 3339 UTC time at which the act was finished.
        producer: ``name`` and ``version`` of the program.
        libraries: Versions of what it ran on, by name.
        device: ``backend``, ``name`` and what else is known; None where no device took part.
        checks: Check name to one of :data:`CHECK_RESULTS`.
        facts: What was done, in numbers and names; fields depend on the type (SPEC.md, Receipt).
        extra: Fields that this version does not know. They mean nothing here, but are kept, so that a receipt
            that was read has the bytes, and the digest, that it was read from.
    """

    type: str
    subject: Digest
    made_at: str
    producer: Mapping[str, str]
    libraries: Mapping[str, str]
    device: Mapping[str, Json] | None
    checks: Mapping[str, str]
    facts: Mapping[str, Json]
    extra: Mapping[str, Json] = field(default_factory=dict)

    @cached_property
    def data(self) -> bytes:
        """The canonical bytes."""
        return canonical_bytes(self.to_json())

    @cached_property
    def digest(self) -> Digest:
        """SHA-256 of the canonical bytes: the receipt's name."""
        return sha256_digest(self.data)

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            **self.extra,
            "checks": dict(self.checks),
            "device": None if self.device is None else dict(self.device),
            "facts": dict(self.facts),
            "libraries": dict(self.libraries),
            "made_at": self.made_at,
            "media_type": RECEIPT_MEDIA_TYPE,
            "producer": dict(self.producer),
            "subject": self.subject,
            "type": self.type,
        }


def parse_receipt(data: Readable) -> Receipt:
    """Parse a receipt; unknown fields are carried along, and ignored.

    Raises:
        InvalidError, UnsupportedError: json and schema codes.
    """
    value = parse_canonical(data, MAX_RECEIPT_BYTES, "receipt")
    fields = Fields(value, "", None)
    fields.require_media_type(RECEIPT_MEDIA_TYPE)
    return Receipt(
        type=_choice(fields.text("type", limit=None), "type", RECEIPT_TYPES),
        subject=fields.digest("subject"),
        made_at=_time(fields),
        producer=_producer(fields),
        libraries=_texts(fields, "libraries"),
        device=fields.nullable("device", lambda name: expect_object(fields.get(name), fields.path(name))),
        checks=_checks(fields),
        facts=expect_object(fields.get("facts"), fields.path("facts")),
        extra={name: item for name, item in value.items() if name not in _KNOWN},
    )


def _time(fields: Fields) -> str:
    """A time of a day that there is; a pattern alone would let 30 February pass."""
    text = fields.text("made_at", limit=None)
    match = _TIME.fullmatch(text)
    year, month, day = (0, 1, 0) if match is None else (int(part) for part in match.groups())
    leap = month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if not (year and 1 <= day <= _DAYS[month - 1] + leap):
        raise fail("FIELD_FORMAT", "made_at", expected="a time in UTC, as 2026-01-02T03:04:05.678901Z", found=text)
    return text


def _checks(fields: Fields) -> dict[str, str]:
    where = fields.path("checks")
    value = expect_object(fields.get("checks"), where)
    inner = Fields(value, where, None)
    return {name: _choice(inner.text(name, limit=None), inner.path(name), CHECK_RESULTS) for name in value}


def _producer(fields: Fields) -> dict[str, str]:
    texts = _texts(fields, "producer")
    inner = Fields(texts, fields.path("producer"), None)
    for name in ("name", "version"):
        inner.text(name)
    return texts


def _choice(value: str, where: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise fail("FIELD_FORMAT", where, expected="one of " + ", ".join(known), found=value)
    return value


def _texts(fields: Fields, name: str) -> dict[str, str]:
    value: Any = expect_object(fields.get(name), fields.path(name))
    inner = Fields(value, fields.path(name), None)
    return {key: inner.text(key) for key in value}

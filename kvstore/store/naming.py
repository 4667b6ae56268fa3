"""How entries are referred to: entry id, a unique prefix of it, or a label."""

from __future__ import annotations

import re
from typing import Final

import sqlalchemy as sa

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.limits import MAX_NAME_CHARS
from kvstore.store.schema import entries, labels

__all__ = ["entry_key", "parse_label", "resolve"]

_HEX: Final = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})", re.ASCII)
_SHOWN: Final = 10
_KEY: Final = sa.select(entries.c.entry_key).where(entries.c.entry_id == sa.bindparam("entry_id"))


def parse_label(name: str) -> str:
    """Check a label: printable, no space at its ends, and not to be taken for an entry id.

    Raises:
        UsageError: LABEL_INVALID.
    """
    sound = isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name == name.strip() and name.isprintable()
    if not sound:
        raise fail(
            "LABEL_INVALID", "a label", expected=f"1 to {MAX_NAME_CHARS} printable characters, no space at the ends",
            found=name if isinstance(name, str) else repr(name)[:80],
        )  # fmt: skip
    if _HEX.fullmatch(name) or name.startswith("sha256:"):
        raise fail("LABEL_INVALID", "a label", expected="a name that cannot be taken for an entry id", found=name)
    return name


def resolve(connection: sa.Connection, ref: str) -> Digest:
    """The entry that ``ref`` means.

    Raises:
        NotFoundError: NOT_FOUND.
        UsageError: REF_AMBIGUOUS, with the candidates; USAGE for what is no text.
    """
    if not isinstance(ref, str):
        raise fail("USAGE", "what an entry is named by", expected="an id, the start of one, or a label",
                   found=repr(ref)[:80])  # fmt: skip
    match = _HEX.fullmatch(ref)
    if match is None:
        return _by_label(connection, ref)
    lowest, highest = (Digest("sha256:" + match[1].ljust(64, fill)) for fill in "0f")
    found = connection.execute(
        sa.select(entries.c.entry_id).where(entries.c.entry_id.between(lowest, highest)).limit(_SHOWN + 1)
    ).scalars().all()  # fmt: skip
    if not found:
        raise fail(
            "NOT_FOUND", f"no entry's id begins with {match[1]}", fix="`kvstore ls` lists what is there.", ref=ref
        )
    if len(found) > 1:
        raise fail(
            "REF_AMBIGUOUS", f"several entry ids begin with {match[1]}", fix="Give more digits.", ref=ref,
            candidates=list(found[:_SHOWN]),
        )  # fmt: skip
    return Digest(found[0])


def entry_key(connection: sa.Connection, entry_id: Digest) -> int:
    """The entry's key inside the index.

    Raises:
        NotFoundError: NOT_FOUND.
    """
    key = connection.execute(_KEY, {"entry_id": entry_id}).scalar()
    if key is None:
        raise fail("NOT_FOUND", f"there is no entry {entry_id}", ref=entry_id)
    return int(key)


def _by_label(connection: sa.Connection, name: str) -> Digest:
    query = sa.select(entries.c.entry_id).join(labels, labels.c.entry_key == entries.c.entry_key)
    found = connection.execute(query.where(labels.c.name == name)).scalar()
    if found is None:
        raise fail(
            "NOT_FOUND", f"there is no entry with label {name!r}",
            fix="Name a label, an entry id, or at least 8 of its hex digits; `kvstore ls` lists what is there.",
            ref=name,
        )  # fmt: skip
    return Digest(found)

"""How entries are shown: as documents and as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvstore.cli.output import human_bytes, table

if TYPE_CHECKING:
    from kvstore.store.entries import EntryInfo

__all__ = ["entry_document", "entry_table", "model_name", "short_id"]


def entry_document(item: EntryInfo) -> dict[str, Any]:
    """One entry as ``--json`` shows it."""
    from kvstore.store.clock import micros_text

    return {
        **item.to_json(), "created_at": micros_text(item.created_at), "accessed_at": micros_text(item.accessed_at),
    }  # fmt: skip


def entry_table(items: Sequence[EntryInfo]) -> list[str]:
    """Entries as lines; none where there is none."""
    if not items:
        return []
    rows = [
        (
            short_id(item.entry_id), str(item.token_count), human_bytes(item.raw_bytes),
            human_bytes(item.stored_bytes), model_name(item), _marks(item),
        )
        for item in items
    ]  # fmt: skip
    return table(("ENTRY", "TOKENS", "RAW", "STORED", "MODEL", "LABELS"), rows, right=(1, 2, 3))


def short_id(entry_id: str) -> str:
    """Twelve digits: enough to name an entry again."""
    return entry_id.removeprefix("sha256:")[:12]


def model_name(item: EntryInfo) -> str:
    """What the model was called when the entry was put; the start of its digest where that is not known."""
    for key in ("model.repo", "model.path"):
        name = item.annotations.get(key)
        if isinstance(name, str) and name:
            return name if key == "model.repo" else PurePath(name).name
    return short_id(item.model_digest)


def _marks(item: EntryInfo) -> str:
    marks = [*item.labels, *(["(damaged)"] if item.damaged else []), *(["(pinned)"] if item.pinned else [])]
    return ", ".join(marks)

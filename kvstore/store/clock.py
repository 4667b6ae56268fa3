"""The store's clock: integer microseconds UTC in the index, RFC 3339 in documents."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final

__all__ = ["micros_text", "now_micros", "text_micros"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


def now_micros() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000


def micros_text(micros: int) -> str:
    """RFC 3339 with microseconds and ``Z``, as receipts hold it; the nearest that the calendar has."""
    return (_EPOCH + timedelta(microseconds=min(max(micros, 0), _LAST))).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def text_micros(text: str) -> int:
    """Microseconds of an RFC 3339 text in UTC; 0 where there is no such time, for anybody may write a receipt.

    A leap second counts as the one before it.
    """
    try:
        return (datetime.fromisoformat(text.replace(":60", ":59")) - _EPOCH) // timedelta(microseconds=1)
    except ValueError:
        return 0

"""How fast this machine restores and prefills: what ``kvstore bench`` measured, kept to judge hits by.

A rate belongs to a machine and to a store's volume, or to a machine and a model. So rates lie
in the user's cache folder, not in the store, which another machine may open too. They are best effort:
without them a hit is a hit, and nobody says how much it saves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.format.digest import Digest
from kvstore.store.file_digests import default_memory
from kvstore.store.fs import replace_file

__all__ = ["PrefillRate", "Rates", "RestoreRate", "Worth", "default_rates"]

R = TypeVar("R")

_VERSION: Final = 1
_MOST: Final = 1024
_MOST_SECONDS: Final = 1e6
_LEAST_RATE: Final = 1e-6
_MOST_RATE: Final = 1e18


@dataclass(frozen=True, slots=True)
class RestoreRate:
    """Seconds of any restore, and payload bytes a second beyond them."""

    fixed_seconds: float
    bytes_per_second: float

    def seconds(self, payload_bytes: int) -> float:
        """What restoring so many bytes takes."""
        return self.fixed_seconds + payload_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Tokens that a model reads in a second."""

    tokens_per_second: float

    def seconds(self, tokens: int) -> float:
        """What prefilling so many tokens takes."""
        return tokens / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class Worth:
    """What a hit saves, estimated from rates that were measured on this machine.

    Attributes:
        restore_seconds: What restoring takes.
        prefill_seconds: What computing the same tokens takes.
    """

    restore_seconds: float
    prefill_seconds: float

    @property
    def pays(self) -> bool:
        """Whether restoring is faster."""
        return self.restore_seconds < self.prefill_seconds

    def to_json(self) -> dict[str, Any]:
        """The JSON object, for people's programs and not for the format, which has no fractions."""
        return {
            "pays": self.pays, "prefill_seconds": round(self.prefill_seconds, 6),
            "restore_seconds": round(self.restore_seconds, 6),
        }  # fmt: skip


def default_rates() -> Path:
    """``kvstore-rates.json`` beside the memory of file digests."""
    return default_memory().with_name("kvstore-rates.json")


class Rates:
    """The rates in one file; a damaged or foreign file counts as none."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = default_rates() if path is None else path

    def restore(self, store_id: str) -> RestoreRate | None:
        """This machine's rate for a store, if it was measured."""
        return _parse(RestoreRate, self._load()["restore"].get(store_id))

    def prefill(self, model: Digest) -> PrefillRate | None:
        """This machine's rate for a model, by its digest, if it was measured."""
        return _parse(PrefillRate, self._load()["prefill"].get(model))

    def worth(self, store_id: str, model: Digest, *, payload_bytes: int, tokens: int) -> Worth | None:
        """What restoring saves, or None where one of the rates is unknown."""
        restore, prefill = self.restore(store_id), self.prefill(model)
        if restore is None or prefill is None:
            return None
        return Worth(restore.seconds(payload_bytes), prefill.seconds(tokens))

    def note(self, *, restore: Mapping[str, RestoreRate] | None = None,
             prefill: Mapping[Digest, PrefillRate] | None = None) -> None:  # fmt: skip
        """Remember rates, by store id and by model digest; where that is not possible, they are forgotten."""
        known = self._load()
        for kind, found in (("restore", restore or {}), ("prefill", prefill or {})):
            rows = {**known[kind], **{name: asdict(rate) for name, rate in found.items()}}
            known[kind] = dict(list(rows.items())[-_MOST:])
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps({"version": _VERSION, **known}, indent=1).encode() + b"\n")

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["version"] == _VERSION:
                return {kind: dict(document[kind]) for kind in ("restore", "prefill")}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return {"restore": {}, "prefill": {}}


def _parse(kind: Callable[..., R], row: Any) -> R | None:
    """A rate from its row; None where it is not one that a machine can have. A fixed cost may be 0, a rate may not."""
    try:
        values = {name: float(value) for name, value in row.items()}
        rate = kind(**values)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    bounds = {name: (0.0, _MOST_SECONDS) if name == "fixed_seconds" else (_LEAST_RATE, _MOST_RATE) for name in values}
    sound = all(low <= values[name] <= high for name, (low, high) in bounds.items())
    return rate if sound else None

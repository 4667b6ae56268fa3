"""Caches captured, encoded, and filled again, with objects kept in a dict instead of in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.format.groups import PayloadRef
from kvstore.format.object import ObjectReader, encode_object, parse_object
from kvstore.runtime.buffers import needs
from kvstore.runtime.capture import Captured, capture
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.materialize import Plan, fill
from tests.samples import MODEL, TOKENIZER

IDENTITY = ModelIdentity(MODEL, TOKENIZER, {}, Path("model"))


class MemoryObjects:
    """Objects by payload digest; counts how many were opened."""

    def __init__(self, captured: Captured, codec: Any = "small") -> None:
        self.data: dict[str, bytearray] = {}
        self.opened = 0
        for ref in captured.manifest.payloads():
            encoded = encode_object(captured.source(ref), digest=ref.digest, codec=codec)
            self.data[ref.digest] = bytearray(b"".join(encoded.parts))

    @contextmanager
    def open_object(self, ref: PayloadRef, namespace: str, *, verification: str = "auto") -> Iterator[ObjectReader]:
        self.opened += 1
        yield parse_object(memoryview(self.data[ref.digest]), digest=ref.digest, size=ref.size, namespace=namespace)


def ids(count: int) -> list[int]:
    return [(n * 7919 + 3) % 50_000 for n in range(count)]


def captured(caches: Sequence[Any], tokens: int, **options: Any) -> Captured:
    return capture(caches, ids(tokens), IDENTITY, **options)


def plan(made: Captured, tokens: int | None = None, templates: list[Any] | None = None) -> Plan:
    count = tokens or made.manifest.token_count
    return Plan(made.manifest, count, needs(made.manifest, count, templates), templates, {})


def restored(caches: Sequence[Any], tokens: int, *, at: int | None = None, codec: Any = "small") -> list[Any]:
    """The caches, through manifest and objects, at ``at`` or at their own position."""
    made = captured(caches, tokens)
    return fill(MemoryObjects(made, codec), plan(made, at)).cache

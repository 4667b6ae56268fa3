"""Ratio and speed of codecs on one cache: all in one process and on one thread, in turns.

What is stored is the same trimmed rows for each. General codecs get them as one run of bytes, as R1 gives them to
zstd; this project's encoder gets the views of the live cache that a put gives it, so its time holds the gathering of
strided rows, the choice of filters and the digest of what is stored, and its decoding the check of the object.
Everything is decoded into fresh memory, and compared with what it was once. Counted is processor time, so what a
second thread would take counts too.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import zstandard

from bench.cases import Case
from bench.machine import Others, wait_until_quiet

__all__ = ["measure"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_ZSTD_LEVELS: Final = (1, 3, 9, 19)
_SLOW: Final = ("zstd 19", "gzip 6")
_SLOW_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to store the rows.

    Attributes:
        encode: Gives the parts that would be written.
        decode: Takes them; gives the rows as bytes, in pieces.
    """

    name: str
    encode: Callable[[], list[Any]]
    decode: Callable[[list[Any]], list[Any]]


def measure(found: Case, rounds: int) -> dict[str, Any]:
    """Raw bytes; and for each codec the ratio and the medians of MB of raw bytes for each second of processor time."""
    codecs, raw = _codecs(found)
    taken: dict[str, list[tuple[float, float]]] = {codec.name: [] for codec in codecs}
    sizes = {}
    wait_until_quiet()
    with Others() as others:
        for number in range(rounds):
            for codec in codecs:
                if number >= _SLOW_ROUNDS and codec.name in _SLOW:
                    continue
                began = time.process_time()
                parts = codec.encode()
                encoded = time.process_time()
                codec.decode(parts)
                taken[codec.name].append((encoded - began, time.process_time() - encoded))
                sizes[codec.name] = sum(len(part) for part in parts)
    return {
        "raw_bytes": raw, "rounds": rounds, "other_cores": others.cores,
        "codecs": [
            {"name": name, "ratio": raw / sizes[name],
             **{f"{way}_mb_s": raw / 1e6 / statistics.median(pair[at] for pair in pairs)
                for at, way in enumerate(("encode", "decode"))}}
            for name, pairs in taken.items()
        ],
    }  # fmt: skip


def _codecs(found: Case) -> tuple[list[Codec], int]:
    """The codecs, each proved on these rows, and the rows' bytes."""
    from kvstore import ModelIdentity
    from kvstore.runtime.capture import capture

    captured = capture(found.cache(), found.ids(), ModelIdentity.from_path(found.model))
    digests = [ref for ref in captured.manifest.payloads() if ref != captured.manifest.prefix.token_ids]
    # Unsealed: comparing with a seal is a put's work, not a codec's.
    payloads = [(ref, replace(captured.source(ref), seal=None)) for ref in digests]
    rows = np.concatenate([array.reshape(-1).view(np.uint8) for _, payload in payloads for array in _whole(payload)])
    codecs = [
        *(_zstd(rows, level) for level in _ZSTD_LEVELS),
        Codec("gzip 6", lambda: [zlib.compress(rows.data, 6)], lambda parts: [zlib.decompress(parts[0])]),
        _byte_planes(rows),
        *(_own(payloads, codec) for codec in ("small", "fast")),
    ]
    for codec in codecs:
        if b"".join(codec.decode(codec.encode())) != rows.tobytes():
            raise SystemExit(f"{codec.name} does not give back what it was given")
    return codecs, rows.nbytes


def _whole(payload: Any) -> Iterator[Any]:
    return (np.ascontiguousarray(array) for array in payload.arrays)


def _zstd(rows: Bytes, level: int) -> Codec:
    return Codec(
        f"zstd {level}",
        lambda: [zstandard.ZstdCompressor(level=level).compress(rows.data)],
        lambda parts: [zstandard.ZstdDecompressor().decompress(parts[0])],
    )


def _byte_planes(rows: Bytes) -> Codec:
    """The shuffle of HDF5 and Blosc for elements of two bytes, then zstd 1."""

    def encode() -> list[Any]:
        compressor = zstandard.ZstdCompressor(level=1)
        return [compressor.compress(np.ascontiguousarray(rows[plane::2]).data) for plane in (0, 1)]

    def decode(parts: list[Any]) -> list[Any]:
        result = np.empty(rows.nbytes, np.uint8)
        for plane, part in enumerate(parts):
            result[plane::2] = np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint8)
        return [result]

    return Codec("byte planes, zstd 1", encode, decode)


def _own(payloads: list[tuple[Any, Any]], codec: Any) -> Codec:
    from kvstore.format.object import Choice, ObjectParts, parse_object

    def encode() -> list[Any]:
        choice, made = Choice(), []
        for ref, payload in payloads:
            plans = choice.plans(payload) if codec == "small" else None
            stored = bytearray()
            # A part lies in scratch until the next one is asked for.
            for part in ObjectParts(payload, digest=ref.digest, codec=codec, plans=plans):
                stored += part
            made.append(stored)
        return made

    def decode(parts: list[Any]) -> list[Any]:
        objects = zip(parts, payloads, strict=True)
        read = [parse_object(memoryview(part), digest=ref.digest, size=ref.size) for part, (ref, _) in objects]
        return [array for item in read for array in item.read_payload().arrays]

    return Codec(f"kvstore {codec}", encode, decode)

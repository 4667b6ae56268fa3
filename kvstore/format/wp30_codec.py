"""The three codecs of a ``wp30-cache-2`` file, told by content, read without ever holding more than was asked for.

A file does not name its codec. It is unpacked a little at a time, as its reader asks: the
safetensors header comes first and says how many bytes follow, so a bomb is left alone at
the first byte too many.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, Protocol

import zstandard

from kvstore.errors import KVStoreError, fail

__all__ = [
    "CODECS", "GZIP_LEVEL", "ZSTD_LEVEL", "ByteStream", "CodecName", "Decoder", "codec_of", "compressed", "open_codec",
]  # fmt: skip

CodecName = Literal["none", "gzip", "zstd"]
CODECS: Final[tuple[CodecName, ...]] = ("none", "gzip", "zstd")
GZIP_LEVEL: Final = 6
ZSTD_LEVEL: Final = 3
_MAGIC: Final[dict[bytes, CodecName]] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_MAX_WINDOW: Final = 2**27
"""What the highest zstd level asks for."""
_PACKED_BYTES: Final = 2048
"""Compressed bytes that are unpacked at once. A zstd block of four bytes yields 128 KiB at most, so 64 MiB in all."""
_GZIP: Final = 31
"""zlib's number for a gzip envelope with the largest window."""


class ByteStream(Protocol):
    """What is read from: an open binary file, or anything like one."""

    def readinto(self, buffer: Any, /) -> int | None:
        """Fill part of ``buffer``; 0 at the end."""

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes."""


class Decoder:
    """A file's uncompressed bytes, in order."""

    def __init__(self, stream: ByteStream, unpack: Any = None) -> None:
        """Read ``stream`` as it is, or through a decompression object of zlib's or zstandard's kind."""
        self._stream = stream
        self._unpack = unpack
        self._ready = memoryview(b"")

    def fill(self, buffer: memoryview) -> None:
        """Fill all of ``buffer``.

        Raises:
            InvalidError: CACHE_FILE_INVALID where the file ends before, or does not decompress.
        """
        done = 0
        while done < len(buffer):
            count = self._some(buffer[done:])
            if not count:
                raise _damaged("it ends too early")
            done += count

    def take(self, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises as :meth:`fill`."""
        buffer = bytearray(size)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def finish(self) -> None:
        """Nothing follows, and a compressed stream is whole. Raises CACHE_FILE_INVALID."""
        rest: Any = self._some(memoryview(bytearray(1)))
        if self._unpack is not None:
            rest = rest or self._unpack.unused_data or self._stream.read(1)
        if rest:
            raise _damaged("bytes follow after the last array")

    def _some(self, buffer: memoryview) -> int:
        """Fill part of ``buffer``; 0 at the end of the data."""
        if self._unpack is None:
            return self._stream.readinto(buffer) or 0
        while not self._ready:
            if self._unpack.eof:
                return 0
            packed = self._stream.read(_PACKED_BYTES)
            if not packed:
                raise _damaged("its compressed stream ends too early")
            try:
                self._ready = memoryview(self._unpack.decompress(packed))
            except (zlib.error, zstandard.ZstdError) as error:
                raise _damaged(f"it does not decompress ({str(error)[:80]})") from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def codec_of(head: bytes) -> CodecName:
    """The codec of a file that begins with ``head``."""
    return next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), "none")


def open_codec(stream: ByteStream, codec: CodecName) -> Decoder:
    """The uncompressed bytes of an open file."""
    if codec == "gzip":
        return Decoder(stream, zlib.decompressobj(_GZIP))
    if codec == "zstd":
        return Decoder(stream, zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj())
    return Decoder(stream)


def compressed(parts: Iterable[Any], codec: CodecName, level: int | None = None) -> Iterator[Any]:
    """The bytes of ``parts`` under a codec, one after another."""
    if codec == "none":
        yield from parts
        return
    if codec == "gzip":
        packer: Any = zlib.compressobj(GZIP_LEVEL if level is None else level, zlib.DEFLATED, _GZIP)
    else:
        packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL if level is None else level).compressobj()
    for part in parts:
        yield packer.compress(part)
    yield packer.flush()


def _damaged(what: str) -> KVStoreError:
    return fail("CACHE_FILE_INVALID", f"wp30-cache-2 file: {what}", fix="Copy the file again from its source.")

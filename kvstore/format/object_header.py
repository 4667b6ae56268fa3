"""The frames around an object's data: its header and its frame table.

An object is a zstd stream::

    skippable frame 0x184D2A50   header: canonical JSON
    data frames                  group by group, tensor by tensor, chunk by chunk, plane by plane
    skippable frame 0x184D2A51   frame table: the size of each data frame, 32-bit little-endian;
                                 then the SHA-256 of header frame and sizes

Where frames begin and what they must decode to follows from the header and the table, so
there is nothing else that could contradict them. The digest guards what zstd's own
checksums do not cover.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Literal, NoReturn, TypeAlias

import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest
from kvstore.format.fields import Fields, expect_text
from kvstore.format.filters import parse_filter
from kvstore.format.json import canonical_bytes, parse_canonical
from kvstore.format.object_layout import Group, Layout, layout_of
from kvstore.format.tensor_header import check_specs, payload_size
from kvstore.format.tensors import parse_dtype
from kvstore.format.zstd import frame_end
from kvstore.limits import (
    MAX_CHUNK_BYTES,
    MAX_DIM,
    MAX_NAME_CHARS,
    MAX_OBJECT_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RANK,
    MAX_TENSORS_PER_PAYLOAD,
)

__all__ = [
    "MEDIA_TYPE", "Codec", "ObjectHeader", "checked_layout", "encode_header", "encode_table", "parse_header",
    "parse_table", "table_bytes",
]  # fmt: skip

Codec: TypeAlias = Literal["small", "fast"]
Array = np.ndarray[Any, Any]

MEDIA_TYPE: Final = "application/vnd.kvstore.object.v1+json"
_FAMILY: Final = "application/vnd.kvstore.object."
_HEADER_MAGIC: Final = b"\x50\x2a\x4d\x18"
_TABLE_MAGIC: Final = b"\x51\x2a\x4d\x18"
_SKIPPABLE_BYTES: Final = 8
_DIGEST_BYTES: Final = 32
_MIN_CHUNK_BYTES: Final = 65536
_MIN_PAYLOAD_BYTES: Final = 8
_PAYLOAD: Final = re.compile(rb'"payload":\{"digest":"(sha256:[0-9a-f]{64})","size":(0|[1-9][0-9]{0,14})\}\}\Z')
_REMEMBERED: Final = 64
_REMEMBERED_BYTES: Final = 65536
_HEADERS: Final[dict[bytes, ObjectHeader]] = {}
"""Headers that were read, by their text before the payload; small and few, so that no object can fill memory."""


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """What an object says of itself."""

    digest: Digest
    size: int
    namespace: str
    codec: str
    chunk_bytes: int
    groups: tuple[Group, ...]

    @property
    def layout(self) -> Layout:
        """What lies where; raises as :func:`kvstore.format.object_layout.layout_of`."""
        return layout_of(self.groups, self.chunk_bytes)


def encode_header(header: ObjectHeader) -> bytes:
    """The header frame."""
    document: dict[str, Any] = {
        "media_type": MEDIA_TYPE,
        "payload": {"digest": header.digest, "size": header.size},
        "namespace": header.namespace,
        "codec": header.codec,
        "chunk_bytes": header.chunk_bytes,
        "groups": [
            {"dtype": group.dtype, "shape": list(group.shape), "filter": group.filter.name, "names": list(group.names)}
            for group in header.groups
        ],
    }
    text = canonical_bytes(document)
    return _HEADER_MAGIC + len(text).to_bytes(4, "little") + text


def encode_table(header_frame: bytes, sizes: Sequence[int]) -> bytes:
    """The frame table for data frames of these sizes."""
    body = np.array(sizes, "<u4").tobytes()
    body += hashlib.sha256(header_frame + body).digest()
    return _TABLE_MAGIC + len(body).to_bytes(4, "little") + body


def table_bytes(frames: int) -> int:
    """Bytes of the table frame of an object with so many data frames."""
    return _SKIPPABLE_BYTES + 4 * frames + _DIGEST_BYTES


def parse_header(data: memoryview) -> tuple[ObjectHeader, int]:
    """Read the header frame; returns the header and where the data frames begin.

    Raises:
        InvalidError: OBJECT_HEADER_INVALID.
        IntegrityError: ZSTD_TRUNCATED.
        UnsupportedError: OBJECT_VERSION_UNSUPPORTED, FILTER_UNSUPPORTED, DTYPE_UNSUPPORTED.
    """
    if len(data) < _SKIPPABLE_BYTES:
        raise fail("ZSTD_TRUNCATED", "an object is too short for a header", expected=_SKIPPABLE_BYTES, found=len(data))
    if bytes(data[:4]) != _HEADER_MAGIC:
        _refuse("the first bytes of an object", _HEADER_MAGIC.hex(), data[:4].hex())
    length = int.from_bytes(data[4:8], "little")
    if length > MAX_OBJECT_HEADER_BYTES:
        _refuse("the length of the header", f"at most {MAX_OBJECT_HEADER_BYTES}", length)
    end = _SKIPPABLE_BYTES + length
    if end > len(data):
        raise fail("ZSTD_TRUNCATED", "an object ends within its header", expected=end, found=len(data))
    text = bytes(data[_SKIPPABLE_BYTES:end])
    known = _known_header(text)
    if known is not None:
        return known, end
    try:
        header = _parse_document(parse_canonical(text, length, "object header"))
        _remember(text, header)
    except KVStoreError as error:
        if error.phase == "payload" or error.exit_code != 4:
            raise
        raise fail("OBJECT_HEADER_INVALID", error.message, cause=error.code) from None
    return header, end


def _known_header(text: bytes) -> ObjectHeader | None:
    """The header, if one that differs in the payload's digest alone was read before: as those of a cache's segments.

    The payload is the last of the canonical keys, so all before its digest is compared as bytes.
    """
    tail = _PAYLOAD.search(text)
    known = None if tail is None else _HEADERS.get(text[: tail.start()])
    if tail is None or known is None or known.size != int(tail[2]):
        return None
    return replace(known, digest=Digest(tail[1].decode()))


def _remember(text: bytes, header: ObjectHeader) -> None:
    tail = _PAYLOAD.search(text)
    if tail is not None and len(text) <= _REMEMBERED_BYTES:
        if len(_HEADERS) >= _REMEMBERED:
            _HEADERS.clear()
        _HEADERS[text[: tail.start()]] = header


def _parse_document(value: Any) -> ObjectHeader:
    media_type = value.get("media_type") if isinstance(value, dict) else None
    if media_type != MEDIA_TYPE:
        known = isinstance(media_type, str) and media_type.startswith(_FAMILY)
        code = "OBJECT_VERSION_UNSUPPORTED" if known else "OBJECT_HEADER_INVALID"
        raise fail(code, "an object's media type", expected=MEDIA_TYPE, found=media_type)
    fields = Fields(value, "", ("chunk_bytes", "codec", "groups", "media_type", "namespace", "payload"))
    payload = Fields(fields.get("payload"), "payload", ("digest", "size"))
    codec = fields.text("codec", limit=None)
    if codec not in ("small", "fast"):
        raise fail("FILTER_UNSUPPORTED", "codec", expected="small or fast", found=codec)
    return ObjectHeader(
        digest=payload.digest("digest"),
        size=payload.integer("size", low=_MIN_PAYLOAD_BYTES, high=MAX_PAYLOAD_BYTES),
        namespace=fields.text("namespace"),
        codec=codec,
        chunk_bytes=fields.integer("chunk_bytes", low=_MIN_CHUNK_BYTES, high=MAX_CHUNK_BYTES),
        groups=tuple(
            _parse_group(item, where) for item, where in fields.items("groups", limit=MAX_TENSORS_PER_PAYLOAD)
        ),
    )


def _parse_group(value: Any, where: str) -> Group:
    fields = Fields(value, where, ("dtype", "filter", "names", "shape"))
    names = fields.items("names", limit=MAX_TENSORS_PER_PAYLOAD)
    if not names:
        _refuse(fields.path("names"), "at least one name", 0)
    return Group(
        dtype=parse_dtype(fields.get("dtype"), fields.path("dtype")),
        shape=fields.integers("shape", limit=MAX_RANK, high=MAX_DIM),
        filter=parse_filter(fields.get("filter"), fields.path("filter")),
        names=tuple(expect_text(name, at, grammar=None, limit=MAX_NAME_CHARS) for name, at in names),
    )


def checked_layout(header: ObjectHeader) -> Layout:
    """What lies where, the tensors proved to make up a payload of the size that the header states.

    A header of a hundred bytes can name any number of chunks, so their bytes are summed up, and none is listed.

    Raises:
        InvalidError: OBJECT_HEADER_INVALID, ST_HEADER_INVALID, ST_SHAPE_OVERFLOW or FRAME_TABLE_INVALID.
    """
    what = "the payload size of an object"
    total = sum(len(group.names) * prod(group.shape) * group.itemsize for group in header.groups)
    if total > header.size:
        check_specs([spec for group in header.groups for spec in group.specs()])
        _refuse(what, f"at least {total}", header.size)
    try:
        layout = header.layout
    except KVStoreError as error:
        # Too many frames; the size comes before them.
        size = payload_size(spec for group in header.groups for spec in group.specs())
        if error.code == "FRAME_TABLE_INVALID" and size != header.size:
            _refuse(what, size, header.size)
        raise
    if layout.payload_size != header.size:
        _refuse(what, layout.payload_size, header.size)
    return layout


def parse_table(data: memoryview, count: int, start: int) -> Array:
    """Read the frame table, the last frame of an object; returns the sizes of the data frames, int64.

    Args:
        data: The whole object.
        count: Number of data frames.
        start: Where the data frames begin.

    Raises:
        InvalidError: FRAME_TABLE_INVALID or ZSTD_TRAILING_DATA.
        IntegrityError: ZSTD_TRUNCATED.
    """
    at = len(data) - table_bytes(count)
    if at < start or data[at : at + _SKIPPABLE_BYTES] != _table_lead(count):
        raise _missing_table(data, start, count)
    body = data[at + _SKIPPABLE_BYTES : len(data) - _DIGEST_BYTES]
    hasher = hashlib.sha256(data[:start])
    hasher.update(body)
    if data[len(data) - _DIGEST_BYTES :] != hasher.digest():
        _refuse_table("the digest of header and frame table", hasher.hexdigest(), data[-_DIGEST_BYTES:].hex())
    sizes = np.frombuffer(body, "<u4").astype(np.int64)
    if start + int(sizes.sum()) != at:
        _refuse_table("the sizes in the frame table", f"a sum of {at - start}", int(sizes.sum()))
    return sizes


def _table_lead(count: int) -> bytes:
    return _TABLE_MAGIC + (4 * count + _DIGEST_BYTES).to_bytes(4, "little")


def _missing_table(data: memoryview, start: int, count: int) -> KVStoreError:
    """Why no table ends the object: frame after frame from the start, to tell the faults apart."""
    position = start
    for _ in range(count):
        end = frame_end(data, position)
        if isinstance(end, KVStoreError):
            return end
        position = end
    end = position + table_bytes(count)
    lead = data[position : position + _SKIPPABLE_BYTES]
    if lead != _table_lead(count)[: len(lead)]:
        return fail("FRAME_TABLE_INVALID", f"there is no table of {count} frames after the data frames")
    if end > len(data):
        return fail("ZSTD_TRUNCATED", "an object ends within its frame table", expected=end, found=len(data))
    # With the table at the very end it would have been found.
    return fail("ZSTD_TRAILING_DATA", "an object goes on after its frame table", expected=end, found=len(data))


def _refuse(what: str, expected: Any, found: Any) -> NoReturn:
    raise fail("OBJECT_HEADER_INVALID", what, expected=expected, found=found)


def _refuse_table(what: str, expected: Any, found: Any) -> NoReturn:
    raise fail("FRAME_TABLE_INVALID", what, expected=expected, found=found)

"""The prefix chain: one digest for every prefix of a token sequence.

``h(0)`` is a tagged digest of the model digest and the namespace; ``h(i+1)`` is one of
``h(i)`` and block ``i``. A block is 256 token ids as unsigned 32-bit little-endian
words. A last, shorter block has its own tag, which holds its length, so that it can
never be taken for a full one. Media items enter every block that they overlap. The
chain is a hash of what the model read, by whom (namespace) and with what (model):
equal digests mean equal prefixes, on every machine and in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import fail
from kvstore.format.digest import Digest, digest_bytes, tagged_digest
from kvstore.format.fields import Fields, expect_text
from kvstore.format.json import Json, canonical_bytes
from kvstore.limits import BLOCK_TOKENS, MAX_MEDIA_ITEMS, MAX_NAME_CHARS, MAX_TOKEN_ID, MAX_TOKENS

__all__ = [
    "DEFAULT_NAMESPACE", "MediaItem", "TokenIds", "as_token_ids", "before_media", "chain_digests", "parse_media",
    "parse_namespace", "prefix_digest",
]  # fmt: skip

TokenIds = npt.NDArray[np.uint32]
"""Token ids: a one-dimensional array of unsigned 32-bit integers."""

DEFAULT_NAMESPACE: Final = "default"
_ROOT_TAG: Final = "kvstore prefix v1"
_BLOCK_TAG: Final = "kvstore block v1"
_TAIL_TAG: Final = "kvstore tail v1"
_NAMESPACE: Final = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII)
_MEDIA_KIND: Final = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, a sound, a video: the token positions that stand for it, and the digest of all its bytes."""

    start: int
    length: int
    kind: str
    digest: Digest
    processor: Digest

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "digest": self.digest, "kind": self.kind, "length": self.length, "processor": self.processor,
            "start": self.start,
        }  # fmt: skip


def as_token_ids(ids: Sequence[int] | npt.NDArray[Any], *, what: str = "token ids") -> TokenIds:
    """Token ids as an array of their own, not to be written to, each proved to be an unsigned 32-bit integer.

    Always a copy: ids are hashed at one time and stored at another, and the caller's buffer is the caller's meanwhile.

    Raises:
        InvalidError: TOKEN_ID_RANGE, naming the first wrong position; LIMIT_EXCEEDED.
    """
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        _require_few(ids.size, what)
        # Before anything is looked at, so that what is proved is what is returned.
        ids = np.array(ids)
    plain = isinstance(ids, np.ndarray) and ids.dtype == np.uint32 and ids.ndim == 1
    array = np.ascontiguousarray(ids if plain else _checked(ids, what), dtype="<u4")
    _require_few(array.size, what)
    array.flags.writeable = False
    return array


def _require_few(count: int, what: str) -> None:
    if count > MAX_TOKENS:
        raise fail("LIMIT_EXCEEDED", what, expected=f"at most {MAX_TOKENS}", found=count)


def _checked(ids: Sequence[int] | npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Reject floats, booleans and wrong ranges before numpy could cast them away."""
    try:
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    except (OverflowError, ValueError, TypeError):
        array = np.asarray(list(ids), dtype=object)
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, dtype="<u4")
    if array.ndim != 1:
        raise fail("TOKEN_ID_RANGE", what, expected="one flat sequence", found=f"{array.ndim} dimensions")
    # numpy turns True among integers into 1, so the types of a list are looked at, too.
    if array.dtype.kind not in "iu" or (not isinstance(ids, np.ndarray) and bool in set(map(type, ids))):
        values = array.tolist() if isinstance(ids, np.ndarray) else list(ids)
        bad = next((i for i, v in enumerate(values) if not _is_token_id(v)), 0)
        raise fail(
            "TOKEN_ID_RANGE", f"{what} at position {bad}", expected=f"an integer in 0 to {MAX_TOKEN_ID}",
            found=str(values[bad])[:40],
        )  # fmt: skip
    wrong = np.flatnonzero((array < 0) | (array > MAX_TOKEN_ID))
    if wrong.size:
        bad = int(wrong[0])
        raise fail(
            "TOKEN_ID_RANGE", f"{what} at position {bad}", expected=f"0 to {MAX_TOKEN_ID}", found=int(array[bad])
        )
    return array


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def parse_namespace(value: Any, where: str = "namespace") -> str:
    """Check a namespace's name: lower-case letters, digits, ``.``, ``_`` and ``-``."""
    return expect_text(value, where, grammar=_NAMESPACE, limit=MAX_NAME_CHARS)


def parse_media(fields: Fields, name: str, token_count: int) -> tuple[MediaItem, ...]:
    """Parse media items: ascending, not overlapping, within the prefix."""
    items = tuple(_media_item(item, where) for item, where in fields.items(name, limit=MAX_MEDIA_ITEMS))
    end = 0
    for item in items:
        if item.start < end or item.start + item.length > token_count:
            raise fail(
                "FIELD_RANGE", fields.path(name), expected=f"ascending spans within {token_count} tokens",
                found=f"{item.start}+{item.length}",
            )  # fmt: skip
        end = item.start + item.length
    return items


def _media_item(value: Any, where: str) -> MediaItem:
    fields = Fields(value, where, ("digest", "kind", "length", "processor", "start"))
    return MediaItem(
        start=fields.integer("start", high=MAX_TOKENS),
        length=fields.integer("length", low=1, high=MAX_TOKENS),
        kind=fields.text("kind", grammar=_MEDIA_KIND, limit=64),
        digest=fields.digest("digest"),
        processor=fields.digest("processor"),
    )


def before_media(position: int, media: Sequence[MediaItem]) -> int:
    """The last position up to ``position`` at which a prefix with these media can end: none is cut in two."""
    inside = (item.start for item in media if item.start < position < item.start + item.length)
    return next(inside, position)


def chain_digests(
    model: Digest, namespace: str, ids: TokenIds, media: Sequence[MediaItem] = ()
) -> Iterator[tuple[int, bytes]]:
    """Yield ``(token count, 32-byte digest)`` of the root, each full block, and the tail if there is one."""
    link = digest_bytes(tagged_digest(_ROOT_TAG, model.encode(), namespace.encode()))
    yield 0, link
    full = ids.size // BLOCK_TOKENS * BLOCK_TOKENS
    data = _bytes(ids)
    head = _tagged_head(_BLOCK_TAG)
    for start in range(0, full, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        link = _link(head, link, data[start * 4 : end * 4], _media_bytes(media, start, end))
        yield end, link
    if ids.size > full:
        yield ids.size, tail_link(link, ids[full:], media, full)


def tail_link(parent: bytes, ids: TokenIds, media: Sequence[MediaItem], start: int) -> bytes:
    """The digest of a last block of fewer than 256 ids after ``parent``."""
    data = _bytes(ids)
    head = _tagged_head(f"{_TAIL_TAG} {ids.size}")
    return _link(head, parent, data, _media_bytes(media, start, start + ids.size))


def prefix_digest(model: Digest, namespace: str, ids: TokenIds, media: Sequence[MediaItem] = ()) -> Digest:
    """The chain's last digest: the identity of the whole prefix."""
    *_, (_, last) = chain_digests(model, namespace, ids, media)
    return Digest(f"sha256:{last.hex()}")


def _bytes(ids: TokenIds) -> memoryview:
    return np.ascontiguousarray(ids, dtype="<u4").view(np.uint8).data


def _tagged_head(tag: str) -> bytes:
    return len(tag).to_bytes(8, "little") + tag.encode("ascii")


def _link(head: bytes, parent: bytes, block: memoryview, media: bytes) -> bytes:
    """``tagged_digest(tag, parent, block, media)`` with the tag's bytes made once per chain."""
    hasher = hashlib.sha256(head)
    hasher.update(len(parent).to_bytes(8, "little") + parent + len(block).to_bytes(8, "little"))
    hasher.update(block)
    hasher.update(len(media).to_bytes(8, "little") + media)
    return hasher.digest()


def _media_bytes(media: Sequence[MediaItem], start: int, end: int) -> bytes:
    """The media items that overlap ``start`` … ``end`` as canonical JSON; empty where there are none."""
    inside = [item.to_json() for item in media if item.start < end and item.start + item.length > start]
    return canonical_bytes(list(inside)) if inside else b""

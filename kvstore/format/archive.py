"""Bundles in tar archives: the members, named as the files of a folder would be.

The pax interchange format, and of GNU's format what long names and large sizes need. The
standard library's reader is not used: it stops at the first header that it cannot read and
takes that for the end, so an archive that was cut off would pass for a whole one with fewer
files; and it reads whatever a header states, follows headers of headers by recursion, and
keeps all of them. Here an archive must end as it was written, with a block of zeros, and
neither time nor memory depends on anything but its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.bundle import BundleFile, check_path

__all__ = ["Member", "members"]

_BLOCK: Final = 512
_END: Final = 2
"""What ``seek`` counts from the end by."""
_MAX_EXTENDED_BYTES: Final = 2**20
"""Bytes of one extended header or long name, which are read at once: far more than any path that may stand there."""
_OCTAL: Final = re.compile(rb" *([0-7]*) *")
_DECIMAL: Final = re.compile(rb"[0-9]{1,20}")
_SPARSE: Final = b"GNU.sparse."
_PLAIN, _FOLDER, _UNMARKED = b"0\x007", b"5", b"\0"
_NO_DATA: Final = b"123456"
"""Types whose members have no data, whatever size is stated: links, devices, folders and pipes."""


@dataclass(frozen=True, slots=True)
class Member:
    """Something in an archive that is no folder, and where its ``size`` bytes begin."""

    file: BundleFile
    start: int
    size: int


@dataclass(slots=True)
class _Extended:
    """What extended headers say about members: about all that follow, and about the next one."""

    all: dict[bytes, bytes] = field(default_factory=dict)
    next: dict[bytes, bytes] = field(default_factory=dict)
    name: bytes | None = None
    pending: bool = False

    def take(self) -> dict[bytes, bytes]:
        """What holds for the member whose header was read, and for no other."""
        found = {**self.all, **({} if self.name is None else {b"path": self.name}), **self.next}
        self.next, self.name, self.pending = {}, None, False
        return {key: value for key, value in found.items() if value}


def members(source: BinaryIO, what: str) -> Iterator[Member]:
    """Every member of the archive but its folders; the names of all have passed.

    Args:
        source: The archive, seekable.
        what: Its name in messages.

    Raises:
        InvalidError: BUNDLE_LAYOUT_INVALID where it is no whole archive; PATH_UNSAFE for a name.
    """
    try:
        yield from _members(source)
    except _BrokenError as error:
        raise _broken(what, str(error)) from None


class _BrokenError(Exception):
    """Why it is no archive."""


def _members(source: BinaryIO) -> Iterator[Member]:
    length, at, extended = source.seek(0, _END), 0, _Extended()
    while (header := _read(source, at, _BLOCK, length)) != bytes(_BLOCK):
        _check_sum(header)
        kind, start, size = header[156:157], at + _BLOCK, _number(header[124:136])
        if kind in b"xgLK":
            _extend(extended, kind, source, start, size, length)
        else:
            facts = extended.take()
            size = _decimal(facts[b"size"]) if b"size" in facts else size
            size = 0 if kind in _NO_DATA else size
            file = _file(kind, facts.get(b"path") or _name(header), facts)
            if file is not None:
                yield Member(file, start, size)
        at = start + -(-size // _BLOCK) * _BLOCK
    if extended.pending:
        raise _BrokenError("its last member has no header")


def _read(source: BinaryIO, at: int, size: int, length: int) -> bytes:
    """Bytes of the archive; what is not there is not asked for."""
    if at + size > length:
        raise _BrokenError("it has no end")
    source.seek(at)
    data = source.read(size)
    if len(data) != size:
        raise _BrokenError("it has no end")
    return data


def _extend(extended: _Extended, kind: bytes, source: BinaryIO, start: int, size: int, length: int) -> None:
    if size > _MAX_EXTENDED_BYTES:
        raise _BrokenError(f"a header has {size} bytes")
    data = _read(source, start, size, length)
    extended.pending = extended.pending or kind != b"g"
    if kind == b"L":
        extended.name = data.partition(b"\0")[0]
    elif kind != b"K":
        (extended.all if kind == b"g" else extended.next).update(_records(data))


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records ``LENGTH KEY=VALUE`` of a pax header that are of use here."""
    at = 0
    while at < len(data) and data[at]:
        digits = data[at : at + 20].partition(b" ")[0]
        end = at + _decimal(digits)
        key, equals, value = data[at + len(digits) + 1 : end].partition(b"=")
        if end > len(data) or not equals or not value.endswith(b"\n"):
            raise _BrokenError("a record of a pax header is not as required")
        if key in (b"path", b"size"):
            yield key, value[:-1]
        elif key.startswith(_SPARSE):
            yield _SPARSE, b"1"
        at = end


def _file(kind: bytes, name: bytes, facts: dict[bytes, bytes]) -> BundleFile | None:
    """The member as a file, or None for a folder."""
    path = name.decode("utf-8", "surrogateescape")
    # What `tar -C FOLDER .` writes: each name begins with the folder itself.
    short = path.removeprefix("./")
    if kind == _FOLDER or (kind == _UNMARKED and path.endswith("/")):
        if path not in (".", "./"):
            check_path(short.removesuffix("/"))
        return None
    check_path(short)
    return BundleFile(short, kind in _PLAIN and _SPARSE not in facts)


def _name(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    # In GNU's format, which spells its magic otherwise, other things stand in the place of the prefix.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _check_sum(header: bytes) -> None:
    blanked = header[:148] + b" " * 8 + header[156:]
    # Old programs summed up signed bytes.
    sums = (sum(blanked), sum(blanked) - 256 * sum(byte > 127 for byte in blanked))
    if _number(header[148:156]) not in sums:
        raise _BrokenError("the checksum of a header is wrong")


def _number(digits: bytes) -> int:
    """A number in octal digits or, GNU's way, in base 256."""
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    match = _OCTAL.fullmatch(digits.partition(b"\0")[0])
    if match is None:
        raise _BrokenError("a number in a header is not as required")
    return int(match[1] or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not _DECIMAL.fullmatch(digits):
        raise _BrokenError("a number in a pax header is not as required")
    return int(digits)


def _broken(what: str, why: str) -> KVStoreError:
    return fail("BUNDLE_LAYOUT_INVALID", f"{what} is no tar archive: {why}")

"""Bundles in tar archives: the members, named as the files of a folder would be.

The pax interchange format, and of GNU's format what long names and large sizes need. A
library for archives is lenient: it stops at the first header that it cannot read and takes
that for the end, so an archive that was cut off would pass for a whole one with fewer files.
Here it must end as it was written, with a block of zeros.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.bundle import BundleFile, check_path

__all__ = ["Member", "members"]

_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Member:
    """Something in an archive that is no folder, and where its ``size`` bytes begin."""

    file: BundleFile
    start: int
    size: int


def members(source: BinaryIO, what: str) -> Iterator[Member]:
    """Every member of the archive but its folders, whose names are checked, too.

    Args:
        source: The archive, seekable.
        what: Its name in messages.

    Raises:
        InvalidError: BUNDLE_LAYOUT_INVALID where it is no whole archive; PATH_UNSAFE for a folder's name.
    """
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            last = -1
            for item in archive:
                # A size below zero would lead back to members that were there before, for ever.
                if item.offset <= last or item.size < 0:
                    raise _broken(what, "its members do not follow one another")
                last = item.offset
                # What `tar -C FOLDER .` writes: each name begins with the folder itself.
                name = item.name.removeprefix("./")
                if not item.isdir():
                    yield Member(BundleFile(name, item.isreg() and not item.issparse()), item.offset_data, item.size)
                elif name not in ("", "."):
                    check_path(name)
            source.seek(archive.offset)
            if source.read(_BLOCK) != bytes(_BLOCK):
                raise _broken(what, "it has no end")
    except (tarfile.TarError, ArithmeticError, ValueError) as error:
        # The library computes with the numbers of a header as they stand there.
        raise _broken(what, str(error)) from None


def _broken(what: str, why: str) -> KVStoreError:
    return fail("BUNDLE_LAYOUT_INVALID", f"{what} is no tar archive: {why}")

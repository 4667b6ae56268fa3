"""Bundles: one entry as a directory or a tar, with everything that is needed to take it in.

::

    layout.json                          which entry this is, and of which version the bundle
    manifest.json                        the manifest's bytes
    objects/<payload>.<stored>.kvo       the entry's objects; that of the token ids may be absent
    receipts/<receipt>.json              evidence that travels along; decides nothing

Names are bare hex digests, so nothing in a bundle chooses a path. This module says which
names may stand there and what ``layout.json`` holds; whoever opens files brings the list
of what it found. Names are checked before anything is opened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest, Readable, digest_hex, sha256_digest
from kvstore.format.fields import Fields
from kvstore.format.json import canonical_bytes, parse_canonical
from kvstore.format.manifest import Manifest, parse_manifest
from kvstore.limits import MAX_BUNDLE_LAYOUT_BYTES, MAX_MANIFEST_BYTES, MAX_PATH_CHARS

__all__ = [
    "BUNDLE_MEDIA_TYPE", "LAYOUT_NAME", "MANIFEST_NAME", "BundleFile", "BundleIndex", "bundle_layout",
    "bundle_manifest", "check_path", "index_files", "object_name", "parse_bundle_layout", "receipt_name",
]  # fmt: skip

BUNDLE_MEDIA_TYPE: Final = "application/vnd.kvstore.bundle.v1+json"
LAYOUT_NAME: Final = "layout.json"
MANIFEST_NAME: Final = "manifest.json"
_FAMILY: Final = "application/vnd.kvstore.bundle."
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\\:\ud800-\udfff]")
"""Characters that no path may hold; half a surrogate pair stands for bytes that are no UTF-8."""
_OBJECT: Final = re.compile(r"objects/([0-9a-f]{64})\.([0-9a-f]{64})\.kvo", re.ASCII)
_RECEIPT: Final = re.compile(r"receipts/([0-9a-f]{64})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class BundleFile:
    """Something that was found in a bundle and is no directory: its path, ``/`` between parts, and its nature."""

    path: str
    plain: bool


@dataclass(frozen=True, slots=True)
class BundleIndex:
    """What a bundle holds, by name.

    Attributes:
        objects: Stored digest by payload digest.
        receipts: Digests of the receipts.
    """

    objects: Mapping[Digest, Digest]
    receipts: tuple[Digest, ...]

    def object_path(self, payload: Digest) -> str:
        """The path of the object of a payload that is there."""
        return object_name(payload, self.objects[payload])


def object_name(payload: Digest, stored: Digest) -> str:
    """The path of an object in a bundle."""
    return f"objects/{digest_hex(payload)}.{digest_hex(stored)}.kvo"


def receipt_name(receipt: Digest) -> str:
    """The path of a receipt in a bundle."""
    return f"receipts/{digest_hex(receipt)}.json"


def bundle_layout(entry_id: Digest) -> bytes:
    """The bytes of ``layout.json``."""
    return canonical_bytes({"entry": entry_id, "features": [], "media_type": BUNDLE_MEDIA_TYPE})


def index_files(files: Iterable[BundleFile]) -> BundleIndex:
    """Check the names of all files and sort them; a name of which a part begins with a dot is passed over.

    Raises:
        InvalidError: PATH_UNSAFE before anything else, else BUNDLE_LAYOUT_INVALID.
    """
    found = list(files)
    for file in found:
        check_path(file.path)
        if not file.plain:
            raise fail("PATH_UNSAFE", f"{_show(file.path)} in a bundle is no plain file")
    names = [file.path for file in found if not any(part.startswith(".") for part in file.path.split("/"))]
    counts = Counter(names)
    for name, count in counts.items():
        if count > 1:
            raise fail("BUNDLE_LAYOUT_INVALID", f"{_show(name)} stands twice in a bundle")
    for name in (LAYOUT_NAME, MANIFEST_NAME):
        if name not in counts:
            raise fail("BUNDLE_LAYOUT_INVALID", f"a bundle has no {name}", fix="Name the folder or tar of a bundle.")
    return _sorted(name for name in names if name not in (LAYOUT_NAME, MANIFEST_NAME))


def check_path(path: str) -> None:
    """Refuse a path that could lead out of the bundle, or means different files on different systems.

    Raises:
        InvalidError: PATH_UNSAFE.
    """
    parts = path.split("/")
    if len(path) > MAX_PATH_CHARS or _UNSAFE.search(path) or not all(parts) or {".", ".."} & set(parts):
        raise fail(
            "PATH_UNSAFE", f"the path {_show(path)} in a bundle",
            expected="relative, without '.', '..', '\\', ':' and control characters", found=_show(path),
        )  # fmt: skip


def parse_bundle_layout(data: Readable) -> Digest:
    """Read ``layout.json``; gives the entry id.

    Raises:
        InvalidError: DOC_TOO_LARGE or BUNDLE_LAYOUT_INVALID.
        UnsupportedError: BUNDLE_VERSION_UNSUPPORTED.
    """
    try:
        return _parse(parse_canonical(data, MAX_BUNDLE_LAYOUT_BYTES, LAYOUT_NAME))
    except KVStoreError as error:
        if error.phase == "container":
            raise
        raise fail("BUNDLE_LAYOUT_INVALID", f"{LAYOUT_NAME}: {error.message}", cause=error.code) from None


def bundle_manifest(read: Callable[[str], Readable]) -> Manifest:
    """The manifest, proved to be that of the entry which ``layout.json`` names; then steps 1 to 4.

    Args:
        read: Gives a file's bytes by its path.

    Raises:
        KVStoreError: with the code of the earliest rule that is broken.
    """
    entry_id, data = parse_bundle_layout(read(LAYOUT_NAME)), read(MANIFEST_NAME)
    if len(data) > MAX_MANIFEST_BYTES:
        raise fail("DOC_TOO_LARGE", "the manifest", expected=f"at most {MAX_MANIFEST_BYTES}", found=len(data))
    found = sha256_digest(data)
    if found != entry_id:
        raise fail("MANIFEST_DIGEST_MISMATCH", "the digest of the manifest", expected=entry_id, found=found)
    return parse_manifest(data)


def _parse(value: Any) -> Digest:
    media_type = value.get("media_type") if isinstance(value, dict) else None
    if media_type != BUNDLE_MEDIA_TYPE:
        known = isinstance(media_type, str) and media_type.startswith(_FAMILY)
        code = "BUNDLE_VERSION_UNSUPPORTED" if known else "BUNDLE_LAYOUT_INVALID"
        raise fail(code, "a bundle's media type", expected=BUNDLE_MEDIA_TYPE, found=media_type)
    fields = Fields(value, "", ("entry", "features", "media_type"))
    fields.require_no_features("BUNDLE_VERSION_UNSUPPORTED", "features of a bundle")
    return fields.digest("entry")


def _sorted(names: Iterable[str]) -> BundleIndex:
    objects: dict[Digest, Digest] = {}
    receipts: list[Digest] = []
    for name in names:
        if match := _OBJECT.fullmatch(name):
            payload, stored = (Digest(f"sha256:{part}") for part in match.groups())
            if payload in objects:
                raise fail("BUNDLE_LAYOUT_INVALID", f"a bundle has two objects of payload {payload}")
            objects[payload] = stored
        elif match := _RECEIPT.fullmatch(name):
            receipts.append(Digest(f"sha256:{match[1]}"))
        else:
            raise fail("BUNDLE_LAYOUT_INVALID", f"{_show(name)} is no name of a file in a bundle")
    return BundleIndex(objects, tuple(sorted(receipts)))


def _show(path: str) -> str:
    return repr(path if len(path) <= 80 else path[:77] + "...")

"""Entries out of the store and into it: bundles as directories or tar archives.

Export checks each object's stored digest and copies its bytes. Import trusts nothing: it
takes the steps of the reading order, decodes every payload, proves its digest, and puts
the entry as any other is put. So what lies in the store afterwards was encoded here, and
the entry is visible whole or not at all.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.bundle import (
    LAYOUT_NAME,
    MANIFEST_NAME,
    BundleIndex,
    bundle_layout,
    bundle_manifest,
    index_files,
    object_name,
    receipt_name,
)
from kvstore.format.digest import Digest, Readable, sha256_digest
from kvstore.format.entry_tensors import require_tensors
from kvstore.format.groups import PayloadRef
from kvstore.format.manifest import Manifest
from kvstore.format.object import Codec, parse_object
from kvstore.format.prefix import TokenIds
from kvstore.format.receipt import Receipt, parse_receipt
from kvstore.format.tensors import Payload
from kvstore.limits import MAX_MANIFEST_BYTES, MAX_RECEIPT_BYTES
from kvstore.store.bundle_files import BundleFiles, open_bundle, write_folder, write_tar
from kvstore.store.entries import add_receipt
from kvstore.store.fs import os_errors, require_path, sync_path
from kvstore.store.opening import Durability, Opened
from kvstore.store.publish import Progress, Written, publish
from kvstore.store.put import Put
from kvstore.store.read import open_stored

__all__ = ["Exported", "Imported", "Incoming", "export_bundle", "import_bundle", "read_incoming"]

_OVERHEAD: Final = 128 * 2**20
"""More than header, frame table and what surrounds each frame can come to; an object is read into memory whole."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: where, how many objects and receipts, how many bytes."""

    path: Path
    objects: int
    receipts: int
    size: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did: the put, and receipts that were kept and left out."""

    written: Written
    receipts: int
    receipts_left_out: int


class Incoming:
    """A bundle whose manifest has passed; payloads are decoded and proved when asked for.

    Attributes:
        manifest: The entry.
        token_ids: Its token ids, decoded and proved to be the payload that it names.
        receipts: The receipts about it that are what their names say.
        left_out: How many others there were.
    """

    def __init__(self, files: BundleFiles, index: BundleIndex, manifest: Manifest) -> None:
        """Use :func:`read_incoming`."""
        self._files = files
        self._index = index
        self.manifest = manifest
        self.token_ids: TokenIds = np.ascontiguousarray(self.payload(manifest.prefix.token_ids).arrays[0], dtype="<u4")
        found = [self._receipt(digest) for digest in index.receipts]
        self.receipts = [receipt for receipt in found if receipt is not None]
        self.left_out = len(found) - len(self.receipts)

    def payload(self, ref: PayloadRef) -> Payload:
        """Steps 8 to 11 for one payload.

        Raises:
            IntegrityError: OBJECT_MISSING, STORED_DIGEST_MISMATCH, PAYLOAD_DIGEST_MISMATCH and others of the object.
            InvalidError: PAYLOAD_TENSORS_MISMATCH and others of the object.
            SpaceError: DEVICE_MEMORY_SHORT, where it does not fit into memory.
        """
        name = self._index.object_path(ref.digest)
        most = 2 * ref.size + _OVERHEAD
        data = self._files.read(name, most)
        if len(data) > most:
            raise fail("DEVICE_MEMORY_SHORT", f"the bytes of {name}", expected=f"at most {most}", found="more")
        found, expected = sha256_digest(data), self._index.objects[ref.digest]
        if found != expected:
            raise fail("STORED_DIGEST_MISMATCH", f"the digest of {name}", expected=expected, found=found)
        reader = parse_object(data, digest=ref.digest, size=ref.size, namespace=self.manifest.namespace)
        require_tensors(self.manifest, {ref.digest: reader.specs})
        return reader.read_proved()

    def _receipt(self, digest: Digest) -> Receipt | None:
        data = self._files.read(receipt_name(digest), MAX_RECEIPT_BYTES)
        with suppress(KVStoreError):
            receipt = parse_receipt(data)
            if sha256_digest(data) == digest and receipt.subject == self.manifest.entry_id:
                return receipt
        return None


def read_incoming(files: BundleFiles) -> Incoming:
    """The bundle's own rules, and steps 1 to 4 of the reading order.

    Raises:
        KVStoreError: with the code of the earliest rule that is broken.
    """
    index = index_files(files.files)
    manifest = bundle_manifest(partial(files.read, most=MAX_MANIFEST_BYTES))
    for ref in manifest.all_payloads():
        if ref.digest not in index.objects:
            raise fail(
                "OBJECT_MISSING", f"the bundle has no object of payload {ref.digest}",
                fix="Export the entry again, its token ids included.",
            )  # fmt: skip
    return Incoming(files, index, manifest)


def import_bundle(
    opened: Opened, path: Path, *, codec: Codec = "small", label: str | None = None,
    durability: Durability = "normal", progress: Progress | None = None, cancelled: Callable[[], bool] | None = None,
) -> Imported:  # fmt: skip
    """Put the entry of a bundle into the store. Importing it again writes nothing.

    Raises:
        KVStoreError: with the code of the earliest rule that the bundle breaks, or of the store.
    """
    opened.index.refuse_read_only()
    with open_bundle(path) as files:
        incoming = read_incoming(files)
        put = Put(incoming.manifest, incoming.token_ids, codec, label, durability=durability)
        written = publish(opened, put, incoming.payload, progress=progress, cancelled=cancelled)
        for receipt in incoming.receipts:
            add_receipt(opened, receipt)
        return Imported(written, len(incoming.receipts), incoming.left_out)


def export_bundle(
    opened: Opened, manifest: Manifest, receipts: list[Receipt], path: Path, *, archive: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:  # fmt: skip
    """Write an entry as a bundle; it appears under its name whole or not at all.

    Raises:
        UsageError: USAGE, where something is at ``path``.
        IntegrityError: of an object that is missing or damaged.
        KVStoreError: STORE_IO, NO_SPACE and their like.
    """
    require_path(path, "the path of a bundle")
    refs = manifest.all_payloads()
    write = write_tar if archive else write_folder
    with os_errors("writing a bundle", writing=True):
        if path.exists() or path.is_symlink():
            raise fail("USAGE", f"{path} is there already", fix="Name a path where nothing is.")
        # Not made from the name, which may be as long as a name can be.
        target = path.with_name(f".{secrets.token_hex(8)}.partial")
        try:
            size = write(target, _files(opened, manifest, refs, receipts, progress))
            target.rename(path)
            sync_path(path.parent)
        except BaseException:
            _remove(target)
            raise
    return Exported(path, len(refs), len(receipts), size)


def _files(
    opened: Opened, manifest: Manifest, refs: tuple[PayloadRef, ...], receipts: list[Receipt],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, Readable]]:  # fmt: skip
    yield LAYOUT_NAME, bundle_layout(manifest.entry_id)
    yield MANIFEST_NAME, manifest.data
    for done, ref in enumerate(refs, 1):
        with open_stored(opened, ref, manifest.namespace) as (name, data):
            yield object_name(name.payload, name.stored), data
        if progress is not None:
            progress(done, len(refs))
    for receipt in receipts:
        yield receipt_name(receipt.digest), receipt.data


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()

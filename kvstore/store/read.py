"""Reading entries: manifest, token ids, objects, each proved to be what its name says.

Verification ``auto``: the first read of an object file in a store checks its stored
digest and remembers that with the file's identity (device, inode, size, times of
modification and change); later reads rest on the frame checksums. ``always`` also decodes the payload and
checks its digest, every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.groups import PayloadRef
from kvstore.format.manifest import Manifest, check_prefix, parse_manifest
from kvstore.format.object import ObjectReader, parse_object
from kvstore.format.prefix import TokenIds
from kvstore.limits import MAX_MANIFEST_BYTES
from kvstore.store.damage import flag_entry, mark_missing, quarantine
from kvstore.store.findings import REBUILD
from kvstore.store.locations import Location, find_locations, locations_of_entry
from kvstore.store.naming import entry_key
from kvstore.store.objects import ObjectName, StoredObject, stored_digest
from kvstore.store.opening import Opened
from kvstore.store.schema import QUARANTINED

__all__ = ["Verification", "check_object", "open_object", "open_stored", "read_manifest", "read_token_ids"]

Verification = Literal["auto", "always"]

_DECODE_CODES: Final = frozenset({"ZSTD_CORRUPT", "ZSTD_TRUNCATED", "PAYLOAD_DIGEST_MISMATCH"})


def read_manifest(opened: Opened, entry_id: Digest) -> Manifest:
    """The manifest of an entry, its bytes proved to have the entry id as digest.

    Also remembers where the entry's objects lie, so that opening them costs no query each.

    Raises:
        NotFoundError: NOT_FOUND.
        IntegrityError: MANIFEST_DIGEST_MISMATCH, or OBJECT_MISSING where the file is gone.
        InvalidError, UnsupportedError: of the document.
    """
    locations = _locations(opened, entry_id)
    data = opened.manifests.read(entry_id, MAX_MANIFEST_BYTES)
    if data is None:
        # Asked again: the entry may have been removed just now.
        _locations(opened, entry_id)
        flag_entry(opened, entry_id)
        raise fail("OBJECT_MISSING", f"the manifest of entry {entry_id} is not there", fix="Put the cache again.")
    found = sha256_digest(data)
    if found != entry_id:
        flag_entry(opened, entry_id)
        raise fail(
            "MANIFEST_DIGEST_MISMATCH", "the digest of a manifest", expected=entry_id, found=found,
            fix="Put the cache again, or remove the entry.",
        )  # fmt: skip
    manifest = _parsed(data)
    opened.locations.put(manifest.namespace, locations)
    return manifest


@lru_cache(maxsize=8)
def _parsed(data: bytes) -> Manifest:
    """An entry is asked what it reads, then read; and a conversation's is, turn after turn."""
    return parse_manifest(data)


def _locations(opened: Opened, entry_id: Digest) -> list[Location]:
    with opened.index.read() as connection:
        found, used = locations_of_entry(connection, entry_id)
        if not found:
            # Either there is no such entry, or rows of it are gone and each payload is looked up by itself.
            entry_key(connection, entry_id)
    opened.last_read = entry_id, used
    return found


def read_token_ids(opened: Opened, manifest: Manifest, *, verification: Verification = "auto") -> TokenIds:
    """The entry's token ids, proved to be those of its prefix digest.

    Raises:
        IntegrityError: of the object.
        InvalidError: PREFIX_CHAIN_MISMATCH.
    """
    ids = np.empty(manifest.token_count, np.dtype("<u4"))
    with open_object(opened, manifest.prefix.token_ids, manifest.namespace, verification=verification) as reader:
        reader.decode_into({"token_ids": ids})
    check_prefix(manifest, ids)
    return ids


@contextmanager
def open_object(
    opened: Opened, ref: PayloadRef, namespace: str, *, verification: Verification = "auto"
) -> Iterator[ObjectReader]:
    """Open an object for decoding; its bytes are released at the end, so keep no view of them.

    Raises:
        IntegrityError: OBJECT_MISSING, QUARANTINED, STORED_SIZE_MISMATCH, STORED_DIGEST_MISMATCH,
            PAYLOAD_DIGEST_MISMATCH, OBJECT_NAME_MISMATCH.
        InvalidError, UnsupportedError: of the object's header and frames.
        StoreError: STORE_UNREADABLE.
    """
    location, stored = _find(opened, ref, namespace)
    try:
        _check_stored(opened, namespace, location, stored)
        try:
            reader = parse_object(
                stored.data, digest=ref.digest, size=ref.size, namespace=namespace, release=stored.release
            )
            if verification == "always":
                reader.verify_payload()
            yield reader
        except KVStoreError as error:
            _prove(opened, namespace, location, stored, error)
            raise
    finally:
        stored.close()


@contextmanager
def open_stored(opened: Opened, ref: PayloadRef, namespace: str) -> Iterator[tuple[ObjectName, memoryview]]:
    """An object's name and its stored bytes, for copying: size and stored digest are checked, nothing is decoded.

    Raises:
        IntegrityError: OBJECT_MISSING, QUARANTINED, STORED_SIZE_MISMATCH, STORED_DIGEST_MISMATCH.
        StoreError: STORE_UNREADABLE.
    """
    location, stored = _find(opened, ref, namespace)
    try:
        _check_size(opened, namespace, location, stored)
        _check_digest(opened, namespace, location, stored)
        yield location.name, stored.data
    finally:
        stored.close()


def check_object(opened: Opened, ref: PayloadRef, namespace: str, *, deep: bool) -> int:
    """Check an object's stored digest whatever was remembered, its header and frame table; deep: its payload too.

    Returns:
        Bytes read.

    Raises:
        KVStoreError: as :func:`open_object`.
    """
    opened.locations.forget(namespace, ref.digest)
    location, stored = _find(opened, ref, namespace)
    try:
        size = len(stored.data)
        _check_size(opened, namespace, location, stored)
        _check_digest(opened, namespace, location, stored)
        opened.verified.note(location.key, stored.identity)
        reader = parse_object(
            stored.data, digest=ref.digest, size=ref.size, namespace=namespace, release=stored.release
        )
        if deep:
            try:
                reader.verify_payload()
            except KVStoreError as error:
                _prove(opened, namespace, location, stored, error)
                raise
    finally:
        stored.close()
    return size


def _find(opened: Opened, ref: PayloadRef, namespace: str) -> tuple[Location, StoredObject]:
    """The object's row and its file.

    A file that is not there is asked for twice: between the row and the file a put may have
    replaced the object by another encoding, or a collection removed it.
    """
    location = opened.locations.get(namespace, ref.digest)
    stored = None if location is None else opened.objects.open(location.name)
    if location is None or stored is None:
        location = _ask(opened, ref, namespace)
        stored = opened.objects.open(location.name)
        if stored is None:
            location = _ask(opened, ref, namespace)
            stored = opened.objects.open(location.name)
    if stored is None:
        mark_missing(opened, namespace, location.name)
        raise _missing(ref, namespace, "its file is gone")
    return location, stored


def _ask(opened: Opened, ref: PayloadRef, namespace: str) -> Location:
    with opened.index.read() as connection:
        location = find_locations(connection, namespace, [ref.digest]).get(ref.digest)
    if location is None:
        raise _missing(ref, namespace, "the index does not know it")
    if location.state == QUARANTINED:
        raise fail(
            "QUARANTINED", f"payload {ref.digest} was proved wrong before", fix="Put the cache again.",
            payload=ref.digest, namespace=namespace,
        )  # fmt: skip
    opened.locations.put(namespace, [location])
    return location


def _missing(ref: PayloadRef, namespace: str, why: str) -> KVStoreError:
    return fail(
        "OBJECT_MISSING", f"payload {ref.digest} is not there: {why}", fix="Put the cache again.",
        payload=ref.digest, namespace=namespace,
    )  # fmt: skip


def _check_stored(opened: Opened, namespace: str, location: Location, stored: StoredObject) -> None:
    """Size always; the digest unless this very file passed before."""
    _check_size(opened, namespace, location, stored)
    if location.verified == stored.identity or opened.verified.knows(location.key, stored.identity):
        return
    _check_digest(opened, namespace, location, stored)
    opened.verified.note(location.key, stored.identity)


def _check_size(opened: Opened, namespace: str, location: Location, stored: StoredObject) -> None:
    """The name proves the bytes, not the row: where they disagree, the digest says which of them is wrong."""
    if len(stored.data) != location.stored_size:
        opened.locations.forget(namespace, location.name.payload)
        if stored_digest(stored) == location.name.stored:
            raise fail(
                "STORE_CORRUPT", f"the size of {location.name.path} in the index", expected=len(stored.data),
                found=location.stored_size, fix=REBUILD,
            )  # fmt: skip
        error = fail(
            "STORED_SIZE_MISMATCH", f"the size of {location.name.path}", expected=location.stored_size,
            found=len(stored.data), fix="Put the cache again.",
        )  # fmt: skip
        quarantine(opened, namespace, location.name, stored.identity, error)
        raise error


def _check_digest(opened: Opened, namespace: str, location: Location, stored: StoredObject) -> None:
    found = stored_digest(stored)
    if found != location.name.stored:
        error = fail(
            "STORED_DIGEST_MISMATCH", f"the digest of {location.name.path}", expected=location.name.stored, found=found,
            fix="Put the cache again.",
        )  # fmt: skip
        quarantine(opened, namespace, location.name, stored.identity, error)
        raise error


def _prove(opened: Opened, namespace: str, location: Location, stored: StoredObject, error: KVStoreError) -> None:
    """After a failed decode: is the file wrong, or was it written so? Only the first is damage of the store."""
    if error.code not in _DECODE_CODES:
        return
    _check_digest(opened, namespace, location, stored)
    if error.code == "PAYLOAD_DIGEST_MISMATCH":
        quarantine(opened, namespace, location.name, stored.identity, error)

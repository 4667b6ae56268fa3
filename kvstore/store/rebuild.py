"""Making the index again from the files: manifests, receipts, objects.

What only the index knew is taken over from the old one where that can still be read. An
entry whose manifest is wrong, or of which an object is gone, is left out and reported;
its files stay where they are. Other writers wait meanwhile.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from kvstore.errors import KVStoreError, fail
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.groups import PayloadRef
from kvstore.format.json import Json
from kvstore.format.manifest import Manifest, check_prefix, parse_manifest
from kvstore.format.object import parse_object
from kvstore.format.prefix import TokenIds
from kvstore.format.receipt import Receipt, parse_receipt
from kvstore.limits import MAX_MANIFEST_BYTES, MAX_RECEIPT_BYTES
from kvstore.store.clock import text_micros
from kvstore.store.config import Paths, open_config, store_root
from kvstore.store.documents import Documents
from kvstore.store.entries import annotate_entry
from kvstore.store.fs import os_errors
from kvstore.store.index import Index
from kvstore.store.index_swap import index_lock, lock_old, old_index, swap_index
from kvstore.store.locations import find_locations
from kvstore.store.objects import ObjectName, Staged
from kvstore.store.opening import Opened, make_index
from kvstore.store.put import Put
from kvstore.store.rows import Choice, write_entry, write_objects
from kvstore.store.salvage import Salvage, salvage, storable
from kvstore.store.schema import DOOMED, doomed_files, objects, receipts
from kvstore.store.temp import Session

__all__ = ["Rebuilt", "rebuild_index", "rebuild_locked"]


@dataclass(slots=True)
class Rebuilt:
    """What the new index holds, and the entries that were left out, each with an error code and a message."""

    entries: int = 0
    objects: int = 0
    receipts: int = 0
    skipped: list[tuple[Digest, str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Files:
    """What lies in the store: objects by payload, the write receipts of each entry in order of time."""

    objects: dict[Digest, list[ObjectName]]
    written: dict[Digest, list[Receipt]]


def rebuild_index(root: Path) -> Rebuilt:
    """Make the index of the store at ``root`` anew; the old one is set aside in ``quarantine/``.

    Raises:
        UsageError, StoreError, SpaceError, BusyError: of the store.
    """
    paths = Paths(store_root(root))
    # Only a store has a directory to lock, and only a store's may be.
    open_config(paths.root, create=False)
    with os_errors(f"rebuilding the index of {root}", writing=True), index_lock(paths):
        return rebuild_locked(paths)


def rebuild_locked(paths: Paths) -> Rebuilt:
    """As :func:`rebuild_index`, for who holds the lock; raises OSError, too."""
    config = open_config(paths.root, create=False)
    with ExitStack() as stack:
        old = lock_old(old_index(paths), stack)
        session = stack.enter_context(Session(paths.tmp))
        fresh = session.path / paths.index.name
        make_index(fresh, session)
        opened = Opened(paths, config, Index(fresh))
        try:
            result = _fill(opened, salvage(old))
            opened.index.fold()
        finally:
            opened.index.close()
        swap_index(paths, fresh)
    return result


def _fill(opened: Opened, old: Salvage) -> Rebuilt:
    result = Rebuilt()
    with opened.index.write() as connection:
        files = _Files(_object_files(opened), _receipts(opened, connection, old, result))
        digests = _manifests(opened, connection, old)
        # Newest means added last, and the newest of equal entries wins a match.
        for digest in sorted(digests, key=lambda digest: (_made_at(opened, files, old, digest), digest)):
            try:
                with connection.begin_nested():
                    _add(opened, connection, files, digest)
                    if digest not in old.times:
                        annotate_entry(connection, digest, storable(_annotations(files, digest)))
                    old.restore_entry(connection, digest)
            except KVStoreError as error:
                result.skipped.append((digest, error.code, error.message))
            else:
                result.entries += 1
        _restore_doomed(opened, connection, old)
        old.restore_labels(connection)
        old.restore_leases(connection)
        result.objects = connection.execute(sa.text("SELECT count(*) FROM objects")).scalar_one()
    return result


def _restore_doomed(opened: Opened, connection: sa.Connection, old: Salvage) -> None:
    """What was removed with its entries and is still there stays to be removed, unless an entry has it now."""
    for namespace, name, raw_size in old.doomed_objects:
        with suppress(KVStoreError):
            found = opened.objects.identify(name)
            if found is None or find_locations(connection, namespace, [name.payload]):
                continue
            connection.execute(objects.insert().values(
                namespace=namespace, payload=name.payload, stored=name.stored, raw_size=raw_size,
                stored_size=found[1], state=DOOMED, verified=None, created_at=0,
            ))  # fmt: skip


def _object_files(opened: Opened) -> dict[Digest, list[ObjectName]]:
    found: dict[Digest, list[ObjectName]] = {}
    for _, name in opened.objects.paths():
        if name is not None:
            found.setdefault(name.payload, []).append(name)
    return found


def _manifests(opened: Opened, connection: sa.Connection, old: Salvage) -> list[Digest]:
    """The entries; what was removed and whose file is still to go is none, and stays to be removed."""
    digests = []
    for _, digest in opened.manifests.files():
        if digest is not None and not _is_doomed(opened.manifests, connection, old, digest, digest):
            digests.append(digest)
    return digests


def _is_doomed(documents: Documents, connection: sa.Connection, old: Salvage, digest: Digest, subject: Digest) -> bool:
    path = documents.relative(digest)
    if not old.is_doomed(path, subject):
        return False
    connection.execute(doomed_files.insert().values(path=path))
    return True


def _receipts(
    opened: Opened, connection: sa.Connection, old: Salvage, result: Rebuilt
) -> dict[Digest, list[Receipt]]:
    """Give every sound receipt its row; gives the write receipts by entry."""
    written: dict[Digest, list[Receipt]] = {}
    for _, digest in opened.receipts.files():
        data = None if digest is None else opened.receipts.read(digest, MAX_RECEIPT_BYTES)
        if data is None or sha256_digest(data) != digest:
            continue
        try:
            receipt = parse_receipt(data)
        except KVStoreError:
            continue
        if _is_doomed(opened.receipts, connection, old, digest, receipt.subject):
            continue
        connection.execute(receipts.insert().values(
            digest=digest, subject=receipt.subject, type=receipt.type, made_at=receipt.made_at
        ))  # fmt: skip
        result.receipts += 1
        if receipt.type == "write":
            written.setdefault(receipt.subject, []).append(receipt)
    for found in written.values():
        found.sort(key=lambda receipt: text_micros(receipt.made_at))
    return written


def _made_at(opened: Opened, files: _Files, old: Salvage, entry_id: Digest) -> int:
    """When an entry was put first, in microseconds: by the old index, its receipts, or its file."""
    if entry_id in old.times:
        return old.times[entry_id][0]
    if entry_id in files.written:
        return text_micros(files.written[entry_id][0].made_at)
    try:
        return opened.manifests.path(entry_id).stat().st_mtime_ns // 1000
    except OSError:
        # A link that leads nowhere, or a file that has just gone: it is reported when its turn comes.
        return 0


def _add(opened: Opened, connection: sa.Connection, files: _Files, entry_id: Digest) -> None:
    data = opened.manifests.read(entry_id, MAX_MANIFEST_BYTES) or b""
    if sha256_digest(data) != entry_id:
        raise fail("MANIFEST_DIGEST_MISMATCH", "a manifest", expected=entry_id, found=sha256_digest(data))
    manifest = parse_manifest(data)
    ids = _token_ids(opened, files, manifest)
    put = Put(manifest, ids)
    known = find_locations(connection, manifest.namespace, [ref.digest for ref in put.refs])
    choice = Choice()
    for ref in put.refs:
        location = known.get(ref.digest)
        if location is not None:
            choice.used.append(location)
        else:
            choice.published.append((_usable(opened, files, ref, manifest.namespace), None))
    now = _made_at(opened, files, Salvage(), entry_id)
    keys, _ = write_objects(connection, put, choice, now)
    write_entry(connection, put, keys, now)


def _usable(opened: Opened, files: _Files, ref: PayloadRef, namespace: str) -> Staged:
    """An object file that says it holds this payload, for this namespace, and whose frames are in order."""
    for name in files.objects.get(ref.digest, ()):
        stored = opened.objects.open(name)
        if stored is None:
            continue
        try:
            parse_object(stored.data, digest=ref.digest, size=ref.size, namespace=namespace)
            return Staged(name, len(stored.data), opened.paths.objects / name.path)
        except KVStoreError:
            continue
        finally:
            stored.close()
    raise fail("OBJECT_MISSING", f"no usable object holds payload {ref.digest}", payload=ref.digest)


def _token_ids(opened: Opened, files: _Files, manifest: Manifest) -> TokenIds:
    ref = manifest.prefix.token_ids
    staged = _usable(opened, files, ref, manifest.namespace)
    stored = opened.objects.open(staged.name)
    if stored is None:
        raise fail("OBJECT_MISSING", f"payload {ref.digest} has gone", payload=ref.digest)
    ids = np.empty(manifest.token_count, np.dtype("<u4"))
    try:
        reader = parse_object(stored.data, digest=ref.digest, size=ref.size, namespace=manifest.namespace)
        reader.decode_into({"token_ids": ids})
    finally:
        stored.close()
    check_prefix(manifest, ids)
    return ids


def _annotations(files: _Files, entry_id: Digest) -> dict[str, Json]:
    """What the write receipts say, the later over the earlier."""
    merged: dict[str, Json] = {}
    for receipt in files.written.get(entry_id, ()):
        facts = receipt.facts.get("annotations")
        merged.update(facts if isinstance(facts, dict) else {})
    return merged

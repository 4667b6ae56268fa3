"""The store as its callers see it: one thin class over the modules of this package.

It knows bytes, manifests and receipts, and nothing of any runtime. One object may be
used from several threads; a forked child opens its own connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

import sqlalchemy as sa

from kvstore.errors import fail, require_choice
from kvstore.format.digest import Digest
from kvstore.format.groups import PayloadRef
from kvstore.format.json import Json
from kvstore.format.manifest import Manifest
from kvstore.format.object import Codec, ObjectReader
from kvstore.format.prefix import MediaItem, TokenIds, as_token_ids
from kvstore.format.receipt import Receipt
from kvstore.store import entries as _entries
from kvstore.store.bundle import Exported, Imported, export_bundle, import_bundle
from kvstore.store.clock import now_micros
from kvstore.store.config import default_root
from kvstore.store.entries import EntryInfo
from kvstore.store.explain import Asked, Elsewhere, explain, nearest
from kvstore.store.findings import Report
from kvstore.store.index import DEFAULT_LOCK_TIMEOUT
from kvstore.store.leases import LEASE_SECONDS, Holder, Lease, holders, refreshing, take_lease, while_leased
from kvstore.store.locations import find_locations
from kvstore.store.match import Found, Reason, match
from kvstore.store.naming import entry_key, resolve
from kvstore.store.opening import Durability, Opened, open_store
from kvstore.store.publish import PayloadSource, Progress, Written, publish
from kvstore.store.put import Put
from kvstore.store.read import Verification, open_object, read_manifest, read_token_ids
from kvstore.store.remove import Removed, remove_entries
from kvstore.store.schema import LIVE, entries, labels, objects
from kvstore.store.staging import Staging
from kvstore.store.verify import verify

__all__ = ["EntryStore", "Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a store: counts, bytes of payloads referred to and of objects on disk, and leases that hold."""

    entries: int
    objects: int
    raw_bytes: int
    stored_bytes: int
    damaged_entries: int
    leases: int = 0

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "damaged_entries": self.damaged_entries, "entries": self.entries, "leases": self.leases,
            "objects": self.objects, "raw_bytes": self.raw_bytes, "stored_bytes": self.stored_bytes,
        }  # fmt: skip


class EntryStore:
    """A local store. Use :meth:`open`; a context manager."""

    def __init__(self, opened: Opened, *, durability: Durability = "normal") -> None:
        """Wrap an open store."""
        self._opened = opened
        self._durability: Durability = durability

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        create: bool = True,
        read_only: bool = False,
        durability: Durability = "normal",
        lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
    ) -> Self:
        """Open a store, or make one where there is nothing.

        Args:
            path: The store's directory; by default :func:`kvstore.store.config.default_root`.
            create: Make a store in an absent or empty directory.
            read_only: Write nothing. A store that cannot be written is opened so in any case.
            durability: ``full`` also empties the drive's own cache on macOS.
            lock_timeout: Seconds to wait for another writer.

        Raises:
            UsageError: USAGE for a durability that is none.
            StoreError: STORE_MISSING, STORE_NOT_OURS, STORE_UNREADABLE, STORE_READ_ONLY.
            UnsupportedError: STORE_VERSION_UNSUPPORTED.
            IntegrityError: STORE_CORRUPT.
        """
        require_choice("durability", durability, get_args(Durability))
        root = default_root() if path is None else Path(path)
        opened = open_store(
            root, create=create, read_only=read_only, durability=durability, lock_timeout=lock_timeout
        )
        return cls(opened, durability=durability)

    @property
    def root(self) -> Path:
        """The store's directory."""
        return self._opened.paths.root

    @property
    def store_id(self) -> str:
        """The store's id: 32 hex digits, made with it."""
        return self._opened.config.store_id

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written."""
        return self._opened.read_only

    def require_writable(self) -> None:
        """Refuse before the work what could not be stored after it. Raises STORE_READ_ONLY."""
        self._opened.index.refuse_read_only()

    def close(self) -> None:
        """Close the index; the object is not used after that."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def staging(
        self, *, namespace: str, codec: Codec = "small", cancelled: Callable[[], bool] | None = None
    ) -> Iterator[Staging]:
        """A place for payloads to be encoded before their manifest is made; :meth:`publish` within the ``with``."""
        require_choice("codec", codec, get_args(Codec))
        self.require_writable()
        with self._opened.session() as session:
            yield Staging(self._opened, session, namespace=namespace, codec=codec, cancelled=cancelled)

    def publish(
        self,
        manifest: Manifest,
        source: PayloadSource,
        *,
        token_ids: TokenIds | Sequence[int],
        codec: Codec = "small",
        label: str | None = None,
        annotations: Mapping[str, Json] | None = None,
        libraries: Mapping[str, str] | None = None,
        device: Mapping[str, Json] | None = None,
        staging: Staging | None = None,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Written:
        """Store an entry; durable when it returns. See :func:`kvstore.store.publish.publish`."""
        put = Put(
            manifest, as_token_ids(token_ids), codec, label, {} if annotations is None else annotations,
            {} if libraries is None else libraries, device, self._durability,
        )  # fmt: skip
        return publish(self._opened, put, source, staging=staging, progress=progress, cancelled=cancelled)

    def live_payloads(self, namespace: str, digests: Iterable[Digest]) -> set[Digest]:
        """Which of these payloads the namespace holds."""
        with self._opened.index.read() as connection:
            found = find_locations(connection, namespace, digests)
        return {digest for digest, location in found.items() if location.state == LIVE}

    def stored_bytes(self, namespace: str, payloads: Iterable[PayloadRef]) -> int:
        """Bytes on disk of the objects that hold these payloads."""
        with self._opened.index.read() as connection:
            found = find_locations(connection, namespace, [ref.digest for ref in payloads])
        return sum(location.stored_size for location in found.values())

    def resolve(self, ref: str) -> Digest:
        """The entry id that an id, a unique prefix of one, or a label means. NOT_FOUND, REF_AMBIGUOUS."""
        with self._opened.index.read() as connection:
            return resolve(connection, ref)

    def manifest(self, entry_id: Digest) -> Manifest:
        """The manifest, proved. See :func:`kvstore.store.read.read_manifest`."""
        return read_manifest(self._opened, entry_id)

    def token_ids(self, manifest: Manifest, *, verification: Verification = "auto") -> TokenIds:
        """The token ids, proved. See :func:`kvstore.store.read.read_token_ids`."""
        require_choice("verification", verification, get_args(Verification))
        return read_token_ids(self._opened, manifest, verification=verification)

    def open_object(
        self, ref: PayloadRef, namespace: str, *, verification: Verification = "auto"
    ) -> AbstractContextManager[ObjectReader]:
        """An object, ready to be decoded inside a ``with``. See :func:`kvstore.store.read.open_object`."""
        require_choice("verification", verification, get_args(Verification))
        return open_object(self._opened, ref, namespace, verification=verification)

    def match(
        self,
        model_digest: Digest,
        namespace: str,
        ids: TokenIds | Sequence[int],
        *,
        signature: Digest | None = None,
        method: str | None = None,
        media: Sequence[MediaItem] = (),
        limit: int | None = None,
    ) -> Found:
        """The entry that restores the longest prefix of ``ids``. See :func:`kvstore.store.match.match`."""
        with self._opened.index.read() as connection:
            return match(
                connection, model_digest, namespace, as_token_ids(ids), signature=signature, method=method,
                media=media, limit=limit,
            )  # fmt: skip

    def explain(
        self, asked: Asked, reasons: Sequence[Reason], *, longer_than: int, namespaces: bool = False
    ) -> tuple[Reason, ...]:
        """A match's reasons in full, and what others have. See :func:`kvstore.store.explain.explain`."""
        return explain(self._opened, asked, reasons, longer_than=longer_than, namespaces=namespaces)

    def nearest(self, asked: Asked) -> Elsewhere | None:
        """The newest of the entries that share the most tokens with these ids, restorable or not."""
        with self._opened.index.read() as connection:
            return nearest(connection, asked)

    def entries(
        self, *, model: Digest | None = None, namespace: str | None = None, limit: int | None = None
    ) -> list[EntryInfo]:
        """Entries, the one made or used last first; use is noted once an hour."""
        with self._opened.index.read() as connection:
            return _entries.entry_infos(connection, model=model, namespace=namespace, limit=limit)

    def info(self, entry_id: Digest) -> EntryInfo:
        """One entry. Raises NOT_FOUND."""
        with self._opened.index.read() as connection:
            found = _entries.entry_infos(connection, entry_ids=[entry_id])
        if not found:
            raise fail("NOT_FOUND", f"there is no entry {entry_id}", ref=entry_id)
        return found[0]

    def remove(self, entry_ids: Iterable[Digest], *, force: bool = False) -> Removed:
        """Remove entries and what only they needed. See :func:`kvstore.store.remove.remove_entries`."""
        return remove_entries(self._opened, entry_ids, force=force)

    def lease(self, entry_id: Digest, *, seconds: float = LEASE_SECONDS) -> Lease:
        """Protect an entry from removal inside a ``with``. See :func:`kvstore.store.leases.take_lease`."""
        return take_lease(self._opened, entry_id, seconds=seconds)

    def while_leased(self, entry_id: Digest) -> AbstractContextManager[Lease | None]:
        """The same where it can be had at once. See :func:`kvstore.store.leases.while_leased`."""
        return while_leased(self._opened, entry_id)

    def holders(self, entry_ids: Iterable[Digest] | None = None) -> list[Holder]:
        """The leases that hold now, of these entries or of all. NOT_FOUND."""
        with self._opened.index.read() as connection:
            keys = None if entry_ids is None else [entry_key(connection, entry_id) for entry_id in entry_ids]
            return holders(self._opened, connection, keys)

    def set_label(self, name: str, entry_id: Digest) -> None:
        """Let a label mean this entry. LABEL_INVALID, NOT_FOUND."""
        with self._opened.index.write() as connection:
            _entries.label_entry(connection, name, entry_id, now_micros())

    def remove_label(self, name: str) -> None:
        """Forget a label. NOT_FOUND."""
        with self._opened.index.write() as connection:
            _entries.remove_label(connection, name)

    def labels(self) -> dict[str, Digest]:
        """Every label and its entry."""
        query = sa.select(labels.c.name, entries.c.entry_id).join(
            entries, entries.c.entry_key == labels.c.entry_key
        ).order_by(labels.c.name)  # fmt: skip
        with self._opened.index.read() as connection:
            return {row.name: row.entry_id for row in connection.execute(query)}

    def annotate(self, entry_id: Digest, facts: Mapping[str, Json]) -> None:
        """Set annotations; None removes one. NOT_FOUND."""
        with self._opened.index.write() as connection:
            _entries.annotate_entry(connection, entry_id, facts)

    def touch(self, entry_id: Digest) -> None:
        """Note that an entry was restored; coarse."""
        _entries.touch(self._opened, entry_id)

    def receipts(self, entry_id: Digest) -> list[Receipt]:
        """The receipts about an entry, oldest first."""
        return _entries.read_receipts(self._opened, entry_id)

    def add_receipt(self, receipt: Receipt) -> None:
        """Keep a receipt."""
        _entries.add_receipt(self._opened, receipt)

    def export_bundle(
        self, entry_id: Digest, path: str | Path, *, archive: bool = False, receipts: bool = True,
        progress: Progress | None = None,
    ) -> Exported:  # fmt: skip
        """Write an entry as a bundle. See :func:`kvstore.store.bundle.export_bundle`."""
        with self.while_leased(entry_id) as lease:
            manifest, kept = self.manifest(entry_id), self.receipts(entry_id) if receipts else []
            return export_bundle(
                self._opened, manifest, kept, Path(path), archive=archive, progress=refreshing(lease, progress)
            )

    def import_bundle(
        self, path: str | Path, *, codec: Codec = "small", label: str | None = None, progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Imported:  # fmt: skip
        """Put the entry of a bundle, proved, into the store. See :func:`kvstore.store.bundle.import_bundle`."""
        require_choice("codec", codec, get_args(Codec))
        return import_bundle(
            self._opened, Path(path), codec=codec, label=label, durability=self._durability, progress=progress,
            cancelled=cancelled,
        )  # fmt: skip

    def verify(
        self,
        entry_ids: Iterable[Digest] | None = None,
        *,
        deep: bool = False,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Report:
        """Check the store, or some entries. See :func:`kvstore.store.verify.verify`."""
        return verify(self._opened, entry_ids, deep=deep, progress=progress, cancelled=cancelled)

    def stats(self) -> Stats:
        """Totals."""
        count, total = sa.func.count(), sa.func.coalesce
        entry_query = sa.select(
            count, total(sa.func.sum(entries.c.raw_bytes), 0), total(sa.func.sum(entries.c.damaged), 0)
        ).select_from(entries)
        object_query = sa.select(count, total(sa.func.sum(objects.c.stored_size), 0)).where(objects.c.state == LIVE)
        with self._opened.index.read() as connection:
            entry_count, raw, damaged = connection.execute(entry_query).one()
            object_count, stored = connection.execute(object_query).one()
            held = len(holders(self._opened, connection))
        return Stats(entry_count, object_count, int(raw), int(stored), int(damaged), held)

"""The tables of the index.

The index is derived: ``rebuild`` makes it again from ``manifests/``, ``receipts/`` and
``objects/``. Only labels, pins, leases and access times are its own. Digests are 32-byte
blobs, times are integer microseconds UTC. Small integer keys stand for entries and
objects inside the database and mean nothing outside of it.

Invariants that every writer keeps: a *live* object row implies a durable file with that
content; an entry row is written after the files of all it refers to; on delete rows go
before files.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from kvstore.format.digest import Digest, digest_bytes

__all__ = [
    "DOOMED", "LIVE", "METADATA", "MISSING", "QUARANTINED", "BigKey", "DigestBlob", "doomed_files",
    "entries", "labels", "leases", "notes", "objects", "receipts", "refs",
]  # fmt: skip

LIVE: Final = "live"
DOOMED: Final = "doomed"
"""No entry refers to it; its file may be unlinked at any time, or a put raises it again."""
QUARANTINED: Final = "quarantined"
"""Its bytes were proved wrong and set aside; a put of the same payload heals it."""
MISSING: Final = "missing"
"""Its file was not there when a reader asked; a put of the same payload heals it."""

METADATA: Final = sa.MetaData(naming_convention={
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
})  # fmt: skip

BigKey: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""64-bit integers; SQLite's rowid alias must be spelled INTEGER there."""


_NOT_LIVE: Final = sa.text("state <> 'live'")


class DigestBlob(sa.TypeDecorator[Digest]):
    """A :class:`~kvstore.format.digest.Digest` stored as its 32 bytes."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Digest | None, dialect: sa.Dialect) -> bytes | None:
        """Text form to bytes."""
        return None if value is None else digest_bytes(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Digest | None:
        """Bytes to text form."""
        return None if value is None else Digest("sha256:" + bytes(value).hex())


entries: Final[sa.Table] = sa.Table(
    "entries", METADATA,
    sa.Column("entry_key", BigKey, primary_key=True, autoincrement=True),
    sa.Column("entry_id", DigestBlob, nullable=False, unique=True),
    sa.Column("model_digest", DigestBlob, nullable=False),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("token_count", BigKey, nullable=False),
    sa.Column("lowest_cut", BigKey, nullable=False),
    sa.Column("signature", DigestBlob, nullable=False),
    sa.Column("method", sa.Text),
    sa.Column("prefix_digest", DigestBlob, nullable=False),
    sa.Column("raw_bytes", BigKey, nullable=False),
    sa.Column("created_at", BigKey, nullable=False),
    sa.Column("accessed_at", BigKey, nullable=False),
    sa.Column("pinned", sa.Integer, nullable=False, server_default=sa.text("0")),
    # 1 while an object that the entry needs is quarantined or missing: match passes over it.
    sa.Column("damaged", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Index(None, "model_digest", "namespace"),
    sa.Index(None, "prefix_digest"),
    sa.Index(None, "accessed_at"),
    sqlite_strict=True,
    # Keys are never used twice, so a key that another process remembers cannot come to mean another entry.
    sqlite_autoincrement=True,
)  # fmt: skip

objects: Final[sa.Table] = sa.Table(
    "objects", METADATA,
    sa.Column("object_key", BigKey, primary_key=True, autoincrement=True),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("payload", DigestBlob, nullable=False),
    sa.Column("stored", DigestBlob, nullable=False),
    sa.Column("raw_size", BigKey, nullable=False),
    sa.Column("stored_size", BigKey, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # Identity of the file whose stored digest was last checked: "dev-inode-size-mtime_ns-ctime_ns".
    sa.Column("verified", sa.Text),
    sa.Column("created_at", BigKey, nullable=False),
    sa.UniqueConstraint("namespace", "payload"),
    sa.CheckConstraint("state IN ('live', 'doomed', 'quarantined', 'missing')", name="state"),
    sa.Index("ix_objects_not_live", "state", sqlite_where=_NOT_LIVE),
    sqlite_strict=True,
    sqlite_autoincrement=True,
)  # fmt: skip

refs: Final[sa.Table] = sa.Table(
    "refs", METADATA,
    sa.Column("entry_key", BigKey, sa.ForeignKey("entries.entry_key", ondelete="CASCADE"), primary_key=True),
    sa.Column("object_key", BigKey, sa.ForeignKey("objects.object_key"), primary_key=True, index=True),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip

labels: Final[sa.Table] = sa.Table(
    "labels", METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("entry_key", BigKey, sa.ForeignKey("entries.entry_key", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("set_at", BigKey, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip

leases: Final[sa.Table] = sa.Table(
    "leases", METADATA,
    # Name of a session in tmp/ whose lock says whether the owner lives.
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("entry_key", BigKey, sa.ForeignKey("entries.entry_key", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("taken_at", BigKey, nullable=False),
    sa.Column("expires_at", BigKey, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip

notes: Final[sa.Table] = sa.Table(
    "annotations", METADATA,
    sa.Column("entry_key", BigKey, sa.ForeignKey("entries.entry_key", ondelete="CASCADE"), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    # Canonical JSON text.
    sa.Column("value", sa.Text, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip

receipts: Final[sa.Table] = sa.Table(
    "receipts", METADATA,
    sa.Column("digest", DigestBlob, primary_key=True),
    sa.Column("subject", DigestBlob, nullable=False, index=True),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("made_at", sa.Text, nullable=False),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip

doomed_files: Final[sa.Table] = sa.Table(
    "doomed_files", METADATA,
    # Path of a manifest or receipt below the root, "/" between its parts: unlinked after the rows are gone for good.
    sa.Column("path", sa.Text, primary_key=True),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)  # fmt: skip

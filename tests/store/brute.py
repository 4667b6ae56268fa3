"""Match by looking at every entry: what the tree must be equal to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sqlalchemy as sa

from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.prefix import MediaItem, as_token_ids
from kvstore.store import tree
from kvstore.store.match import Found
from kvstore.store.schema import entries

MODEL, SIGNATURE = sha256_digest(b"model"), sha256_digest(b"signature")


@dataclass(frozen=True)
class Entry:
    ids: tuple[int, ...]
    lowest_cut: int
    media: tuple[MediaItem, ...] = ()
    signature: Digest = SIGNATURE
    method: str | None = None
    model: Digest = MODEL
    namespace: str = "default"
    damaged: int = 0
    key: int = 0

    @property
    def entry_id(self) -> Digest:
        return sha256_digest(f"entry {self.key}".encode())

    def common(self, ids: tuple[int, ...], media: tuple[MediaItem, ...]) -> int:
        count = next((i for i, (a, b) in enumerate(zip(ids, self.ids, strict=False)) if a != b), None)
        if count is None:
            count = min(len(ids), len(self.ids))
        return min([count, *(item.start for item in set(self.media) ^ set(media))])

    def restorable(self, common: int) -> int:
        """Tokens of the first ``common`` that can be restored: none of a media item that goes on after them."""
        if len(self.ids) <= common:
            return len(self.ids)
        for item in self.media:
            if item.start < common < item.start + item.length:
                common = item.start
        return common if self.lowest_cut <= common else 0


def put(conn: sa.Connection, entry: Entry) -> Entry:
    """Write the entry's row and add it to the tree; returns it with its key."""
    values = {
        "entry_id": sha256_digest(b"soon"), "model_digest": entry.model, "namespace": entry.namespace,
        "token_count": len(entry.ids), "lowest_cut": entry.lowest_cut, "signature": entry.signature,
        "method": entry.method, "prefix_digest": entry.model, "raw_bytes": 0, "created_at": 0, "accessed_at": 0,
    }  # fmt: skip
    key = conn.execute(entries.insert().values(values)).inserted_primary_key
    assert key is not None
    entry = replace(entry, key=int(key[0]))
    conn.execute(entries.update().where(entries.c.entry_key == entry.key).values(entry_id=entry.entry_id))
    tree.add_entry(conn, entry_id=entry.entry_id, ids=as_token_ids(entry.ids), media=entry.media)
    return entry


def drop(conn: sa.Connection, entry: Entry) -> None:
    tree.remove_entry(conn, entry.entry_id)
    conn.execute(entries.delete().where(entries.c.entry_key == entry.key))


def damage(conn: sa.Connection, entry: Entry, damaged: int) -> Entry:
    conn.execute(entries.update().where(entries.c.entry_key == entry.key).values(damaged=damaged))
    tree.refile_entry(conn, entry.entry_id)
    return replace(entry, damaged=damaged)


def misfit(entry: Entry, signature: Digest | None, method: str | None) -> str | None:
    if signature is not None and entry.signature != signature:
        return "OTHER_SIGNATURE"
    if entry.method not in (None, method):
        return "OTHER_METHOD"
    return "DAMAGED" if entry.damaged else None


def check(
    found: Found, stored: list[Entry], ids: tuple[int, ...], *, signature: Digest | None, method: str | None,
    media: tuple[MediaItem, ...], limit: int,
) -> None:  # fmt: skip
    """Compare an outcome with the brute-force one: entry, tokens, and reasons."""
    common = {entry: entry.common(ids, media) for entry in stored}
    restorable = {entry: entry.restorable(min(common[entry], limit)) for entry in stored}
    fitting = [entry for entry in stored if misfit(entry, signature, method) is None and restorable[entry]]
    best = max(fitting, key=lambda entry: (restorable[entry], entry.key), default=None)
    assert found.entry_id == (best and best.entry_id)
    assert found.token_count == (restorable[best] if best else 0)
    assert found.common_tokens == max(common.values(), default=0)
    assert bool(found) == (best is not None)

    reasons = {reason.code: reason for reason in found.reasons}
    assert len(reasons) == len(found.reasons)
    for code in ("OTHER_SIGNATURE", "OTHER_METHOD", "DAMAGED"):
        reach = max((restorable[e] for e in stored if misfit(e, signature, method) == code), default=0)
        assert (reasons[code].token if code in reasons else 0) == (reach if reach > found.token_count else 0)
    blocked = [
        e for e in stored
        if not misfit(e, signature, method) and replace(e, lowest_cut=0).restorable(min(common[e], limit))
        > found.token_count
    ]  # fmt: skip
    inside = [e for e in stored if (c := min(common[e], limit)) == min(max(common.values()), limit)
              and c != replace(e, lowest_cut=0).restorable(c) and c < len(e.ids)]  # fmt: skip
    assert bool(inside) == ("INSIDE_MEDIA" in reasons)
    assert bool(blocked) == bool({"STATE_ONLY_AT", "WINDOW_NOT_STORED"} & reasons.keys())
    _check_cuts(found, blocked)
    _check_parting(found, stored, ids, media, limit)


def _check_cuts(found: Found, blocked: list[Entry]) -> None:
    by_id = {entry.entry_id: entry for entry in blocked}
    for reason in found.reasons:
        if reason.code in ("STATE_ONLY_AT", "WINDOW_NOT_STORED"):
            assert reason.entry_id is not None
            entry = by_id[reason.entry_id]
            assert reason.token == entry.lowest_cut
            assert (reason.code == "STATE_ONLY_AT") == (entry.lowest_cut == len(entry.ids))
            assert str(reason.token) in reason.message


def _check_parting(
    found: Found, stored: list[Entry], ids: tuple[int, ...], media: tuple[MediaItem, ...], limit: int
) -> None:
    at = found.common_tokens
    partings = [r for r in found.reasons if r.code in ("DIVERGED", "MEDIA_DIFFERS", "ENDED")]
    if not stored:
        assert [r.code for r in found.reasons] == ["NO_ENTRY_OF_MODEL"]
        return
    assert len(partings) == (at < limit)
    for reason in partings:
        nexts = {entry.ids[at] for entry in stored if len(entry.ids) > at == entry.common(ids, media)}
        assert reason.token == at
        if reason.code == "DIVERGED":
            assert reason.expected == ids[at]
            assert reason.found in nexts
        elif reason.code == "ENDED":
            assert not nexts
        else:
            assert ids[at] in nexts

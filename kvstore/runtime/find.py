"""Finding what restores the most of a prompt, and saying why it is not more.

Nothing here opens an object or computes anything. What a load will read is looked up when
somebody asks; a miss, which costs a prefill, is explained from the manifests of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvstore.format.compat import signature_digest
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.manifest import MethodRecord
from kvstore.format.receipt import Receipt
from kvstore.runtime.cut import needed_payloads
from kvstore.runtime.prefix_proof import begins
from kvstore.runtime.probe import CacheOptions
from kvstore.runtime.results import Hit, Reads
from kvstore.store.clock import micros_text, now_micros
from kvstore.store.entry_store import EntryStore
from kvstore.store.explain import Asked
from kvstore.store.match import Found
from kvstore.store.rates import Rates, Worth

__all__ = ["best", "covering_receipt", "find", "in_full", "reads_of", "worth_of"]


def best(entries: EntryStore, asked: Asked, method: str | None) -> Found:
    """The entry that restores the most, lossless or made by ``method``; of equals the lossless one."""
    # Under a lossy method the signature is another, so both are asked for.
    methods: Sequence[str | None] = (None,) if method is None else (None, method)
    return max((_ask(entries, asked, name) for name in methods), key=lambda found: found.token_count)


def find(entries: EntryStore, asked: Asked, *, options: CacheOptions, method: str | None) -> Hit:
    """:func:`best`, as the hit that a load goes by."""
    found = best(entries, asked, method)
    entry_id, tokens = found.entry_id, found.token_count
    measure = None if entry_id is None else partial(reads_of, entries, entry_id, tokens)
    judge = partial(worth_of, entries, asked.model.digest, tokens=tokens)
    return Hit(entry_id, tokens, found.common_tokens, found.reasons, asked.namespace, options, method, measure, judge)


def in_full(entries: EntryStore, asked: Asked, hit: Hit, *, namespaces: bool = False) -> Hit:
    """The hit or miss with the fields that differ, and what other models (and namespaces) have that is longer."""
    reasons = entries.explain(asked, hit.reasons, longer_than=hit.token_count, namespaces=namespaces)
    return replace(hit, reasons=reasons)


def covering_receipt(
    entries: EntryStore, asked: Asked, method: MethodRecord | None, *, label: str | None,
    annotations: Mapping[str, Json] | None,
) -> Receipt | None:  # fmt: skip
    """A write receipt of nothing, for an entry that holds all of the ids, the last one included; None without one.

    A label or an annotation is about a position, so with one the entry must end there, and gets it.
    """
    found = _ask(entries, asked, None if method is None else method.name, int(asked.ids.size))
    if found.entry_id is None or found.token_count < asked.ids.size:
        return None
    manifest = entries.manifest(found.entry_id)
    # The index knows a method by its name alone.
    if manifest.method != method or not begins(entries, manifest, asked, int(asked.ids.size)):
        return None
    if (label is not None or annotations) and manifest.token_count != asked.ids.size:
        return None
    written = next((item for item in entries.receipts(found.entry_id) if item.type == "write"), None)
    if written is None:
        return None
    if label is not None:
        entries.set_label(label, found.entry_id)
    if annotations:
        entries.annotate(found.entry_id, annotations)
    return replace(
        written, made_at=micros_text(now_micros()), checks={**written.checks, "payload_digests": "skipped"},
        facts={**written.facts, "objects_reused": len(manifest.all_payloads()), "objects_written": 0,
               "stored_bytes": 0},
    )  # fmt: skip


def reads_of(entries: EntryStore, entry_id: Digest, tokens: int) -> Reads:
    """What must be read to restore an entry at a position. Raises NOT_FOUND."""
    manifest = entries.manifest(entry_id)
    refs = needed_payloads(manifest, tokens)
    return Reads(1, len(refs), sum(ref.size for ref in refs), entries.stored_bytes(manifest.namespace, refs))


def worth_of(entries: EntryStore, model: Digest, reads: Reads, *, tokens: int) -> Worth | None:
    """What restoring saves on this machine, or None where that was not measured."""
    return Rates().worth(entries.store_id, model, payload_bytes=reads.payload_bytes, tokens=tokens)


def _ask(entries: EntryStore, asked: Asked, method: str | None, limit: int | None = None) -> Found:
    """The entry that restores the most, up to ``limit`` tokens; by default all but the last."""
    wanted = None if asked.signature is None else signature_digest(asked.signature, method)
    return entries.match(
        asked.model.digest, asked.namespace, asked.ids, signature=wanted, method=method, media=asked.media, limit=limit
    )

"""Verbs that look: ``ls``, ``show``, ``match``, ``info``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore import __version__
from kvstore.cli.drafts import draft_option, find_pair, require_alone
from kvstore.cli.entries import entry_document, entry_table, model_name
from kvstore.cli.inputs import cache_options, cache_shape, model_options, prompt_options, read_input, require_one_prompt
from kvstore.cli.media import media_option, read_media
from kvstore.cli.output import human_bytes, human_count, table
from kvstore.cli.session import Session, verb
from kvstore.errors import fail

if TYPE_CHECKING:
    from kvstore.format.compat import Signature
    from kvstore.format.digest import Digest
    from kvstore.format.manifest import Manifest
    from kvstore.runtime.identity import ModelIdentity
    from kvstore.store.entries import EntryInfo
    from kvstore.store.entry_store import EntryStore

__all__ = ["info", "ls", "match", "show"]

_LIBRARIES: Final = ("mlx", "mlx-lm", "numpy", "zstandard", "sqlalchemy")


@verb("ls")
@click.option("--namespace", help="Only entries in this namespace.")
@click.option("--model", metavar="FOLDER|ID", help="Only entries of this model.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most so many.")
def ls(session: Session, namespace: str | None, model: str | None, limit: int | None) -> None:
    """List entries.

    The one that was stored or used last comes first. With -q only ids are printed.
    """
    with session.open_entries(read_only=True) as store:
        digest = None
        if model is not None:
            from kvstore.runtime.identity import ModelIdentity

            digest = ModelIdentity.from_path(model).digest
        found = store.entries(model=digest, namespace=namespace, limit=limit)
    lines = [item.entry_id for item in found] if session.quiet else entry_table(found)
    session.output.result("ls", {"entries": [entry_document(item) for item in found]}, lines)
    session.output.say(human_count(len(found), "entry", "entries"))


@verb("show")
@click.argument("ref")
@click.option("--raw", type=click.Choice(["manifest", "receipt"]), help="Print the exact bytes of a document instead.")
def show(session: Session, ref: str, raw: str | None) -> None:
    """Show one entry.

    REF is an entry id, at least 8 hex digits of one, or a label. --raw receipt prints the write receipt.
    """
    with session.open_entries(read_only=True) as store:
        entry_id = store.resolve(ref)
        manifest = store.manifest(entry_id)
        receipts = store.receipts(entry_id)
        if raw == "manifest":
            session.output.raw(manifest.data)
        elif raw == "receipt":
            written = [receipt for receipt in receipts if receipt.type == "write"]
            if not written:
                raise fail("NOT_FOUND", f"there is no write receipt of {entry_id}", ref=ref)
            session.output.raw(written[0].data)
        else:
            _show(session, store.info(entry_id), manifest, receipts)


def _show(session: Session, item: EntryInfo, manifest: Manifest, receipts: Sequence[Any]) -> None:
    from kvstore.cli.plan import layer_kinds
    from kvstore.format.layout import layout_of

    document = {
        "entry": entry_document(item),
        "model_type": manifest.model.model_type,
        "tokenizer": manifest.tokenizer.to_json(),
        "kinds": layer_kinds(manifest.layers),
        "groups": [_group(group) for group in manifest.groups],
        "layout_digest": layout_of(manifest.layers, manifest.token_count).digest,
        "receipts": [{"digest": r.digest, "type": r.type, "made_at": r.made_at} for r in receipts],
    }
    session.output.result("show", document, _show_lines(item, manifest, document))


def _group(group: Any) -> dict[str, Any]:
    span = group.span
    return {
        "span": span.kind, "start": span.start, "rows": span.rows, "keep": span.keep, "layers": len(group.layers),
        "payloads": len(group.payloads), "payload_bytes": sum(ref.size for ref in group.payloads),
    }  # fmt: skip


def _show_lines(item: EntryInfo, manifest: Manifest, document: dict[str, Any]) -> list[str]:
    low = item.lowest_cut
    cut = "only there" if low >= item.token_count else f"anywhere from {max(low, 1)} on"
    facts = [
        ("entry", item.entry_id),
        ("labels", ", ".join(item.labels) or "none"),
        ("model", f"{model_name(item)}, {manifest.model.model_type}"),
        ("", manifest.model.digest),
        ("tokens", f"{item.token_count}, restorable {cut}"),
        ("bytes", f"{human_bytes(item.raw_bytes)}, stored in {human_bytes(item.stored_bytes)}"),
        ("namespace", item.namespace),
        ("created", entry_document(item)["created_at"]),
        ("layout", document["layout_digest"]),
    ]
    if item.damaged:
        facts.append(("damaged", "yes; kvstore verify says what"))
    rows = [(kind, str(v["layers"]), human_bytes(v["bytes"])) for kind, v in sorted(document["kinds"].items())]
    lines = [f"{name:<10} {value}" for name, value in facts]
    return [*lines, "", *table(("KIND", "LAYERS", "BYTES"), rows, right=(1, 2))]


@verb("match")
@model_options(required=True)
@prompt_options
@cache_options
@click.option("--namespace", default="default", show_default=True, help="The namespace to look in.")
@media_option
@draft_option
@click.option("--method", metavar="NAME", help="Lossy method whose entries will do, too.")
@click.option("--any-shape", is_flag=True, help="Also entries that the model's own cache cannot hold: quantized ones.")
def match(session: Session, **options: Any) -> None:
    """Find the entry that holds the longest prefix of a prompt.

    Nothing is loaded and no payload is read. The last token is never restored: a model needs one to
    evaluate. What is found is what a load would take: of the shape of the model's own cache, or of what
    --kv-bits and --max-kv-size ask for. Entries that a lossy method made are found where --method names
    it. Without an entry the exit code is 3.
    """
    require_one_prompt("match", options)
    if options["draft_model"]:
        require_alone(options)
    ids = read_input(options).encode(lambda: _tokenizer(options["model"]))
    from kvstore.format.prefix import as_token_ids
    from kvstore.runtime.identity import ModelIdentity

    if options["draft_model"]:
        with session.open_store() as both:
            pair = find_pair(both, ids, options)
            draft = {"entry_id": pair.draft.entry_id, "token_count": pair.token_count}
            model = ModelIdentity.from_path(options["model"]).digest
            _report_match(session, both.entries, model, pair.main, len(ids), draft=draft)
        return
    with session.open_entries(read_only=True) as store:
        from kvstore.runtime.find import best
        from kvstore.store.explain import Asked

        identity = ModelIdentity.from_path(options["model"], options["adapter_path"])
        media = read_media(options["media"], identity, len(ids))
        asked = Asked(identity.model, options["namespace"], as_token_ids(ids), _signature(options, identity), media)
        found = best(store, asked, options["method"])
        _report_match(session, store, identity.digest, found, len(ids))


def _tokenizer(model: str) -> Any:
    from kvstore.runtime.lazy import load_tokenizer

    return load_tokenizer(model)


def _signature(options: dict[str, Any], identity: ModelIdentity) -> Signature | None:
    """What the model's cache looks like under the options, or None where any entry will do."""
    if options["any_shape"]:
        if options["kv_bits"] or options["max_kv_size"]:
            raise fail("USAGE", "--any-shape goes with neither --kv-bits nor --max-kv-size")
        return None
    from kvstore.store.shapes import Shapes

    shape = cache_shape(options)
    known = Shapes().get(identity.digest, repr(shape))
    if known is not None:
        return known
    from kvstore.runtime.probes import Probes

    return Probes()(identity, shape).signature


def _report_match(
    session: Session, store: EntryStore, model: Digest, found: Any, count: int, *, draft: dict[str, Any] | None = None
) -> None:
    reasons = [reason.to_json() for reason in found.reasons]
    if not found:
        why = "; ".join(reason.message for reason in found.reasons) or "nothing is stored"
        raise fail(
            "NO_PREFIX", f"no entry can be restored for these {human_count(count, 'token')}: {why}",
            common_tokens=found.common_tokens, query_tokens=count, reasons=reasons,
        )  # fmt: skip
    from kvstore.runtime.find import reads_of, worth_of

    item = store.info(found.entry_id)
    reads = reads_of(store, found.entry_id, found.token_count)
    worth = worth_of(store, model, reads, tokens=found.token_count)
    session.output.result(
        "match",
        {
            "entry_id": found.entry_id, "labels": list(item.labels), "token_count": found.token_count,
            "common_tokens": found.common_tokens, "query_tokens": count, "reads": reads.to_json(), "reasons": reasons,
            "worth": None if worth is None else worth.to_json(), "draft": draft,
        },
        [f"{found.entry_id}  {found.token_count} of {human_count(count, 'token')}"],
    )  # fmt: skip
    if worth is not None:
        session.output.say(
            f"{'worth it' if worth.pays else 'not worth it'}: {worth.restore_seconds:.3f} s to restore, "
            f"{worth.prefill_seconds:.3f} s to prefill"
        )  # fmt: skip
    for reason in found.reasons:
        session.output.say(f"note: {reason.message}", level=1)


@verb("info")
def info(session: Session) -> None:
    """Show the store's path, sizes and versions.

    kvstore works on files alone: it uses no network, sends nothing and runs no server.
    """
    with session.open_entries(read_only=True) as store:
        stats = store.stats().to_json()
        path, store_id, read_only = store.root, store.store_id, store.read_only
    versions: dict[str, str | None] = {"kvstore": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in _LIBRARIES}
    document = {"path": str(path), "store_id": store_id, "read_only": read_only, "stats": stats, "versions": versions}
    lines = [f"{'path':<16} {path}", f"{'store id':<16} {store_id}"]
    for name, value in stats.items():
        shown = human_bytes(value) if name.endswith("bytes") and isinstance(value, int) else str(value)
        lines.append(f"{name.replace('_', ' '):<16} {shown}")
    lines.append(f"{'versions':<16} " + ", ".join(f"{name} {text or 'absent'}" for name, text in versions.items()))
    session.output.result("info", document, lines)


def _version(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""``explain``: why a prompt hits or misses, in words and as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.entries import short_id
from kvstore.cli.inputs import cache_options, cache_shape, model_options, prompt_options, read_input, require_one_prompt
from kvstore.cli.media import media_option, read_media
from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.session import Session, verb

if TYPE_CHECKING:
    from kvstore.runtime.chat import Divergence
    from kvstore.runtime.results import Hit
    from kvstore.runtime.store import Store

__all__ = ["explain"]


@verb("explain")
@model_options(required=True)
@prompt_options
@cache_options
@media_option
@click.option("--namespace", default="default", show_default=True, help="The namespace to look in.")
@click.option("--method", metavar="NAME", help="Lossy method whose entries will do, too.")
@click.option("--all-namespaces", is_flag=True, help="Also say what other namespaces hold.")
def explain(session: Session, **options: Any) -> None:
    """Say why a prompt hits or misses.

    How many tokens can be restored, from which entry, what a load would read, and why it is not more:
    where the prompt parts from what is stored (with the text on either side), which field of the model
    or of the cache's shape is another, or at which token a state was saved. A miss is an answer, too,
    so the exit code is 0.
    """
    require_one_prompt("explain", options)
    prompt = read_input(options)
    with session.open_store() as store:
        from kvstore.runtime.identity import ModelIdentity
        from kvstore.runtime.lazy import load_tokenizer

        identity = ModelIdentity.from_path(options["model"], options["adapter_path"])
        tokenizer = load_tokenizer(options["model"])
        ids = prompt.encode(lambda: tokenizer)
        hit = store.explain(
            ids, model=identity, options=cache_shape(options), namespace=options["namespace"],
            method=options["method"], media=read_media(options["media"], identity, len(ids)),
            other_namespaces=options["all_namespaces"],
        )  # fmt: skip
        parts = _divergence(store, tokenizer, ids, prompt.messages, hit)
        _report(session, store, hit, len(ids), parts)


def _divergence(
    store: Store, tokenizer: Any, ids: list[int], messages: list[dict[str, Any]], hit: Hit
) -> Divergence | None:
    """Where the prompt parts from the entry that shares the most with it, if it does."""
    if hit.asked is None or not any(reason.code == "DIVERGED" for reason in hit.reasons):
        return None
    from kvstore.runtime.chat import divergence

    near = store.entries.nearest(hit.asked)
    if near is None:
        return None
    stored = store.entries.token_ids(store.entries.manifest(near.entry_id))
    return divergence(tokenizer, stored, ids, messages=messages)


def _report(session: Session, store: Store, hit: Hit, count: int, parts: Divergence | None) -> None:
    labels = [] if hit.entry_id is None else list(store.entries.info(hit.entry_id).labels)
    document = {
        "hit": bool(hit), "entry_id": hit.entry_id, "labels": labels, "token_count": hit.token_count,
        "common_tokens": hit.common_tokens, "query_tokens": count,
        "reads": None if hit.reads is None else hit.reads.to_json(),
        "reasons": [reason.to_json() for reason in hit.reasons],
        "divergence": None if parts is None else parts.to_json(),
    }  # fmt: skip
    session.output.result("explain", document, _lines(hit, labels, count, parts))


def _lines(hit: Hit, labels: list[str], count: int, parts: Divergence | None) -> list[str]:
    asked = human_count(count, "token")
    if hit.entry_id is None:
        lines = [f"miss: no entry can be restored for these {asked}; {hit.common_tokens} of them are stored"]
    else:
        named = f" ({', '.join(labels)})" if labels else ""
        lines = [f"hit: {hit.token_count} of {asked}, from entry {short_id(hit.entry_id)}{named}"]
    if hit.reads is not None:
        size = f"{human_bytes(hit.reads.payload_bytes)}, stored in {human_bytes(hit.reads.stored_bytes)}"
        lines.append(f"a load reads {human_count(hit.reads.segments, 'segment')}: {size}")
    lines += [f"- {reason.message}" for reason in hit.reasons]
    if parts is not None:
        lines.append(f"- {parts.message}")
    if hit and not hit.reasons:
        lines.append("- a model needs one token to evaluate, so no more can be restored")
    return lines

"""``put``: from a prompt, from token ids, or from a file that mlx_lm or another program wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.drafts import draft_document, draft_option, import_pair, prefill_pair, require_alone
from kvstore.cli.inputs import (
    cache_options,
    cache_shape,
    model_options,
    prompt_options,
    read_input,
    read_token_ids,
    require_one_prompt,
)
from kvstore.cli.media import media_option, read_media
from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.outputs import require_output, write_file
from kvstore.cli.session import PATH, Session, verb
from kvstore.cli.wp30 import show, take_in
from kvstore.errors import fail

if TYPE_CHECKING:
    from kvstore.format.receipt import Receipt
    from kvstore.runtime.binding import BoundModel
    from kvstore.runtime.prefill import Prefilled
    from kvstore.runtime.store import Store

__all__ = ["put"]


@verb("put")
@click.argument("file", required=False, type=PATH)
@model_options(required=False)
@prompt_options
@cache_options
@media_option
@draft_option
@click.option("--quantized-kv-start", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Token after which the KV cache is quantized.")
@click.option("--prefill-step-size", type=click.IntRange(min=1), metavar="N", help="Tokens for each evaluation.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), metavar="N",
              help="Also store the states on the way, every N tokens, where a later one cannot be cut back to them.")
@click.option("--if-covered", type=click.Choice(["store", "skip"]), default="store", show_default=True,
              help="Where an entry holds all of these tokens already, skip the prefill and write nothing.")
@click.option("--label", metavar="NAME", help="A name for the entry; it moves if it is taken.")
@click.option("--namespace", default="default", show_default=True, help="Entries of different namespaces never meet.")
@click.option("--codec", type=click.Choice(["small", "fast"]), default="small", show_default=True,
              help="Compress well, or hardly at all.")
@click.option("--receipt", type=PATH, metavar="FILE", help="Write the receipt to this file.")
@click.option("--force", is_flag=True, help="Replace the receipt's file if it is there; a plain one, or a link.")
@click.option("--inspect-only", is_flag=True,
              help="Look at a wp30-cache-2 file: no model is needed, and nothing is stored.")
def put(session: Session, file: Path | None, **options: Any) -> None:
    """Store a KV cache: prefill a prompt, or take in an mlx-lm file.

      kvstore put --model M --prompt FILE      run the model over a prompt
      kvstore put --model M --prompt FILE --chat
                                               the same, as a user message that is still open:
                                               what mlx_lm.generate goes on from with a chat model
      kvstore put --model M --tokens FILE      the same, for token ids
      kvstore put --model M --messages FILE    the same, for a conversation
      kvstore put CACHE.safetensors --model M --tokens FILE
                                               take in a file of mlx_lm.cache_prompt, or a
                                               wp30-cache-2 file in any of its codecs

    The entry's id is printed. Putting the same prompt again reads it again, gives the same id and writes
    nothing; with --if-covered skip it is not read either.
    An mlx-lm file says nothing of weights and tokens: --model and --tokens must be those that made it.
    With --draft-model, the prompt is read by both models, or the file is a list of both models' caches.
    Where tokens stand for images or sounds, --media must say for which; then only a file can be taken in.
    A wp30-cache-2 file has the tokens' hash, and names the lossy method that made it, if one did.
    """  # fmt: skip
    if options["inspect_only"]:
        _inspect(session, file, options)
        return
    if not options["model"]:
        raise fail("USAGE", "put needs --model", fix="Name the model's folder, or its id in the hub cache.")
    if file is not None and not options["tokens"]:
        raise fail(
            "USAGE", "put FILE needs --tokens: the ids that the cache was computed from",
            fix="FILE is a cache; a text file is read with --prompt FILE.",
        )  # fmt: skip
    require_one_prompt("put", options)
    if options["receipt"]:
        require_output(options["receipt"], force=options["force"])
    if options["draft_model"]:
        require_alone(options)
    if file is None and options["media"]:
        raise fail(
            "USAGE", "put --media needs FILE: kvstore prefills text alone",
            fix="Compute the cache in a program that reads the media, save it with mlx-lm, and put that file.",
        )  # fmt: skip
    if file is None:
        _prefill_and_put(session, options)
    else:
        _import(session, file, options)


def _prefill_and_put(session: Session, options: dict[str, Any]) -> None:
    """Everything that can be wrong with the call first, then the model, then the work."""
    out = session.output
    prompt = read_input(options)
    with session.open_store(create=True, writable=True) as store:
        from kvstore.runtime.binding import load_model

        out.say("loading the model", level=1)
        bound = load_model(options["model"], options["adapter_path"])
        ids = prompt.encode(lambda: bound.tokenizer)
        if options["draft_model"]:
            receipt, draft, timing = prefill_pair(session, store, bound, ids, options)
            _report(session, receipt, options, created=_wrote(store, receipt), timing=timing, draft=draft)
            return
        there = _covered(store, bound, ids, options)
        if there is not None:
            _report(session, there, options, created=False)
            return
        on_the_way: list[Receipt] = []

        def keep(at: Prefilled) -> None:
            base = on_the_way[-1] if on_the_way else None
            on_the_way.append(store.put(
                at.cache, token_ids=at.token_ids, model=bound, namespace=options["namespace"], codec=options["codec"],
                base=base, remember=True,
            ))  # fmt: skip

        filled, timing = _prefill(session, bound.model, ids, options, keep)
        base = on_the_way[-1] if on_the_way else None
        receipt, created = _put(session, store, filled.cache, filled.token_ids, bound, options, base=base)
    _report(session, receipt, options, created=created, timing=timing, on_the_way=on_the_way)


def _covered(store: Store, bound: BoundModel, ids: list[int], options: dict[str, Any]) -> Receipt | None:
    """The receipt of an entry that makes the prefill needless; states on the way are only found by going it."""
    if options["if_covered"] != "skip" or options["checkpoint_every"]:
        return None
    return store.covered(
        ids, model=bound, options=cache_shape(options), quantized_kv_start=options["quantized_kv_start"],
        namespace=options["namespace"], label=options["label"],
    )  # fmt: skip


def _prefill(
    session: Session, model: Any, ids: list[int], options: dict[str, Any], keep: Callable[[Prefilled], None]
) -> tuple[Prefilled, dict[str, Any]]:
    from kvstore.runtime.prefill import prefill

    every = options["checkpoint_every"]
    with session.output.progress("prefill", total=len(ids), unit="tokens") as bar:
        filled = prefill(
            model, ids, options=cache_shape(options), quantized_kv_start=options["quantized_kv_start"],
            step=options["prefill_step_size"], checkpoint_every=every, checkpoint=keep if every else None,
            progress=bar.update,
        )  # fmt: skip
        seconds = bar.seconds
    count = len(filled.token_ids)
    return filled, {
        "tokens": count, "seconds": round(seconds, 3), "tokens_per_second": round(count / max(seconds, 1e-9), 2),
    }  # fmt: skip


def _import(session: Session, file: Path, options: dict[str, Any]) -> None:
    ids = read_token_ids(options["tokens"])
    with session.open_store(create=True, writable=True) as store:
        from kvstore.runtime.identity import ModelIdentity
        from kvstore.runtime.lazy import caches_of_folder
        from kvstore.runtime.prompt_file import read_prompt_file
        from kvstore.runtime.wp30_file import is_wp30

        if options["draft_model"]:
            receipt, draft = import_pair(session, store, file, ids, options)
            _report(session, receipt, options, created=_wrote(store, receipt), draft=draft)
            return
        if is_wp30(file):
            identity = ModelIdentity.from_path(options["model"], options["adapter_path"])
            taken = take_in(file, ids, identity)
            cache, more = taken.cache, {"method": taken.method, "annotations": taken.annotations}
        else:
            identity = ModelIdentity.from_path(options["model"], options["adapter_path"])
            # The model's own caches: a file says how many there were, and old ones not even of which classes.
            found = read_prompt_file(file, caches_of_folder(identity.path))
            writer = found.metadata.get("model")
            if writer not in (None, options["model"]):
                session.output.say(f"note: {file.name} says that its model is {writer!r}")
            cache, more = found.cache, {}
        media = read_media(options["media"], identity, len(ids))
        receipt, created = _put(session, store, cache, ids, identity, options, media=media, **more)
    _report(session, receipt, options, created=created)


def _inspect(session: Session, file: Path | None, options: dict[str, Any]) -> None:
    """A look has no use for a model or for tokens, and must not seem to have checked them."""
    others = ("model", "adapter_path", "prompt", "tokens", "messages", "media", "label")
    if file is None or any(options[name] for name in others):
        raise fail("USAGE", "put --inspect-only takes a FILE and nothing else")
    show(session, file)


def _put(
    session: Session, store: Store, cache: Any, ids: Any, model: Any, options: dict[str, Any], **more: Any
) -> tuple[Receipt, bool]:
    """Store the cache; the write receipt, and whether the entry is new."""
    with session.output.progress("storing", total=1, unit="bytes") as bar:
        receipt = store.put(
            cache, token_ids=ids, model=model, label=options["label"], namespace=options["namespace"],
            codec=options["codec"], if_covered=options["if_covered"], progress=bar.update, **more,
        )  # fmt: skip
    return receipt, _wrote(store, receipt)


def _wrote(store: Store, receipt: Receipt) -> bool:
    """Only what wrote something leaves its receipt, so an entry's first one is that of the call that made it."""
    first = next((r for r in store.entries.receipts(receipt.subject) if r.type == "write"), None)
    return first is not None and first.digest == receipt.digest


def _report(
    session: Session, receipt: Receipt, options: dict[str, Any], *, created: bool,
    timing: dict[str, Any] | None = None, on_the_way: Sequence[Receipt] = (), draft: Receipt | None = None,
) -> None:  # fmt: skip
    if options["receipt"]:
        write_file(options["receipt"], receipt.data, force=options["force"])
    facts: dict[str, Any] = dict(receipt.facts)
    session.output.result(
        "put",
        {
            "entry_id": receipt.subject, "created": created, "label": options["label"],
            "namespace": options["namespace"], "token_count": facts["token_count"],
            "raw_bytes": facts["payload_bytes"], "stored_bytes": facts["stored_bytes"],
            "objects_written": facts["objects_written"], "objects_reused": facts["objects_reused"],
            "receipt": receipt.digest, "prefill": timing, "draft": draft_document(draft),
            "checkpoints": [
                {"entry_id": item.subject, "token_count": item.facts["token_count"]} for item in on_the_way
            ],
        },
        [receipt.subject],
    )  # fmt: skip
    if timing:
        tokens = human_count(timing["tokens"], "token")
        session.output.say(f"prefilled {tokens} in {timing['seconds']:.1f} s, {timing['tokens_per_second']} tokens/s")
    size = human_bytes(facts["payload_bytes"])
    if created:
        session.output.say(f"stored {size} in {human_bytes(facts['stored_bytes'])}")
    else:
        session.output.say(f"was stored already: {size}, nothing written")
        if timing and not on_the_way:
            session.output.say("with --if-covered skip the prompt would not have been read again")

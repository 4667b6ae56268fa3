"""``--draft-model``: a model's caches and those of its draft model, put, found and written together or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstore.cli.inputs import cache_shape
from kvstore.cli.output import human_count
from kvstore.cli.session import Session
from kvstore.errors import fail

if TYPE_CHECKING:
    from kvstore.format.receipt import Receipt
    from kvstore.runtime.binding import BoundModel
    from kvstore.runtime.pairs import PairHit, RestoredPair
    from kvstore.runtime.store import Store

__all__ = [
    "draft_document", "draft_option", "find_pair", "import_pair", "load_named_pair", "prefill_pair", "require_alone",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
_ALONE = ("adapter_path", "media", "checkpoint_every", "method", "any_shape")


def draft_option(function: F) -> F:
    """``--draft-model``, named as in mlx_lm."""
    return click.option(
        "--draft-model", metavar="FOLDER|ID",
        help="A draft model, whose caches belong to the model's: both, or neither.",
    )(function)  # fmt: skip


def require_alone(options: dict[str, Any]) -> None:
    """Refuse what a pair cannot have. Raises USAGE."""
    given = [name for name in _ALONE if options.get(name)]
    if options.get("if_covered") == "skip":
        given.append("if_covered skip")
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise fail("USAGE", f"--draft-model does not go with {names}")


def prefill_pair(
    session: Session, store: Store, main: BoundModel, ids: list[int], options: dict[str, Any]
) -> tuple[Receipt, Receipt, dict[str, Any]]:  # fmt: skip
    """Prefill both models to one position and put the pair; the receipts, and what it took."""
    from kvstore.runtime.binding import load_model
    from kvstore.runtime.prefill import prefill, shape_of
    from kvstore.runtime.probe import probe

    shape = cache_shape(options)
    models, start = (main, load_model(options["draft_model"])), options["quantized_kv_start"]
    ends = [
        shape_of(partial(probe, model), len(ids), shape, quantized_kv_start=start)[1] for model in models
    ]  # fmt: skip
    # Where one of them has to stop before the last token, so does the other.
    low = min(ends)
    made, seconds = [], 0.0
    for model, end in zip(models, ends, strict=True):
        with session.output.progress("prefill", total=len(ids), unit="tokens") as bar:
            made.append(prefill(
                model, ids if end == low else ids[:low], options=shape, quantized_kv_start=start,
                step=options["prefill_step_size"], progress=bar.update,
            ))  # fmt: skip
            seconds += bar.seconds
    first, second = _put(session, store, [*made[0].cache, *made[1].cache], made[0].token_ids, models, options)
    return first, second, {
        "tokens": low, "seconds": round(seconds, 3), "tokens_per_second": round(low / max(seconds, 1e-9), 2),
    }  # fmt: skip


def import_pair(
    session: Session, store: Store, file: Path, ids: list[int], options: dict[str, Any]
) -> tuple[Receipt, Receipt]:
    """Put a file's list of both models' caches.

    Raises:
        InvalidError: as :func:`kvstore.runtime.prompt_file.read_prompt_file`.
    """
    from kvstore.runtime.identity import ModelIdentity
    from kvstore.runtime.lazy import caches_of_folder
    from kvstore.runtime.prompt_file import read_prompt_file

    models = tuple(ModelIdentity.from_path(options[name]) for name in ("model", "draft_model"))
    found = read_prompt_file(file, [cache for model in models for cache in caches_of_folder(model.path)])
    return _put(session, store, found.cache, ids, models, options)


def _put(
    session: Session, store: Store, cache: list[Any], ids: Any, models: Sequence[Any], options: dict[str, Any]
) -> tuple[Receipt, Receipt]:
    from kvstore.runtime.pairs import put_pair

    with session.output.progress("storing", total=1, unit="bytes") as bar:
        return put_pair(
            store, cache, token_ids=ids, model=models[0], draft=models[1], label=options["label"],
            namespace=options["namespace"], codec=options["codec"], progress=bar.update,
        )  # fmt: skip


def find_pair(store: Store, ids: Sequence[int], options: dict[str, Any]) -> PairHit:
    """The pair that restores the most of a prompt.

    Raises:
        NotFoundError: NO_PREFIX where there is none, whatever one of the models has by itself.
    """
    from kvstore.runtime.identity import ModelIdentity
    from kvstore.runtime.pairs import match_pair

    main, draft = (ModelIdentity.from_path(options[name]) for name in ("model", "draft_model"))
    found = match_pair(
        store, ids, model=main, draft=draft, options=cache_shape(options), namespace=options["namespace"]
    )
    if not found:
        raise fail(
            "NO_PREFIX", f"no pair can be restored for these {human_count(len(ids), 'token')}; by themselves the model "
            f"has {found.main.token_count} and its draft model {found.draft.token_count}", query_tokens=len(ids),
            common_tokens=found.main.common_tokens, reasons=[reason.to_json() for reason in found.main.reasons],
        )  # fmt: skip
    return found


def load_named_pair(store: Store, ref: str, into: BoundModel, draft: str, progress: Any) -> RestoredPair:
    """The caches of a main entry and of its companion.

    Raises:
        NotFoundError: NO_PREFIX where it has none.
        KVStoreError: as :meth:`kvstore.Store.load`.
    """
    from kvstore.runtime.lazy import open_model
    from kvstore.runtime.pairs import load_pair, pair_of

    other = open_model(draft)
    return load_pair(
        store, pair_of(store, ref, into=into, draft_into=other), into=into, draft_into=other, progress=progress
    )


def draft_document(receipt: Receipt | None) -> dict[str, Any] | None:
    """The companion in a ``put`` or ``get`` document, by its write or load receipt."""
    if receipt is None:
        return None
    return {"entry_id": receipt.subject, "token_count": receipt.facts["token_count"]}

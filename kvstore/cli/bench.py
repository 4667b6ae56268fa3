"""``bench``: measure this machine, and remember what was found, to judge hits by."""

from __future__ import annotations

from typing import Any

import click

from kvstore.cli.inputs import cache_options, cache_shape, model_options
from kvstore.cli.output import human_bytes, human_count
from kvstore.cli.session import Session, verb

__all__ = ["bench"]


@verb("bench")
@model_options(required=True)
@cache_options
@click.option("--tokens", type=click.IntRange(min=64), default=256, show_default=True, metavar="N",
              help="Tokens to prefill.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
              help="Restores; the median counts.")
def bench(session: Session, **options: Any) -> None:
    """Measure how fast this machine prefills and restores.

    The rates are remembered for this machine, store and model. From then on `match` says whether a
    hit pays: what restoring takes, and what computing the same tokens would take. Nothing is left in
    the store.
    """  # fmt: skip
    with session.open_store(create=True, writable=True) as store:
        from kvstore.runtime.binding import load_model
        from kvstore.runtime.measure import measure
        from kvstore.store.rates import Rates
        from kvstore.store.temp import Session as TemporaryFiles

        session.output.say("loading the model", level=1)
        bound = load_model(options["model"], options["adapter_path"])
        with (
            TemporaryFiles(store.entries.root / "tmp") as private,
            session.output.progress("prefill", total=options["tokens"], unit="tokens") as bar,
        ):
            found = measure(
                bound, folder=private.path, tokens=options["tokens"], rounds=options["rounds"],
                options=cache_shape(options), progress=bar.update,
            )  # fmt: skip
        Rates().note(
            restore={store.entries.store_id: found.restore}, prefill={bound.identity.digest: found.prefill}
        )
    speed = found.prefill.tokens_per_second
    times = found.prefill.seconds(found.tokens) / found.restore_seconds
    raw, stored = human_bytes(found.payload_bytes), human_bytes(found.stored_bytes)
    session.output.result(
        "bench",
        {
            "tokens": found.tokens, "payload_bytes": found.payload_bytes, "stored_bytes": found.stored_bytes,
            "put_seconds": round(found.put_seconds, 6), "restore_seconds": round(found.restore_seconds, 6),
            "prefill_seconds": round(found.prefill.seconds(found.tokens), 6),
            "prefill_tokens_per_second": round(speed, 3),
            "restore_bytes_per_second": round(found.restore.bytes_per_second),
            "restore_fixed_seconds": round(found.restore.fixed_seconds, 6),
        },
        [
            f"prefill  {found.prefill.seconds(found.tokens):8.3f} s, {speed:.1f} tokens/s",
            f"put      {found.put_seconds:8.3f} s, {raw} in {stored}",
            f"restore  {found.restore_seconds:8.3f} s, {times:.0f} times faster than prefilling",
        ],
    )  # fmt: skip
    session.output.say(f"measured with {human_count(found.tokens, 'token')}; match now says what a hit saves")

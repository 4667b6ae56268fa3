"""A compression experiment: drop two thirds of a document's positions, store the rest, and go on from it.

    python examples/thin.py --model FOLDER_OR_ID --document FILE --store DIR

The model's layers must all keep every token: windows and recurrent states have no positions to drop. What the method
left is an entry of its own, found only where the method is named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

import kvstore
from kvstore.format.manifest import MethodRecord
from kvstore.runtime import drop_positions

METHOD = "every-third"


def main() -> None:
    """Run the experiment on the arguments' model and document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "document", "store"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    model = kvstore.load_model(given.model)
    others = {type(cache).__name__ for cache in make_prompt_cache(model.model) if type(cache) is not KVCache}
    if others:
        sys.exit(f"error: {given.model} has layers with a {', '.join(sorted(others))}; all must have a KVCache")
    ids = model.tokenizer.encode(Path(given.document).read_text())
    with kvstore.Store.open(given.store) as store:
        # The experiment: which positions stay, by layer (or by layer and head), is all that a method decides.
        filled = kvstore.prefill(model, ids[:-1])
        keep = range(0, len(filled.token_ids), 3)
        thin = drop_positions(filled.cache, [keep] * len(filled.cache))
        method = MethodRecord.make(METHOD, '{"step":3}')
        entry = store.put(thin, token_ids=filled.token_ids, model=model, method=method).subject
        hit = store.match(ids, model=model, method=METHOD)
        restored = store.load(hit, into=model).cache
        print(f"entry {entry}: {len(keep)} of {hit.token_count} positions")
        lossless = store.match(ids, model=model)
        print(f"without the method's name: {lossless.token_count} tokens")
    token = mx.array([ids[-1:]])
    ours, theirs = (model.model(token, cache=cache)[0, -1] for cache in (restored, thin))
    print("restored as it was" if mx.array_equal(ours, theirs).item() else "NOT restored as it was")


if __name__ == "__main__":
    main()

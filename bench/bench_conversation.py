"""What a conversation costs that is saved at every turn: match, load, extend, put, ten times.

    python -m bench.bench_conversation [--json] [--real]

Each turn is also put whole into a store of its own, in the same run and from the same live cache: that is the
baseline, so both sides have the same codec, manifests and receipts. Two questions, one for each ratio:

* per turn: bytes of objects written, against the encoded bytes of the blocks that hold new tokens;
* all turns: bytes of objects, manifests and receipts, against those of the whole saves.

Layers with windows are counted by themselves. A whole save of theirs is small, because a window forgets; and when it
moves on, its first segment begins elsewhere and is another payload, though it holds no new token (``moved`` below).
A window of 512 tokens that moves on by more than 256 has no block in common with the one before, so then a turn
writes all of it, however long the conversation is.

The models are tiny and their weights random, so what is measured is which bytes are written, not how well real
caches compress; ``--real`` adds a shorter conversation with Gemma-3-270M.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.talk import Part, Talk, Turn, tiny_model

__all__ = ["CONVERSATIONS", "Conversation", "run"]

TURN_LIMIT: Final = 1.05
TOTAL_LIMIT: Final = 0.25
_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 1 << 16, "head_dim": 64,
}  # fmt: skip
MODELS: Final[dict[str, dict[str, Any]]] = {
    "tiny Qwen3": {**_COMMON, "model_type": "qwen3", "num_hidden_layers": 6, "num_key_value_heads": 2},
    "tiny Gemma-3": {
        **_COMMON, "model_type": "gemma3_text", "num_hidden_layers": 18, "num_key_value_heads": 1,
        "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 64,
    },
}  # fmt: skip
"""Gemma's 18 layers and windows of 512 tokens in 15 of them are those of Gemma-3-270M."""


@dataclass(frozen=True)
class Conversation:
    """Tokens of the first turn, and of each that follows."""

    first: int
    turn: int
    turns: int = 10

    @property
    def ends(self) -> list[int]:
        """Tokens after each turn."""
        return [self.first + self.turn * number for number in range(self.turns)]


CONVERSATIONS: Final = {
    "300 tokens a turn": Conversation(300, 300),
    "1,000 tokens, then 300 a turn": Conversation(1000, 300),
}


def run() -> dict[str, Any]:
    """Both models, both conversations."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            model = tiny_model(Path(folder) / name.replace(" ", "-"), config)
            for label, conversation in CONVERSATIONS.items():
                ids = np.random.default_rng(7).integers(0, config["vocab_size"], conversation.ends[-1] + 1)
                turns = Talk(model, ids.tolist(), conversation.ends).turns()
                found.append({"model": name, "weights": "random", "conversation": label, **_summary(list(turns))})
    return {"turn_limit": TURN_LIMIT, "total_limit": TOTAL_LIMIT, "runs": found}


def run_real(ends: Sequence[int] = (500, 540, 580, 620)) -> dict[str, Any]:
    """A short conversation with the real Gemma-3-270M; the first turn's state is kept between runs."""
    import kvstore
    from bench import gemma

    gemma.prepare()
    model = kvstore.load_model(gemma.MODEL)
    talk = Talk(model, gemma.token_ids(1000), ends, start=lambda: gemma.load_cache(ends[0]))
    label = f"{ends[0]} tokens, then {ends[1] - ends[0]} a turn, {len(ends)} turns"
    return {"model": "Gemma-3-270M", "weights": "real", "conversation": label, **_summary(list(talk.turns()))}


def _summary(turns: list[Turn]) -> dict[str, Any]:
    later = turns[1:]
    whole = sum(turn.whole for turn in turns)
    everything = sum(turn.written + turn.documents for turn in turns)
    return {
        "turns": [
            {"tokens": turn.tokens, "objects_written": turn.written, "ratio": turn.ratio,
             "new_blocks": turn.full.new_blocks + turn.windows.new_blocks, "windows_moved": turn.windows.moved,
             "token_ids": turn.token_ids, "documents": turn.documents, "whole_save": turn.whole}
            for turn in turns
        ],
        "worst_turn": max(turn.ratio for turn in turns),
        "worst_turn_without_moved": max(
            (turn.written - turn.windows.moved) / (turn.full.new_blocks + turn.windows.new_blocks) for turn in turns
        ),
        "total": everything, "whole_saves": whole, "total_ratio": everything / whole,
        "full": _parts([turn.full for turn in turns]), "windows": _parts([turn.windows for turn in turns]),
        "token_ids": sum(turn.token_ids for turn in turns), "documents": sum(turn.documents for turn in turns),
        "median_ms": {
            name: statistics.median(getattr(turn, name) for turn in later) * 1e3
            for name in ("match", "load", "put", "put_whole")
        },
    }  # fmt: skip


def _parts(parts: list[Part]) -> dict[str, Any]:
    written, whole = sum(part.written for part in parts), sum(part.whole for part in parts)
    return {
        "written": written, "moved": sum(part.moved for part in parts), "whole_saves": whole,
        "ratio": written / whole if whole else None,
    }  # fmt: skip


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['model']} ({result['weights']} weights), {result['conversation']}")
    for turn in result["turns"]:
        print(
            f"  {turn['tokens']:6,} tokens  written {turn['objects_written']:11,}  new blocks {turn['new_blocks']:11,}"
            f"  ratio {turn['ratio']:.3f}  moved {turn['windows_moved']:9,}  ids {turn['token_ids']:6,}"
            f"  documents {turn['documents']:6,}  whole save {turn['whole_save']:11,}"
        )
    print(
        f"  worst turn {result['worst_turn']:.3f} (without moved windows {result['worst_turn_without_moved']:.3f}), "
        f"target {TURN_LIMIT}\n  all turns {result['total']:,} of {result['whole_saves']:,}: "
        f"{result['total_ratio']:.3f}, target {TOTAL_LIMIT}; documents {result['documents']:,}"
    )
    for name, layers in (("full", "layers that see everything"), ("windows", "layers with windows")):
        part = result[name]
        if part["ratio"] is not None and result["windows"]["ratio"] is not None:
            print(
                f"  {layers}: {part['written']:,} of {part['whole_saves']:,}: {part['ratio']:.3f}"
                f"{', moved ' + format(part['moved'], ',') if part['moved'] else ''}"
            )
    print("  median ms: " + ", ".join(f"{name} {value:.1f}" for name, value in result["median_ms"].items()))


def main() -> None:
    """Print tables, or with ``--json`` one document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--real", action="store_true", help="also with Gemma-3-270M, which is made if it is not there")
    options = parser.parse_args()
    result = run()
    if options.real:
        result["runs"].append(run_real())
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for item in result["runs"]:
        _print(item)


if __name__ == "__main__":
    main()

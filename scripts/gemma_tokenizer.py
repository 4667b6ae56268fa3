"""Gemma's tokenizer, from the vocabulary in a GGUF file to ``tokenizer.json``.

Gemma was trained with a SentencePiece BPE vocabulary. SentencePiece keeps no list of
merges: it joins, again and again, the two neighbours whose joined piece has the best
score. The ``tokenizers`` package wants a list, best first; it follows from the scores.

Three kinds of pieces stand outside the merging, and where they are found matters:

* *control* pieces (``<bos>``, ``<start_of_turn>``) are looked for in the raw text first,
  as ``transformers`` has it;
* *user-defined* pieces (runs of spaces, newlines and tabs, some HTML tags) are cut out of
  the normalized text before any merge, the longest at each place from left to right;
* *byte* pieces spell what no other piece covers.

A test holds the result equal to the SentencePiece library itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PieceKind", "Vocabulary", "build_tokenizer", "merges", "write_tokenizer"]

SPACE: Final = "▁"
"""What SentencePiece writes for a space inside a piece (U+2581)."""


class PieceKind(IntEnum):
    """The kinds of pieces, with the numbers that GGUF shares with SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The pieces of a vocabulary in the order of their ids, and the ids with a role."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[PieceKind, ...]
    bos: int
    eos: int
    pad: int
    unk: int

    @classmethod
    def from_gguf(cls, fields: dict[str, Any]) -> Vocabulary:
        """Take the vocabulary from a GGUF file's metadata.

        GGUF spells user-defined pieces with plain spaces and the others with U+2581; here all
        have the latter.

        Raises:
            KeyError: A field is absent.
            ValueError: The lists differ in length, or a kind has an unknown number.
        """
        pieces, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
        kinds = fields["tokenizer.ggml.token_type"]
        rows = list(zip(pieces, scores, map(PieceKind, kinds), strict=True))
        ids = {role: int(fields[f"tokenizer.ggml.{role}_token_id"]) for role in ("bos", "eos", "padding", "unknown")}
        return cls(
            tuple(piece.replace(" ", SPACE) for piece, _, _ in rows),
            tuple(float(score) for _, score, _ in rows),
            tuple(kind for _, _, kind in rows),
            bos=ids["bos"], eos=ids["eos"], pad=ids["padding"], unk=ids["unknown"],
        )  # fmt: skip

    def of_kind(self, kind: PieceKind) -> Iterator[str]:
        """The pieces of one kind, in the order of their ids."""
        return (piece for piece, own in zip(self.pieces, self.kinds, strict=True) if own is kind)


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of normal pieces whose join is a normal piece, the best join first.

    One piece can be the join of several pairs. Their order is free as long as they stand
    together: SentencePiece ranks them alike.
    """
    normal = set(vocabulary.of_kind(PieceKind.NORMAL))
    scored = dict(zip(vocabulary.pieces, vocabulary.scores, strict=True))
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=lambda one: (-scored[one], one))
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer of the ``tokenizers`` package that cuts text as SentencePiece would, after a ``<bos>``."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE

    ids = {piece: number for number, piece in enumerate(vocabulary.pieces)}
    unk, bos = vocabulary.pieces[vocabulary.unk], vocabulary.pieces[vocabulary.bos]
    tokenizer = Tokenizer(BPE(ids, merges(vocabulary), unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # mlx-lm picks its fast streaming detokenizer by exactly this sequence.
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary.bos)]
    )
    control = vocabulary.of_kind(PieceKind.CONTROL)
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    # normalized=True: looked for after spaces have become U+2581, among the text between control pieces.
    own = vocabulary.of_kind(PieceKind.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=True) for piece in own])
    return tokenizer


def write_tokenizer(vocabulary: Vocabulary, folder: Path, *, chat_template: str | None = None) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; a base model has no chat template."""
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        # Not GemmaTokenizer: that class rebuilds the tokenizer from vocabulary and merges alone.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.pieces[vocabulary.bos],
        "eos_token": vocabulary.pieces[vocabulary.eos],
        "pad_token": vocabulary.pieces[vocabulary.pad],
        "unk_token": vocabulary.pieces[vocabulary.unk],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

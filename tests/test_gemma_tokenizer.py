"""Gemma's tokenizer cuts text as the SentencePiece library does; here with a small vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.gemma_tokenizer import PieceKind, Vocabulary, build_tokenizer, merges, write_tokenizer
from tests.sentencepieces import sentencepiece_encoder, vocabulary_of_tokenizer

CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<turn>")
USER = ("\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t", "\t\t", "<h1>", "</h1>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# Best first. "he" before "th" makes greedy merging and longest match differ; "aaaa" has three ways to be joined.
NORMAL = (
    "▁t", "he", "th", "the", "▁the", "aa", "aaa", "aaaa", "re", "here", "▁th", "h1", "▁a", "é", "er", "ér",
    *"▁thera1<>/é漢",
)  # fmt: skip


def small_fields() -> dict[str, Any]:
    """A vocabulary as the metadata of a GGUF file has it."""
    normal = list(dict.fromkeys(NORMAL))
    groups = [(CONTROL, PieceKind.CONTROL), (USER, PieceKind.USER_DEFINED), (BYTES, PieceKind.BYTE)]
    rows = [(piece, 0.0, kind) for pieces, kind in groups for piece in pieces]
    rows += [(piece, -float(rank), PieceKind.NORMAL) for rank, piece in enumerate(normal)]
    return {
        "tokenizer.ggml.tokens": [p.replace("▁", " ") if k is PieceKind.USER_DEFINED else p for p, _, k in rows],
        "tokenizer.ggml.scores": [score for _, score, _ in rows],
        "tokenizer.ggml.token_type": [int(kind) for _, _, kind in rows],
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.unknown_token_id": 3,
    }  # fmt: skip


SMALL = Vocabulary.from_gguf(small_fields())
TOKENIZER = build_tokenizer(SMALL)
ORACLE = sentencepiece_encoder(SMALL)
SCRAPS = ("the", " ", "  ", "a", "aaa", "h", "here", "\n", "\t", "<h1>", "<", "é", "漢", "😀", "\x00", "z", "▁")
TEXTS = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=24).map("".join)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def pieces(text: str) -> list[str]:
    return [SMALL.pieces[number] for number in ids(text)]


@given(TEXTS)
def test_cuts_as_sentencepiece_does(text: str) -> None:
    assert ids(text) == ORACLE(text)


@given(TEXTS)
def test_decodes_to_the_text(text: str) -> None:
    assert TOKENIZER.decode(ids(text), skip_special_tokens=False) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the", ["the"]),
        ("here", ["here"]),
        ("a  the", ["a", "▁▁", "the"]),
        ("a the", ["a", "▁the"]),
        ("     a", ["▁▁▁▁", "▁a"]),
        ("\n\n\n", ["\n\n", "\n"]),
        ("a<h1>a", ["a", "<h1>", "a"]),
        ("<h1", ["<", "h1"]),
        ("漢字", ["漢", "<0xE5>", "<0xAD>", "<0x97>"]),
    ],
)
def test_cuts_by_hand(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


def test_control_pieces_are_found_in_text_and_bos_is_added() -> None:
    assert TOKENIZER.encode("<turn>the").ids == [2, 4, SMALL.pieces.index("the")]


def test_merges_come_best_first_and_only_from_normal_pieces() -> None:
    found = merges(SMALL)
    assert found[:3] == [("▁", "t"), ("h", "e"), ("t", "h")]
    assert [pair for pair in found if "".join(pair) == "aaaa"] == [("a", "aaa"), ("aa", "aa"), ("aaa", "a")]
    assert not {"".join(pair) for pair in found} & set(USER)


def test_lists_of_unequal_length_are_refused() -> None:
    fields = small_fields()
    fields["tokenizer.ggml.scores"].pop()
    with pytest.raises(ValueError, match="shorter"):
        Vocabulary.from_gguf(fields)


def test_the_files_are_what_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(SMALL, tmp_path, chat_template="{{ messages[0]['content'] }}!")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "  the  here\n\n\t<h1>é😀 aaaaa"
    assert loaded.encode(text) == [2, *ORACLE(text)]
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id, loaded.unk_token_id) == (2, 1, 0, 3)
    assert loaded.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the!"
    assert vocabulary_of_tokenizer(json.loads((tmp_path / "tokenizer.json").read_text())).kinds == SMALL.kinds

"""The SentencePiece library, given a vocabulary: the oracle for ``scripts.gemma_tokenizer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.gemma_tokenizer import PieceKind, Vocabulary


def sentencepiece_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """SentencePiece's own BPE over the same pieces and scores; adds no ``<bos>``."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # its classes are made at import
    proto = messages.ModelProto()
    rows = zip(vocabulary.pieces, vocabulary.scores, vocabulary.kinds, strict=True)
    for number, (piece, score, kind) in enumerate(rows):
        # The library wants exactly one unknown piece; GGUF calls it a control piece.
        kind = PieceKind.UNKNOWN if number == vocabulary.unk else kind
        proto.pieces.add(piece=piece, score=score, type=int(kind))
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True  # 2 is BPE
    trainer.unk_id, trainer.bos_id, trainer.eos_id = vocabulary.unk, vocabulary.bos, vocabulary.eos
    trainer.pad_id = vocabulary.pad
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())

    def encode(text: str) -> list[int]:
        return [int(number) for number in processor.EncodeAsIds(text)]

    return encode


def vocabulary_of_tokenizer(spec: dict[str, Any]) -> Vocabulary:
    """Read the kinds of pieces back from a ``tokenizer.json``; in Gemma's vocabulary a better score is a smaller id."""
    pieces = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    added = {token["content"]: token["special"] for token in spec["added_tokens"]}

    def kind(piece: str) -> PieceKind:
        if piece in added:
            return PieceKind.CONTROL if added[piece] else PieceKind.USER_DEFINED
        is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        return PieceKind.BYTE if is_byte else PieceKind.NORMAL

    role = {name: pieces.index(f"<{name}>") for name in ("bos", "eos", "pad", "unk")}
    scores = tuple(-float(number) for number in range(len(pieces)))
    return Vocabulary(tuple(pieces), scores, tuple(map(kind, pieces)), **role)

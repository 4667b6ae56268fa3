"""The tiny models load, read text, and decode greedily."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import TINY, make_tiny_model

TEXT = "Ünï  codé\n\t😀 <|user|>"


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("family", TINY)
def test_each_loads_and_decodes(tmp_path: Path, family: str) -> None:
    import mlx.core as mx
    import mlx_lm

    dtype = "float32" if family == "qwen3_next" else "bfloat16"
    model, tokenizer, *_ = mlx_lm.load(str(make_tiny_model(tmp_path / family, TINY[family], dtype=dtype)))
    ids = tokenizer.encode(TEXT)
    found = [token.token for token in mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=8)]
    assert 1 <= len(found) <= 8
    caches = model.make_cache() if hasattr(model, "make_cache") else None
    first = model(mx.array([ids]), cache=caches)[0, -1]
    assert mx.argmax(first).item() == found[0]
    assert first.dtype == getattr(mx, dtype)


def test_the_tokenizer_reads_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path / "m", TINY["llama"])
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer.encode(TEXT)
    assert (ids[0], ids[-1]) == (2, 3)
    assert tokenizer.decode(ids[1:]) == TEXT
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos><|user|>a<|assistant|>b<eos><|user|>c<|assistant|>"


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        (make_tiny_model(tmp_path / name, TINY["llama"], seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again != other

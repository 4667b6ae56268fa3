"""Chat templates of words that the tests' tokenizer knows, one of which rewrites what was said before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runtime.model_folders import edit_json

PLAIN = (
    "{% for message in messages %}w1 {{ message.role }} {{ message.content }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w1 assistant{% endif %}"
)
FORGETFUL = (
    "{% set seen = namespace(user=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set seen.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}w1 {{ message.role }} "
    "{% if message.role == 'assistant' and loop.index0 < seen.user %}{{ message.content.split('w61')[-1] }}"
    "{% else %}{{ message.content }}{% endif %} w2 {% endfor %}"
    "{% if add_generation_prompt %}w1 assistant{% endif %}"
)
"""Drops what an assistant thought (all before ``w61``) once a user has spoken again, as Qwen3's does."""
STRICT = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the last message must be a user message') }}{% endif %}"
    + PLAIN
)


def with_template(folder: Path, template: str | None) -> Path:
    """Give the model in ``folder`` a chat template, and its tokenizer the roles as words."""
    edit_json(folder / "tokenizer_config.json", chat_template=... if template is None else template)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words.update({role: 64 + n for n, role in enumerate(("user", "assistant", "system")) if role not in words})
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder


def messages(*contents: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]

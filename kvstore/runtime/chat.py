"""Chat messages as token ids, the same on both sides: when a cache is put, and when it is looked for.

A store matches token ids. Whoever puts a conversation and whoever asks for it must make
them alike, and a chat template makes that hard: many rewrite what was said before (they
drop reasoning blocks of earlier turns, or move a system message). :func:`divergence`
says at which token, and in which message, a conversation that is asked for parts from
the one that is stored, and what stands there on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.errors import KVStoreError, fail
from kvstore.format.json import Json
from kvstore.format.prefix import TokenIds, as_token_ids

__all__ = ["Divergence", "chat_ids", "divergence", "parse_messages", "parting"]

Message = Mapping[str, Any]
"""``{"role": …, "content": …}`` and whatever else the template knows."""
_SHOWN_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two sequences of token ids part.

    Attributes:
        token: Position of the first id that differs.
        message_index: The message in which it lies, from 0; None where it follows the last one (a generation
            prompt), or where there are no messages.
        stored_text: What is stored from there on, as text; the first tokens of it.
        asked_text: The same of what was asked for.
    """

    token: int
    message_index: int | None
    stored_text: str
    asked_text: str

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {
            "asked_text": self.asked_text, "message_index": self.message_index, "stored_text": self.stored_text,
            "token": self.token,
        }  # fmt: skip

    @property
    def message(self) -> str:
        """In words."""
        where = "" if self.message_index is None else f", in message {self.message_index}"
        return f"parts at token {self.token}{where}: asked for {self.asked_text!r}, stored is {self.stored_text!r}"


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages from a JSON value: a list of objects with a role, or an object that holds one as ``messages``.

    Raises:
        UsageError: USAGE, naming the first message that is none.
    """
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise fail("USAGE", "messages", expected="a JSON array of objects, or one as `messages`", found=_kind(value))
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise fail("USAGE", f"messages[{index}]", expected="an object with a role", found=repr(message)[:80])
    return list(messages)


def _kind(value: Any) -> str:
    return "an empty array" if value == [] else f"a {type(value).__name__} without them"


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    generation_prompt: bool = False,
    template_options: Mapping[str, Any] | None = None,
) -> TokenIds:
    """The token ids of a conversation, as the tokenizer's chat template writes it.

    Args:
        tokenizer: As mlx-lm loads it.
        messages: In order.
        generation_prompt: Let the assistant's next turn begin. Leave it out where a cache is put for others to go
            on from: what follows the messages may then be anything.
        template_options: What the template may be told, such as ``enable_thinking`` or ``tools``.

    Raises:
        UsageError: USAGE where there is no chat template, or it refuses the messages.
    """
    if not getattr(tokenizer, "has_chat_template", getattr(tokenizer, "chat_template", None)):
        raise fail("USAGE", "the tokenizer has no chat template", fix="Write the prompt yourself.")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=generation_prompt,
            **(template_options or {}),
        )  # fmt: skip
    except Exception as error:  # a template is a program, and says what it does not like by raising anything
        raise fail("USAGE", f"the chat template refuses the messages ({error})") from error
    return as_token_ids([int(token) for token in ids])


def parting(stored: TokenIds, asked: TokenIds) -> int | None:
    """The first position at which both have an id and these differ; None where one begins with the other."""
    count = min(stored.size, asked.size)
    differs = np.flatnonzero(stored[:count] != asked[:count])
    return int(differs[0]) if differs.size else None


def divergence(
    tokenizer: Any,
    stored: Sequence[int] | TokenIds,
    asked: Sequence[int] | TokenIds,
    *,
    messages: Sequence[Message] = (),
    template_options: Mapping[str, Any] | None = None,
    shown: int = _SHOWN_TOKENS,
) -> Divergence | None:
    """Where what is asked for parts from what is stored; None where one is the beginning of the other.

    Args:
        tokenizer: As mlx-lm loads it.
        stored: Ids that a cache is the state of, generated ones included.
        asked: Ids of the messages, by :func:`chat_ids`.
        messages: To name the one that the template has rewritten.
        template_options: As for :func:`chat_ids`.
        shown: Tokens of either side to show as text.
    """
    have, want = as_token_ids(stored), as_token_ids(asked)
    at = parting(have, want)
    if at is None:
        return None
    index = _message_at(tokenizer, messages, want, at, template_options) if messages else None
    return Divergence(at, index, _text(tokenizer, have[at : at + shown]), _text(tokenizer, want[at : at + shown]))


def _message_at(
    tokenizer: Any, messages: Sequence[Message], ids: TokenIds, at: int, template_options: Mapping[str, Any] | None
) -> int | None:
    """The message that holds position ``at``: the one after the longest run of messages that ends before it.

    Only runs whose ids begin the whole count: of others the template has rewritten the end.
    """
    for count in range(len(messages), 0, -1):
        try:
            begun = chat_ids(tokenizer, messages[:count], template_options=template_options)
        except KVStoreError:
            # Some templates refuse a conversation that ends there.
            continue
        if begun.size <= at and parting(begun, ids) is None:
            return count if count < len(messages) else None
    return 0


def _text(tokenizer: Any, ids: TokenIds) -> str:
    return str(tokenizer.decode([int(token) for token in ids]))

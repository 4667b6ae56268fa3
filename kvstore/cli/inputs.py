"""What verbs read from the user: prompts, token-id files, and the options that name a model."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click

from kvstore.cli.session import PATH, stacked
from kvstore.errors import KVStoreError, fail
from kvstore.limits import MAX_TOKENS

if TYPE_CHECKING:
    from kvstore.runtime.probe import CacheOptions

__all__ = [
    "Input", "cache_options", "cache_shape", "encode_prompt", "model_options", "prompt_options", "read_input",
    "read_messages", "read_prompt", "read_token_ids", "require_one_prompt",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
_MAX_TOKEN_FILE: Final = 16 * MAX_TOKENS
_STDIN: Final = "-"
_SHOWN: Final = 60
_NO_FILE: Final = (errno.ENOENT, errno.ENAMETOOLONG)
# As in format.layers, which costs an import of numpy; a test holds them equal.
_BITS: Final = click.Choice((2, 3, 4, 5, 6, 8))
_GROUPS: Final = click.Choice((16, 32, 64, 128))


def model_options(*, required: bool) -> Callable[[F], F]:
    """``--model`` and ``--adapter-path``, named as in mlx_lm."""
    return stacked(
        click.option(
            "--model", required=required, metavar="FOLDER|ID",
            help="The model: a folder, or the id of one in the hub cache.",
        ),
        click.option(
            "--adapter-path", metavar="DIR", type=PATH, help="Folder of the model's adapter."
        ),
    )  # fmt: skip


prompt_options = stacked(
    click.option("--prompt", metavar="FILE|-", help="File with the prompt's text; - reads standard input."),
    click.option("--tokens", metavar="FILE|-", help="File or pipe with token ids: a JSON array, or integers."),
    click.option("--messages", metavar="FILE|-", help="File with chat messages: a JSON array of objects."),
    click.option("--chat", is_flag=True, help="Read the prompt as a user message in the model's chat template."),
    click.option("--generation-prompt", is_flag=True, help="After the messages, let the assistant's turn begin."),
)
"""``--prompt``, ``--tokens`` and ``--messages``: the token ids as text, as numbers, or as a conversation."""

cache_options = stacked(
    click.option("--max-kv-size", type=click.IntRange(min=1), metavar="N", help="Window of a rotating KV cache."),
    click.option("--kv-bits", type=_BITS, metavar="N", help="Bits of a quantized KV cache."),
    click.option("--kv-group-size", type=_GROUPS, default=64, show_default=True, metavar="N",
                 help="Elements that share a scale in a quantized KV cache."),
)  # fmt: skip
"""How the cache is shaped, named as in mlx_lm; :func:`cache_shape` reads them."""


def cache_shape(options: Mapping[str, Any]) -> CacheOptions:
    """What :data:`cache_options` ask for."""
    from kvstore.runtime.probe import CacheOptions

    return CacheOptions(**{name: options[name] for name in ("max_kv_size", "kv_bits", "kv_group_size")})


def read_prompt(source: str) -> str:
    """The text of a prompt file, or of standard input.

    Raises:
        UsageError: USAGE where it cannot be read or is not UTF-8.
        InvalidError: CACHE_EMPTY where it is empty: a tokenizer may make a token of nothing, and nobody wants that one.
    """
    try:
        text = _read(source, "prompt").decode("utf-8")
    except UnicodeDecodeError as error:
        raise fail("USAGE", f"the prompt {source} is not UTF-8 at byte {error.start}") from None
    if not text:
        raise fail("CACHE_EMPTY", f"the prompt {source} is empty", fix="Give a prompt of at least one token.")
    return text


def read_token_ids(source: str) -> list[int]:
    """Token ids from a file: a JSON array of integers, or integers separated by spaces, line ends or commas.

    Raises:
        UsageError: USAGE where the file cannot be read.
        InvalidError: TOKEN_ID_RANGE where it holds anything but integers; their range is checked where they are used.
    """
    data = _read(source, "token ids")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise _not_ids(source, "bytes outside ASCII") from None
    if text.lstrip().startswith("["):
        return _from_json(source, text)
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isdigit() or len(word) > 20:
            raise _not_ids(source, word)
    return [int(word) for word in words]


def read_messages(source: str) -> list[dict[str, Any]]:
    """Chat messages from a file: a JSON array of objects with a role, or an object that holds it as ``messages``.

    Raises:
        UsageError: USAGE where it is anything else.
    """
    from kvstore.runtime.chat import parse_messages

    try:
        value = json.loads(_read(source, "messages"))
    except (ValueError, RecursionError) as error:
        raise fail("USAGE", f"the messages {source} are not JSON: {error}") from None
    return parse_messages(value)


def require_one_prompt(verb: str, options: Mapping[str, Any]) -> None:
    """Refuse a call without exactly one of ``--prompt``, ``--tokens`` and ``--messages``. Raises USAGE."""
    given = [f"--{name}" for name in ("prompt", "tokens", "messages") if options[name]]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise fail("USAGE", f"{verb}: expected one of --prompt, --tokens and --messages, found {found}")
    if options["generation_prompt"] and not options["messages"]:
        raise fail("USAGE", "--generation-prompt goes with --messages")


class Input(NamedTuple):
    """A prompt as the user gave it.

    Attributes:
        encode: From what loads the model's tokenizer to the token ids; nothing is loaded where ids were given.
        messages: The chat messages; empty where it is none.
    """

    encode: Callable[[Callable[[], Any]], list[int]]
    messages: list[dict[str, Any]]


def read_input(options: Mapping[str, Any]) -> Input:
    """Read what the options of :func:`prompt_options` name, before anything that takes time is begun.

    Raises:
        UsageError, InvalidError: as the readers above.
    """
    if options["tokens"]:
        ids = read_token_ids(options["tokens"])
        return Input(lambda tokenizer: ids, [])
    if options["messages"]:
        messages = read_messages(options["messages"])
        begin = bool(options["generation_prompt"])
        return Input(lambda tokenizer: _encode_chat(tokenizer(), messages, generation_prompt=begin), messages)
    text = read_prompt(options["prompt"])
    return Input(lambda tokenizer: encode_prompt(tokenizer(), text, chat=options["chat"]), [])


def _encode_chat(tokenizer: Any, messages: list[dict[str, Any]], *, generation_prompt: bool) -> list[int]:
    from kvstore.runtime.chat import chat_ids

    return [int(token) for token in chat_ids(tokenizer, messages, generation_prompt=generation_prompt)]


def encode_prompt(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt: as it stands, or as a user message that the model has still to answer.

    Raises:
        UsageError: USAGE where the tokenizer has no chat template.
    """
    if not chat:
        return [int(token) for token in tokenizer.encode(text)]
    if not getattr(tokenizer, "has_chat_template", False):
        raise fail("USAGE", "--chat: the tokenizer has no chat template", fix="Leave --chat out.")
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    return [int(token) for token in ids]


def _from_json(source: str, text: str) -> list[int]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_ids(source, str(error)) from None
    for item in value:
        if type(item) is not int:
            raise _not_ids(source, item)
    return list(value)


def _read(source: str, what: str) -> bytes:
    """What a file holds, or a pipe gives: ``--tokens <(program)`` names one. No more is read than may be there."""
    try:
        if source == _STDIN:
            data = sys.stdin.buffer.read(_MAX_TOKEN_FILE + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(_MAX_TOKEN_FILE + 1)
    except OSError as error:
        raise _unreadable(source, what, error.strerror, no_file=error.errno in _NO_FILE) from error
    except ValueError as error:
        raise _unreadable(source, what, "that is no path", no_file=True) from error
    if len(data) > _MAX_TOKEN_FILE:
        raise fail("USAGE", f"the {what} {source}", expected=f"at most {_MAX_TOKEN_FILE} bytes", found="more")
    return data


def _unreadable(source: str, what: str, why: str | None, *, no_file: bool) -> KVStoreError:
    """What is no file may be the prompt itself, as mlx-lm takes it: a page of it would hide what is wrong."""
    shown = source if len(source) <= _SHOWN or not no_file else source[:_SHOWN] + "…"
    text = no_file and what == "prompt"
    fix = "--prompt takes a file; for text: printf %s TEXT | kvstore ... --prompt -" if text else ""
    return fail("USAGE", f"the {what} {shown} cannot be read: {why}", fix=fix)


def _not_ids(source: str, found: Any) -> KVStoreError:
    name = "standard input" if source == _STDIN else source
    return fail(
        "TOKEN_ID_RANGE", f"token ids in {name}",
        expected="a JSON array of integers, or integers with spaces or commas", found=str(found)[:60],
    )  # fmt: skip

"""Token-id files and prompts, good and bad."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import pytest

from kvstore.cli import inputs
from kvstore.cli.get import get
from kvstore.cli.inputs import encode_prompt, read_messages, read_prompt, read_token_ids
from kvstore.errors import InvalidError, UsageError
from kvstore.format.kinds import QUANTIZATION_BITS, QUANTIZATION_GROUPS
from kvstore.runtime.prompt_shapes import SHAPES


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[1, 2, 3]", [1, 2, 3]), ("[]", []), (" \n[7]\n", [7]), ("1 2 3", [1, 2, 3]), ("1,2,\n3\t4", [1, 2, 3, 4]),
        ("", []), ("4294967295", [4294967295]), ("[4294967296]", [4294967296]), ("007", [7]),
    ],
)  # fmt: skip
def test_token_files_may_be_json_or_plain(tmp_path: Path, text: str, ids: list[int]) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert read_token_ids(str(file)) == ids


@pytest.mark.parametrize(
    "text",
    ["one", "1 2 x", "-1", "1.5", "[1.0]", "[true]", "[null]", '["1"]', "[[1]]", "[1", '{"ids": [1]}', "1;2", "²",
     "9" * 21, "[NaN]", "[" * 100_000],
)  # fmt: skip
def test_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    with pytest.raises(InvalidError) as error:
        read_token_ids(str(file))
    assert error.value.code == "TOKEN_ID_RANGE"


def test_a_file_that_is_not_there_is_a_wrong_call(tmp_path: Path) -> None:
    for read in (read_token_ids, read_prompt):
        with pytest.raises(UsageError):
            read(str(tmp_path / "none"))


@pytest.mark.parametrize("read", [read_token_ids, read_prompt, read_messages])
def test_a_pipe_is_read_to_its_end_and_not_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object]
) -> None:
    """What a shell makes of ``<(program)``; a program without end is not waited for."""
    pipe, text = tmp_path / "pipe", '[{"role": "user"}]' if read is read_messages else "1 2 3"
    os.mkfifo(pipe)

    def write(data: bytes) -> None:
        with suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
            for at in range(len(data)):
                file.write(data[at : at + 1])

    for data in (text.encode(), b"1 " * 40):
        writer = threading.Thread(target=write, args=(data,))
        writer.start()
        if data == text.encode():
            assert read(str(pipe)) in ([1, 2, 3], "1 2 3", [{"role": "user"}])
        else:
            monkeypatch.setattr(inputs, "_MAX_TOKEN_FILE", 64)
            with pytest.raises(UsageError, match="at most 64 bytes"):
                read(str(pipe))
        writer.join()
    with pytest.raises(UsageError, match="at most 64 bytes"):
        read("/dev/zero")


@pytest.mark.parametrize("read", [read_token_ids, read_prompt, read_messages])
@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, ".", "none/" * 1000])
def test_what_is_no_file_is_a_wrong_call(tmp_path: Path, read: Callable[[str], object], name: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read(f"{tmp_path}/{name}")


@pytest.mark.parametrize("text", ["Why?", "Why is the sky blue? " * 4, "Why is the sky blue? " * 400])
def test_a_text_in_the_place_of_a_file_is_told_where_it_belongs(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_prompt(text)
    assert str(caught.value).endswith("--prompt takes a file; for text: printf %s TEXT | kvstore ... --prompt -")
    assert text[:60] in str(caught.value)
    assert len(str(caught.value)) < 210
    with pytest.raises(UsageError) as caught:
        read_token_ids("none")
    assert "--prompt" not in str(caught.value)


def test_a_prompt_must_be_utf8(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="byte 3"):
        read_prompt(str(file))


def test_an_empty_prompt_is_refused_whatever_the_tokenizer_would_make_of_it(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("")
    with pytest.raises(InvalidError, match="is empty") as error:
        read_prompt(str(file))
    assert error.value.code == "CACHE_EMPTY"


def test_what_is_no_id_is_shown_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text("hello world")
    with pytest.raises(InvalidError, match=r"expected a JSON array of integers, or .*, found 'hello'"):
        read_token_ids(str(file))


def test_chat_needs_a_template() -> None:
    with pytest.raises(UsageError, match="chat template"):
        encode_prompt(object(), "hello", chat=True)


def test_choices_are_those_of_the_format() -> None:
    assert tuple(inputs._BITS.choices) == QUANTIZATION_BITS
    assert tuple(inputs._GROUPS.choices) == QUANTIZATION_GROUPS
    (shape,) = (option for option in get.params if option.name == "shape")
    assert isinstance(shape.type, click.Choice)
    assert tuple(shape.type.choices) == SHAPES

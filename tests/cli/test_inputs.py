"""Token-id files and prompts, good and bad."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kvstore.cli import inputs
from kvstore.cli.get import get
from kvstore.cli.inputs import encode_prompt, read_prompt, read_token_ids
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

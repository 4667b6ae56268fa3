"""Messages to ids, alike on both sides, and where a template rewrites history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.format.prefix import as_token_ids
from kvstore.runtime.chat import chat_ids, divergence, parse_messages, parting
from kvstore.runtime.lazy import load_tokenizer
from tests.runtime.chats import FORGETFUL, PLAIN, STRICT, messages, with_template
from tests.runtime.driving import code_of
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS, run

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

TALK = messages("w10 w11", "w60 w20 w61 w21 w22", "w12", "w60 w30 w61 w31", "w13")


@pytest.fixture(scope="module")
def folders(models: Path) -> dict[str, Path]:
    templates = {"plain": PLAIN, "forgetful": FORGETFUL, "strict": STRICT, "none": None}
    return {
        name: with_template(real_folder(models / name, CONFIGS["llama"]), template)
        for name, template in templates.items()
    }


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def test_with_and_without_a_generation_prompt(tokenizers: dict[str, Any]) -> None:
    bare = chat_ids(tokenizers["plain"], TALK[:1])
    assert bare.tolist() == [1, 64, 10, 11, 2]
    begun = chat_ids(tokenizers["plain"], TALK[:1], generation_prompt=True)
    assert begun.tolist() == [1, 64, 10, 11, 2, 1, 65]
    assert parting(bare, begun) is None


def test_template_options_reach_the_template(folders: dict[str, Path], models: Path) -> None:
    folder = with_template(real_folder(models / "options", CONFIGS["llama"]), "{{ word }}")
    assert chat_ids(load_tokenizer(folder), TALK, template_options={"word": "w9"}).tolist() == [9]


def test_what_a_plain_template_writes_only_grows(tokenizers: dict[str, Any]) -> None:
    for count in range(1, len(TALK)):
        shorter, longer = (chat_ids(tokenizers["plain"], TALK[:n]) for n in (count, count + 1))
        assert divergence(tokenizers["plain"], shorter, longer, messages=TALK) is None


@pytest.mark.parametrize(("count", "message"), [(3, 1), (5, 3)])
def test_a_template_that_forgets_thoughts_is_found_out(
    tokenizers: dict[str, Any], count: int, message: int
) -> None:
    tokenizer = tokenizers["forgetful"]
    stored = chat_ids(tokenizer, TALK[: count - 1])
    asked = chat_ids(tokenizer, TALK[:count], generation_prompt=True)
    found = divergence(tokenizer, stored, asked, messages=TALK[:count])
    assert found is not None
    assert found.message_index == message
    assert stored[found.token] == 60
    assert asked[found.token] == (21, 31)[message // 2]
    assert found.stored_text.startswith("w60 w20 w61" if message == 1 else "w60 w30 w61")
    assert found.asked_text.startswith("w21 w22 w2" if message == 1 else "w31 w2")
    assert f"token {found.token}, in message {message}" in found.message
    assert set(found.to_json()) == {"token", "message_index", "stored_text", "asked_text"}


def test_the_message_of_an_edit(tokenizers: dict[str, Any]) -> None:
    edited = [*TALK[:2], {"role": "user", "content": "w40 w12"}, *TALK[3:]]
    stored, asked = chat_ids(tokenizers["plain"], TALK), chat_ids(tokenizers["plain"], edited)
    found = divergence(tokenizers["plain"], stored, asked, messages=edited, shown=2)
    assert found is not None
    assert (found.message_index, found.stored_text, found.asked_text) == (2, "w12 w2", "w40 w12")
    first = divergence(tokenizers["plain"], stored, chat_ids(tokenizers["plain"], TALK[1:]), messages=TALK[1:])
    assert first is not None
    assert (first.token, first.message_index) == (1, 0)


def test_a_generation_prompt_lies_in_no_message(tokenizers: dict[str, Any]) -> None:
    asked = chat_ids(tokenizers["plain"], TALK[:1], generation_prompt=True)
    found = divergence(tokenizers["plain"], chat_ids(tokenizers["plain"], TALK), [*asked[:-1], 9], messages=TALK[:1])
    assert found is not None
    assert (found.token, found.message_index) == (asked.size - 1, None)


def test_a_template_that_refuses_part_of_a_conversation(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["strict"]
    assert code_of(chat_ids, tokenizer, TALK[:2]) == "USAGE"
    edited = [*TALK[:2], {"role": "user", "content": "w40"}]
    found = divergence(tokenizer, chat_ids(tokenizer, TALK), chat_ids(tokenizer, edited), messages=edited)
    assert found is not None
    # Not the message itself: the template does not say where the one before it ends.
    assert found.message_index == 1


def test_ids_without_messages(tokenizers: dict[str, Any]) -> None:
    found = divergence(tokenizers["none"], [1, 2, 3], [1, 2, 4, 5])
    assert found is not None
    assert (found.token, found.message_index, found.stored_text, found.asked_text) == (2, None, "w3", "w4 w5")
    assert "message" not in found.message
    assert divergence(tokenizers["none"], [1, 2], [1, 2, 4]) is None
    assert parting(as_token_ids([]), as_token_ids([1])) is None


def test_no_template(tokenizers: dict[str, Any]) -> None:
    assert code_of(chat_ids, tokenizers["none"], TALK) == "USAGE"


@pytest.mark.parametrize("value", [None, [], {}, "text", [1], [{"content": "no role"}], {"messages": [{"role": 1}]}])
def test_what_is_no_list_of_messages(value: Any) -> None:
    assert code_of(parse_messages, value) == "USAGE"


def test_messages_may_stand_in_an_object() -> None:
    assert parse_messages({"model": "m", "messages": TALK}) == TALK == parse_messages(TALK)


def test_a_conversation_is_found_by_its_messages(store: kvstore.Store, folders: dict[str, Path]) -> None:
    """Put without the generation prompt, asked for with the next turn and one."""
    model = kvstore.load_model(folders["plain"])
    stored = chat_ids(model.tokenizer, TALK[:3])
    from kvstore.runtime.probe import make_cache

    store.put(run(model, make_cache(model.model), stored.tolist()), token_ids=stored, model=model)
    hit = store.match(chat_ids(model.tokenizer, TALK, generation_prompt=True), model=model)
    assert hit.token_count == stored.size


def test_a_tokenizer_that_is_no_wrapper(models: Path) -> None:
    """What transformers loads by itself says whether there is a template in another way."""
    from transformers import AutoTokenizer

    folder = with_template(real_folder(models / "bare", CONFIGS["llama"]), PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = chat_ids(tokenizer, TALK[:1], template_options={"return_dict": False})
    assert ids.tolist() == [1, 64, 10, 11, 2]

"""Why a prompt hits or misses, as people and as programs are told; conversations on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.runtime.chats import FORGETFUL, messages, with_template
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS

IDS = [n % 61 for n in range(300)]
TALK = messages("w10 w11", "w60 w20 w61 w21 w22", "w12", "w60 w30 w61 w31", "w13")


@pytest.fixture(scope="module")
def talker(models: Path) -> Path:
    """A tiny model whose chat template forgets thoughts."""
    return with_template(real_folder(models / "talker", CONFIGS["llama"]), FORGETFUL)


@pytest.fixture(scope="module")
def hybrid(models: Path) -> Path:
    """A tiny model with recurrent state."""
    return real_folder(models / "hybrid", CONFIGS["mamba2"])


def file(folder: Path, value: Any) -> Path:
    path = folder / f"in-{abs(hash(json.dumps(value)))}.json"
    path.write_text(json.dumps(value))
    return path


def test_a_hit_in_words(filled: Run, model: Path, tmp_path: Path) -> None:
    ran = filled("explain", "--model", model, "--tokens", file(tmp_path, [*IDS[:200], 62, 5]))
    assert ran.code == 0
    first, second, *reasons = ran.out.splitlines()
    assert first.startswith("hit: 200 of 202 tokens, from entry ")
    assert first.endswith("(long)")
    assert second.startswith("a load reads 1 segment: ")
    assert reasons[0] == "- diverged at token 200 (expected 62, found 17)"
    assert reasons[1].startswith("- parts at token 200: asked for 'w62 w5', stored is 'w17 w18")
    assert ran.err == ""


def test_a_hit_as_a_document(filled: Run, model: Path, tmp_path: Path) -> None:
    prompt = file(tmp_path, [*IDS, 5, 6])
    document = filled("explain", "--model", model, "--tokens", prompt, "--json").document
    assert (document["hit"], document["token_count"], document["common_tokens"]) == (True, 300, 300)
    assert document["labels"] == ["long"]
    assert document["reads"]["segments"] == 2
    assert [reason["code"] for reason in document["reasons"]] == ["ENDED"]
    assert document["divergence"] is None
    matched = filled("match", "--model", model, "--tokens", prompt, "--json").document
    assert matched["reads"] == document["reads"]


def test_all_that_can_be_restored(filled: Run, model: Path, tmp_path: Path) -> None:
    ran = filled("explain", "--model", model, "--tokens", file(tmp_path, IDS))
    assert ran.out.splitlines()[-1] == "- a model needs one token to evaluate, so no more can be restored"


def test_a_miss_is_an_answer(filled: Run, other_model: Path, tmp_path: Path) -> None:
    ran = filled("explain", "--model", other_model, "--tokens", file(tmp_path, IDS))
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "miss: no entry can be restored for these 300 tokens; 0 of them are stored"
    assert lines[1] == "- no entry of this model in namespace 'default'"
    assert lines[2].startswith("- other model: 300 of the tokens are stored by one whose model.weights[model.safeten")
    document = filled("explain", "--model", other_model, "--tokens", file(tmp_path, IDS), "--json").document
    assert (document["hit"], document["entry_id"], document["reads"]) == (False, None, None)
    assert [reason["code"] for reason in document["reasons"]] == ["NO_ENTRY_OF_MODEL", "OTHER_MODEL"]


def test_another_shape_is_named(filled: Run, model: Path, tmp_path: Path) -> None:
    ran = filled(
        "explain", "--model", model, "--tokens", file(tmp_path, IDS), "--kv-bits", "8", "--kv-group-size", "32"
    )
    assert "layers[0].bits differs (expected 8, found null)" in ran.out


def test_other_namespaces_are_told_of_when_asked_for(filled: Run, model: Path, tmp_path: Path) -> None:
    args = ["explain", "--model", model, "--tokens", file(tmp_path, IDS), "--namespace", "mine"]
    assert "default" not in filled(*args).out
    assert "300 of the tokens are stored in namespace 'default'" in filled(*args, "--all-namespaces").out


def test_a_prompt_of_text(filled: Run, model: Path, prompt: Path) -> None:
    assert filled("explain", "--model", model, "--prompt", prompt).out.startswith("hit: 299 of 300 tokens")


def test_without_a_store(kv: Run, model: Path, tmp_path: Path) -> None:
    assert kv("explain", "--model", model, "--tokens", file(tmp_path, IDS)).code == 10


# Conversations.


def test_a_conversation_is_put_and_found_by_its_messages(kv: Run, talker: Path, tmp_path: Path) -> None:
    put = kv("put", "--model", talker, "--messages", file(tmp_path, TALK[:1]), "--json").document
    assert put["token_count"] == 5
    asked = file(tmp_path, {"messages": TALK[:3]})
    found = kv("match", "--model", talker, "--messages", asked, "--generation-prompt", "--json").document
    assert (found["entry_id"], found["token_count"]) == (put["entry_id"], 5)
    assert found["query_tokens"] == 16


@pytest.mark.parametrize("source", ["a file", "standard input"])
def test_a_template_that_rewrites_history_is_named(kv: Run, talker: Path, tmp_path: Path, source: str) -> None:
    assert kv("put", "--model", talker, "--messages", file(tmp_path, TALK[:2])).code == 0
    given = "-" if source == "standard input" else file(tmp_path, TALK[:3])
    stdin = json.dumps(TALK[:3])
    document = kv("explain", "--model", talker, "--messages", given, "--json", stdin=stdin).document
    assert (document["token_count"], document["divergence"]["token"]) == (7, 7)
    assert document["divergence"] == {
        "token": 7, "message_index": 1, "stored_text": "w60 w20 w61 w21 w22 w2",
        "asked_text": "w21 w22 w2 w1 user w12 w2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--messages", "-", "--prompt", "-"], "one of --prompt, --tokens and --messages"),
        (["--tokens", "-", "--generation-prompt"], "goes with --messages"),
        (["--messages", "-"], "messages"),
    ],
)
def test_wishes_that_make_no_sense(filled: Run, model: Path, args: list[str], text: str) -> None:
    for verb in ("put", "match", "explain"):
        ran = filled(verb, "--model", model, *args, stdin="{}")
        assert ran.code == 2
        assert text in ran.err


def test_messages_that_are_not_json(filled: Run, model: Path) -> None:
    assert filled("match", "--model", model, "--messages", "-", stdin="not json").code == 2


# Checkpoints and covered prompts.


def test_checkpoints_of_a_hybrid_model(kv: Run, hybrid: Path, tmp_path: Path) -> None:
    ids = file(tmp_path, IDS)
    put = kv("put", "--model", hybrid, "--tokens", ids, "--checkpoint-every", "128", "--json").document
    assert [item["token_count"] for item in put["checkpoints"]] == [128, 256]
    assert put["token_count"] == 299
    asked = file(tmp_path, [*IDS[:200], 62, 5])
    found = kv("match", "--model", hybrid, "--tokens", asked, "--json").document
    assert (found["entry_id"], found["token_count"]) == (put["checkpoints"][0]["entry_id"], 128)
    ran = kv("explain", "--model", hybrid, "--tokens", asked)
    assert "- state snapshot only at 2" in ran.out


def test_no_checkpoints_where_the_end_is_enough(kv: Run, model: Path, tmp_path: Path) -> None:
    ids = file(tmp_path, IDS)
    put = kv("put", "--model", model, "--tokens", ids, "--checkpoint-every", "128", "--json").document
    assert put["checkpoints"] == []


def test_a_covered_prompt_is_skipped(kv: Run, model: Path, tmp_path: Path) -> None:
    longer = kv("put", "--model", model, "--tokens", file(tmp_path, IDS), "--json").document
    shorter = ["put", "--model", model, "--tokens", file(tmp_path, IDS[:100]), "--json"]
    skipped = kv(*shorter, "--if-covered", "skip").document
    assert (skipped["entry_id"], skipped["created"]) == (longer["entry_id"], False)
    assert skipped["prefill"] is None
    assert kv(*shorter).document["created"]


def test_a_prompt_that_was_read_for_nothing_says_how_not_to(kv: Run, model: Path, tmp_path: Path) -> None:
    put = ["put", "--model", model, "--tokens", file(tmp_path, IDS[:50])]
    first, again, skipped = kv(*put), kv(*put), kv(*put, "--if-covered", "skip", "--label", "fifty")
    assert first.out == again.out == skipped.out
    assert "--if-covered skip" not in first.err
    assert "nothing written\nwith --if-covered skip the prompt would not have been read again\n" in again.err
    assert skipped.err.startswith("was stored already")
    assert kv("show", "fifty", "--json").document["entry"]["token_count"] == 50

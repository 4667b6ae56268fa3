"""What each verb does to a real store with real models, and what it says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

import kvstore
from kvstore.format.qwen35_plan import PROFILE
from kvstore.store.entry_store import EntryStore
from tests.cli.conftest import ROOT, Run, runner
from tests.releases import held
from tests.runtime.driving import same_bits
from tests.runtime.model_folders import real_folder
from tests.runtime.tiny import CONFIGS
from tests.runtime.tiny import run as prefill_by_hand

IDS = [n % 61 for n in range(300)]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    return file


def only_entry(kv: Run) -> Any:
    (entry,) = kv("ls", "--json").document["entries"]
    return entry


def files(store: Path) -> list[Path]:
    return sorted(p.relative_to(store) for p in store.rglob("*") if p.is_file() and "index" not in p.name)


# put


def test_put_prints_the_entry_id_and_nothing_else(kv: Run, model: Path, prompt: Path) -> None:
    ran = kv("put", "--model", model, "--prompt", prompt)
    assert ran.code == 0
    assert ran.out.strip() == only_entry(kv)["entry_id"]
    assert "prefilled 300 tokens" in ran.err


def test_put_the_same_twice_writes_nothing(kv: Run, model: Path, prompt: Path, tmp_path: Path) -> None:
    first = kv("put", "--model", model, "--prompt", prompt, "--json").document
    before = files(tmp_path / "store")
    second = kv("put", "--model", model, "--prompt", prompt, "--json").document
    assert first["created"]
    assert not second["created"]
    assert first["entry_id"] == second["entry_id"]
    assert second["stored_bytes"] == second["objects_written"] == 0
    assert files(tmp_path / "store") == before


def test_put_by_token_ids_is_the_entry_of_the_prompt(kv: Run, model: Path, prompt: Path, ids: Path) -> None:
    first = kv("put", "--model", model, "--prompt", prompt).out
    assert kv("put", "--model", model, "--tokens", ids).out == first


def test_put_from_standard_input(kv: Run, model: Path) -> None:
    ran = kv("put", "--model", model, "--prompt", "-", "--json", stdin="w1 w2 w3")
    assert ran.document["token_count"] == 3
    assert ran.document["prefill"]["tokens"] == 3


def test_put_takes_in_a_file_of_mlx_lm(kv: Run, model: Path, ids: Path, tmp_path: Path) -> None:
    bound = kvstore.load_model(model)
    cache = prefill_by_hand(bound, make_prompt_cache(bound.model), IDS)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": "somewhere/else"})
    ran = kv("put", file, "--model", model, "--tokens", ids, "--label", "imported")
    assert ran.code == 0
    assert "somewhere/else" in ran.err
    entry = only_entry(kv)
    assert (entry["token_count"], entry["labels"]) == (300, ["imported"])
    with kvstore.Store.open(tmp_path / "store") as store:
        restored = store.load("imported", into=bound)
    for ours, theirs in zip(restored.cache, cache, strict=True):
        assert same_bits(held(ours), held(theirs))


def test_put_refuses_a_file_with_other_token_ids(kv: Run, model: Path, tmp_path: Path) -> None:
    bound = kvstore.load_model(model)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), prefill_by_hand(bound, make_prompt_cache(bound.model), IDS[:9]))
    short = tmp_path / "short"
    short.write_text("1 2 3")
    ran = kv("put", file, "--model", model, "--tokens", short, "--json")
    assert ran.code == 4
    assert ran.document["error"]["code"] == "CACHE_INCONSISTENT"
    assert kv("ls", "--json").document["entries"] == []


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["put", "FILE", "--model", "MODEL", "--tokens", "IDS"], "CACHE_FILE_INVALID"),
        (["put", "FILE", "--inspect-only"], "CACHE_FILE_INVALID"),
        (["import", "FILE"], "USAGE"),
        (["plan", "--profile", PROFILE, "--max-sequence-tokens", "4", "--config", "FILE"], "USAGE"),
        (["plan", "--model", "FILE", "--tokens", "4"], "MODEL_FOLDER_INVALID"),
    ],
    ids=["put", "inspect", "import", "config", "model"],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_is_not_waited_for_and_a_device_is_not_read(
    kv: Run, model: Path, ids: Path, tmp_path: Path, args: list[str], code: str, kind: str
) -> None:
    file = Path("/dev/zero")
    if kind == "pipe":
        file = tmp_path / "pipe"
        os.mkfifo(file)
    named = {"FILE": str(file), "MODEL": str(model), "IDS": str(ids)}
    ran = kv(*(named.get(arg, arg) for arg in args), "--json")
    assert ran.code
    assert ran.document["error"]["code"] == code


def test_put_writes_the_receipt_where_asked(kv: Run, model: Path, prompt: Path, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    document = kv("put", "--model", model, "--prompt", prompt, "--receipt", receipt, "--json").document
    assert "sha256:" + hashlib.sha256(receipt.read_bytes()).hexdigest() == document["receipt"]
    assert kv("show", document["entry_id"], "--raw", "receipt").raw == receipt.read_bytes()


def test_put_quantized_is_found_and_written_back_quantized(kv: Run, model: Path, prompt: Path, tmp_path: Path) -> None:
    put = kv("put", "--model", model, "--prompt", prompt, "--kv-bits", "8", "--kv-group-size", "32", "--label", "q8")
    assert put.code == 0, put.err
    found = ["match", "--model", model, "--prompt", prompt]
    assert kv(*found, "--kv-bits", "8", "--kv-group-size", "32").code == 0
    plain = kv(*found, "--json")
    assert (plain.code, plain.document["error"]["code"]) == (3, "NO_PREFIX")
    assert "OTHER_SIGNATURE" in {reason["code"] for reason in plain.document["error"]["detail"]["reasons"]}
    assert kv(*found, "--any-shape").code == 0
    assert kv(*found, "--any-shape", "--kv-bits", "8").code == 2
    target = tmp_path / "q8.safetensors"
    assert kv("get", "q8", "--model", model, "-o", target).code == 0
    cache = load_prompt_cache(str(target))
    assert {type(item).__name__ for item in cache} == {"QuantizedKVCache"}
    assert {(item.bits, item.offset) for item in cache} == {(8, 300)}


def test_put_with_a_window_is_saved_where_a_repeat_still_hits(kv: Run, models: Path, prompt: Path) -> None:
    model = real_folder(models / "windowed", CONFIGS["qwen3"])
    document = kv("put", "--model", model, "--prompt", prompt, "--max-kv-size", "64", "--json").document
    assert document["token_count"] == 299
    found = kv("match", "--model", model, "--prompt", prompt, "--max-kv-size", "64", "--json").document
    assert found["token_count"] == 299


@pytest.mark.parametrize(
    "args", [[], ["--prompt", "a", "--tokens", "b"], ["file", "--prompt", "a"], ["file"]], ids=" ".join
)
def test_put_must_be_told_one_thing(kv: Run, model: Path, args: list[str]) -> None:
    ran = kv("put", "--model", model, *args)
    assert ran.code == 2
    if {"--prompt", "--tokens"} <= {*args}:
        assert "found --prompt and --tokens" in ran.err


def test_put_without_tokens_stores_nothing(kv: Run, model: Path) -> None:
    ran = kv("put", "--model", model, "--prompt", "-", "--json", stdin="")
    assert ran.code == 4
    assert ran.document["error"]["code"] == "CACHE_EMPTY"


@pytest.mark.parametrize("value", ["4294967296", "-1", "x"])
def test_put_refuses_ids_that_are_none(kv: Run, model: Path, tmp_path: Path, value: str) -> None:
    file = tmp_path / "ids"
    file.write_text(f"1 2 {value}")
    ran = kv("put", "--model", model, "--tokens", file, "--json")
    assert ran.code == 4
    assert ran.document["error"]["code"] == "TOKEN_ID_RANGE"


def test_put_of_no_model_is_refused_before_anything_is_done(kv: Run, prompt: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = kv("put", "--model", tmp_path / "empty", "--prompt", prompt, "--json")
    assert ran.code == 4
    assert ran.document["error"]["code"] == "MODEL_FOLDER_INVALID"


# get


def test_get_writes_what_mlx_lm_goes_on_from(filled: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    ran = filled("get", "long", "--model", model, "-o", target, "--json")
    assert ran.document["token_count"] == 300
    bound = kvstore.load_model(model)
    cache, metadata = load_prompt_cache(str(target), return_metadata=True)
    assert metadata == {"model": str(model), "tokenizer_config": "{}"}
    fresh = kvstore.prefill(bound.model, IDS).cache
    after = [bound.model(mx.array([[7, 8]]), cache=c) for c in (cache, fresh)]
    assert same_bits(*after)


def test_get_refuses_another_model(filled: Run, other_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    ran = filled("get", "long", "--model", other_model, "-o", target, "--json")
    assert ran.code == 6
    assert ran.document["error"]["code"] == "MODEL_MISMATCH"
    assert ran.document["error"]["detail"]["field"] == "model.weights[model.safetensors]"
    assert not target.exists()


def test_get_keeps_a_file_that_is_there(filled: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    target.write_text("mine")
    assert filled("get", "long", "--model", model, "-o", target).code == 2
    assert target.read_text() == "mine"
    assert filled("get", "long", "--model", model, "-o", target, "--force").code == 0


def test_get_of_another_file_name_is_refused(filled: Run, model: Path, tmp_path: Path) -> None:
    assert filled("get", "long", "--model", model, "-o", tmp_path / "out.bin").code == 2


# match


def test_match_never_restores_the_last_token(filled: Run, model: Path, prompt: Path, ids: Path) -> None:
    by_text = filled("match", "--model", model, "--prompt", prompt, "--json").document
    by_ids = filled("match", "--model", model, "--tokens", ids, "--json").document
    assert by_text == by_ids
    assert (by_ids["token_count"], by_ids["query_tokens"], by_ids["labels"]) == (299, 300, ["long"])


def test_match_goes_as_far_as_the_ids_agree(filled: Run, model: Path) -> None:
    ran = filled("match", "--model", model, "--tokens", "-", "--json", stdin=json.dumps([*IDS[:123], 62, 1, 2]))
    assert ran.document["token_count"] == 123


def test_match_of_a_longer_prompt_restores_the_whole_entry(filled: Run, model: Path) -> None:
    ran = filled("match", "--model", model, "--tokens", "-", stdin=json.dumps([*IDS, 5, 6]))
    assert ran.code == 0
    assert ran.out.endswith("300 of 302 tokens\n")


@pytest.mark.parametrize("wanted", ["other model", "other ids", "other namespace"])
def test_match_without_an_entry_is_exit_3(filled: Run, model: Path, other_model: Path, wanted: str) -> None:
    args = {
        "other model": ["--model", other_model, "--tokens", "-"],
        "other ids": ["--model", model, "--tokens", "-"],
        "other namespace": ["--model", model, "--tokens", "-", "--namespace", "elsewhere"],
    }[wanted]
    ran = filled("match", *args, "--json", stdin="9 9 9" if wanted == "other ids" else json.dumps(IDS))
    assert ran.code == 3
    assert ran.document["error"]["code"] == "NO_PREFIX"
    assert ran.out == ""


def test_match_needs_a_prompt(filled: Run, model: Path) -> None:
    assert filled("match", "--model", model).code == 2


# ls, show, plan, info


def test_ls_shows_names_and_sizes(filled: Run) -> None:
    ran = filled("ls")
    header, row = ran.out.splitlines()
    assert header.split() == ["ENTRY", "TOKENS", "RAW", "STORED", "MODEL", "LABELS"]
    assert row.split()[1] == "300"
    assert row.split()[-2:] == ["tiny", "long"]
    assert ran.err == "1 entry\n"


def test_ls_quiet_prints_ids_alone(filled: Run) -> None:
    ran = filled("ls", "-q")
    assert ran.out.startswith("sha256:")
    assert len(ran.out.splitlines()) == 1
    assert ran.err == ""


def test_ls_by_model_and_namespace(filled: Run, model: Path, other_model: Path) -> None:
    assert len(filled("ls", "--model", model, "--json").document["entries"]) == 1
    assert filled("ls", "--model", other_model, "--json").document["entries"] == []
    assert filled("ls", "--namespace", "elsewhere", "--json").document["entries"] == []


@pytest.mark.parametrize("ref", ["id", "hex", "eight", "label"])
def test_show_by_every_kind_of_reference(filled: Run, ref: str) -> None:
    entry = only_entry(filled)["entry_id"]
    name = {"id": entry, "hex": entry[7:], "eight": entry[7:15], "label": "long"}[ref]
    document = filled("show", name, "--json").document
    assert document["entry"]["entry_id"] == entry
    assert document["kinds"] == {"kv": {"layers": 4, "bytes": 4 * 2 * 300 * 2 * 32 * 4}}
    assert [group["payloads"] for group in document["groups"]] == [2]
    assert [receipt["type"] for receipt in document["receipts"]] == ["write"]


def test_show_for_people_names_what_matters(filled: Run) -> None:
    text = filled("show", "long").out
    for word in ("sha256:", "long", "tiny, llama", "300, restorable anywhere from 1 on", "kv "):
        assert word in text


def test_the_raw_manifest_has_the_digest_of_the_entry_id(filled: Run) -> None:
    raw = filled("show", "long", "--raw", "manifest").raw
    assert "sha256:" + hashlib.sha256(raw).hexdigest() == only_entry(filled)["entry_id"]


@pytest.mark.parametrize(("ref", "code"), [("nothing", 3), ("0123456789", 3), ("sha256:" + "0" * 64, 3)])
def test_show_of_nothing(filled: Run, ref: str, code: int) -> None:
    ran = filled("show", ref, "--json")
    assert ran.code == code
    assert ran.document["error"]["code"] == "NOT_FOUND"


def test_plan_of_a_model_is_the_layout_of_its_entries(filled: Run, model: Path) -> None:
    from_model = filled("plan", "--model", model, "--tokens", "300", "--json").document
    from_entry = filled("plan", "long", "--json").document
    assert {**from_model, "bytes_per_token": None} == from_entry
    assert from_model["layout"]["layout_digest"] == filled("show", "long", "--json").document["layout_digest"]


def test_plan_says_what_a_token_takes_and_where_it_can_be_cut(kv: Run, model: Path, models: Path) -> None:
    plain = kv("plan", "--model", model, "--tokens", "300", "--json").document
    assert (plain["bytes_per_token"] * 300, plain["lowest_cut"]) == (plain["layout"]["total_bytes"], 0)
    windowed = real_folder(models / "windowed-for-plan", CONFIGS["qwen3"])
    asked = ["plan", "--model", windowed, "--max-kv-size", "64", "--tokens", "300"]
    document = kv(*asked, "--json").document
    assert document["bytes_per_token"] * 64 == document["layout"]["total_bytes"]
    assert document["lowest_cut"] == 300
    text = kv(*asked).out
    assert f"{document['bytes_per_token']} bytes for each token\ncannot be cut back\n" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("kv-rotating") and " k " in line)
    assert row[2:5] == ["4", "1x2x64x32", "F32"]
    assert "can be cut back to 1 token or more" in kv("plan", "--model", model, "--tokens", "300").out


def test_plan_of_a_quantized_cache_is_smaller(filled: Run, model: Path) -> None:
    plain, small = (
        filled("plan", "--model", model, "--tokens", "300", *more, "--json").document["layout"]["total_bytes"]
        for more in ([], ["--kv-bits", "4", "--kv-group-size", "32"])
    )
    assert small < plain / 3


@pytest.mark.parametrize("args", [[], ["long", "--model", "m"], ["--model", "m"], ["--tokens", "3"]], ids=" ".join)
def test_plan_must_be_told_one_thing(filled: Run, args: list[str]) -> None:
    assert filled("plan", *args).code == 2


def test_info_counts_and_names_versions(filled: Run, filled_store: Path) -> None:
    document = filled("info", "--json").document
    assert document["path"] == str(filled_store)
    assert document["stats"]["entries"] == 1
    assert document["versions"]["kvstore"] == kvstore.__version__
    assert "entries          1\n" in filled("info").out


# rm, label, unlabel, init


def test_labels_are_set_moved_listed_and_taken_away(kv: Run, model: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", stdin="1 2 3")
    first = only_entry(kv)["entry_id"]
    second = kv("put", "--model", model, "--tokens", "-", "--label", "b", stdin="4 5 6").out.strip()
    assert kv("label", first[7:20], "a", "--json").document == {"type": "label", "name": "a", "entry_id": first}
    assert kv("label", "b", "a").code == 0
    assert kv("label", "--json").document["labels"] == {"a": second, "b": second}
    assert kv("unlabel", "a", "--json").document["name"] == "a"
    assert kv("label").out.splitlines()[1:] == [f"b      {second}"]
    assert kv("unlabel", "a").code == 3


@pytest.mark.parametrize("name", ["", " x", "deadbeef", "sha256:x", "a\nb"])
def test_a_label_must_not_be_taken_for_an_id(filled: Run, name: str) -> None:
    ran = filled("label", "long", name, "--json")
    assert ran.code == 2
    assert ran.document["error"]["code"] == "LABEL_INVALID"


def test_label_without_a_name_is_a_wrong_call(filled: Run) -> None:
    assert filled("label", "long").code == 2


def test_rm_asks_and_does_not_guess_the_answer(kv: Run, model: Path, tmp_path: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", "--label", "a", stdin="1 2 3")
    before = files(tmp_path / "store")
    assert kv("rm", "a", stdin="y\n").code == 2
    assert kv("rm", "a", "--json").code == 2
    plan = kv("rm", "a", "-n", "--json").document
    assert plan["dry_run"]
    assert plan["freed_bytes"] == 0
    assert files(tmp_path / "store") == before


def test_rm_takes_the_entry_and_what_only_it_needed(kv: Run, model: Path, tmp_path: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", "--label", "a", stdin="1 2 3")
    kv("put", "--model", model, "--tokens", "-", "--label", "b", stdin="4 5 6")
    document = kv("rm", "a", "a", "-y", "--json").document
    assert [entry["labels"] for entry in document["entries"]] == [["a"]]
    assert document["freed_bytes"] > 0
    assert only_entry(kv)["labels"] == ["b"]
    assert kv("show", "a").code == 3
    kv("rm", "b", "-y")
    assert [f for f in files(tmp_path / "store") if f.suffix in (".kvo",) or f.parts[0] in ("manifests", "tmp")] == []


def test_rm_leaves_what_is_leased_unless_forced(kv: Run, model: Path, tmp_path: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", "--label", "a", stdin="1 2 3")
    with EntryStore.open(tmp_path / "store") as store, store.lease(store.resolve("a")) as lease:
        assert kv("info", "--json").document["stats"]["leases"] == 1
        ran = kv("rm", "a", "-y", "--json")
        assert (ran.code, ran.document["error"]["code"]) == (8, "ENTRY_LEASED")
        plan = kv("rm", "a", "-n", "--json").document
        assert [held["entry_id"] for held in plan["leases"]] == [lease.entry_id]
        said = kv("rm", "a", "-n").err
        assert f"in use by process {os.getpid()}" in said
        assert "would remove nothing of 1 entry without --force" in said
        assert "would remove 1 entry" in kv("rm", "a", "-n", "--force").err
        assert only_entry(kv)["labels"] == ["a"]
        assert kv("rm", "a", "-y", "--force").code == 0
    assert kv("ls", "--json").document["entries"] == []


def test_rm_of_something_unknown_removes_nothing(kv: Run, model: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", "--label", "a", stdin="1 2 3")
    assert kv("rm", "a", "nothing", "-y").code == 3
    assert only_entry(kv)["labels"] == ["a"]


def test_init_makes_a_store_and_leaves_one_alone(kv: Run, tmp_path: Path) -> None:
    first, second = kv("init", "--json").document, kv("init", "--json").document
    assert (first["created"], second["created"]) == (True, False)
    assert first["store_id"] == second["store_id"]
    assert kv("init").out == f"{tmp_path / 'store'}\n"


# verify


def objects(store: Path) -> list[Path]:
    return sorted((store / "objects").rglob("*.kvo"))


@pytest.mark.parametrize("deep", [[], ["--deep"]], ids=["stored", "deep"])
def test_verify_of_a_sound_store(filled: Run, deep: list[str]) -> None:
    document = filled("verify", *deep, "--json").document
    assert document["ok"]
    assert (document["entries"], document["objects"], document["deep"]) == (1, 3, bool(deep))
    assert document["bytes_read"] == filled("info", "--json").document["stats"]["stored_bytes"]
    assert "1 entry, 3 objects" in filled("verify", "long").out


def test_verify_finds_one_changed_byte_and_says_where(kv: Run, model: Path, tmp_path: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", "--label", "a", stdin=json.dumps(IDS))
    victim = max(objects(tmp_path / "store"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)
    ran = kv("verify", "--json")
    assert ran.code == 5
    (finding,) = ran.document["findings"]
    assert (finding["code"], finding["severity"]) == ("STORED_DIGEST_MISMATCH", "error")
    assert finding["subject"] == "sha256:" + victim.name.split(".")[0]
    assert kv("match", "--model", model, "--tokens", "-", stdin=json.dumps(IDS)).code == 3
    assert kv("get", "a", "--model", model, "-o", tmp_path / "out.safetensors").code == 5
    assert "(damaged)" in kv("ls").out


def test_verify_finds_a_missing_object(kv: Run, model: Path, tmp_path: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", stdin="1 2 3")
    objects(tmp_path / "store")[0].unlink()
    ran = kv("verify")
    assert ran.code == 5
    assert "OBJECT_MISSING" in ran.out
    assert ran.out.endswith("damaged\n")


def test_verify_of_an_unknown_entry(filled: Run) -> None:
    assert filled("verify", "nothing").code == 3


@pytest.mark.parametrize("damage", [b"", b"noise" * 4000, None], ids=["empty", "noise", "rows"])
def test_a_damaged_index_is_made_anew_by_what_the_error_advises(
    kv: Run, model: Path, tmp_path: Path, damage: bytes | None
) -> None:
    kv("put", "--model", model, "--tokens", "-", "--label", "a", stdin="1 2 3")
    kv("put", "--model", model, "--tokens", "-", "--label", "b", stdin="4 5 6")
    index = tmp_path / "store" / "index.sqlite"
    if damage is None:
        with closing(sqlite3.connect(index)) as connection:
            connection.execute("UPDATE tree_nodes SET ids = x'00'")
            connection.commit()
        ran = kv("verify")
        advised = ran.out
    else:
        index.write_bytes(damage)
        ran = kv("ls")
        advised = ran.err
    assert ran.code == 5
    assert "`kvstore verify --rebuild-index`" in advised
    ran = kv("verify", "--rebuild-index", "--json")
    assert ran.code == 0, ran.err
    assert ran.document["findings"] == []
    assert ran.document["entries"] == 2
    assert kv("ls", "--json").document["entries"]
    assert kv("match", "--model", model, "--tokens", "-", stdin="1 2 3 4").code == 0
    # Labels are the index's own: there where it could still be read.
    assert kv("show", "a").code == (3 if damage is not None else 0)


def test_what_a_new_index_cannot_take_in_is_reported(kv: Run, model: Path, tmp_path: Path) -> None:
    kv("put", "--model", model, "--tokens", "-", stdin="1 2 3")
    objects(tmp_path / "store")[0].unlink()
    ran = kv("verify", "--rebuild-index", "--json")
    assert ran.code == 5
    assert {finding["code"] for finding in ran.document["findings"] if finding["severity"] == "error"} == {
        "OBJECT_MISSING"
    }


def test_there_is_no_index_to_make_anew(kv: Run, tmp_path: Path) -> None:
    ran = kv("verify", "--rebuild-index")
    assert ran.code == 10
    assert not (tmp_path / "store").exists()


# schema, codes, completion


@pytest.mark.parametrize("name", sorted(p.name.removesuffix(".schema.json") for p in (ROOT / "schemas").glob("*.json")))
def test_schema_prints_the_file(kv: Run, name: str) -> None:
    data = (ROOT / "schemas" / f"{name}.schema.json").read_bytes()
    assert kv("schema", name).raw == data
    assert kv("schema", name.removesuffix(".v1")).raw == data
    assert name in kv("schema", "--json").document["names"]


def test_schema_of_an_unknown_name(kv: Run) -> None:
    assert kv("schema", "nothing").code == 2


def test_codes_lists_every_code(kv: Run) -> None:
    from kvstore.codes import CODES

    found = {row["code"]: row for row in kv("codes", "--json").document["codes"]}
    assert found.keys() == CODES.keys()
    assert found["MODEL_MISMATCH"]["exit_code"] == 6


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_prints_a_script(kv: Run, shell: str) -> None:
    assert "_KVSTORE_COMPLETE" in kv("completion", shell).out
    assert kv("completion", shell, "--json").document["shell"] == shell


# bad stores


@pytest.mark.parametrize(
    "args", [["ls"], ["info"], ["show", "x"], ["verify"], ["rm", "x", "-y"], ["label", "x", "y"]], ids=" ".join
)
def test_without_a_store_nothing_is_made(kv: Run, tmp_path: Path, args: list[str]) -> None:
    ran = kv(*args, "--json")
    assert ran.code == 10
    assert ran.document["error"]["code"] == "STORE_MISSING"
    assert not (tmp_path / "store").exists()


def test_a_directory_with_other_files_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("years of work")
    for args in (["ls"], ["init"]):
        ran = runner(tmp_path / "store")(*args, "--json")
        assert ran.code == 10
        assert ran.document["error"]["code"] == "STORE_NOT_OURS"
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["thesis.txt"]


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    for place in ("store", "store/inside", "store/inside/it"):
        ran = runner(tmp_path / place)("ls", "--json")
        assert ran.document["error"]["code"] == "STORE_NOT_OURS"
        assert ran.document["error"]["message"].startswith(f"{tmp_path / 'store'} is a file")
        assert "Name a directory." in ran.document["error"]["message"]


@pytest.mark.parametrize(
    "args",
    [["ls", "--store", ""], ["get", "long", "--model", "m", "-o", ""], ["export", "long", "-o", ""], ["import", ""],
     ["put", "--model", "m", "--prompt", "p", "--receipt", ""]],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_path_is_not_the_working_directory(kv: Run, args: list[str]) -> None:
    ran = kv(*args)
    assert (ran.code, ran.out) == (2, "")
    assert "expected a path, found ''. [USAGE]" in ran.err


def test_a_cache_file_that_is_not_there_is_named_once(kv: Run, model: Path, ids: Path) -> None:
    ran = kv("put", "none.safetensors", "--model", model, "--tokens", ids)
    assert ran.code == 4
    assert ran.err.count("none.safetensors") == 1
    assert ran.err.endswith("No such file or directory. Check the path. [CACHE_FILE_INVALID]\n")


@pytest.mark.parametrize(
    "args", [["get", "long", "--model", "m", "-o"], ["export", "long", "-o"],
             ["put", "--model", "m", "--prompt", "p", "--receipt"]], ids=" ".join,
)  # fmt: skip
def test_a_folder_to_write_into_is_asked_for_before_the_work(kv: Run, tmp_path: Path, args: list[str]) -> None:
    error = kv(*args, tmp_path / "no" / "out.safetensors", "--json").document["error"]
    assert error["code"] == "USAGE"
    assert error["message"].endswith(f"cannot be written: there is no folder {tmp_path / 'no'}. Make it first.")


@pytest.mark.skipif(shutil.which("mount") is None or os.getuid() != 0, reason="needs to mount")
def test_what_cannot_be_stored_is_refused_before_the_work(tmp_path: Path, ids: Path) -> None:
    mounted, bundle = tmp_path / "m", tmp_path / "b"
    mounted.mkdir()
    (tmp_path / "p.txt").write_text("w1 w2")
    if subprocess.run(["mount", "-t", "tmpfs", "none", mounted], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        kv = runner(mounted / "s")
        assert kv("init").code == 0
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        assert kv("ls").code == kv("init").code == 0
        # Neither the model nor the bundle is there: whoever looked for it would say so.
        for call in (
            ("put", "--model", tmp_path / "none", "--prompt", tmp_path / "p.txt"),
            ("put", tmp_path / "none.safetensors", "--model", tmp_path / "none", "--tokens", ids),
            ("bench", "--model", tmp_path / "none"),
            ("import", bundle),
        ):
            ran = kv(*call, "--json")
            assert ran.document["error"]["code"] == "STORE_READ_ONLY", ran
    finally:
        subprocess.run(["umount", mounted], check=True)

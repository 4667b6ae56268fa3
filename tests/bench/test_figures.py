"""The judgement of figures, and the tables and plots made of them; nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import plots, report
from bench.bench_speed import medians
from bench.bench_start import COMMANDS
from bench.figures import Figure, figures

MACHINE = {"processor": "P", "cores": 2, "system": "Linux", "python": "3.11", "mlx": "1", "mlx-lm": "1", "numpy": "1",
           "zstandard": "1"}  # fmt: skip


def task(seconds: float, *, peak: float = 100e6, others: float | None = 0.0, **more: float) -> dict[str, Any]:
    return {"seconds": seconds, "cpu_seconds": seconds, "peak_bytes": peak, "other_cores": others, **more}


def speed(case: str, **tasks: dict[str, Any]) -> dict[str, Any]:
    """A run of one case in which our sides do the double of R1's, unless said otherwise."""
    standard = {
        "r1 save": task(0.8, raw_bytes=100e6, stored_bytes=75e6), "raw save": task(0.1),
        "put small": task(0.4, peak=10e6, raw_bytes=100e6, stored_bytes=60e6), "r1 load": task(0.8, peak=160e6),
        "raw load": task(0.1), "load small, first": task(0.4), "load small, later": task(0.2, array_bytes=90e6),
        "put fast": task(0.2, peak=10e6, raw_bytes=100e6, stored_bytes=101e6),
        "load fast, later": task(0.18, array_bytes=90e6),
    }  # fmt: skip
    return {"speed": {case: {"case": case, "rounds": 7, "tasks": standard | {
        name.replace("_", " "): facts for name, facts in tasks.items()
    }}}}  # fmt: skip


def found(document: dict[str, Any], where: str, words: str) -> Figure:
    (figure,) = [one for one in figures(document) if one.where == where and words in one.what]
    return figure


def test_a_limit_is_met_on_the_limit() -> None:
    assert Figure("", "", 2.0, at_least=True, value=2.0).met is True
    assert Figure("", "", 2.0, at_least=True, value=1.999).met is False
    assert Figure("", "", 2.0, at_least=False, value=2.0).met is True
    assert Figure("", "", 2.0, at_least=False, value=2.001).met is False
    assert Figure("", "", 2.0, at_least=False).met is None


@pytest.mark.parametrize(("others", "noisy"), [(None, False), (0.0, False), (0.2, False), (0.21, True)])
def test_a_row_is_noisy_where_others_took_much(others: float | None, noisy: bool) -> None:
    assert Figure("", "", 1, at_least=True, value=1, other_cores=others).noisy is noisy


def test_nothing_is_met_that_was_not_measured() -> None:
    assert {figure.met for figure in figures({})} == {None}
    assert len({figure.where for figure in figures({})}) >= 8


@pytest.mark.parametrize(
    ("words", "ratio"),
    [("to R1's", 0.8), ("raw size", 100 / 60), ("put", 2.0), ("first read", 2.0), ("small, later", 4.0),
     ("load, fast, later", 1.8), ("peak memory", 1.6)],
)  # fmt: skip
def test_ratios_say_what_the_target_says(words: str, ratio: float) -> None:
    figure = found(speed("gemma-2000"), "gemma-2000", words)
    assert figure.value == figure.ratio == pytest.approx(ratio)
    assert figure.met is True


@pytest.mark.parametrize(
    ("words", "name", "facts"),
    [
        ("to R1's", "put small", task(0.4, raw_bytes=100e6, stored_bytes=75e6 * 0.861)),
        ("raw size", "put small", task(0.4, raw_bytes=100e6, stored_bytes=100e6 / 1.479)),
        ("put", "put small", task(0.8 / 1.59, raw_bytes=100e6, stored_bytes=60e6)),
        ("first read", "load small, first", task(0.8 / 1.99)),
        ("small, later", "load small, later", task(0.8 / 2.59)),
        ("load, fast, later", "load fast, later", task(0.181)),
        ("peak memory", "load small, later", task(0.2, peak=160e6 / 1.59)),
    ],
)  # fmt: skip
def test_a_target_that_is_missed_by_little_is_missed(words: str, name: str, facts: dict[str, Any]) -> None:
    document = speed("gemma-2000")
    document["speed"]["gemma-2000"]["tasks"][name] = facts
    assert found(document, "gemma-2000", words).met is False


def test_a_row_is_as_noisy_as_the_noisier_side() -> None:
    document = speed("qwen-8000", r1_save=task(0.8, others=0.9, raw_bytes=100e6, stored_bytes=75e6))
    assert found(document, "qwen-8000", "put").noisy
    assert not found(document, "qwen-8000", "first read").noisy
    assert not found(document, "qwen-8000", "to R1's").noisy  # bytes are the same on a busy machine


@pytest.mark.parametrize(("words", "plain"), [("same payloads", 70e6), ("whole cache", 75e6)])
def test_quantized_caches_are_never_larger_than_plain_zstd(words: str, plain: float) -> None:
    for more, met in ((0, True), (1, False)):
        put = task(0.4, raw_bytes=100e6, stored_bytes=plain + more, plain_bytes=70e6)
        assert found(speed("qwen-8000-q8", put_small=put), "qwen-8000-q8", words).met is met
    assert found(speed("qwen-8000-q4"), "qwen-8000-q4", "raw size").limit == 1.2


def test_memory_is_bounded_by_a_share_and_by_bytes() -> None:
    document = speed("llama-8192")
    assert found(document, "llama-8192", "put, small: peak memory to").value == pytest.approx(0.1)
    assert found(document, "llama-8192", "load, small: peak beyond the arrays to them").value == pytest.approx(1 / 9)
    wasteful = task(0.2, peak=90e6 + 300 * 2**20, array_bytes=90e6)
    document["speed"]["llama-8192"]["tasks"]["load small, later"] = wasteful
    figure = found(document, "llama-8192", "load, small: peak beyond the arrays to them")
    assert figure.met is False
    (absolute,) = [one for one in figures(document) if one.what == "load, small: peak beyond the arrays"]
    assert absolute.value == 300
    assert absolute.met is False


def test_what_surrounds_the_codec_is_a_share_of_the_load() -> None:
    facts = {"case": "qwen-8000", "load_seconds": 0.100, "codec_seconds": 0.091, "other_cores": None}
    figure = found({"overhead": facts}, "qwen-8000", "surrounds")
    assert figure.value == pytest.approx(9)
    assert figure.met is True
    assert found({"overhead": {**facts, "codec_seconds": 0.089}}, "qwen-8000", "surrounds").met is False


def test_a_command_that_imports_too_much_is_missed_however_fast() -> None:
    commands = {name: {**task(0.02), "imports": ["sqlalchemy"]} for name in ("python -c pass", *COMMANDS)}
    document = {"start": {"commands": commands}}
    assert found(document, "kvstore --help", "imports").met is False
    assert all(found(document, command, "imports").met is True for command in COMMANDS[1:])
    assert found(document, "kvstore ls", "imports").target == "none"


def test_match_is_judged_at_the_most_nodes() -> None:
    def size(ms: float) -> dict[str, float]:
        return {"match_ms": ms, "bytes_per_node_beyond_ids": 300, "open_ms": 1.0}

    facts = {"sizes": [size(1.0), size(1.6)], "most_to_fewest": {"match_ms": 1.6}, "chain_ns_per_token": 8.0}
    where = "match, 1,000,000 nodes"
    assert found({"match": facts}, where, "a prompt").value == 1.6
    assert found({"match": facts}, where, "a prompt").met is True
    assert found({"match": facts}, where, "the same").met is False
    assert found({"match": facts}, where, "chain").met is True


def test_medians_leave_out_what_is_summed() -> None:
    runs = [{"seconds": s, "watched_seconds": 1.0, "other_seconds": o} for s, o in ((3, 0.3), (1, -0.1), (2, 0.1))]
    assert medians(runs) == {"seconds": 2, "other_cores": pytest.approx(0.1)}
    unknown = [{"seconds": 1, "watched_seconds": 1.0, "other_seconds": None}]
    assert medians(unknown) == {"seconds": 1, "other_cores": None}
    less = [{"seconds": 1, "watched_seconds": 1.0, "other_seconds": -0.01}]
    assert medians(less)["other_cores"] == 0


def test_a_cache_without_targets_is_shown_and_not_judged() -> None:
    quick = {"machine": MACHINE, "rounds": 3, "seconds": 60.0, **speed("gemma-500")}
    assert {figure.met for figure in figures(quick)} == {None}
    text = report.text(quick)
    assert "0 of 0 targets that were measured are met. Not measured: gemma-2000;" in text
    assert "gemma-500, medians of 7 rounds" in text


def document() -> dict[str, Any]:
    lengths = [{"tokens": 2 * n, "prefill_seconds": n * 0.1, **task(0.01)} for n in (128, 250, 500, 1000)]
    names = ("zstd 1", "zstd 3", "zstd 9", "zstd 19", "gzip 6", "byte planes, zstd 1", "kvstore small", "kvstore fast")
    codecs = [{"name": name, "ratio": 1.3, "encode_mb_s": 90.0, "decode_mb_s": 900.0} for name in names]
    return {
        "machine": MACHINE, "rounds": 7, "seconds": 60.0, **speed("gemma-2000", put_small=task(
            0.4, others=0.5, raw_bytes=100e6, stored_bytes=60e6
        )),
        "restore": {"lengths": lengths}, "codecs": {"case": "gemma-2000", "raw_bytes": 1, "codecs": codecs},
    }  # fmt: skip


def test_the_tables_say_what_is_missed_what_is_noisy_and_what_is_not_there() -> None:
    made = json.loads(json.dumps(document()))
    made["speed"]["gemma-2000"]["tasks"]["load small, first"] = task(9.0)
    text, page = report.text(made), report.markdown(made)
    (row,) = [line for line in text.splitlines() if "first read" in line]
    assert "MISSED" in row
    (row,) = [line for line in page.splitlines() if "R1's save" in line]
    assert row.startswith("| gemma-2000 |")
    assert "met" in row
    assert "0.50 !" in row
    assert "R1 is the pipeline to beat" in text
    assert "6 of 7 targets that were measured are met. Not measured: qwen-8000" in text
    assert "While 1 were measured, marked !" in text
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|") and "gemma-2000" in line}
    assert widths == {9}


def test_plots_are_small_pictures_and_the_same_each_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        plots.draw_all(document(), tmp_path / folder)
    for name in ("codecs.png", "restore.png"):
        picture = (tmp_path / "one" / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 100_000
        assert picture == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("text", [None, "no JSON", "{}", "null", "[]"])
def test_a_document_that_cannot_be_read_is_a_wrong_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "last.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr("sys.argv", ["bench", "--read", str(file), "--write"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "--read: expected a document that --json printed" in capsys.readouterr().err

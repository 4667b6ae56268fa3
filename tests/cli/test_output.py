"""What is written, and to which stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.output import Output, Progress, human_bytes, human_count, human_seconds, table
from kvstore.store.entry_store import EntryStore
from tests.builders import make_entry
from tests.cli.conftest import runner
from tests.store.kit import put


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1549, "1.5 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"),
        (999_499, "999 kB"), (999_500, "1.0 MB"), (1_500_000, "1.5 MB"), (2_000_000_000, "2.0 GB"),
        (10**15, "1.0 PB"), (10**19, "10000 PB"),
    ],
)  # fmt: skip
def test_sizes_are_decimal_and_short(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (4200, "1:10 h")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_a_bar_shows_amount_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("kvstore.cli.output.time.monotonic", lambda: float(next(clock)))
    bar = Progress("storing", total=4_000_000, unit="bytes", drawn=False)
    assert "left" not in bar.line()
    bar.update(1_000_000)
    assert "1.0 MB of 4.0 MB" in bar.line()
    assert "B/s, " in bar.line()
    assert bar.line().endswith(" left")
    bar.update(4_000_000)
    assert "left" not in bar.line()


def test_counts_agree_in_number() -> None:
    assert [human_count(n, "entry", "entries") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert human_count(2, "token") == "2 tokens"


def test_columns_align_and_lines_have_no_trailing_spaces() -> None:
    lines = table(("NAME", "SIZE"), [("a", "1 B"), ("longer", "12 MB")], right=(1,))
    assert lines == ["NAME     SIZE", "a         1 B", "longer  12 MB"]


def test_text_goes_to_stdout_and_messages_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.result("thing", {"a": 1}, ["first", "second"])
    out.say("message")
    out.say("only with -v", level=1)
    assert capsys.readouterr() == ("first\nsecond\n", "message\n")


def test_json_is_one_document_and_silences_messages(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.result("thing", {"a": "é"}, ["first"])
    out.say("message")
    written = capsys.readouterr()
    assert json.loads(written.out) == {"type": "thing", "a": "é"}
    assert written.err == ""


def test_quiet_silences_messages_and_keeps_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(quiet=True)
    out.result("thing", {}, ["result"])
    out.say("message")
    assert capsys.readouterr() == ("result\n", "")


def test_an_error_is_a_document_on_stderr_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).error({"code": "X"}, "text")
    Output().error({"code": "X"}, "text")
    written = capsys.readouterr()
    first, second = written.err.splitlines()
    assert written.out == ""
    assert json.loads(first) == {"type": "error", "error": {"code": "X"}}
    assert second == "error: text"


def test_no_bar_is_drawn_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("prefill", total=4, unit="tokens") as bar:
        bar.update(4)
    assert capsys.readouterr() == ("", "")


def test_a_bar_shows_count_and_rate_and_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress("prefill", total=8, unit="tokens", drawn=True)
    bar.update(2)
    bar.update(8)
    bar.close()
    drawn = capsys.readouterr().err
    assert drawn.startswith("\rprefill ██████░")
    assert "2/8 tokens" in drawn
    assert "8/8 tokens" in drawn
    assert drawn.endswith("\n")
    assert drawn.rstrip().endswith("tokens/s")


@pytest.mark.parametrize("settings", [{"as_json": True}, {"quiet": True}, {"progress": "never"}])
def test_settings_that_forbid_a_bar_win_over_a_terminal(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Output(**settings).progress("prefill", total=1, unit="tokens") as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""


HOSTILE = "a\x1b]0;owned\x07\r\n\x9b31m\u202eb\ud800\x00é"
HARMLESS = r"a\u001b]0;owned\u0007\u000d\u000a\u009b31m\u202eb\ud800\u0000é"


@pytest.mark.parametrize(
    "write",
    [lambda text: Output().result("x", {}, [text]), lambda text: Output().say(text),
     lambda text: Output().error({}, text), lambda text: Output().error({}, text, text),
     lambda text: Output().result("x", {}, table((text,), [(text,)]))],
)  # fmt: skip
def test_what_others_wrote_does_nothing_to_a_terminal(
    write: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write(HOSTILE)
    assert set("".join(capsys.readouterr()).removeprefix("error: ").splitlines()) == {HARMLESS}


def test_nor_does_a_document_of_it_which_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).result("x", {"text": HOSTILE}, [])
    Output(as_json=True).error({"text": HOSTILE}, "")
    written = capsys.readouterr()
    assert (written.out + written.err).replace("\n", "").isprintable()
    assert json.loads(written.out)["text"] == json.loads(written.err)["error"]["text"] == HOSTILE


@pytest.mark.parametrize("json_or_text", [[], ["--json"]])
@pytest.mark.parametrize(
    "args", [["ls"], ["show", "a"], ["info"], ["label"], ["verify"], ["rm", "a", "-n"], ["import", "\x1b[2J"],
             ["show", "\x1b[2J"], ["unlabel", "\x1b[2J"], ["export", "a", "-o", "\x1b/x"], ["ls", "\x1b[2J"]],
    ids=lambda args: " ".join(args).replace("\x1b", "ESC"),
)  # fmt: skip
def test_no_verb_lets_it_through(tmp_path: Path, args: list[str], json_or_text: list[str]) -> None:
    root = tmp_path / "\x1b[1mstore"
    with EntryStore.open(root) as store:
        put(store, make_entry(1, 300), label="a", annotations={"model.repo": "\x1b[31m\x9b\n", "model.path": "\x1b"})
        with store._opened.index.write() as connection:
            connection.exec_driver_sql("INSERT INTO labels SELECT ?, entry_key, 0 FROM entries", ("\x1b[2J\n\x9b",))
    ran = runner(root)(*args, *json_or_text)
    assert (ran.out + ran.err).replace("\n", "").replace("\t", "").isprintable()
    if not json_or_text:
        assert ran.err.count("\n") <= 2
        assert any(shown in ran.out + ran.err for shown in ("\\u001b", "\\x1b")) or args == ["verify"]

"""What only a process of its own can show: signals, pipes, tracebacks, memory between calls."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, checked, process, run_process


@pytest.fixture
def long_ids(tmp_path: Path) -> Path:
    """More tokens than any test waits for."""
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([n % 61 for n in range(200_000)]))
    return file


def test_ctrl_c_in_a_prefill_leaves_nothing(tmp_path: Path, model: Path, long_ids: Path) -> None:
    store = tmp_path / "store"
    running = process("put", "--model", model, "--tokens", long_ids, "--json", "--prefill-step-size", "8", store=store)
    deadline = time.monotonic() + 60
    while not (store / "index.sqlite").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == ""
    assert checked(err.strip())["error"]["code"] == "CANCELLED"
    assert [p for folder in ("objects", "manifests", "tmp") for p in (store / folder).rglob("*") if p.is_file()] == []
    assert json.loads(run_process("ls", "--json", store=store).out)["entries"] == []


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_while_the_program_is_being_imported(tmp_path: Path, *, as_json: bool) -> None:
    script = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "kvstore.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from kvstore.cli.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "ls", *["--json"][: int(as_json)]], text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    if as_json:
        assert checked(done.stderr)["error"]["code"] == "CANCELLED"
    else:
        assert done.stderr == "error: stopped; nothing was left behind [CANCELLED]\n"


def test_a_closed_pipe_is_quiet(filled_store: Path) -> None:
    """More output than a pipe holds, and a reader that takes one line."""
    running = process("codes", store=filled_store)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.readline()
    running.stdout.close()
    big = process("schema", "manifest", store=filled_store)
    assert big.stdout is not None
    assert big.stderr is not None
    big.stdout.close()
    for ended, codes in ((running, (0, 141)), (big, (141,))):
        assert ended.stderr is not None
        assert ended.stderr.read() == ""
        ended.stderr.close()
        assert ended.wait(timeout=60) in codes


def test_a_traceback_only_where_it_is_asked_for(tmp_path: Path) -> None:
    store = tmp_path / "none"
    assert "Traceback" not in run_process("ls", "-v", store=store).err
    shown = run_process("ls", "-vv", store=store)
    assert shown.code == 10
    assert "Traceback" in shown.err


def test_put_and_match_meet_across_processes(tmp_path: Path, model: Path, prompt: Path) -> None:
    store = tmp_path / "store"
    put = run_process("put", "--model", model, "--prompt", prompt, store=store)
    assert put.code == 0, put.err
    assert "\r" not in put.err
    found = run_process("match", "--model", model, "--prompt", prompt, "--json", store=store)
    assert found.code == 0, found.err
    assert found.err == ""
    assert checked(found.out)["entry_id"] == put.out.strip()


def test_a_terminal_gets_a_bar_with_a_rate(tmp_path: Path, model: Path, prompt: Path) -> None:
    near, far = pty.openpty()
    command = [sys.executable, "-m", "kvstore.cli", "put", "--model", str(model), "--prompt", str(prompt)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_DIR": str(tmp_path / "store")}
    with subprocess.Popen(command, stderr=far, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env) as running:
        os.close(far)
        seen = b""
        while True:
            try:
                data = os.read(near, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            seen += data
        assert running.stdout is not None
        assert running.stdout.read().startswith(b"sha256:")
    os.close(near)
    assert running.returncode == 0
    text = seen.decode()
    assert "prefill ████████████████████████ 300/300 tokens" in text
    assert "tokens/s\r\n" in text


CLOSED = {">&-": "Bad file descriptor", ">/dev/full": "No space left on device"}


def shell(command: str, store: Path, redirect: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line through a shell, which can close a stream."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_DIR": str(store), "PYTHON": sys.executable}
    return subprocess.run(
        ["sh", "-c", f'"$PYTHON" -m kvstore.cli {command} {redirect}'], text=True, capture_output=True, check=False,
        env=env, cwd=cwd,
    )  # fmt: skip


@pytest.mark.parametrize("redirect", CLOSED)
@pytest.mark.parametrize("command", ["info", "show long --raw manifest", "ls --json", "--help", "ls -h", "--version"])
def test_a_result_that_cannot_be_written_is_an_error(filled_store: Path, command: str, redirect: str) -> None:
    done = shell(command, filled_store, redirect)
    message = f"standard output cannot be written: {CLOSED[redirect]}"
    assert done.returncode == 1
    if "--json" in command:
        assert checked(done.stderr)["error"]["message"] == message
    else:
        assert done.stderr == f"error: {message} [STORE_IO]\n"
    # Both at once: nothing can be said, and the exit code is the same.
    both = shell(command, filled_store, f"{redirect} 2{redirect}")
    assert (both.returncode, both.stderr) == (1, "")


@pytest.mark.parametrize("redirect", CLOSED)
@pytest.mark.parametrize(("command", "code"), [("ls -q", 0), ("show nothing", 3), ("ls --no", 2), ("ls -vv x", 2)])
def test_a_message_that_cannot_be_written_changes_nothing(
    filled_store: Path, command: str, code: int, redirect: str
) -> None:
    done = shell(command, filled_store, f"2{redirect}")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith("sha256:") == (code == 0)


def test_standard_input_that_is_closed_cannot_be_read(filled_store: Path, model: Path) -> None:
    done = shell(f"match --model {model} --tokens -", filled_store, "<&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the token ids - cannot be read: Bad file descriptor [USAGE]\n"


def test_a_file_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """A library's message would be written into it."""
    program = "import os; os.write(2, b'oops'); os.write(2, b'oops')"
    script = f"from kvstore.cli import main as m\nimport kvstore.cli.__main__ as p\np._open_streams()\n{program}\n"
    script += f"file = open({str(tmp_path / 'file')!r}, 'w')\nassert file.fileno() > 2\n"
    done = subprocess.run(
        ["sh", "-c", '"$PYTHON" -c "$SCRIPT" <&- >&- 2>&-'], check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "SCRIPT": script},
    )  # fmt: skip
    assert done.returncode == 0

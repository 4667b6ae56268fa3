"""Files that verbs write where somebody said: what may be replaced, and that a signal leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli.outputs import fresh_file, write_file
from kvstore.errors import UsageError, fail
from kvstore.format.qwen35_plan import PROFILE
from tests.cli.conftest import ROOT, Run
from tests.format.test_qwen35_plan import FLAT

VERBS = {
    "get": ("get", "long", "--model", "MODEL", "-o", "FILE"),
    "get-wp30": ("get", "long", "--model", "MODEL", "--format", "wp30-cache-2", "-o", "FILE"),
    "put": ("put", "--model", "MODEL", "--prompt", "PROMPT", "--receipt", "FILE"),
    "prepare": ("prepare", "--profile", PROFILE, "--max-sequence-tokens", "4", "--config", "CONFIG",
                "--receipt", "FILE"),
    "export": ("export", "long", "-o", "FILE"),
    "copy": ("conformance", "copy", "FILE"),
}  # fmt: skip
FORCED = ("get", "get-wp30", "put", "prepare")


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs to make a device")


THERE: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"mine"),
    "link": lambda path: path.symlink_to("mine"),
    "dangling": lambda path: path.symlink_to("nothing"),
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "device": _device,
}
REPLACED = ("file", "link", "dangling")


@pytest.fixture
def called(filled: Run, model: Path, prompt: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Call a verb with a file; gives the exit code and the error's code."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": FLAT}))
    names = {"MODEL": model, "PROMPT": prompt, "CONFIG": config}

    def call(verb: str, file: Path, *more: str) -> tuple[int, str]:
        ran = filled(*({**names, "FILE": file}.get(arg, arg) for arg in VERBS[verb]), *more, "--json")
        return ran.code, "" if ran.code == 0 else ran.document["error"]["code"]

    return call


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_there_is_replaced_by_force_alone_and_only_where_it_is_a_file(
    called: Callable[..., tuple[int, str]], tmp_path: Path, verb: str, there: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine").write_bytes(b"mine")
    file = folder / "x.safetensors"
    THERE[there](file)
    before = file.lstat()
    assert called(verb, file) == (2, "USAGE")
    assert file.lstat() == before
    if verb in FORCED:
        assert called(verb, file, "--force") == ((0, "") if there in REPLACED else (2, "USAGE"))
        assert file.is_file() == (there in REPLACED)
        assert (there in REPLACED) != (file.lstat() == before)
    assert not file.is_symlink() or verb not in FORCED
    # What a link led to is nobody's output, and nothing else is left.
    assert (folder / "mine").read_bytes() == b"mine"
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "x.safetensors"]


@pytest.mark.parametrize("force", [True, False])
def test_what_comes_there_meanwhile_is_looked_at_again(tmp_path: Path, *, force: bool) -> None:
    file = tmp_path / "x"
    writing = fresh_file(file, force=force)
    writing.__enter__().write_bytes(b"new")
    file.mkdir()
    with pytest.raises(UsageError):
        writing.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_error_names_the_file_that_was_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{tmp_path}/x is too large$"), fresh_file(tmp_path / "x") as temporary:
        raise fail("USAGE", f"{temporary} is too large")
    (tmp_path / "closed").mkdir(0o500)
    if os.getuid():
        with pytest.raises(UsageError, match="closed/x cannot be written"):
            write_file(tmp_path / "closed" / "x", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]


_STOP = """
import os, shutil, sys
import mlx.core, kvstore.store.bundle, kvstore.runtime.wp30_write
number = int(sys.argv.pop(1))
def stopping(function):
    def call(*args, **options):
        function(*args, **options)
        os.kill(os.getpid(), number)
    return call
def stopped(files):
    def call(*args):
        for item in files(*args):
            yield item
            os.kill(os.getpid(), number)
    return call
mlx.core.save_safetensors = stopping(mlx.core.save_safetensors)
kvstore.store.bundle._files = stopped(kvstore.store.bundle._files)
kvstore.runtime.wp30_write.compressed = stopped(kvstore.runtime.wp30_write.compressed)
shutil.copytree = stopping(shutil.copytree)
from kvstore.cli.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("verb", ["get", "get-wp30", "export", "copy"])
def test_a_signal_leaves_nothing_half_written(
    filled_store: Path, model: Path, tmp_path: Path, verb: str, number: signal.Signals
) -> None:
    names = {"MODEL": str(model), "FILE": str(tmp_path / "x.safetensors")}
    done = subprocess.run(
        [sys.executable, "-c", _STOP, str(int(number)), *(names.get(arg, arg) for arg in VERBS[verb])],
        text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSTORE_DIR": str(filled_store)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "error: stopped; nothing was left behind [CANCELLED]"
    assert list(tmp_path.iterdir()) == []
    assert list((filled_store / "tmp").iterdir()) == []

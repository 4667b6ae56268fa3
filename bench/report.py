"""A run as text and as Markdown: the targets first, then what they rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.figures import Figure, figures
from bench.machine import NOISY_CORES

__all__ = ["markdown", "summary", "text"]

_R1 = "R1 is the pipeline to beat: all arrays as one safetensors file, compressed whole with zstd 3, and back."
_HEAD = ("where", "what", "target", "measured", "baseline", "ratio", "", "others")


def text(document: dict[str, Any]) -> str:
    """Tables for a terminal."""
    lines = [_machine(document), "", *_aligned(_targets(document)), "", _R1, summary(document)]
    for title, table in _more(document):
        lines += ["", title, *_aligned(table)]
    return "\n".join(lines)


def markdown(document: dict[str, Any]) -> str:
    """The same as a page."""
    lines = [
        "# Figures", "",
        "Written by `python -m bench --write`; [bench/README.md](../bench/README.md) says how to read it.", "",
        _machine(document), "", *_piped(_targets(document)), "", _R1, "", summary(document),
    ]  # fmt: skip
    for title, table in _more(document):
        lines += ["", f"## {title}", "", *_piped(table)]
    return "\n".join(lines) + "\n"


def summary(document: dict[str, Any]) -> str:
    """How many targets are met."""
    found = figures(document)
    measured = [figure for figure in found if figure.met is not None]
    line = f"{sum(figure.met is True for figure in measured)} of {len(measured)} targets that were measured are met."
    if len(measured) < len(found):
        line += f" Not measured: {'; '.join(dict.fromkeys(f.where for f in found if f.met is None))}."
    noisy = sum(figure.noisy for figure in measured)
    if noisy:
        line += f" While {noisy} were measured, marked !, others took more than {NOISY_CORES:g} cores: measure again."
    return line


def _machine(document: dict[str, Any]) -> str:
    facts = document["machine"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("mlx", "mlx-lm", "numpy", "zstandard"))
    return (
        f"{facts['cores']} cores of {facts['processor']}, {facts['system']}, Python {facts['python']}, {versions}; "
        f"{document['rounds']} rounds; {document['seconds'] / 60:.1f} minutes in all."
    )


def _targets(document: dict[str, Any]) -> list[tuple[str, ...]]:
    return [_HEAD, *(_cells(figure) for figure in figures(document) if figure.met is not None)]


def _cells(figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}" if figure.ratio >= 2 else f"{figure.ratio:.3f}"
    return (
        figure.where, figure.what, figure.target, figure.measured, figure.baseline, ratio,
        "met" if figure.met else "MISSED", _others(figure.other_cores),
    )  # fmt: skip


def _others(cores: float | None) -> str:
    return "" if cores is None else f"{cores:.2f}{' !' if cores > NOISY_CORES else ''}"


def _more(document: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Titles and tables of what the targets rest on."""
    for result in document.get("speed", {}).values():
        yield f"{result['case']}, medians of {result['rounds']} rounds", _tasks(result["tasks"])
    if "restore" in document:
        yield "Restoring against prefilling, real Gemma-3-270M", _restore(document["restore"]["lengths"])
    if "codecs" in document:
        result = document["codecs"]
        yield f"Codecs on {result['case']}, one process, one thread, in turns", [
            ("codec", "ratio", "encode MB/s", "decode MB/s"),
            *((one["name"], f"{one['ratio']:.3f}", f"{one['encode_mb_s']:.0f}", f"{one['decode_mb_s']:.0f}")
              for one in result["codecs"]),
        ]  # fmt: skip


def _tasks(tasks: dict[str, Any]) -> list[tuple[str, ...]]:
    head = ("task", "ms", "R1 to this", "processor ms", "peak MB", "ratio", "size to R1's", "others")
    rows: list[tuple[str, ...]] = [head]
    for name, facts in tasks.items():
        side = "r1 save" if "save" in name or "put" in name else "r1 load"
        ratio = size = ""
        if "stored_bytes" in facts:
            ratio = f"{facts['raw_bytes'] / facts['stored_bytes']:.3f}"
            size = f"{facts['stored_bytes'] / tasks['r1 save']['stored_bytes']:.3f}"
        rows.append((
            name, f"{facts['seconds'] * 1e3:.1f}", f"{tasks[side]['seconds'] / facts['seconds']:.2f}",
            f"{facts['cpu_seconds'] * 1e3:.1f}", f"{facts['peak_bytes'] / 1e6:.1f}", ratio, size,
            _others(facts["other_cores"]),
        ))  # fmt: skip
    return rows


def _restore(lengths: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        ("tokens", "prefill s", "restore s", "times faster", "others"),
        *((str(one["tokens"]), f"{one['prefill_seconds']:.1f}", f"{one['seconds']:.4f}",
           f"{one['prefill_seconds'] / one['seconds']:.0f}", _others(one["other_cores"]))
          for one in lengths),
    ]  # fmt: skip


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _piped(rows: Sequence[tuple[str, ...]]) -> list[str]:
    head, *rest = rows
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rest)]

"""Two plots for the README: ``python -m bench.plots`` measures and draws them; ``--read FILE`` draws a run of before.

* ``docs/img/codecs.png``: ratio against speed of codecs on a cache of the real Gemma-3-270M;
* ``docs/img/restore.png``: seconds to restore that model's caches and to prefill them, over tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gemma import ROOT
from bench.parts import PARTS, Extent

__all__ = ["draw_all"]

FOLDER: Final = ROOT / "docs" / "img"
_CROWDED: Final = 300
"""From a range of this on, an axis bears powers of ten alone."""
_MARKS: Final = "ovs^DPX*"
_OURS: Final = {"kvstore small": "#c1272d", "kvstore fast": "#e8833a"}
_GREYS: Final = ("#1b3a57", "#2f6690", "#5a9bc4", "#9cc6e0", "#6b6b6b", "#3f8f5b")


def draw_all(document: dict[str, Any], folder: Path = FOLDER) -> None:
    """Draw what the document has figures for."""
    folder.mkdir(parents=True, exist_ok=True)
    if "codecs" in document:
        _codecs(document["codecs"], folder / "codecs.png")
    if "restore" in document:
        _restore(document["restore"]["lengths"], folder / "restore.png")


def _codecs(result: dict[str, Any], path: Path) -> None:
    figure, panels = _panels(2)
    greys = iter(_GREYS)
    for mark, one in zip(_MARKS, result["codecs"], strict=True):
        colour = _OURS.get(one["name"]) or next(greys)
        for panel, way in zip(panels, ("encode", "decode"), strict=True):
            panel.plot(one[f"{way}_mb_s"], one["ratio"], mark, color=colour, markersize=9, label=one["name"])
    for panel, way in zip(panels, ("encode", "decode"), strict=True):
        panel.set(xscale="log", xlabel=f"{way}, MB/s of raw cache (log)")
        _plain_ticks(panel.xaxis, [one[f"{way}_mb_s"] for one in result["codecs"]])
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("raw size / stored size")
    panels[0].set_title(f"Codecs on {_name(result['case'])}, one thread", loc="left", fontsize=11)
    panels[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    _save(figure, path)


def _restore(lengths: Sequence[dict[str, Any]], path: Path) -> None:
    figure, (panel,) = _panels(1)
    tokens = [one["tokens"] for one in lengths]
    for name, field, colour, mark in (
        ("prefill", "prefill_seconds", _GREYS[1], "s"), ("restore", "seconds", _OURS["kvstore small"], "o")
    ):  # fmt: skip
        seconds = [one[field] for one in lengths]
        panel.plot(tokens, seconds, f"{mark}-", color=colour, markersize=7)
        panel.annotate(name, (tokens[-1], seconds[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    for one in lengths:
        middle = (one["prefill_seconds"] * one["seconds"]) ** 0.5
        panel.annotate(f"{_round(one['prefill_seconds'] / one['seconds'])} ×", (one["tokens"], middle), ha="center")
    panel.set(xscale="log", yscale="log", xlabel="tokens (log)", ylabel="seconds (log)", xlim=(220, 3000))
    panel.set_xticks(tokens, [f"{count:,}" for count in tokens])
    _plain_ticks(panel.yaxis, [one[field] for one in lengths for field in ("prefill_seconds", "seconds")])
    panel.minorticks_off()
    panel.grid(visible=True, alpha=0.3)
    panel.set_title("Restoring and prefilling, Gemma-3-270M on the CPU", loc="left", fontsize=11)
    _save(figure, path)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Numbers that are read at a glance, not powers: round ones that lie among the values."""
    low, high = min(values) * 0.7, max(values) * 1.4
    steps = (1, 2, 5) if high / low < _CROWDED else (1,)
    ticks = [step * 10.0**power for power in range(-3, 6) for step in steps if low <= step * 10.0**power <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(low, high)


def _round(ratio: float) -> str:
    """Two digits that count: more would be gone in the next run."""
    return f"{float(f'{ratio:.2g}'):,.0f}"


def _name(case: str) -> str:
    model, _, tokens = case.partition("-")
    return f"a cache of {model.capitalize()}-3-270M, {int(tokens):,} tokens"


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5 if count == 2 else 7, 3.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def _save(figure: Any, path: Path) -> None:
    # Without the date and the version the same figures give the same file.
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Measure, or read what was measured, and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="a document that python -m bench --json printed")
    given = parser.parse_args()
    if given.read:
        document = json.loads(given.read.read_text())
    else:
        document = {name: PARTS[name](Extent(given.rounds)) for name in ("restore", "codecs")}
    draw_all(document)


if __name__ == "__main__":
    main()

"""The targets, and what was measured held against them: pure functions of a run's document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.machine import NOISY_CORES

__all__ = ["Figure", "figures"]

MIB: Final = 2**20
_PLAIN: Final = ("gemma-2000", "qwen-8000")
_QUANTIZED: Final = ("qwen-8000-q8", "qwen-8000-q4")
_LARGE: Final = ("llama-8192",)
_HEAVY: Final = {
    "kvstore --help": ("mlx", "mlx_lm", "transformers", "sqlalchemy"),
    "kvstore ls": ("mlx_lm", "transformers"),
    "kvstore match --tokens": ("mlx_lm", "transformers"),
    "kvstore match --tokens --any-shape": ("mlx_lm", "transformers"),
}
"""What each command must not import; the index cannot be opened without SQLAlchemy."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One target.

    Attributes:
        where: The cache, or the part of the work.
        limit: Of ``value``, in ``unit``.
        at_least: Whether the limit is a floor; else it is a ceiling.
        value: What is judged; None where it was not measured.
        measured: What was measured, with its unit.
        baseline: What it is measured against, with its unit; empty where there is nothing.
        ratio: To the baseline: how many times faster or smaller where the target is such a one, else this to that.
        other_cores: Cores that other processes took meanwhile; None where the system does not tell.
    """

    where: str
    what: str
    limit: float
    at_least: bool = field(kw_only=True)
    unit: str = field(default="×", kw_only=True)
    value: float | None = field(default=None, kw_only=True)
    measured: str = field(default="", kw_only=True)
    baseline: str = field(default="", kw_only=True)
    ratio: float | None = field(default=None, kw_only=True)
    other_cores: float | None = field(default=None, kw_only=True)

    @property
    def target(self) -> str:
        """The limit in words."""
        if not self.limit:
            return "none"
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}".rstrip()

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def noisy(self) -> bool:
        """Whether others took so much meanwhile that the times do not count."""
        return self.other_cores is not None and self.other_cores > NOISY_CORES

    def document(self) -> dict[str, Any]:
        """The figure as JSON."""
        names = ("where", "what", "target", "value", "unit", "measured", "baseline", "ratio", "met", "other_cores")
        return {name: getattr(self, name) for name in names} | {"noisy": self.noisy}


Facts = Mapping[str, Any]


def figures(document: Facts) -> list[Figure]:
    """Every target; those of parts that the run left out have no value, and a quick run's small cache has none."""
    speed: Mapping[str, Facts] = document.get("speed") or {}
    found: list[Figure] = []
    for case in _PLAIN:
        found += _speed(case, speed.get(case))
    for case in _QUANTIZED:
        found += _quantized(case, speed.get(case))
    for case in _LARGE:
        found += _memory(case, speed.get(case))
    found += _overhead(document.get("overhead"))
    found += _small(document.get("small"))
    found += _start(document.get("start"))
    found += _match(document.get("match"))
    found += _conversation(document.get("conversation"))
    return found


def _speed(case: str, result: Facts | None) -> Iterator[Figure]:
    tasks = _Tasks(result)
    yield tasks.size(case, "stored size, small, to R1's", 0.86)
    if case == "gemma-2000":
        yield tasks.compression(case, "raw size to stored size, small", 1.48)
    yield tasks.faster(case, "put, small, faster than R1's save", 1.6, "put small", "r1 save")
    yield tasks.faster(case, "load, small, first read, faster than R1's", 2.0, "load small, first", "r1 load")
    yield tasks.faster(case, "load, small, later reads, faster than R1's", 2.6, "load small, later", "r1 load")
    yield tasks.slower(case, "load, fast, later reads, to mx.load's time", 1.8, "load fast, later", "raw load")
    yield tasks.lighter(case, "R1's peak memory in a load to ours", 1.6, "load small, later", "r1 load")


def _quantized(case: str, result: Facts | None) -> Iterator[Figure]:
    tasks = _Tasks(result)
    yield tasks.plain(case, "stored size, small, to plain zstd 3 of the same payloads", 1.0)
    yield tasks.size(case, "stored size, small, to plain zstd 3 of the whole cache at once", 1.0)
    if case.endswith("q4"):
        yield tasks.compression(case, "raw size to stored size, small", 1.2)


def _memory(case: str, result: Facts | None) -> Iterator[Figure]:
    tasks = _Tasks(result)
    for codec in ("small", "fast"):
        put, load = tasks.get(f"put {codec}"), tasks.get(f"load {codec}, later")
        yield _bytes(case, f"put, {codec}: peak memory to the cache's", 0.25, put, "peak_bytes", "raw_bytes")
        yield _bytes(case, f"put, {codec}: peak memory", 256, put, "peak_bytes", None)
        if load is not None:
            load = {**load, "beyond": load["peak_bytes"] - load["array_bytes"]}
        yield _bytes(case, f"load, {codec}: peak beyond the arrays to them", 0.15, load, "beyond", "array_bytes")
        yield _bytes(case, f"load, {codec}: peak beyond the arrays", 256, load, "beyond", None)


def _bytes(where: str, what: str, limit: float, facts: Facts | None, name: str, base: str | None) -> Figure:
    unit = "×" if base else "MiB"
    if facts is None:
        return Figure(where, what, limit, at_least=False, unit=unit)
    value, others = facts[name], facts["other_cores"]
    if base is None:
        return Figure(where, what, limit, at_least=False, unit=unit, value=value / MIB,
                      measured=f"{value / MIB:.1f} MiB", other_cores=others)  # fmt: skip
    return Figure(where, what, limit, at_least=False, value=value / facts[base], measured=_mb(value),
                  baseline=f"arrays {_mb(facts[base])}", ratio=value / facts[base], other_cores=others)  # fmt: skip


def _overhead(facts: Facts | None) -> Iterator[Figure]:
    where, what = "qwen-8000", "load: what surrounds the codec, share of the whole"
    if facts is None:
        yield Figure(where, what, 10, at_least=False, unit="%")
        return
    load, codec = facts["load_seconds"], facts["codec_seconds"]
    yield Figure(
        facts["case"], what, 10, at_least=False, unit="%", value=(load - codec) / load * 100, measured=_ms(load),
        baseline=f"codec {_ms(codec)}", ratio=load / codec, other_cores=facts["other_cores"],
    )  # fmt: skip


def _small(facts: Facts | None) -> Iterator[Figure]:
    where = "entries of one block" if facts is None else f"{facts['entries']:,.0f} entries of one block"
    for name, what, limit, side in (("put", "put, each", 12.0, "save"), ("load", "match and load, each", 4.0, "load")):
        if facts is None:
            yield Figure(where, what, limit, at_least=False, unit="ms")
            continue
        own, other = facts[f"{name}_seconds"], facts[f"r1_{side}_seconds"]
        yield Figure(
            where, what, limit, at_least=False, unit="ms", value=own * 1e3, measured=_ms(own),
            baseline=f"R1 {_ms(other)}", ratio=own / other, other_cores=facts["other_cores"],
        )  # fmt: skip


def _start(facts: Facts | None) -> Iterator[Figure]:
    for command, forbidden in _HEAVY.items():
        what = f"imports of {', '.join(forbidden)}"
        if facts is None or command not in facts["commands"]:
            yield Figure(command, what, 0, at_least=False, unit="")
            continue
        own, idle = facts["commands"][command], facts["commands"]["python -c pass"]
        yield Figure(
            command, what, 0, at_least=False, unit="", value=len(set(forbidden) & set(own["imports"])),
            measured=_ms(own["seconds"]), baseline=f"python -c pass {_ms(idle['seconds'])}",
            ratio=own["seconds"] / idle["seconds"], other_cores=own["other_cores"],
        )  # fmt: skip


def _match(facts: Facts | None) -> Iterator[Figure]:
    where = "match, 1,000,000 nodes"
    rows: tuple[tuple[str, str, float, str], ...] = (
        ("match_ms", "a prompt of 8,192 tokens", 2.0, "ms"),
        ("most_to_fewest", "the same, to 10,000 nodes", 1.5, "×"),
        ("bytes_per_node_beyond_ids", "index beyond the token ids, a node", 400, "bytes"),
        ("open_ms", "opening the index", 20, "ms"),
        ("chain_ns_per_token", "chain hashing, a token", 200, "ns"),
    )
    for name, what, limit, unit in rows:
        if facts is None:
            yield Figure(where, what, limit, at_least=False, unit=unit)
            continue
        fewest, most = facts["sizes"][0], facts["sizes"][-1]
        if name == "most_to_fewest":
            value = facts[name]["match_ms"]
            shown, baseline = f"{most['match_ms']:.2f} ms", f"10,000 nodes {fewest['match_ms']:.2f} ms"
        else:
            value = facts.get(name, most.get(name))
            shown = f"{value:.{0 if unit == 'bytes' else 2}f} {unit}"
            baseline = f"10,000 nodes {fewest[name]:.{0 if unit == 'bytes' else 2}f} {unit}" if name in fewest else ""
        yield Figure(
            where, what, limit, at_least=False, unit=unit, value=value, measured=shown, baseline=baseline,
            ratio=most[name] / fewest[name] if name in fewest else value if name == "most_to_fewest" else None,
            other_cores=facts.get("other_cores"),
        )  # fmt: skip


def _conversation(facts: Facts | None) -> Iterator[Figure]:
    turn, total = "worst turn: written to blocks with new tokens", "all turns: written to whole saves"
    if facts is None:
        yield Figure("conversation", turn, 1.05, at_least=False)
        yield Figure("conversation", total, 0.25, at_least=False)
        return
    for run in facts["runs"]:
        where = f"{run['model']}, {run['conversation']}"
        yield Figure(where, turn, facts["turn_limit"], at_least=False, value=run["worst_turn"],
                     measured=f"{run['worst_turn']:.3f} ×", ratio=run["worst_turn"])  # fmt: skip
        yield Figure(
            where, total, facts["total_limit"], at_least=False, value=run["total_ratio"], measured=_mb(run["total"]),
            baseline=f"whole saves {_mb(run['whole_saves'])}", ratio=run["total_ratio"],
        )  # fmt: skip


class _Tasks:
    """The tasks of one case, or of none."""

    def __init__(self, result: Facts | None) -> None:
        self._tasks: Mapping[str, Facts] = {} if result is None else result["tasks"]

    def get(self, name: str) -> Facts | None:
        return self._tasks.get(name)

    def size(self, where: str, what: str, limit: float) -> Figure:
        own, r1 = self.get("put small"), self.get("r1 save")
        if own is None or r1 is None:
            return Figure(where, what, limit, at_least=False)
        ratio = own["stored_bytes"] / r1["stored_bytes"]
        return Figure(where, what, limit, at_least=False, value=ratio, measured=_mb(own["stored_bytes"]),
                      baseline=f"R1 {_mb(r1['stored_bytes'])}", ratio=ratio)  # fmt: skip

    def plain(self, where: str, what: str, limit: float) -> Figure:
        own = self.get("put small")
        if own is None or "plain_bytes" not in own:
            return Figure(where, what, limit, at_least=False)
        ratio = own["stored_bytes"] / own["plain_bytes"]
        return Figure(where, what, limit, at_least=False, value=ratio, measured=_mb(own["stored_bytes"]),
                      baseline=f"zstd {_mb(own['plain_bytes'])}", ratio=ratio)  # fmt: skip

    def compression(self, where: str, what: str, limit: float) -> Figure:
        own = self.get("put small")
        if own is None:
            return Figure(where, what, limit, at_least=True)
        ratio = own["raw_bytes"] / own["stored_bytes"]
        return Figure(where, what, limit, at_least=True, value=ratio, measured=_mb(own["stored_bytes"]),
                      baseline=f"raw {_mb(own['raw_bytes'])}", ratio=ratio)  # fmt: skip

    def faster(self, where: str, what: str, limit: float, own: str, other: str) -> Figure:
        """How many times faster than the other."""
        return self._against(where, what, limit, own, other, at_least=True, name="seconds")

    def slower(self, where: str, what: str, limit: float, own: str, other: str) -> Figure:
        """How many times the other's time."""
        return self._against(where, what, limit, own, other, at_least=False, name="seconds")

    def lighter(self, where: str, what: str, limit: float, own: str, other: str) -> Figure:
        """How many times our memory the other takes."""
        return self._against(where, what, limit, own, other, at_least=True, name="peak_bytes")

    def _against(
        self, where: str, what: str, limit: float, own: str, other: str, *, at_least: bool, name: str
    ) -> Figure:
        mine, theirs = self.get(own), self.get(other)
        if mine is None or theirs is None:
            return Figure(where, what, limit, at_least=at_least)
        ratio = theirs[name] / mine[name] if at_least else mine[name] / theirs[name]
        show = _ms if name == "seconds" else _mb
        label = "R1" if other.startswith("r1") else "mx.load"
        return Figure(
            where, what, limit, at_least=at_least, value=ratio, measured=show(mine[name]),
            baseline=f"{label} {show(theirs[name])}", ratio=ratio, other_cores=_most(mine, theirs),
        )  # fmt: skip


def _most(*facts: Facts) -> float | None:
    told = [one["other_cores"] for one in facts if one["other_cores"] is not None]
    return max(told, default=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mb(count: float) -> str:
    return f"{count / 1e6:.2f} MB"

"""Writes docs/caches.md: which caches are stored and how, from proofs that have just been run.

::

    python -m scripts.caches_table

The same text is held against the file by the tests of families, so that it is never
older than what it says.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.families.proof import ClassFacts, Proof

__all__ = ["PATH", "render", "write"]

PATH: Final = Path(__file__).parents[1] / "docs" / "caches.md"
_HEAD: Final = """\
# Which caches are stored, and how they come back

Made by `python -m scripts.caches_table`; the tests hold it to what they see. Nothing in it is written by hand.

Each row was proved with a tiny model of random weights (mlx-lm {version}, CPU). It reads a prompt of {long} tokens,
longer than its windows ({window} tokens), and one of {short}; its cache is put at the prompt's end and again some
single tokens later; it then goes on greedily. From every entry other caches are restored, through the files of a
store, and read the same tokens. Their logits are equal *to the last bit*, {greedy} tokens on. Then the entry is cut
where it says that it can be, and proved again; one token before its lowest cut it must refuse. Entries of 1, 2 and 5
tokens are proved too. Each prompt is prefilled and put as a user would, and asked for again: a hit on all of it but the
last token, in every family.

*Cut points* say where an entry can be restored beside its own token count: *any*, *n back* (at most), or *none*. A full
ring that is taken one token back at the end of a prompt read in one piece is compared within rounding, since no run
that was never saved has its rows in the same places.

"""


def render(proofs: Sequence[Proof], not_run: Mapping[str, str]) -> str:
    """The document.

    Args:
        proofs: One for each family.
        not_run: Reasons by name of families that cannot run here.
    """
    from tests.families import proof as proving
    from tests.families.base import WINDOW

    head = _HEAD.format(
        version=metadata.version("mlx-lm"), long=proving.LONG, short=proving.SHORT, window=WINDOW,
        greedy=proving.GREEDY,
    )  # fmt: skip
    return "\n".join([head + "## By class", "", *_classes(proofs), "", "## By family", "", *_families(proofs), "",
                      "## Families that a CPU cannot run", "", *_not_run(not_run), ""])  # fmt: skip


def write(path: Path = PATH) -> None:
    """Run all proofs and write the document."""
    import mlx.core as mx

    from tests.families.proof import prove
    from tests.families.tables import FAMILIES, NOT_RUN

    mx.disable_compile()  # fused kernels are built by a compiler on a CPU, seconds for each
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        proofs = [prove(family, Path(folder)) for family in FAMILIES.values()]
    path.write_text(render(proofs, NOT_RUN))


def _classes(proofs: Sequence[Proof]) -> list[str]:
    """A row for each class, over all families that have it."""
    found: dict[str, list[tuple[Proof, ClassFacts]]] = {}
    for proof in proofs:
        for name, facts in proof.leaves.items():
            found.setdefault(name, []).append((proof, facts))
    rows = []
    for name, seen in sorted(found.items()):
        cuts = [
            sorted({_cut(p.counts[at], f.lowest[at]) for p, f in seen for at in part}, reverse=True)
            for part in ((2, 3), (0, 1))
        ]
        spans = sorted({facts.span for _, facts in seen})
        kinds = sorted({facts.kind for _, facts in seen})
        restores = sum(proof.restores for proof, _ in seen)
        rows.append([
            f"`{name}`", f"`{', '.join(kinds)}`", "yes", f"yes, {restores} times", *map(" or ".join, cuts),
            " and ".join(spans), str(len(seen)),
        ])  # fmt: skip
    columns = (
        "class", "kind", "put", "exact restore", "cut points, short", "longer than a window", "groups", "families",
    )  # fmt: skip
    return _table(columns, rows)


def _families(proofs: Sequence[Proof]) -> list[str]:
    rows = []
    for proof in sorted(proofs, key=lambda p: p.name.lower()):
        caches = ", ".join(f"{count} {name}" for name, count in proof.classes)
        groups = ", ".join(f"{kind} × {count}" for kind, count in proof.groups)
        cuts = [_cut(proof.counts[at], proof.lowest[at]) for at in (3, 0, 1)]
        exact = f"yes, {proof.restores} times"
        rows.append([proof.name, proof.dtype, caches, str(proof.layers), "yes", exact, *cuts, groups])
    columns = (
        "family", "dtype", "caches", "layers", "put", "exact restore", "cut points, short", "at a long prompt's end",
        "some tokens later", "groups (layers)",
    )  # fmt: skip
    return _table(columns, rows)


def _not_run(not_run: Mapping[str, str]) -> list[str]:
    return _table(["family", "reason"], [[name, reason] for name, reason in sorted(not_run.items())])


def _cut(count: int, lowest: int) -> str:
    if lowest <= 0:
        return "any"
    return f"{count - lowest} back" if lowest < count else "none"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    write()

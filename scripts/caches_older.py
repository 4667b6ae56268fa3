"""Writes docs/caches-older-mlx-lm.md: what of the caches' table holds with the older release, and where that ends.

Run it in the environment that has that release::

    .venvs/mlx-lm-0.31.3/bin/python -m scripts.caches_older

The same text is held against the file by tests/older_mlx_lm.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.families.proof import Proof
    from tests.older_mlx_lm.limits import Seen

__all__ = ["PATH", "render", "write"]

PATH: Final = Path(__file__).parents[1] / "docs" / "caches-older-mlx-lm.md"
_HEAD: Final = """\
# Caches with mlx-lm {version}

Made by `python -m scripts.caches_older` in the environment of `make test-older`; the tests hold it to what they see.
Nothing in it is written by hand. Proofs are those of [caches.md](caches.md), with a family for each make-up of caches
that this release has. Entries go from it to mlx-lm 0.32 and back: the same bits, and then the tokens that the
reading release computes itself.

"""
_LIMITS: Final = """
## What this release cannot do itself

A chunk (llama4) drops rows at its front by the length of its buffer, head room included. That length comes back, so a
restored cache goes on as the one that was never saved. Where that is wrong already for the cache that was never saved,
the entry is not restored with this release; with 0.32 it is. *As itself*: logits equal to the last bit to those of
the cache that was never saved.

"""


def render(
    proofs: Mapping[str, Proof], limits: Sequence[Seen], later: Sequence[str], broken: Mapping[str, str]
) -> str:
    """The document.

    Args:
        proofs: By family.
        limits: What was seen of each state.
        later: Families that this release does not have.
        broken: Families that it has and cannot run, with the reason.
    """
    parts = [
        _HEAD.format(version=metadata.version("mlx-lm")) + "## What goes on as if never saved", "",
        *_table(
            ("family", "caches", "put", "exact restore", "cut points, short"),
            [_family(*item) for item in proofs.items()],
        ),
        _LIMITS.rstrip("\n"), "",
        *_table(
            ("class", "state", "the release itself", "put, or write", "load with this release"),
            [[f"`{seen.cls}`", seen.state, seen.itself, seen.put, seen.load] for seen in limits],
        ),
        "", "## Models that it cannot run", "", *_table(("family", "reason"), list(broken.items())), "",
        "## Models that it does not have", "", ", ".join(later) + ".", "",
    ]  # fmt: skip
    return "\n".join(parts)


def write(path: Path = PATH) -> None:
    """Run everything and write the document."""
    import mlx.core as mx

    from tests.older_mlx_lm.limits import all_limits
    from tests.older_mlx_lm.test_families import BROKEN, LATER, proofs

    mx.disable_compile()  # fused kernels are built by a compiler on a CPU, seconds for each
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        path.write_text(render(proofs(Path(folder)), all_limits(Path(folder)), LATER, BROKEN))


def _family(name: str, proof: Proof) -> list[str]:
    caches = ", ".join(f"{count} {cls}" for cls, count in proof.classes)
    return [name, caches, "yes", "yes", "any" if proof.lowest[3] <= 0 else "none"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    write()

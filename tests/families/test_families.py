"""Every family of mlx_lm, proved; and the table of what was seen."""

from __future__ import annotations

import ast
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import pytest

from kvstore.runtime.probe import probe_config
from scripts.caches_table import PATH, render
from tests.families.proof import Proof, prove
from tests.families.tables import FAMILIES, NOT_RUN

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")


@pytest.fixture(scope="module")
def seen() -> dict[str, Proof]:
    """What was proved already, by family."""
    return {}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_goes_on_as_if_never_saved(models: Path, seen: dict[str, Proof], name: str) -> None:
    seen[name] = prove(FAMILIES[name], models)


def test_every_model_of_mlx_lm_is_proved_or_has_a_reason() -> None:
    names = set()
    for path in Path(mlx_lm.models.__path__[0]).glob("*.py"):
        body = ast.parse(path.read_text()).body
        bound = {node.name for node in body if isinstance(node, ast.ClassDef)}
        for node in body:
            if isinstance(node, ast.ImportFrom):
                bound |= {alias.asname or alias.name for alias in node.names}
        names |= {path.stem} if "Model" in bound else set()
    assert names == {family.name for family in FAMILIES.values()} | set(NOT_RUN)


def test_a_probe_evaluates_nothing() -> None:
    """Of no family a weight or a cache: an embedding alone would take 12 KiB."""
    for family in FAMILIES.values():
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        found = probe_config(family.config, family.options)
        assert found.layers, family.title
        assert mx.get_peak_memory() - before < 8 * 1024, family.title
        assert mx.get_active_memory() - before < 1024, family.title


def test_the_table_says_what_was_seen(models: Path, seen: dict[str, Proof]) -> None:
    """Where this alone is run it proves all of them first."""
    proofs = [seen.get(name) or prove(family, models) for name, family in FAMILIES.items()]
    assert PATH.read_text() == render(proofs, NOT_RUN), "python -m scripts.caches_table writes it anew"

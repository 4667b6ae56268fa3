"""A family for each make-up of caches that the older release has, proved as with the newer one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import phi3small

from kvstore.errors import KVStoreError
from kvstore.runtime.probe import probe_config
from scripts.caches_older import PATH, render
from tests.families.base import Family
from tests.families.proof import Proof, prove
from tests.families.tables import FAMILIES
from tests.older_mlx_lm.limits import Seen, all_limits
from tests.releases import CHUNK

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

MAKE_UPS = (
    "llama", "gemma3_text", "llama4", "deepseek_v32", "longcat_flash_ngram", "mamba2", "rwkv7", "qwen3_next",
    "kimi_linear", "falcon_h1", "recurrent_gemma", "baichuan_m1", "nemotron-nas", "qwen3, 4 bits", "qwen3, window",
    "qwen3, concatenated", "qwen3, thinned", "qwen3, thinned, 4 bits",
)  # fmt: skip
LATER = (
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v41", "gear", "gptj", "kimi_k3", "laguna", "mellum", "minimax_m3_vl",
    "mistral4", "muse_glimmer", "nanbeige", "olmo_hybrid", "plamo3", "prism_hadamard_qwen35", "spark2_5", "talkie",
)  # fmt: skip
"""Models that came with a later release."""
BROKEN = {"phi3small": "it writes outside its arrays: it puts out tokens by their ids on the axis of the batch"}
"""Models that this release has and cannot run, with the reason."""


def with_chunks(family: Family) -> Family:
    """The family with chunks that the older release can handle."""
    text = family.changes.get("text_config", {})
    if "attention_chunk_size" not in text:
        return family
    return replace(family, changes={**family.changes, "text_config": {**text, "attention_chunk_size": CHUNK}})


def proofs(root: Path) -> dict[str, Proof]:
    """All proofs, by family."""
    return {name: prove(with_chunks(FAMILIES[name]), root) for name in MAKE_UPS}


@pytest.fixture(scope="module")
def seen() -> dict[str, Proof]:
    """What was proved already, by family."""
    return {}


@pytest.mark.parametrize("name", MAKE_UPS)
def test_a_family_goes_on_as_if_never_saved(models: Path, seen: dict[str, Proof], name: str) -> None:
    seen[name] = prove(with_chunks(FAMILIES[name]), models)
    assert seen[name].restores >= 4


@pytest.mark.parametrize("name", LATER)
def test_a_model_of_a_later_release_is_refused(name: str) -> None:
    with pytest.raises(KVStoreError) as refused:
        probe_config(FAMILIES[name].config)
    assert refused.value.code == "MODEL_FOLDER_INVALID"


@pytest.fixture(scope="module")
def limits(models: Path) -> list[Seen]:
    """What was seen at the release's limits."""
    mx.disable_compile()  # a fixture of this scope comes before the one that spares fused kernels
    return all_limits(models)


def test_a_model_that_the_release_cannot_run_is_still_the_same() -> None:
    """It may crash the process, or not: whether it is mended is seen in its text."""
    assert "out[self._dummy_tokenizer_ids] =" in Path(phi3small.__file__).read_text()


def test_where_the_release_is_wrong_it_is_refused_or_goes_on_as_itself(limits: list[Seen]) -> None:
    wrong = [seen for seen in limits if seen.itself != "right"]
    assert len(wrong) == len(limits) - 2
    assert not [seen for seen in limits if "wrong" in (seen.put, seen.load)]
    # Whatever would go wrong at once is refused, here or there.
    for seen in wrong:
        assert seen.cls == "ArraysCache" or "refused" in seen.put + seen.load


def test_the_document_says_what_was_seen(models: Path, seen: dict[str, Proof], limits: list[Seen]) -> None:
    """Where this alone is run it proves all of them first."""
    found = seen if len(seen) == len(MAKE_UPS) else proofs(models)
    text = render(found, limits, LATER, BROKEN)
    assert PATH.read_text() == text, "python -m scripts.caches_older writes it anew, in this environment"

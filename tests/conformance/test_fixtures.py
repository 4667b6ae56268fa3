"""The fixtures: made again byte for byte, described by their schema, passed by us; a check that is gone is missed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.codes import CODES
from kvstore.conformance.context import parse_context
from kvstore.conformance.index import INDEX_MEDIA_TYPE, Case, load_index
from kvstore.conformance.runner import run_cases
from kvstore.format.digest import sha256_digest
from kvstore.format.filters import FILTERS
from kvstore.format.kinds import KINDS
from kvstore.format.manifest import PROFILES
from kvstore.format.object_header import _HEADERS
from kvstore.format.object_layout import _cached_layout
from kvstore.format.tensors import DTYPE_SIZES
from scripts import requirements
from scripts.fixtures.__main__ import differences
from scripts.fixtures.kinds import CACHES, uncovered
from scripts.fixtures.tree import FIXTURES, tree
from tests import schema_mutants
from tests.conformance.killing import Switch, rerouted
from tests.conformance.own import InProcess

INDEX = load_index(FIXTURES)
DOCUMENT: dict[str, Any] = json.loads((FIXTURES / "index.json").read_bytes())
VALIDATOR = schema_mutants.validator("fixture-index.v1")

READER_PHASES = ("container", "json", "schema", "semantic", "compat", "device", "integrity", "payload", "materialize")
LIVE_ONLY = {
    "MODEL_UNBOUND", "BINDING_MISMATCH", "STORED_SIZE_MISMATCH", "QUARANTINED", "MATERIALIZE_FAILED",
}  # fmt: skip
"""Codes of the reader's phases that need a live model or a store: no bundle leads to them."""


def test_they_are_what_the_generator_makes() -> None:
    assert differences(tree()) == []


def test_they_are_small() -> None:
    sizes = [path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()]
    assert sum(sizes) < 3 << 20


def test_the_index_obeys_its_schema() -> None:
    VALIDATOR.validate(DOCUMENT)
    assert DOCUMENT["media_type"] == INDEX_MEDIA_TYPE
    assert INDEX.unknown == 0
    used = {flag for case in DOCUMENT["cases"] for flag in case["flags"]}
    assert used == set(DOCUMENT["notes"])


def test_choices_are_few_and_the_text_leaves_them() -> None:
    """A case that takes both answers proves little, so it needs a sentence that says MAY."""
    choices = [case for case in DOCUMENT["cases"] if case["expect"]["verdict"] == "either"]
    assert 0 < len(choices) <= 0.03 * len(DOCUMENT["cases"])
    assert {case["id"] for case in choices} == {case["id"] for case in DOCUMENT["cases"] if "Choice" in case["flags"]}
    sentences = requirements.sentences()
    assert [case["id"] for case in choices if not any("MAY" in sentences[key] for key in case["requirements"])] == []


def test_every_keyword_of_the_schema_refuses_something() -> None:
    """A document with one case of each shape, and each keyword of the schema broken in it once."""
    wanted = ("kinds/kv", "json/bom", "write/kv", "canon/spaces", "prefix/count-1", "tar/plain", "prefix/negative",
              "tar/after-end")  # fmt: skip
    cases = [case for case in DOCUMENT["cases"] if case["id"] in wanted]
    document = {**DOCUMENT, "cases": [{**case, "flags": ["Bomb"], "features": ["tar"]} for case in cases]}
    assert len(cases) == len(wanted)
    made = list(schema_mutants.mutants("fixture-index.v1", document))
    for mutant in made:
        assert not VALIDATOR.is_valid(mutant.document), (mutant.pointer, mutant.keyword)
    killed = {(mutant.pointer, mutant.keyword) for mutant in made}
    every = schema_mutants.keywords(schema_mutants.load("fixture-index.v1"))
    left = [(p, k, v) for p, k, v in every if (p, k) not in killed]
    assert [item for item in left if (item[1], item[2]) not in (("type", "null"), ("const", 0))] == []


def test_files_are_those_that_the_index_names() -> None:
    named = {path: digest for case in DOCUMENT["cases"] for path, digest in case["files"].items()}
    for path, digest in named.items():
        assert sha256_digest((FIXTURES / path).read_bytes()) == digest, path
    there = {p.relative_to(FIXTURES).as_posix() for p in (FIXTURES / "cases").rglob("*") if p.is_file()}
    assert there == {path for path in named if path.startswith("cases/")}


GOLDEN = {
    "v1.0": "sha256:4b38ac939a9e161743fa79a2f3beb4249d69f8f71b01eb9273de0bad06de5def",
}
"""What each released version wrote, by its list; a new version adds a line, and no line ever changes."""


def test_what_a_release_wrote_is_never_changed() -> None:
    lists = {path.parent.name: sha256_digest(path.read_bytes()) for path in FIXTURES.glob("golden/*/entries.json")}
    assert lists == GOLDEN


def test_every_context_is_used_and_can_be_read() -> None:
    there = {path.relative_to(FIXTURES).as_posix() for path in (FIXTURES / "contexts").iterdir()}
    assert there == {case.context for case in INDEX.cases if case.context and case.context.startswith("contexts/")}
    for path in there:
        parse_context(json.loads((FIXTURES / path).read_bytes()))


def test_we_pass_them_all() -> None:
    outcomes = run_cases(INDEX, INDEX.cases, InProcess(), level=3)
    assert [(outcome.id, outcome.message) for outcome in outcomes if outcome.status != "passed"] == []


def accepted() -> Iterator[Any]:
    for case in INDEX.cases:
        if case.role == "reader" and case.expect["verdict"] == "accept" and not case.features:
            yield json.loads(INDEX.path(f"{case.input}/manifest.json").read_bytes()), INDEX.path(case.input)


def headers() -> Iterator[Any]:
    for _, folder in accepted():
        for path in (folder / "objects").glob("*.kvo"):
            data = path.read_bytes()
            if data[:4] == b"\x50\x2a\x4d\x18":
                yield json.loads(data[8 : 8 + int.from_bytes(data[4:8], "little")])


def test_everything_that_a_reader_must_know_is_accepted_somewhere() -> None:
    manifests = [manifest for manifest, _ in accepted()]
    assert uncovered() == set()
    assert {kind for cache in CACHES for kind in cache.kinds} == set(KINDS)
    text = json.dumps(manifests)
    assert [dtype for dtype in DTYPE_SIZES if f'"dtype": "{dtype}"' not in text] == []
    assert {manifest["profile"] for manifest in manifests} == set(PROFILES)
    assert {group["span"] for manifest in manifests for group in manifest["groups"]} == {"tokens", "rows", "state"}
    assert max(len(manifest["groups"]) for manifest in manifests) >= 3
    found = list(headers())
    assert {group["filter"] for header in found for group in header["groups"]} == set(FILTERS)
    assert {header["codec"] for header in found} == {"small", "fast"}


BY_CODE: dict[str, list[Case]] = defaultdict(list)
for _case in INDEX.cases:
    BY_CODE[_case.expect.get("code", "")].append(_case)
del BY_CODE[""]


def test_every_code_that_a_reader_can_give_has_a_case() -> None:
    wanted = {name for name, code in CODES.items() if code.phase in READER_PHASES} - LIVE_ONLY
    assert wanted - set(BY_CODE) == set()


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    with rerouted() as switch:
        yield switch


def passes(case: Case) -> bool:
    _cached_layout.cache_clear()
    _HEADERS.clear()
    (outcome,) = run_cases(INDEX, [case], InProcess(), level=3)
    return outcome.status == "passed"


def first_failing(code: str) -> str | None:
    """The first case that expects this code and does not get it. A bomb that goes off is not waited for."""
    return next((case.id for case in BY_CODE[code] if not passes(case)), None)


@pytest.mark.parametrize("code", BY_CODE)
def test_a_check_that_is_gone_is_missed(switch: Switch, code: str) -> None:
    """The kill matrix: without the checks of one code, at least one fixture fails."""
    assert first_failing(code) is None
    switch.off = code
    try:
        assert first_failing(code) is not None
    finally:
        switch.off = None


BACKSTOPS = {
    "format.groups._expected_size 1": "gives another code's refusal the one of the step",
    "format.json._check 3": "what is too deep to be written is too deep to be read back",
    "format.tensor_header._header_text 1": "what has no length has no brace at its beginning either",
    "format.tensor_header._header_text 2": "a header that goes beyond the end is no JSON either",
}
"""Checks that are not missed, since another one sees the same: by their place, and why they are there."""
GO_OFF = {"conformance.recipe._data 1", "format.object_layout.layout_of 1"}
"""Checks that only bombs meet, which take all memory without them: that much is known without waiting for it."""
BOMBS = {case["id"] for case in DOCUMENT["cases"] if "Bomb" in case["flags"]}


def test_each_check_that_is_gone_is_missed(switch: Switch) -> None:
    """The kill matrix, check by check: without any one of them at least one fixture fails. Bombs come last."""
    refused: dict[str, list[Case]] = defaultdict(list)
    for case in sorted(INDEX.cases, key=lambda case: case.id in BOMBS):
        switch.met.clear()
        assert passes(case)
        for check in switch.met:
            refused[check].append(case)
    assert len(refused) > 150
    kept = set()
    try:
        for check in refused.keys() - GO_OFF:
            switch.off_check = check
            if all(passes(case) for case in refused[check]):
                kept.add(check)
    finally:
        switch.off_check = None
    assert kept == set(BACKSTOPS)
    assert {case.id for check in GO_OFF for case in refused[check]} <= BOMBS

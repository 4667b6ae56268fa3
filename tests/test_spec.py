"""SPEC.md is held to the code: ids, tables, examples, and the digests of the worked example."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema
import pytest

from kvstore import errors, limits
from kvstore.codes import CODES, PHASES
from kvstore.format import configs, kinds, model, prefix
from kvstore.format.bundle import BUNDLE_MEDIA_TYPE, parse_bundle_layout
from kvstore.format.digest import tagged_digest
from kvstore.format.fields import Fields
from kvstore.format.json import canonical_bytes, number_text
from kvstore.format.kinds import KINDS
from kvstore.format.layers import leaves, parse_layers
from kvstore.format.layout import LAYOUT_MEDIA_TYPE, parse_layout
from kvstore.format.manifest import MANIFEST_MEDIA_TYPE, parse_manifest
from kvstore.format.object_header import MEDIA_TYPE as OBJECT_MEDIA_TYPE
from kvstore.format.object_header import parse_header
from kvstore.format.receipt import RECEIPT_MEDIA_TYPE, parse_receipt
from kvstore.format.rules import check_layers
from kvstore.format.tensors import DTYPE_SIZES
from kvstore.runtime import identity
from kvstore.store.config import STORE_MEDIA_TYPE
from scripts import spec_example
from tests import schema_mutants

TEXT = spec_example.SPEC.read_text()
KEYWORDS = re.compile(r"\b(MUST|REQUIRED|SHALL|SHOULD|RECOMMENDED|MAY|OPTIONAL)\b")
ID = re.compile(r"\bKV-([A-Z]{3})-(\d{3})\b")
REQUIREMENT = re.compile(r"- (KV-[A-Z]{3}-\d{3}) (\S.*)")


class Line(NamedTuple):
    """A line of prose, and whether it stands in a non-normative section."""

    number: int
    text: str
    normative: bool


class Fence(NamedTuple):
    """A fenced block with its info string."""

    number: int
    info: str
    text: str


def scan() -> tuple[list[Line], list[Fence]]:
    lines: list[Line] = []
    fences: list[Fence] = []
    marks: list[bool] = []
    block: list[str] | None = None
    info, begin = "", 0
    for number, text in enumerate(TEXT.splitlines(), 1):
        if text.startswith("```"):
            if block is None:
                info, begin, block = text[3:], number, []
            else:
                fences.append(Fence(begin, info, "\n".join(block)))
                block = None
        elif block is not None:
            block.append(text)
        else:
            if heading := re.match(r"(#+) ", text):
                depth = len(heading[1])
                marks = [*[*marks, *([False] * depth)][: depth - 1], "(non-normative)" in text]
            lines.append(Line(number, text, not any(marks)))
    assert block is None
    return lines, fences


LINES, FENCES = scan()
REQUIREMENTS = {m[1]: m[2] for line in LINES if (m := REQUIREMENT.fullmatch(line.text))}


def test_ids_are_unique_and_begin_their_lines() -> None:
    found = [m[1] for line in LINES if (m := REQUIREMENT.fullmatch(line.text))]
    assert len(found) == len(set(found)) > 150
    assert [line for line in LINES if line.text.startswith("- KV-") and not REQUIREMENT.fullmatch(line.text)] == []


def test_a_line_with_a_key_word_has_an_id_or_is_not_normative() -> None:
    wrong = [
        line.number for line in LINES
        if KEYWORDS.search(line.text) and line.normative and not REQUIREMENT.fullmatch(line.text)
    ]  # fmt: skip
    assert wrong == []


def test_non_normative_sections_require_nothing() -> None:
    assert [line.number for line in LINES if not line.normative and KEYWORDS.search(line.text)] == []


def test_a_requirement_is_one_sentence() -> None:
    wrong = [key for key, text in REQUIREMENTS.items() if not text.endswith(".") or re.search(r"[.!?] [A-Z]", text)]
    assert wrong == []


def test_ids_that_are_referred_to_exist() -> None:
    named = {m[0] for line in LINES for m in ID.finditer(line.text)}
    assert named - set(REQUIREMENTS) == set()


def test_codes_in_the_text_exist() -> None:
    named = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`", TEXT))
    assert named - set(CODES) - set(limits.__all__) == set()


def table(header: str) -> list[list[str]]:
    """The rows of the table with this header line."""
    lines = TEXT.splitlines()
    start = lines.index(header) + 2
    rows = []
    for text in lines[start:]:
        if not text.startswith("|"):
            break
        rows.append([cell.strip() for cell in text.strip("|").split("|")])
    return rows


def test_error_codes() -> None:
    """After a change of the codes: python -m scripts.spec_example."""
    expected = [
        [f"`{name}`", code.phase, code.error, str(getattr(errors, code.error).exit_code), code.sentence]
        for name, code in CODES.items()
    ]
    rows = table("| code | phase | level | class | exit | requirement | meaning |")
    assert [[row[0], row[1], row[3], row[4], row[6]] for row in rows] == expected
    for name, phase, level, _, _, requirement, _ in rows:
        if requirement == "–":
            assert (level, phase in ("capture", "profile", "store", "usage")) == ("–", True), name
        else:
            sentence = REQUIREMENTS[requirement]
            assert name in sentence
            words = set(KEYWORDS.findall(sentence))
            assert level == ("must" if words & {"MUST", "REQUIRED"} or not words else "should"), name
    assert {code.phase for code in CODES.values()} == set(PHASES)


def test_limits() -> None:
    rows = table("| limit | value | of what | code |")
    assert {row[0].strip("`"): int(row[1]) for row in rows} == {name: getattr(limits, name) for name in limits.__all__}
    assert [row for row in rows if row[3] != "–" and row[3].strip("`") not in CODES] == []


READING_PHASES = {
    "1": {"container"}, "2": {"json"}, "3": {"schema"}, "4": {"semantic"}, "5": {"compat"}, "6": {"compat"},
    "7": {"device"}, "8": {"integrity"}, "9": {"payload", "integrity"}, "10": {"payload"},
    "11": {"payload", "integrity"}, "12": {"materialize"},
}  # fmt: skip
ELSEWHERE = {
    "BUNDLE_LAYOUT_INVALID", "BUNDLE_VERSION_UNSUPPORTED", "PATH_UNSAFE", "MANIFEST_DIGEST_MISMATCH",
    "LAYOUT_DIGEST_MISMATCH", "ST_OFFSETS_INVALID", "ST_NOT_CANONICAL",
}  # fmt: skip
"""Codes of the reader's phases that no step of the reading of an entry in a store can end with."""


def test_reading_order() -> None:
    rows = table("| step | what | phase | codes | action on refusal |")
    assert [row[0] for row in rows] == [str(n) for n in range(1, 13)]
    named: list[str] = []
    for row in rows:
        codes = re.findall(r"`([A-Z0-9_]+)`", row[3])
        assert {CODES[code].phase for code in codes} <= READING_PHASES[row[0]], row
        named += codes
    assert len(named) == len(set(named))
    outside = set(PHASES) - set().union(*READING_PHASES.values())
    assert set(named) == {name for name, code in CODES.items() if code.phase not in outside} - ELSEWHERE


def test_kinds() -> None:
    rows = table("| kind | scalars | roles | axes of each tensor | span |")
    assert [row[0].strip("`") for row in rows] == list(KINDS)
    for row in rows[:-2]:
        kind = KINDS[row[0].strip("`")]
        assert row[4] == kind.span
        for cell, names in ((row[1], kind.scalars), (row[2], kind.roles)):
            if "as `" not in cell:
                assert set(re.findall("`([a-z_.]+)`", cell)) == set(names), row


def test_lists_of_names() -> None:
    rows = {row[0]: set(re.findall("`([^`]+)`", row[1])) for row in table("| list | names |")}
    assert rows["inert config keys"] == configs.INERT_CONFIG_KEYS
    assert rows["inert tokenizer keys"] == configs.INERT_TOKENIZER_KEYS
    assert rows["inert processor keys"] == configs.INERT_PROCESSOR_KEYS
    assert rows["vocabulary files"] == {*identity._VOCABULARY, *identity._TOKENIZER_EXTRA}
    numbers = dict.fromkeys(rows["geometry"], 1)
    assert {name for name, _ in configs.geometry(numbers)} == rows["geometry"]


def test_values_in_requirements() -> None:
    """Numbers, enumerations and grammars that stand in the text and in the code."""
    def ticks(key: str) -> list[str]:
        return re.findall("`([^`]+)`", REQUIREMENTS[key])

    assert ticks("KV-LAY-004")[:-1] == list(DTYPE_SIZES)
    assert set(re.findall(r"\d+", REQUIREMENTS["KV-LAY-021"])) >= {
        str(n) for n in (*kinds.QUANTIZATION_BITS, *kinds.QUANTIZATION_GROUPS)
    }
    assert set(ticks("KV-LAY-043")) >= {*kinds.BIASED_MODES, *kinds.UNBIASED_MODES}
    assert ticks("KV-PFX-012") == [prefix.DEFAULT_NAMESPACE]
    assert ticks("KV-MOD-007") == [f'H("{model.MODEL_TAG}", M)']
    assert ticks("KV-MOD-018") == [f'H("{model.CONFIG_TAG}", C)']


def test_tags() -> None:
    """Each tag of the table is one that the code hashes with, seen by what it gives."""
    tags = set(re.findall(r"`(kvstore [a-z ]+ v1)", "\n".join(row[0] for row in table("| tag | what is hashed |"))))
    source = "".join(path.read_text() for path in sorted((spec_example.SPEC.parent / "kvstore").rglob("*.py")))
    assert tags == set(re.findall(r'"(kvstore [a-z ]+ v1)"', source))
    assert tagged_digest(sorted(tags)[0]) != tagged_digest(sorted(tags)[1])


def test_media_types_and_schemas() -> None:
    rows = {row[0].strip("`"): row[2].strip("`") for row in table("| media type | document | schema |")}
    assert set(rows) == {
        MANIFEST_MEDIA_TYPE, RECEIPT_MEDIA_TYPE, LAYOUT_MEDIA_TYPE, OBJECT_MEDIA_TYPE, BUNDLE_MEDIA_TYPE,
        STORE_MEDIA_TYPE,
    }  # fmt: skip
    named = {name for name in rows.values() if name != "–"}
    assert named <= {path.name for path in schema_mutants.SCHEMAS.iterdir()}


def read_object(data: bytes) -> Any:
    return parse_header(memoryview(b"\x50\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data))


PARSERS: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    MANIFEST_MEDIA_TYPE: ("manifest.v1", parse_manifest),
    RECEIPT_MEDIA_TYPE: ("receipt.v1", parse_receipt),
    LAYOUT_MEDIA_TYPE: ("layout.v1", parse_layout),
    OBJECT_MEDIA_TYPE: ("object.v1", read_object),
    BUNDLE_MEDIA_TYPE: ("bundle-layout.v1", parse_bundle_layout),
}
JSON_FENCES = [fence for fence in FENCES if fence.info != "text"]


@pytest.mark.parametrize("fence", JSON_FENCES, ids=[f"line {fence.number}" for fence in JSON_FENCES])
def test_examples_are_valid(fence: Fence) -> None:
    """A whole document by its parser and its schema, a part of one by the schema's definition and the rules."""
    info = re.fullmatch(r"json mediatype=([a-z0-9.+/-]+)(?:#(/\$defs/[a-z-]+))?", fence.info)
    assert info, f"line {fence.number}: a fence is text or names its media type"
    value = json.loads(fence.text)
    schema, parse = PARSERS[info[1]]
    root = schema_mutants.load(schema)
    if info[2] is None:
        jsonschema.Draft202012Validator(root).validate(value)
        parse(canonical_bytes(value))
        return
    jsonschema.Draft202012Validator({"$ref": f"#{info[2]}", "$defs": root["$defs"]}).validate(value)
    (record,) = parse_layers(Fields({"layers": [value]}, "", None), "layers")
    check_layers((record,), max(leaf.offset or 0 for _, leaf in leaves((record,))))


def test_every_kind_has_an_example() -> None:
    shown = {fence.info.rpartition("#/$defs/layer-")[2] for fence in JSON_FENCES if "#" in fence.info}
    assert shown == set(KINDS)


def test_the_worked_example_is_real() -> None:
    assert set(re.findall(r"<!-- example ([a-z-]+) -->", TEXT)) == set(spec_example.blocks())
    shown = [match[0] for match in spec_example.BLOCK.finditer(TEXT)]
    assert [spec_example.rewritten(block) for block in shown] == shown, "run python -m scripts.spec_example"


def test_the_worked_example_is_the_one_described() -> None:
    """What the text says in words about the example, done here once more."""
    config = configs.canonical_config(
        {"head_dim": 2, "model_type": "toy", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    )
    assert model.config_digest(config) == spec_example.manifest().model.config
    assert spec_example.IDS.tolist() == [1, 450, 70000]


def test_number_texts() -> None:
    rows = table("| double | text |")
    assert {row[0]: number_text(float(row[0].replace("−", "-"))) for row in rows} == {
        row[0]: row[1].strip("`") for row in rows
    }



def test_tables_that_are_made_are_as_they_would_be_made() -> None:
    """After a change: python -m scripts.spec_example."""
    assert spec_example.rewritten(TEXT) == TEXT
    areas = {row[0].strip("`"): int(row[2]) for row in table("| area | sections | requirements |")}
    assert areas == Counter(key[:6] for key in REQUIREMENTS)


ORDER = (
    "Scope", "Conventions", "Model", "JSON profile", "Media types and references", "Manifest", "Payload",
    "Prefix chain", "Receipt", "Reading order", "Compatibility", "Store", "Limits", "Versions and extension",
    "Error codes", "Security and privacy", "Conformance", "Appendix A Test vectors", "Appendix B Requirement index",
    "Appendix C Retired ids", "Appendix D Rationale",
)  # fmt: skip
"""How specifications of this kind are ordered, so that their readers find what they look for."""


def test_sections_stand_in_the_usual_order() -> None:
    found = [m[1] for m in re.finditer(r"^## (?:\d+ )?(.*?)(?: \(non-normative\))?$", TEXT, re.MULTILINE)]
    assert [name for name in found if name in ORDER] == list(ORDER)


def test_every_section_has_a_number_in_order() -> None:
    numbers = [int(m[1]) for m in re.finditer(r"^## (\d+) ", TEXT, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_sections_that_are_referred_to_exist() -> None:
    headings = set(re.findall(r"^#{2,3} ([\d.]+) ", TEXT, re.MULTILINE))
    assert set(re.findall(r"section ([\d.]*\d)", TEXT)) <= headings
    fields = table("| field | content | section |")
    assert {row[2] for row in fields} <= headings

"""The schema of an object's header refuses what the parser refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvstore.format.json import canonical_bytes
from kvstore.format.object import encode_object
from kvstore.format.object_header import parse_header
from kvstore.format.tensors import Payload
from tests import schema_mutants
from tests.samples import refusal

SCHEMA = "object.v1"
VALIDATOR = schema_mutants.validator(SCHEMA)
PAYLOAD = Payload.make({
    "0.k": ("BF16", np.arange(96, dtype="<u2").reshape(1, 2, 12, 4)),
    "0.v": ("BF16", np.arange(96, dtype="<u2").reshape(1, 2, 12, 4)),
    "1.slot.0": ("F32", np.arange(6, dtype="<u4").reshape(1, 6)),
})  # fmt: skip


def document(codec: Any = "small") -> dict[str, Any]:
    encoded = encode_object(PAYLOAD, digest=PAYLOAD.digest(), namespace="default", codec=codec)
    data = b"".join(bytes(part) for part in encoded.parts)
    value: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[4:8], "little")])
    return value


@pytest.mark.parametrize("codec", ["small", "fast"])
def test_headers_as_written_are_valid(codec: str) -> None:
    VALIDATOR.validate(document(codec))


MUTANTS = list(schema_mutants.mutants(SCHEMA, document()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.keyword} {m.pointer}" for m in MUTANTS])
def test_schema_and_parser_refuse_each_mutant(mutant: schema_mutants.Mutant) -> None:
    assert not VALIDATOR.is_valid(mutant.document)
    text = canonical_bytes(mutant.document)
    frame = b"\x50\x2a\x4d\x18" + len(text).to_bytes(4, "little") + text
    error = refusal(lambda: parse_header(memoryview(frame)))
    assert error is not None
    assert error.phase in ("payload", "schema")


def test_no_keyword_of_the_schema_is_without_a_mutant() -> None:
    killed = {(m.pointer, m.keyword) for m in MUTANTS}
    left = [(k, v) for p, k, v in schema_mutants.keywords(schema_mutants.load(SCHEMA)) if (p, k) not in killed]
    assert left == [("maxItems", 65536)] * 2

"""The model and tokenizer records: what they refuse, and what their digests depend on."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from kvstore.errors import KVStoreError
from kvstore.format.digest import sha256_digest
from kvstore.format.model import (
    FileRecord,
    ModelRecord,
    TokenizerRecord,
    config_digest,
    parse_model,
    parse_tokenizer,
)
from tests.samples import MODEL, TOKENIZER
from tests.strategies import models

FILE = {"digest": sha256_digest(b"x"), "name": "x", "size": 1}


def edited(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(MODEL.to_json())), **changes}


def adapter(**changes: Any) -> dict[str, Any]:
    value = edited()
    value["adapter"].update(changes)
    return value


def files(*names: str) -> list[dict[str, Any]]:
    return [{**FILE, "name": name} for name in names]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no weights": (edited(weights=[]), "FIELD_RANGE"),
    "weights unsorted": (edited(weights=files("b", "a")), "FIELD_FORMAT"),
    "weights twice": (edited(weights=files("a", "a")), "FIELD_FORMAT"),
    "code unsorted": (edited(code=files("b", "a")), "FIELD_FORMAT"),
    "name with control character": (edited(code=files("a\x1f")), "FIELD_FORMAT"),
    "name with backslash": (edited(code=files("a\\b")), "FIELD_FORMAT"),
    "empty name": (edited(code=files("")), "FIELD_FORMAT"),
    "long name": (edited(code=files("a" * 256)), "FIELD_RANGE"),
    "too many files": (edited(code=[FILE] * 65537), "LIMIT_EXCEEDED"),
    "negative size": (edited(code=[{**FILE, "size": -1}]), "FIELD_RANGE"),
    "shard": (edited(shard={"rank": 0, "size": 2}), "SHARD_UNSUPPORTED"),
    "model type": (edited(model_type="a/b"), "FIELD_FORMAT"),
    "geometry name": (edited(geometry={"a b": 1}), "FIELD_FORMAT"),
    "geometry long name": (edited(geometry={"a" * 256: 1}), "FIELD_RANGE"),
    "geometry text": (edited(geometry={"a": "1"}), "FIELD_TYPE"),
    "geometry negative": (edited(geometry={"a": -1}), "FIELD_RANGE"),
    "geometry array": (edited(geometry=[1]), "FIELD_TYPE"),
    "adapter without files": (adapter(files=[]), "FIELD_RANGE"),
    "adapter scale number": (adapter(scale=1), "FIELD_TYPE"),
    "adapter scale words": (adapter(scale="ten"), "FIELD_FORMAT"),
    "adapter scale NaN": (adapter(scale="NaN"), "FIELD_FORMAT"),
    "adapter scale not shortest": (adapter(scale="0.50"), "FIELD_FORMAT"),
    "adapter scale integral fraction": (adapter(scale="1.0"), "FIELD_FORMAT"),
    "adapter scale minus zero": (adapter(scale="-0"), "FIELD_FORMAT"),
    "adapter scale too precise": (adapter(scale="0.1000000000000000000001"), "FIELD_FORMAT"),
    "adapter scale overflow": (adapter(scale="1e+999"), "FIELD_FORMAT"),
    "adapter scale exponent": (adapter(scale="1e+2"), "FIELD_FORMAT"),
}


@pytest.mark.parametrize(("value", "code"), REFUSED.values(), ids=REFUSED)
def test_refused(value: dict[str, Any], code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_model(value)
    assert caught.value.code == code
    assert caught.value.phase == "schema"


@given(models())
def test_round_trip(model: ModelRecord) -> None:
    assert parse_model(model.to_json()) == model


@pytest.mark.parametrize("record", [TOKENIZER, TokenizerRecord(sha256_digest(b""), None)])
def test_tokenizer_round_trip(record: TokenizerRecord) -> None:
    assert parse_tokenizer(record.to_json()) == record


def test_names_are_sorted_by_code_point() -> None:
    # UTF-16 order would put U+1F600 before U+FF5E.
    assert [f.name for f in parse_model(edited(code=files("～", "😀"))).code] == ["～", "😀"]
    with pytest.raises(KVStoreError):
        parse_model(edited(code=files("😀", "～")))


def test_digest_by_hand() -> None:
    tag = b"kvstore model v1"
    document = json.dumps(MODEL.to_json(), sort_keys=True, separators=(",", ":")).encode()
    data = b"".join(struct.pack("<Q", len(part)) + part for part in (tag, document))
    assert MODEL.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_config_digest_by_hand() -> None:
    tag, document = b"kvstore config v1", b'{"a":1,"b":"0.5"}'
    data = b"".join(struct.pack("<Q", len(part)) + part for part in (tag, document))
    assert config_digest({"b": "0.5", "a": 1}) == f"sha256:{hashlib.sha256(data).hexdigest()}"


CHANGES: dict[str, Callable[[ModelRecord], ModelRecord]] = {
    "weights": lambda m: replace(m, weights=(FileRecord("model.safetensors", 1000, sha256_digest(b"other")),)),
    "weight file's name": lambda m: replace(m, weights=(replace(m.weights[0], name="other.safetensors"),)),
    "config": lambda m: replace(m, config=sha256_digest(b"other")),
    "code": lambda m: replace(m, code=()),
    "no adapter": lambda m: replace(m, adapter=None),
    "adapter's scale": lambda m: replace(m, adapter=m.adapter and replace(m.adapter, scale="1")),
    "adapter's bytes": lambda m: replace(m, adapter=m.adapter and replace(m.adapter, files=m.code)),
    "processor": lambda m: replace(m, processor=None),
    "geometry": lambda m: replace(m, geometry=()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_digest_depends_on_everything(change: Callable[[ModelRecord], ModelRecord]) -> None:
    assert change(MODEL).digest != MODEL.digest

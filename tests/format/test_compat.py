"""The pure decision: every field that may not differ, and the order in which differences decide."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from kvstore.errors import IncompatibleError
from kvstore.format.compat import Wanted, mismatches, require_compatible, signature, signature_digest
from kvstore.format.digest import sha256_digest
from kvstore.format.layers import LayerRecord, TensorRecord
from kvstore.format.manifest import Manifest
from kvstore.format.model import FileRecord, TokenizerRecord
from tests.samples import COUNT, LEAVES, MODEL, TOKENIZER, layer, manifest
from tests.strategies import manifests

ROOT = Path(__file__).parents[2]
OTHER = sha256_digest(b"other")
LOSSLESS = manifest(method=None)
FITS = Wanted(MODEL, TOKENIZER, signature=signature(LOSSLESS.layers))
ADAPTER = MODEL.adapter
assert ADAPTER is not None


@given(manifests())
def test_an_entry_fits_its_own_model(made: Manifest) -> None:
    method = None if made.method is None else made.method.name
    wanted = Wanted(made.model, made.tokenizer, made.namespace, "strict", signature(made.layers), method)
    assert mismatches(made, wanted) == []
    require_compatible(made, wanted)


def weights(name: str = "model.safetensors", size: int = 1000, digest: Any = None) -> tuple[FileRecord, ...]:
    return (FileRecord(name, size, digest or MODEL.weights[0].digest),)


def resigned(path: str, **changes: Any) -> dict[str, Any]:
    assert FITS.signature is not None
    return {**FITS.signature, path: {**FITS.signature[path], **changes}}


WANTED: dict[str, tuple[Wanted, str, str]] = {
    "one byte of the weights": (replace(FITS, model=replace(MODEL, weights=weights(digest=OTHER))),
                                "MODEL_MISMATCH", "model.weights[model.safetensors]"),
    "another weight file": (replace(FITS, model=replace(MODEL, weights=weights("other.safetensors"))),
                            "MODEL_MISMATCH", "model.weights[model.safetensors]"),
    "a forged file size": (replace(FITS, model=replace(MODEL, weights=weights(size=1001))),
                           "MODEL_MISMATCH", "model.digest"),
    "config": (replace(FITS, model=replace(MODEL, config=OTHER)), "MODEL_MISMATCH", "model.config"),
    "model type": (replace(FITS, model=replace(MODEL, model_type="toy2")), "MODEL_MISMATCH", "model.model_type"),
    "geometry": (replace(FITS, model=replace(MODEL, geometry=(("head_dim", 16), ("layers", 9)))),
                 "MODEL_MISMATCH", "model.geometry.head_dim"),
    "custom code": (replace(FITS, model=replace(MODEL, code=())), "MODEL_MISMATCH", "model.code[toy.py]"),
    "processor": (replace(FITS, model=replace(MODEL, processor=None)), "MODEL_MISMATCH", "model.processor"),
    "no adapter": (replace(FITS, model=replace(MODEL, adapter=None)), "ADAPTER_MISMATCH", "model.adapter"),
    "the adapter's scale": (replace(FITS, model=replace(MODEL, adapter=replace(ADAPTER, scale="1"))),
                            "ADAPTER_MISMATCH", "model.adapter"),
    "tokenizer": (replace(FITS, tokenizer=TokenizerRecord(OTHER, TOKENIZER.chat_template)),
                  "TOKENIZER_MISMATCH", "tokenizer.digest"),
    "template": (replace(FITS, tokenizer=TokenizerRecord(TOKENIZER.digest, OTHER)),
                 "TOKENIZER_MISMATCH", "tokenizer.chat_template"),
    "no template": (replace(FITS, tokenizer=TokenizerRecord(TOKENIZER.digest, None)),
                    "TOKENIZER_MISMATCH", "tokenizer.chat_template"),
    "namespace": (replace(FITS, namespace="other"), "NAMESPACE_MISMATCH", "namespace"),
    "kind": (replace(FITS, signature=resigned("0", kind="kv-concatenated")), "SIGNATURE_MISMATCH", "layers[0].kind"),
    "bits": (replace(FITS, signature=resigned("1", bits=8)), "SIGNATURE_MISMATCH", "layers[1].bits"),
    "group size": (replace(FITS, signature=resigned("1", group_size=64)), "SIGNATURE_MISMATCH",
                   "layers[1].group_size"),
    "window": (replace(FITS, signature=resigned("2", max_size=1024)), "SIGNATURE_MISMATCH", "layers[2].max_size"),
    "kept rows": (replace(FITS, signature=resigned("2", keep=0)), "SIGNATURE_MISMATCH", "layers[2].keep"),
    "dtype": (replace(FITS, signature=resigned("0", **{"tensors.k": {"dtype": "F16", "shape": [1, 2, None, 8]}})),
              "SIGNATURE_MISMATCH", "layers[0].tensors.k"),
    "a layer less": (replace(FITS, signature={k: v for k, v in (FITS.signature or {}).items() if k != "10"}),
                     "LAYER_COUNT_MISMATCH", "layers"),
    "a list instead of a layer": (
        replace(FITS, signature={("0.0" if k == "0" else k): v for k, v in (FITS.signature or {}).items()}),
        "LAYER_COUNT_MISMATCH", "layers[0.0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "code", "field"), WANTED.values(), ids=WANTED)
def test_refused(wanted: Wanted, code: str, field: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        require_compatible(LOSSLESS, wanted, names={"entry": "a", "model": "b"})
    error = caught.value
    assert (error.code, error.phase, error.detail["field"]) == (code, "compat", field)
    assert field in error.message
    assert error.detail["names"] == {"entry": "a", "model": "b"}
    first = error.detail["mismatches"][0]
    assert first == {"code": code, "field": field, "expected": error.detail["expected"],
                     "found": error.detail["found"]}  # fmt: skip
    assert first["expected"] != first["found"]


def test_the_template_may_differ_where_only_tokens_count() -> None:
    wanted = replace(FITS, tokenizer=TokenizerRecord(TOKENIZER.digest, OTHER), policy="tokens")
    require_compatible(LOSSLESS, wanted)
    with pytest.raises(IncompatibleError):
        require_compatible(LOSSLESS, replace(wanted, tokenizer=TokenizerRecord(OTHER, OTHER)))


METHODS: dict[str, tuple[str | None, str | None, bool]] = {
    "lossless, nothing asked": (None, None, True),
    "lossless, method allowed": (None, "drop/half", True),
    "lossy, nothing asked": ("drop/half", None, False),
    "lossy, another asked": ("drop/half", "drop/most", False),
    "lossy, this one asked": ("drop/half", "drop/half", True),
}


@pytest.mark.parametrize(("have", "want", "fits"), METHODS.values(), ids=METHODS)
def test_method(have: str | None, want: str | None, fits: bool) -> None:
    entry = manifest() if have else LOSSLESS
    assert [m.code for m in mismatches(entry, replace(FITS, method=want))] == ([] if fits else ["METHOD_MISMATCH"])


def test_all_mismatches_are_listed_the_gravest_first() -> None:
    wanted = Wanted(
        replace(MODEL, config=OTHER, adapter=None), TokenizerRecord(OTHER, None), "other",
        signature=resigned("3", chunk_size=1),
    )  # fmt: skip
    assert [m.field for m in mismatches(manifest(), wanted)] == [
        "model.config", "model.adapter", "tokenizer.digest", "tokenizer.chat_template", "namespace", "method",
        "layers[3].chunk_size",
    ]  # fmt: skip


def test_order_does_not_depend_on_the_hash_seed() -> None:
    """The first mismatch decides the error, so it must be the same in every process."""
    program = (
        "from tests.format.test_compat import *\n"
        "want = {k: {**v, 'kind': 'x'} for k, v in FITS.signature.items()}\n"
        "print([m.field for m in mismatches(LOSSLESS, replace(FITS, signature=want))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": str(seed)}, check=True,
            capture_output=True, text=True, cwd=ROOT,
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert outputs == {str([f"layers[{path}].kind" for path in FITS.signature or ()]) + "\n"}


def test_without_a_live_model_the_signature_is_not_compared() -> None:
    require_compatible(LOSSLESS, replace(FITS, signature=None))


def shorter(record: LayerRecord, by: int) -> LayerRecord:
    tensors = {
        role: TensorRecord(t.dtype, tuple(n - by if i == record.axis(role) else n for i, n in enumerate(t.shape)))
        for role, t in record.tensors.items()
    }
    return LayerRecord(record.kind, {**record.scalars, "offset": COUNT - by}, tensors)


@pytest.mark.parametrize("kind", [k for k in LEAVES if k != "state"])
def test_signature_does_not_depend_on_the_number_of_tokens(kind: str) -> None:
    assert signature((shorter(LEAVES[kind], 7),)) == signature((LEAVES[kind],))


SAME: dict[str, Callable[[], LayerRecord]] = {
    "ring index": lambda: LayerRecord(
        "kv-rotating", {**LEAVES["kv-rotating"].scalars, "ring_index": 512}, LEAVES["kv-rotating"].tensors
    ),
    "chunk start": lambda: LayerRecord(
        "kv-chunked", {**LEAVES["kv-chunked"].scalars, "start": 0}, LEAVES["kv-chunked"].tensors
    ),
    "padding": lambda: LayerRecord("state", {**LEAVES["state"].scalars, "left_padding": None}, LEAVES["state"].tensors),
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_state_is_not_in_the_signature(make: Callable[[], LayerRecord]) -> None:
    record = make()
    assert signature((record,)) == signature((LEAVES[record.kind],))


def test_signature_digest_by_hand() -> None:
    value = signature((layer("kv", {"k": ("F16", [1, 2, 9, 4]), "v": ("F16", [1, 2, 9, 4])}, offset=9),))
    tensor = {"dtype": "F16", "shape": [1, 2, None, 4]}
    document = {"layers": {"0": {"kind": "kv", "tensors.k": tensor, "tensors.v": tensor}}, "method": None}
    text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    data = b"".join(struct.pack("<Q", len(part)) + part for part in (b"kvstore signature v1", text))
    assert signature_digest(value, None) == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert signature_digest(value, "drop/half") != signature_digest(value, None)

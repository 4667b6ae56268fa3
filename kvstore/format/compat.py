"""The pure decision: may this entry be restored into that model?

Step 5 of the reading order, from parsed records alone. Every mismatch is listed with
the field and both sides; the first one, in the order below, decides the error.

A *signature* is what a runtime must agree on to hold the state: per leaf layer its
kind, the scalars that shape it (bits, window, chunk …), and each tensor's dtype and
shape, open where the position decides. Equal signatures mean that the receiving model's
own cache objects can hold the entry.

A lossy method may leave fewer rows than tokens. Whoever names the method accepts that,
so under a method a sparse layer counts as the dense one that it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from kvstore.errors import fail, require_choice
from kvstore.format.digest import Digest, tagged_digest
from kvstore.format.json import Json, canonical_bytes
from kvstore.format.layers import LayerRecord, leaves
from kvstore.format.manifest import Manifest
from kvstore.format.model import ModelRecord, TokenizerRecord

__all__ = [
    "Mismatch", "Policy", "Signature", "Wanted", "entry_signature_digest", "mismatches", "require_compatible",
    "signature", "signature_digest",
]  # fmt: skip

Policy = Literal["strict", "tokens"]
"""``strict``: tokenizer and chat template must match. ``tokens``: the template may differ."""

Signature = Mapping[str, Mapping[str, Json]]

_SIGNATURE_TAG: Final = "kvstore signature v1"
_DENSE: Final = {"kv-sparse": "kv", "kv-sparse-quantized": "kv-quantized"}
_SHAPING: Final = ("bits", "chunk_size", "group_size", "keep", "max_size", "mode", "slots")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field on which the two sides differ: what the receiver wants, and what the entry has."""

    code: str
    field: str
    expected: Json
    found: Json

    def to_json(self) -> dict[str, Json]:
        """The JSON object."""
        return {"code": self.code, "expected": self.expected, "field": self.field, "found": self.found}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The receiving side.

    Attributes:
        signature: Of the receiving model's cache, or None where no live model is at hand.
        method: Name of the lossy method that is acceptable, or None for lossless entries only.
    """

    model: ModelRecord
    tokenizer: TokenizerRecord
    namespace: str = "default"
    policy: Policy = "strict"
    signature: Signature | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        """Refuse a policy that is none. Raises USAGE."""
        require_choice("policy", self.policy, get_args(Policy))


def signature(layers: tuple[LayerRecord, ...]) -> dict[str, dict[str, Json]]:
    """The signature of these layers, by leaf path."""
    return {path: _leaf_signature(leaf) for path, leaf in leaves(layers)}


def signature_digest(value: Signature, method: str | None) -> Digest:
    """One digest for a signature and a method, as the index stores it."""
    layers = value if method is None else _dense(value)
    document: Json = {"layers": {path: dict(leaf) for path, leaf in layers.items()}, "method": method}
    return tagged_digest(_SIGNATURE_TAG, canonical_bytes(document))


def entry_signature_digest(manifest: Manifest) -> Digest:
    """That of an entry."""
    return signature_digest(signature(manifest.layers), manifest.method_name)


def mismatches(manifest: Manifest, wanted: Wanted) -> list[Mismatch]:
    """Every mismatch, gravest first; empty where the entry fits."""
    found = [*_model(wanted.model, manifest.model), *_tokenizer(manifest.tokenizer, wanted)]
    if manifest.namespace != wanted.namespace:
        found.append(Mismatch("NAMESPACE_MISMATCH", "namespace", wanted.namespace, manifest.namespace))
    method = manifest.method_name
    if method is not None and method != wanted.method:
        found.append(Mismatch("METHOD_MISMATCH", "method", wanted.method, method))
    if wanted.signature is not None:
        sides = wanted.signature, signature(manifest.layers)
        found.extend(_signatures(*sides) if method is None else _signatures(*(_dense(side) for side in sides)))
    return found


def require_compatible(manifest: Manifest, wanted: Wanted, *, names: Mapping[str, Json] | None = None) -> None:
    """Raise for the first mismatch; all of them are in the error's detail.

    Args:
        names: Names of both sides (repository, revision, path), shown beside the digests.

    Raises:
        IncompatibleError: with the first mismatch's code.
    """
    found = mismatches(manifest, wanted)
    if not found:
        return
    first = found[0]
    raise fail(
        first.code, f"entry does not fit the receiving model: {first.field}", expected=first.expected,
        found=first.found, fix=_FIXES.get(first.code, "Recompute the cache with this model, or load the entry's own."),
        field=first.field, mismatches=[m.to_json() for m in found], names=dict(names or {}),
    )  # fmt: skip


_FIXES: Final = {
    "TOKENIZER_MISMATCH": "If your token ids do not depend on the chat template, load with policy 'tokens'.",
    "METHOD_MISMATCH": "Name the method to accept entries that it made.",
    "NAMESPACE_MISMATCH": "Open the namespace that the entry was put into.",
    "SIGNATURE_MISMATCH": "Ask for the entry's own KV quantization and window, or recompute the cache.",
}


def _model(want: ModelRecord, have: ModelRecord) -> Iterator[Mismatch]:
    """Field by field, readable ones first, so that a message names what a person can check."""
    if want.digest == have.digest:
        return
    pairs: list[tuple[str, str, Json, Json]] = [
        ("MODEL_MISMATCH", "model.model_type", want.model_type, have.model_type)
    ]
    wanted, found = dict(want.geometry), dict(have.geometry)
    pairs.extend(
        ("MODEL_MISMATCH", f"model.geometry.{name}", wanted.get(name), found.get(name))
        for name in sorted(wanted.keys() | found.keys())
    )
    pairs.append(("MODEL_MISMATCH", "model.config", want.config, have.config))
    a, b = want.to_json(), have.to_json()
    pairs.append(("ADAPTER_MISMATCH", "model.adapter", a["adapter"], b["adapter"]))
    for name in ("weights", "code", "processor"):
        pairs.extend(("MODEL_MISMATCH", f"model.{name}{at}", x, y) for at, x, y in _differences(a[name], b[name]))
    differing = [Mismatch(*pair) for pair in pairs if pair[2] != pair[3]]
    # Other digests never pass, even where nothing that is compared by name differs (a forged file size).
    yield from differing or [Mismatch("MODEL_MISMATCH", "model.digest", want.digest, have.digest)]


def _differences(want: Json, have: Json) -> Iterator[tuple[str, Json, Json]]:
    """File lists by name, so that one changed file is named alone."""
    if not (isinstance(want, list) and isinstance(have, list)):
        yield "", want, have
        return
    left = {str(f["name"]): f["digest"] for f in want if isinstance(f, dict)}
    right = {str(f["name"]): f["digest"] for f in have if isinstance(f, dict)}
    for name in sorted(left.keys() | right.keys()):
        yield f"[{name}]", left.get(name), right.get(name)


def _tokenizer(have: TokenizerRecord, wanted: Wanted) -> Iterator[Mismatch]:
    want = wanted.tokenizer
    if want.digest != have.digest:
        yield Mismatch("TOKENIZER_MISMATCH", "tokenizer.digest", want.digest, have.digest)
    if wanted.policy == "strict" and want.chat_template != have.chat_template:
        yield Mismatch("TOKENIZER_MISMATCH", "tokenizer.chat_template", want.chat_template, have.chat_template)


def _signatures(want: Signature, have: Signature) -> Iterator[Mismatch]:
    if len(want) != len(have):
        yield Mismatch("LAYER_COUNT_MISMATCH", "layers", len(want), len(have))
    for path in dict.fromkeys([*want, *have]):
        if want.get(path) != have.get(path):
            yield from _leaf_mismatch(path, want.get(path), have.get(path))


def _leaf_mismatch(
    path: str, want: Mapping[str, Json] | None, have: Mapping[str, Json] | None
) -> Iterator[Mismatch]:
    if want is None or have is None:
        yield Mismatch("LAYER_COUNT_MISMATCH", f"layers[{path}]", _plain(want), _plain(have))
        return
    for name in sorted(want.keys() | have.keys()):
        if want.get(name) != have.get(name):
            yield Mismatch("SIGNATURE_MISMATCH", f"layers[{path}].{name}", want.get(name), have.get(name))


def _dense(value: Signature) -> dict[str, dict[str, Json]]:
    """The signature with each sparse layer as the dense one of the same tensors."""
    return {
        path: {
            name: _DENSE.get(str(item), item) if name == "kind" else item
            for name, item in leaf.items()
            if not (name == "tensors.positions" and leaf["kind"] in _DENSE)
        }
        for path, leaf in value.items()
    }


def _plain(leaf: Mapping[str, Json] | None) -> Json:
    return None if leaf is None else dict(leaf)


def _leaf_signature(leaf: LayerRecord) -> dict[str, Json]:
    result: dict[str, Json] = {"kind": leaf.kind}
    for name in _SHAPING:
        if name in leaf.scalars:
            value = leaf.scalars[name]
            result[name] = list(value) if isinstance(value, tuple) else value
    for role, record in leaf.tensors.items():
        shape = leaf.open_shape(role)
        if shape is not None:
            result[f"tensors.{role}"] = {"dtype": record.dtype, "shape": list(shape)}
    return result

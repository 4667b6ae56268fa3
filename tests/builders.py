"""Small whole entries for the store: manifest, payloads and token ids, made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvstore.format.compat import signature, signature_digest
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.groups import Group, PayloadRef, Segment, plan_groups, segments
from kvstore.format.layers import LayerRecord, TensorRecord, leaves
from kvstore.format.manifest import Manifest, MethodRecord, PrefixRecord, token_spec
from kvstore.format.model import FileRecord, ModelRecord, TokenizerRecord
from kvstore.format.prefix import TokenIds, prefix_digest
from kvstore.format.tensors import Payload, UintArray
from tests.strategies import canonical_leaf

_MOST = 4096
"""Tokens of the longest entry that can be made."""


@dataclass(frozen=True)
class MadeEntry:
    """One entry; ``source`` counts what it was asked for."""

    manifest: Manifest
    token_ids: TokenIds
    payloads: dict[Digest, Payload]
    asked: list[Digest]

    @property
    def entry_id(self) -> Digest:
        return self.manifest.entry_id

    @cached_property
    def signature(self) -> Digest:
        method = None if self.manifest.method is None else self.manifest.method.name
        return signature_digest(signature(self.manifest.layers), method)

    @property
    def source(self) -> Callable[[PayloadRef], Payload]:
        return self._give

    def _give(self, ref: PayloadRef) -> Payload:
        self.asked.append(ref.digest)
        return self.payloads[ref.digest]


def make_model(name: str = "toy") -> ModelRecord:
    return ModelRecord(
        model_type="toy", weights=(FileRecord("model.safetensors", 1000, sha256_digest(name.encode())),),
        config=sha256_digest(b"config"), code=(), adapter=None, processor=None, geometry=(("layers", 2),),
    )  # fmt: skip


def make_entry(
    seed: int,
    tokens: int = 300,
    layers: int = 2,
    *,
    namespace: str = "default",
    model: str = "toy",
    window: int = 128,
    heads: int = 2,
    head_dim: int = 16,
    method: str | None = None,
) -> MadeEntry:
    """An entry with ``kv`` layers and, at every second place, ``kv-rotating`` ones.

    Rows and token ids depend on the seed and the position alone: of one seed, a longer entry extends a shorter one
    and shares its full blocks.
    """
    ids = np.random.default_rng((seed, 0xFFFF)).integers(0, 1 << 18, _MOST, dtype=np.uint32)[:tokens]
    records, arrays = [], {}
    for layer in range(layers):
        rotating = layer % 2 == 1
        rows = min(tokens, window) if rotating else tokens
        names = {}
        for number, side in enumerate("kv"):
            bits = np.random.default_rng((seed, layer, number)).integers(
                0, 1 << 16, (_MOST, heads, head_dim), dtype=np.uint16
            )
            arrays[f"{layer}.{side}"] = bits[tokens - rows : tokens].transpose(1, 0, 2)[None]
            names[side] = TensorRecord("BF16", (1, heads, rows, head_dim))
        scalars = {"offset": tokens, "max_size": window, "keep": 0, "ring_index": rows} if rotating else {
            "offset": tokens
        }  # fmt: skip
        records.append(canonical_leaf(LayerRecord("kv-rotating" if rotating else "kv", scalars, names)))
    made = MadeEntry(_manifest(tuple(records), ids, namespace, make_model(model)), ids, {}, [])
    groups = _groups(made, arrays)
    manifest = replace(made.manifest, groups=groups, method=None if method is None else MethodRecord.make(method, "{}"))
    return replace(made, manifest=manifest)


def _manifest(layers: tuple[LayerRecord, ...], ids: TokenIds, namespace: str, model: ModelRecord) -> Manifest:
    spec = token_spec(ids.size)
    payload = Payload.make({spec.name: (spec.dtype, ids)})
    prefix = PrefixRecord(
        ids.size, prefix_digest(model.digest, namespace, ids), PayloadRef(payload.digest(), payload.size)
    )
    tokenizer = TokenizerRecord(sha256_digest(b"tokenizer"), None)
    return Manifest(model, tokenizer, namespace, prefix, layers, ())


def _groups(made: MadeEntry, arrays: dict[str, UintArray]) -> tuple[Group, ...]:
    by_path = dict(leaves(made.manifest.layers))
    result = []
    for span, paths in plan_groups(made.manifest.layers):
        refs = []
        for segment in segments(span):
            payload = Payload.make({
                f"{path}.{role}": (record.dtype, _cut(arrays[f"{path}.{role}"], segment))
                for path in paths for role, record in by_path[path].tensors.items()
            })  # fmt: skip
            refs.append(PayloadRef(payload.digest(), payload.size))
            made.payloads[refs[-1].digest] = payload
        result.append(Group(span, paths, tuple(refs)))
    return tuple(result)


def _cut(array: UintArray, segment: Segment) -> UintArray:
    return array[:, :, segment.first : segment.first + segment.rows]

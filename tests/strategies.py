"""Hypothesis strategies: valid records of every kind, from which tests derive broken ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.groups import Group, PayloadRef, plan_groups, segment_tensors, segments
from kvstore.format.json import Json, number_text
from kvstore.format.kinds import LOSSY_KINDS
from kvstore.format.layers import LayerRecord, TensorRecord, leaves
from kvstore.format.manifest import Manifest, MethodRecord, PrefixRecord, token_spec
from kvstore.format.model import AdapterRecord, FileRecord, ModelRecord, TokenizerRecord
from kvstore.format.prefix import MediaItem
from kvstore.format.tensors import DTYPE_SIZES, payload_size
from kvstore.limits import MAX_EXACT_INT

FLOATS = ("BF16", "F16", "F32")
LEAF_KINDS = (
    "kv", "kv-quantized", "kv-rotating", "kv-chunked", "kv-concatenated", "kv-sparse", "kv-sparse-quantized",
    "kv-compressed", "state",
)  # fmt: skip

digests: st.SearchStrategy[Digest] = st.integers(0, 2**32).map(lambda n: sha256_digest(n.to_bytes(8, "little")))
counts = st.sampled_from((1, 2, 255, 256, 257, 511, 512, 513, 1000)) | st.integers(1, 1200)
words = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")
names = st.from_regex(r"\A[a-z0-9][a-z0-9._/-]{0,20}\Z")
namespaces = st.just("default") | st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z")
texts = st.text(st.characters(codec="utf-8"), max_size=20)
keys = st.text(st.characters(max_codepoint=127), max_size=12)
integers = st.integers(-MAX_EXACT_INT, MAX_EXACT_INT)
scales = st.one_of(st.integers(0, 64), st.floats(allow_nan=False, allow_infinity=False)).map(number_text)

json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | integers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
"""Documents within the JSON profile."""


def rows(heads: int, count: int, width: int, dtype: str) -> TensorRecord:
    return TensorRecord(dtype, (1, heads, count, width))


@st.composite
def _plain(draw: Any, count: int) -> dict[str, TensorRecord]:
    heads, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(FLOATS))
    return {side: rows(heads, count, draw(st.sampled_from((1, 3, 4, 64))), dtype) for side in "kv"}


@st.composite
def _packed(draw: Any, count: int) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    bits, group = draw(st.sampled_from((2, 3, 4, 5, 6, 8))), draw(st.sampled_from((16, 32, 64, 128)))
    mode = draw(st.sampled_from(("affine", "mxfp4", "mxfp8", "nvfp4")))
    heads, dtype = draw(st.integers(1, 4)), "U8" if mode != "affine" else draw(st.sampled_from(FLOATS))
    tensors = {}
    for side in "kv":
        groups = 2 * draw(st.integers(1, 2))
        tensors[f"{side}.words"] = rows(heads, count, groups * group * bits // 32, "U32")
        for part in ("scales", "biases") if mode == "affine" else ("scales",):
            tensors[f"{side}.{part}"] = rows(heads, count, groups, dtype)
    return {"bits": bits, "group_size": group, "mode": mode}, tensors


@st.composite
def _positions(draw: Any, tensors: dict[str, TensorRecord]) -> dict[str, TensorRecord]:
    heads, count = next(iter(tensors.values())).shape[1:3]
    shape = draw(st.sampled_from((None, (1, count), (heads, count))))
    return tensors if shape is None else {**tensors, "positions": TensorRecord("I32", shape)}


@st.composite
def _rotating(draw: Any, count: int) -> LayerRecord:
    size = draw(st.integers(2, 600))
    keep = draw(st.integers(0, min(size - 1, 4)))
    stored = min(count, size)
    if stored == size < count and size - 1 > keep and draw(st.booleans()):
        stored -= 1  # a full ring that was cut back by one token
    ring = stored
    if stored == size < count and draw(st.booleans()):
        ring = draw(st.integers(keep, stored - 1))
    scalars = {"offset": count, "max_size": size, "keep": keep, "ring_index": ring}
    return LayerRecord("kv-rotating", scalars, draw(_plain(stored)))


@st.composite
def _chunked(draw: Any, count: int) -> LayerRecord:
    start = draw(st.integers(0, count - 1))
    scalars = {"offset": count, "chunk_size": draw(st.integers(1, 600)), "start": start}
    return LayerRecord("kv-chunked", scalars, draw(_plain(count - start)))


@st.composite
def _state(draw: Any, count: int) -> LayerRecord:
    slots = draw(st.integers(1, 12))
    present = draw(st.sets(st.integers(0, slots - 1), min_size=1))
    tensors = {}
    for slot in sorted(present):
        shape = (1, *draw(st.lists(st.integers(0, 5), max_size=4)))
        tensors[f"slot.{slot}"] = TensorRecord(draw(st.sampled_from(sorted(DTYPE_SIZES))), shape)
    one = st.none() | st.integers(-3, count).map(lambda n: (n,))
    return LayerRecord("state", {"slots": slots, "left_padding": draw(one), "lengths": draw(one)}, tensors)


@st.composite
def _sparse(draw: Any, count: int) -> LayerRecord:
    kept = draw(st.integers(1, count))
    return LayerRecord("kv-sparse", {"offset": count}, draw(_positions(draw(_plain(kept)))))


@st.composite
def _sparse_quantized(draw: Any, count: int) -> LayerRecord:
    scalars, tensors = draw(_packed(draw(st.integers(1, count))))
    return LayerRecord("kv-sparse-quantized", {"offset": count, **scalars}, draw(_positions(tensors)))


@st.composite
def _kv(draw: Any, count: int) -> LayerRecord:
    return LayerRecord("kv", {"offset": count}, draw(_plain(count)))


@st.composite
def _quantized(draw: Any, count: int) -> LayerRecord:
    scalars, tensors = draw(_packed(count))
    return LayerRecord("kv-quantized", {"offset": count, **scalars}, tensors)


@st.composite
def _concatenated(draw: Any, count: int) -> LayerRecord:
    extra = draw(st.integers(0, 3))
    return LayerRecord("kv-concatenated", {"offset": count}, draw(_plain(count + extra)))


@st.composite
def _compressed(draw: Any, count: int) -> LayerRecord:
    size, group, dtype = draw(st.integers(1, 300)), draw(st.integers(1, 9)), draw(st.sampled_from(FLOATS))
    extents = {"window": min(count, size)}
    if draw(st.booleans()):
        extents |= {"pending.kv": count % group, "pending.gate": count % group} if group > 1 else {}
        extents |= dict.fromkeys(draw(st.sampled_from((("compressed",), ("compressed", "index")))), count // group)
    tensors = {
        role: TensorRecord(dtype, (1, extent, 4)) for role, extent in extents.items()
        if extent or role not in ("compressed", "index")
    }  # fmt: skip
    return LayerRecord("kv-compressed", {"offset": count, "max_size": size}, tensors)


_BY_KIND: dict[str, Callable[[int], st.SearchStrategy[LayerRecord]]] = {
    "kv": _kv, "kv-quantized": _quantized, "kv-rotating": _rotating, "kv-chunked": _chunked,
    "kv-concatenated": _concatenated, "kv-sparse": _sparse, "kv-sparse-quantized": _sparse_quantized,
    "kv-compressed": _compressed, "state": _state,
}  # fmt: skip


def leaf(kind: str, count: int) -> st.SearchStrategy[LayerRecord]:
    """A written layer of ``kind`` after ``count`` tokens."""
    return _BY_KIND[kind](count).map(canonical_leaf)


def unwritten(record: LayerRecord) -> LayerRecord:
    """The same layer before its first token."""
    zero = {name: 0 for name in ("offset", "ring_index", "start") if name in record.scalars}
    return LayerRecord(record.kind, {**record.scalars, **zero}, {})


def canonical_leaf(record: LayerRecord) -> LayerRecord:
    """Scalars and tensors in the order in which a parser gives them back."""
    order = sorted(record.tensors, key=lambda role: (len(role), role) if record.kind == "state" else (0, role))
    return LayerRecord(
        record.kind, {name: record.scalars[name] for name in sorted(record.scalars)},
        {role: record.tensors[role] for role in order}, record.children,
    )  # fmt: skip


@st.composite
def layer_lists(draw: Any, count: int, kinds: tuple[str, ...] = LEAF_KINDS) -> tuple[LayerRecord, ...]:
    """Layers of one entry, some of them lists or never written, at least one of them written."""
    some = st.sampled_from(kinds).flatmap(lambda kind: leaf(kind, count))
    nodes = st.recursive(
        some | some.map(unwritten),
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda c: LayerRecord("list", {}, {}, tuple(c))),
        max_leaves=3,
    )
    layers = draw(st.lists(nodes, max_size=4))
    layers.insert(draw(st.integers(0, len(layers))), draw(some))
    return tuple(layers)


def payload_ref(size: int, seed: object = None) -> PayloadRef:
    """A reference whose digest is made up."""
    return PayloadRef(sha256_digest(f"{size} {seed}".encode()), size)


def groups_of(layers: tuple[LayerRecord, ...]) -> tuple[Group, ...]:
    """The groups that these layers must have, with made-up digests."""
    by_path = dict(leaves(layers))
    result = []
    for span, paths in plan_groups(layers):
        sizes = [(s, payload_size(segment_tensors(paths, by_path, s))) for s in segments(span)]
        result.append(Group(span, paths, tuple(payload_ref(size, (paths[0], s.first)) for s, size in sizes)))
    return tuple(result)


@st.composite
def files(draw: Any, minimum: int) -> tuple[FileRecord, ...]:
    found = draw(st.sets(st.from_regex(r"\A[^\x00-\x1f\\\ud800-\udfff]{1,20}\Z"), min_size=minimum, max_size=3))
    return tuple(FileRecord(name, draw(st.integers(0, MAX_EXACT_INT)), draw(digests)) for name in sorted(found))


@st.composite
def models(draw: Any) -> ModelRecord:
    adapters = st.builds(AdapterRecord, words, files(1), digests, scales)
    geometry = draw(st.dictionaries(words, st.integers(0, MAX_EXACT_INT), max_size=4))
    return ModelRecord(
        model_type=draw(words), weights=draw(files(1)), config=draw(digests), code=draw(files(0)),
        adapter=draw(st.none() | adapters), processor=draw(st.none() | digests),
        geometry=tuple(sorted(geometry.items())),
    )  # fmt: skip


@st.composite
def media_items(draw: Any, count: int) -> tuple[MediaItem, ...]:
    items, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = at + draw(st.integers(0, 300))
        length = draw(st.integers(1, 300))
        if start + length > count:
            break
        items.append(MediaItem(start, length, draw(st.sampled_from(("image", "audio"))), draw(digests), draw(digests)))
        at = start + length
    return tuple(items)


@st.composite
def manifests(draw: Any, kinds: tuple[str, ...] = LEAF_KINDS) -> Manifest:
    """A valid manifest. Its digests are made up, its sizes are right."""
    count = draw(counts)
    layers = draw(layer_lists(count, kinds))
    sparse = any(leaf.kind in LOSSY_KINDS for _, leaf in leaves(layers))
    methods = st.builds(MethodRecord.make, names, texts)
    continuation = draw(st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9_]{0,9}\Z"), integers | texts, max_size=3))
    return Manifest(
        model=draw(models()),
        tokenizer=TokenizerRecord(draw(digests), draw(st.none() | digests)),
        namespace=draw(namespaces),
        prefix=PrefixRecord(
            count, draw(digests), payload_ref(payload_size([token_spec(count)])), draw(media_items(count))
        ),
        layers=layers,
        groups=groups_of(layers),
        method=draw(methods if sparse else st.none() | methods),
        continuation=tuple(sorted(continuation.items())),
    )

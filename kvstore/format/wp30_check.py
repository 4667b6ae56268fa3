"""What must agree in a ``wp30-cache-2`` file, and with its receiver, before a byte of its arrays is read.

The format's own reader compares the manifest with a model and a prefix, if it is given
them. It never compares the manifest's layers with the list of layers, or either with
the arrays; here everything that is said twice must be the same both times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import KVStoreError, fail
from kvstore.format.layers import TensorRecord
from kvstore.format.wp30 import (
    PARTS,
    SCHEMA,
    LayerLine,
    Wp30Layer,
    Wp30Manifest,
    dtype_text,
    prefix_token_hash,
)

__all__ = ["Receiver", "check_compatible", "check_consistent", "check_token_ids", "tensor_names"]

_LOST: Final = (
    "RotatingKVCache", "ChunkedKVCache", "ConcatenateKVCache", "BatchKVCache", "BatchRotatingKVCache", "ArraysCache",
    "MambaCache", "CacheList",
)  # fmt: skip
"""Classes of mlx_lm that have more state than keys and values, which such a file cannot hold."""
_HASHES: Final = {
    "config_hash": "MODEL_MISMATCH", "tokenizer_hash": "TOKENIZER_MISMATCH", "chat_template_hash": "TOKENIZER_MISMATCH",
    "model_revision": "MODEL_MISMATCH",
}  # fmt: skip
_GEOMETRY: Final = ("num_layers", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class Receiver:
    """A receiving model, in the format's own terms; hashes as whoever computed them gave them.

    Attributes:
        hashes: ``config_hash``, ``tokenizer_hash``, ``chat_template_hash``, ``model_revision``; None where only the
            geometry is known, and then none of them is compared.
    """

    num_layers: int
    num_kv_heads: int | None
    head_dim: int | None
    hashes: Mapping[str, Any] | None = None
    model_repo_id: str | None = None


def check_compatible(
    manifest: Wp30Manifest, receiver: Receiver | None, *, prefix_hash: str | None = None
) -> None:
    """The format's own check, in its order: schema, hashes and revision, geometry, prefix. Null equals null.

    Args:
        receiver: The receiving model, or None to compare with none.
        prefix_hash: Hash of the prefix that the caller expects, or None to expect none.

    Raises:
        UnsupportedError: MEDIA_TYPE_UNKNOWN.
        IncompatibleError: MODEL_MISMATCH, TOKENIZER_MISMATCH, PREFIX_NOT_MATCHED.
    """
    fields = manifest.fields
    if fields.get("schema_version") != SCHEMA:
        raise fail("MEDIA_TYPE_UNKNOWN", "schema_version", expected=SCHEMA, found=fields.get("schema_version"))
    if receiver is not None:
        _check_receiver(fields, receiver)
    found = fields["prefix_token_hash"]
    if prefix_hash is not None and found != prefix_hash:
        raise fail("PREFIX_NOT_MATCHED", "prefix_token_hash", expected=prefix_hash, found=found)


def check_token_ids(manifest: Wp30Manifest, token_ids: Iterable[int]) -> None:
    """The ids are those that the file was made from: their number and their hash. Raises CACHE_FILE_INVALID."""
    ids = list(token_ids)
    if len(ids) != manifest.fields["prefix_token_count"]:
        raise _other_ids("the number of token ids", manifest.fields["prefix_token_count"], len(ids))
    found = prefix_token_hash(ids)
    if found != manifest.fields["prefix_token_hash"]:
        raise _other_ids("the hash of the token ids", manifest.fields["prefix_token_hash"], found)


def check_consistent(
    manifest: Wp30Manifest, lines: tuple[LayerLine, ...], tensors: Mapping[str, TensorRecord]
) -> None:
    """Manifest, list of layers and arrays say the same, and it is a state that the format can express.

    Raises:
        InvalidError: CACHE_FILE_INVALID, naming what disagrees and both sides.
    """
    count = manifest.fields["num_layers"]
    for what, found in (("layers of the manifest", len(manifest.layers)), ("items in the list of layers", len(lines))):
        if found != count:
            raise _disagree(f"the number of {what}", count, found)
    for index, (layer, line) in enumerate(zip(manifest.layers, lines, strict=True)):
        _check_layer(index, layer, line, manifest.fields["prefix_token_count"])
        for name, dtype, shape in _expected(layer, index):
            _check_tensor(name, dtype, shape, tensors.get(name))
    expected = {name for index, layer in enumerate(manifest.layers) for name, *_ in _expected(layer, index)}
    unknown = sorted(tensors.keys() - expected)
    if unknown:
        raise _disagree("the arrays", f"{len(expected)} as the layers say", ", ".join(unknown[:8]))


def tensor_names(layer: int, *, quantized: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a layer's arrays: those of K, those of V."""
    parts = [str(part) for part in range(PARTS)] if quantized else [""]
    keys, values = (tuple(f"L{layer}.{side}{part}" for part in parts) for side in "kv")
    return keys, values


def _check_receiver(fields: Mapping[str, Any], receiver: Receiver) -> None:
    hashes = receiver.hashes
    for name, code in _HASHES.items() if hashes is not None else ():
        wanted, found = (hashes or {}).get(name), fields.get(name)
        if wanted != found:
            names = {
                "entry": {"repo": fields.get("model_repo_id"), "revision": fields.get("model_revision")},
                "model": {"repo": receiver.model_repo_id, "revision": (hashes or {}).get("model_revision")},
            }
            raise fail(
                code, f"the file was made by another model: {name}", expected=wanted, found=found, field=name,
                names=names,
            )  # fmt: skip
    wanted_shape, found_shape = [getattr(receiver, n) for n in _GEOMETRY], [fields.get(n) for n in _GEOMETRY]
    if wanted_shape != found_shape:
        raise fail(
            "MODEL_MISMATCH", "the file was made by a model of another shape: layers, kv heads, head size",
            expected=wanted_shape, found=found_shape, field="geometry",
        )  # fmt: skip


def _check_layer(index: int, layer: Wp30Layer, line: LayerLine, tokens: int) -> None:
    where = f"layer {index}"
    if layer.layer != index:
        raise _disagree(f"the number of {where} in its record", index, layer.layer)
    if layer.cls in _LOST:
        raise fail(
            "CACHE_FILE_INVALID", f"wp30-cache-2 file: {where} was a {layer.cls}, whose state is not all in the file",
            fix="Compute the cache again and put it itself.",
        )  # fmt: skip
    if layer.line() != line:
        raise _disagree(f"{where} in the manifest and in the list", layer.line().to_json(), line.to_json())
    if layer.logical_offset != tokens:
        raise _disagree(f"the offset of {where}", tokens, layer.logical_offset)
    if layer.stored_positions > layer.logical_offset:
        raise _disagree(f"the stored positions of {where}", f"at most {tokens}", layer.stored_positions)
    shape = layer.k_shapes[0]
    if len(shape) != 4 or shape[2] != layer.stored_positions:
        raise _disagree(f"the shape of K in {where} and its stored positions", layer.stored_positions, list(shape))


def _expected(layer: Wp30Layer, index: int) -> list[tuple[str, str | None, tuple[int, ...]]]:
    """Each array's name, its dtype where the manifest says one (only K's are), and its shape."""
    keys, values = tensor_names(index, quantized=layer.quantized)
    found: list[tuple[str, str | None, tuple[int, ...]]] = list(zip(keys, layer.dtypes, layer.k_shapes, strict=True))
    found += [(name, None, shape) for name, shape in zip(values, layer.v_shapes, strict=True)]
    return found


def _check_tensor(name: str, dtype: str | None, shape: tuple[int, ...], found: TensorRecord | None) -> None:
    if found is None:
        raise _disagree("the arrays", name, "none of that name")
    if found.shape != shape:
        raise _disagree(f"the shape of {name}", list(shape), list(found.shape))
    if dtype is not None and dtype_text(found.dtype) != dtype:
        raise _disagree(f"the dtype of {name}", dtype, dtype_text(found.dtype))


def _other_ids(what: str, expected: Any, found: Any) -> KVStoreError:
    return fail(
        "CACHE_FILE_INVALID", f"wp30-cache-2 file: {what} is another", expected=expected, found=found,
        fix="Give the ids that the cache was computed from.",
    )  # fmt: skip


def _disagree(what: str, expected: Any, found: Any) -> KVStoreError:
    return fail(
        "CACHE_FILE_INVALID", f"wp30-cache-2 file: {what} disagree", expected=expected, found=found,
        fix="Write the file again.",
    )  # fmt: skip

"""The documents of a ``wp30-cache-2`` file: the manifest and the list of layers.

The format keeps a prefix cache in one safetensors file whose metadata holds both. They
have a form of their own, in which key order and spacing count: the manifest is compact,
the list has spaces; both escape what is not ASCII, and floats are allowed. Model hashes
are carried as given, since how they are computed is not part of the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from kvstore.errors import KVStoreError, fail
from kvstore.format.json import unique_pairs
from kvstore.limits import MAX_DIM, MAX_LAYERS, MAX_RANK, MAX_TOKENS

__all__ = [
    "CORE_KEYS", "LAYERS_KEY", "MANIFEST_KEY", "MASK_SENTENCE", "PARTS", "POSITIONS_SENTENCE", "QUANTIZED_CLASSES",
    "SCHEMA", "LayerLine", "Wp30Layer", "Wp30Manifest", "build_manifest", "dtype_text", "emit_layers",
    "parse_layer_lines", "parse_wp30", "prefix_token_hash",
]  # fmt: skip

SCHEMA: Final = "wp30-cache-2"
MANIFEST_KEY: Final = "wp30_manifest"
LAYERS_KEY: Final = "wp30_layers"
POSITIONS_SENTENCE: Final = (
    "keys stored post-RoPE at original positions; logical_offset = original processed-token count"
)
MASK_SENTENCE: Final = "retained positions fully visible to new tokens; new tokens causal among themselves"
CORE_KEYS: Final = (
    "schema_version", "created_utc", "model_repo_id", "model_revision", "config_hash", "weight_files_sha256",
    "tokenizer_hash", "chat_template_hash", "prefix_token_hash", "prefix_token_count", "num_layers", "num_kv_heads",
    "head_dim", "rope_theta", "rope_scaling", "sliding_window", "positions", "causal_mask_semantics", "mlx_version",
    "mlx_lm_version", "document_id", "method_id", "compression_config", "layers",
)  # fmt: skip
QUANTIZED_CLASSES: Final = ("SparseQuantizedKVCache", "QuantizedKVCache")
"""Class names under which a layer has three arrays a side; every other name means one."""
PARTS: Final = 3
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64",
    "C64": "complex64", "F64": "float64",
}  # fmt: skip

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wp30Layer:
    """A layer record of the manifest.

    Attributes:
        cls: Name of the class that was saved.
        k_shapes, v_shapes: One shape, or three where the layer is quantized.
        dtypes: Of K's arrays, as MLX writes them: ``mlx.core.bfloat16``.
        bits, group_size: None where the layer is not quantized.
    """

    layer: int
    cls: str
    k_shapes: tuple[Shape, ...]
    v_shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    stored_positions: int
    logical_offset: int
    bits: int | None = None
    group_size: int | None = None

    @property
    def quantized(self) -> bool:
        """Whether there are three arrays a side."""
        return self.bits is not None

    def to_json(self) -> dict[str, Any]:
        """The record, keys in declared order."""
        head = {"layer": self.layer, "cls": self.cls}
        tail = {"stored_positions": self.stored_positions, "logical_offset": self.logical_offset}
        shapes = [[list(shape) for shape in side] for side in (self.k_shapes, self.v_shapes)]
        if not self.quantized:
            return {**head, "k_shape": shapes[0][0], "v_shape": shapes[1][0], "dtype": self.dtypes[0], **tail}
        return {
            **head, "k_shapes": shapes[0], "v_shapes": shapes[1], "dtypes": list(self.dtypes), "bits": self.bits,
            "group_size": self.group_size, **tail,
        }  # fmt: skip

    def line(self) -> LayerLine:
        """What the list of layers says of it."""
        return LayerLine(self.cls, self.logical_offset, self.stored_positions, self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class LayerLine:
    """An item of the list of layers."""

    cls: str
    offset: int
    n_kept: int
    bits: int | None = None
    group_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The item, keys in declared order."""
        quantization = {} if self.bits is None else {"group_size": self.group_size, "bits": self.bits}
        return {"cls": self.cls, "offset": self.offset, **quantization, "n_kept": self.n_kept}


@dataclass(frozen=True, slots=True)
class Wp30Manifest:
    """A manifest: its layers, and every other field as it stood, in order, extra keys last."""

    fields: Mapping[str, Any]
    layers: tuple[Wp30Layer, ...]

    @property
    def extra(self) -> dict[str, Any]:
        """The keys that are not the format's own."""
        return {name: value for name, value in self.fields.items() if name not in CORE_KEYS}

    def to_json(self) -> dict[str, Any]:
        """The document, keys in order."""
        core = {name: value for name, value in self.fields.items() if name in CORE_KEYS}
        return {**core, "layers": [layer.to_json() for layer in self.layers], **self.extra}

    def text(self) -> str:
        """The document as the file holds it."""
        return json.dumps(self.to_json(), separators=(",", ":"))


def build_manifest(
    facts: Mapping[str, Any], layers: Sequence[Wp30Layer], token_ids: Iterable[int], *,
    extra: Mapping[str, Any] | None = None,
) -> Wp30Manifest:  # fmt: skip
    """A manifest for a cache. What ``facts`` says of the format's own keys is used, the rest is null.

    Args:
        facts: Values by key; ``schema_version``, the prefix and the two sentences are the format's and not taken.
        extra: Keys that are applied last, over the core ones too; new ones stand at the end.
    """
    ids = list(token_ids)
    fixed = {
        "schema_version": SCHEMA, "prefix_token_hash": prefix_token_hash(ids), "prefix_token_count": len(ids),
        "num_layers": len(layers), "positions": POSITIONS_SENTENCE, "causal_mask_semantics": MASK_SENTENCE,
    }  # fmt: skip
    core = {name: fixed.get(name, facts.get(name)) for name in CORE_KEYS if name != "layers"}
    return Wp30Manifest({**core, **(extra or {})}, tuple(layers))


def emit_layers(layers: Sequence[Wp30Layer]) -> str:
    """The list of layers as the file holds it."""
    return json.dumps([layer.line().to_json() for layer in layers])


def prefix_token_hash(token_ids: Iterable[int]) -> str:
    """Bare hex SHA-256 of the ids in decimal, joined by commas."""
    return hashlib.sha256(",".join(str(int(token)) for token in token_ids).encode()).hexdigest()


def dtype_text(dtype: str) -> str:
    """A dtype of ours in MLX's text: ``BF16`` is ``mlx.core.bfloat16``."""
    return f"mlx.core.{_DTYPES[dtype]}"


def parse_wp30(text: str) -> Wp30Manifest:
    """Parse a manifest; its schema first.

    Raises:
        UnsupportedError: MEDIA_TYPE_UNKNOWN for another schema.
        InvalidError: CACHE_FILE_INVALID, naming the field.
    """
    value = _load(text, MANIFEST_KEY)
    if not isinstance(value, dict):
        raise _invalid(MANIFEST_KEY, "an object", value)
    schema = value.get("schema_version")
    if schema != SCHEMA:
        raise fail("MEDIA_TYPE_UNKNOWN", f"{MANIFEST_KEY}.schema_version", expected=SCHEMA, found=schema)
    for name in CORE_KEYS:
        if name not in value:
            raise _invalid(f"{MANIFEST_KEY}.{name} is absent")
    for name, sentence in (("positions", POSITIONS_SENTENCE), ("causal_mask_semantics", MASK_SENTENCE)):
        if value[name] != sentence:
            raise _invalid(f"{MANIFEST_KEY}.{name}", sentence, value[name])
    for name in ("prefix_token_count", "num_layers"):
        _integer(value[name], f"{MANIFEST_KEY}.{name}", MAX_TOKENS)
    if not isinstance(value["prefix_token_hash"], str):
        raise _invalid(f"{MANIFEST_KEY}.prefix_token_hash", "text", value["prefix_token_hash"])
    layers = _list(value["layers"], f"{MANIFEST_KEY}.layers", MAX_LAYERS)
    records = tuple(_layer(item, f"layers[{index}]") for index, item in enumerate(layers))
    return Wp30Manifest({name: item for name, item in value.items() if name != "layers"}, records)


def parse_layer_lines(text: str) -> tuple[LayerLine, ...]:
    """Parse the list of layers. Raises CACHE_FILE_INVALID."""
    items = _list(_load(text, LAYERS_KEY), LAYERS_KEY, MAX_LAYERS)
    return tuple(_line(item, f"{LAYERS_KEY}[{index}]") for index, item in enumerate(items))


def _layer(value: Any, where: str) -> Wp30Layer:
    record = _object(value, where)
    cls = _text(record, "cls", where)
    bits: int | None
    group: int | None
    if cls in QUANTIZED_CLASSES:
        sides = [_shapes(record.get(name), f"{where}.{name}", PARTS) for name in ("k_shapes", "v_shapes")]
        dtypes = _list(record.get("dtypes"), f"{where}.dtypes", PARTS)
        bits, group = (_number(record, name, where) for name in ("bits", "group_size"))
    else:
        sides = [_shapes([record.get(name)], f"{where}.{name}", 1) for name in ("k_shape", "v_shape")]
        dtypes, bits, group = [record.get("dtype")], None, None
    if len(dtypes) != len(sides[0]) or not all(isinstance(dtype, str) for dtype in dtypes):
        raise _invalid(f"{where}: dtypes of K", f"{len(sides[0])} texts", dtypes)
    return Wp30Layer(
        _number(record, "layer", where), cls, sides[0], sides[1], tuple(dtypes),
        _number(record, "stored_positions", where), _number(record, "logical_offset", where), bits, group,
    )  # fmt: skip


def _line(value: Any, where: str) -> LayerLine:
    record = _object(value, where)
    cls = _text(record, "cls", where)
    quantized = cls in QUANTIZED_CLASSES
    bits, group = (_number(record, name, where) if quantized else None for name in ("bits", "group_size"))
    return LayerLine(cls, _number(record, "offset", where), _number(record, "n_kept", where), bits, group)


def _shapes(value: Any, where: str, count: int) -> tuple[Shape, ...]:
    shapes = _list(value, where, count)
    if len(shapes) != count:
        raise _invalid(where, f"{count} shapes", len(shapes))
    return tuple(tuple(_integer(n, where, MAX_DIM) for n in _list(shape, where, MAX_RANK)) for shape in shapes)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(where, "an object", value)
    return value


def _list(value: Any, where: str, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise _invalid(where, f"an array of at most {limit}", value)
    return value


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}", "text", value)
    return value


def _number(record: Mapping[str, Any], name: str, where: str) -> int:
    return _integer(record.get(name), f"{where}.{name}", MAX_TOKENS)


def _integer(value: Any, where: str, high: int) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise _invalid(where, f"an integer, 0 to {high}", value)
    return value


def _load(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_pairs, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{what} is not JSON: {str(error)[:80]}") from None


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _invalid(what: str, expected: Any = None, found: Any = None) -> KVStoreError:
    shown = None if expected is None else repr(found)[:120]
    return fail("CACHE_FILE_INVALID", f"wp30-cache-2 file: {what}", expected=expected, found=shown)

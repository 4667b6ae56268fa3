"""Every error code: its phase, its exception class, and what it says.

A code is never renamed, renumbered or reused. SPEC.md carries the same table, and a
test holds the two equal. Phases follow SPEC.md's reading order; ``capture`` is the
writer's side; ``profile`` (the plans and receipts of a named profile), ``store`` and
``usage`` stand outside the order.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["CODES", "PHASES", "Code"]

PHASES: Final = (
    "container", "json", "schema", "semantic", "compat", "device", "integrity", "payload",
    "materialize", "capture", "profile", "store", "usage",
)  # fmt: skip


class Code(NamedTuple):
    """One row of the table: phase, name of the exception class, sentence."""

    phase: str
    error: str
    sentence: str


_I, _U, _X, _C = "InvalidError", "UnsupportedError", "IntegrityError", "IncompatibleError"

CODES: Final[dict[str, Code]] = {
    # container
    "DOC_TOO_LARGE": Code("container", _I, "A document is larger than its limit."),
    "BUNDLE_LAYOUT_INVALID": Code("container", _I, "A bundle's layout.json or files are not as required."),
    "BUNDLE_VERSION_UNSUPPORTED": Code("container", _U, "A bundle has a layout version that is not known."),
    "PATH_UNSAFE": Code("container", _I, "A path in a bundle would leave it or is not a plain file."),
    # json
    "JSON_NOT_UTF8": Code("json", _I, "The bytes are not UTF-8."),
    "JSON_BOM": Code("json", _I, "The document begins with a byte order mark."),
    "JSON_SYNTAX": Code("json", _I, "The bytes are not JSON."),
    "JSON_TOO_DEEP": Code("json", _I, "Arrays and objects are nested too deeply."),
    "JSON_DUPLICATE_KEY": Code("json", _I, "An object has the same key twice."),
    "JSON_FLOAT": Code("json", _I, "A number has a fraction or an exponent."),
    "JSON_NON_FINITE": Code("json", _I, "A number is NaN or infinite."),
    "JSON_NUMBER_RANGE": Code("json", _I, "An integer is outside the exact range of a double."),
    "JSON_LONE_SURROGATE": Code("json", _I, "A string holds half of a surrogate pair."),
    "JSON_KEY_NOT_ASCII": Code("json", _I, "An object key has a character outside ASCII."),
    "JSON_NOT_CANONICAL": Code("json", _I, "The document is not its own canonical form."),
    # schema
    "MEDIA_TYPE_UNKNOWN": Code("schema", _U, "The document is of another kind or major version."),
    "FEATURE_UNSUPPORTED": Code("schema", _U, "The document needs a feature that is not known."),
    "PROFILE_UNSUPPORTED": Code("schema", _U, "The document names a profile that is not known."),
    "KIND_UNSUPPORTED": Code("schema", _U, "A layer has a kind that is not known."),
    "DTYPE_UNSUPPORTED": Code("schema", _U, "A tensor has a dtype that is not known."),
    "QUANTIZATION_UNSUPPORTED": Code("schema", _U, "A quantized layer has a mode that is not known."),
    "FIELD_MISSING": Code("schema", _I, "A required field is absent."),
    "FIELD_UNKNOWN": Code("schema", _I, "A field is not one that this version defines."),
    "FIELD_TYPE": Code("schema", _I, "A field has a value of the wrong JSON type."),
    "FIELD_FORMAT": Code("schema", _I, "A text field does not match its grammar."),
    "FIELD_RANGE": Code("schema", _I, "A number or a length is outside its range."),
    "DIGEST_ALGORITHM_UNSUPPORTED": Code("schema", _U, "A digest uses an algorithm that is not known."),
    "LIMIT_EXCEEDED": Code("schema", _I, "A count or size is above a limit of the format."),
    "SHARD_UNSUPPORTED": Code("schema", _U, "The model runs on more than one rank."),
    # semantic
    "TENSOR_SET_MISMATCH": Code("semantic", _I, "A layer's tensors are not those that its kind requires."),
    "SHAPE_INCONSISTENT": Code("semantic", _I, "A tensor's shape contradicts its layer or its group."),
    "SEGMENTS_INVALID": Code("semantic", _I, "A group's segments do not cover its rows as required."),
    "GROUP_INVALID": Code("semantic", _I, "Groups and layers do not refer to each other as required."),
    "TOKEN_COUNT_MISMATCH": Code("semantic", _I, "Offsets and token count of an entry disagree."),
    "CACHE_STATE_INVALID": Code("semantic", _I, "A layer's scalars describe a state that cannot exist."),
    "PAYLOAD_SIZE_MISMATCH": Code("semantic", _I, "A descriptor's size is not that of its tensors' canonical form."),
    "METHOD_MISSING": Code("semantic", _I, "A layer is sparse, but no method is named that made it so."),
    "METHOD_DIGEST_MISMATCH": Code("semantic", _I, "A method's digest is not that of its config."),
    "LAYOUT_DIGEST_MISMATCH": Code("semantic", _I, "A layout digest is not that of the buffers it names."),
    # compat
    "MODEL_MISMATCH": Code("compat", _C, "Weights, config or geometry are those of another model."),
    "ADAPTER_MISMATCH": Code("compat", _C, "The adapter or its scale is another."),
    "TOKENIZER_MISMATCH": Code("compat", _C, "The tokenizer or the chat template is another."),
    "NAMESPACE_MISMATCH": Code("compat", _C, "The entry belongs to another namespace."),
    "METHOD_MISMATCH": Code("compat", _C, "The entry was made by a method that was not asked for."),
    "SIGNATURE_MISMATCH": Code("compat", _C, "Kinds, shapes, dtypes or quantization differ from the model's."),
    "LAYER_COUNT_MISMATCH": Code("compat", _C, "The model makes another number of caches."),
    "PREFIX_NOT_MATCHED": Code("compat", _C, "The entry is not a prefix of the wanted token ids."),
    "CUT_NOT_POSSIBLE": Code("compat", _C, "The entry cannot be restored at that token."),
    "MODEL_UNBOUND": Code("compat", _C, "The model carries no identity, so nothing can be proved about it."),
    "BINDING_MISMATCH": Code("compat", _C, "The live parameters are not those of the identity's files."),
    # device
    "DEVICE_BUFFER_TOO_LARGE": Code("device", "SpaceError", "A buffer is larger than the device allows."),
    "DEVICE_MEMORY_SHORT": Code("device", "SpaceError", "The buffers do not fit into the memory budget."),
    # integrity
    "OBJECT_MISSING": Code("integrity", _X, "An object that the entry needs is not there."),
    "OBJECT_NAME_MISMATCH": Code("integrity", _X, "An object is not the one that its name says."),
    "STORED_SIZE_MISMATCH": Code("integrity", _X, "An object's file has another size than recorded."),
    "STORED_DIGEST_MISMATCH": Code("integrity", _X, "An object's bytes do not have the digest of its name."),
    "MANIFEST_DIGEST_MISMATCH": Code("integrity", _X, "A manifest's bytes do not have the digest of its entry id."),
    "PAYLOAD_DIGEST_MISMATCH": Code("integrity", _X, "The decoded payload does not have the digest of its name."),
    "QUARANTINED": Code("integrity", _X, "The object was proved wrong before and is set aside."),
    # payload
    "OBJECT_HEADER_INVALID": Code("payload", _I, "An object's header frame is not as required."),
    "OBJECT_VERSION_UNSUPPORTED": Code("payload", _U, "An object has a format version that is not known."),
    "FILTER_UNSUPPORTED": Code("payload", _U, "An object names a filter or codec that is not known."),
    "FRAME_TABLE_INVALID": Code("payload", _I, "An object's frame table contradicts its frames."),
    "ZSTD_CORRUPT": Code("payload", _X, "A zstd frame does not decode or its checksum is wrong."),
    "ZSTD_TRUNCATED": Code("payload", _X, "A zstd frame ends too early."),
    "ZSTD_TRAILING_DATA": Code("payload", _I, "There are bytes after the last frame."),
    "ZSTD_WINDOW_TOO_LARGE": Code("payload", _I, "A frame asks for a larger window than allowed."),
    "ZSTD_DICTIONARY_REQUIRED": Code("payload", _I, "A frame needs a dictionary."),
    "ZSTD_SIZE_UNDECLARED": Code("payload", _I, "A frame does not state its content size or has no checksum."),
    "ST_HEADER_INVALID": Code("payload", _I, "A payload's tensor header is not as required."),
    "ST_OFFSETS_INVALID": Code("payload", _I, "Tensor offsets leave holes, overlap or run past the end."),
    "ST_SHAPE_OVERFLOW": Code("payload", _I, "A shape's byte count is above the limit."),
    "ST_NOT_CANONICAL": Code("payload", _I, "A payload is not in canonical form."),
    "PAYLOAD_TENSORS_MISMATCH": Code("payload", _I, "A payload holds other tensors than the manifest says."),
    "PREFIX_CHAIN_MISMATCH": Code("payload", _I, "The prefix digest is not that of the token ids."),
    # materialize
    "MATERIALIZE_FAILED": Code("materialize", "KVStoreError", "The buffers were not filled; nothing was changed."),
    # capture
    "CACHE_EMPTY": Code("capture", _I, "The cache holds no tokens."),
    "CACHE_CLASS_UNKNOWN": Code("capture", _U, "A cache class has no registered kind."),
    "CACHE_INCONSISTENT": Code("capture", _I, "Layers disagree with each other or with the token ids."),
    "CACHE_BATCHED": Code("capture", _I, "The cache holds more than one sequence."),
    "TOKEN_ID_RANGE": Code("capture", _I, "A token id is not an unsigned 32-bit integer."),
    "MEDIA_DIGEST_MISSING": Code("capture", _I, "The prefix holds media tokens but no digest of the media."),
    "MODEL_FOLDER_INVALID": Code("capture", _I, "A model folder lacks what an identity needs."),
    "CACHE_FILE_INVALID": Code("capture", _I, "A prompt-cache file is not one that can be read."),
    "CACHE_FILE_EXPORT": Code("capture", _U, "The entry cannot be expressed in that file format."),
    # profile
    "PLAN_CONFIG_INVALID": Code("profile", _I, "A config lacks a field that the plan needs, or has another type."),
    "PLAN_SEQUENCE": Code("profile", _I, "The number of tokens is outside what the profile or the model allows."),
    "PLAN_NOT_DENSE": Code("profile", _I, "The model is not a dense one."),
    "PLAN_SCHEDULE": Code("profile", _I, "The number of layers is out of range, or not that of the layer types."),
    "PLAN_DIMENSIONS": Code("profile", _I, "A dimension is zero, or heads do not divide each other."),
    "PLAN_CHANNELS_OVERFLOW": Code("profile", _I, "The number of channels does not fit into 64 bits."),
    "PLAN_RECORD_SHAPE": Code("profile", _I, "A planned buffer has no extents, or one that is zero."),
    "PLAN_RECORD_OVERFLOW": Code("profile", _I, "The bytes of a planned buffer do not fit into 64 bits."),
    "PLAN_SUM_OVERFLOW": Code("profile", _I, "The bytes of all buffers of a kind do not fit into 64 bits."),
    "PLAN_RECORD_COUNT": Code("profile", _I, "The number of planned buffers is not that of the schedule."),
    "PLAN_KIND_MISSING": Code("profile", _I, "The schedule lacks one of the two kinds of attention."),
    "PLAN_TOTAL_OVERFLOW": Code("profile", _I, "The bytes of all planned buffers do not fit into 64 bits."),
    "PLAN_TOTAL_LIMIT": Code("profile", _I, "The planned buffers are larger than the profile allows."),
    "PREPARED_RECEIPT_INVALID": Code("profile", _I, "The receipt of a prepared cache does not describe it."),
    "PREPARED_CACHE_INVALID": Code("profile", _I, "A prepared cache is not laid out as its plan says."),
    "PREPARED_NOT_FRESH": Code("profile", _I, "A prepared cache has been used already."),
    "PREPARED_BUFFER_INVALID": Code("profile", _I, "A buffer of a prepared cache lacks a property that it must have."),
    "PREPARED_BUFFER_SIZE": Code("profile", _I, "A buffer's size is not that of its shape."),
    "PREPARED_RECORDS_MISMATCH": Code("profile", _I, "The buffers of a prepared cache are not the planned ones."),
    "PREPARED_TOTAL_MISMATCH": Code("profile", _I, "The bytes of a prepared cache are not those of its receipt."),
    "PREPARED_NO_REGISTRY_ID": Code("profile", _U, "The device has no registry id, which the profile's receipt needs."),
    "PREPARED_UNAUTHORIZED": Code("profile", "UsageError", "The authorization is not for this prepared cache."),
    "PREPARED_TAKEN": Code("profile", "UsageError", "The prepared cache was taken out before."),
    # store
    "NOT_FOUND": Code("store", "NotFoundError", "There is no such entry or label."),
    "REF_AMBIGUOUS": Code("store", "UsageError", "A reference fits more than one entry."),
    "NO_PREFIX": Code("store", "NotFoundError", "No stored entry is a prefix of the token ids."),
    "STORE_MISSING": Code("store", "StoreError", "There is no store at that path."),
    "STORE_NOT_OURS": Code("store", "StoreError", "What is at that path is not a kvstore."),
    "STORE_VERSION_UNSUPPORTED": Code("store", _U, "The store was made by a newer release."),
    "STORE_UNREADABLE": Code("store", "StoreError", "The store cannot be read with these permissions."),
    "STORE_READ_ONLY": Code("store", "StoreError", "The store cannot be written."),
    "STORE_CORRUPT": Code("store", _X, "The index is damaged; it can be rebuilt from the files."),
    "STORE_BUSY": Code("store", "BusyError", "Another process held the write lock for too long."),
    "ENTRY_LEASED": Code("store", "BusyError", "The entry is in use, so it is not removed."),
    "STORE_IO": Code("store", "KVStoreError", "The operating system refused a read or a write."),
    "NO_SPACE": Code("store", "SpaceError", "The disk is full; nothing was stored."),
    # usage
    "USAGE": Code("usage", "UsageError", "The arguments do not make sense together."),
    "LABEL_INVALID": Code("usage", "UsageError", "A label is not a valid name."),
    "CANCELLED": Code("usage", "CancelledError", "The operation was stopped; nothing was left behind."),
}  # fmt: skip

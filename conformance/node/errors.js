// Refusals and their codes: SPEC section 19 (the phases of the codes that this implementation can give).

const PHASES = {
  container: 'DOC_TOO_LARGE BUNDLE_LAYOUT_INVALID BUNDLE_VERSION_UNSUPPORTED PATH_UNSAFE',
  json: 'JSON_NOT_UTF8 JSON_BOM JSON_SYNTAX JSON_TOO_DEEP JSON_DUPLICATE_KEY JSON_FLOAT JSON_NON_FINITE '
    + 'JSON_NUMBER_RANGE JSON_LONE_SURROGATE JSON_KEY_NOT_ASCII JSON_NOT_CANONICAL',
  schema: 'MEDIA_TYPE_UNKNOWN FEATURE_UNSUPPORTED PROFILE_UNSUPPORTED KIND_UNSUPPORTED DTYPE_UNSUPPORTED '
    + 'QUANTIZATION_UNSUPPORTED FIELD_MISSING FIELD_UNKNOWN FIELD_TYPE FIELD_FORMAT FIELD_RANGE '
    + 'DIGEST_ALGORITHM_UNSUPPORTED LIMIT_EXCEEDED SHARD_UNSUPPORTED',
  semantic: 'TENSOR_SET_MISMATCH SHAPE_INCONSISTENT TOKEN_COUNT_MISMATCH CACHE_STATE_INVALID GROUP_INVALID '
    + 'SEGMENTS_INVALID METHOD_MISSING METHOD_DIGEST_MISMATCH PAYLOAD_SIZE_MISMATCH LAYOUT_DIGEST_MISMATCH',
  compat: 'MODEL_MISMATCH ADAPTER_MISMATCH TOKENIZER_MISMATCH NAMESPACE_MISMATCH METHOD_MISMATCH '
    + 'LAYER_COUNT_MISMATCH SIGNATURE_MISMATCH PREFIX_NOT_MATCHED CUT_NOT_POSSIBLE',
  device: 'DEVICE_BUFFER_TOO_LARGE DEVICE_MEMORY_SHORT',
  integrity: 'OBJECT_MISSING OBJECT_NAME_MISMATCH STORED_DIGEST_MISMATCH MANIFEST_DIGEST_MISMATCH '
    + 'PAYLOAD_DIGEST_MISMATCH',
  payload: 'OBJECT_HEADER_INVALID OBJECT_VERSION_UNSUPPORTED FILTER_UNSUPPORTED FRAME_TABLE_INVALID ZSTD_CORRUPT '
    + 'ZSTD_TRUNCATED ZSTD_TRAILING_DATA ZSTD_WINDOW_TOO_LARGE ZSTD_DICTIONARY_REQUIRED ZSTD_SIZE_UNDECLARED '
    + 'ST_HEADER_INVALID ST_OFFSETS_INVALID ST_SHAPE_OVERFLOW ST_NOT_CANONICAL PAYLOAD_TENSORS_MISMATCH '
    + 'PREFIX_CHAIN_MISMATCH',
  capture: 'CACHE_EMPTY CACHE_INCONSISTENT CACHE_BATCHED TOKEN_ID_RANGE',
};

const PHASE_OF = new Map(
  Object.entries(PHASES).flatMap(([phase, codes]) => codes.split(' ').map((code) => [code, phase])),
);

/** What this document says is to be refused; everything else that is thrown is a fault of the program. */
export class Refusal extends Error {
  constructor(code, detail) {
    super(`${code}: ${detail}`);
    if (!PHASE_OF.has(code)) throw new TypeError(`no such code: ${code}`);
    this.code = code;
    this.detail = detail;
  }

  get phase() {
    return PHASE_OF.get(this.code);
  }
}

export function refuse(code, detail) {
  throw new Refusal(code, detail);
}

/** Run `action`; a refusal in it comes out with another code. */
export function recode(code, action) {
  try {
    return action();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    throw new Refusal(typeof code === 'function' ? code(error.code) : code, error.message);
  }
}

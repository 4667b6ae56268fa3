// The manifest field by field, step 3 of the reading order: SPEC sections 6, 7.1, 7.2, 8, 11.1, 11.2, 18.

import { refuse } from './errors.js';
import {
  MAX_DIM, MAX_NAME, MAX_RANK, MAX_TOKENS,
  anything, compareText, digest, integer, list, map, mediaType, nullable, object, oneOf, payloadReference, record, text,
} from './check.js';
import { DTYPES, KINDS, MODES } from './layers.js';

export const MANIFEST_TYPE = 'application/vnd.kvstore.manifest.v1+json';
export const MAX_MANIFEST = 16777216;
const MAX_LAYERS = 4096;
const MAX_FILES = 65536;
const MAX_PAYLOADS = 262146;

const name = text({ max: MAX_NAME, pattern: /^[A-Za-z0-9][A-Za-z0-9._-]*$/ });
export const namespace = text({ max: MAX_NAME, pattern: /^[a-z0-9][a-z0-9._-]*$/ });

// ---- model and tokenizer

const fileRecord = record({
  digest,
  name: text({ max: MAX_NAME, pattern: /^[^\u0000-\u001f\\]+$/ }),
  size: integer(0, Number.MAX_SAFE_INTEGER),
});

/** File records in ascending order of name (KV-MOD-003). */
function files(min) {
  const each = list(fileRecord, { min, max: MAX_FILES });
  return (value, where) => {
    each(value, where);
    for (let i = 1; i < value.length; i += 1) {
      if (compareText(value[i - 1].name, value[i].name) >= 0) refuse('FIELD_FORMAT', `${where}.${i} is out of order`);
    }
  };
}

function numberText(value, where) {
  text({ max: MAX_NAME })(value, where);
  if (!Number.isFinite(Number(value)) || String(Number(value)) !== value) {
    refuse('FIELD_FORMAT', `${where} is not the text of a number`);
  }
}

const adapter = record({ config: digest, files: files(1), kind: name, scale: numberText });

function shard(value, where) {
  if (value !== null) refuse('SHARD_UNSUPPORTED', `${where} is not null`);
}

export const model = record({
  adapter: nullable(adapter),
  code: files(0),
  config: digest,
  geometry: map(name, integer(0, Number.MAX_SAFE_INTEGER)),
  model_type: name,
  processor: nullable(digest),
  shard,
  weights: files(1),
});

export const tokenizer = record({ chat_template: nullable(digest), digest });

// ---- prefix

const mediaItem = record({
  digest,
  kind: text({ max: 64, pattern: /^[a-z][a-z0-9-]*$/ }),
  length: integer(1, MAX_TOKENS),
  processor: digest,
  start: integer(0, MAX_TOKENS),
});

export const mediaItems = list(mediaItem, { max: 4096 });

/** KV-PFX-014. */
export function checkSpans(media, tokenCount, where) {
  let end = 0;
  media.forEach((item, index) => {
    if (item.start < end) refuse('FIELD_RANGE', `${where}.${index} is out of order, or overlaps`);
    end = item.start + item.length;
    if (end > tokenCount) refuse('FIELD_RANGE', `${where}.${index} ends after the prefix`);
  });
}

const prefixFields = record({
  digest, media: mediaItems, token_count: integer(1, MAX_TOKENS), token_ids: payloadReference,
});

function prefix(value, where) {
  prefixFields(value, where);
  checkSpans(value.media, value.token_count, `${where}.media`);
}

// ---- layers

export const dtype = oneOf(DTYPES, 'DTYPE_UNSUPPORTED');
export const shape = list(integer(0, MAX_DIM), { max: MAX_RANK });
const tensor = record({ dtype, shape });
const scalar = integer(0, MAX_TOKENS);
const perSequence = nullable(list(integer(-MAX_TOKENS, MAX_TOKENS), { min: 1, max: 1 }));

const SCALARS = {
  mode: oneOf(MODES, 'QUANTIZATION_UNSUPPORTED'),
  slots: integer(0, 4096),
  left_padding: perSequence,
  lengths: perSequence,
};

function tensors(roles) {
  return (value, where) => {
    object(value, where);
    for (const role of Object.keys(value)) {
      const known = roles === null ? /^slot\.(0|[1-9][0-9]{0,3})$/.test(role) : roles.includes(role);
      if (!known) refuse('FIELD_UNKNOWN', `${where}.${role}`);
      tensor(value[role], `${where}.${role}`);
    }
  };
}

const CHECKS = Object.fromEntries(Object.entries(KINDS).map(([kind, { scalars, roles }]) => [kind, record({
  kind: anything,
  ...Object.fromEntries(scalars.map((field) => [field, SCALARS[field] ?? scalar])),
  tensors: tensors(roles),
})]));

function layerList() {
  let count = 0;
  const counted = (value, where) => {
    count += 1;
    if (count > MAX_LAYERS) refuse('LIMIT_EXCEEDED', `more than ${MAX_LAYERS} layer records`);
    layer(value, where);
  };
  const children = record({ kind: anything, children: list(counted, { min: 1 }) });
  const layer = (value, where) => {
    object(value, where);
    if (!Object.hasOwn(value, 'kind')) refuse('FIELD_MISSING', `${where}.kind`);
    if (typeof value.kind !== 'string') refuse('FIELD_TYPE', `${where}.kind is no text`);
    if (value.kind === 'list') return children(value, where);
    if (!Object.hasOwn(CHECKS, value.kind)) refuse('KIND_UNSUPPORTED', `${where}.kind is ${value.kind.slice(0, 80)}`);
    return CHECKS[value.kind](value, where);
  };
  return list(counted);
}

// ---- groups, method, continuation

const group = record({
  keep: scalar,
  layers: list(text({ max: 64 }), { max: MAX_LAYERS }),
  payloads: list(payloadReference, { max: MAX_PAYLOADS }),
  rows: scalar,
  span: oneOf(['rows', 'state', 'tokens']),
  start: scalar,
});

const method = record({
  config: text({ max: 1048576 }),
  config_digest: digest,
  name: text({ max: MAX_NAME, pattern: /^[a-z0-9][a-z0-9._/-]*$/ }),
});

function continuationValue(value, where) {
  if (typeof value === 'string') text({ max: MAX_NAME })(value, where);
  else integer(-Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER)(value, where);
}

const continuation = map(text({ max: MAX_NAME, pattern: /^[a-z][a-z0-9_]*$/ }), continuationValue, { max: 64 });

/** Step 3: `media_type`, `features` and `profile` before any other field (KV-RDR-003). */
export function checkFields(manifest) {
  mediaType(manifest, MANIFEST_TYPE);
  for (const field of ['features', 'profile']) {
    if (!Object.hasOwn(manifest, field)) refuse('FIELD_MISSING', field);
    if (field === 'features') {
      if (!Array.isArray(manifest.features)) refuse('FIELD_TYPE', 'features is no array');
      if (manifest.features.length > 0) refuse('FEATURE_UNSUPPORTED', 'features is not empty');
    } else {
      oneOf(['generic/1'], 'PROFILE_UNSUPPORTED')(manifest.profile, 'profile');
    }
  }
  record({
    continuation,
    features: anything,
    groups: list(group, { max: MAX_LAYERS }),
    layers: layerList(),
    media_type: anything,
    method: nullable(method),
    model,
    namespace,
    prefix,
    profile: anything,
    tokenizer,
  })(manifest, 'manifest');
}

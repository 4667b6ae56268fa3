// Compatibility, prefix, cut and device, steps 5 to 7 of the reading order: SPEC sections 8.4, 14 and 15.

import { refuse } from './errors.js';
import { serialize } from './json.js';
import { modelDigest } from './digest.js';
import { encodeTokenIds, prefixDigest } from './prefix.js';
import { KINDS, buffers, leaves, lowestCut, rowAxis } from './layers.js';
import { withRows } from './tensors.js';

const MODEL_FIELDS = ['model_type', 'geometry', 'config', 'adapter', 'weights', 'code', 'processor'];
const SIGNATURE_SCALARS = ['bits', 'chunk_size', 'group_size', 'keep', 'max_size', 'mode', 'slots'];

/** Step 5. */
export function checkCompatible(manifest, context) {
  if (modelDigest(manifest.model) !== modelDigest(context.model)) {
    const field = MODEL_FIELDS.find((name) => serialize(manifest.model[name]) !== serialize(context.model[name]));
    refuse(field === 'adapter' ? 'ADAPTER_MISMATCH' : 'MODEL_MISMATCH', `model.${field} differs`);
  }
  if (manifest.tokenizer.digest !== context.tokenizer.digest) refuse('TOKENIZER_MISMATCH', 'tokenizer.digest differs');
  if (context.policy !== 'tokens' && manifest.tokenizer.chat_template !== context.tokenizer.chat_template) {
    refuse('TOKENIZER_MISMATCH', 'tokenizer.chat_template differs');
  }
  if (manifest.namespace !== context.namespace) {
    refuse('NAMESPACE_MISMATCH', `${manifest.namespace}, not ${context.namespace}`);
  }
  if (manifest.method !== null && manifest.method.name !== context.method) {
    refuse('METHOD_MISMATCH', `${manifest.method.name}, not ${context.method}`);
  }
  if (context.signature !== null) checkSignature(signature(manifest), context.signature);
}

/** What two caches must have in common (KV-CMP-003, KV-CMP-015, KV-CMP-016). */
export function signature(manifest) {
  const result = Object.create(null);
  for (const { path, layer } of leaves(manifest.layers)) {
    const plain = manifest.method !== null;
    const fields = Object.create(null);
    fields.kind = plain ? layer.kind.replace('-sparse', '') : layer.kind;
    for (const name of SIGNATURE_SCALARS) if (KINDS[layer.kind].scalars.includes(name)) fields[name] = layer[name];
    for (const [role, { dtype }] of Object.entries(layer.tensors)) {
      if ((plain && role === 'positions') || (layer.kind === 'kv-compressed' && role !== 'window')) continue;
      fields[`tensors.${role}`] = { dtype, shape: sharedShape(layer, role) };
    }
    result[path] = fields;
  }
  return result;
}

/** A tensor's shape with null for what may differ. */
function sharedShape(layer, role) {
  const { dtype, shape } = layer.tensors[role];
  if (layer.kind === 'kv-compressed') return withRows(shape, 1, null);
  if (layer.kind === 'state' && /^[IU]/.test(dtype)) return shape.map((extent, axis) => (axis === 0 ? extent : null));
  return withRows(shape, rowAxis(layer, role), null);
}

function checkSignature(ours, theirs) {
  if (Object.keys(ours).sort().join(' ') !== Object.keys(theirs).sort().join(' ')) {
    refuse('LAYER_COUNT_MISMATCH', 'the caches of the model have other paths');
  }
  for (const path of Object.keys(ours)) {
    if (serialize(ours[path]) !== serialize(theirs[path])) refuse('SIGNATURE_MISMATCH', `layer ${path}`);
  }
}

/** Step 6: the position to restore at. */
export function choosePosition(manifest, context) {
  const count = manifest.prefix.token_count;
  let position = context.token_count ?? count;
  if (context.token_ids !== null) {
    if (context.token_count === null) position = Math.min(count, context.token_ids.length - 1);
    checkPrefix(manifest, context);
  }
  const lowest = Math.max(1, lowestCut(manifest.layers, count));
  if (position < lowest || position > count) {
    refuse('CUT_NOT_POSSIBLE', `position ${position} is not within ${lowest} ... ${count}`);
  }
  for (const { start, length } of manifest.prefix.media) {
    const inside = start < position && position < start + length;
    if (inside) refuse('CUT_NOT_POSSIBLE', 'the position is within a media item');
  }
  return position;
}

function checkPrefix({ model, namespace, prefix }, { token_ids: wanted, media }) {
  const count = prefix.token_count;
  if (wanted.length < count) refuse('PREFIX_NOT_MATCHED', `${wanted.length} wanted tokens, the entry has ${count}`);
  const before = media.filter(({ start }) => start < count);
  const encoded = encodeTokenIds(wanted.slice(0, count));
  if (prefixDigest(modelDigest(model), namespace, encoded, before) !== prefix.digest) {
    refuse('PREFIX_NOT_MATCHED', 'the wanted tokens are others');
  }
}

/** Step 7. */
export function checkDevice(manifest, { max_buffer_bytes: largest, memory_bytes: memory }) {
  let total = 0;
  for (const { role, byte_len: length } of buffers(manifest.layers)) {
    if (largest !== null && length > largest) refuse('DEVICE_BUFFER_TOO_LARGE', `${role} has ${length} bytes`);
    total += length;
  }
  if (memory !== null && total > memory) refuse('DEVICE_MEMORY_SHORT', `${total} bytes, ${memory} to be had`);
}

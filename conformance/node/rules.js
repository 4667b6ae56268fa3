// Rules that join fields, step 4 of the reading order: SPEC sections 8.2 to 8.6.

import { refuse } from './errors.js';
import { serialize } from './json.js';
import { digestOf } from './digest.js';
import { KINDS, isQuantized, isSparse, isWritten, leaves, rowAxis, rowsOf } from './layers.js';
import { deriveGroups, segmentCount, segmentSizes } from './groups.js';
import { payloadSize } from './tensors.js';

/** Step 4; the groups that follow from the layers come back. */
export function checkRules(manifest) {
  const { prefix, layers, groups, method } = manifest;
  checkLayers(manifest);
  const derived = checkGroups(layers, groups);
  if (method !== null && digestOf(Buffer.from(method.config, 'utf8')) !== method.config_digest) {
    refuse('METHOD_DIGEST_MISMATCH', 'method.config_digest');
  }
  const size = payloadSize([{ name: 'token_ids', dtype: 'U32', shape: [prefix.token_count] }]);
  if (size !== prefix.token_ids.size) refuse('PAYLOAD_SIZE_MISMATCH', 'prefix.token_ids');
  return derived;
}

/** The rules on layers, for which no payload need be there. */
export function checkLayers({ prefix, layers, method }) {
  let written = 0;
  for (const { path, layer } of leaves(layers)) {
    if (isWritten(layer)) {
      written += 1;
      checkWritten(path, layer, prefix.token_count);
    } else {
      for (const field of ['offset', 'ring_index', 'start']) {
        if (KINDS[layer.kind].scalars.includes(field) && layer[field] !== 0) {
          refuse('CACHE_STATE_INVALID', `layer ${path} has no tensors, but ${field} is not 0`);
        }
      }
    }
  }
  if (written === 0) refuse('CACHE_STATE_INVALID', 'no layer has tensors');
  if (method !== null) return;
  for (const { path, layer } of leaves(layers)) if (isSparse(layer)) refuse('METHOD_MISSING', `layer ${path} is sparse`);
}

/** In the order of KV-RDR-017. */
function checkWritten(path, layer, tokenCount) {
  checkTensorSet(path, layer);
  for (const [role, { shape }] of Object.entries(layer.tensors)) {
    if (role !== 'positions' && shape[0] !== 1) inconsistent(path, `${role}: axis 0 is not one sequence`);
  }
  if (layer.kind === 'state') return;
  if (layer.kind === 'kv-compressed') checkThreeAxes(path, layer);
  else checkAxes(path, layer);
  if (layer.offset !== tokenCount) {
    refuse('TOKEN_COUNT_MISMATCH', `layer ${path} is at ${layer.offset} of ${tokenCount} tokens`);
  }
  if (layer.kind === 'kv-compressed') {
    checkCompressed(path, layer);
    return;
  }
  if (isQuantized(layer)) checkPacking(path, layer);
  checkRows(path, layer, rowsOf(layer));
  if (isQuantized(layer)) checkQuantized(path, layer);
}

function inconsistent(path, detail) {
  refuse('SHAPE_INCONSISTENT', `layer ${path}: ${detail}`);
}

function invalid(path, detail) {
  refuse('CACHE_STATE_INVALID', `layer ${path}: ${detail}`);
}

function checkTensorSet(path, layer) {
  if (layer.kind === 'state') {
    for (const role of Object.keys(layer.tensors)) {
      if (Number(role.slice(5)) >= layer.slots) refuse('TENSOR_SET_MISMATCH', `layer ${path}: ${role}`);
    }
    return;
  }
  if (layer.kind === 'kv-compressed') {
    const has = (role) => Object.hasOwn(layer.tensors, role);
    const whole = has('window') && has('pending.kv') === has('pending.gate') && (has('compressed') || !has('index'));
    if (!whole) refuse('TENSOR_SET_MISMATCH', `layer ${path}: roles that need each other`);
    return;
  }
  for (const role of KINDS[layer.kind].roles) {
    if (role === 'positions') continue;
    const wanted = !role.endsWith('.biases') || layer.mode === 'affine';
    if (Object.hasOwn(layer.tensors, role) !== wanted) {
      refuse('TENSOR_SET_MISMATCH', `layer ${path}: ${role} is ${wanted ? 'missing' : 'not of this mode'}`);
    }
  }
}

/** Axes, heads and rows that all tensors have in common (KV-LAY-017, KV-LAY-018, KV-LAY-031). */
function checkAxes(path, layer) {
  let heads = null;
  let rows = null;
  for (const [role, { shape }] of Object.entries(layer.tensors)) {
    if (role === 'positions') continue;
    if (shape.length !== 4) inconsistent(path, `${role} has ${shape.length} axes`);
    heads ??= shape[1];
    rows ??= shape[2];
    if (shape[1] !== heads) inconsistent(path, `${role} has another number of heads`);
    if (shape[2] !== rows) inconsistent(path, `${role} has another number of rows`);
  }
  const positions = layer.tensors.positions;
  if (positions === undefined) return;
  const { dtype, shape } = positions;
  if (dtype !== 'I32' || shape.length !== 2 || (shape[0] !== 1 && shape[0] !== heads)
    || shape[rowAxis(layer, 'positions')] !== rows) {
    inconsistent(path, 'positions are not I32 [heads or 1, rows]');
  }
}

function checkRows(path, layer, rows) {
  const { offset } = layer;
  switch (layer.kind) {
    case 'kv':
    case 'kv-quantized':
      if (rows !== offset) inconsistent(path, 'rows are not the offset');
      break;
    case 'kv-rotating': {
      const { max_size: size, keep, ring_index: index } = layer;
      if (!(keep < size && rows <= Math.min(offset, size) && (rows === offset || rows > keep))) {
        invalid(path, 'rows, keep, max_size and offset do not fit each other');
      }
      const inside = rows === size && rows < offset && index >= keep && index < rows;
      if (index !== rows && !inside) invalid(path, 'ring_index');
      break;
    }
    case 'kv-chunked':
      if (layer.start > offset || rows !== offset - layer.start || layer.chunk_size < 1) {
        invalid(path, 'rows, start, chunk_size and offset do not fit each other');
      }
      break;
    case 'kv-concatenated':
      if (rows < offset) inconsistent(path, 'fewer rows than the offset');
      break;
    default:
      if (rows > offset) inconsistent(path, 'more rows than the offset');
  }
}

function checkThreeAxes(path, layer) {
  for (const [role, { shape }] of Object.entries(layer.tensors)) {
    if (shape.length !== 3) inconsistent(path, `${role} has ${shape.length} axes`);
  }
}

/** KV-LAY-046 to KV-LAY-048. */
function checkCompressed(path, { offset, max_size: size, tensors }) {
  const rows = (role) => tensors[role]?.shape[1] ?? 0;
  if (size < 1) invalid(path, 'max_size');
  if (rows('window') !== Math.min(offset, size)) inconsistent(path, 'window does not have the last tokens');
  if (tensors.index !== undefined && rows('index') !== rows('compressed')) inconsistent(path, 'rows of index');
  if (rows('pending.kv') !== rows('pending.gate')) inconsistent(path, 'rows of pending.gate');
  const [groups, pending] = [rows('compressed'), rows('pending.kv')];
  const group = (offset - pending) / groups;
  const fits = tensors.compressed === undefined ? pending === 0 || pending === offset
    : groups >= 1 && Number.isInteger(group) && pending < group;
  if (!fits) inconsistent(path, 'tokens are not full groups and pending ones');
}

function checkPacking(path, layer) {
  if (![2, 3, 4, 5, 6, 8].includes(layer.bits)) invalid(path, 'bits');
  if (![16, 32, 64, 128].includes(layer.group_size)) invalid(path, 'group_size');
}

function checkQuantized(path, layer) {
  for (const side of ['k', 'v']) {
    const words = layer.tensors[`${side}.words`];
    const scales = layer.tensors[`${side}.scales`];
    const biases = layer.tensors[`${side}.biases`];
    if (words.dtype !== 'U32' || words.shape[3] * 32 !== layer.bits * layer.group_size * scales.shape[3]) {
      inconsistent(path, `${side}.words do not fit the scales`);
    }
    if (biases !== undefined && serialize(biases) !== serialize(scales)) {
      inconsistent(path, `${side}.biases are not as the scales`);
    }
  }
}

function checkGroups(layers, groups) {
  const derived = deriveGroups(layers);
  const shown = ({ span, start, rows, keep, layers: paths }) => JSON.stringify([span, start, rows, keep, paths]);
  if (derived.length !== groups.length) refuse('GROUP_INVALID', `${groups.length} groups, not ${derived.length}`);
  derived.forEach((group, index) => {
    if (shown(group) !== shown(groups[index])) refuse('GROUP_INVALID', `groups.${index}`);
  });
  derived.forEach((group, index) => {
    if (groups[index].payloads.length !== segmentCount(group)) refuse('SEGMENTS_INVALID', `groups.${index}.payloads`);
    let at = 0;
    for (const size of segmentSizes(group)) {
      if (groups[index].payloads[at].size !== size) refuse('PAYLOAD_SIZE_MISMATCH', `groups.${index}.payloads.${at}`);
      at += 1;
    }
    group.payloads = groups[index].payloads;
  });
  return derived;
}

// The writer: from a recipe to a bundle: SPEC sections 8, 9, 11, 16.4; the fixtures' README says what a recipe is.

import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { refuse, recode } from './errors.js';
import { canonicalBytes, isObject, parse } from './json.js';
import { digestOf, modelDigest, named, sha256 } from './digest.js';
import { encodeTokenIds, prefixDigest } from './prefix.js';
import { MAX_TOKENS, anything, list, record, text } from './check.js';
import { byteLength, isWritten, leaves } from './layers.js';
import { deriveGroups, segmentTensors, segments } from './groups.js';
import { encodePayload, takeRows } from './tensors.js';
import { MANIFEST_TYPE, MAX_MANIFEST, checkFields } from './manifest.js';
import { checkLayers, checkRules } from './rules.js';
import { encodeObject } from './object_write.js';
import { BUNDLE_TYPE } from './bundle.js';

const MAX_BYTES = 16777216; // of all tensors of a recipe
const NO_DIGEST = `sha256:${'0'.repeat(64)}`;

/** Its other parts are checked as they stand in the manifest. */
const recipeFields = record({
  continuation: anything, layers: anything, media: anything, method: anything, model: anything, namespace: anything,
  token_ids: list(anything, { max: MAX_TOKENS }), tokenizer: anything,
});

const methodFields = record({ config: text(), name: anything });

/** Make the entry and write it into the folder; its id comes back. */
export function writeRecipe(recipe, folder) {
  recipeFields(recipe, 'recipe');
  const tokenIds = encodeTokenIds(recipe.token_ids);
  const manifest = draft(recipe, tokenIds.length / 4);
  checkCapture(manifest);
  const { model, namespace, prefix, layers } = manifest;
  prefix.digest = prefixDigest(modelDigest(model), namespace, tokenIds, prefix.media);

  const objects = new Map();
  const put = (tensors, content) => {
    const parts = encodePayload(tensors, content);
    const size = parts.reduce((sum, part) => sum + part.length, 0);
    const reference = { digest: digestOf(...parts), size };
    if (!objects.has(reference.digest)) {
      objects.set(reference.digest, encodeObject(tensors, content, reference, namespace));
    }
    return reference;
  };
  const data = tensorBytes(layers, recipe.layers);
  manifest.groups = deriveGroups(layers).map((group) => ({
    keep: group.keep,
    layers: group.layers,
    payloads: [...segments(group)].map((segment) => putSegment(group, segment, data, put)),
    rows: group.rows,
    span: group.span,
    start: group.start,
  }));
  prefix.token_ids = put([{ name: 'token_ids', dtype: 'U32', shape: [prefix.token_count] }], () => tokenIds);

  const bytes = canonicalBytes(manifest);
  if (bytes.length > MAX_MANIFEST) refuse('DOC_TOO_LARGE', 'manifest');
  parse(bytes); // as any reader will: nesting
  checkRules(manifest);
  return writeBundle(folder, bytes, objects);
}

/** The manifest without what is computed: it passes step 3, so all that follows can rely on its fields. */
function draft(recipe, tokenCount) {
  if (tokenCount === 0) refuse('CACHE_EMPTY', 'no token ids');
  const { method } = recipe;
  if (isObject(method)) methodFields(method, 'method');
  const manifest = {
    continuation: recipe.continuation,
    features: [],
    groups: [],
    layers: Array.isArray(recipe.layers) ? recipe.layers.map(plainLayer) : recipe.layers,
    media_type: MANIFEST_TYPE,
    method: isObject(method)
      ? { ...method, config_digest: digestOf(Buffer.from(method.config, 'utf8')) } : method,
    model: recipe.model,
    namespace: recipe.namespace,
    prefix: {
      digest: NO_DIGEST, media: recipe.media, token_count: tokenCount, token_ids: { digest: NO_DIGEST, size: 8 },
    },
    profile: 'generic/1',
    tokenizer: recipe.tokenizer,
  };
  checkFields(manifest);
  return manifest;
}

/** A layer record without the bytes of its tensors. */
function plainLayer(layer) {
  if (!isObject(layer)) return layer;
  if (Array.isArray(layer.children)) return { ...layer, children: layer.children.map(plainLayer) };
  if (!isObject(layer.tensors)) return layer;
  const tensors = Object.create(null);
  for (const [role, tensor] of Object.entries(layer.tensors)) {
    if (isObject(tensor)) {
      const { hex, seed, ...rest } = tensor;
      tensors[role] = rest;
    } else {
      tensors[role] = tensor;
    }
  }
  return { ...layer, tensors };
}

/** What the writer's side alone says, then the rules on layers. */
function checkCapture(manifest) {
  const all = [...leaves(manifest.layers)];
  if (!all.some(({ layer }) => isWritten(layer))) refuse('CACHE_EMPTY', 'no layer holds anything');
  for (const { path, layer } of all) {
    for (const [role, { shape }] of Object.entries(layer.tensors)) {
      if (role !== 'positions' && shape[0] > 1) refuse('CACHE_BATCHED', `layer ${path}: ${role}`);
    }
  }
  recode((code) => (code === 'TOKEN_COUNT_MISMATCH' ? 'CACHE_INCONSISTENT' : code), () => checkLayers(manifest));
}

function putSegment(group, segment, data, put) {
  const tensors = segmentTensors(group, segment);
  const sources = new Map(tensors.map((tensor) => [tensor.name, tensor]));
  return put(tensors, (name) => {
    const { dtype, whole, axis } = sources.get(name);
    if (segment === null) return data(name);
    return takeRows(data(name), { dtype, shape: whole }, axis, segment.from, segment.to);
  });
}

/** A function from names to bytes; none is made before all are known to be small. */
function tensorBytes(layers, sources) {
  const shapes = new Map(tensorsOf(layers));
  const total = [...shapes.values()].reduce((sum, tensor) => sum + byteLength(tensor), 0);
  if (!(total <= MAX_BYTES)) refuse('LIMIT_EXCEEDED', `tensors of ${total} bytes`);
  const found = new Map();
  for (const [name, source] of tensorsOf(sources)) found.set(name, makeBytes(name, byteLength(shapes.get(name)), source));
  return (name) => found.get(name);
}

function* tensorsOf(layers) {
  for (const { path, layer } of leaves(layers)) {
    for (const [role, tensor] of Object.entries(layer.tensors)) yield [`${path}.${role}`, tensor];
  }
}

function makeBytes(name, size, { hex, seed }) {
  if (hex === undefined && seed === undefined) refuse('FIELD_MISSING', `${name}: hex or seed`);
  if (hex !== undefined && seed !== undefined) refuse('FIELD_UNKNOWN', `${name}: seed beside hex`);
  text()(hex ?? seed, name);
  if (hex !== undefined) {
    if (hex.length !== 2 * size || !/^[0-9a-f]*$/.test(hex)) {
      refuse('CACHE_INCONSISTENT', `${name}: hex is not ${size} bytes`);
    }
    return Buffer.from(hex, 'hex');
  }
  const bytes = Buffer.alloc(size);
  const counter = Buffer.alloc(8);
  for (let at = 0, n = 0n; at < size; at += 32, n += 1n) {
    counter.writeBigUInt64LE(n);
    sha256(Buffer.from(seed, 'utf8'), counter).copy(bytes, at);
  }
  return bytes;
}

function writeBundle(folder, manifest, objects) {
  const entry = digestOf(manifest);
  mkdirSync(join(folder, 'objects'), { mode: 0o700 });
  for (const [payload, bytes] of objects) {
    const stored = named(sha256(bytes));
    writeFileSync(join(folder, 'objects', `${payload.slice(7)}.${stored.slice(7)}.kvo`), bytes, { mode: 0o600 });
  }
  const layout = canonicalBytes({ entry, features: [], media_type: BUNDLE_TYPE });
  writeFileSync(join(folder, 'manifest.json'), manifest, { mode: 0o600 });
  writeFileSync(join(folder, 'layout.json'), layout, { mode: 0o600 });
  return entry;
}

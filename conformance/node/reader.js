// The reader: all steps of the reading order over a bundle: SPEC section 14, KV-BUN-009 to KV-BUN-013, KV-LAY-040.

import { refuse } from './errors.js';
import { parse } from './json.js';
import { digestOf, modelDigest } from './digest.js';
import { prefixDigest } from './prefix.js';
import { leaves, rowAxis, isWritten, rolesInOrder } from './layers.js';
import { segmentTensors, segments } from './groups.js';
import { joinRows, takeRows, withRows } from './tensors.js';
import { MAX_MANIFEST, checkFields } from './manifest.js';
import { checkRules } from './rules.js';
import { checkCompatible, checkDevice, choosePosition } from './compat.js';
import { openBundle, readLayout } from './bundle.js';
import { decodeObject, openObject } from './object.js';

/** Restore the entry of a bundle into a context: what an accepted case expects. */
export function readBundle(path, context) {
  const bundle = openBundle(path);
  try {
    return restore(bundle, context);
  } finally {
    bundle.close();
  }
}

function restore(bundle, context) {
  const entry = readLayout(bundle);
  if (bundle.size('manifest.json') > MAX_MANIFEST) refuse('DOC_TOO_LARGE', 'manifest.json'); // step 1
  const bytes = bundle.read('manifest.json');
  if (digestOf(bytes) !== entry) refuse('MANIFEST_DIGEST_MISMATCH', `manifest.json is not ${entry}`);
  const manifest = parse(bytes); // step 2
  checkFields(manifest); // step 3
  const groups = checkRules(manifest); // step 4
  checkCompatible(manifest, context); // step 5
  const position = choosePosition(manifest, context); // step 6
  checkDevice(manifest, context.device); // step 7
  const payloads = readPayloads(bundle, manifest, groups); // steps 8 to 11
  return { entry, token_count: position, tensors: restoreTensors(manifest, groups, payloads, position) };
}

/** The references to read, each once, with the tensors that each use of a payload requires. */
function wantedPayloads({ prefix }, groups, bundle) {
  const wanted = new Map();
  const want = (reference, tensors) => {
    if (!wanted.has(reference.digest)) wanted.set(reference.digest, { reference, uses: [] });
    wanted.get(reference.digest).uses.push({ reference, tensors });
  };
  for (const group of groups) {
    let at = 0;
    for (const segment of segments(group)) want(group.payloads[at++], segmentTensors(group, segment));
  }
  if (bundle.objects.has(prefix.token_ids.digest)) {
    want(prefix.token_ids, [{ name: 'token_ids', dtype: 'U32', shape: [prefix.token_count] }]);
  }
  return [...wanted.values()];
}

/** Tensors by payload digest. */
function readPayloads(bundle, manifest, groups) {
  const wanted = wantedPayloads(manifest, groups, bundle);
  const stored = wanted.map(({ reference }) => {
    const object = bundle.objects.get(reference.digest);
    return object ?? refuse('OBJECT_MISSING', reference.digest);
  }).map(({ path, stored: name }) => {
    const bytes = bundle.read(path);
    if (digestOf(bytes) !== name) refuse('STORED_DIGEST_MISMATCH', path);
    return bytes;
  });
  const opened = stored.map((bytes, index) => openObject(bytes, wanted[index].reference, manifest.namespace));
  const decoded = opened.map(decodeObject);
  const result = new Map();
  decoded.forEach(({ parts, tensors }, index) => {
    const { reference, uses } = wanted[index];
    for (const use of uses) checkTensors(tensors, use);
    if (digestOf(...parts) !== reference.digest) refuse('PAYLOAD_DIGEST_MISMATCH', reference.digest);
    result.set(reference.digest, tensors);
  });
  checkChain(manifest, result.get(manifest.prefix.token_ids.digest));
  return result;
}

/** KV-PAY-020. */
function checkTensors(found, { reference, tensors }) {
  const mismatch = (detail) => refuse('PAYLOAD_TENSORS_MISMATCH', `${reference.digest}: ${detail}`);
  if (found.size !== tensors.length) mismatch(`${found.size} tensors, not ${tensors.length}`);
  for (const { name, dtype, shape } of tensors) {
    const tensor = found.get(name) ?? mismatch(`no ${name}`);
    if (tensor.dtype !== dtype || tensor.shape.join() !== shape.join()) mismatch(`${name} is another`);
  }
}

/** KV-MAN-013. */
function checkChain({ model, namespace, prefix }, tensors) {
  if (tensors === undefined) return;
  const { bytes } = tensors.get('token_ids');
  if (prefixDigest(modelDigest(model), namespace, bytes, prefix.media) !== prefix.digest) {
    refuse('PREFIX_CHAIN_MISMATCH', 'the token ids have another prefix digest');
  }
}

/** Every tensor of every leaf, joined and cut, as dtype, shape and digest. */
function restoreTensors(manifest, groups, payloads, position) {
  const parts = new Map();
  for (const group of groups) {
    let at = 0;
    for (const segment of segments(group)) {
      const tensors = payloads.get(group.payloads[at++].digest);
      for (const { name } of segmentTensors(group, segment)) {
        if (!parts.has(name)) parts.set(name, []);
        parts.get(name).push({ bytes: tensors.get(name).bytes });
      }
    }
  }
  const gone = manifest.prefix.token_count - position;
  const result = {};
  for (const { path, layer } of leaves(manifest.layers)) {
    if (!isWritten(layer)) continue;
    for (const role of rolesInOrder(layer)) {
      const name = `${path}.${role}`;
      const tensor = layer.tensors[role];
      const axis = rowAxis(layer, role);
      const whole = parts.has(name) ? joinRows(parts.get(name), tensor, axis) : Buffer.alloc(0);
      const left = axis === null ? null : tensor.shape[axis] - gone;
      const shape = withRows(tensor.shape, axis, left);
      result[name] = { dtype: tensor.dtype, shape, digest: digestOf(takeRows(whole, tensor, axis, 0, left)) };
    }
  }
  return result;
}

// Groups and segments: SPEC section 8.5.

import { BLOCK } from './prefix.js';
import { KINDS, isSnapshot, isWritten, leaves, rowAxis, rowsOf } from './layers.js';
import { payloadSize, withRows } from './tensors.js';

/** `[start, rows, keep]` of a written leaf. */
function spanOf(layer) {
  if (isSnapshot(layer)) return [0, 0, 0];
  const rows = rowsOf(layer);
  if (layer.kind === 'kv-rotating' && rows < layer.offset) {
    return [layer.offset - (rows - layer.keep), rows - layer.keep, layer.keep];
  }
  return [layer.kind === 'kv-chunked' ? layer.start : 0, rows, 0];
}

/** The groups that follow from the layers, without payloads but with their `leaves` (KV-GRP-001 to KV-GRP-003). */
export function deriveGroups(layers) {
  const groups = new Map();
  for (const { path, layer } of leaves(layers)) {
    if (!isWritten(layer) || (!isSnapshot(layer) && rowsOf(layer) === 0)) continue;
    const { span, window } = KINDS[layer.kind];
    const [start, rows, keep] = spanOf(layer);
    const key = JSON.stringify([span, start, rows, keep, window.map((name) => [name, layer[name]])]);
    if (!groups.has(key)) groups.set(key, { span, start, rows, keep, layers: [], leaves: [] });
    groups.get(key).layers.push(path);
    groups.get(key).leaves.push({ path, layer });
  }
  return [...groups.values()];
}

/** How many segments a group has; its rows can be many. */
export function segmentCount({ span, start, rows, keep }) {
  if (span === 'state') return 1;
  return (keep > 0 ? 1 : 0) + Math.ceil((start + rows) / BLOCK) - Math.floor(start / BLOCK);
}

/** The segments as ranges of stored rows, `{from, to}`; a snapshot's is null (KV-GRP-005 to KV-GRP-007). */
export function* segments({ span, start, rows, keep }) {
  if (span === 'state') {
    yield null;
    return;
  }
  if (keep > 0) yield { from: 0, to: keep };
  for (let at = start; at < start + rows;) {
    const end = Math.min(start + rows, (Math.floor(at / BLOCK) + 1) * BLOCK);
    yield { from: keep + at - start, to: keep + end - start };
    at = end;
  }
}

/** The tensors of a segment, with what they are taken from (KV-GRP-009). */
export function segmentTensors(group, segment) {
  const tensors = [];
  for (const { path, layer } of group.leaves) {
    for (const [role, { dtype, shape }] of Object.entries(layer.tensors)) {
      const axis = rowAxis(layer, role);
      const rows = segment === null ? null : segment.to - segment.from;
      tensors.push({ name: `${path}.${role}`, dtype, shape: withRows(shape, axis, rows), axis, whole: shape });
    }
  }
  return tensors;
}

/** Sizes of a group's payloads, in order; the rows of a segment alone decide. */
export function* segmentSizes(group) {
  const known = new Map();
  for (const segment of segments(group)) {
    const rows = segment === null ? null : segment.to - segment.from;
    if (!known.has(rows)) known.set(rows, payloadSize(segmentTensors(group, segment)));
    yield known.get(rows);
  }
}

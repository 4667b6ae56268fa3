// Writing an object with codec `fast`: no filter, raw blocks: SPEC section 10 (KV-OBJ-021, KV-OBJ-032).

import { canonicalBytes } from './json.js';
import { sha256 } from './digest.js';
import { place } from './tensors.js';
import { chunks, grid } from './filters.js';
import { rawFrame } from './zstd.js';
import { HEADER_MAGIC, OBJECT_TYPE, TABLE_MAGIC } from './object.js';

const CHUNK_BYTES = 1048576;

/** Neighbours of one dtype and shape share a group. */
function groupsOf(placed) {
  const groups = [];
  for (const { name, dtype, shape } of placed) {
    const last = groups.at(-1);
    if (last !== undefined && last.dtype === dtype && last.shape.join() === shape.join()) last.names.push(name);
    else groups.push({ dtype, filter: 'none', names: [name], shape });
  }
  return groups;
}

function skippable(magic, ...content) {
  const body = Buffer.concat(content);
  const head = Buffer.alloc(8);
  head.writeUInt32LE(magic, 0);
  head.writeUInt32LE(body.length, 4);
  return Buffer.concat([head, body]);
}

/** The bytes of an object: `reference` names the payload, `content(name)` gives a tensor's bytes. */
export function encodeObject(tensors, content, reference, namespace) {
  const placed = place(tensors);
  const header = skippable(HEADER_MAGIC, canonicalBytes({
    chunk_bytes: CHUNK_BYTES,
    codec: 'fast',
    groups: groupsOf(placed),
    media_type: OBJECT_TYPE,
    namespace,
    payload: reference,
  }));
  const frames = [];
  for (const tensor of placed) {
    const bytes = content(tensor.name);
    let at = 0;
    // Without a filter the chunks of these grids lie one after another, whole lines that they are.
    const { width, ...rest } = grid(tensor, CHUNK_BYTES);
    for (const { size } of chunks(rest)) {
      const length = size[0] * size[1] * size[2] * width;
      frames.push(rawFrame(bytes.subarray(at, at + length)));
      at += length;
    }
  }
  const sizes = Buffer.alloc(4 * frames.length);
  frames.forEach((frame, index) => sizes.writeUInt32LE(frame.length, 4 * index));
  return Buffer.concat([header, ...frames, skippable(TABLE_MAGIC, sizes, sha256(header, sizes))]);
}

// Reading an object: its header, frame table and frames: SPEC section 10; steps 9 and 10 of the reading order.

import { refuse, recode } from './errors.js';
import { isObject, parse } from './json.js';
import { sha256 } from './digest.js';
import { MAX_NAME, MAX_PAYLOAD, anything, digest, integer, list, oneOf, record, text } from './check.js';
import { dtype, shape } from './manifest.js';
import { byteLength } from './layers.js';
import { FILTERS, chunks, grid, planeCount, unfilter } from './filters.js';
import { MAX_HEADER, MAX_TENSORS, header as payloadHeader, payloadSize, place } from './tensors.js';
import { checkFrame, decodeFrame, frameEnd } from './zstd.js';

export const OBJECT_TYPE = 'application/vnd.kvstore.object.v1+json';
export const HEADER_MAGIC = 0x184d2a50;
export const TABLE_MAGIC = 0x184d2a51;
const MAX_FRAMES = 4194304;
const NAMED = new Set(['FILTER_UNSUPPORTED', 'DTYPE_UNSUPPORTED', 'DIGEST_ALGORITHM_UNSUPPORTED']);

const headerFields = record({
  chunk_bytes: integer(65536, 1048576),
  codec: oneOf(['fast', 'small'], 'FILTER_UNSUPPORTED'),
  groups: list(record({
    dtype,
    filter: oneOf(Object.keys(FILTERS), 'FILTER_UNSUPPORTED'),
    names: list(text({ max: MAX_NAME }), { min: 1, max: MAX_TENSORS }),
    shape,
  }), { max: MAX_TENSORS }),
  media_type: anything,
  namespace: text({ max: MAX_NAME }),
  payload: record({ digest, size: integer(8, MAX_PAYLOAD) }),
});

/** Bytes of the header frame, and the document in it. */
function readHeader(bytes) {
  const invalid = (detail) => refuse('OBJECT_HEADER_INVALID', detail);
  const magic = Buffer.alloc(4);
  magic.writeUInt32LE(HEADER_MAGIC);
  if (!bytes.subarray(0, 4).equals(magic.subarray(0, Math.min(4, bytes.length)))) invalid('another magic number');
  if (bytes.length < 8) refuse('ZSTD_TRUNCATED', 'the object ends within its header');
  const length = bytes.readUInt32LE(4);
  if (length > MAX_HEADER) invalid(`a header of ${length} bytes`);
  if (8 + length > bytes.length) refuse('ZSTD_TRUNCATED', 'the object ends within its header');
  const document = recode('OBJECT_HEADER_INVALID', () => parse(bytes.subarray(8, 8 + length)));
  const type = isObject(document) ? document.media_type : null;
  if (type !== OBJECT_TYPE) {
    const later = typeof type === 'string' && type.startsWith('application/vnd.kvstore.object.');
    refuse(later ? 'OBJECT_VERSION_UNSUPPORTED' : 'OBJECT_HEADER_INVALID', 'media_type');
  }
  recode((code) => (NAMED.has(code) ? code : 'OBJECT_HEADER_INVALID'), () => headerFields(document, 'header'));
  return { document, end: 8 + length };
}

/** The tensors that the header names, checked, with their group's filter. */
function namedTensors({ groups, payload }) {
  const tensors = [];
  const names = new Set();
  for (const group of groups) {
    if (byteLength(group) > MAX_PAYLOAD) refuse('ST_SHAPE_OVERFLOW', 'a tensor above the limit');
    for (const name of group.names) {
      if (name === '' || name === '__metadata__') refuse('ST_HEADER_INVALID', 'a name that no tensor may have');
      if (names.has(name)) refuse('ST_HEADER_INVALID', `${name} is named twice`);
      names.add(name);
      tensors.push({ name, dtype: group.dtype, shape: group.shape, filter: group.filter });
    }
  }
  if (tensors.length > MAX_TENSORS) refuse('ST_HEADER_INVALID', 'too many tensors');
  const total = tensors.reduce((sum, tensor) => sum + byteLength(tensor), 0);
  if (total > MAX_PAYLOAD) refuse('ST_SHAPE_OVERFLOW', 'tensors above the limit');
  if (payloadSize(tensors) !== payload.size) refuse('OBJECT_HEADER_INVALID', 'payload.size is not that of the tensors');
  return tensors;
}

/** Position of the table, once it is proved right; its slots follow from it. */
function findTable(bytes, headerEnd, count) {
  const length = 4 * count + 32;
  const at = bytes.length - 8 - length;
  const here = at >= headerEnd && bytes.readUInt32LE(at) === TABLE_MAGIC && bytes.readUInt32LE(at + 4) === length;
  if (!here) diagnose(bytes, headerEnd, count, length);
  const sizes = bytes.subarray(at + 8, at + 8 + 4 * count);
  if (!sha256(bytes.subarray(0, headerEnd), sizes).equals(bytes.subarray(at + 8 + 4 * count))) {
    refuse('FRAME_TABLE_INVALID', 'the digest is wrong');
  }
  let sum = 0;
  for (let i = 0; i < count; i += 1) sum += sizes.readUInt32LE(4 * i);
  if (sum !== at - headerEnd) refuse('FRAME_TABLE_INVALID', 'the sizes are not those of the frames');
  return at;
}

/** There is no right table at the end: follow the frames to say why (section 10.2). */
function diagnose(bytes, headerEnd, count, length) {
  const truncated = () => refuse('ZSTD_TRUNCATED', 'the object ends too early');
  let at = headerEnd;
  for (let i = 0; i < count; i += 1) {
    at = frameEnd(bytes, at);
    if (at === -1) truncated();
    if (at === null) refuse('FRAME_TABLE_INVALID', 'there are fewer frames than the header leads to');
  }
  const lead = Buffer.alloc(8);
  lead.writeUInt32LE(TABLE_MAGIC, 0);
  lead.writeUInt32LE(length, 4);
  const here = bytes.subarray(at, at + 8);
  if (!here.equals(lead.subarray(0, here.length))) refuse('FRAME_TABLE_INVALID', 'no such table after the last frame');
  if (at + 8 + length > bytes.length) truncated();
  refuse('ZSTD_TRAILING_DATA', 'bytes after the frame table');
}

/** Step 9: everything but decoding. `wanted` is a payload reference. */
export function openObject(bytes, wanted, namespace) {
  const { document, end } = readHeader(bytes);
  const { digest: name, size } = document.payload;
  if (name !== wanted.digest || size !== wanted.size) refuse('OBJECT_NAME_MISMATCH', `an object of ${name}`);
  if (document.namespace !== namespace) refuse('NAMESPACE_MISMATCH', `an object of ${document.namespace}`);
  const tensors = namedTensors(document);
  const grids = tensors.map((tensor) => grid(tensor, document.chunk_bytes));
  const frames = tensors.reduce((sum, { filter }, i) => sum + grids[i].count * planeCount(filter, grids[i].width), 0);
  if (frames > MAX_FRAMES) refuse('FRAME_TABLE_INVALID', 'too many frames');
  const table = findTable(bytes, end, frames);
  const object = { bytes, tensors, grids, start: end, table };
  for (const { slot, plane } of frameSlots(object)) checkFrame(slot, plane);
  return object;
}

/** Every frame with the chunk and the plane that it holds, in order (KV-OBJ-016). */
function* frameSlots({ bytes, tensors, grids, start, table }) {
  let at = start;
  let index = 0;
  for (const [number, { name, filter }] of tensors.entries()) {
    const { width } = grids[number];
    for (const chunk of chunks(grids[number])) {
      const words = chunk.size[0] * chunk.size[1] * chunk.size[2];
      const count = planeCount(filter, width);
      for (let j = 0; j < count; j += 1, index += 1) {
        const size = bytes.readUInt32LE(table + 8 + 4 * index);
        const slot = bytes.subarray(at, at + size);
        at += size;
        yield { slot, plane: count === 1 ? words * width : words, name, filter, number, chunk, last: j === count - 1 };
      }
    }
  }
}

/** Step 10: the canonical payload, `{parts, tensors}`; parts are the header and the data. */
export function decodeObject(object) {
  const placed = place(object.tensors);
  const head = payloadHeader(placed);
  const data = Buffer.alloc(placed.length === 0 ? 0 : placed.at(-1).end);
  const tensors = new Map(placed.map((tensor) => [
    tensor.name, { dtype: tensor.dtype, shape: tensor.shape, bytes: data.subarray(tensor.begin, tensor.end) },
  ]));
  let planes = [];
  for (const { slot, plane, name, filter, number, chunk, last } of frameSlots(object)) {
    const content = Buffer.alloc(plane);
    decodeFrame(slot, content, checkFrame(slot, plane));
    planes.push(content);
    if (last) {
      unfilter(planes, filter, object.grids[number], chunk, tensors.get(name).bytes);
      planes = [];
    }
  }
  return { parts: [head, data], tensors };
}

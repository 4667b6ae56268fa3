// Payloads: their canonical form, and reading one: SPEC section 9.

import { refuse, recode } from './errors.js';
import { MAX_DIM, MAX_NAME, MAX_PAYLOAD, MAX_RANK, codePoints, compareText } from './check.js';
import { isObject, parse, quote } from './json.js';
import { DTYPES, RANK, byteLength } from './layers.js';

export const MAX_TENSORS = 65536;
export const MAX_HEADER = 16777216;

/** Order of tensors (KV-PAY-012). */
function compareTensors(left, right) {
  return RANK[right.dtype] - RANK[left.dtype] || compareText(left.name, right.name);
}

/** Tensors in canonical order, each with the position of its data. */
export function place(tensors) {
  let at = 0;
  return [...tensors].sort(compareTensors).map((tensor) => {
    const begin = at;
    at += byteLength(tensor);
    return { ...tensor, begin, end: at };
  });
}

/** The length and the header of the canonical form of placed tensors. */
export function header(placed) {
  const members = placed.map(({ name, dtype, shape, begin, end }) => (
    `${quote(name)}:{"dtype":"${dtype}","shape":[${shape.join(',')}],"data_offsets":[${begin},${end}]}`));
  const body = Buffer.from(`{${members.join(',')}}`, 'utf8');
  const padded = Math.ceil(body.length / 8) * 8;
  const bytes = Buffer.alloc(8 + padded, 0x20);
  bytes.writeBigUInt64LE(BigInt(padded), 0);
  body.copy(bytes, 8);
  return bytes;
}

/** Bytes of the canonical form; infinite where there is none within the limits. */
export function payloadSize(tensors) {
  if (tensors.length > MAX_TENSORS) return Infinity;
  const placed = place(tensors);
  const data = placed.length === 0 ? 0 : placed.at(-1).end;
  if (!(data <= MAX_PAYLOAD)) return Infinity;
  const head = header(placed).length;
  return head - 8 > MAX_HEADER ? Infinity : head + data;
}

/** Parts of the canonical form: `content(name)` gives a tensor's bytes. */
export function encodePayload(tensors, content) {
  const placed = place(tensors);
  return [header(placed), ...placed.map(({ name }) => content(name))];
}

function checkMember(name, member) {
  const invalid = (detail) => refuse('ST_HEADER_INVALID', `${quote(name)}: ${detail}`);
  if (name === '' || codePoints(name) > MAX_NAME) invalid('a name has 1 to 255 characters');
  const names = isObject(member) ? Object.keys(member).sort().join(' ') : '';
  if (names !== 'data_offsets dtype shape') invalid('members are dtype, shape and data_offsets');
  const { dtype, shape, data_offsets: offsets } = member;
  if (typeof dtype !== 'string') invalid('dtype is no text');
  const natural = (value) => (typeof value === 'bigint' || Number.isInteger(value)) && value >= 0;
  if (!Array.isArray(shape) || shape.length > MAX_RANK || !shape.every(natural)) invalid('shape');
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(natural)) invalid('data_offsets');
  return { name, dtype, shape, begin: offsets[0], end: offsets[1] };
}

/** Refuse bytes that are not the canonical form of some tensors. */
export function checkPayload(bytes) {
  const invalid = (detail) => refuse('ST_HEADER_INVALID', detail);
  if (bytes.length < 8) invalid('less than eight bytes');
  const length = bytes.readBigUInt64LE(0);
  if (length > BigInt(MAX_HEADER) || length > BigInt(bytes.length - 8)) invalid('the header goes beyond its end');
  const head = bytes.subarray(8, 8 + Number(length));
  if (head[0] !== 0x7b) invalid('the header does not begin with a brace');
  const value = recode('ST_HEADER_INVALID', () => parse(head, { canonical: false, foreign: true, asciiKeys: false }));
  if (Object.keys(value).length > MAX_TENSORS) invalid('too many tensors');
  const tensors = [];
  for (const [name, member] of Object.entries(value)) {
    // It is no tensor; what is left cannot be these bytes (KV-PAY-004).
    if (name !== '__metadata__') tensors.push(checkMember(name, member));
  }
  let total = 0;
  for (const { name, dtype, shape } of tensors) {
    if (!DTYPES.includes(dtype)) refuse('DTYPE_UNSUPPORTED', dtype.slice(0, 80));
    if (shape.some((extent) => extent > MAX_DIM)) refuse('ST_SHAPE_OVERFLOW', `${quote(name)}: an extent`);
    total += byteLength({ dtype, shape });
    if (total > MAX_PAYLOAD) refuse('ST_SHAPE_OVERFLOW', `${quote(name)}: bytes`);
  }
  checkOffsets(tensors, bytes.length - 8 - head.length);
  if (!header(place(tensors)).equals(bytes.subarray(0, 8 + head.length))) {
    refuse('ST_NOT_CANONICAL', 'not the canonical header of its tensors');
  }
}

/** Tensors lie one after another, in whatever order, and fill the data (KV-PAY-013, KV-PAY-014). */
function checkOffsets(tensors, size) {
  const invalid = (name) => refuse('ST_OFFSETS_INVALID', quote(name));
  for (const tensor of tensors) {
    if (Number(tensor.end) - Number(tensor.begin) !== byteLength(tensor)) invalid(tensor.name);
  }
  let at = 0;
  const ordered = [...tensors].sort((a, b) => Number(a.begin) - Number(b.begin) || Number(a.end) - Number(b.end));
  for (const { name, begin, end } of ordered) {
    if (Number(begin) !== at) invalid(name);
    at = Number(end);
  }
  if (at !== size) refuse('ST_OFFSETS_INVALID', 'the data does not end where the last tensor does');
}

/** The rows `from` to `to` of a tensor along an axis, as bytes. */
export function takeRows(bytes, { dtype, shape }, axis, from, to) {
  const rows = shape[axis];
  if (axis === null || (from === 0 && to === rows)) return bytes;
  const blocks = shape.slice(0, axis).reduce((product, extent) => product * extent, 1);
  const stride = blocks * rows === 0 ? 0 : byteLength({ dtype, shape }) / blocks;
  const row = rows === 0 ? 0 : stride / rows;
  const parts = [];
  for (let block = 0; block < blocks; block += 1) {
    parts.push(bytes.subarray(block * stride + from * row, block * stride + to * row));
  }
  return Buffer.concat(parts);
}

export function withRows(shape, axis, rows) {
  return axis === null ? shape : shape.map((extent, index) => (index === axis ? rows : extent));
}

/** Segments of a tensor, `[{bytes, rows}]`, joined along the row axis. */
export function joinRows(segments, { dtype, shape }, axis) {
  if (segments.length === 1) return segments[0].bytes;
  const blocks = shape.slice(0, axis).reduce((product, extent) => product * extent, 1);
  const parts = [];
  for (let block = 0; block < blocks; block += 1) {
    for (const { bytes } of segments) {
      const stride = bytes.length / blocks;
      parts.push(bytes.subarray(block * stride, (block + 1) * stride));
    }
  }
  return Buffer.concat(parts, byteLength({ dtype, shape }));
}

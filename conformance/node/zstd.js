// Frames of Zstandard: their headers, their extent, decoding with a bound, and frames of raw blocks:
// SPEC section 10.1, KV-OBJ-017 to KV-OBJ-028; RFC 8878, section 3.1.1.

import { refuse } from './errors.js';
import { corrupt } from './entropy.js';
import { decodeBlock, freshState } from './blocks.js';
import { checksum } from './xxh64.js';

export const MAX_WINDOW = 8388608;
const MAGIC = 0xfd2fb528;
const MIN_FRAME = 13; // KV-OBJ-025
const MAX_BLOCK = 131072;

/** Where a frame ends within `bytes`: -1 if it goes on beyond them, null if it is none, or has a reserved block. */
export function frameEnd(bytes, from) {
  if (from + MIN_FRAME > bytes.length) return -1;
  if (bytes.readUInt32LE(from) !== MAGIC) return null;
  const descriptor = bytes[from + 4];
  let at = from + headerSize(descriptor);
  for (;;) {
    if (at + 3 > bytes.length) return -1;
    const block = bytes.readUIntLE(at, 3);
    const kind = (block >> 1) & 3;
    if (kind === 3) return null;
    at += 3 + (kind === 1 ? 1 : block >> 3);
    if (block & 1) break;
  }
  at += descriptor & 4 ? 4 : 0;
  return at > bytes.length ? -1 : at;
}

const DICTIONARY_BYTES = [0, 1, 2, 4];

function sizeBytes(descriptor) {
  return descriptor >> 6 === 0 ? (descriptor >> 5) & 1 : 1 << (descriptor >> 6);
}

function headerSize(descriptor) {
  return 5 + (descriptor & 32 ? 0 : 1) + DICTIONARY_BYTES[descriptor & 3] + sizeBytes(descriptor);
}

/** Check that `slot` is one frame that states `size` bytes of content, without decoding it (KV-OBJ-025, KV-OBJ-026). */
export function checkFrame(slot, size) {
  const invalid = (detail) => refuse('FRAME_TABLE_INVALID', detail);
  if (slot.length < MIN_FRAME) invalid('a slot is too small for a frame');
  if (slot.readUInt32LE(0) !== MAGIC) corrupt('another magic number');
  const descriptor = slot[4];
  if (descriptor & 8) corrupt('the reserved bit of a frame');
  const head = headerSize(descriptor);
  if (slot.length < head) invalid('a slot is too small for a frame');
  const single = (descriptor & 32) !== 0;
  const dictionaryBytes = DICTIONARY_BYTES[descriptor & 3];
  if (dictionaryBytes > 0) refuse('ZSTD_DICTIONARY_REQUIRED', 'a frame has a dictionary id');
  if (sizeBytes(descriptor) === 0) refuse('ZSTD_SIZE_UNDECLARED', 'a frame does not state its content size');
  if (!(descriptor & 4)) refuse('ZSTD_SIZE_UNDECLARED', 'a frame has no checksum');
  const stated = contentSize(slot, descriptor);
  const window = single ? stated : windowSize(slot[5]);
  if (window > MAX_WINDOW) refuse('ZSTD_WINDOW_TOO_LARGE', `a window of ${window} bytes`);
  if (stated !== size) invalid('a content size that is not the plane\'s');
  const end = frameEnd(slot, 0);
  if (end === null) corrupt('a block of the reserved type');
  if (end !== slot.length) invalid('a slot does not hold one frame alone');
  return { head, maxBlock: Math.min(window, MAX_BLOCK) };
}

function windowSize(byte) {
  const base = 2 ** (10 + (byte >> 3));
  return base + (base / 8) * (byte & 7);
}

function contentSize(slot, descriptor) {
  const bytes = sizeBytes(descriptor);
  const at = headerSize(descriptor) - bytes;
  if (bytes === 8) return Number(slot.readBigUInt64LE(at));
  return slot.readUIntLE(at, bytes) + (bytes === 2 ? 256 : 0);
}

/** Decode a frame that checkFrame has passed into all of `target`. */
export function decodeFrame(slot, target, { head, maxBlock }) {
  const state = freshState();
  let from = head;
  let to = 0;
  for (let last = 0; !last;) {
    const block = slot.readUIntLE(from, 3);
    const kind = (block >> 1) & 3;
    const size = block >> 3;
    last = block & 1;
    from += 3;
    if (size > maxBlock) corrupt('a block that is too large');
    if (kind === 2) {
      to = decodeBlock(slot.subarray(from, from + size), target, to, state, maxBlock);
      from += size;
      continue;
    }
    if (to + size > target.length) corrupt('more content than stated');
    if (kind === 0) slot.copy(target, to, from, from + size);
    else target.fill(slot[from], to, to + size);
    from += kind === 0 ? size : 1;
    to += size;
  }
  if (to !== target.length) corrupt('less content than stated');
  if (slot.readUInt32LE(from) !== checksum(target)) corrupt('a wrong checksum');
}

/** A frame of raw blocks that states its size and carries a checksum. */
export function rawFrame(content) {
  const head = Buffer.alloc(9);
  head.writeUInt32LE(MAGIC, 0);
  head[4] = 0b10100100; // size in four bytes, one segment, checksum
  head.writeUInt32LE(content.length, 5);
  const parts = [head];
  let at = 0;
  do {
    const body = content.subarray(at, at + MAX_BLOCK);
    at += body.length;
    const block = Buffer.alloc(3);
    block.writeUIntLE((body.length << 3) | (at === content.length ? 1 : 0), 0, 3);
    parts.push(block, body);
  } while (at < content.length);
  const tail = Buffer.alloc(4);
  tail.writeUInt32LE(checksum(content), 0);
  return Buffer.concat([...parts, tail]);
}

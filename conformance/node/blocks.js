// Compressed blocks of Zstandard: literals, sequences, and what they copy: RFC 8878, section 3.1.1.3; SPEC KV-OBJ-017.

import { BackwardBits, buildFse, corrupt, decodeHuffman, readFse, readHuffman, singleFse } from './entropy.js';

const ones = (count) => new Array(count).fill(1);
const extra = (plain, rest) => [...new Array(plain).fill(0), ...rest];

/** Codes of literal lengths, offsets and match lengths: extra bits, first value, default table, limits. */
const LITERALS = {
  bits: extra(16, [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
  first: 0,
  counts: [4, 3, ...new Array(11).fill(2), 1, 1, 1, ...new Array(9).fill(2), 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1],
  log: 6, maxLog: 9, maxSymbol: 35,
};
const OFFSETS = {
  counts: [...ones(6), 2, 2, 2, ...ones(15), -1, -1, -1, -1, -1], log: 5, maxLog: 8, maxSymbol: 31,
};
const MATCHES = {
  bits: extra(32, [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
  first: 3,
  counts: [1, 4, 3, ...new Array(6).fill(2), ...ones(37), ...new Array(7).fill(-1)],
  log: 6, maxLog: 9, maxSymbol: 52,
};
for (const code of [LITERALS, MATCHES]) {
  let value = code.first;
  code.base = code.bits.map((count) => {
    const base = value;
    value += 2 ** count;
    return base;
  });
}
for (const code of [LITERALS, OFFSETS, MATCHES]) code.table = buildFse(code.counts, code.log);

/** What one block leaves for the next. */
export function freshState() {
  return { tree: null, tables: [null, null, null], offsets: [1, 4, 8] };
}

function readLiterals(bytes, state, maxBlock) {
  const kind = bytes[0] & 3;
  const format = (bytes[0] >> 2) & 3;
  const at = (index) => (index < bytes.length ? bytes[index] : corrupt('literals that end too early'));
  if (kind < 2) { // raw, or one byte repeated
    const head = format === 1 ? 2 : format === 3 ? 3 : 1;
    let size = bytes[0] >> 3;
    if (head > 1) size = (bytes[0] >> 4) + (at(1) << 4) + (head === 3 ? at(2) << 12 : 0);
    if (size > maxBlock) corrupt('more literals than a block may hold');
    const used = head + (kind === 0 ? size : 1);
    if (used > bytes.length) corrupt('literals that end too early');
    return { literals: kind === 0 ? bytes.subarray(head, used) : Buffer.alloc(size, bytes[head]), used };
  }
  const head = format < 2 ? 3 : format + 2;
  const width = format < 2 ? 10 : 4 * format + 6;
  let word = 0;
  for (let i = head - 1; i >= 0; i -= 1) word = word * 256 + at(i);
  word = Math.floor(word / 16);
  const size = word % 2 ** width;
  const used = head + Math.floor(word / 2 ** width);
  if (size > maxBlock || used > bytes.length) corrupt('literals that do not fit');
  let body = bytes.subarray(head, used);
  if (kind === 2) {
    const { tree, used: taken } = readHuffman(body);
    state.tree = tree;
    body = body.subarray(taken);
  }
  if (state.tree === null) corrupt('no Huffman tree to use again');
  const literals = Buffer.alloc(size);
  if (format === 0) decodeHuffman(state.tree, body, literals);
  else decodeFour(state.tree, body, literals);
  return { literals, used };
}

function decodeFour(tree, body, literals) {
  if (body.length < 10 || literals.length < 6) corrupt('four streams that are too short');
  const part = (literals.length + 3) >> 2;
  let from = 6;
  for (let i = 0; i < 4; i += 1) {
    const to = i === 3 ? body.length : from + body.readUInt16LE(2 * i);
    if (to > body.length || to <= from) corrupt('a stream that ends outside of its block');
    if (i < 3 && part * (i + 1) > literals.length) corrupt('four streams of too few literals');
    const end = i === 3 ? literals.length : part * (i + 1);
    decodeHuffman(tree, body.subarray(from, to), literals.subarray(part * i, end));
    from = to;
  }
}

function readTable(code, mode, before, bytes) {
  if (mode === 0) return { table: code.table, used: 0 };
  if (mode === 1) {
    if (bytes.length < 1 || bytes[0] > code.maxSymbol) corrupt('a code that does not exist');
    return { table: singleFse(bytes[0]), used: 1 };
  }
  if (mode === 2) return readFse(bytes, code.maxLog, code.maxSymbol);
  if (before === null) corrupt('no table to use again');
  return { table: before, used: 0 };
}

/** Number of sequences, and the bit stream that holds them. */
function readSequences(bytes, state) {
  const at = (index) => (index < bytes.length ? bytes[index] : corrupt('sequences that end too early'));
  let count = at(0);
  let used = 1;
  if (count === 255) {
    count = at(1) + (at(2) << 8) + 0x7f00;
    used = 3;
  } else if (count >= 128) {
    count = ((count - 128) << 8) + at(1);
    used = 2;
  }
  if (count === 0) {
    if (used !== bytes.length) corrupt('bytes after a block without sequences');
    return { count, stream: null };
  }
  const modes = at(used);
  if ((modes & 3) !== 0) corrupt('reserved bits of the sequences');
  used += 1;
  [LITERALS, OFFSETS, MATCHES].forEach((code, index) => {
    const result = readTable(code, (modes >> (6 - 2 * index)) & 3, state.tables[index], bytes.subarray(used));
    state.tables[index] = result.table;
    used += result.used;
  });
  return { count, stream: new BackwardBits(bytes.subarray(used)) };
}

/** The distance of a match, by value and the three last ones. */
function distance(value, offsets, noLiterals) {
  if (value > 3) {
    offsets.unshift(value - 3);
    offsets.pop();
    return offsets[0];
  }
  const index = value - 1 + (noLiterals ? 1 : 0);
  const chosen = index === 3 ? offsets[0] - 1 : offsets[index];
  if (chosen === 0) corrupt('a match at distance 0');
  if (index > 0) {
    offsets.splice(Math.min(index, 2), 1);
    offsets.unshift(chosen);
  }
  return chosen;
}

/** Decode a compressed block to `target` from `at` on, never beyond its end; the position after it. */
export function decodeBlock(bytes, target, at, state, maxBlock) {
  if (bytes.length < 2) corrupt('a compressed block of less than two bytes');
  const { literals, used } = readLiterals(bytes, state, maxBlock);
  const { count, stream } = readSequences(bytes.subarray(used), state);
  const limit = Math.min(target.length, at + maxBlock);
  let from = 0;
  let to = at;
  const copyLiterals = (length) => {
    if (from + length > literals.length || to + length > limit) corrupt('literals that do not fit');
    literals.copy(target, to, from, from + length);
    from += length;
    to += length;
  };
  if (count > 0) {
    const tables = state.tables;
    const [ll, of, ml] = tables.map((table) => stream.read(table.log));
    const states = [ll, of, ml];
    for (let i = 0; i < count; i += 1) {
      const [literalCode, offsetCode, matchCode] = states.map((value, index) => tables[index].symbols[value]);
      const value = 2 ** offsetCode + stream.read(offsetCode);
      const match = MATCHES.base[matchCode] + stream.read(MATCHES.bits[matchCode]);
      const length = LITERALS.base[literalCode] + stream.read(LITERALS.bits[literalCode]);
      if (i + 1 < count) {
        for (const index of [0, 2, 1]) {
          const table = tables[index];
          states[index] = table.base[states[index]] + stream.read(table.bits[states[index]]);
        }
      }
      if (stream.left < 0) corrupt('sequences that end too early');
      copyLiterals(length);
      const back = distance(value, state.offsets, length === 0);
      if (back > to || to + match > limit) corrupt('a match that does not fit');
      for (let k = 0; k < match; k += 1, to += 1) target[to] = target[to - back];
    }
    if (stream.left !== 0) corrupt('bits after the last sequence');
  }
  copyLiterals(literals.length - from);
  return to;
}

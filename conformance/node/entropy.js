// Entropy coding of Zstandard: bit streams, FSE tables, Huffman trees: RFC 8878, section 4; SPEC KV-OBJ-017.

import { refuse } from './errors.js';

export function corrupt(detail) {
  refuse('ZSTD_CORRUPT', detail);
}

export function highBit(value) {
  return 31 - Math.clz32(value);
}

/** A bit stream that is read from its end; below its beginning there are zeros, and `left` is negative. */
export class BackwardBits {
  constructor(bytes) {
    const last = bytes[bytes.length - 1];
    if (!last) corrupt('a bit stream without its end mark');
    this.bytes = bytes;
    this.left = 8 * (bytes.length - 1) + highBit(last);
  }

  read(count) {
    this.left -= count;
    return this.bitsAt(this.left, count);
  }

  peek(count) {
    return this.bitsAt(this.left - count, count);
  }

  bitsAt(from, count) {
    if (count === 0) return 0;
    if (count > 24) return this.bitsAt(from + 16, count - 16) * 65536 + this.bitsAt(from, 16);
    const byte = from >> 3;
    const word = (this.byte(byte) | (this.byte(byte + 1) << 8) | (this.byte(byte + 2) << 16)
      | (this.byte(byte + 3) << 24)) >>> (from & 7);
    return word & ((1 << count) - 1);
  }

  byte(index) {
    return index < 0 || index >= this.bytes.length ? 0 : this.bytes[index];
  }
}

/** The decoding table of normalized counts. */
export function buildFse(counts, log) {
  const size = 1 << log;
  const symbols = new Uint8Array(size);
  const next = counts.map((count) => (count === -1 ? 1 : count));
  let high = size;
  counts.forEach((count, symbol) => {
    if (count === -1) symbols[high -= 1] = symbol;
  });
  const step = (size >> 1) + (size >> 3) + 3;
  let at = 0;
  counts.forEach((count, symbol) => {
    for (let i = 0; i < count; i += 1) {
      symbols[at] = symbol;
      do at = (at + step) & (size - 1);
      while (at >= high);
    }
  });
  if (at !== 0) corrupt('FSE counts that do not fill the table');
  const bits = new Uint8Array(size);
  const base = new Uint16Array(size);
  for (let state = 0; state < size; state += 1) {
    const number = next[symbols[state]]++;
    bits[state] = log - highBit(number);
    base[state] = (number << bits[state]) - size;
  }
  return { log, symbols, bits, base };
}

/** The table that always gives one symbol. */
export function singleFse(symbol) {
  return { log: 0, symbols: Uint8Array.of(symbol), bits: new Uint8Array(1), base: new Uint16Array(1) };
}

/** An FSE table description at the beginning of `bytes`: the table and the bytes that it takes. */
export function readFse(bytes, maxLog, maxSymbol) {
  let position = 0;
  const read = (count) => {
    let value = 0;
    for (let i = 0; i < count; i += 1, position += 1) {
      if (position >> 3 >= bytes.length) corrupt('an FSE description that ends too early');
      value |= ((bytes[position >> 3] >> (position & 7)) & 1) << i;
    }
    return value;
  };
  const log = read(4) + 5;
  if (log > maxLog) corrupt('an FSE table that is too large');
  const counts = [];
  let remaining = 1 << log;
  while (remaining > 0 && counts.length <= maxSymbol) {
    const width = highBit(remaining + 1) + 1;
    const mask = (1 << (width - 1)) - 1;
    const spare = (1 << width) - 2 - remaining;
    let value = read(width - 1);
    if (value >= spare) {
      value |= read(1) << (width - 1);
      if (value > mask) value -= spare;
    }
    const count = value - 1;
    remaining -= Math.abs(count);
    counts.push(count);
    let repeat = count === 0 ? 3 : 0;
    while (repeat === 3) {
      repeat = read(2);
      for (let i = 0; i < repeat; i += 1) counts.push(0);
    }
  }
  if (remaining !== 0 || counts.length > maxSymbol + 1) corrupt('FSE counts that do not add up');
  return { table: buildFse(counts, log), used: (position + 7) >> 3 };
}

/** Weights of a Huffman tree, coded by two interleaved FSE states. */
function readWeights(bytes) {
  const { table, used } = readFse(bytes, 6, 255);
  const stream = new BackwardBits(bytes.subarray(used));
  const states = [stream.read(table.log), stream.read(table.log)];
  if (stream.left < 0) corrupt('Huffman weights that end too early');
  const weights = [];
  for (let turn = 0; ; turn ^= 1) {
    weights.push(table.symbols[states[turn]]);
    states[turn] = table.base[states[turn]] + stream.read(table.bits[states[turn]]);
    if (stream.left < 0) {
      weights.push(table.symbols[states[turn ^ 1]]);
      return weights;
    }
    if (weights.length > 255) corrupt('too many Huffman weights');
  }
}

/** A Huffman tree description: the decoding table and the bytes that it takes. */
export function readHuffman(bytes) {
  if (bytes.length < 1) corrupt('no Huffman tree');
  const header = bytes[0];
  const used = 1 + (header < 128 ? header : (header - 126) >> 1);
  if (used > bytes.length) corrupt('a Huffman tree that ends too early');
  let weights;
  if (header < 128) {
    weights = readWeights(bytes.subarray(1, used));
  } else {
    const nibble = (_, i) => (bytes[1 + (i >> 1)] >> (i & 1 ? 0 : 4)) & 15;
    weights = Array.from({ length: header - 127 }, nibble);
  }
  const sum = weights.reduce((total, weight) => total + (weight === 0 ? 0 : 2 ** (weight - 1)), 0);
  if (sum === 0 || sum >= 2 ** 11 || weights.length > 255) corrupt('Huffman weights out of range');
  const log = highBit(sum) + 1;
  const rest = (1 << log) - sum;
  if ((rest & (rest - 1)) !== 0) corrupt('Huffman weights that leave no power of two');
  weights.push(highBit(rest) + 1);
  const symbols = new Uint8Array(1 << log);
  const bits = new Uint8Array(1 << log);
  let at = 0;
  for (let weight = 1; weight <= log; weight += 1) {
    weights.forEach((other, symbol) => {
      if (other !== weight) return;
      const end = at + (1 << (weight - 1));
      symbols.fill(symbol, at, end);
      bits.fill(log + 1 - weight, at, end);
      at = end;
    });
  }
  return { tree: { log, symbols, bits }, used };
}

/** Decode one Huffman stream into all of `target`. */
export function decodeHuffman(tree, bytes, target) {
  const stream = new BackwardBits(bytes);
  for (let i = 0; i < target.length; i += 1) {
    const code = stream.peek(tree.log);
    target[i] = tree.symbols[code];
    stream.left -= tree.bits[code];
    if (stream.left < 0) corrupt('a Huffman stream that ends too early');
  }
  if (stream.left !== 0) corrupt('a Huffman stream that is too long');
}

// XXH64 with seed 0, whose low four bytes are a frame's checksum: RFC 8878, section 3.1.1; SPEC KV-OBJ-018, KV-OBJ-028.

const P1 = 0x9e3779b185ebca87n;
const P2 = 0xc2b2ae3d27d4eb4fn;
const P3 = 0x165667b19e3779f9n;
const P4 = 0x85ebca77c2b2ae63n;
const P5 = 0x27d4eb2f165667c5n;
const MASK = 0xffffffffffffffffn;

const rotate = (x, n) => ((x << n) | (x >> (64n - n))) & MASK;
const round = (lane, word) => (rotate((lane + word * P2) & MASK, 31n) * P1) & MASK;
const merge = (hash, lane) => ((hash ^ round(0n, lane)) * P1 + P4) & MASK;

export function xxh64(bytes) {
  let at = 0;
  let hash;
  if (bytes.length >= 32) {
    const lanes = [(P1 + P2) & MASK, P2, 0n, (-P1) & MASK];
    for (; at + 32 <= bytes.length; at += 32) {
      for (let i = 0; i < 4; i += 1) lanes[i] = round(lanes[i], bytes.readBigUInt64LE(at + 8 * i));
    }
    hash = (rotate(lanes[0], 1n) + rotate(lanes[1], 7n) + rotate(lanes[2], 12n) + rotate(lanes[3], 18n)) & MASK;
    for (const lane of lanes) hash = merge(hash, lane);
  } else {
    hash = P5;
  }
  hash = (hash + BigInt(bytes.length)) & MASK;
  for (; at + 8 <= bytes.length; at += 8) {
    hash = (rotate(hash ^ round(0n, bytes.readBigUInt64LE(at)), 27n) * P1 + P4) & MASK;
  }
  if (at + 4 <= bytes.length) {
    hash = (rotate(hash ^ ((BigInt(bytes.readUInt32LE(at)) * P1) & MASK), 23n) * P2 + P3) & MASK;
    at += 4;
  }
  for (; at < bytes.length; at += 1) hash = (rotate(hash ^ ((BigInt(bytes[at]) * P5) & MASK), 11n) * P1) & MASK;
  hash = ((hash ^ (hash >> 33n)) * P2) & MASK;
  hash = ((hash ^ (hash >> 29n)) * P3) & MASK;
  return hash ^ (hash >> 32n);
}

export function checksum(bytes) {
  return Number(xxh64(bytes) & 0xffffffffn);
}

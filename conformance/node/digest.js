// Digests: SPEC section 5, and the model digest of section 7.1.

import { createHash } from 'node:crypto';
import { canonicalBytes } from './json.js';

export function sha256(...parts) {
  const hash = createHash('sha256');
  for (const part of parts) hash.update(part);
  return hash.digest();
}

/** `sha256:` and the hex digits. */
export function digestOf(...parts) {
  return named(sha256(...parts));
}

export function named(raw) {
  return `sha256:${raw.toString('hex')}`;
}

/** H(tag, part, ...): the tag and each part, each after its length (KV-DIG-005). */
export function tagged(tag, ...parts) {
  const hash = createHash('sha256');
  for (const part of [Buffer.from(tag, 'ascii'), ...parts]) {
    const length = Buffer.alloc(8);
    length.writeBigUInt64LE(BigInt(part.length));
    hash.update(length).update(part);
  }
  return hash.digest();
}

export function modelDigest(model) {
  return named(tagged('kvstore model v1', canonicalBytes(model)));
}

export function layoutDigest(buffers) {
  return named(tagged('kvstore layout v1', canonicalBytes(buffers)));
}

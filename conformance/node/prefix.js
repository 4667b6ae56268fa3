// The prefix chain: SPEC section 11.

import { refuse } from './errors.js';
import { canonicalBytes } from './json.js';
import { named, tagged } from './digest.js';

export const BLOCK = 256;
const MAX_TOKEN_ID = 2 ** 32 - 1;

/** Token ids as unsigned 32-bit little-endian integers (KV-PFX-002, KV-PFX-006). */
export function encodeTokenIds(tokenIds) {
  const bytes = Buffer.alloc(4 * tokenIds.length);
  tokenIds.forEach((id, index) => {
    if (!Number.isInteger(id) || id < 0 || id > MAX_TOKEN_ID) {
      refuse('TOKEN_ID_RANGE', `token_ids.${index} is no unsigned 32-bit integer`);
    }
    bytes.writeUInt32LE(id, 4 * index);
  });
  return bytes;
}

/** All links, the root first: `[{tokens, digest}]`; `encoded` is what encodeTokenIds gives. */
export function chain(model, namespace, encoded, media) {
  const count = encoded.length / 4;
  let link = tagged('kvstore prefix v1', Buffer.from(model, 'ascii'), Buffer.from(namespace, 'ascii'));
  const links = [{ tokens: 0, digest: named(link) }];
  for (let begin = 0; begin < count; begin += BLOCK) {
    const end = Math.min(begin + BLOCK, count);
    const inside = media.filter((item) => item.start < end && item.start + item.length > begin);
    const tag = end - begin === BLOCK ? 'kvstore block v1' : `kvstore tail v1 ${end - begin}`;
    link = tagged(tag, link, encoded.subarray(4 * begin, 4 * end),
      inside.length === 0 ? Buffer.alloc(0) : canonicalBytes(inside));
    links.push({ tokens: end, digest: named(link) });
  }
  return links;
}

export function prefixDigest(model, namespace, encoded, media) {
  return chain(model, namespace, encoded, media).at(-1).digest;
}

// Receipts and layout documents: SPEC sections 12 and 13.

import { refuse } from './errors.js';
import { isObject, parse } from './json.js';
import { layoutDigest } from './digest.js';
import {
  MAX_NAME, MAX_PAYLOAD, MAX_TOKENS,
  anything, digest, integer, list, map, mediaType, nullable, object, oneOf, record, text,
} from './check.js';
import { byteLength } from './layers.js';
import { dtype, shape } from './manifest.js';

const MAX_DOCUMENT = 16777216;
const anyText = text();
const shortText = text({ max: MAX_NAME });

function time(value, where) {
  anyText(value, where);
  const match = /^(\d{4})-(\d{2})-(\d{2})T(\d{2}):(\d{2}):(\d{2})(\.\d{1,6})?Z$/.exec(value);
  const [year, month, day, hour, minute, second] = match === null ? [] : match.slice(1, 7).map(Number);
  const days = month === 2 ? 28 + (year % 4 === 0 && (year % 100 !== 0 || year % 400 === 0) ? 1 : 0)
    : [4, 6, 9, 11].includes(month) ? 30 : 31;
  const right = year >= 1 && month >= 1 && month <= 12 && day >= 1 && day <= days && hour <= 23 && minute <= 59 && second <= 59;
  if (!right) refuse('FIELD_FORMAT', `${where} is no time in UTC`);
}

const texts = map(anyText, shortText);
const producerFields = record({ name: shortText, version: shortText }, { open: true });

function producer(value, where) {
  producerFields(value, where);
  texts(value, where);
}

const receiptFields = record({
  checks: map(anyText, oneOf(['failed', 'not observable', 'skipped', 'verified'])),
  device: nullable(object),
  facts: object,
  libraries: texts,
  made_at: time,
  media_type: anything,
  producer,
  subject: digest,
  type: oneOf(['conformance', 'load', 'verify', 'write']),
}, { open: true });

function open(bytes, type) {
  if (bytes.length > MAX_DOCUMENT) refuse('DOC_TOO_LARGE', `more than ${MAX_DOCUMENT} bytes`);
  const document = parse(bytes);
  if (!isObject(document)) refuse('FIELD_TYPE', 'the document is no object');
  mediaType(document, type);
  return document;
}

export function checkReceipt(bytes) {
  receiptFields(open(bytes, 'application/vnd.kvstore.receipt.v1+json'), 'receipt');
}

const layoutFields = record({
  buffers: list(record({ byte_len: integer(0, MAX_PAYLOAD), dtype, role: shortText, shape })),
  layout_digest: digest,
  media_type: anything,
  token_count: integer(0, MAX_TOKENS),
  total_bytes: integer(0, Number.MAX_SAFE_INTEGER),
});

export function checkLayout(bytes) {
  const layout = open(bytes, 'application/vnd.kvstore.layout.v1+json');
  layoutFields(layout, 'layout');
  let total = 0;
  for (const buffer of layout.buffers) {
    if (byteLength(buffer) !== buffer.byte_len) refuse('SHAPE_INCONSISTENT', `byte_len of ${buffer.role}`);
    total += buffer.byte_len;
  }
  if (total !== layout.total_bytes) refuse('SHAPE_INCONSISTENT', 'total_bytes is not the sum');
  if (layoutDigest(layout.buffers) !== layout.layout_digest) refuse('LAYOUT_DIGEST_MISMATCH', 'layout_digest');
}

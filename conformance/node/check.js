// Checks of one field at a time, from which the documents' checks are put together:
// SPEC sections 5 (spelling of digests), 6 (media types, payload references) and 4 (KV-JSN-016).
//
// A check is a function of a value and of the place where it stands; it refuses, or returns nothing.

import { refuse } from './errors.js';
import { isObject } from './json.js';

export const MAX_NAME = 255;
export const MAX_TOKENS = 67108864;
export const MAX_DIM = 2 ** 31 - 1;
export const MAX_RANK = 8;
export const MAX_PAYLOAD = 2 ** 40;
export const DIGEST = /^sha256:[0-9a-f]{64}$/;

export function object(value, where) {
  if (!isObject(value)) refuse('FIELD_TYPE', `${where} is no object`);
}

/** Fields that are all required; others are refused unless the record is `open`. */
export function record(fields, { open = false } = {}) {
  return (value, where) => {
    object(value, where);
    for (const name of Object.keys(value)) {
      if (!open && !Object.hasOwn(fields, name)) refuse('FIELD_UNKNOWN', `${where}.${name}`);
    }
    for (const [name, check] of Object.entries(fields)) {
      if (!Object.hasOwn(value, name)) refuse('FIELD_MISSING', `${where}.${name}`);
      check(value[name], `${where}.${name}`);
    }
  };
}

/** An object whose keys are names. */
export function map(key, check, { max = Infinity } = {}) {
  return (value, where) => {
    object(value, where);
    if (Object.keys(value).length > max) refuse('LIMIT_EXCEEDED', `${where} has more than ${max} members`);
    for (const name of Object.keys(value)) {
      key(name, `a name in ${where}`);
      check(value[name], `${where}.${name}`);
    }
  };
}

export function list(check, { min = 0, max = Infinity } = {}) {
  return (value, where) => {
    if (!Array.isArray(value)) refuse('FIELD_TYPE', `${where} is no array`);
    if (value.length < min) refuse('FIELD_RANGE', `${where} has fewer than ${min} items`);
    if (value.length > max) refuse('LIMIT_EXCEEDED', `${where} has more than ${max} items`);
    value.forEach((item, index) => check(item, `${where}.${index}`));
  };
}

export function text({ max = Infinity, pattern = null } = {}) {
  return (value, where) => {
    if (typeof value !== 'string') refuse('FIELD_TYPE', `${where} is no text`);
    if (codePoints(value) > max) refuse('FIELD_RANGE', `${where} has more than ${max} characters`);
    if (pattern !== null && !pattern.test(value)) refuse('FIELD_FORMAT', `${where} has another form`);
  };
}

export function integer(min, max) {
  return (value, where) => {
    if (typeof value !== 'bigint' && !Number.isInteger(value)) refuse('FIELD_TYPE', `${where} is no integer`);
    if (value < min || value > max) refuse('FIELD_RANGE', `${where} is not within ${min} ... ${max}`);
  };
}

export function oneOf(values, code = 'FIELD_FORMAT') {
  return (value, where) => {
    if (typeof value !== 'string') refuse('FIELD_TYPE', `${where} is no text`);
    if (!values.includes(value)) refuse(code, `${where} is ${value.slice(0, 80)}`);
  };
}

export function nullable(check) {
  return (value, where) => {
    if (value !== null) check(value, where);
  };
}

export function anything() {}

export function digest(value, where) {
  if (typeof value !== 'string') refuse('FIELD_TYPE', `${where} is no text`);
  const [, algorithm = 'sha256'] = /^([a-z0-9+._-]+):/.exec(value) ?? [];
  if (algorithm !== 'sha256') refuse('DIGEST_ALGORITHM_UNSUPPORTED', `${where}: ${algorithm.slice(0, 80)}`);
  if (!DIGEST.test(value)) refuse('FIELD_FORMAT', `${where} is no digest`);
}

export const payloadReference = record({ digest, size: integer(8, MAX_PAYLOAD) });

/** `media_type` comes before any other field (KV-MED-002). */
export function mediaType(document, expected) {
  object(document, 'document');
  if (!Object.hasOwn(document, 'media_type')) refuse('FIELD_MISSING', 'media_type');
  if (typeof document.media_type !== 'string') refuse('FIELD_TYPE', 'media_type is no text');
  if (document.media_type !== expected) refuse('MEDIA_TYPE_UNKNOWN', `media_type is not ${expected}`);
}

export function codePoints(value) {
  let count = 0;
  for (const _ of value) count += 1;
  return count;
}

/** Order of code points, which is that of UTF-8 bytes. */
export function compareText(left, right) {
  return Buffer.compare(Buffer.from(left, 'utf8'), Buffer.from(right, 'utf8'));
}

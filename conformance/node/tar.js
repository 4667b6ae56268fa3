// Tar archives of bundles, in the pax interchange format, and what KV-BUN-019 wants of GNU's:
// SPEC KV-BUN-016, KV-BUN-020 (and KV-BUN-003 for what is no plain file).

import { fstatSync, readSync } from 'node:fs';
import { refuse } from './errors.js';

const BLOCK = 512;
const MAX_EXTENDED = 1048576;

const broken = (detail) => refuse('BUNDLE_LAYOUT_INVALID', `no tar archive: ${detail}`);

function readAt(file, length, position) {
  const bytes = Buffer.alloc(length);
  let done = 0;
  while (done < length) {
    const count = readSync(file, bytes, done, length - done, position + done);
    if (count === 0) broken('it ends too early');
    done += count;
  }
  return bytes;
}

function text(bytes) {
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    return refuse('PATH_UNSAFE', 'a path that is not UTF-8');
  }
}

function field(header, at, length) {
  const bytes = header.subarray(at, at + length);
  const end = bytes.indexOf(0);
  return text(end === -1 ? bytes : bytes.subarray(0, end));
}

/** A number, as octal digits or, after a byte 0x80, in base 256. */
function number(header, at, length) {
  if (header[at] !== 0x80) return octal(header, at, length);
  const value = BigInt(`0x${header.subarray(at + 1, at + length).toString('hex')}`);
  return value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : broken('a number');
}

/** Mode, owner, group, time and device: they mean nothing here, but a header with another text is none. */
const NUMBERS = [[100, 8], [108, 8], [116, 8], [136, 12], [329, 8], [337, 8]];

function checkNumbers(header) {
  for (const [at, length] of NUMBERS) if (header[at] !== 0xff) number(header, at, length);
}

function octal(header, at, length) {
  const digits = header.subarray(at, at + length).toString('latin1').replace(/[\0 ]+$/, '').trimStart();
  if (!/^[0-7]*$/.test(digits)) broken('a number that is not octal');
  return parseInt(digits || '0', 8);
}

function checkSum(header) {
  let sum = 8 * 0x20;
  header.forEach((byte, index) => {
    if (index < 148 || index >= 156) sum += byte;
  });
  if (octal(header, 148, 8) !== sum) broken('the checksum of a header is wrong');
}

/** Records `length key=value\n` of an extended header. */
function extended(bytes) {
  const records = new Map();
  for (let at = 0; at < bytes.length;) {
    const space = bytes.indexOf(0x20, at);
    const length = space === -1 ? '' : bytes.subarray(at, space).toString('latin1');
    const end = at + Number(length);
    if (!/^[1-9][0-9]*$/.test(length) || end > bytes.length || end <= space || bytes[end - 1] !== 0x0a) {
      broken('an extended header');
    }
    const record = bytes.subarray(space + 1, end - 1);
    const equals = record.indexOf(0x3d);
    if (equals === -1) broken('an extended header');
    records.set(record.subarray(0, equals).toString('latin1'), record.subarray(equals + 1));
    at = end;
  }
  return records;
}

/** All members in order: `{path, folder, size, position}`; `other` where one is neither file nor folder. */
export function members(file) {
  const { size: total } = fstatSync(file);
  const found = [];
  const always = new Map();
  let next = new Map();
  let long = null;
  for (let at = 0; ;) {
    if (at + BLOCK > total) broken('it has no end');
    const header = readAt(file, BLOCK, at);
    if (header.every((byte) => byte === 0)) return found;
    checkSum(header);
    at += BLOCK;
    const kind = String.fromCharCode(header[156]);
    checkNumbers(header);
    // Links, devices, folders and pipes have no content, whatever their headers say.
    let size = /[1-6]/.test(kind) ? 0 : number(header, 124, 12);
    const records = new Map([...always, ...next]);
    if (!/[xg1-6]/.test(kind) && records.get('size') !== undefined) {
      const digits = records.get('size').toString('latin1');
      if (!/^[0-9]{1,15}$/.test(digits)) broken('a size');
      size = Number(digits);
    }
    if (at + size > total) broken('it ends too early');
    if (kind === 'x' || kind === 'g') {
      if (size > MAX_EXTENDED) broken('an extended header that is too large');
      const more = extended(readAt(file, size, at));
      if (kind === 'x') next = more;
      else for (const [key, value] of more) always.set(key, value);
    } else if (kind === 'L') {
      if (size > MAX_EXTENDED) broken('a long name that is too long');
      const name = readAt(file, size, at);
      long = field(name, 0, name.length);
    } else if (kind !== 'K') { // the target of a link, which is refused itself
      found.push({ ...describe(header, kind, records, long), size, position: at });
      [next, long] = [new Map(), null];
    }
    at += Math.ceil(size / BLOCK) * BLOCK;
  }
}

function describe(header, kind, records, long) {
  let path = long;
  if (records.has('path')) {
    path = text(records.get('path'));
  } else if (path === null) {
    const prefix = header.subarray(257, 263).toString('latin1') === 'ustar\0' ? field(header, 345, 155) : '';
    path = (prefix === '' ? '' : `${prefix}/`) + field(header, 0, 100);
  }
  const sparse = [...records.keys()].some((key) => key.startsWith('GNU.sparse'));
  const member = named(path, kind);
  return { ...member, other: member.other || (sparse && !member.folder) };
}

function named(path, kind) {
  const folder = kind === '5' || (kind === '\0' && path.endsWith('/'));
  return { path, folder, other: !folder && !['0', '\0', '7'].includes(kind) };
}

export function content(file, { size, position }) {
  return readAt(file, size, position);
}

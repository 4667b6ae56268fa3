// Bundles, as directories and as tar archives: SPEC section 16.4.

import { closeSync, lstatSync, openSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { refuse, recode } from './errors.js';
import { isObject, parse } from './json.js';
import { anything, codePoints, digest, list, record } from './check.js';
import * as tar from './tar.js';

export const BUNDLE_TYPE = 'application/vnd.kvstore.bundle.v1+json';
const MAX_LAYOUT = 65536;
const MAX_PATH = 255;
const OBJECT = /^objects\/([0-9a-f]{64})\.([0-9a-f]{64})\.kvo$/;
const RECEIPT = /^receipts\/[0-9a-f]{64}\.json$/;

/** Everything in a directory, links not followed: `{path, folder, other}`. */
function walk(root, prefix = '') {
  const found = [];
  for (const raw of readdirSync(join(root, prefix), { encoding: 'buffer' })) {
    const name = raw.toString('utf8');
    const path = `${prefix}${name}`;
    checkPath(path);
    if (!Buffer.from(name, 'utf8').equals(raw)) refuse('PATH_UNSAFE', 'a path that is not UTF-8');
    const status = lstatSync(join(root, path));
    found.push({ path, folder: status.isDirectory(), other: !status.isDirectory() && !status.isFile() });
    if (status.isDirectory()) found.push(...walk(root, `${path}/`));
  }
  return found;
}

function directory(root) {
  return {
    entries: walk(root),
    size: (path) => statSync(join(root, path)).size,
    read: (path) => readFileSync(join(root, path)),
    close: () => {},
  };
}

function archive(path) {
  const file = openSync(path, 'r');
  try {
    const entries = [];
    for (const member of tar.members(file)) {
      let name = member.path;
      if (member.folder) name = name.replace(/\/+$/, '');
      if (member.folder && (name === '' || name === '.')) continue;
      entries.push({ ...member, path: name.replace(/^\.\//, '') });
    }
    const found = new Map(entries.map((entry) => [entry.path, entry]));
    return {
      entries,
      size: (name) => found.get(name).size,
      read: (name) => tar.content(file, found.get(name)),
      close: () => closeSync(file),
    };
  } catch (error) {
    closeSync(file);
    throw error;
  }
}

/** KV-BUN-002. */
function checkPath(path) {
  const parts = path.split('/');
  const strange = /[\\:\u0000-\u001f\u007f]/.test(path) || parts.some((part) => ['', '.', '..'].includes(part));
  if (strange || codePoints(path) > MAX_PATH) refuse('PATH_UNSAFE', JSON.stringify(path.slice(0, 300)));
}

/** Open a bundle: paths first, then names (KV-BUN-010). `objects` maps payloads to names of files. */
export function openBundle(path) {
  const source = statSync(path).isDirectory() ? directory(path) : archive(path);
  try {
    for (const entry of source.entries) {
      checkPath(entry.path);
      if (entry.other) refuse('PATH_UNSAFE', `${entry.path} is neither a directory nor a plain file`);
    }
    return { ...source, objects: checkNames(source.entries) };
  } catch (error) {
    source.close();
    throw error;
  }
}

function checkNames(entries) {
  const invalid = (detail) => refuse('BUNDLE_LAYOUT_INVALID', detail);
  const objects = new Map();
  const seen = new Set();
  for (const { path, folder } of entries) {
    if (path.split('/').some((part) => part.startsWith('.'))) continue;
    if (folder) continue;
    if (seen.has(path)) invalid(`${path} is there twice`);
    seen.add(path);
    const object = OBJECT.exec(path);
    if (object !== null) {
      const payload = `sha256:${object[1]}`;
      if (objects.has(payload)) invalid(`two objects of ${payload}`);
      objects.set(payload, { path, stored: `sha256:${object[2]}` });
    } else if (path !== 'layout.json' && path !== 'manifest.json' && !RECEIPT.test(path)) {
      invalid(`${path} is no file of a bundle`);
    }
  }
  for (const path of ['layout.json', 'manifest.json']) if (!seen.has(path)) invalid(`no ${path}`);
  return objects;
}

const layoutFields = record({ entry: digest, features: list(anything), media_type: anything });

/** The entry id that `layout.json` states (KV-BUN-007, KV-BUN-008). */
export function readLayout(bundle) {
  if (bundle.size('layout.json') > MAX_LAYOUT) refuse('DOC_TOO_LARGE', 'layout.json');
  const document = recode('BUNDLE_LAYOUT_INVALID', () => parse(bundle.read('layout.json')));
  const type = isObject(document) ? document.media_type : null;
  if (type !== BUNDLE_TYPE) {
    const later = typeof type === 'string' && type.startsWith('application/vnd.kvstore.bundle.');
    refuse(later ? 'BUNDLE_VERSION_UNSUPPORTED' : 'BUNDLE_LAYOUT_INVALID', 'media_type of layout.json');
  }
  if (Array.isArray(document.features) && document.features.length > 0) {
    refuse('BUNDLE_VERSION_UNSUPPORTED', 'features of layout.json');
  }
  recode('BUNDLE_LAYOUT_INVALID', () => layoutFields(document, 'layout.json'));
  return document.entry;
}

// The four roles behind the plug-in contract, as functions that give results: the fixtures' README, "With the runner".

import { readFileSync } from 'node:fs';
import { Refusal } from './errors.js';
import { canonicalBytes, parse } from './json.js';
import { MAX_TOKENS, anything, digest, list, record } from './check.js';
import { chain, encodeTokenIds } from './prefix.js';
import { checkPayload } from './tensors.js';
import { checkSpans, mediaItems, namespace } from './manifest.js';
import { checkLayout, checkReceipt } from './documents.js';
import { readBundle } from './reader.js';
import { writeRecipe } from './recipe.js';

const INPUT_DEPTH = 64;

export const DESCRIPTION = {
  protocol: 1,
  name: 'kvstore-conformance-node',
  version: '1.0.0',
  language: 'JavaScript',
  spec: ['1.0'],
  roles: ['canon', 'prefix', 'reader', 'writer'],
  features: ['tar', 'receipt', 'layout', 'payload'],
  serve: true,
};

/** Run a task; refusals become results, all other errors go on. */
function answer(task) {
  try {
    return { verdict: 'accept', ...task() };
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    const { phase, code, detail } = error;
    return { verdict: 'reject', phase, code, detail, released: 0, tensors: {} };
  }
}

/** Inputs that are not documents of this format: recipes, requests. */
export function parseInput(bytes) {
  return parse(bytes, { canonical: false, foreign: true, asciiKeys: false, depth: INPUT_DEPTH });
}

export function read(contextFile, bundle) {
  const context = parse(readFileSync(contextFile), { canonical: false });
  return answer(() => {
    const result = readBundle(bundle, context);
    return { ...result, released: Object.keys(result.tensors).length };
  });
}

export function write(recipe, folder) {
  return answer(() => ({ entry: writeRecipe(typeof recipe === 'function' ? recipe() : recipe, folder) }));
}

const FORMS = {
  json: (bytes) => canonicalBytes(parse(bytes, { canonical: false })),
  receipt: (bytes) => (checkReceipt(bytes), bytes),
  layout: (bytes) => (checkLayout(bytes), bytes),
  payload: (bytes) => (checkPayload(bytes), bytes),
};

/** `data` are the canonical bytes. */
export function canon(form, bytes) {
  if (!Object.hasOwn(FORMS, form)) throw new Error(`no such form: ${form}`);
  return answer(() => ({ data: FORMS[form](bytes) }));
}

const prefixInput = record({ media: mediaItems, model: digest, namespace, token_ids: list(anything, { max: MAX_TOKENS }) });

export function prefix(input) {
  return answer(() => {
    const value = typeof input === 'function' ? input() : input;
    prefixInput(value, 'input');
    const { model, namespace: name, token_ids: tokenIds, media } = value;
    const encoded = encodeTokenIds(tokenIds);
    checkSpans(media, tokenIds.length, 'media');
    return { chain: chain(model, name, encoded, media) };
  });
}

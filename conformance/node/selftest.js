// Every case of the fixtures, in this process: `node selftest.js [FIXTURES]` prints `N passed, N failed`.
// A written bundle is read back, too: the manifest must be the entry's, and its objects must decode.

import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { canon, parseInput, prefix, read, write } from './engine.js';
import { digestOf } from './digest.js';
import { serialize } from './json.js';
import { readBundle } from './reader.js';

const root = process.argv[2] ?? fileURLToPath(new URL('../../fixtures', import.meta.url));

function written(file) {
  const folder = mkdtempSync(join(tmpdir(), 'kvstore-'));
  try {
    const recipe = parseInput(readFileSync(file));
    const result = write(recipe, folder);
    if (result.verdict === 'accept') {
      const { model, tokenizer, namespace } = recipe;
      const back = readBundle(folder, {
        model, tokenizer, namespace, policy: 'strict', method: recipe.method?.name ?? null, signature: null,
        token_ids: null, media: [], token_count: null, device: { max_buffer_bytes: null, memory_bytes: null },
      });
      if (back.entry !== result.entry) return { ...result, verdict: 'not read back' };
    }
    return result;
  } finally {
    rmSync(folder, { recursive: true });
  }
}

function run(entry) {
  const file = join(root, entry.input);
  if (entry.role === 'reader') return read(join(root, entry.context), file);
  if (entry.role === 'writer') return written(file);
  if (entry.role === 'prefix') return prefix(() => parseInput(readFileSync(file)));
  const result = canon(entry.as, readFileSync(file));
  return result.verdict === 'accept' ? { verdict: 'accept', output: digestOf(result.data) } : result;
}

/** Whether the result has all that is expected; `released` of accepted cases is not among it. */
function passes(result, expect) {
  if (expect.verdict === 'either') return expect.either.some((choice) => passes(result, choice));
  const same = (key) => result[key] !== undefined && serialize(result[key]) === serialize(expect[key]);
  return Object.keys(expect).every(same);
}

const { cases } = JSON.parse(readFileSync(join(root, 'index.json'), 'utf8'));
const counts = new Map();
let failed = 0;
for (const entry of cases) {
  let result;
  try {
    result = run(entry);
  } catch (error) {
    result = { verdict: 'error', detail: error.stack };
  }
  const right = passes(result, entry.expect);
  const count = counts.get(entry.role) ?? { passed: 0, failed: 0 };
  count[right ? 'passed' : 'failed'] += 1;
  counts.set(entry.role, count);
  if (!right) {
    failed += 1;
    console.log(`${entry.id}: expected ${JSON.stringify(entry.expect)}, got ${JSON.stringify(result)}`);
  }
}
for (const [role, count] of [...counts].sort()) console.log(`${role}: ${count.passed} passed, ${count.failed} failed`);
console.log(`${cases.length - failed} passed, ${failed} failed`);
process.exitCode = failed === 0 ? 0 : 1;

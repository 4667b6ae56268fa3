#!/usr/bin/env node
// Command line and JSON Lines: the fixtures' README, "With the runner".
// Exit codes: 0 accepted, 1 refused, 2 an error of usage or of the program.

import { readFileSync } from 'node:fs';
import { createInterface } from 'node:readline';
import { DESCRIPTION, canon, parseInput, prefix, read, write } from './engine.js';

const USAGE = 'usage: main.js describe | read --context FILE BUNDLE | write --out FOLDER | canon --as FORM\n'
  + '       main.js prefix | serve';

function print(value) {
  process.stdout.write(`${JSON.stringify(value)}\n`);
}

function finish(result, shown = result) {
  print(result.verdict === 'accept' ? shown : result);
  process.exitCode = result.verdict === 'accept' ? 0 : 1;
}

const input = () => readFileSync(0);

function reply(request) {
  switch (request.command) {
    case 'describe':
      return DESCRIPTION;
    case 'read':
      return read(request.context, request.bundle);
    case 'write':
      return write(request.recipe, request.out);
    case 'canon': {
      const result = canon(request.as, Buffer.from(request.data, 'base64'));
      return result.verdict === 'accept' ? { ...result, data: result.data.toString('base64') } : result;
    }
    case 'prefix':
      return prefix(request.input);
    default:
      throw new Error(`no such command: ${request.command}`);
  }
}

/** One reply to each line, in order; where the program itself fails, one without a verdict. */
async function serve() {
  for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
    if (line === '') continue;
    try {
      print(reply(parseInput(Buffer.from(line, 'utf8'))));
    } catch (error) {
      print({ error: String(error) });
    }
  }
}

async function main(args) {
  const [command, ...rest] = args;
  if (command === 'describe' && rest.length === 0) {
    print(DESCRIPTION);
  } else if (command === 'serve' && rest.length === 0) {
    await serve();
  } else if (command === 'read' && rest.length === 3 && rest[0] === '--context') {
    finish(read(rest[1], rest[2]));
  } else if (command === 'write' && rest.length === 2 && rest[0] === '--out') {
    finish(write(() => parseInput(input()), rest[1]));
  } else if (command === 'canon' && rest.length === 2 && rest[0] === '--as') {
    const result = canon(rest[1], input());
    if (result.verdict === 'accept') process.stdout.write(result.data);
    else finish(result);
  } else if (command === 'prefix' && rest.length === 0) {
    const result = prefix(() => parseInput(input()));
    finish(result, { chain: result.chain });
  } else {
    process.stderr.write(`${USAGE}\n`);
    process.exitCode = 2;
  }
}

main(process.argv.slice(2)).catch((error) => {
  process.stderr.write(`${error?.stack ?? error}\n`);
  process.exitCode = 2;
});

// Strict JSON and its canonical form: SPEC section 4.
//
// Objects come out without a prototype, so that no key means anything to JavaScript.
// With `foreign` numbers that the profile does not know are kept apart instead of refused: fractions as `Fraction`,
// integers beyond 2^53 - 1 as `BigInt`; they are for inputs that are not documents of this format.

import { refuse } from './errors.js';

export const MAX_DEPTH = 16;

export class Fraction {
  constructor(text) {
    this.text = text;
  }
}

const SHORT = { '"': '"', '\\': '\\', '/': '/', b: '\b', f: '\f', n: '\n', r: '\r', t: '\t' };
const ESCAPE = { '"': '\\"', '\\': '\\\\', '\b': '\\b', '\f': '\\f', '\n': '\\n', '\r': '\\r', '\t': '\\t' };
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const SPACE = /[ \t\n\r]*/y;
const WORD = /-?[A-Za-z]+/y;
const WORDS = new Map([['true', true], ['false', false], ['null', null]]);
const NON_FINITE = new Set(['NaN', 'Infinity', '-Infinity', '-NaN']);

class Parser {
  constructor(text, options) {
    this.text = text;
    this.at = 0;
    this.depth = 0;
    this.options = options;
  }

  take(pattern) {
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (match === null) return null;
    this.at = pattern.lastIndex;
    return match;
  }

  syntax() {
    refuse('JSON_SYNTAX', `at character ${this.at}`);
  }

  document() {
    const value = this.value();
    this.take(SPACE);
    if (this.at !== this.text.length) this.syntax();
    return value;
  }

  value() {
    this.take(SPACE);
    const character = this.text[this.at];
    if (character === '{') return this.nested(() => this.object());
    if (character === '[') return this.nested(() => this.array());
    if (character === '"') return this.string();
    const word = this.take(WORD);
    if (word === null) return this.number();
    if (NON_FINITE.has(word[0])) refuse('JSON_NON_FINITE', word[0]);
    if (!WORDS.has(word[0])) this.syntax();
    return WORDS.get(word[0]);
  }

  nested(inner) {
    this.depth += 1;
    if (this.depth > this.options.depth) refuse('JSON_TOO_DEEP', `more than ${this.options.depth} levels`);
    this.at += 1;
    const value = inner();
    this.depth -= 1;
    return value;
  }

  /** The character after white space, if it is one of `allowed`, and past it. */
  next(allowed) {
    this.take(SPACE);
    const character = this.text[this.at];
    if (character === undefined || !allowed.includes(character)) return null;
    this.at += 1;
    return character;
  }

  object() {
    const result = Object.create(null);
    if (this.next('}') !== null) return result;
    do {
      this.take(SPACE);
      if (this.text[this.at] !== '"') this.syntax();
      const key = this.string();
      if (this.options.asciiKeys && !/^[\u0000-\u007f]*$/.test(key)) refuse('JSON_KEY_NOT_ASCII', key);
      if (Object.hasOwn(result, key)) refuse('JSON_DUPLICATE_KEY', key);
      if (this.next(':') === null) this.syntax();
      result[key] = this.value();
    } while (this.next(',') !== null);
    if (this.next('}') === null) this.syntax();
    return result;
  }

  array() {
    const result = [];
    if (this.next(']') !== null) return result;
    do result.push(this.value());
    while (this.next(',') !== null);
    if (this.next(']') === null) this.syntax();
    return result;
  }

  string() {
    this.at += 1;
    let result = this.take(PLAIN)[0];
    while (this.text[this.at] === '\\') result += this.escape() + this.take(PLAIN)[0];
    if (this.text[this.at] !== '"') this.syntax();
    this.at += 1;
    if (!result.isWellFormed()) refuse('JSON_LONE_SURROGATE', `before character ${this.at}`);
    return result;
  }

  escape() {
    const letter = this.text[this.at + 1];
    if (letter === 'u') {
      const digits = this.text.slice(this.at + 2, this.at + 6);
      if (!/^[0-9a-fA-F]{4}$/.test(digits)) this.syntax();
      this.at += 6;
      return String.fromCharCode(parseInt(digits, 16));
    }
    if (letter === undefined || !Object.hasOwn(SHORT, letter)) this.syntax();
    this.at += 2;
    return SHORT[letter];
  }

  number() {
    const match = this.take(NUMBER);
    if (match === null || /[0-9.]/.test(this.text[this.at] ?? '')) this.syntax();
    const { foreign } = this.options;
    if (match[1] !== undefined || match[2] !== undefined) {
      return foreign ? new Fraction(match[0]) : refuse('JSON_FLOAT', match[0].slice(0, 40));
    }
    const value = Number(match[0]);
    if (Number.isSafeInteger(value)) return value;
    return foreign ? BigInt(match[0]) : refuse('JSON_NUMBER_RANGE', match[0].slice(0, 40));
  }
}

/** The value of one JSON text; `canonical` refuses every other spelling of it. */
export function parse(bytes, { canonical = true, foreign = false, asciiKeys = true, depth = MAX_DEPTH } = {}) {
  if (bytes[0] === 0xef && bytes[1] === 0xbb && bytes[2] === 0xbf) refuse('JSON_BOM', 'byte order mark');
  let text;
  try {
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    refuse('JSON_NOT_UTF8', 'the bytes are not UTF-8');
  }
  const value = new Parser(text, { foreign, asciiKeys, depth }).document();
  if (canonical && serialize(value) !== text) refuse('JSON_NOT_CANONICAL', 'not in canonical form');
  return value;
}

export function quote(text) {
  const escaped = text.replace(/["\\\u0000-\u001f]/g, (character) => (
    ESCAPE[character] ?? `\\u${character.charCodeAt(0).toString(16).padStart(4, '0')}`));
  return `"${escaped}"`;
}

/** Canonical text of a value that the profile allows. */
export function serialize(value) {
  if (typeof value === 'string') return quote(value);
  if (typeof value === 'number') return String(value); // -0 gives 0
  if (value === null || typeof value === 'boolean') return String(value);
  if (Array.isArray(value)) return `[${value.map(serialize).join(',')}]`;
  const members = Object.keys(value).sort().map((key) => `${quote(key)}:${serialize(value[key])}`);
  return `{${members.join(',')}}`;
}

export function canonicalBytes(value) {
  return Buffer.from(serialize(value), 'utf8');
}

export function isObject(value) {
  return typeof value === 'object' && value !== null && !Array.isArray(value) && !(value instanceof Fraction);
}

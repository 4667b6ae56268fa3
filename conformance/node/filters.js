// Chunks of a tensor and the filters on them: SPEC KV-OBJ-013 to KV-OBJ-015 and section 10.3.

import { WIDTH, elements } from './layers.js';

export const FILTERS = Object.freeze({
  __proto__: null,
  none: { transposed: false, rotated: false, planes: false },
  'byte-planes': { transposed: false, rotated: false, planes: true },
  'byte-planes+channel-major': { transposed: true, rotated: false, planes: true },
  'exponent-planes': { transposed: false, rotated: true, planes: true },
  'exponent-planes+channel-major': { transposed: true, rotated: true, planes: true },
});

/** A tensor as `[outer, rows, cols]`, with the step of its chunks and their number. */
export function grid({ dtype, shape }, chunkBytes) {
  const width = WIDTH[dtype];
  const total = elements(shape);
  if (total === 0) return { width, extents: [0, 0, 0], step: [1, 1, 1], count: 0 };
  const cols = shape.at(-1) ?? 1;
  const rows = shape.at(-2) ?? 1;
  const outer = total / rows / cols;
  const most = Math.floor(chunkBytes / width);
  let step;
  if (cols > most) step = [1, 1, most];
  else if (rows * cols > most) step = [1, Math.floor(most / cols), cols];
  else step = [Math.max(1, Math.min(outer, Math.floor(most / (rows * cols)))), rows, cols];
  const extents = [outer, rows, cols];
  const count = extents.reduce((product, extent, axis) => product * Math.ceil(extent / step[axis]), 1);
  return { width, extents, step, count };
}

/** The chunks in order: where each begins, and its extents. */
export function* chunks({ extents, step, count }) {
  if (count === 0) return;
  const cut = (axis, at) => Math.min(step[axis], extents[axis] - at);
  for (let o = 0; o < extents[0]; o += step[0]) {
    for (let r = 0; r < extents[1]; r += step[1]) {
      for (let c = 0; c < extents[2]; c += step[2]) {
        yield { begin: [o, r, c], size: [cut(0, o), cut(1, r), cut(2, c)] };
      }
    }
  }
}

export function planeCount(filter, width) {
  return FILTERS[filter].planes ? width : 1;
}

/** Put a chunk's planes into the tensor's bytes. */
export function unfilter(planes, filter, { width, extents }, { begin, size }, target) {
  const { transposed, rotated, planes: split } = FILTERS[filter];
  const position = (o, r, c) => (((begin[0] + o) * extents[1] + begin[1] + r) * extents[2] + begin[2] + c) * width;
  if (!split) {
    const line = size[2] * width;
    let from = 0;
    for (let o = 0; o < size[0]; o += 1) {
      for (let r = 0; r < size[1]; r += 1, from += line) planes[0].copy(target, position(o, r, 0), from, from + line);
    }
    return;
  }
  let word = 0;
  const put = (o, r, c) => {
    const at = position(o, r, c) + width - 1;
    let carry = rotated ? planes[width - 1][word] : 0;
    for (let j = 0; j < width; j += 1) {
      const byte = planes[j][word];
      target[at - j] = rotated ? (byte >> 1) | ((carry & 1) << 7) : byte;
      carry = byte;
    }
    word += 1;
  };
  for (let o = 0; o < size[0]; o += 1) {
    if (transposed) for (let c = 0; c < size[2]; c += 1) for (let r = 0; r < size[1]; r += 1) put(o, r, c);
    else for (let r = 0; r < size[1]; r += 1) for (let c = 0; c < size[2]; c += 1) put(o, r, c);
  }
}

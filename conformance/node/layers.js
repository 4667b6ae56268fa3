// Kinds of layers, their scalars, roles and axes: SPEC section 8.3; paths of leaves; lowest cut: section 8.4.

export const DTYPES = [
  'BOOL', 'U8', 'I8', 'I16', 'U16', 'F16', 'BF16', 'I32', 'U32', 'F32', 'C64', 'F64', 'I64', 'U64',
];
const WIDTHS = [1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8];
export const WIDTH = Object.freeze(Object.fromEntries(DTYPES.map((dtype, index) => [dtype, WIDTHS[index]])));
export const RANK = Object.freeze(Object.fromEntries(DTYPES.map((dtype, index) => [dtype, index])));

export const MODES = ['affine', 'mxfp4', 'mxfp8', 'nvfp4'];
const DENSE = ['k', 'v'];
const QUANTIZED = ['k.words', 'k.scales', 'k.biases', 'v.words', 'v.scales', 'v.biases'];
const COMPRESSED = ['window', 'compressed', 'index', 'pending.kv', 'pending.gate'];
const PACKING = ['bits', 'group_size', 'mode'];

/** `window` names the scalars that keep leaves of one span in groups of their own (KV-GRP-002). */
export const KINDS = Object.freeze({
  __proto__: null,
  kv: { scalars: ['offset'], roles: DENSE, span: 'tokens', window: [] },
  'kv-quantized': { scalars: ['offset', ...PACKING], roles: QUANTIZED, span: 'tokens', window: [] },
  'kv-rotating': {
    scalars: ['offset', 'max_size', 'keep', 'ring_index'], roles: DENSE, span: 'tokens', window: ['max_size', 'keep'],
  },
  'kv-chunked': { scalars: ['offset', 'chunk_size', 'start'], roles: DENSE, span: 'tokens', window: ['chunk_size'] },
  'kv-concatenated': { scalars: ['offset'], roles: DENSE, span: 'tokens', window: [] },
  'kv-sparse': { scalars: ['offset'], roles: [...DENSE, 'positions'], span: 'rows', window: [] },
  'kv-sparse-quantized': {
    scalars: ['offset', ...PACKING], roles: [...QUANTIZED, 'positions'], span: 'rows', window: [],
  },
  'kv-compressed': { scalars: ['offset', 'max_size'], roles: COMPRESSED, span: 'state', window: ['max_size'] },
  state: { scalars: ['slots', 'left_padding', 'lengths'], roles: null, span: 'state', window: [] },
});

export function isQuantized(layer) {
  return layer.kind === 'kv-quantized' || layer.kind === 'kv-sparse-quantized';
}

export function isSparse(layer) {
  return KINDS[layer.kind].span === 'rows';
}

export function isWritten(layer) {
  return Object.keys(layer.tensors).length > 0;
}

/** Stored whole, at one position. */
export function isSnapshot(layer) {
  return KINDS[layer.kind].span === 'state';
}

/** The axis along which segments lie, or null. */
export function rowAxis(layer, role) {
  if (isSnapshot(layer)) return null;
  return role === 'positions' ? 1 : 2;
}

/** Rows of a written leaf that is no snapshot. */
export function rowsOf(layer) {
  const role = Object.keys(layer.tensors)[0];
  return layer.tensors[role].shape[rowAxis(layer, role)];
}

/** All leaves in cache order, with their paths. */
export function* leaves(layers, prefix = '') {
  for (const [index, layer] of layers.entries()) {
    const path = `${prefix}${index}`;
    if (layer.kind === 'list') yield* leaves(layer.children, `${path}.`);
    else yield { path, layer };
  }
}

/** Roles in the order of buffers: ascending, slots by number (KV-LYT-001). */
export function rolesInOrder(layer) {
  const roles = Object.keys(layer.tensors).sort();
  if (layer.kind === 'state') roles.sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)));
  return roles;
}

/** Number of elements; not exact above 2^53, but never below the true value's order. */
export function elements(shape) {
  return shape.includes(0) ? 0 : shape.reduce((product, extent) => product * extent, 1);
}

export function byteLength({ dtype, shape }) {
  return elements(shape) * WIDTH[dtype];
}

export function* buffers(layers) {
  for (const { path, layer } of leaves(layers)) {
    for (const role of rolesInOrder(layer)) {
      const { dtype, shape } = layer.tensors[role];
      yield { byte_len: byteLength(layer.tensors[role]), dtype, role: `${path}.${role}`, shape };
    }
  }
}

function leastCount(layer, tokenCount) {
  switch (layer.kind) {
    case 'kv':
    case 'kv-quantized':
      return 0;
    case 'kv-rotating': {
      const rows = rowsOf(layer);
      if (rows === layer.offset) return 0;
      return rows === layer.max_size && layer.keep === 0 ? layer.offset - 1 : layer.offset;
    }
    case 'kv-chunked':
      return layer.start === 0 ? 0 : Math.min(layer.start + layer.chunk_size, layer.offset);
    case 'state':
      return tokenCount;
    default:
      return layer.offset;
  }
}

export function lowestCut(layers, tokenCount) {
  let cut = 0;
  for (const { layer } of leaves(layers)) if (isWritten(layer)) cut = Math.max(cut, leastCount(layer, tokenCount));
  return cut;
}

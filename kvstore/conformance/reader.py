"""The reader's role over a bundle: SPEC.md's reading order, from names and bytes to a result.

Pure: whoever opens files brings the names and a function that gives a file's bytes. No
file is asked for before all names have passed, no object before steps 1 to 7, and nothing
is given out before everything has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.conformance.context import Context
from kvstore.conformance.result import Result, rejected
from kvstore.conformance.state import entry_tensors
from kvstore.errors import KVStoreError, fail
from kvstore.format.bundle import BundleFile, BundleIndex, bundle_manifest, index_files
from kvstore.format.compat import require_compatible
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.entry_tensors import require_tensors
from kvstore.format.groups import PayloadRef
from kvstore.format.layout import layout_of
from kvstore.format.manifest import Manifest, check_prefix
from kvstore.format.object import parse_object
from kvstore.format.prefix import MediaItem, prefix_digest
from kvstore.format.tensors import Payload

__all__ = ["Bundle", "read_bundle"]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle: what was found in it, and a function from a path to that file's bytes."""

    files: Sequence[BundleFile]
    read: Callable[[str], bytes]


def read_bundle(bundle: Bundle, context: Context) -> Result:
    """Restore an entry from a bundle, or refuse it with the code of the earliest rule that it breaks."""
    try:
        index, manifest = _open(bundle)
        require_compatible(manifest, context.wanted)
        tokens = _position(manifest, context)
        _check_device(manifest, context)
        payloads = _decode(bundle, index, manifest)
    except KVStoreError as error:
        return rejected(error)
    tensors = entry_tensors(manifest, payloads, tokens)
    return Result("accept", entry=manifest.entry_id, token_count=tokens, tensors=tensors)


def _open(bundle: Bundle) -> tuple[BundleIndex, Manifest]:
    """The bundle's own rules, then steps 1 to 4."""
    index = index_files(bundle.files)
    return index, bundle_manifest(bundle.read)


def _position(manifest: Manifest, context: Context) -> int:
    """Step 6: the token count to restore at, one wanted token being left to evaluate."""
    count = manifest.token_count
    ids = context.token_ids
    if ids is not None:
        known = ids.size >= count
        if not known or manifest.prefix.digest != prefix_digest(
            manifest.model.digest, manifest.namespace, ids[:count], _within(context, count)
        ):
            raise fail(
                "PREFIX_NOT_MATCHED", "the entry's token ids are no prefix of the wanted ones", expected=ids.size,
                found=count,
            )  # fmt: skip
        count = min(count, int(ids.size) - 1)
    tokens = count if context.token_count is None else context.token_count
    if not manifest.can_cut(tokens):
        low, high = max(manifest.lowest_cut, 1), manifest.token_count
        raise fail("CUT_NOT_POSSIBLE", "the position to restore at", expected=f"{low} to {high}", found=tokens)
    return tokens


def _within(context: Context, count: int) -> list[MediaItem]:
    return [item for item in context.media if item.start < count]


def _check_device(manifest: Manifest, context: Context) -> None:
    """Step 7: no buffer, and not all of them together, above what the device can hold."""
    layout = layout_of(manifest.layers, manifest.token_count)
    for buffer in layout.buffers:
        if context.max_buffer_bytes is not None and buffer.byte_len > context.max_buffer_bytes:
            raise fail(
                "DEVICE_BUFFER_TOO_LARGE", f"buffer {buffer.role}", expected=f"at most {context.max_buffer_bytes}",
                found=buffer.byte_len,
            )  # fmt: skip
    if context.memory_bytes is not None and layout.total_bytes > context.memory_bytes:
        raise fail(
            "DEVICE_MEMORY_SHORT", "all buffers", expected=f"at most {context.memory_bytes}", found=layout.total_bytes
        )


def _decode(bundle: Bundle, index: BundleIndex, manifest: Manifest) -> dict[Digest, Payload]:
    """Steps 8 to 11 for every object, each step for all of them before the next."""
    token_ref = manifest.prefix.token_ids
    refs = list(manifest.payloads())
    if token_ref.digest in index.objects:
        refs.append(token_ref)
    stored = {ref.digest: _stored(bundle, index, ref) for ref in refs}
    readers = {
        ref.digest: parse_object(
            memoryview(stored[ref.digest]), digest=ref.digest, size=ref.size, namespace=manifest.namespace
        )
        for ref in refs
    }
    payloads = {digest: reader.read_payload() for digest, reader in readers.items()}
    require_tensors(manifest, {digest: reader.specs for digest, reader in readers.items()})
    for reader in readers.values():
        reader.verify_payload()
    if token_ref.digest in readers:
        check_prefix(manifest, np.ascontiguousarray(payloads[token_ref.digest].arrays[0], dtype="<u4"))
    return payloads


def _stored(bundle: Bundle, index: BundleIndex, ref: PayloadRef) -> bytes:
    """Step 8."""
    if ref.digest not in index.objects:
        raise fail("OBJECT_MISSING", f"the bundle has no object of payload {ref.digest}")
    data = bundle.read(index.object_path(ref.digest))
    found, expected = sha256_digest(data), index.objects[ref.digest]
    if found != expected:
        raise fail("STORED_DIGEST_MISMATCH", "the digest of an object", expected=expected, found=found)
    return data

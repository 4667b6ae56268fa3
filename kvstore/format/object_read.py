"""Reading an object: everything that can be checked is checked before anything is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final, TypeAlias

import numpy as np

from kvstore.errors import fail
from kvstore.format.boxes import box_of, write_box
from kvstore.format.digest import Digest
from kvstore.format.filters import join_planes
from kvstore.format.object_header import ObjectHeader, checked_layout, parse_header, parse_table
from kvstore.format.object_layout import Batch, Group, Layout
from kvstore.format.seal import Place, mark_from, print_of
from kvstore.format.tensors import Payload, TensorSpec, uint_dtype
from kvstore.format.zstd import check_frames, decompress_frames
from kvstore.limits import MAX_CHUNK_BYTES

__all__ = ["ObjectReader", "parse_object"]

Array = np.ndarray[Any, Any]
Release: TypeAlias = Callable[[int, int], None]

_UNPROVED_BYTES: Final = 64 * 2**20
_UNPROVED_RATIO: Final = 8
"""An object that is larger than the one and than so many times its stored bytes is proved before memory is filled.

A few hundred bytes decode to a MiB of zeros, so what an object claims says nothing of what it is worth. Caches seldom
shrink below half, so hardly any is decoded twice; and what is not proved takes memory in proportion to what was sent.
"""


class ObjectReader:
    """A checked object, ready to be decoded.

    The chunks are independent of each other: :meth:`decode_chunk` may run in several threads at once, each of which
    needs scratch of a few MiB. The object's bytes must stay as they are until the last one is decoded.

    Attributes:
        header: What the object says of itself.
        specs: The payload's tensors, in canonical order.
        chunks: The units of work, each a run of like chunks of one or several tensors.
    """

    __slots__ = ("_data", "_ends", "_release", "_tensor_header", "chunks", "header", "specs")

    def __init__(
        self, data: memoryview, header: ObjectHeader, layout: Layout, ends: Array, release: Release | None
    ) -> None:
        """Use :func:`parse_object`. ``ends[i]`` is where data frame ``i`` begins, ``ends[i + 1]`` where it ends."""
        self._release = release
        self._data = data
        self._ends = ends
        self._tensor_header = layout.tensor_header
        self.header = header
        self.specs: tuple[TensorSpec, ...] = layout.specs
        self.chunks: tuple[Batch, ...] = layout.batches

    def decode_chunk(
        self, chunk: Batch, destinations: Mapping[str, Array], prints: MutableMapping[Place, bytes] | None = None
    ) -> None:
        """Decode one of :attr:`chunks` into the tensors that it belongs to.

        Args:
            chunk: The unit of work.
            destinations: By tensor name, a writable array of the tensor's shape with unsigned integers of the dtype's
                width; may be a strided view.
            prints: Gets the fingerprint of each box.

        Raises:
            IntegrityError: ZSTD_CORRUPT. The destinations may then hold part of the data.
            UsageError: USAGE, where a destination is missing or does not fit.
        """
        for name, _ in chunk.parts:
            _check_destination(name, chunk.group, destinations)
        for (name, box), found in zip(chunk.parts, self._boxes(chunk), strict=True):
            write_box(destinations[name], box, found)
            if prints is not None:
                prints[name, box.start] = print_of(box_of(destinations[name], box))

    def decode_into(self, destinations: Mapping[str, Array]) -> None:
        """Decode the whole payload, chunk by chunk. Raises as :meth:`decode_chunk`."""
        for chunk in self.chunks:
            self.decode_chunk(chunk, destinations)

    def mark(self, prints: Mapping[Place, bytes]) -> bytes | None:
        """The mark of the payload whose boxes were decoded; None where a writer cut it into other boxes than we do."""
        ours = self.header.chunk_bytes == MAX_CHUNK_BYTES
        return mark_from(self._tensor_header, self.specs, prints) if ours else None

    def read_payload(self) -> Payload:
        """The payload in fresh memory. Raises ZSTD_CORRUPT, and DEVICE_MEMORY_SHORT where there is not so much."""
        return self._fill(self._room())

    def read_proved(self) -> Payload:
        """The payload in fresh memory, its digest proved; an object that claims too much takes none on the way.

        Raises:
            IntegrityError: ZSTD_CORRUPT or PAYLOAD_DIGEST_MISMATCH.
            SpaceError: DEVICE_MEMORY_SHORT.
        """
        # Room takes memory only as it is filled, but one that the system would never give is refused at once.
        room = self._room()
        if self.header.size > max(_UNPROVED_BYTES, _UNPROVED_RATIO * len(self._data)):
            self.verify_payload()
        payload = self._fill(room)
        self._require_digest(payload.digest())
        return payload

    def verify_payload(self) -> None:
        """Decode everything and prove the payload's digest, in a few MiB of memory.

        Raises:
            IntegrityError: ZSTD_CORRUPT or PAYLOAD_DIGEST_MISMATCH.
        """
        hasher = hashlib.sha256(self._tensor_header)
        for chunk in self._in_payload_order():
            hasher.update(self._boxes(chunk)[0].reshape(-1).data)
        self._require_digest(f"sha256:{hasher.hexdigest()}")

    def _room(self) -> dict[str, Array]:
        try:
            return {spec.name: np.empty(spec.shape, uint_dtype(spec.dtype)) for spec in self.specs}
        except MemoryError as error:
            raise fail(
                "DEVICE_MEMORY_SHORT", f"there is no memory for a payload of {self.header.size} bytes",
                fix="Free memory and try again.", needed=self.header.size,
            ) from error  # fmt: skip

    def _fill(self, arrays: dict[str, Array]) -> Payload:
        self.decode_into(arrays)
        return Payload(self.specs, tuple(arrays[spec.name] for spec in self.specs), self._tensor_header)

    def _require_digest(self, found: str) -> None:
        if found != self.header.digest:
            raise fail(
                "PAYLOAD_DIGEST_MISMATCH", "the digest of a decoded payload", expected=self.header.digest, found=found,
                fix="The object is damaged; verify the store.",
            )  # fmt: skip

    def _in_payload_order(self) -> Iterator[Batch]:
        """Single chunks in the order of the payload's bytes."""
        firsts: dict[str, tuple[Group, int]] = {}
        frame = 0
        for group in self.header.groups:
            for name in group.names:
                firsts[name] = (group, frame)
                frame += group.grid(self.header.chunk_bytes).count * group.plane_count
        for spec in self.specs:
            group, frame = firsts[spec.name]
            grid = group.grid(self.header.chunk_bytes)
            for at in range(grid.count):
                box = grid.box(at)
                yield Batch(group, ((spec.name, box),), frame + at * group.plane_count, box.size * group.itemsize)

    def _boxes(self, chunk: Batch) -> Array:
        """The chunk's boxes ``[chunks, outer, rows, cols]``; they last until this thread decodes again."""
        words, (outer, rows, cols) = self._words(chunk), chunk.parts[0][1].shape
        if chunk.group.filter.channel_major:
            return words.reshape(-1, outer, cols, rows).swapaxes(-1, -2)
        return words.reshape(-1, outer, rows, cols)

    def _words(self, chunk: Batch) -> Array:
        """The chunk's elements as stored, ``[chunks, elements]``."""
        count, planes = len(chunk.parts), chunk.group.plane_count
        begin, end = int(self._ends[chunk.frame]), int(self._ends[chunk.frame + count * planes])
        decoded = decompress_frames(self._data[begin:end], chunk.nbytes).reshape(count, planes, -1)
        words = join_planes(decoded, uint_dtype(chunk.group.dtype), chunk.group.filter)
        if self._release is not None:
            self._release(begin, end)
        return words


def parse_object(
    data: memoryview, *, digest: Digest, size: int, namespace: str = "default", release: Release | None = None
) -> ObjectReader:
    """Check an object's header, frame table and every frame's header and extent; nothing is decoded yet.

    Args:
        data: The whole object.
        digest: The payload's digest by its descriptor.
        size: The payload's size by its descriptor.
        namespace: The namespace that it is read for.
        release: Called with begin and end of bytes that were decoded, from the thread that did it.

    Raises:
        InvalidError: OBJECT_HEADER_INVALID, FRAME_TABLE_INVALID, ST_HEADER_INVALID, ST_SHAPE_OVERFLOW,
            ZSTD_SIZE_UNDECLARED, ZSTD_WINDOW_TOO_LARGE, ZSTD_DICTIONARY_REQUIRED or ZSTD_TRAILING_DATA.
        IntegrityError: OBJECT_NAME_MISMATCH, ZSTD_CORRUPT or ZSTD_TRUNCATED.
        IncompatibleError: NAMESPACE_MISMATCH.
        UnsupportedError: OBJECT_VERSION_UNSUPPORTED, FILTER_UNSUPPORTED or DTYPE_UNSUPPORTED.
    """
    view = memoryview(data).cast("B")
    header, start = parse_header(view)
    for what, expected, found in (("digest", digest, header.digest), ("size", size, header.size)):
        if expected != found:
            raise fail("OBJECT_NAME_MISMATCH", f"an object's payload {what}", expected=expected, found=found)
    if header.namespace != namespace:
        raise fail("NAMESPACE_MISMATCH", "an object's namespace", expected=namespace, found=header.namespace)
    layout = checked_layout(header)
    sizes = parse_table(view, layout.frame_count, start)
    ends = np.concatenate(([start], start + np.cumsum(sizes)))
    check_frames(view, ends[:-1], sizes, layout.contents)
    if release is not None:
        release(start, int(ends[-1]))
    return ObjectReader(view, header, layout, ends, release)


def _check_destination(name: str, group: Group, destinations: Mapping[str, Array]) -> None:
    wanted = (uint_dtype(group.dtype), group.shape)
    array = destinations.get(name)
    found = None if array is None else (array.dtype, array.shape)
    if found != wanted or array is None or not array.flags.writeable:
        raise fail("USAGE", f"the destination of tensor {name!r}", expected=f"writable {wanted}", found=str(found))

"""What releases of mlx-lm before 0.32 do otherwise: the one place where it matters which release is installed.

Caches are read and made by their attributes, which are the same in both; ``state`` and
``from_state``, which are not, are never used. Two things are left. A chunk drops rows at
its front by the length of its *buffer*, head room included, so that length is state.
And the loader runs the code that a model's config names without being told that it may.
Each is found out by asking the library, not by its version. Facts are those of mlx_lm
0.31.3, ``mlx_lm/models/cache.py``, ``llama4.py`` and ``utils.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Final

import mlx.core as mx

from kvstore.errors import fail
from kvstore.format.layers import LayerRecord
from kvstore.runtime.kinds_kv import Chunked
from kvstore.runtime.registry import Continuation, Placement
from kvstore.runtime.rows import Ranges

__all__ = ["BUFFER_ROWS", "ChunkedByBuffer", "loader_options", "trims_by_buffer"]

BUFFER_ROWS: Final = "chunk_buffer_rows"
"""Name in an entry's continuation: rows of the chunks' buffers, where they do not follow from the position."""


def trims_by_buffer(cls: Any) -> bool:
    """Whether this chunked class counts head room among the rows that it has too many of; nothing is evaluated."""
    cache = cls(1)
    cache.keys = cache.values = mx.zeros((1, 1, 2, 1))
    cache.offset = 1
    cache.maybe_trim_front()
    return bool(cache.start_position)


def loader_options(folder: Path, *, trust_remote_code: bool = False) -> dict[str, bool]:
    """Arguments for the loaders of mlx_lm, by which code that a model brings runs only where it is trusted.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID where the loader would run such code unasked.
    """
    from inspect import signature

    from mlx_lm import utils

    if "trust_remote_code" in signature(utils.load_model).parameters:
        return {"trust_remote_code": True} if trust_remote_code else {}
    code = utils.load_config(folder).get("model_file")
    if code is not None and not trust_remote_code:
        raise fail(
            "MODEL_FOLDER_INVALID", f"{folder} brings code of its own, {str(code)[:80]!r}",
            expected="a model that mlx-lm knows", fix="Pass trust_remote_code=True if you trust it.", path=str(folder),
        )  # fmt: skip
    return {}


class ChunkedByBuffer(Chunked):
    """A chunk that, when it is read again, keeps the last ``chunk_size`` rows of its buffer, filled or not.

    So which rows the next token sees depends on the buffer's length, and it comes back with the length that it had.
    The class is right only where the rows that go are all of an earlier chunk. Where they are not, the very next token
    would be wrong, or fail; such a state is not restored. A state that has lost such rows already is not taken.
    """

    kind: ClassVar[str] = "kv-chunked"

    def ranges(self, cache: Any, rows: int, where: str) -> Ranges:
        """As its parent's, once it is proved that the last token saw all of its chunk."""
        found = super().ranges(cache, rows, where)
        if cache.start_position > (cache.offset - 1) // cache.chunk_size * cache.chunk_size:
            raise fail(
                "CACHE_INCONSISTENT", f"{where} has dropped rows that its last token had to see",
                expected=f"a chunk size that is a multiple of {self.step}, and a prompt read in such steps",
                found=f"chunk size {cache.chunk_size}, first row {cache.start_position}, offset {cache.offset}",
                fix="Compute it with mlx-lm 0.32 or newer: older releases are wrong here.",
            )  # fmt: skip
        return found

    def continuation(self, cache: Any) -> Continuation:
        """The buffer's length, where it is not the one that :meth:`room` would choose."""
        if cache.keys is None or not cache.offset:
            return {}
        rows, start, chunk = int(cache.keys.shape[2]), cache.start_position, cache.chunk_size
        usual = rows == self._usual(cache.offset - start, start, chunk) and self._steady(start, chunk)
        return {} if usual else {BUFFER_ROWS: rows}

    def room(self, record: LayerRecord, continuation: Continuation) -> Placement:
        """A buffer as long as the one that the state came from, or as this release makes them.

        Raises:
            InvalidError: CACHE_STATE_INVALID where no buffer can have had that length.
            IncompatibleError: CUT_NOT_POSSIBLE where the class could not go on rightly.
        """
        offset, start, chunk = record.offset or 0, record.integer("start"), record.integer("chunk_size")
        known = _buffer_rows(continuation, record.rows, record.rows + chunk + self.step)
        length = self._usual(record.rows, start, chunk) if known is None else known
        first = start + max(0, length - chunk)
        if first > offset // chunk * chunk or (known is None and not self._steady(start, chunk)):
            raise fail(
                "CUT_NOT_POSSIBLE", "the installed release of mlx-lm would drop rows that the next tokens have to see",
                expected=f"a chunk size, and a first row, that are multiples of {self.step}",
                found=f"chunk size {chunk}, first row {start}, offset {offset}",
                fix="Restore it with mlx-lm 0.32 or newer, or compute the cache from the start.",
            )  # fmt: skip
        return Placement(length, ((0, record.rows),))

    def place(self, record: LayerRecord) -> Placement:
        """As :meth:`room` with no more known than the record."""
        return self.room(record, {})

    def _usual(self, rows: int, start: int, chunk: int) -> int:
        """Rows of the buffer after whole steps: no more than needed, and once trimmed at least a chunk."""
        return max(-(-rows // self.step) * self.step, chunk if start else 0)

    def _steady(self, start: int, chunk: int) -> bool:
        """Whether it stays right, token by token, for as long as it goes on."""
        return start == 0 or (start % self.step == 0 and chunk % self.step == 0)


def _buffer_rows(continuation: Continuation, low: int, high: int) -> int | None:
    rows = continuation.get(BUFFER_ROWS)
    if rows is None:
        return None
    if not isinstance(rows, int) or not low <= rows <= high:
        raise fail("CACHE_STATE_INVALID", f"continuation.{BUFFER_ROWS}", expected=f"{low} to {high}", found=rows)
    return rows

"""One conversation, saved at every turn, and each of its turns saved whole in a store of its own."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Part", "Talk", "Turn", "tiny_model"]

_STEP: Final = 64
_DECODED: Final = 40
"""Tokens at the end of each turn that are read one by one, as an answer is."""


@dataclass(frozen=True)
class Part:
    """Layers of one sort in one turn, in encoded bytes.

    Attributes:
        written: Objects written.
        new_blocks: Blocks that hold new tokens.
        whole: All blocks.
    """

    written: int
    new_blocks: int
    whole: int

    @property
    def moved(self) -> int:
        """Objects written that hold no new token: where a window now begins."""
        return self.written - self.new_blocks


@dataclass(frozen=True)
class Turn:
    """One turn; sizes in bytes, times in seconds.

    Attributes:
        full, windows: Layers that see everything, and those that do not.
        token_ids: The object of the token ids.
        documents: Manifest and receipt.
        whole: Objects, manifest and receipt of the whole save.
    """

    tokens: int
    full: Part
    windows: Part
    token_ids: int
    documents: int
    whole: int
    match: float
    load: float
    put: float
    put_whole: float

    @property
    def written(self) -> int:
        """Objects written."""
        return self.full.written + self.windows.written + self.token_ids

    @property
    def ratio(self) -> float:
        """Objects written to the blocks that hold new tokens."""
        return self.written / (self.full.new_blocks + self.windows.new_blocks)


class Talk:
    """A conversation.

    Args:
        model: Bound.
        ids: One more than the last turn ends with.
        ends: Tokens after each turn.
        start: Gives the state after the first turn, where that is not to be computed.
    """

    def __init__(
        self, model: Any, ids: list[int], ends: Sequence[int], start: Callable[[], list[Any]] | None = None
    ) -> None:
        self.model, self.ids, self.ends, self.start = model, ids, ends, start
        self.known: set[Any] = set()

    def turns(self) -> Iterator[Turn]:
        """Take the turns; ends the program where anything is not as it must be."""
        with _store() as store:
            before = 0
            for end in self.ends:
                yield self._turn(store, before, end)
                before = end
            if not store.verify(deep=True).ok:
                raise SystemExit("the store is not in order")

    def _turn(self, store: Any, before: int, end: int) -> Turn:
        ids = self.ids[:end]
        on_disk = _disk(store)
        hit, match = _timed(lambda: store.match(self.ids[: end + 1], model=self.model))
        if hit.token_count != before:
            raise SystemExit(f"{hit.token_count} of {before} tokens were found again: {hit.reasons}")
        restored, load = _timed(lambda: store.load(hit, into=self.model)) if hit else (None, 0.0)
        cache = self._extend(None if restored is None else restored.cache, before, end)
        receipt, put = _timed(
            lambda: store.put(cache, token_ids=ids, model=self.model, base=restored, remember=True)
        )
        with _store() as whole_store:
            again, put_whole = _timed(lambda: whole_store.put(cache, token_ids=ids, model=self.model))
            if again.subject != receipt.subject:
                raise SystemExit("a put with a base made another entry")
            whole = sum(_disk(whole_store).values())
        return self._count(store, receipt, before, on_disk, whole, (match, load, put, put_whole))

    def _extend(self, cache: list[Any] | None, before: int, end: int) -> list[Any]:
        """The cache after the turn: mostly in steps, the last tokens one by one."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        if cache is None and self.start is not None:
            return self.start()
        live: list[Any] = make_prompt_cache(self.model.model) if cache is None else cache
        while before < end:
            count = 1 if end - before <= _DECODED else min(_STEP, end - before - _DECODED)
            self.model.model(mx.array([self.ids[before : before + count]]), cache=live)
            mx.eval([item.state for item in live])
            before += count
        return live

    def _count(
        self, store: Any, receipt: Any, before: int, on_disk: dict[str, int], whole: int, times: tuple[float, ...]
    ) -> Turn:
        manifest = store.entries.manifest(receipt.subject)
        grown = {name: size - on_disk[name] for name, size in _disk(store).items()}
        windows = {path for path, leaf in manifest.leaves.items() if leaf.window}
        full_groups = [group for group in manifest.groups if not windows & set(group.layers)]
        others = [group for group in manifest.groups if windows & set(group.layers)]
        token_ids = store.entries.stored_bytes(manifest.namespace, [manifest.prefix.token_ids])
        turn = Turn(
            manifest.token_count, self._part(store, full_groups, before), self._part(store, others, before), token_ids,
            grown["manifests"] + grown["receipts"], whole, *times,
        )  # fmt: skip
        if not turn.written == receipt.facts["stored_bytes"] == grown["objects"]:
            raise SystemExit("the receipt does not say what is on disk")
        self.known.update(manifest.payloads())
        return turn

    def _part(self, store: Any, groups: list[Any], before: int) -> Part:
        from kvstore.format.groups import segments

        placed = [
            (segment, ref) for group in groups
            for segment, ref in zip(segments(group.span), group.payloads, strict=True)
        ]  # fmt: skip

        def size(refs: Any) -> int:
            return int(store.entries.stored_bytes("default", set(refs)))

        new = [ref for segment, ref in placed if segment.start + segment.rows > before]
        return Part(size(ref for _, ref in placed if ref not in self.known), size(new), size(ref for _, ref in placed))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


@contextmanager
def _store() -> Iterator[Any]:
    import kvstore

    with tempfile.TemporaryDirectory() as folder, kvstore.Store.open(folder) as store:
        yield store


def _disk(store: Any) -> dict[str, int]:
    """Bytes of the store's files, by folder."""
    return {
        name: sum(path.stat().st_size for path in (store.entries.root / name).rglob("*") if path.is_file())
        for name in ("objects", "manifests", "receipts")
    }  # fmt: skip


def tiny_model(folder: Path, config: dict[str, Any]) -> Any:
    """A bound model with random bfloat16 weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils
    from tokenizers import Tokenizer, models

    import kvstore

    folder.mkdir(parents=True)
    get_classes: Any = utils._get_classes  # noqa: SLF001 - the only way to a model without a download
    model_class, arguments = get_classes(config)
    mx.random.seed(0)
    model = model_class(arguments.from_dict(dict(config)))
    model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}')
    return kvstore.load_model(folder)

"""``wp30-cache-2`` files on the command line: taken in by ``put``, looked at, written by ``get``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.output import human_bytes, human_count, table
from kvstore.cli.session import Session
from kvstore.errors import fail

if TYPE_CHECKING:
    from kvstore.format.manifest import Manifest
    from kvstore.runtime.identity import ModelIdentity
    from kvstore.runtime.wp30_file import Wp30Cache, Wp30Info

__all__ = ["parse_settings", "show", "take_in", "write_out"]


def show(session: Session, file: Path) -> None:
    """Look at a file without a model; nothing is stored and no array is read.

    Raises:
        InvalidError, UnsupportedError: as :func:`kvstore.runtime.wp30_file.inspect_wp30`.
    """
    from kvstore.runtime.wp30_file import inspect_wp30

    info = inspect_wp30(file)
    document = {
        "format": "wp30-cache-2", "codec": info.codec, "file_bytes": info.file_bytes,
        "payload_bytes": info.payload_bytes, "manifest": info.manifest.to_json(),
    }  # fmt: skip
    session.output.result("inspect", document, _lines(info))


def take_in(file: Path, ids: list[int], identity: ModelIdentity) -> Wp30Cache:
    """Read a file's caches for a model.

    Raises:
        KVStoreError: as :func:`kvstore.runtime.wp30_file.read_wp30`.
    """
    from kvstore.runtime.wp30_file import read_wp30
    from kvstore.runtime.wp30_notes import receiver_of

    return read_wp30(file, ids, receiver=receiver_of(identity))


def write_out(
    path: Path, cache: Sequence[Any], ids: Sequence[int], *, manifest: Manifest, identity: ModelIdentity,
    annotations: Mapping[str, Any], settings: Mapping[str, Any], codec: str, level: int | None,
) -> int:  # fmt: skip
    """Write an entry's caches; returns the file's bytes.

    Raises:
        UnsupportedError: CACHE_FILE_EXPORT.
    """
    from kvstore.format.wp30 import CORE_KEYS
    from kvstore.format.wp30_codec import CODECS
    from kvstore.runtime.wp30_notes import claims_in, extra_in, facts_for
    from kvstore.runtime.wp30_write import write_wp30

    claims = {**claims_in(annotations), **settings}
    facts = {**facts_for(identity, manifest.method), **{k: v for k, v in claims.items() if k in CORE_KEYS}}
    chosen = next(name for name in CODECS if name == codec)
    return write_wp30(path, cache, ids, facts, extra=extra_in(claims), codec=chosen, level=level).file_bytes


def parse_settings(values: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` as a dict; a value that is JSON is taken as such, any other as text.

    Raises:
        UsageError: USAGE.
    """
    found: dict[str, Any] = {}
    for item in values:
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise fail("USAGE", "--set", expected="KEY=VALUE", found=item)
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def _lines(info: Wp30Info) -> list[str]:
    fields = info.manifest.fields
    names = ("document_id", "created_utc", "model_repo_id", "model_revision", "method_id", "prefix_token_hash")
    rows = [
        (str(layer.layer), layer.cls, f"{layer.stored_positions}/{layer.logical_offset}", layer.dtypes[0],
         "" if layer.bits is None else f"{layer.bits} bits")
        for layer in info.manifest.layers
    ]  # fmt: skip
    size = f"{human_bytes(info.payload_bytes)} in {human_bytes(info.file_bytes)}"
    return [
        f"wp30-cache-2, codec {info.codec}, {human_count(fields['prefix_token_count'], 'token')}, {size}",
        *(f"{name}: {fields[name]}" for name in names if fields[name] is not None),
        *table(("LAYER", "CLASS", "KEPT", "DTYPE", "QUANTIZED"), rows, right=(0, 2)),
    ]

"""Between a ``wp30-cache-2`` manifest and what kvstore keeps about an entry.

What decides the state goes into the entry: layers, token ids, the lossy method. All
else is a claim of whoever wrote the file; it is kept word for word as annotations, and
comes back when the entry is written as such a file again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import KVStoreError
from kvstore.format.json import Json, canonical_bytes, number_text
from kvstore.format.manifest import MethodRecord
from kvstore.format.wp30 import CORE_KEYS, Wp30Manifest
from kvstore.format.wp30_check import Receiver
from kvstore.limits import MAX_NAME_CHARS
from kvstore.runtime.device import library_versions
from kvstore.runtime.folder import Folder
from kvstore.runtime.identity import ModelIdentity, effective_config
from kvstore.runtime.probe import CacheOptions, probe_folder
from kvstore.store.clock import micros_text, now_micros
from kvstore.store.file_digests import FileDigests

__all__ = [
    "CLAIMS_NOTE", "annotations_of", "claims_in", "config_facts", "extra_in", "facts_for", "method_of", "receiver_of",
]  # fmt: skip

_PREFIX: Final = "wp30."
CLAIMS_NOTE: Final = f"{_PREFIX}claims"
"""The manifest without its layers, as JSON text."""
_READABLE: Final = ("document_id", "created_utc", "model_repo_id", "model_revision", "mlx_version", "mlx_lm_version")
_NOT_IN_A_NAME: Final = re.compile(r"[^a-z0-9._/-]+", re.ASCII)


def annotations_of(manifest: Wp30Manifest, *, codec: str, milliseconds: float) -> dict[str, Json]:
    """Annotations for an entry made of a file: claims word for word, the readable ones and extra keys by name."""
    notes: dict[str, Json] = {
        CLAIMS_NOTE: json.dumps(dict(manifest.fields), separators=(",", ":")),
        f"{_PREFIX}codec": codec,
        f"{_PREFIX}read_ms": number_text(round(milliseconds, 3)),
    }
    named = {name: manifest.fields[name] for name in _READABLE}
    named |= {f"extra.{name}": value for name, value in manifest.extra.items()}
    for name, value in named.items():
        if value is not None:
            notes[f"{_PREFIX}{name}"[:MAX_NAME_CHARS]] = _in_profile(value)
    return notes


def claims_in(annotations: Mapping[str, Json]) -> dict[str, Any]:
    """The claims that an entry's annotations hold; empty where it was not made of such a file."""
    text = annotations.get(CLAIMS_NOTE)
    try:
        value = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def method_of(manifest: Wp30Manifest) -> MethodRecord | None:
    """The lossy method that the file names, with its config as the file has it; None where it names none.

    Method names of the format are plain; whatever else stands in ``method_id`` becomes a hyphen.
    """
    named, config = manifest.fields["method_id"], manifest.fields["compression_config"]
    if named is None:
        return None
    name = _NOT_IN_A_NAME.sub("-", str(named).lower()).lstrip("._/-")[:MAX_NAME_CHARS]
    return MethodRecord.make(name or "unnamed", json.dumps(config, separators=(",", ":")))


def config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The geometry that a manifest states, from a model's config."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    heads, size = text.get("num_attention_heads"), text.get("head_dim")
    if size is None and isinstance(heads, int) and isinstance(text.get("hidden_size"), int) and heads:
        size = text["hidden_size"] // heads
    rope = text.get("rope_parameters")
    return {
        "num_kv_heads": text.get("num_key_value_heads", heads),
        "head_dim": size,
        "rope_theta": text.get("rope_theta", rope.get("rope_theta") if isinstance(rope, dict) else None),
        "rope_scaling": text.get("rope_scaling"),
        "sliding_window": text.get("sliding_window"),
    }


def extra_in(claims: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of claims that are not the format's own."""
    return {name: value for name, value in claims.items() if name not in CORE_KEYS}


def receiver_of(identity: ModelIdentity) -> Receiver:
    """The model as a receiver whose geometry is compared; its hashes are computed in a way that we do not know.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID.
    """
    facts = config_facts(_config(identity))
    layers = len(probe_folder(identity.path, CacheOptions()).layers)
    return Receiver(layers, facts["num_kv_heads"], facts["head_dim"], None, identity.names.get("repo"))


def facts_for(identity: ModelIdentity, method: MethodRecord | None) -> dict[str, Any]:
    """What we know of a manifest's keys; whatever a file claimed before goes over it."""
    versions = library_versions()
    return {
        **config_facts(_config(identity)),
        "created_utc": micros_text(now_micros()),
        "model_repo_id": identity.names.get("repo"),
        "model_revision": identity.names.get("revision"),
        "mlx_version": versions.get("mlx"),
        "mlx_lm_version": versions.get("mlx-lm"),
        "method_id": None if method is None else method.name,
        "compression_config": None if method is None else _config_value(method.config),
    }


def _config(identity: ModelIdentity) -> dict[str, Any]:
    return effective_config(Folder(identity.path, "model folder", FileDigests(), rehash=False))


def _config_value(text: str) -> Any:
    """A method's config as JSON, or its text where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _in_profile(value: Any) -> Json:
    """The value where our JSON profile has it, else its text."""
    try:
        canonical_bytes(value)
    except KVStoreError:
        return json.dumps(value)
    plain: Json = value
    return plain

"""The identity of a model, from its files alone.

It holds what changes keys and values for given token ids (the model record), what
changes token ids for given text (the tokenizer record), and names for people, which
decide nothing. Copies of a model in two folders have one identity; a byte changed in a
weight, a number changed in the config, another adapter or another scale makes another.
Neither mlx nor the network is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.configs import (
    INERT_PROCESSOR_KEYS,
    INERT_TOKENIZER_KEYS,
    canonical_config,
    canonical_json,
    geometry,
    template_digest,
)
from kvstore.format.digest import Digest, tagged_digest
from kvstore.format.json import Json, canonical_bytes, number_text
from kvstore.format.model import AdapterRecord, FileRecord, ModelRecord, TokenizerRecord, config_digest
from kvstore.runtime.folder import Folder, locate, require_no_pattern
from kvstore.runtime.media import media_token_ids
from kvstore.runtime.shards import require_distinct_tensors
from kvstore.store.file_digests import FileDigests, Stamp, stamp_of

__all__ = ["ADAPTER_KINDS", "ADAPTER_WEIGHTS", "WEIGHT_PATTERN", "ModelIdentity", "effective_config"]

WEIGHT_PATTERN: Final = "model*.safetensors"
"""The files that mlx-lm loads."""
ADAPTER_KINDS: Final = ("lora", "dora", "full")
ADAPTER_WEIGHTS: Final = "adapters.safetensors"

_TOKENIZER_TAG: Final = "kvstore tokenizer v1"
_PROCESSOR_TAG: Final = "kvstore processor v1"
_VOCABULARY: Final = (
    "tokenizer.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_TOKENIZER_EXTRA: Final = ("merges.txt",)
_TOKENIZER_JSON: Final = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_PROCESSOR_JSON: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_TEMPLATE_FOLDER: Final = "additional_chat_templates"


@dataclass(frozen=True)
class ModelIdentity:
    """A model's identity. Two are equal if model and tokenizer records are; names and paths do not count.

    Attributes:
        model: What decides keys and values; its digest is the model digest.
        tokenizer: Digests of the tokenizer and of the chat template.
        names: ``path``, and where known ``repo``, ``revision``, ``adapter_path``: annotations.
        path: The folder that the identity was read from.
        adapter_path: The adapter's folder, or None.
        stamps: Stamp of each file that was read.
        media_tokens: Token ids that stand for images and the like, with the config's names for them.
    """

    model: ModelRecord
    tokenizer: TokenizerRecord
    names: Mapping[str, str] = field(compare=False)
    path: Path = field(compare=False)
    adapter_path: Path | None = field(compare=False, default=None)
    stamps: Mapping[Path, Stamp] = field(compare=False, repr=False, default_factory=dict)
    media_tokens: Mapping[int, str] = field(compare=False, repr=False, default_factory=dict)

    @property
    def digest(self) -> Digest:
        """The model digest."""
        return self.model.digest

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        adapter_path: str | os.PathLike[str] | None = None,
        *,
        rehash: bool = False,
        digests: FileDigests | None = None,
    ) -> ModelIdentity:
        """Read the identity of the model at ``path``.

        Args:
            path: A folder, a folder of the hub cache, or the id of a model in the hub cache.
            adapter_path: Folder of an adapter that mlx-lm can load, or None for the base model.
            rehash: Read every file, whatever digest is remembered.
            digests: The memory of file digests; by default the one in the user's cache folder.

        Raises:
            InvalidError: MODEL_FOLDER_INVALID, saying which file is missing or unreadable.
        """
        located = locate(path)
        require_no_pattern(located.path)
        folder = Folder(located.path, "model folder", digests or FileDigests(), rehash)
        adapter = None if adapter_path is None else folder.beside(locate(adapter_path).path, "adapter folder")
        # The adapter first: its files are few, and a wrong path is refused before weights are read.
        adapter_record = None if adapter is None else _adapter(adapter)
        names = dict(located.names)
        if adapter is not None:
            names["adapter_path"] = str(adapter.path)
        return cls(
            model=_model(folder, adapter_record),
            tokenizer=_tokenizer(folder),
            names=names,
            path=located.path,
            adapter_path=None if adapter is None else adapter.path,
            stamps=folder.stamps,
            media_tokens=media_token_ids(effective_config(folder)),
        )

    def changed_files(self) -> list[Path]:
        """Files that are no longer those that the identity was read from."""
        return [path for path, stamp in self.stamps.items() if _stamp_or_none(path) != stamp]

    def require_unchanged(self) -> None:
        """Prove that the files are still the ones that were read.

        Raises:
            IncompatibleError: BINDING_MISMATCH naming the first file that changed.
        """
        changed = self.changed_files()
        if changed:
            raise fail(
                "BINDING_MISMATCH", f"{changed[0]} changed after the identity was read",
                fix="Read the identity and load the model again.", files=[str(path) for path in changed],
            )  # fmt: skip


def effective_config(folder: Folder) -> dict[str, Any]:
    """The config that mlx-lm builds the model from: ``config.json``, and ModelOpt's quantization beside it.

    ``generation_config.json`` only replaces the end-of-text id, which is inert.
    """
    config = folder.json("config.json")
    text = config.get("text_config")
    quantized = "quantization_config" in config or (isinstance(text, dict) and "quantization_config" in text)
    if not quantized and folder.has("hf_quant_config.json"):
        config["quantization_config"] = folder.json("hf_quant_config.json")
    return config


def _model(folder: Folder, adapter: AdapterRecord | None) -> ModelRecord:
    """The model record. Small files first, so that a refusal does not wait for the weights."""
    config = effective_config(folder)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise fail(
            "MODEL_FOLDER_INVALID", f"{folder.path / 'config.json'}: model_type", expected="text", found=model_type
        )
    weights = folder.need(WEIGHT_PATTERN, what="weights")
    folder.need(*_VOCABULARY, what="tokenizer")
    require_distinct_tensors(folder, weights)
    return ModelRecord(
        model_type=model_type,
        weights=folder.records(weights),
        config=config_digest(canonical_config(config)),
        code=_code(folder, config),
        adapter=adapter,
        processor=_processor(folder),
        geometry=geometry(config),
    )


def _code(folder: Folder, config: Mapping[str, Any]) -> tuple[FileRecord, ...]:
    """Python files of a model whose config names its own code; without that, mlx-lm runs none of them.

    Raises:
        InvalidError: MODEL_FOLDER_INVALID for code in a folder within: the format's identity has no place for it.
    """
    name = config.get("model_file")
    if name is None:
        return ()
    if not isinstance(name, str) or "\0" in name:
        raise fail(
            "MODEL_FOLDER_INVALID", f"{folder.path / 'config.json'}: model_file", expected="the name of a file",
            found=repr(name)[:80],
        )  # fmt: skip
    known = [name, *folder.names("*.py")]
    inner = [other for other in folder.names_below(".py") if os.path.normpath(name) != other]
    if inner:
        raise fail(
            "MODEL_FOLDER_INVALID", f"{folder.what} {folder.path} has code that is not in the model's identity",
            expected=f"model_file ({name}), and code directly in the folder", found=inner[:16],
            fix="Move what the model runs beside config.json, and the rest out of the folder.", path=str(folder.path),
        )  # fmt: skip
    return folder.records(known)


def _processor(folder: Folder) -> Digest | None:
    parts = {name: folder.json_if(name) for name in _PROCESSOR_JSON}
    document: dict[str, Json] = {
        name: canonical_json(value, INERT_PROCESSOR_KEYS) for name, value in parts.items() if value is not None
    }
    return tagged_digest(_PROCESSOR_TAG, canonical_bytes(document)) if document else None


def _tokenizer(folder: Folder) -> TokenizerRecord:
    config = folder.json_if("tokenizer_config.json")
    names = folder.names(*_VOCABULARY, *_TOKENIZER_EXTRA)
    if config is not None and "auto_map" in config:
        names += folder.names("*.py")
    parsed = {name: folder.json_if(name) for name in _TOKENIZER_JSON}
    document: Json = {
        "files": [record.to_json() for record in folder.records(names)],
        "json": {
            name: canonical_json(value, INERT_TOKENIZER_KEYS) for name, value in parsed.items() if value is not None
        },
    }
    return TokenizerRecord(
        tagged_digest(_TOKENIZER_TAG, canonical_bytes(document)), template_digest(_templates(folder, config or {}))
    )


def _templates(folder: Folder, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A file of its own wins over the tokenizer's config, as in transformers."""
    found: dict[str, str] = {}
    for value in (folder.json_if("chat_template.json") or {}, config):
        found |= _named_templates(value.get("chat_template"))
    if folder.has("chat_template.jinja"):
        found["default"] = folder.text("chat_template.jinja")
    if (folder.path / _TEMPLATE_FOLDER).is_dir():
        inner = folder.beside(folder.path / _TEMPLATE_FOLDER, "template folder")
        found |= {name.removesuffix(".jinja"): inner.text(name) for name in inner.names("*.jinja")}
    return found


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            str(item["name"]): str(item["template"])
            for item in value if isinstance(item, dict) and {"name", "template"} <= item.keys()
        }  # fmt: skip
    return {}


def _adapter(folder: Folder) -> AdapterRecord:
    """The adapter, with what mlx-lm reads of its config; the rest of that file describes the training."""
    config = folder.json("adapter_config.json")
    folder.need(ADAPTER_WEIGHTS, what="adapter weights")
    kind = config.get("fine_tune_type", "lora")
    where = folder.path / "adapter_config.json"
    if kind not in ADAPTER_KINDS:
        raise fail("MODEL_FOLDER_INVALID", f"{where}: fine_tune_type", expected=list(ADAPTER_KINDS), found=kind)
    read: dict[str, Any] = {"fine_tune_type": kind}
    scale: float = 1
    if kind != "full":
        parameters = config.get("lora_parameters")
        found = parameters.get("scale") if isinstance(parameters, dict) else None
        if not isinstance(parameters, dict) or isinstance(found, bool) or not isinstance(found, (int, float)):
            raise fail("MODEL_FOLDER_INVALID", f"{where}: lora_parameters.scale", expected="a number", found=found)
        scale = found
        # Dropout acts in training only.
        read["lora_parameters"] = {name: value for name, value in parameters.items() if name != "dropout"}
        read["num_layers"] = config.get("num_layers")
    files = folder.records([ADAPTER_WEIGHTS])
    return AdapterRecord(kind, files, config_digest(canonical_json(read)), number_text(scale))


def _stamp_or_none(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None

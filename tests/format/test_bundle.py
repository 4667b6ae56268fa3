"""Bundles: which names may stand in one, and what layout.json holds."""

from __future__ import annotations

import pytest

from kvstore.errors import KVStoreError
from kvstore.format.bundle import (
    BUNDLE_MEDIA_TYPE,
    BundleFile,
    bundle_layout,
    index_files,
    object_name,
    parse_bundle_layout,
    receipt_name,
)
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.json import Json, canonical_bytes
from kvstore.limits import MAX_BUNDLE_LAYOUT_BYTES
from tests import schema_mutants
from tests.samples import refusal

A, B, C = (sha256_digest(name) for name in (b"a", b"b", b"c"))
NEEDED = ("layout.json", "manifest.json")
OTHER = BUNDLE_MEDIA_TYPE.replace("v1", "v2")
DOCUMENT: dict[str, Json] = {"entry": A, "features": [], "media_type": BUNDLE_MEDIA_TYPE}


def code_of(*paths: str, plain: bool = True) -> str | None:
    error = refusal(lambda: index_files(BundleFile(path, plain) for path in paths))
    return None if error is None else error.code


def test_names_are_sorted_by_what_they_name() -> None:
    names = (receipt_name(C), object_name(B, C), *NEEDED, object_name(A, B), receipt_name(A))
    index = index_files(BundleFile(name, True) for name in names)
    assert index.objects == {A: B, B: C}
    assert index.receipts == tuple(sorted((A, C)))
    assert index.object_path(A) == object_name(A, B)


@pytest.mark.parametrize(
    "path",
    ["../manifest.json", "/manifest.json", "objects/../../x", "./layout.json", "objects//x", "", "objects/", "a\\b",
     "C:x", "a\nb", "a\x00b", "a\x7fb", "x" * 256, ".."],
)  # fmt: skip
def test_unsafe_paths(path: str) -> None:
    assert code_of(path) == code_of(*NEEDED, path) == "PATH_UNSAFE"


def test_what_is_no_plain_file() -> None:
    assert code_of(*NEEDED, plain=False) == "PATH_UNSAFE"


@pytest.mark.parametrize("path", [".DS_Store", "objects/._x", ".git/config", "__MACOSX/._manifest.json"])
def test_files_that_file_managers_leave_are_passed_over(path: str) -> None:
    assert code_of(*NEEDED, path) is None


@pytest.mark.parametrize(
    "paths",
    [
        ("layout.json",), ("manifest.json",), (*NEEDED, "layout.json"), (*NEEDED, "README"), (*NEEDED, "Manifest.json"),
        (*NEEDED, f"objects/{A[7:]}.kvo"), (*NEEDED, object_name(A, B).upper()), (*NEEDED, receipt_name(A) + "\u0131"),
        (*NEEDED, object_name(A, B), object_name(A, C)), (*NEEDED, "x/" + object_name(A, B)),
    ],
)  # fmt: skip
def test_wrong_names(paths: tuple[str, ...]) -> None:
    assert code_of(*paths) == "BUNDLE_LAYOUT_INVALID"


@pytest.mark.parametrize("kind", ["last twice", "all once", "all hidden", "one payload twice", "wrong name last"])
def test_many_names_take_time_in_proportion(kind: str) -> None:
    """So many that a look at every pair of them would take hours."""
    many = [receipt_name(Digest(f"sha256:{at:064x}")) for at in range(200_000)]
    if kind == "all hidden":
        many = [f".x/{name}" for name in many]
    elif kind == "one payload twice":
        many = [object_name(Digest(f"sha256:{at:064x}"), A) for at in range(200_000)]
        many += [object_name(Digest(f"sha256:{199_999:064x}"), B)]
    more = {"last twice": many[-1:], "wrong name last": ["x"]}.get(kind, [])
    accepted = kind in ("all once", "all hidden")
    assert code_of(*NEEDED, *many, *more) == (None if accepted else "BUNDLE_LAYOUT_INVALID")


def test_layout_document() -> None:
    assert bundle_layout(A) == canonical_bytes({**DOCUMENT})
    assert parse_bundle_layout(bundle_layout(A)) == A


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (canonical_bytes({**DOCUMENT, "media_type": OTHER}), "BUNDLE_VERSION_UNSUPPORTED"),
        (canonical_bytes({**DOCUMENT, "media_type": "x"}), "BUNDLE_LAYOUT_INVALID"),
        (canonical_bytes({**DOCUMENT, "features": ["x"]}), "BUNDLE_VERSION_UNSUPPORTED"),
        (canonical_bytes({**DOCUMENT, "entry": "md5:00"}), "BUNDLE_LAYOUT_INVALID"),
        (canonical_bytes({**DOCUMENT, "more": 1}), "BUNDLE_LAYOUT_INVALID"),
        (b"[]", "BUNDLE_LAYOUT_INVALID"),
        (b"{", "BUNDLE_LAYOUT_INVALID"),
        (b" " + bundle_layout(A), "BUNDLE_LAYOUT_INVALID"),
        (b" " * (MAX_BUNDLE_LAYOUT_BYTES + 1), "DOC_TOO_LARGE"),
    ],
)
def test_layout_documents_that_are_refused(data: bytes, code: str) -> None:
    with pytest.raises(KVStoreError) as caught:
        parse_bundle_layout(data)
    assert caught.value.code == code


def test_schema_and_parser_refuse_the_same_mutants() -> None:
    made = list(schema_mutants.mutants("bundle-layout.v1", DOCUMENT))
    assert {(m.pointer, m.keyword) for m in made} >= {
        (pointer, keyword) for pointer, keyword, _ in schema_mutants.keywords(schema_mutants.load("bundle-layout.v1"))
    }
    for mutant in made:
        assert refusal(lambda document=mutant.document: parse_bundle_layout(canonical_bytes(document)))  # type: ignore[misc]

"""``fixtures/index.json`` read into cases, and where the fixtures lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.errors import fail
from kvstore.format.digest import Digest, sha256_digest
from kvstore.format.fields import Fields
from kvstore.format.json import parse_canonical

__all__ = ["INDEX_MEDIA_TYPE", "ROLES", "Case", "Index", "fixtures_folder", "load_index"]

INDEX_MEDIA_TYPE: Final = "application/vnd.kvstore.fixture-index.v1+json"
ROLES: Final = ("reader", "writer", "canon", "prefix")
_KEYS: Final = frozenset((
    "as", "comment", "context", "expect", "features", "files", "flags", "id", "input", "level", "requirements", "role",
    "since",
))  # fmt: skip
_MAX_INDEX_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One case: see ``fixtures/README.md`` for every field. ``form`` is the field ``as``."""

    id: str
    role: str
    input: str
    context: str | None
    form: str | None
    features: tuple[str, ...]
    level: str
    requirements: tuple[str, ...]
    comment: str
    expect: Mapping[str, Any]
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Index:
    """All cases.

    Attributes:
        folder: What paths in cases are relative to.
        digest: SHA-256 of the index: the subject of a conformance receipt.
        version: Version of SPEC.md that the cases prove.
        unknown: How many entries were passed over since they have keys or a role that is not known.
    """

    folder: Path
    digest: Digest
    version: str
    cases: tuple[Case, ...]
    unknown: int

    def path(self, name: str) -> Path:
        """The absolute path of a file or folder that a case names."""
        return (self.folder / name).resolve()


def fixtures_folder() -> Path:
    """Where the fixtures lie: in the package when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "fixtures"
    return inside if inside.is_dir() else package.parent / "fixtures"


def load_index(folder: Path | None = None) -> Index:
    """Read the index of a folder, by default our own.

    Raises:
        UsageError: USAGE, where there is none.
        InvalidError, UnsupportedError: of the document.
    """
    root = folder or fixtures_folder()
    try:
        data = (root / "index.json").read_bytes()
    except OSError as error:
        raise fail("USAGE", f"there are no fixtures at {root} ({error.strerror})") from None
    fields = Fields(parse_canonical(data, _MAX_INDEX_BYTES, "fixture index"), "", None)
    fields.require_media_type(INDEX_MEDIA_TYPE)
    entries = [item for item, _ in fields.items("cases", limit=1 << 20)]
    known = [entry for entry in entries if set(entry) == _KEYS and entry["role"] in ROLES]
    cases = tuple(_case(entry) for entry in known)
    return Index(root, sha256_digest(data), fields.text("version"), cases, len(entries) - len(known))


def _case(entry: Mapping[str, Any]) -> Case:
    return Case(
        id=entry["id"], role=entry["role"], input=entry["input"], context=entry["context"], form=entry["as"],
        features=tuple(entry["features"]), level=entry["level"], requirements=tuple(entry["requirements"]),
        comment=entry["comment"], expect=entry["expect"], files=entry["files"],
    )  # fmt: skip

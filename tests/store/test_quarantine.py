"""What stands where the store's own files belong blocks no put: it is set aside, with the reason beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore.format.digest import digest_hex
from kvstore.store.entry_store import EntryStore
from tests.builders import MadeEntry, make_entry
from tests.store.kit import clean, object_file, put, read_back

KINDS = ["empty folder", "folder", "link to a folder", "link to nothing", "pipe", "file"]


def squat(path: Path, kind: str) -> None:
    """Put something there instead of the file."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    elsewhere = path.parent.parent.parent.parent / f"elsewhere-{path.name}"
    if kind in ("folder", "empty folder"):
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_bytes(b"other")
    else:
        path.symlink_to(elsewhere)
    if kind == "folder":
        (path / "kept").write_bytes(b"somebody's")
    elif kind == "link to a folder":
        elsewhere.mkdir()


def places(store: EntryStore, made: MadeEntry) -> dict[str, Path]:
    """Files of an entry that is there, one of each kind."""
    paths = {"manifest": made.entry_id, "receipt": store.receipts(made.entry_id)[0].digest}
    found = {"manifest": "manifests", "receipt": "receipts"}
    named = {what: digest_hex(digest) for what, digest in paths.items()}
    documents = {what: store.root / found[what] / name[:2] / f"{name}.json" for what, name in named.items()}
    return {**documents, "object": object_file(store, made)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("imported", [False, True])
def test_nothing_in_a_file_s_place_blocks_a_put(tmp_path: Path, kind: str, imported: bool) -> None:
    made = make_entry(1)
    with EntryStore.open(tmp_path / "first") as first, EntryStore.open(tmp_path / "second") as second:
        put(first, made)
        first.export_bundle(made.entry_id, tmp_path / "bundle")
        for path in places(first, made).values():
            squat(second.root / path.relative_to(first.root), kind)
        if imported:
            second.import_bundle(tmp_path / "bundle")
        else:
            put(second, made)
            for receipt in first.receipts(made.entry_id):
                second.add_receipt(receipt)
        read_back(second, made, "always")
        kept = [receipt.digest for receipt in second.receipts(made.entry_id)]
        assert {receipt.digest for receipt in first.receipts(made.entry_id)} <= set(kept)
        clean(second)
        aside = [path for path in (second.root / "quarantine").iterdir() if not path.name.endswith(".reason.json")]
        assert len(aside) == (3 if kind in ("empty folder", "folder", "link to a folder") else 0)
        for path in aside:
            assert json.loads(Path(f"{path}.reason.json").read_text())["file"] in path.name
            assert kind != "folder" or (path / "kept").read_bytes() == b"somebody's"


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_whose_manifest_was_replaced_is_healed_by_a_put(tmp_path: Path, kind: str) -> None:
    made = make_entry(2)
    with EntryStore.open(tmp_path / "store") as store:
        put(store, made)
        squat(places(store, made)["manifest"], kind)
        put(store, made)
        read_back(store, made, "always")

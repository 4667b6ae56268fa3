"""What the tests of the store share: a store with entries, reading one back whole, changing a file behind its back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.store.entry_store import EntryStore
from kvstore.store.publish import Written
from tests.builders import MadeEntry

ROOT = Path(__file__).parents[2]


def put(store: EntryStore, made: MadeEntry, **options: object) -> Written:
    return store.publish(made.manifest, made.source, token_ids=made.token_ids, **options)  # type: ignore[arg-type]


def read_back(store: EntryStore, made: MadeEntry, verification: str = "auto") -> None:
    """Prove that the store gives the entry back to the bit."""
    manifest = store.manifest(made.entry_id)
    assert manifest == made.manifest
    assert store.token_ids(manifest).tolist() == made.token_ids.tolist()
    for ref in manifest.payloads():
        with store.open_object(ref, manifest.namespace, verification=verification) as reader:  # type: ignore[arg-type]
            assert reader.read_payload().to_bytes() == made.payloads[ref.digest].to_bytes()


def code_of(call: object, *args: object, **options: object) -> str:
    """The code of the error that the call raises."""
    with pytest.raises(KVStoreError) as caught:
        call(*args, **options)  # type: ignore[operator]
    return caught.value.code


def clean(store: EntryStore) -> None:
    """Prove that a deep check finds nothing at all, notices included."""
    assert [finding.to_json() for finding in store.verify(deep=True).findings] == []


def object_file(store: EntryStore, made: MadeEntry, number: int = 0) -> Path:
    """The file of one of the entry's payloads."""
    name = made.manifest.payloads()[number].digest.removeprefix("sha256:")
    (path,) = (store.root / "objects" / name[:2]).glob(f"{name}.*")
    return path


def overwrite(path: Path, data: bytes) -> None:
    """Change a read-only file in place, as a bad disk or a careless hand would."""
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)


def flip(path: Path, at: int = -40) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    overwrite(path, bytes(data))


def files(root: Path) -> dict[str, bytes]:
    """Every file of a store but the index's, which change when somebody looks."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith("index.sqlite")
    }


_DROP = """
import os, pkgutil, importlib, kvstore.store
# Loaded before the change: another user may not be able to read the interpreter's own folder.
for module in pkgutil.iter_modules(kvstore.store.__path__):
    importlib.import_module(f"kvstore.store.{module.name}")
import sqlalchemy.dialects.sqlite, tests.store.kit
os.setgid(65534)
os.setuid(65534)
"""


def child(code: str, *args: object, unprivileged: bool = False) -> str:
    """What Python code prints in a process of its own, as nobody where asked: permissions do not bind root."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", (_DROP if unprivileged else "") + code, *map(str, args)], env=environment, text=True,
        capture_output=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout

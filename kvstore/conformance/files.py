"""Bundles in directories and tar archives: the only part of the kit that opens files of a case."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from kvstore.conformance.reader import Bundle
from kvstore.conformance.recipe import Made
from kvstore.errors import fail
from kvstore.format.archive import members
from kvstore.format.bundle import LAYOUT_NAME, MANIFEST_NAME, BundleFile, bundle_layout, object_name
from kvstore.format.object import encode_object

__all__ = ["load_bundle", "write_bundle"]


def load_bundle(path: Path) -> Bundle:
    """The bundle at ``path``: a directory, or a tar archive. No file of it is opened yet (an archive is read whole).

    Raises:
        InvalidError: BUNDLE_LAYOUT_INVALID, where there is neither.
    """
    if path.is_dir():
        return Bundle(tuple(_walk(path, "")), lambda name: (path / name).read_bytes())
    if path.is_file():
        return _load_tar(path)
    raise fail("BUNDLE_LAYOUT_INVALID", f"there is no bundle at {path}")


def write_bundle(folder: Path, made: Made) -> None:
    """Write an entry as a bundle into an empty directory."""
    files = bundle_files(made)
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)


def bundle_files(made: Made) -> dict[str, bytes]:
    """The files of a bundle by path."""
    files = {LAYOUT_NAME: bundle_layout(made.manifest.entry_id), MANIFEST_NAME: made.manifest.data}
    for digest, payload in made.payloads.items():
        encoded = encode_object(payload, digest=digest, namespace=made.manifest.namespace)
        files[object_name(digest, encoded.stored_digest)] = b"".join(bytes(part) for part in encoded.parts)
    return files


def _walk(folder: Path, prefix: str) -> Iterator[BundleFile]:
    for item in sorted(folder.iterdir()):
        name = prefix + item.name
        if item.is_dir() and not item.is_symlink():
            yield from _walk(item, name + "/")
        else:
            yield BundleFile(name, item.is_file() and not item.is_symlink())


def _load_tar(path: Path) -> Bundle:
    files: list[BundleFile] = []
    places: dict[str, tuple[int, int]] = {}
    whole = path.read_bytes()
    for member in members(BytesIO(whole), path.name):
        files.append(member.file)
        places[member.file.path] = member.start, member.size

    def read(name: str) -> bytes:
        start, size = places[name]
        data = whole[start : start + size]
        if len(data) != size:
            raise fail("BUNDLE_LAYOUT_INVALID", f"the archive ends within {name[:80]!r}")
        return data

    return Bundle(tuple(files), read)

"""Reading payloads that claim more memory than they are worth, or than there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import KVStoreError, SpaceError
from kvstore.format.digest import Digest
from kvstore.format.object import encode_object, parse_object
from kvstore.format.object_read import ObjectReader
from kvstore.format.tensors import Payload
from tests.format.payloads import bits, encoded
from tests.store.kit import child

FALSE = Digest("sha256:" + "0" * 64)
MIB = 2**20
SHAPES = {"one tensor": (1, 2**28), "many tensors": (64, 2**22), "deep": (4, 2**26)}


def zeros(count: int, elements: int) -> Payload:
    """A payload that takes no memory itself."""
    return Payload.make(
        {f"{at}.keys": ("BF16", np.broadcast_to(np.uint16(0), (1, 2, elements // 128, 64))) for at in range(count)}
    )


def opened(data: bytes, payload: Payload, digest: Digest) -> ObjectReader:
    return parse_object(memoryview(data), digest=digest, size=payload.size)


@pytest.mark.parametrize(("count", "elements"), SHAPES.values(), ids=SHAPES)
def test_what_expands_hugely_takes_no_memory_before_it_is_proved(tmp_path: Path, count: int, elements: int) -> None:
    payload = zeros(count, elements)
    with (tmp_path / "object").open("wb") as file:
        for part in encode_object(payload, digest=FALSE).parts:
            file.write(part)
    assert payload.size >= 512 * MIB
    assert (tmp_path / "object").stat().st_size < 2 * MIB
    code, grown = child(
        """
import resource, sys
from pathlib import Path
from kvstore.errors import KVStoreError
from kvstore.format.object import parse_object
data = Path(sys.argv[1]).read_bytes()
reader = parse_object(memoryview(data), digest="sha256:" + "0" * 64, size=int(sys.argv[2]))
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    reader.read_proved()
except KVStoreError as error:
    print(error.code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
""",
        tmp_path / "object", payload.size,
    ).split()  # fmt: skip
    assert code == "PAYLOAD_DIGEST_MISMATCH"
    assert int(grown) < 32 * MIB


@pytest.mark.parametrize(("size", "times"), [(MIB, 1), (96 * MIB, 2)])
def test_a_payload_is_proved_however_large_and_decoded_twice_only_if_it_expands_hugely(
    monkeypatch: pytest.MonkeyPatch, size: int, times: int
) -> None:
    calls: list[ObjectReader] = []
    before = ObjectReader.verify_payload

    def verify_payload(self: ObjectReader) -> None:
        calls.append(self)
        before(self)

    monkeypatch.setattr(ObjectReader, "verify_payload", verify_payload)
    payload = zeros(1, size // 2)
    digest = payload.digest()
    read = opened(encoded(payload), payload, digest).read_proved()
    assert (read.digest(), len(calls)) == (digest, times - 1)
    false = b"".join(bytes(part) for part in encode_object(payload, digest=FALSE).parts)
    with pytest.raises(KVStoreError) as caught:
        opened(false, payload, FALSE).read_proved()
    assert caught.value.code == "PAYLOAD_DIGEST_MISMATCH"


def test_what_does_not_shrink_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.format.object_read._UNPROVED_BYTES", 0)
    monkeypatch.delattr(ObjectReader, "verify_payload")
    payload = Payload.make({"a": ("BF16", bits("BF16", (64, 1024), 1))})
    assert opened(encoded(payload), payload, payload.digest()).read_proved().digest() == payload.digest()


@pytest.mark.parametrize("read", [ObjectReader.read_payload, ObjectReader.read_proved])
def test_memory_that_there_is_not(monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    payload = Payload.make({"a": ("BF16", bits("BF16", (64, 1024), 1))})
    reader = opened(encoded(payload), payload, payload.digest())

    def short(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(np, "empty", short)
    with pytest.raises(SpaceError) as caught:
        read(reader)
    assert (caught.value.code, caught.value.detail["needed"]) == ("DEVICE_MEMORY_SHORT", payload.size)

"""Documents by themselves, bytes in, canonical bytes out: the ``canon`` role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvstore.format.json import canonicalize
from kvstore.format.layout import parse_layout
from kvstore.format.receipt import parse_receipt
from kvstore.format.tensors import payload_from_bytes
from kvstore.limits import MAX_MANIFEST_BYTES

__all__ = ["FORMS", "canon"]


def _json(data: bytes) -> bytes:
    return canonicalize(data, MAX_MANIFEST_BYTES)


def _receipt(data: bytes) -> bytes:
    return parse_receipt(data).data


def _layout(data: bytes) -> bytes:
    parse_layout(data)
    return data


def _payload(data: bytes) -> bytes:
    return payload_from_bytes(data).to_bytes()


FORMS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "json": _json, "layout": _layout, "payload": _payload, "receipt": _receipt,
}  # fmt: skip
"""What bytes can be read as: any JSON text of the profile, or one document that must be canonical already."""


def canon(form: str, data: bytes) -> bytes:
    """The canonical bytes of ``data``, read as ``form``.

    Raises:
        KVStoreError: with the code of the rule that the bytes break.
    """
    return FORMS[form](data)

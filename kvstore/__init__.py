"""kvstore: a content-addressed store and an open file format for KV caches.

::

    store = kvstore.Store.open(path)
    model = kvstore.load_model(folder)
    store.put(cache, token_ids=ids, model=model)
    hit = store.match(ids, model=model)
    restored = store.load(hit, into=model)

Names are imported when they are first used: errors and the byte-level store need no MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.errors import (
        BusyError,
        CancelledError,
        IncompatibleError,
        IntegrityError,
        InvalidError,
        KVStoreError,
        NotFoundError,
        SpaceError,
        StoreError,
        UnsupportedError,
        UsageError,
    )
    from kvstore.format.receipt import Receipt
    from kvstore.runtime.binding import BoundModel, bind, load_model
    from kvstore.runtime.chat import chat_ids, divergence
    from kvstore.runtime.identity import ModelIdentity
    from kvstore.runtime.prefill import prefill
    from kvstore.runtime.probe import CacheOptions, Probe, probe
    from kvstore.runtime.results import Hit, Restored
    from kvstore.runtime.store import Store
    from kvstore.store.entry_store import EntryStore

__version__ = "0.1.0"

__all__ = [
    "BoundModel", "BusyError", "CacheOptions", "CancelledError", "EntryStore", "Hit", "IncompatibleError",
    "IntegrityError", "InvalidError", "KVStoreError", "ModelIdentity", "NotFoundError", "Probe", "Receipt", "Restored",
    "SpaceError", "Store", "StoreError", "UnsupportedError", "UsageError", "__version__", "bind", "chat_ids",
    "divergence", "load_model", "prefill", "probe",
]  # fmt: skip

_HOMES = {
    "kvstore.errors": (
        "BusyError", "CancelledError", "IncompatibleError", "IntegrityError", "InvalidError", "KVStoreError",
        "NotFoundError", "SpaceError", "StoreError", "UnsupportedError", "UsageError",
    ),
    "kvstore.format.receipt": ("Receipt",),
    "kvstore.runtime.binding": ("BoundModel", "bind", "load_model"),
    "kvstore.runtime.chat": ("chat_ids", "divergence"),
    "kvstore.runtime.identity": ("ModelIdentity",),
    "kvstore.runtime.prefill": ("prefill",),
    "kvstore.runtime.probe": ("CacheOptions", "Probe", "probe"),
    "kvstore.runtime.results": ("Hit", "Restored"),
    "kvstore.runtime.store": ("Store",),
    "kvstore.store.entry_store": ("EntryStore",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)

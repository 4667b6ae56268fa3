"""Probes of models, remembered while the model lives: a tenth of a second each, and the same every time."""

from __future__ import annotations

import weakref
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.format.layers import LayerRecord
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.probe import CacheOptions, Probe, probe, probe_folder
from kvstore.store.shapes import Shapes

__all__ = ["Probes"]


class Probes:
    """A memory of :func:`kvstore.runtime.probe.probe`, by model object and options."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._known: dict[tuple[int, CacheOptions], tuple[weakref.ref[Any], Probe]] = {}

    def __call__(self, model: BoundModel | ModelIdentity, options: CacheOptions) -> Probe:
        """The model's probe; of an identity, that of the model in its folder."""
        known = self._known.get((id(model), options))
        if known is not None and known[0]() is model:
            return known[1]
        made = probe(model, options) if isinstance(model, BoundModel) else probe_folder(model.path, options)
        alive = {key: item for key, item in self._known.items() if item[0]() is not None}
        # Another dictionary, because other threads may be going through this one.
        self._known = {**alive, (id(model), options): (weakref.ref(model), made)}
        identity = model.identity if isinstance(model, BoundModel) else model
        Shapes().note(identity.digest, repr(options), made.signature)
        return made

    def layers(self, model: BoundModel | ModelIdentity) -> tuple[LayerRecord, ...] | None:
        """What the model's own caches look like, or None where a bare identity's folder cannot say."""
        try:
            return self(model, CacheOptions()).layers
        except KVStoreError:
            if isinstance(model, BoundModel):
                raise
            return None

"""Contexts for entries that tests make."""

from __future__ import annotations

from kvstore.conformance.context import Context
from kvstore.format.compat import Wanted
from kvstore.format.manifest import Manifest


def context_for(manifest: Manifest) -> Context:
    """The context that a manifest fits into."""
    method = None if manifest.method is None else manifest.method.name
    return Context(Wanted(manifest.model, manifest.tokenizer, manifest.namespace, method=method))

"""Load receipts: what was restored, where it came from, and what was proved about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import __version__
from kvstore.format.layout import Layout, layout_of
from kvstore.format.receipt import Receipt
from kvstore.runtime.cut import cut_layers
from kvstore.runtime.device import device_facts, library_versions
from kvstore.runtime.materialize import Filled, Plan
from kvstore.store.clock import micros_text, now_micros

if TYPE_CHECKING:
    from kvstore.store.read import Verification

__all__ = ["load_receipt"]


def load_receipt(plan: Plan, filled: Filled, *, verification: Verification) -> Receipt:
    """The receipt of a load that succeeded; it is the caller's to keep or to drop."""
    manifest = plan.manifest
    return Receipt(
        type="load",
        subject=manifest.entry_id,
        made_at=micros_text(now_micros()),
        producer={"name": "kvstore", "version": __version__},
        libraries=library_versions(),
        device=device_facts(),
        checks={
            **plan.checks,
            "objects": "verified",
            "payload_digests": "verified" if verification == "always" else "skipped",
        },
        facts={
            "buffer_bytes": filled.buffer_bytes,
            "entry_token_count": manifest.token_count,
            "layout_digest": _logical_layout(plan).digest,
            "model_digest": manifest.model.digest,
            "namespace": manifest.namespace,
            "objects_read": filled.objects,
            "payload_bytes": filled.payload_bytes,
            "token_count": plan.tokens,
            "token_count_is": "asserted" if manifest.asserted else "verified",
            "verification": verification,
        },
    )


def _logical_layout(plan: Plan) -> Layout:
    """The layout of what is restored, head room not counted: comparable with a model's own ``layout_at``."""
    return layout_of(cut_layers(plan.manifest.layers, plan.tokens), plan.tokens)

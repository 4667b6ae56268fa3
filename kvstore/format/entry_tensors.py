"""Step 11 of the reading order: each payload holds exactly the tensors of its segment."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.groups import segment_tensors, segments
from kvstore.format.manifest import Manifest, token_spec
from kvstore.format.tensors import TensorSpec, canonical_order

__all__ = ["payload_tensors", "require_tensors"]


def payload_tensors(manifest: Manifest) -> dict[Digest, tuple[TensorSpec, ...]]:
    """The tensors of every payload of an entry, in canonical order, the token ids' payload among them."""
    result: dict[Digest, tuple[TensorSpec, ...]] = {
        manifest.prefix.token_ids.digest: (token_spec(manifest.token_count),)
    }
    for group in manifest.groups:
        for part, ref in zip(segments(group.span), group.payloads, strict=True):
            result[ref.digest] = canonical_order(segment_tensors(group.layers, manifest.leaves, part))
    return result


def require_tensors(manifest: Manifest, found: Mapping[Digest, tuple[TensorSpec, ...]]) -> None:
    """Prove that the payloads that were found hold what the manifest says.

    Args:
        found: The tensors of some payloads of the entry, in canonical order.

    Raises:
        InvalidError: PAYLOAD_TENSORS_MISMATCH.
    """
    wanted = payload_tensors(manifest)
    for digest, specs in found.items():
        if specs != wanted[digest]:
            raise fail(
                "PAYLOAD_TENSORS_MISMATCH", f"payload {digest}", expected=_show(wanted[digest]), found=_show(specs)
            )


def _show(specs: tuple[TensorSpec, ...]) -> list[str]:
    return [f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in specs]

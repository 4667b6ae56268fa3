"""A fresh dense-Qwen3.5 cache for a reference run: planned, allocated, proved, and handed over once.

Until the hand-over only the receipts can be read, so nobody can have used the cache
that they describe. On Metal, which has registry ids, the profile's own receipt is
issued. Everywhere our load receipt says what was proved and what nobody can observe:
that a buffer begins at offset 0 and lies in no file holds because it was allocated
here; the device of a buffer is known only where the system names devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvstore import __version__
from kvstore.errors import fail
from kvstore.format.digest import Digest
from kvstore.format.json import Json
from kvstore.format.layout import Buffer, Layout
from kvstore.format.qwen35_config import Qwen35Config
from kvstore.format.qwen35_plan import PROFILE, Plan, make_plan
from kvstore.format.qwen35_receipt import DeviceFacts, ProfileReceipt, make_receipt
from kvstore.format.qwen35_validate import validate, validate_layout
from kvstore.format.receipt import Receipt
from kvstore.runtime.device import check_device_limits, device_facts, library_versions
from kvstore.runtime.registry_id import metal_registry_id
from kvstore.runtime.teacher_cache import TeacherCache
from kvstore.store.clock import micros_text, now_micros

__all__ = ["Authorization", "Prepared", "check_captured", "prepare", "this_device"]


@dataclass(frozen=True, slots=True)
class Authorization:
    """Leave to take a prepared cache out, by whoever has read its receipt."""

    receipt: Digest

    @classmethod
    def for_receipt(cls, receipt: Receipt) -> Authorization:
        """Authorize the cache that this receipt describes."""
        return cls(receipt.digest)


class Prepared:
    """A cache that was proved fresh; made by :func:`prepare`.

    Attributes:
        plan: What was allocated.
        receipt: Our load receipt; its subject is the plan's layout digest.
        profile_receipt: The profile's own receipt, or None where the device has no registry id.
    """

    def __init__(
        self, cache: TeacherCache, plan: Plan, receipt: Receipt, profile_receipt: ProfileReceipt | None
    ) -> None:
        self.plan = plan
        self.receipt = receipt
        self.profile_receipt = profile_receipt
        self._cache: TeacherCache | None = cache

    def require_profile_receipt(self) -> ProfileReceipt:
        """The profile's receipt.

        Raises:
            UnsupportedError: PREPARED_NO_REGISTRY_ID.
        """
        return self.profile_receipt or make_receipt(self.plan, this_device())

    def take(self, authorization: Authorization) -> TeacherCache:
        """Hand the cache over. This object keeps its receipts and nothing else.

        Raises:
            UsageError: PREPARED_UNAUTHORIZED where the authorization is for another receipt (the cache stays),
                PREPARED_TAKEN where the cache was taken before.
        """
        if authorization.receipt != self.receipt.digest:
            raise fail(
                "PREPARED_UNAUTHORIZED", "the authorization is for another prepared cache",
                expected=self.receipt.digest, found=authorization.receipt,
                fix="Make one from this cache's receipt: Authorization.for_receipt(prepared.receipt).",
            )  # fmt: skip
        cache, self._cache = self._cache, None
        if cache is None:
            raise fail("PREPARED_TAKEN", "the cache was taken before", fix="Prepare another one.")
        return cache


def prepare(config: Qwen35Config, max_sequence_tokens: int, *, budget: int | None = None) -> Prepared:
    """Plan, check the device's limits, allocate, reset, issue receipts, and validate.

    Args:
        config: Of the model, see :func:`kvstore.format.qwen35_config.parse_qwen35_config`.
        max_sequence_tokens: Tokens to make room for, 1 to 4096.
        budget: Bytes that the cache may take; by default what the device has free.

    Raises:
        InvalidError: PLAN_* codes, before anything is allocated; PREPARED_* codes.
        SpaceError: DEVICE_BUFFER_TOO_LARGE, DEVICE_MEMORY_SHORT, likewise before.
        KVStoreError: MATERIALIZE_FAILED where MLX could not make the arrays.
    """
    plan = make_plan(config, max_sequence_tokens)
    buffers = tuple(Buffer(record.role, record.shape, "F32") for record in plan.records)
    limits = check_device_limits(Layout(plan.max_sequence_tokens, buffers), budget=budget)
    cache = _allocate(config, plan)
    cache.reset()
    device = this_device()
    profile_receipt = None if device.registry_id is None else make_receipt(plan, device)
    checks = validate(config, cache.facts(device), device, profile_receipt)
    return Prepared(cache, plan, _receipt(plan, device, {**limits, **checks}, profile_receipt), profile_receipt)


def check_captured(caches: Sequence[Any], config: Qwen35Config, max_sequence_tokens: int) -> TeacherCache:
    """Bring the caches of a Qwen3.5 model into the profile's layout, and hold them against the plan.

    Args:
        caches: As ``mlx_lm.models.qwen3_5`` filled them, in float32.

    Raises:
        InvalidError: PLAN_* codes; PREPARED_CACHE_INVALID, PREPARED_BUFFER_INVALID, PREPARED_RECORDS_MISMATCH.
    """
    cache = TeacherCache.from_mlx_lm(caches, config, max_sequence_tokens)
    device = this_device()
    validate_layout(config, cache.facts(device), device)
    return cache


def this_device() -> DeviceFacts:
    """The default device, with its registry id where the system tells one."""
    facts = device_facts()
    return DeviceFacts(str(facts["name"]), metal_registry_id() if facts["backend"] == "metal" else None)


def _allocate(config: Qwen35Config, plan: Plan) -> TeacherCache:
    try:
        return TeacherCache.fresh(config, plan)
    except (RuntimeError, MemoryError, ValueError) as error:
        raise fail(
            "MATERIALIZE_FAILED", f"MLX could not make the buffers ({error})", fix="Free memory and try again.",
            needed=plan.total_bytes,
        ) from error  # fmt: skip


def _receipt(plan: Plan, device: DeviceFacts, checks: dict[str, str], issued: ProfileReceipt | None) -> Receipt:
    identity = device.registry_id
    return Receipt(
        type="load",
        subject=Digest(f"sha256:{plan.layout_sha256}"),
        made_at=micros_text(now_micros()),
        producer={"name": "kvstore", "version": __version__},
        libraries=library_versions(),
        # The id has 64 bits, more than our JSON profile gives to a number.
        device={**device_facts(), "registry_id": None if identity is None else str(identity), "uuid": _uuid()},
        checks=checks,
        facts={
            "actual_payload_bytes": plan.total_bytes,
            "fresh_semantic_state": True,
            "full_attention_slots": plan.full_slots,
            "layout_sha256": plan.layout_sha256,
            "linear_attention_slots": plan.linear_slots,
            "max_sequence_tokens": plan.max_sequence_tokens,
            "profile": PROFILE,
            "receipt_sha256": None if issued is None else issued.sha256,
        },
    )


def _uuid() -> Json:
    """CUDA tells one; the other backends do not."""
    try:
        value = dict(mx.device_info()).get("uuid")
    except (AttributeError, RuntimeError, ValueError):
        return None
    return None if value is None else str(value)

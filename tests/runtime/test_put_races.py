"""A cache that changes while it is put: what is stored is what it was at one moment, or the put is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstore.errors import CancelledError, KVStoreError
from kvstore.runtime.binding import BoundModel
from kvstore.runtime.capture import capture
from kvstore.runtime.store import Store
from tests.runtime.tiny import prefilled, run, tiny, tokens

COUNT = 1500


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BoundModel:
    return tiny(tmp_path_factory.mktemp("models"), request.param, dtype="bfloat16")


def state(model: BoundModel, caches: list[Any]) -> str:
    """The logical state, whatever the order of a ring and the head room of a buffer."""
    return capture(caches, tokens(COUNT), model.identity).manifest.entry_id


def test_a_model_that_goes_on_meanwhile_changes_nothing(model: BoundModel, tmp_path: Path) -> None:
    """MLX writes into no array that somebody else holds, and a put holds every one."""
    caches = prefilled(model, COUNT)
    before = prefilled(model, COUNT)
    seen: list[int] = []

    def go_on(done: int, total: int) -> None:
        run(model, caches, tokens(3, seed=len(seen)))
        seen.append(done)

    with Store.open(tmp_path / "store") as store:
        receipt = store.put(caches, token_ids=tokens(COUNT), model=model, progress=go_on)
        assert seen
        restored = store.load(receipt.subject, into=model)
        assert receipt.subject == state(model, restored.cache) == state(model, before)
        assert not store.verify(deep=True).findings


@pytest.mark.parametrize("layer", [0, -1])
def test_a_host_that_writes_after_the_capture_is_refused(model: BoundModel, tmp_path: Path, layer: int) -> None:
    caches = prefilled(model, COUNT)
    made = capture(caches, tokens(COUNT), model.identity)
    keys = np.array(caches[layer].keys.view(mx.uint16), copy=False)
    keys[0, 0, :, 3] = 0x7777
    with Store.open(tmp_path / "store") as store:
        with pytest.raises(KVStoreError) as caught:
            store.entries.publish(made.manifest, made.source, token_ids=made.token_ids)
        assert caught.value.code == "PAYLOAD_DIGEST_MISMATCH"
        assert not store.list()
        assert store.entries.stats().objects == 0
        assert not list((tmp_path / "store" / "tmp").iterdir())


def test_a_put_that_is_stopped_at_any_point_leaves_nothing(model: BoundModel, tmp_path: Path) -> None:
    caches = prefilled(model, COUNT)
    asked = threading.Lock(), [0]

    def stop_after(limit: int) -> Any:
        def cancelled() -> bool:
            with asked[0]:
                asked[1][0] += 1
                return asked[1][0] > limit

        return cancelled

    with Store.open(tmp_path / "store") as store:
        for limit in (0, 1, 3, 6, 9, 12):
            asked[1][0] = 0
            with pytest.raises(CancelledError):
                store.put(caches, token_ids=tokens(COUNT), model=model, cancelled=stop_after(limit))
            assert not store.list()
            assert not list((tmp_path / "store" / "tmp").iterdir())
            assert not [path for path in (tmp_path / "store" / "objects").rglob("*") if path.is_file()]
        receipt = store.put(caches, token_ids=tokens(COUNT), model=model)
        for limit in (0, 1, 5, 9):
            asked[1][0] = 0
            with pytest.raises(CancelledError):
                store.load(receipt.subject, into=model, cancelled=stop_after(limit))
        assert state(model, store.load(receipt.subject, into=model).cache) == receipt.subject

"""Tokens that stand for media: without the digests of what was seen, nothing is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.format.digest import sha256_digest
from kvstore.format.prefix import MediaItem
from kvstore.runtime.identity import ModelIdentity
from kvstore.runtime.media import media_token_ids
from tests.runtime.driving import code_of
from tests.runtime.model_folders import fake_folder
from tests.runtime.tiny import CONFIGS, prefilled, tiny, tokens

pytestmark = pytest.mark.usefixtures("plain_kernels", "own_cache")

IMAGE = tokens(20)[7]
KNOWN: dict[str, tuple[dict[str, Any], dict[int, str]]] = {
    "none": ({"pad_token_id": 3, "boi_token_index": 4, "vision_start_token_id": 5}, {}),
    "image": ({"image_token_id": 9}, {9: "image_token_id"}),
    "index": ({"image_token_index": 9, "audio_token_index": 10}, {9: "image_token_index", 10: "audio_token_index"}),
    "in the text's config": ({"text_config": {"video_token_id": 8}}, {8: "video_token_id"}),
    "null and others": ({"image_token_id": None, "audio_token_id": True, "video_token_id": "7"}, {}),
}


def picture(start: int, length: int, content: bytes) -> MediaItem:
    return MediaItem(start, length, "image", sha256_digest(content), sha256_digest(b"processor"))


@pytest.mark.parametrize(("config", "ids"), KNOWN.values(), ids=KNOWN)
def test_ids_in_a_config(config: dict[str, Any], ids: dict[int, str]) -> None:
    assert media_token_ids(config) == ids


def test_an_identity_knows_them(tmp_path: Path) -> None:
    plain = ModelIdentity.from_path(fake_folder(tmp_path / "plain"))
    assert plain.media_tokens == {}
    seeing = fake_folder(tmp_path / "seeing", config={**CONFIGS["llama"], "image_token_id": 9})
    assert ModelIdentity.from_path(seeing).media_tokens == {9: "image_token_id"}


def test_media_tokens_need_their_media(store: kvstore.Store, models: Path) -> None:
    model = tiny(models, "llama", image_token_id=IMAGE)
    ids = tokens(20)
    places = [at for at, token in enumerate(ids) if token == IMAGE]
    caches = prefilled(model, 20)
    assert code_of(store.put, caches, token_ids=ids, model=model) == "MEDIA_DIGEST_MISSING"
    assert store.list() == []
    partly = [picture(places[0] + 1, 1, b"one")]
    assert code_of(store.put, caches, token_ids=ids, model=model, media=partly) == "MEDIA_DIGEST_MISSING"
    media = [picture(at, 1, b"one") for at in places]
    receipt = store.put(caches, token_ids=ids, model=model, media=media)
    assert store.match([*ids, 1], model=model, media=media).entry_id == receipt.subject
    other = [picture(at, 1, b"two") for at in places]
    assert store.match([*ids, 1], model=model, media=other).token_count == places[0]
    assert store.match([*ids, 1], model=model).token_count == places[0]


def test_text_of_a_model_that_sees_needs_none(store: kvstore.Store, models: Path) -> None:
    """What is asked for is decided by what is there, not by what the model can do."""
    model = tiny(models, "llama", image_token_id=95)
    assert 95 not in tokens(20)
    assert store.put(prefilled(model, 20), token_ids=tokens(20), model=model).subject

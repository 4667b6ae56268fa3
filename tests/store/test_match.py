from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.format.digest import sha256_digest
from kvstore.format.prefix import MediaItem, as_token_ids
from kvstore.store.match import Found, match
from kvstore.store.schema import METADATA
from kvstore.store.tree import add_entry, remove_entry
from tests.store.brute import Entry, check, damage, drop, put
from tests.store.invariants import check_tree

MODELS = (sha256_digest(b"model"), sha256_digest(b"another model"))
SIGNATURES = (sha256_digest(b"signature"), sha256_digest(b"another signature"))
METHODS = (None, "snapkv", "h2o")
EDGES = (0, 1, 2, 3, 254, 255, 256, 257, 258, 300, 511, 512, 513)


@pytest.fixture(scope="module")
def engine() -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    METADATA.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def conn(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as conn:
        yield conn
        conn.rollback()


def find(conn: sa.Connection, ids: tuple[int, ...], **kwargs: Any) -> Found:
    return match(conn, kwargs.pop("model", MODELS[0]), kwargs.pop("namespace", "default"), as_token_ids(ids), **kwargs)


def codes(found: Found) -> list[str]:
    return [reason.code for reason in found.reasons]


def image(start: int, length: int, name: bytes = b"image") -> MediaItem:
    return MediaItem(start, length, "image", sha256_digest(name), sha256_digest(b"processor"))


@st.composite
def media_items(draw: Any, size: int) -> tuple[MediaItem, ...]:
    """Few places and few images, so that equal ones meet."""
    items, end = [], 0
    for start in sorted(draw(st.sets(st.sampled_from((0, 1, 2, 250, 255, 256, 260)), max_size=2))):
        length = draw(st.sampled_from((1, 2, 5)))
        if end <= start and start + length <= size:
            items.append(image(start, length, draw(st.sampled_from((b"x", b"y")))))
            end = start + length
    return tuple(items)


@st.composite
def prefixes(draw: Any, known: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Ids that share a part of some known ones and then go their own way."""
    base = draw(st.sampled_from(known)) if known else ()
    kept = base[: draw(st.sampled_from(EDGES) | st.integers(0, 520))]
    tail = draw(st.sampled_from((0, 1, 2, 3, 255, 256, 257)))
    ids = kept + tuple(draw(st.lists(st.integers(0, 2), min_size=min(tail, 3), max_size=min(tail, 3))))
    ids += (draw(st.integers(0, 2)),) * max(0, tail - 3)
    return ids[:520] or (0,)


def cuts(size: int) -> st.SearchStrategy[int]:
    """Any token, own end only, one token back, or a bound somewhere."""
    return st.sampled_from((0, size, size - 1)) | st.integers(0, size)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), with_media=st.booleans())
def test_match_equals_looking_at_every_entry(engine: sa.Engine, data: st.DataObject, with_media: bool) -> None:
    with engine.connect() as conn:
        stored: list[Entry] = []
        known: list[tuple[int, ...]] = []
        for _ in range(data.draw(st.integers(1, 14), label="steps")):
            action = data.draw(st.sampled_from(("put", "put", "put", "drop", "damage", "match")), label="action")
            if action == "put" or not stored:
                known.append(data.draw(prefixes(known), label="ids"))
                stored.append(put(conn, data.draw(_entries(known[-1], with_media=with_media), label="entry")))
            elif action == "drop":
                drop(conn, stored.pop(data.draw(st.integers(0, len(stored) - 1), label="which")))
            elif action == "damage":
                which = data.draw(st.integers(0, len(stored) - 1), label="which")
                stored[which] = damage(conn, stored[which], data.draw(st.integers(0, 1), label="damaged"))
            else:
                _compare(conn, data, stored, known, with_media=with_media)
        check_tree(conn, stored)
        _compare(conn, data, stored, known, with_media=with_media)
        for entry in stored:
            drop(conn, entry)
        check_tree(conn, [])
        conn.rollback()


def _entries(ids: tuple[int, ...], *, with_media: bool) -> st.SearchStrategy[Entry]:
    return st.builds(
        Entry, ids=st.just(ids), lowest_cut=cuts(len(ids)),
        media=media_items(len(ids)) if with_media else st.just(()),
        signature=st.sampled_from(SIGNATURES), method=st.sampled_from((None, None, *METHODS)),
        model=st.sampled_from((MODELS[0], MODELS[0], MODELS[0], MODELS[1])),
        namespace=st.sampled_from(("default", "default", "default", "other")),
    )  # fmt: skip


def _compare(
    conn: sa.Connection, data: st.DataObject, stored: list[Entry], known: list[tuple[int, ...]], *, with_media: bool
) -> None:
    ids = data.draw(prefixes(known), label="asked for")
    wanted: dict[str, Any] = {
        "media": data.draw(media_items(len(ids)), label="media") if with_media else (),
        "signature": data.draw(st.sampled_from((None, *SIGNATURES)), label="signature"),
        "method": data.draw(st.sampled_from(METHODS), label="method"),
    }
    limit = data.draw(st.none() | st.sampled_from(EDGES) | st.integers(0, 520), label="limit")
    same = [entry for entry in stored if (entry.model, entry.namespace) == (MODELS[0], "default")]
    found = find(conn, ids, limit=limit, **wanted)
    check(found, same, ids, limit=len(ids) - 1 if limit is None else min(limit, len(ids)), **wanted)


TEXT = tuple(range(1000, 1600))


def test_an_exact_repeat_leaves_the_last_token(conn: sa.Connection) -> None:
    entry = put(conn, Entry(TEXT[:512], 0))
    found = find(conn, TEXT[:512])
    assert (found.entry_id, found.token_count, found.common_tokens, found.reasons) == (entry.entry_id, 511, 512, ())


def test_a_hit_in_the_middle_of_a_block_says_where_it_parted(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:400], 0))
    found = find(conn, (*TEXT[:300], 7, 8, 9))
    assert found.token_count == 300
    assert [r.message for r in found.reasons] == ["diverged at token 300 (expected 7, found 1300)"]


def test_a_prompt_that_goes_on_after_all_that_is_stored(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:400], 400))
    found = find(conn, TEXT[:500])
    assert (found.token_count, codes(found)) == (400, ["ENDED"])


def test_a_snapshot_beyond_the_common_part_is_named(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:100], 100))
    put(conn, Entry(TEXT[:500], 500))
    found = find(conn, TEXT[:450])
    assert found.token_count == 100
    assert [r.message for r in found.reasons] == ["state snapshot only at 500"]


def test_a_window_that_starts_too_late_is_named(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:500], 499))
    assert find(conn, TEXT[:500]).token_count == 499
    found = find(conn, TEXT[:499])
    assert not found
    assert [r.message for r in found.reasons] == ["window not stored before 499"]


def test_other_signature_and_method_are_named_with_what_they_reach(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:400], 0, signature=SIGNATURES[1]))
    put(conn, Entry(TEXT[:300], 0, method="snapkv"))
    put(conn, Entry(TEXT[:200], 0))
    found = find(conn, TEXT[:401], signature=SIGNATURES[0])
    assert found.token_count == 200
    assert [(r.code, r.token) for r in found.reasons] == [("OTHER_SIGNATURE", 400), ("OTHER_METHOD", 300)]
    assert find(conn, TEXT[:401], signature=SIGNATURES[0], method="snapkv").token_count == 300
    assert find(conn, TEXT[:401]).token_count == 400


def test_a_damaged_entry_is_passed_over_until_it_is_healed(conn: sa.Connection) -> None:
    old, new = put(conn, Entry(TEXT[:300], 0)), put(conn, Entry(TEXT[:400], 0))
    damage(conn, new, 1)
    found = find(conn, TEXT[:401])
    assert (found.entry_id, codes(found)) == (old.entry_id, ["DAMAGED"])
    damage(conn, new, 0)
    assert find(conn, TEXT[:401]).entry_id == new.entry_id


def test_the_newest_of_equals_wins_and_its_removal_brings_back_the_one_before(conn: sa.Connection) -> None:
    first, second = (put(conn, Entry((*TEXT[:300], tail), 0)) for tail in (1, 2))
    assert find(conn, TEXT[:310]).entry_id == second.entry_id
    drop(conn, second)
    assert find(conn, TEXT[:310]).entry_id == first.entry_id


def test_a_limit_above_a_fork_makes_the_branches_equals(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:512], 0))
    early = put(conn, Entry((*TEXT[:100], 1), 0))
    assert find(conn, TEXT[:512], limit=50).entry_id == early.entry_id
    late = put(conn, Entry((*TEXT[:256], 1), 0))
    assert find(conn, TEXT[:512], limit=256).entry_id == late.entry_id


def test_the_newest_of_several_signatures_is_found_above_what_does_not_fit(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:300], 0, signature=SIGNATURES[0]))
    newer = put(conn, Entry(TEXT[:300], 300, signature=SIGNATURES[1]))
    put(conn, Entry(TEXT[:500], 500))
    assert find(conn, TEXT[:400]).entry_id == newer.entry_id


def test_the_way_goes_on_after_a_fork_between_images(conn: sa.Connection) -> None:
    cat, dog = (put(conn, Entry(TEXT[:200], 0, media=(image(60, 20, name), image(90, 5)))) for name in (b"cat", b"dog"))
    for name, entry in ((b"cat", cat), (b"dog", dog)):
        found = find(conn, TEXT[:200], media=(image(60, 20, name), image(90, 5)))
        assert (found.entry_id, found.token_count) == (entry.entry_id, 199)


def test_another_image_under_the_same_ids_is_another_prefix(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:300], 0, media=(image(260, 20, b"cat"),)))
    found = find(conn, TEXT[:300], media=(image(260, 20, b"dog"),))
    assert (found.token_count, codes(found)) == (260, ["MEDIA_DIFFERS"])
    assert find(conn, TEXT[:300], media=(image(260, 20, b"cat"),)).token_count == 299


def test_a_media_item_is_restored_whole_or_not_at_all(conn: sa.Connection) -> None:
    cat = (image(260, 40, b"cat"),)
    entry = put(conn, Entry(TEXT[:400], 0, media=cat))
    found = find(conn, TEXT[:300], media=cat)
    assert (found.entry_id, found.token_count, codes(found)) == (entry.entry_id, 260, ["INSIDE_MEDIA"])
    assert [find(conn, TEXT[:size], media=cat, limit=size).token_count for size in (300, 301)] == [300, 301]
    other = find(conn, (*TEXT[:280], 7, *TEXT[281:300]), media=cat)
    assert (other.token_count, other.common_tokens, codes(other)) == (260, 280, ["INSIDE_MEDIA", "DIVERGED"])


def test_where_a_media_item_begins_the_newest_of_all_that_share_it_wins(conn: sa.Connection) -> None:
    """A node may end inside a media item, at a full block: entries of both nodes restore the same tokens then."""
    cat = (image(250, 20, b"cat"),)
    put(conn, Entry(TEXT[:400], 0, media=cat))
    newer = put(conn, Entry((*TEXT[:258], *TEXT[:100]), 0, media=cat))
    found = find(conn, TEXT[:262], media=cat)
    assert (found.entry_id, found.token_count) == (newer.entry_id, 250)


def test_models_and_namespaces_never_meet(conn: sa.Connection) -> None:
    put(conn, Entry(TEXT[:300], 0, model=MODELS[1]))
    put(conn, Entry(TEXT[:300], 0, namespace="salted"))
    assert codes(find(conn, TEXT[:300])) == ["NO_ENTRY_OF_MODEL"]


def test_adding_twice_and_removing_twice_change_nothing(conn: sa.Connection) -> None:
    entry = put(conn, Entry(TEXT[:300], 0))
    add_entry(conn, entry_id=entry.entry_id, ids=as_token_ids(entry.ids))
    check_tree(conn, [entry])
    remove_entry(conn, entry.entry_id)
    remove_entry(conn, entry.entry_id)
    check_tree(conn, [])


@pytest.mark.parametrize("size", [1, 256, 1300])
def test_steps_within_a_block_are_followed_to_the_last(conn: sa.Connection, size: int) -> None:
    """One entry for each position: as many nodes in one block as there can be."""
    text = tuple(i % 5 for i in range(size))
    for end in range(max(1, size - 257), size + 1):
        put(conn, Entry(text[:end], end))
    assert find(conn, (*text, 9)).token_count == size


def test_no_statement_scans_and_there_are_few_of_them(conn: sa.Connection) -> None:
    """The plan, not the time: every table of the tree is entered by a key."""
    entry = [put(conn, Entry((*TEXT[:100], 1, i, 3), 103)) for i in range(30)][7]
    driver: Any = conn.connection.driver_connection
    seen: list[str] = []
    driver.set_trace_callback(seen.append)
    found = find(conn, (*TEXT[:100], 1, 500, 3))
    assert (bool(found), found.common_tokens, codes(found)) == (False, 101, ["STATE_ONLY_AT", "DIVERGED"])
    assert 3 <= len(seen) <= 6
    drop(conn, entry)
    put(conn, entry)
    driver.set_trace_callback(None)
    for sql in seen:
        for row in driver.execute(f"EXPLAIN QUERY PLAN {sql}"):
            assert not row[3].startswith(("SCAN tree_", "SCAN entries")), (sql, row[3])

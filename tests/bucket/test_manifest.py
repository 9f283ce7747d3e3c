"""Manifests as bytes: what is written is read again, and nothing else is taken for one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.bucket import manifest as manifests
from logstore.bucket.keys import (
    floor_key,
    manifest_key,
    new_nonce,
    page_key,
    pin_key,
    plan_key,
    segment_key,
    staged_key,
)
from logstore.bucket.manifest import (
    Garbage,
    Manifest,
    Page,
    Segment,
    decode_manifest,
    encode_manifest,
    encode_page,
    free_pages,
    paged,
)
from logstore.directory.sealed import seal
from logstore.errors import CorruptState, DuramenError, StoreVersionError
from logstore.limits import Limits
from logstore.objects.objects import check_key


def no_page(key: str) -> bytes:
    raise AssertionError(f"nobody should ask for {key}")


def segments(count: int, start: int = 0) -> tuple[Segment, ...]:
    return tuple(
        Segment(f"logs/t/0/{at:020d}-n{at}", at * 10, at * 10 + 10, 100, 8, 12, 0, at, at, 10)
        for at in range(start, start + count)
    )


@st.composite
def some_manifest(draw: st.DrawFn) -> Manifest:
    numbers = st.integers(0, 1 << 40)
    cuts = sorted(draw(st.lists(numbers, min_size=1, max_size=6, unique=True)))
    listed = tuple(
        Segment(
            f"logs/t/0/{base}-x", base, end, *draw(st.tuples(numbers, numbers, numbers, numbers)),
            draw(st.integers(-(1 << 63), (1 << 63) - 1)), draw(numbers), draw(numbers),
        )
        for base, end in itertools.pairwise(cuts)
    )  # fmt: skip
    return Manifest(
        draw(numbers),
        draw(st.text(alphabet="0123456789abcdef", min_size=1, max_size=32)),
        cuts[-1],
        listed,
        draw(st.integers(listed[0].base_offset if listed else cuts[-1], 1 << 50)),
        draw(numbers),
        draw(numbers),
        draw(st.none() | st.integers(-1, 1 << 50)),
        draw(st.binary(max_size=50)),
        tuple(draw(st.lists(st.tuples(numbers, numbers), max_size=3))),
        tuple(Garbage(f"logs/g{at}", draw(st.none() | numbers)) for at in range(draw(st.integers(0, 3)))),
        draw(st.booleans()) and not listed,
    )


@given(some_manifest())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_again(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest), "m", no_page) == manifest


@given(some_manifest(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_is_found(manifest: Manifest, data: st.DataObject) -> None:
    whole = bytearray(encode_manifest(manifest))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((CorruptState, StoreVersionError)):
        decode_manifest(bytes(whole), "m", no_page)


VALUES = [None, -1, 1 << 63, 1.5, "x", True, [], [[]], [["k"]], {}, [[1, 2]], [["k", 1, 2, 3, 4, 5, 6, 7, 8, "9"]]]


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("name", ["generation", "nonce", "sealed_offset", "pages", "segments", "log_start_offset",
    "first_dirty_offset", "dropped_tombstones", "producer_snapshot", "leader_epochs", "garbage", "ended"])  # fmt: skip
def test_a_sealed_document_with_wrong_values_is_an_error_of_ours(name: str, value: object) -> None:
    """A checksum says nothing about who wrote it."""
    document = {
        "generation": 1, "nonce": "n", "sealed_offset": 0, "pages": [], "segments": [], "log_start_offset": 0,
        "first_dirty_offset": 0, "dropped_tombstones": 0, "next_horizon_ms": None,
        "oldest_value_ms": None, "wanted_codec_id": None, "oldest_other_codec_ms": -1,
        "producer_snapshot": "",
        "leader_epochs": [], "garbage": [], "ended": False,
    }  # fmt: skip
    decode_manifest(seal(document, version=1), "m", no_page)
    harmless = (
        (value == [] and isinstance(document[name], list))
        or (value is True and name == "ended")
        or (value == "x" and name == "nonce")
        or (value == [[1, 2]] and name == "leader_epochs")
    )  # fmt: skip
    if harmless:
        return
    with pytest.raises(DuramenError):
        decode_manifest(seal(document | {name: value}, version=1), "m", no_page)
    del document[name]
    with pytest.raises(CorruptState):
        decode_manifest(seal(document, version=1), "m", no_page)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda good: replace(good, segments=(good.segments[0], good.segments[2])),
        lambda good: replace(good, segments=(good.segments[0], good.segments[0], *good.segments[1:])),
        lambda good: replace(good, sealed_offset=31),
        lambda good: replace(good, segments=()),
        lambda good: replace(good, segments=good.segments[1:]),
        lambda good: replace(good, segments=(*good.segments[:2], replace(good.segments[2], next_offset=19))),
    ],
)
def test_a_list_that_does_not_cover_the_log_cannot_be_made(wrong) -> None:  # type: ignore[no-untyped-def]
    good = Manifest(1, "n", 30, segments(3))
    with pytest.raises(CorruptState):
        wrong(good)


def test_a_manifest_beyond_the_limit_is_neither_written_nor_read() -> None:
    manifest = Manifest(1, "n", 10_000, segments(1000))
    small = Limits(side_file_bytes=1000)
    with pytest.raises(CorruptState, match="limit"):
        encode_manifest(manifest, limits=small)
    with pytest.raises(CorruptState, match="limit"):
        decode_manifest(encode_manifest(manifest), "m", no_page, limits=small)


def test_a_long_list_lies_in_pages_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "ROOT_SEGMENTS_MAX", 20)
    monkeypatch.setattr(manifests, "PAGE_SEGMENTS", 10)
    nonces = (page_key("t", 0, f"n{at}") for at in itertools.count())
    stored: dict[str, bytes] = {}

    def written(manifest: Manifest) -> tuple[Manifest, int]:
        new = paged(manifest, lambda: next(nonces))
        stored.update((page.key, encode_page(page)) for page in new[1])
        again = decode_manifest(encode_manifest(new[0]), "m", stored.__getitem__)
        assert again == new[0]
        assert again.pages == new[0].pages
        return again, len(new[1])

    manifest, new = written(Manifest(1, "a", 200, segments(20)))
    assert (len(manifest.pages), new) == (0, 0)
    manifest, new = written(replace(manifest, sealed_offset=410, segments=segments(41)))
    assert (len(manifest.pages), new) == (3, 3)
    longer, new = written(replace(manifest, sealed_offset=420, segments=segments(42)))
    assert (longer.pages, new) == (manifest.pages, 0)
    # Retention takes the first page; compaction changes the third.
    changed = replace(longer.segments[25], key="logs/t/0/compacted")
    shorter = replace(longer, log_start_offset=100, segments=(*longer.segments[10:25], changed, *longer.segments[26:]))
    after, _ = written(shorter)
    freed = free_pages(longer, after)
    assert {each.key for each in freed.garbage} == {page.key for page in longer.pages} - {p.key for p in after.pages}
    assert {page.key for page in after.pages} <= freed.names


def test_a_page_that_does_not_fit_is_refused() -> None:
    page = Page("pages/t/0/n", segments(3))
    manifest = Manifest(1, "n", 30, segments(3), pages=(page,))
    data = encode_manifest(manifest)
    with pytest.raises(CorruptState):
        decode_manifest(data, "m", lambda _: encode_page(Page(page.key, segments(2))))
    with pytest.raises(CorruptState):
        encode_manifest(replace(manifest, segments=segments(2, 1), log_start_offset=10))


def test_keys_are_plain_and_each_is_new() -> None:
    keys = [
        manifest_key("7cYhnYw2RPyQkXyUvPzQ1A", 12),
        plan_key("plan", "n"),
        staged_key("plan", 3, "n"),
        segment_key("t", 0, 42, "n"),
        page_key("t", 0, "n"),
        floor_key("t"),
        pin_key(new_nonce()),
    ]
    assert [check_key(key) for key in keys] == keys
    assert keys[3] == "logs/t/0/00000000000000000042-n"
    assert keys[1].rsplit("/", 1)[0] == keys[2].rsplit("/", 1)[0]
    with pytest.raises(ValueError, match="cannot be part"):
        manifest_key("../x", 0)

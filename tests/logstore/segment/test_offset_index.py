from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptIndex
from logstore.files import OS_FILES
from logstore.segment.offset_index import OffsetIndex, OffsetPosition
from reference.preallocation import preallocate_index
from simulation.filesystem import SimulatedFileSystem

BASE = 1000


def packed(entries: list[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack(">ii", *entry) for entry in entries)


def index_of(
    path: Path, entries: list[tuple[int, int]], *, writable: bool = True, max_bytes: int = 800, tail: bytes = b""
) -> OffsetIndex:
    """An index file with entries (relative offset, position), opened."""
    path.write_bytes(packed(entries) + tail)
    return OffsetIndex(OS_FILES, str(path), BASE, max_bytes, writable=writable)


THREE = [(3, 160), (5, 320), (9, 640)]


@pytest.mark.parametrize(
    ("target", "offset", "position"),
    [
        (0, BASE, 0),
        (BASE, BASE, 0),
        (BASE + 2, BASE, 0),
        (BASE + 3, BASE + 3, 160),
        (BASE + 4, BASE + 3, 160),
        (BASE + 5, BASE + 5, 320),
        (BASE + 8, BASE + 5, 320),
        (BASE + 9, BASE + 9, 640),
        (2**62, BASE + 9, 640),
    ],
)
def test_lookup_gives_the_greatest_entry_at_or_below(tmp_path: Path, target: int, offset: int, position: int) -> None:
    assert index_of(tmp_path / "i", THREE).lookup(target) == OffsetPosition(offset, position)


def test_lookup_in_an_empty_index_gives_the_start_of_the_segment(tmp_path: Path) -> None:
    assert index_of(tmp_path / "i", []).lookup(BASE + 7) == OffsetPosition(BASE, 0)


def test_a_missing_file_is_an_empty_index_to_a_reader(tmp_path: Path) -> None:
    index = OffsetIndex(OS_FILES, str(tmp_path / "none"), BASE, 800)
    assert (index.entries, index.lookup(BASE), index.last_offset()) == (0, OffsetPosition(BASE, 0), BASE)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("position", "found"), [(0, 3), (160, 3), (161, 5), (320, 5), (640, 9), (641, None)])
def test_first_entry_at_or_behind_a_position(tmp_path: Path, position: int, found: int | None) -> None:
    entries = index_of(tmp_path / "i", THREE).each_beyond([position])
    assert [entry.offset - BASE for entry in entries] == ([] if found is None else [found])


@pytest.mark.parametrize(("offset", "kept"), [(0, 0), (3, 0), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3), (99, 3)])
def test_truncation_keeps_entries_below_the_offset(tmp_path: Path, offset: int, kept: int) -> None:
    index = index_of(tmp_path / "i", THREE)
    index.truncate_to(BASE + offset)
    assert index.items() == [OffsetPosition(BASE + o, p) for o, p in THREE[:kept]]
    assert (tmp_path / "i").stat().st_size == 8 * kept


def test_full_counts_whole_entries_of_the_configured_size(tmp_path: Path) -> None:
    assert not index_of(tmp_path / "a", THREE, max_bytes=32).is_full
    assert index_of(tmp_path / "b", THREE, max_bytes=31).is_full
    assert index_of(tmp_path / "c", [], max_bytes=4).is_full  # no room for any entry


def test_preallocation_is_the_largest_multiple_and_is_cut_again(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i", THREE, max_bytes=100)
    preallocate_index(index)
    assert (tmp_path / "i").stat().st_size == 96
    assert index.entries == 3
    index.trim()
    assert (tmp_path / "i").read_bytes() == packed(THREE)


def test_preallocation_never_cuts_entries(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i", THREE, max_bytes=8)
    preallocate_index(index)
    assert index.items() == [OffsetPosition(BASE + o, p) for o, p in THREE]


def test_a_reader_does_not_take_the_zero_tail_of_a_live_index_for_entries(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i", THREE, writable=False, tail=bytes(8 * 50))
    assert index.entries == 3
    assert index.lookup(2**62) == OffsetPosition(BASE + 9, 640)


def test_an_index_of_zeros_has_no_entries_for_a_reader(tmp_path: Path) -> None:
    assert index_of(tmp_path / "i", [], writable=False, tail=bytes(80)).entries == 0


def test_a_reader_opens_a_live_index_in_the_middle_of_its_growth(tmp_path: Path) -> None:
    assert index_of(tmp_path / "i", THREE, writable=False, tail=b"\0\0\0").entries == 3


def test_an_entry_that_a_writer_cut_away_meanwhile_is_a_typed_error(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i", THREE, writable=False)
    (tmp_path / "i").write_bytes(packed(THREE[:1]))
    with pytest.raises(CorruptIndex, match="is gone"):
        index.lookup(2**62)


@pytest.mark.parametrize(
    ("entries", "tail", "why"),
    [
        ([(3, 160), (3, 320)], b"", "same offset twice"),
        ([(5, 160), (3, 320)], b"", "offset falls"),
        ([(3, 160), (5, 160)], b"", "same position twice"),
        ([(3, 320), (5, 160)], b"", "position falls"),
        ([(3, 1000)], b"", "position at the end of the log"),
        ([(-1, 160)], b"", "negative offset"),
        ([(3, -5)], b"", "negative position"),
        ([(3, 160)], bytes(8), "zero tail of a crash"),
        ([(3, 160)], b"\0\0\0", "size is no multiple"),
    ],
)
def test_sanity_check_refuses(tmp_path: Path, entries: list[tuple[int, int]], tail: bytes, why: str) -> None:
    index = index_of(tmp_path / "i", entries, tail=tail)
    with pytest.raises(CorruptIndex) as refused:
        index.sanity_check(log_bytes=1000)
    assert refused.value.file == str(tmp_path / "i"), why
    assert refused.value.position is not None


def test_sanity_check_takes_what_was_written(tmp_path: Path) -> None:
    index_of(tmp_path / "i", THREE).sanity_check(log_bytes=641)
    index_of(tmp_path / "i", []).sanity_check(log_bytes=0)


ENTRIES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20).map(
    lambda steps: [(sum(o for o, _ in steps[: n + 1]), sum(p for _, p in steps[: n + 1])) for n in range(len(steps))]
)


@given(entries=ENTRIES, zeros=st.integers(0, 40), targets=st.lists(st.integers(-5, 1200), max_size=10))
def test_reader_and_writer_find_what_a_walk_over_the_list_finds(
    entries: list[tuple[int, int]], zeros: int, targets: list[int]
) -> None:
    fs = SimulatedFileSystem()
    writer = OffsetIndex(fs, "/i", BASE, 8 * (len(entries) + zeros), writable=True)
    writer.append_raw(packed(entries), len(entries))
    preallocate_index(writer)
    reader = OffsetIndex(fs, "/i", BASE, 8 * len(entries))
    for index in (reader, writer):
        assert index.items() == [OffsetPosition(BASE + o, p) for o, p in entries]
        index_at_or_below = [(0, 0), *entries]
        for target in targets:
            below = [entry for entry in index_at_or_below if entry[0] <= target] or [(0, 0)]
            assert index.lookup(BASE + target) == OffsetPosition(BASE + below[-1][0], below[-1][1])
            behind = [entry for entry in entries if entry[1] >= target]
            found = index.each_beyond([target])
            assert [(entry.offset - BASE, entry.position) for entry in found] == behind[:1]


@given(data=st.binary(max_size=200), log_bytes=st.integers(0, 1 << 20))
def test_any_bytes_are_read_or_refused_with_a_typed_error(data: bytes, log_bytes: int) -> None:
    fs = SimulatedFileSystem()
    file = fs.open("/i", create=True)
    file.pwrite(data, 0)
    for writable in (False, True):
        index = OffsetIndex(fs, "/i", BASE, 80, writable=writable)
        index.lookup(BASE + 5)
        try:
            index.sanity_check(log_bytes)
        except CorruptIndex:
            continue
        items = index.items()
        assert items == sorted(items, key=lambda entry: entry.offset)
        assert all(0 <= entry.position < log_bytes for entry in items)

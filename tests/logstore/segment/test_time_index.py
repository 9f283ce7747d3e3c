from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptIndex
from logstore.files import OS_FILES
from logstore.segment.time_index import TimeIndex, TimestampOffset
from reference.preallocation import preallocate_index
from simulation.filesystem import SimulatedFileSystem

BASE = 1000
THREE = [(10, 3), (20, 5), (40, 9)]


def packed(entries: list[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack(">qi", *entry) for entry in entries)


def index_of(
    path: Path, entries: list[tuple[int, int]], *, writable: bool = True, max_bytes: int = 1200, tail: bytes = b""
) -> TimeIndex:
    """An index file with entries (timestamp, relative offset), opened."""
    path.write_bytes(packed(entries) + tail)
    return TimeIndex(OS_FILES, str(path), BASE, max_bytes, writable=writable)


@pytest.mark.parametrize(
    ("end", "found"), [(0, (-1, 0)), (3, (-1, 0)), (4, (10, 3)), (5, (10, 3)), (6, (20, 5)), (2**31, (40, 9))]
)
def test_the_last_entry_below_an_offset(tmp_path: Path, end: int, found: tuple[int, int]) -> None:
    index = index_of(tmp_path / "t", THREE)
    assert index.last_below(BASE + end) == TimestampOffset(found[0], BASE + found[1])


@pytest.mark.parametrize(
    ("timestamp", "found"), [(0, (-1, 0)), (9, (-1, 0)), (10, (10, 3)), (39, (20, 5)), (40, (40, 9)), (2**62, (40, 9))]
)
def test_lookup_gives_the_greatest_timestamp_at_or_below(
    tmp_path: Path, timestamp: int, found: tuple[int, int]
) -> None:
    assert index_of(tmp_path / "t", THREE).lookup(timestamp) == TimestampOffset(found[0], BASE + found[1])


def test_an_empty_index_ends_before_all_time(tmp_path: Path) -> None:
    assert index_of(tmp_path / "t", []).last_entry() == TimestampOffset(-1, BASE)


@pytest.mark.parametrize(("timestamp", "written"), [(41, True), (40, False), (12, False), (-1, False)])
def test_only_a_new_largest_timestamp_is_written(tmp_path: Path, timestamp: int, written: bool) -> None:
    index = index_of(tmp_path / "t", THREE)
    assert index.maybe_append(timestamp, BASE + 12) is written
    assert index.entries == 3 + written


def test_timestamp_zero_is_larger_than_none(tmp_path: Path) -> None:
    index = index_of(tmp_path / "t", [])
    assert index.maybe_append(0, BASE)
    assert index.items() == [TimestampOffset(0, BASE)]


def test_no_timestamp_leaves_no_entry(tmp_path: Path) -> None:
    assert not index_of(tmp_path / "t", []).maybe_append(-1, BASE + 4)


def test_the_final_entry_is_written_into_a_full_index(tmp_path: Path) -> None:
    index = index_of(tmp_path / "t", THREE, max_bytes=36)
    assert index.is_full
    assert index.maybe_append(41, BASE + 12)
    index.trim()
    assert (tmp_path / "t").stat().st_size == 48


def test_one_slot_is_kept_for_the_final_entry(tmp_path: Path) -> None:
    assert not index_of(tmp_path / "a", THREE, max_bytes=60).is_full
    assert index_of(tmp_path / "b", THREE, max_bytes=59).is_full
    assert index_of(tmp_path / "c", [], max_bytes=4).is_full
    assert index_of(tmp_path / "d", [], max_bytes=12).is_full


def test_an_offset_below_the_last_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptIndex, match="below the last entry"):
        index_of(tmp_path / "t", THREE).maybe_append(50, BASE + 8)


@pytest.mark.parametrize(("offset", "kept"), [(3, 0), (4, 1), (9, 2), (10, 3)])
def test_truncation_keeps_entries_below_the_offset(tmp_path: Path, offset: int, kept: int) -> None:
    index = index_of(tmp_path / "t", THREE)
    index.truncate_to(BASE + offset)
    assert (tmp_path / "t").read_bytes() == packed(THREE[:kept])


def test_a_reader_does_not_take_the_zero_tail_of_a_live_index_for_entries(tmp_path: Path) -> None:
    # 4096 bytes are no multiple of 12: what a reader sees while the writer's file grows page by page
    index = index_of(tmp_path / "t", THREE, writable=False, tail=bytes(4096 - 36))
    assert index.entries == 3
    assert index.last_entry() == TimestampOffset(40, BASE + 9)


def test_a_first_entry_of_zeros_counts_when_another_follows(tmp_path: Path) -> None:
    index = index_of(tmp_path / "t", [(0, 0), (5, 2)], writable=False, tail=bytes(24))
    assert index.items() == [TimestampOffset(0, BASE), TimestampOffset(5, BASE + 2)]


@pytest.mark.parametrize(
    ("entries", "tail", "why"),
    [
        ([(10, 3), (10, 5)], b"", "same timestamp twice"),
        ([(10, 3), (9, 5)], b"", "timestamp falls"),
        ([(10, 3), (11, 2)], b"", "offset falls"),
        ([(-1, 3)], b"", "no timestamp"),
        ([(10, -3)], b"", "negative offset"),
        ([(10, 3)], bytes(12), "zero tail of a crash"),
        ([(10, 3)], b"\0", "size is no multiple"),
    ],
)
def test_sanity_check_refuses(tmp_path: Path, entries: list[tuple[int, int]], tail: bytes, why: str) -> None:
    with pytest.raises(CorruptIndex) as refused:
        index_of(tmp_path / "t", entries, tail=tail).sanity_check()
    assert refused.value.file == str(tmp_path / "t"), why


def test_the_same_offset_twice_is_sound(tmp_path: Path) -> None:
    index_of(tmp_path / "t", [(10, 3), (11, 3)]).sanity_check()  # one batch raised the largest timestamp twice


ENTRIES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=20).map(
    lambda steps: [
        (sum(t for t, _ in steps[: n + 1]) - 1, sum(o for _, o in steps[: n + 1])) for n in range(len(steps))
    ]
)


@given(entries=ENTRIES, zeros=st.integers(0, 40), targets=st.lists(st.integers(-5, 1200), max_size=10))
def test_reader_and_writer_find_what_a_walk_over_the_list_finds(
    entries: list[tuple[int, int]], zeros: int, targets: list[int]
) -> None:
    fs = SimulatedFileSystem()
    writer = TimeIndex(fs, "/t", BASE, 12 * (len(entries) + zeros), writable=True)
    for timestamp, offset in entries:
        assert writer.maybe_append(timestamp, BASE + offset)
    writer.sanity_check() if not zeros else preallocate_index(writer)
    reader = TimeIndex(fs, "/t", BASE, 0)
    for index in (writer, reader):
        if index is reader and entries == [(0, 0)]:
            continue  # indistinguishable from nothing; nothing is lost but a hint
        assert index.items() == [TimestampOffset(t, BASE + o) for t, o in entries]
        for target in targets:
            below = [entry for entry in entries if entry[0] <= target] or [(-1, 0)]
            assert index.lookup(target) == TimestampOffset(below[-1][0], BASE + below[-1][1])


@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_with_a_typed_error(data: bytes) -> None:
    fs = SimulatedFileSystem()
    fs.open("/t", create=True).pwrite(data, 0)
    for writable in (False, True):
        index = TimeIndex(fs, "/t", BASE, 80, writable=writable)
        index.lookup(5)
        try:
            index.sanity_check()
        except CorruptIndex:
            continue
        times = [entry.timestamp_ms for entry in index.items()]
        assert times == sorted(set(times))

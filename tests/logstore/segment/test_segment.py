from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import BufferLimit, CorruptBatch, OffsetOverflow
from logstore.limits import DEFAULT_LIMITS, RELATIVE_OFFSET_MAX, Limits
from logstore.records.codes import OK, ROLL_APPEND_TOO_LARGE, ROLL_OFFSET_OVERFLOW, ROLL_SIZE
from logstore.records.scan import scan_batches
from logstore.segment.names import FileKind
from logstore.segment.segment import LogSegment, Numbering, RollLimits
from logstore.segment.segment_reader import SegmentSettings
from logstore.segment.time_index import TimestampOffset
from reference.preallocation import preallocate
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import NOW_MS, batch, rec, sized_batch

DIRECTORY = "/p"


def segment_on(
    fs: SimulatedFileSystem, base_offset: int = 0, *, limits: Limits = DEFAULT_LIMITS, **settings: int
) -> LogSegment:
    fs.mkdir(DIRECTORY)
    return LogSegment(fs, DIRECTORY, base_offset, writable=True, settings=SegmentSettings(**settings), limits=limits)


def append(segment: LogSegment, *batches: bytes, next_offset: int | None = None) -> int:
    """Append batches in one go, offsets assigned; returns the next offset."""
    data = np.frombuffer(bytearray(b"".join(batches)), dtype=np.uint8)
    table = scan_batches(data).table
    at = segment.next_offset() if next_offset is None else next_offset
    placed, reason = segment.place(data, table, 0, Numbering(at), RollLimits())
    assert (placed, reason) == (len(batches), OK)
    return segment.next_offset()


def entries(segment: LogSegment) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(relative offset, position) and (timestamp, relative offset)."""
    base = segment.base_offset
    return (
        [(entry.offset - base, entry.position) for entry in segment.offset_index.items()],
        [(entry.timestamp_ms, entry.offset - base) for entry in segment.time_index.items()],
    )


class IndexRule:
    """The rule of when an entry is written, once more and slowly."""

    def __init__(self, interval_bytes: int) -> None:
        self.interval_bytes = interval_bytes
        self.offsets: list[tuple[int, int]] = []
        self.times: list[tuple[int, int]] = []
        self.largest = (-1, 0)
        self.bytes_since = self.position = 0

    def append(self, size_bytes: int, last_relative: int, max_timestamp_ms: int) -> None:
        if max_timestamp_ms > self.largest[0]:
            self.largest = (max_timestamp_ms, last_relative)
        if self.bytes_since > self.interval_bytes:
            self.offsets.append((last_relative, self.position))
            self.final()
            self.bytes_since = 0
        self.bytes_since += size_bytes
        self.position += size_bytes

    def final(self) -> None:
        if self.largest[0] > (self.times[-1][0] if self.times else -1):
            self.times.append(self.largest)


# --- index entries ----------------------------------------------------------------------------------------------------


def test_the_worked_example_of_kafkas_index_rule() -> None:
    segment = segment_on(SimulatedFileSystem(), index_interval_bytes=100)
    for n, size in enumerate((160, 160, 160, 160, 160, 99)):
        append(segment, sized_batch(size, count=2, at_ms=NOW_MS + n))
    expected = (
        [(3, 160), (5, 320), (7, 480), (9, 640), (11, 800)],
        [(NOW_MS + 1, 3), (NOW_MS + 2, 5), (NOW_MS + 3, 7), (NOW_MS + 4, 9), (NOW_MS + 5, 11)],
    )
    assert entries(segment) == expected
    segment.seal()
    assert entries(segment) == expected  # the roll adds nothing: the last timestamp is there already


def test_the_first_batch_is_never_indexed_even_with_interval_zero() -> None:
    segment = segment_on(SimulatedFileSystem(), index_interval_bytes=0)
    append(segment, sized_batch(100))
    assert entries(segment) == ([], [])
    append(segment, sized_batch(100))
    assert entries(segment)[0] == [(1, 100)]


@pytest.mark.parametrize(("size", "indexed"), [(99, []), (100, []), (101, [(1, 101)])])
def test_more_than_the_interval_must_lie_between_entries(size: int, indexed: list[tuple[int, int]]) -> None:
    segment = segment_on(SimulatedFileSystem(), index_interval_bytes=100)
    append(segment, sized_batch(size), sized_batch(100))
    assert entries(segment)[0] == indexed


def test_sealing_writes_the_largest_timestamp_and_the_last_offset_of_its_batch() -> None:
    segment = segment_on(SimulatedFileSystem())
    append(segment, batch([rec(at_ms=5), rec(at_ms=9), rec(at_ms=7)]), batch([rec(at_ms=9)]), batch([rec(at_ms=3)]))
    segment.seal()
    assert entries(segment) == ([], [(9, 2)])  # of several batches with the largest the earliest


def test_records_without_timestamp_leave_the_time_index_empty() -> None:
    segment = segment_on(SimulatedFileSystem(), index_interval_bytes=0)
    append(segment, sized_batch(100, at_ms=-1), sized_batch(100, at_ms=-1))
    segment.seal()
    assert entries(segment) == ([(1, 100)], [])
    assert segment.largest == TimestampOffset(-1, 0)


BATCHES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60), st.integers(-1, 30)), min_size=1, max_size=30)


def made(spec: list[tuple[int, int, int]]) -> list[bytes]:
    return [batch([rec(b"x" * length, b"k", at_ms)] * count) for count, length, at_ms in spec]


@given(spec=BATCHES, interval=st.integers(0, 400), base=st.sampled_from((0, 7, 1 << 40)), in_one=st.booleans())
def test_entries_are_those_of_the_rule_and_a_rebuild_gives_the_same(
    spec: list[tuple[int, int, int]], interval: int, base: int, in_one: bool
) -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs, base, index_interval_bytes=interval)
    batches = made(spec)
    if in_one:
        append(segment, *batches, next_offset=base)
    else:
        for one in batches:
            append(segment, one)
    rule = IndexRule(interval)
    last = -1
    for one, (count, _, at_ms) in zip(batches, spec, strict=True):
        last += count
        rule.append(len(one), last, at_ms)
    assert entries(segment) == (rule.offsets, rule.times)
    assert segment.next_offset() == base + last + 1
    rule.final()
    segment.seal()
    assert entries(segment) == (rule.offsets, rule.times)
    segment.sanity_check()

    segment.reset_indexes()
    assert entries(segment) == ([], [])
    for chunk in segment.chunks(chunk_bytes=300):
        segment.index_batches(chunk)
    segment.seal()
    assert entries(segment) == (rule.offsets, rule.times)


@given(spec=BATCHES, interval=st.integers(0, 200), data=st.data())
def test_every_offset_is_found_through_the_index_and_without(
    spec: list[tuple[int, int, int]], interval: int, data: st.DataObject
) -> None:
    segment = segment_on(SimulatedFileSystem(), 50, index_interval_bytes=interval)
    append(segment, *made(spec), next_offset=50)
    bounds = [(header.base_offset, header.last_offset) for header in segment.headers()]
    offset = data.draw(st.integers(40, 60 + bounds[-1][1]))
    holder = next((bound for bound in bounds if bound[1] >= offset), None)
    found = segment.find_batch(offset)
    assert (None if found is None else (found.base_offset, found.last_offset)) == holder
    segment.offset_index.keep(0)
    again = segment.find_batch(offset)
    assert (None if again is None else again.position) == (None if found is None else found.position)


@given(spec=BATCHES, interval=st.integers(0, 200), data=st.data())
def test_truncation_leaves_what_appending_less_would_have_left(
    spec: list[tuple[int, int, int]], interval: int, data: st.DataObject
) -> None:
    fs, other_fs = SimulatedFileSystem(), SimulatedFileSystem()
    segment, other = segment_on(fs, index_interval_bytes=interval), segment_on(other_fs, index_interval_bytes=interval)
    batches = made(spec)
    append(segment, *batches)
    offset = data.draw(st.integers(0, segment.next_offset() + 3))
    kept, last = 0, -1
    while kept < len(spec) and last + spec[kept][0] < offset:
        last += spec[kept][0]
        kept += 1
    segment.truncate_to(offset)
    if kept:
        append(other, *batches[:kept])
    for part in (segment, other):
        part.seal()
    assert segment.largest == other.largest
    assert entries(segment) == entries(other)
    assert fs.files() == other_fs.files()


def test_opening_for_append_restarts_the_distance_to_the_next_entry() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs, index_interval_bytes=100)
    append(segment, sized_batch(150))
    segment.close()
    again = segment_on(fs, index_interval_bytes=100)
    append(again, sized_batch(150))
    assert entries(again)[0] == []
    append(again, sized_batch(150))
    assert entries(again)[0] == [(2, 300)]


# --- files ------------------------------------------------------------------------------------------------------------


def sizes(fs: SimulatedFileSystem) -> dict[str, int]:
    return {path.rsplit("/", 1)[1].split(".", 1)[1]: len(data) for path, data in fs.files().items()}


def test_indexes_of_a_long_lived_active_segment_are_preallocated_until_it_is_sealed() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs, index_bytes=1000)
    preallocate(segment, 5000)
    append(segment, sized_batch(200))
    assert sizes(fs) == {"log": 5000, "index": 1000, "timeindex": 996}
    segment.seal()
    assert sizes(fs) == {"log": 200, "index": 0, "timeindex": 12}


def test_a_short_lived_segment_has_nothing_preallocated() -> None:
    fs = SimulatedFileSystem()
    append(segment_on(fs), sized_batch(200))
    assert sizes(fs) == {"log": 200, "index": 0, "timeindex": 0}


def test_a_file_that_exists_is_never_preallocated_again() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs)
    append(segment, sized_batch(200))
    segment.close()
    again = segment_on(fs)
    preallocate(again, 5000)
    assert again.size_bytes == sizes(fs)["log"] == 200


def test_data_is_synced_before_what_is_derived_from_it() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs)
    append(segment, sized_batch(200))
    before = fs.operations
    segment.flush()
    synced = [operation.path.split(".", 1)[1] for operation in fs.trace[before:] if operation.kind == "fsync"]
    assert synced == ["log", "index", "timeindex"]


def test_a_segment_larger_than_kafka_opens_is_refused() -> None:
    fs = SimulatedFileSystem()
    fs.mkdir(DIRECTORY)

    class Huge(SimulatedFileSystem):
        def open(self, path: str, **options: bool) -> object:  # type: ignore[override]
            file = fs.open(path, **options)
            file.size = lambda: 1 << 31  # type: ignore[method-assign]
            return file

    with pytest.raises(CorruptBatch, match="largest legal"):
        LogSegment(Huge(), DIRECTORY, 0, writable=True, settings=SegmentSettings())  # type: ignore[arg-type]


# --- bounds -----------------------------------------------------------------------------------------------------------


def placed(segment: LogSegment, data: bytes, *, next_offset: int = 0, **limits: int) -> tuple[int, int]:
    array = np.frombuffer(bytearray(data), dtype=np.uint8)
    table = scan_batches(array).table
    return segment.place(array, table, 0, Numbering(next_offset), RollLimits(**limits))


def test_placing_stops_before_the_batch_that_does_not_fit() -> None:
    segment = segment_on(SimulatedFileSystem())
    assert placed(segment, sized_batch(100) * 3, segment_bytes=299) == (2, ROLL_SIZE)
    assert segment.size_bytes == 200
    assert placed(segment, sized_batch(300), segment_bytes=299) == (0, ROLL_APPEND_TOO_LARGE)


def test_an_offset_beyond_31_bits_of_the_base_does_not_belong_here() -> None:
    segment = segment_on(SimulatedFileSystem(), 10)
    assert placed(segment, sized_batch(100), next_offset=10 + RELATIVE_OFFSET_MAX) == (1, OK)
    assert placed(segment, sized_batch(100), next_offset=11 + RELATIVE_OFFSET_MAX) == (0, ROLL_OFFSET_OVERFLOW)
    assert placed(segment, sized_batch(100), next_offset=9) == (0, ROLL_OFFSET_OVERFLOW)


def test_a_batch_far_from_its_base_is_named_when_the_index_is_rebuilt() -> None:
    fs = SimulatedFileSystem()
    far = segment_on(fs, 0)
    append(far, sized_batch(100), next_offset=5)
    far.log.pwrite(struct.pack(">q", 6 + RELATIVE_OFFSET_MAX), 0)
    again = segment_on(fs, 0)
    again.reset_indexes()
    (chunk,) = again.chunks()
    with pytest.raises(OffsetOverflow) as refused:
        again.index_batches(chunk)
    assert (refused.value.position, refused.value.offset) == (0, 6 + RELATIVE_OFFSET_MAX)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_the_scan_buffer_grows_to_one_batch_and_no_further_than_the_limit() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs)
    append(segment, sized_batch(100), sized_batch(5000), sized_batch(100))
    segment.close()
    seen = [
        (chunk.position, len(chunk.table))
        for chunk in segment_on(fs, limits=Limits(read_buffer_bytes=5000)).chunks(chunk_bytes=150)
    ]
    assert [position for position, _ in seen] == [0, 100, 5100]
    with pytest.raises(BufferLimit, match="5000 bytes") as refused:
        list(segment_on(fs, limits=Limits(read_buffer_bytes=4999)).chunks(chunk_bytes=150))
    assert refused.value.position == 100


@pytest.mark.parametrize("cut", [1, 17, 60, 99])
def test_a_batch_cut_off_at_the_end_is_damage_to_a_scan_and_the_end_to_headers(cut: int) -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs)
    append(segment, sized_batch(100), sized_batch(100))
    segment.cut_bytes(100 + cut)
    assert [header.position for header in segment.headers()] == [0]
    with pytest.raises(CorruptBatch) as refused:
        list(segment.chunks())
    assert refused.value.position == 100


def test_an_index_entry_that_leads_into_a_batch_is_not_trusted() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs, index_interval_bytes=0)
    append(segment, *[sized_batch(100)] * 5)
    segment.offset_index.keep(0)
    segment.offset_index.append_raw(struct.pack(">ii", 2, 250), 1)
    found = segment.find_batch(3)
    assert found is not None
    assert found.position == 300


def test_an_index_entry_behind_the_offset_asked_for_is_not_trusted() -> None:
    # what a reader sees between the renames of a swap: the index of one file with the log of another
    segment = segment_on(SimulatedFileSystem(), index_interval_bytes=0)
    append(segment, *[sized_batch(100)] * 5)
    segment.offset_index.keep(0)
    segment.offset_index.append_raw(struct.pack(">ii", 1, 400), 1)
    found = segment.find_batch(2)
    assert found is not None
    assert found.position == 200


def test_the_largest_timestamp_of_a_live_segment_is_found_behind_its_last_index_entry() -> None:
    fs = SimulatedFileSystem()
    writer = segment_on(fs, index_interval_bytes=150)
    preallocate(writer)
    append(writer, *[sized_batch(100, at_ms=at_ms) for at_ms in (5, 1, 2, 9)])
    reader = LogSegment(fs, DIRECTORY, 0)
    assert reader.largest == TimestampOffset(5, 0)  # the index does not know better yet
    assert reader.scan_largest() == TimestampOffset(9, 3)
    assert reader.scan_largest(end_offset=3) == TimestampOffset(5, 0)  # nothing behind the end is looked at


def test_an_empty_segment_has_no_largest_timestamp_but_its_files_time() -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs, 3)
    assert segment.largest == TimestampOffset(-1, 3)
    assert segment.largest_timestamp_ms == fs.stat(segment.path(FileKind.LOG)).mtime_ms
    assert (segment.next_offset(), segment.first_timestamp_ms) == (3, -1)


@given(
    sizes=st.lists(st.integers(0, 800), min_size=1, max_size=40),
    spacing=st.integers(1, 5_000),
    interval=st.integers(0, 2_000),
    damage=st.one_of(st.none(), st.binary(min_size=1, max_size=200)),
)
def test_cuts_are_begins_of_batches_whatever_the_index_says(
    sizes: list[int], spacing: int, interval: int, damage: bytes | None
) -> None:
    fs = SimulatedFileSystem()
    segment = segment_on(fs, index_interval_bytes=interval)
    for size in sizes:
        append(segment, batch([rec(b"k", b"v" * size)]))
    if damage is not None:
        raw = bytearray(segment.offset_index.raw())
        raw[: len(damage)] = damage
        fs.open(segment.path(FileKind.INDEX), writable=True).pwrite(bytes(raw[: len(raw) - len(raw) % 8]), 0)
    begins = [header.position for header in segment.headers()]
    cuts = segment.cuts(spacing)
    assert set(cuts) <= set(begins[1:])
    assert cuts == sorted(set(cuts))
    if damage is None:
        indexed = [entry.position for entry in segment.offset_index.items()]
        wanted = [
            next((at for at in indexed if at >= position), None)
            for position in range(spacing, segment.size_bytes, spacing)
        ]
        assert cuts == sorted({at for at in wanted if at is not None})

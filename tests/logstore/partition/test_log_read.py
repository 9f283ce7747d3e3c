from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import SYSTEM_CLOCK
from logstore.config import LogConfig
from logstore.errors import BufferLimit, CorruptBatch, DamagedLog, OffsetOutOfRange
from logstore.limits import INT64_MAX, Limits
from logstore.partition.producer_state import AppendOrigin
from logstore.records.iterate import iter_records
from logstore.records.record import Record
from logstore.segment.time_index import TimestampOffset
from reference.fetching import Fetched, Isolation
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import NOW_MS, batch, contents, expected, open_log, rec, recs, sized_batch
from simulation.tracing import TracingFileSystem


def log_with(fs: SimulatedFileSystem | None = None, **settings: object) -> PartitionWriter:
    return open_log(fs or SimulatedFileSystem(), config=LogConfig(**settings))  # type: ignore[arg-type]


def bytes_of(fetched: Fetched) -> bytes:
    if fetched.file is None:
        return b""
    data = fetched.file.pread(fetched.size_bytes, fetched.position)
    assert len(data) == fetched.size_bytes
    return data


# --- fetch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> PartitionWriter:
    """Ten batches of two records and 100 bytes, three a segment: offsets 0-5, 6-11, 12-17, 18-19."""
    log = log_with(segment_bytes=300)
    for _ in range(10):
        log.append_batches(sized_batch(100, count=2))
    assert [segment.base_offset for segment in log.segments] == [0, 6, 12, 18]
    return log


@pytest.mark.parametrize(
    ("offset", "max_bytes", "base", "position", "size"),
    [
        (0, 10_000, 0, 0, 300),  # one segment a call
        (0, 300, 0, 0, 300),
        (0, 250, 0, 0, 250),  # the last batch is cut
        (1, 250, 0, 0, 250),  # the first batch begins below the offset
        (2, 10_000, 0, 100, 200),
        (5, 10_000, 0, 200, 100),
        (6, 10_000, 6, 0, 300),
        (19, 10_000, 18, 0, 100),
        (0, 10, 0, 0, 100),  # at least one batch, however large
        (3, 0, 0, 100, 100),
    ],
)
def test_a_fetch_is_a_byte_range_of_one_segment(
    log: PartitionWriter, offset: int, max_bytes: int, base: int, position: int, size: int
) -> None:
    fetched = log.fetch(offset, max_bytes)
    assert (fetched.segment_base_offset, fetched.position, fetched.size_bytes) == (base, position, size)
    assert not fetched.first_batch_incomplete
    assert len(bytes_of(fetched)) == size


def test_without_a_whole_batch_even_the_first_may_be_cut(log: PartitionWriter) -> None:
    fetched = log.fetch(0, 10, min_one_batch=False)
    assert (fetched.size_bytes, fetched.first_batch_incomplete) == (10, True)
    assert log.fetch(0, 100, min_one_batch=False).first_batch_incomplete is False


def test_at_the_end_there_is_nothing_and_beyond_it_an_error(log: PartitionWriter) -> None:
    assert (log.fetch(20, 1000).size_bytes, log.fetch(20, 1000).range()) == (0, None)
    with pytest.raises(OffsetOutOfRange, match="beyond the log end 20") as refused:
        log.fetch(21, 1000)
    assert (refused.value.offset, refused.value.partition, refused.value.kafka_code) == (21, "orders-0", 1)
    with pytest.raises(OffsetOutOfRange):
        log.fetch(-1, 1000)


def test_below_the_log_start_is_an_error_even_while_the_files_are_there(log: PartitionWriter) -> None:
    log.advance_log_start(3)
    with pytest.raises(OffsetOutOfRange, match="below the log start 3"):
        log.fetch(2, 1000)
    assert log.fetch(3, 1000).position == 100
    with pytest.raises(OffsetOutOfRange):
        list(log.records(0))
    assert [row[0] for row in contents(log)] == list(range(3, 20))


def test_how_far_a_fetch_sees_depends_on_its_isolation() -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(segment_bytes=300), manual_high_watermark=True)
    for _ in range(5):
        log.append_batches(sized_batch(100, count=2))
    assert log.fetch(0, 1000).size_bytes == 0
    assert log.fetch(0, 1000, isolation=Isolation.LOG_END).size_bytes == 300
    log.set_high_watermark(2)
    assert log.fetch(0, 1000).size_bytes == 100
    log.set_high_watermark(3)  # inside a batch: the batch that holds it is not readable yet
    assert log.fetch(0, 1000).size_bytes == 100
    assert log.fetch(3, 1000).size_bytes == 0
    log.set_high_watermark(6)
    assert log.fetch(0, 1000).size_bytes == 300
    assert log.fetch(6, 1000).size_bytes == 0
    with pytest.raises(OffsetOutOfRange):
        log.fetch(11, 1000)
    assert log.fetch(8, 1000).size_bytes == 0  # between high watermark and log end: not out of range


def test_a_fetch_from_a_gap_goes_on_in_the_next_segment() -> None:
    log = log_with(segment_bytes=300)
    for base in (0, 10, 20, 100, 200):
        log.append_batches(sized_batch(100, base_offset=base), origin=AppendOrigin.REPLICATION)
    assert [segment.base_offset for segment in log.segments] == [0, 100]
    assert log.fetch(5, 1000).position == 100
    fetched = log.fetch(21, 1000)
    assert (fetched.segment_base_offset, fetched.position, fetched.size_bytes) == (100, 0, 200)
    assert [record.offset for record in log.records(21)] == [100, 200]


def test_a_committed_fetch_names_the_aborted_transactions_of_its_range() -> None:
    log = log_with(segment_bytes=400, index_interval_bytes=0)
    for pid in (1, 2):
        log.append_batches(batch(recs(1), producer_id=pid, producer_epoch=0, base_sequence=0, transactional=True))
    log.append(recs(1))
    log.append_marker(commit=False, producer_id=1, producer_epoch=0)
    for _ in range(5):
        log.append_batches(sized_batch(200))
    log.append_marker(commit=False, producer_id=2, producer_epoch=0)
    committed = log.fetch(0, 10_000, isolation=Isolation.READ_COMMITTED)
    assert [(txn.producer_id, txn.first_offset, txn.last_offset) for txn in committed.aborted] == [(1, 0, 3), (2, 1, 9)]
    assert log.fetch(0, 10_000).aborted == ()
    later = log.fetch(4, 10_000, isolation=Isolation.READ_COMMITTED)
    assert [txn.producer_id for txn in later.aborted] == [2]


@settings(max_examples=150)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=20),
    segment_bytes=st.sampled_from((500, 900, 1 << 20)),
    interval=st.sampled_from((0, 100, 4096)),
    max_bytes=st.integers(0, 700),
    data=st.data(),
)
def test_a_consumer_that_fetches_on_and_on_gets_every_record_once(
    sizes: list[tuple[int, int, int]], segment_bytes: int, interval: int, max_bytes: int, data: st.DataObject
) -> None:
    log = log_with(segment_bytes=segment_bytes, index_interval_bytes=interval)
    oracle: list[int] = []
    for count, length, gap in sizes:
        base = log.log_end_offset + gap
        sent = batch([rec(b"x" * length)] * count, base_offset=base)
        log.append_batches(sent, origin=AppendOrigin.REPLICATION)
        oracle += range(base, base + count)
    position = data.draw(st.integers(0, log.log_end_offset))
    wanted = [offset for offset in oracle if offset >= position]
    got: list[int] = []
    while True:
        fetched = log.fetch(position, max_bytes)
        array = np.frombuffer(bytes_of(fetched), dtype=np.uint8)
        records = list(iter_records(array)) if len(array) else []
        got += [record.offset for record in records if record.offset >= position]
        if not records:
            break
        position = records[-1].offset + 1
    assert got == wanted


# --- records ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=15),
    segment_bytes=st.sampled_from((300, 1 << 20)),
    data=st.data(),
)
def test_records_can_be_read_from_any_offset(
    spans: list[tuple[int, int]], segment_bytes: int, data: st.DataObject
) -> None:
    log = log_with(segment_bytes=segment_bytes)
    oracle: list[Record] = []
    for gap, count in spans:
        records = recs(count, first=log.log_end_offset + gap)
        sent = batch(records, base_offset=records[0].offset)
        log.append_batches(sent, origin=AppendOrigin.REPLICATION)
        oracle += records
    start = data.draw(st.integers(0, log.log_end_offset))
    assert list(log.records(start)) == [record for record in oracle if record.offset >= start]


def test_a_batch_larger_than_the_read_buffer_may_become_is_an_error_that_says_so() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append_batches(sized_batch(1000))
    log.append_batches(sized_batch(5_000_000 // 8), origin=AppendOrigin.CLIENT)
    log.append_batches(sized_batch(1000))
    log.close()
    fine = open_log(fs, limits=Limits(read_buffer_bytes=5_000_000 // 8))
    assert [row[0] for row in contents(fine)] == [0, 1, 2]
    fine.close()
    tight = open_log(fs, limits=Limits(read_buffer_bytes=5_000_000 // 8 - 1))
    assert next(tight.records()).offset == 0
    found = []
    with pytest.raises(BufferLimit, match="read_buffer_bytes") as refused:
        found.extend(tight.records())
    assert (refused.value.position, refused.value.offset) == (1000, 1)


def test_the_read_buffer_grows_for_one_batch_larger_than_a_chunk() -> None:
    log = log_with(max_message_bytes=20 << 20, segment_bytes=1 << 30)
    log.append([rec(b"small")])
    log.append([rec(b"x" * (9 << 20))])
    log.append([rec(b"small")])
    assert [len(row[2] or b"") for row in contents(log)] == [5, 9 << 20, 5]


def test_damage_below_the_high_watermark_is_an_error_that_names_the_place() -> None:
    log = log_with()
    for _ in range(3):
        log.append_batches(sized_batch(100))
    log.segments[0].log.pwrite(b"\xff", 170)
    seen = []
    with pytest.raises((DamagedLog, CorruptBatch)) as refused:
        seen.extend(log.records())
    assert [record.offset for record in seen] == [0]
    assert refused.value.position == 100
    assert refused.value.file is not None


def test_a_reader_thread_sees_every_record_in_order_while_another_appends_rolls_and_retains() -> None:
    config = LogConfig(segment_bytes=2000, retention_bytes=8000, retention_ms=-1, index_interval_bytes=200)
    log = open_log(TracingFileSystem(SimulatedFileSystem()), config=config, clock=SYSTEM_CLOCK)
    total, errors = 3000, []
    moved = 0

    def write() -> None:
        try:
            while log.log_end_offset < total:
                log.append(recs(5, first=log.log_end_offset, value_bytes=30))
                if log.log_end_offset % 100 == 0:
                    log.apply_retention()
        except BaseException as error:  # for the main thread to see
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    position = 0
    seen: list[int] = []
    while position < total and not errors:
        try:
            for record in log.records(position):
                assert record.key == f"k{record.offset}".encode()
                seen.append(record.offset)
                position = record.offset + 1
        except OffsetOutOfRange:  # the log start has overtaken us
            assert log.log_start_offset > position
            moved += 1
            position = log.log_start_offset
    writer.join()
    assert errors == []
    assert seen[-1] == total - 1
    gaps = [(before, after) for before, after in pairwise(seen) if after != before + 1]
    assert len(gaps) <= moved
    assert all(after > before for before, after in pairwise(seen))


# --- by time ----------------------------------------------------------------------------------------------------------


def test_the_first_record_at_or_after_a_time() -> None:
    log = log_with(segment_bytes=300, index_interval_bytes=0)
    for at_ms in (10, 20, 30, 40, 50):
        log.append([rec(at_ms=at_ms), rec(at_ms=at_ms + 5)])
    assert log.offset_for_timestamp(0) == TimestampOffset(10, 0)
    assert log.offset_for_timestamp(10) == TimestampOffset(10, 0)
    assert log.offset_for_timestamp(11) == TimestampOffset(15, 1)
    assert log.offset_for_timestamp(16) == TimestampOffset(20, 2)
    assert log.offset_for_timestamp(55) == TimestampOffset(55, 9)
    assert log.offset_for_timestamp(56) is None


def test_earliest_latest_and_largest() -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(segment_bytes=250), manual_high_watermark=True)
    for at_ms in (10, 90, 30, 90, 50):
        log.append([rec(at_ms=3), rec(at_ms=at_ms), rec(at_ms=4)])
    log.set_high_watermark(15)
    log.advance_log_start(1)
    assert log.offset_for_timestamp(-1) == TimestampOffset(-1, 15)
    assert log.offset_for_timestamp(-2) == TimestampOffset(-1, 1)
    assert log.offset_for_timestamp(-4) == TimestampOffset(-1, 1)
    assert log.offset_for_timestamp(-3) == TimestampOffset(90, 4)  # of several the earliest
    assert log.offset_for_timestamp(-5) is None
    log = log_with()
    assert log.offset_for_timestamp(-3) is None
    log.append([rec(at_ms=-1)])
    assert log.offset_for_timestamp(-3) is None


def test_what_lies_above_the_readable_end_is_withheld() -> None:
    log = open_log(SimulatedFileSystem(), manual_high_watermark=True)
    log.append([rec(at_ms=10), rec(at_ms=20)])
    log.set_high_watermark(1)
    assert log.offset_for_timestamp(10) == TimestampOffset(10, 0)
    assert log.offset_for_timestamp(15) is None
    assert log.offset_for_timestamp(-3) is None
    assert log.offset_for_timestamp(-1) == TimestampOffset(-1, 1)
    assert log.offset_for_timestamp(15, isolation=Isolation.LOG_END) == TimestampOffset(20, 1)
    assert log.offset_for_timestamp(-1, isolation=Isolation.LOG_END) == TimestampOffset(-1, 2)


def test_what_lies_below_the_log_start_is_not_found() -> None:
    log = log_with()
    log.append([rec(at_ms=at_ms) for at_ms in (50, 10, 50, 20)])
    log.advance_log_start(1)
    assert log.offset_for_timestamp(10) == TimestampOffset(10, 1)
    assert log.offset_for_timestamp(30) == TimestampOffset(50, 2)
    log.advance_log_start(3)
    assert log.offset_for_timestamp(30) is None


def test_a_truncation_does_not_forget_the_largest_timestamp_that_is_left() -> None:
    log = log_with()
    for at_ms in (70, 90, 80):
        log.append([rec(at_ms=at_ms)])
    log.truncate_to(2)
    assert log.offset_for_timestamp(85) == TimestampOffset(90, 1)
    log.truncate_to(1)
    assert log.offset_for_timestamp(85) is None
    assert log.offset_for_timestamp(-3) == TimestampOffset(70, 0)


def by_time(
    timestamps: list[list[int]], bounds: list[tuple[int, int]], target: int, log_start: int, mtime_ms: int
) -> tuple[int, int] | None:
    """As the specification has it: the first segment whose largest timestamp reaches the target answers, or none."""
    flat = [(n, ts) for n, ts in enumerate(ts for batch_times in timestamps for ts in batch_times)]
    for first, end in bounds:
        inside = flat[first:end]
        largest = max((ts for _, ts in inside), default=-1)
        if (largest if largest >= 0 else mtime_ms) >= target:
            return next(((ts, n) for n, ts in inside if ts >= target and n >= log_start), None)
    return None


@settings(max_examples=200)
@given(
    timestamps=st.lists(st.lists(st.integers(-1, 30), min_size=1, max_size=4), min_size=1, max_size=15),
    segment_bytes=st.sampled_from((200, 400, 1 << 20)),
    interval=st.sampled_from((0, 100, 4096)),
    targets=st.lists(st.integers(0, 32), min_size=1, max_size=6),
    reopen=st.booleans(),
    data=st.data(),
)
def test_lookup_by_time_finds_what_a_walk_over_the_records_finds(
    timestamps: list[list[int]],
    segment_bytes: int,
    interval: int,
    targets: list[int],
    reopen: bool,
    data: st.DataObject,
) -> None:
    fs = SimulatedFileSystem()
    config = LogConfig(segment_bytes=segment_bytes, index_interval_bytes=interval)
    log = open_log(fs, config=config)
    for batch_times in timestamps:
        log.append_batches(batch([rec(at_ms=at_ms) for at_ms in batch_times]))
    log_start = data.draw(st.integers(0, log.log_end_offset))
    log.advance_log_start(log_start)
    if reopen:
        log.close()
        log = open_log(fs, config=config)
    bases = [segment.base_offset for segment in log.segments]
    bounds = list(zip(bases, [*bases[1:], log.log_end_offset], strict=True))
    for target in targets:
        found = log.offset_for_timestamp(target)
        answer = None if found is None else (found.timestamp_ms, found.offset)
        assert answer == by_time(timestamps, bounds, target, log_start, NOW_MS)
    found = log.offset_for_timestamp(-3)
    flat = [ts for batch_times in timestamps for ts in batch_times]
    best = max(flat)
    assert (None if found is None else (found.timestamp_ms, found.offset)) == (
        None if best < 0 else (best, flat.index(best))
    )


def test_markers_count_as_records_in_a_lookup_as_they_do_in_kafka() -> None:
    log = log_with()
    log.append_batches(batch([rec(at_ms=10)], producer_id=1, producer_epoch=0, base_sequence=0, transactional=True))
    log.append_marker(commit=True, producer_id=1, producer_epoch=0)
    assert log.offset_for_timestamp(NOW_MS) == TimestampOffset(NOW_MS, 1)


def test_timestamps_at_the_edge_of_the_format() -> None:
    log = log_with(message_timestamp_after_max_ms=INT64_MAX)
    log.append([rec(at_ms=0), rec(at_ms=INT64_MAX)])
    assert log.offset_for_timestamp(INT64_MAX) == TimestampOffset(INT64_MAX, 1)
    assert log.offset_for_timestamp(0) == TimestampOffset(0, 0)
    assert contents(log) == expected([rec(at_ms=0), rec(at_ms=INT64_MAX)])

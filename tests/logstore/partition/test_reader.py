from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.errors import BufferLimit, CorruptState, DamagedLog, DamageError, DuramenError, OffsetOutOfRange
from logstore.files import OS_FILES, FileSystem
from logstore.limits import Limits
from logstore.partition import reader as reader_module
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import OnOutOfRange
from logstore.segment.time_index import TimestampOffset
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import (
    DIRECTORY,
    NOW_MS,
    PARTITION,
    batch,
    contents,
    open_log,
    rec,
    recs,
    sized_batch,
    state_path,
)
from simulation.tracing import Call, TracingFileSystem

CONFIG = LogConfig(segment_bytes=300)


def reader_of(
    fs: FileSystem, high_watermark: Callable[[], int], directory: str = DIRECTORY, **options: object
) -> PartitionReader:
    return PartitionReader(
        PartitionPlace(directory, PARTITION, state_path(directory)), high_watermark=high_watermark, fs=fs, **options
    )  # type: ignore[arg-type]


def filled(fs: SimulatedFileSystem, batches: int = 10, config: LogConfig = CONFIG) -> PartitionWriter:
    """Batches of two records and 100 bytes, three a segment."""
    log = open_log(fs, config=config)
    for _ in range(batches):
        log.append_batches(sized_batch(100, count=2))
    return log


def offsets(reader: PartitionReader, start: int, end: int | None = None, **options: object) -> list[int]:
    return [record.offset for record in reader.records(start, end, **options)]  # type: ignore[arg-type]


# --- ranges -----------------------------------------------------------------------------------------------------------


def test_a_reader_sees_the_range_it_asks_for_up_to_the_high_watermark() -> None:
    fs = SimulatedFileSystem()
    filled(fs)
    visible = [20]
    reader = reader_of(fs, lambda: visible[0])
    assert offsets(reader, 0) == list(range(20))
    assert offsets(reader, 5, 9) == [5, 6, 7, 8]
    assert offsets(reader, 7, 99) == list(range(7, 20))
    assert offsets(reader, 20) == []
    visible[0] = 13
    assert offsets(reader, 3) == list(range(3, 13))


def test_a_reader_follows_a_log_that_grows_and_rolls() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    reader = reader_of(fs, lambda: log.high_watermark)
    seen: list[int] = []
    for _ in range(12):
        log.append_batches(sized_batch(100, count=2))
        seen += offsets(reader, len(seen))
    assert seen == list(range(24))


def test_a_reader_never_lists_the_directory() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    tracing = TracingFileSystem(fs)

    def refuse(call: Call) -> None:
        raise AssertionError(f"a reader must not {call}")

    tracing.before = refuse  # nor create, rename, write or sync anything
    reader = reader_of(tracing, lambda: log.high_watermark)
    assert offsets(reader, 0) == list(range(20))
    assert reader.offset_for_timestamp(NOW_MS) == TimestampOffset(NOW_MS, 0)
    assert (reader.log_start_offset(), reader.end_offset()) == (0, 20)
    assert tracing.calls == []
    reader.close()


def test_files_of_many_segments_are_not_all_held_open() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=LogConfig(segment_bytes=100))
    for _ in range(60):
        log.append_batches(sized_batch(100))
    reader = reader_of(fs, lambda: 60)
    assert offsets(reader, 0) == list(range(60))
    assert len(reader._open) <= reader_module._OPEN_SEGMENTS_MAX


# --- out of range -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [4, 21])
def test_out_of_range_fails_or_begins_where_it_is_told(start: int) -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.advance_log_start(5)
    reader = reader_of(fs, lambda: log.high_watermark)
    with pytest.raises(OffsetOutOfRange) as refused:
        offsets(reader, start)
    assert (refused.value.offset, refused.value.kafka_code) == (start, 1)
    assert offsets(reader, start, on_out_of_range=OnOutOfRange.EARLIEST) == list(range(5, 20))
    assert offsets(reader, start, on_out_of_range=OnOutOfRange.LATEST) == []
    for how in OnOutOfRange:
        assert offsets(reader, 5, on_out_of_range=how) == list(range(5, 20))
        assert offsets(reader, 20, on_out_of_range=how) == []


def test_a_log_start_that_overtakes_a_reader_is_told_once_its_files_are_gone() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    reader = reader_of(fs, lambda: log.high_watermark)
    reading = reader.records(0)
    assert next(reading).offset == 0
    log.advance_log_start(14)
    log.apply_retention()
    with pytest.raises(OffsetOutOfRange, match="below the log start 14"):
        list(reading)
    assert offsets(reader, reader.log_start_offset()) == list(range(14, 20))


def test_a_segment_that_is_retained_while_it_is_read_is_read_to_its_end() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    reader = reader_of(fs, lambda: log.high_watermark)
    reading = reader.records(12, 20)
    assert next(reading).offset == 12
    log.advance_log_start(12)
    log.apply_retention()
    assert [record.offset for record in reading] == list(range(13, 20))


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again without waiting, a few times only."""
    monkeypatch.setattr(reader_module, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(reader_module, "_LOOKS_MAX", 3)


def test_no_state_file_and_a_damaged_one_are_typed_errors() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    name = state_path(DIRECTORY)
    fs.open(name, writable=True).pwrite(b"\xff", 40)
    with pytest.raises(CorruptState):
        offsets(reader_of(fs, lambda: log.high_watermark), 0)
    fs.unlink(name)
    with pytest.raises(CorruptState, match="no state file"):
        offsets(reader_of(fs, lambda: log.high_watermark), 0)


@pytest.mark.usefixtures("impatient")
def test_a_look_by_time_at_a_damaged_batch_says_what_is_wrong_and_one_at_a_missing_file_that() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.close()
    reader = reader_of(fs, lambda: 20)
    path = f"{DIRECTORY}/{0:020d}.log"
    file = fs.open(path, writable=True)
    file.pwrite(b"\xff" * 100, 0)
    file.close()
    with pytest.raises(DamageError) as damaged:
        reader.offset_for_timestamp(0)
    assert damaged.value.file == path
    assert "not there" not in damaged.value.what
    fs.unlink(path)
    with pytest.raises(DamagedLog, match="a file that is not there"):
        reader_of(fs, lambda: 20).offset_for_timestamp(0)


@pytest.mark.usefixtures("impatient")
def test_a_file_that_stays_away_is_damage_after_some_looks() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    fs.unlink(f"{DIRECTORY}/{6:020d}.log")
    reader = reader_of(fs, lambda: log.high_watermark)
    seen = []
    with pytest.raises(DamagedLog, match="duramen recover"):
        seen.extend(reader.records(0))
    assert [record.offset for record in seen] == list(range(6))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ["flip", "cut", "zeros"])
def test_damage_below_the_high_watermark_is_an_error_and_never_an_end(what: str) -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    file = fs.open(f"{DIRECTORY}/{18:020d}.log", writable=True)
    if what == "flip":
        file.pwrite(b"\xff", 70)
    elif what == "cut":
        file.truncate(0)
    else:
        file.pwrite(bytes(100), 0)
    reader = reader_of(fs, lambda: log.high_watermark)
    seen = []
    with pytest.raises(DuramenError):
        seen.extend(reader.records(0))
    assert [record.offset for record in seen] == list(range(18))


def test_a_batch_above_the_read_buffer_is_an_error_that_says_so() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append_batches(sized_batch(50_000))
    reader = reader_of(fs, lambda: log.high_watermark, limits=Limits(read_buffer_bytes=20_000))
    with pytest.raises(BufferLimit, match="read_buffer_bytes"):
        offsets(reader, 0)


def test_what_lies_above_the_high_watermark_is_never_judged() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs, 5)
    file = fs.open(f"{DIRECTORY}/{6:020d}.log", writable=True)
    file.pwrite(b"\xff" * 300, 100)  # a writer is in the middle of something
    reader = reader_of(fs, lambda: 8)
    assert log.log_end_offset == 10
    assert offsets(reader, 0) == list(range(8))
    assert reader.offset_for_timestamp(NOW_MS + 1) is None


# --- committed --------------------------------------------------------------------------------------------------------


def test_a_committed_read_stops_at_the_last_stable_offset_and_skips_what_was_aborted() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=CONFIG)
    for pid in range(4):
        log.append_batches(
            batch([rec(f"of {pid}")], producer_id=pid, producer_epoch=0, base_sequence=0, transactional=True)
        )
        if pid < 3:
            log.append_marker(commit=pid != 1, producer_id=pid, producer_epoch=0)
    log.append([rec("plain")])
    reader = reader_of(fs, lambda: log.high_watermark, last_stable_offset=lambda: log.last_stable_offset)
    assert [record.value for record in reader.records(0, committed=True)] == [b"of 0", b"of 2"]
    assert len(offsets(reader, 0)) == 5
    log.append_marker(commit=True, producer_id=3, producer_epoch=0)
    assert [record.value for record in reader.records(0, committed=True)] == [b"of 0", b"of 2", b"of 3", b"plain"]


# --- by time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preallocate", [False, True])
def test_a_lookup_by_time_sees_what_the_live_index_does_not_have_yet(preallocate: bool) -> None:
    fs, clock = SimulatedFileSystem(), ManualClock(NOW_MS)
    config = LogConfig(segment_bytes=2000, preallocate=preallocate)
    log = open_log(fs, config=config, clock=clock)
    for at_ms in (10, 20, 30, 25):
        log.append([rec(at_ms=at_ms)])
    reader = reader_of(fs, lambda: log.high_watermark)
    assert reader.offset_for_timestamp(15) == TimestampOffset(20, 1)
    assert reader.offset_for_timestamp(26) == TimestampOffset(30, 2)
    assert reader.offset_for_timestamp(-3) == TimestampOffset(30, 2)
    assert reader.offset_for_timestamp(-1) == TimestampOffset(-1, 4)
    assert reader.offset_for_timestamp(31) is None
    assert offsets(reader, 0) == [0, 1, 2, 3]
    log.append([rec(at_ms=99)])
    assert reader.offset_for_timestamp(31) == TimestampOffset(99, 4)
    held_back = reader_of(fs, lambda: 2)
    assert held_back.offset_for_timestamp(26) is None
    assert held_back.offset_for_timestamp(-3) == TimestampOffset(20, 1)


@pytest.mark.usefixtures("impatient")
def test_a_lookup_by_time_of_files_that_stay_away_is_a_typed_error() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    fs.unlink(f"{DIRECTORY}/{0:020d}.log")
    with pytest.raises(DamagedLog):
        reader_of(fs, lambda: log.high_watermark).offset_for_timestamp(NOW_MS)


# --- beside a live writer ---------------------------------------------------------------------------------------------

WRITER = """
import os, struct, sys, time
from logstore.clock import SYSTEM_CLOCK
from logstore.config import LogConfig
from logstore.records.record import Record
from simulation.logs import open_log
from simulation.tracing import TracingFileSystem

directory, ends, seconds, long_lived = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "long"
fd = os.open(ends, os.O_RDWR)
config = LogConfig(segment_bytes=4000, index_interval_bytes=300, retention_ms=-1, retention_bytes=60_000,
                   segment_index_bytes=4096, preallocate=long_lived)
stop = time.monotonic() + seconds
clean, n = True, 0
while time.monotonic() < stop or n <= 50:
    log = open_log(TracingFileSystem(), directory, config, clock=SYSTEM_CLOCK, clean=clean, long_lived=long_lived)
    assert not log.recovery.found_damage, log.recovery
    for _ in range(400 if long_lived else 20):
        first = log.log_end_offset
        records = [Record(b"%d" % (first + i), b"v" * (n * 37 % 200)) for i in range(1 + n % 7)]
        log.append(records, batch_bytes=200 + n % 500)
        os.pwrite(fd, struct.pack(">q", log.high_watermark), 0)
        n += 1
        if n % 50 == 0:
            log.apply_retention()
    clean = n % 3 != 0
    log.close(clean=clean)
print(n)
"""


@pytest.mark.parametrize("lived", ["long", "short"])
def test_beside_a_writer_that_rolls_retains_and_reopens_every_record_is_seen_once_and_in_order(
    tmp_path: Path, lived: str
) -> None:
    directory, ends = str(tmp_path / "orders-0"), tmp_path / "ends"
    ends.write_bytes(bytes(8))
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, directory, str(ends), "4", lived], env=environment, stdout=subprocess.PIPE
    )
    file = OS_FILES.open(str(ends))

    def high_watermark() -> int:
        return int(struct.unpack(">q", file.pread(8, 0))[0])

    fs = TracingFileSystem()

    def refuse(call: Call) -> None:
        raise AssertionError(f"a reader must not {call}")

    fs.before = refuse
    reader = reader_of(fs, high_watermark, directory)
    position = moved = looks = 0
    seen: list[int] = []
    try:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if not os.path.exists(state_path(directory)):
                continue
            running = writer.poll() is None
            looks += 1
            try:
                for record in reader.records(position):
                    assert record.key == b"%d" % record.offset
                    seen.append(record.offset)
                    position = record.offset + 1
            except OffsetOutOfRange:  # the only thing that may happen: the log start moved on
                assert position < reader.log_start_offset()
                position = reader.log_start_offset()
                moved += 1
            if looks % 7 == 0 and seen:
                found = reader.offset_for_timestamp(-3)
                assert found is None or found.offset >= 0
            if not running and position >= high_watermark():
                break
    finally:
        writer.kill()
        output, _ = writer.communicate()
    assert writer.returncode == 0, output
    assert int(output) > 50
    assert seen
    assert position == high_watermark()
    assert all(after > before for before, after in pairwise(seen))
    gaps = sum(after != before + 1 for before, after in pairwise(seen))
    assert gaps <= moved
    final = open_log(TracingFileSystem(), directory, clean=False)
    assert final.log_end_offset == high_watermark()
    assert [row[0] for row in contents(final)] == list(range(final.log_start_offset, final.log_end_offset))


def test_two_readers_of_one_log_do_not_disturb_each_other() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    one, other = (reader_of(fs, lambda: log.high_watermark) for _ in range(2))
    pairs = list(zip(one.records(0), other.records(0), strict=True))
    assert [(a.offset, b.offset) for a, b in pairs] == [(n, n) for n in range(20)]


def test_headers_can_be_left_out_of_columns() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    log.append(recs(3))
    (columns,) = reader_of(fs, lambda: 3).columns(0, headers=False)
    assert columns.headers is None
    assert columns.offsets.tolist() == [0, 1, 2]

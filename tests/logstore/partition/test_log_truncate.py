from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.config import LogConfig
from logstore.directory.state import read_state
from logstore.errors import DamagedLog, OffsetOutOfRange, OutOfOrderSequence
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import (
    DIRECTORY,
    bases,
    batch,
    contents,
    directory_bytes,
    open_log,
    rec,
    recs,
    sized_batch,
    state_path,
)
from simulation.tracing import Call, TracingFileSystem


def filled(fs: SimulatedFileSystem | None = None, **options: object) -> PartitionWriter:
    """Batches of three records, three a segment: bases 0, 9, 18, 27; the log ends at 30."""
    log = open_log(fs or SimulatedFileSystem(), config=LogConfig(segment_bytes=300), **options)  # type: ignore[arg-type]
    for _ in range(10):
        log.append_batches(sized_batch(100, count=3))
    assert bases(log) == [0, 9, 18, 27]
    return log


@pytest.mark.parametrize(
    ("offset", "left", "bases_left"),
    [
        (29, 27, [0, 9, 18, 27]),  # inside the last batch: all of it goes
        (28, 27, [0, 9, 18, 27]),
        (27, 27, [0, 9, 18, 27]),  # at a segment's base: the segment stays, empty
        (26, 24, [0, 9, 18]),
        (24, 24, [0, 9, 18]),
        (21, 21, [0, 9, 18]),
        (18, 18, [0, 9, 18]),
        (10, 9, [0, 9]),
        (1, 0, [0]),
        (0, 0, [0]),
    ],
)
def test_the_whole_batch_that_holds_the_offset_goes(offset: int, left: int, bases_left: list[int]) -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    assert log.truncate_to(offset)
    assert [row[0] for row in contents(log)] == list(range(left))
    assert (log.log_end_offset, bases(log)) == (offset, bases_left)
    assert log.high_watermark == left, "what is below can be read"
    assert log.set_high_watermark(99) == left
    assert log.fetch(offset, 1000).size_bytes == 0
    assert log.append([rec("next")]).first_offset == offset
    assert contents(log)[-1][:3] == (offset, b"k", b"next")
    rows = contents(log)
    log.close()
    assert contents(open_log(fs, config=LogConfig(segment_bytes=300))) == rows
    assert contents(open_log(fs.kill(), config=LogConfig(segment_bytes=300), clean=False)) == rows


def test_at_or_beyond_the_end_there_is_nothing_to_truncate() -> None:
    log = filled()
    assert not log.truncate_to(30)
    assert not log.truncate_to(99)
    assert log.log_end_offset == 30
    with pytest.raises(OffsetOutOfRange):
        log.truncate_to(-1)


def test_twice_is_once() -> None:
    log = filled()
    assert log.truncate_to(16)
    assert not log.truncate_to(16)
    assert log.truncate_to(12)
    assert [row[0] for row in contents(log)] == list(range(12))


def test_below_the_first_segment_everything_goes_and_the_log_begins_anew_there() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.advance_log_start(20)
    log.apply_retention()
    assert bases(log) == [18, 27]
    log.truncate_to(7)
    assert (bases(log), log.log_start_offset, log.log_end_offset, log.high_watermark) == ([7], 7, 7, 7)
    log.append(recs(2, first=7))
    assert [row[0] for row in contents(log)] == [7, 8]
    log.close()
    assert [row[0] for row in contents(open_log(fs))] == [7, 8]


def test_below_the_log_start_the_log_start_follows() -> None:
    log = filled()
    log.advance_log_start(5)
    log.truncate_to(3)
    assert (log.log_start_offset, log.log_end_offset) == (3, 3)
    log.append([rec("next")])
    assert contents(log)[0][:3] == (3, b"k", b"next")


def test_the_recovery_point_falls_to_the_new_end() -> None:
    log = filled()
    log.flush()
    log.truncate_to(16)
    assert log.recovery_point == 16
    log.append([rec()])
    assert log.recovery_point == 16


def test_beginning_anew_elsewhere() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.truncate_fully_and_start_at(1000)
    assert (bases(log), log.log_start_offset, log.log_end_offset) == ([1000], 1000, 1000)
    log.append(recs(1))
    log.close()
    again = open_log(fs)
    assert [row[0] for row in contents(again)] == [1000]


def test_indexes_are_cut_with_the_log() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs, config=LogConfig(index_interval_bytes=0, segment_index_bytes=960))
    for n in range(10):
        log.append_batches(sized_batch(100, at_ms=n))
    log.truncate_to(4)
    (segment,) = log.segments
    assert [entry.offset for entry in segment.offset_index.items()] == [1, 2, 3]
    assert [entry.timestamp_ms for entry in segment.time_index.items()] == [1, 2, 3]
    segment_files = {name: len(data) for name, data in directory_bytes(fs).items() if name.endswith("index")}
    assert segment_files == {f"{0:020d}.index": 960, f"{0:020d}.timeindex": 960}, "active again, so preallocated again"
    log.close()
    assert open_log(fs, config=LogConfig(index_interval_bytes=0)).recovery.rebuilt == []


def idempotent(sequence: int, **options: object) -> bytes:
    return batch([rec(str(sequence))], producer_id=1, producer_epoch=0, base_sequence=sequence, **options)


def test_producers_are_where_the_new_end_has_them() -> None:
    log = open_log(SimulatedFileSystem())
    for sequence in range(6):
        log.append_batches(idempotent(sequence))
    log.truncate_to(3)
    assert log.append_batches(idempotent(2)).duplicate
    with pytest.raises(OutOfOrderSequence):
        log.append_batches(idempotent(6))
    log.append_batches(idempotent(3))
    assert [row[2] for row in contents(log)] == [b"0", b"1", b"2", b"3"]


def test_a_transaction_is_open_again_when_its_marker_is_gone() -> None:
    log = open_log(SimulatedFileSystem())
    log.append_batches(idempotent(0, transactional=True))
    log.append_marker(commit=False, producer_id=1, producer_epoch=0)
    log.append([rec("x")])
    assert log.last_stable_offset == 3
    log.truncate_to(1)
    assert log.last_stable_offset == 0
    log.append_marker(commit=True, producer_id=1, producer_epoch=0)
    assert [record.value for record in log.records(isolation=Isolation.READ_COMMITTED)] == [b"0"]


def test_a_transaction_that_ended_below_the_high_watermark_does_not_hold_readers_back_after_a_truncation() -> None:
    log = open_log(SimulatedFileSystem(), manual_high_watermark=True)
    log.append_batches(idempotent(0, transactional=True))
    log.append_marker(commit=True, producer_id=1, producer_epoch=0)
    for _ in range(5):
        log.append([rec()])
    log.set_high_watermark(4)
    assert log.last_stable_offset == 4
    log.truncate_to(6)
    assert (log.high_watermark, log.last_stable_offset) == (4, 4)


def test_leader_epochs_above_the_new_end_are_forgotten() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    for epoch in range(4):
        log.append(recs(2), leader_epoch=epoch)
    log.truncate_to(4)
    assert directory_bytes(fs)["leader-epoch-checkpoint"] == b"0\n2\n0 0\n1 2\n"


def test_the_list_is_on_disk_before_files_lose_their_names(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory, LogConfig(segment_bytes=300))
    for _ in range(10):
        log.append_batches(sized_batch(100, count=3))
    listed = []

    def look(call: Call) -> None:
        if call.kind == "rename" and call.target.endswith(".deleted"):
            fs.before = None
            state = read_state(fs, state_path(directory))
            fs.before = look
            listed.append(None if state is None else [entry.base_offset for entry in state.segments])

    fs.before = look
    log.truncate_to(12)
    fs.before = None
    assert listed
    assert all(found == [0, 9] for found in listed)
    assert {name for name in os.listdir(directory) if name.endswith(".deleted")} >= {
        f"{base:020d}.log.deleted" for base in (18, 27)
    }


def test_a_truncation_that_fails_half_way_stops_all_writes(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory)
    log.append(recs(5))
    log.append(recs(5, first=5))

    def fail(call: Call) -> None:
        if call.kind == "truncate" and call.name.endswith(".log"):
            raise OSError(errno.EIO, "worn out", call.path)

    fs.before = fail
    with pytest.raises(OSError, match="worn out"):
        log.truncate_to(5)
    fs.before = None
    with pytest.raises(DamagedLog, match="worn out"):
        log.append([rec()])
    log.close()
    assert len(contents(open_log(fs, directory, clean=False))) in (5, 10)


@settings(max_examples=80)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=15),
    segment_bytes=st.sampled_from((260, 500, 1 << 20)),  # the largest batch here has 253
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    unclean=st.booleans(),
)
def test_what_is_left_is_what_appending_less_leaves(
    sizes: list[tuple[int, int]], segment_bytes: int, cuts: list[int], unclean: bool
) -> None:
    config = LogConfig(segment_bytes=segment_bytes, index_interval_bytes=50)
    fs = SimulatedFileSystem()
    log = open_log(fs, config=config)
    ends = [0]
    for count, length in sizes:
        log.append_batches(batch([rec(b"x" * length)] * count))
        ends.append(log.log_end_offset)
    rows = contents(log)
    lowest = log.log_end_offset
    for cut in cuts:
        log.truncate_to(cut)
        lowest = min(lowest, cut)
    kept = max(end for end in ends if end <= lowest)
    assert contents(log) == rows[:kept]
    assert log.log_end_offset == lowest
    log.append([rec("next")])
    assert contents(log) == [*rows[:kept], (lowest, b"k", b"next", rec().timestamp_ms)]
    if not unclean:
        log.close()
    again = open_log(fs.kill(), config=config, clean=not unclean)
    assert contents(again) == [*rows[:kept], (lowest, b"k", b"next", rec().timestamp_ms)]
    assert again.log_end_offset == lowest + 1
    assert not again.recovery.found_damage


def test_files_of_truncated_segments_do_not_come_back() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.truncate_to(10)
    assert [name for name in fs.listdir(DIRECTORY) if name.endswith(".log")] == [f"{0:020d}.log", f"{9:020d}.log"]
    again = open_log(fs.kill(), config=LogConfig(segment_bytes=300), clean=False)
    assert again.log_end_offset == 9  # the batch that held offset 10 begins there


def test_a_log_start_inside_the_batch_that_goes_leaves_an_empty_log() -> None:
    log = filled()
    log.advance_log_start(28)
    log.truncate_to(29)
    assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (28, 28, 29)
    assert contents(log) == []
    log.append([rec("next")])
    assert [row[0] for row in contents(log)] == [29]

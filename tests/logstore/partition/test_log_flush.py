from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import SYSTEM_CLOCK, ManualClock
from logstore.config import LogConfig
from logstore.directory.state import read_state
from logstore.errors import DamagedLog
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import NOW_MS, batch, contents, expected, open_log, rec, recs, sized_batch, state_path
from simulation.tracing import Call, TracingFileSystem


def unflushed(log: PartitionWriter) -> int:
    return log.log_end_offset - log.recovery_point


def test_nothing_is_flushed_by_itself() -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(segment_bytes=500))
    for n in range(20):
        log.append(recs(5, first=5 * n))
    assert len(log.segments) > 3
    assert log.recovery_point == 0
    assert not log.flush_if_due()


@pytest.mark.parametrize("limit", [1, 2, 7, 10])
def test_fewer_than_flush_messages_records_stay_unflushed(limit: int) -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(flush_messages=limit, segment_bytes=400))
    reached = set()
    for count in (1, 1, 3, 1, 2, 12, 1, 1, 1, 6, 5, 4):
        log.append([rec()] * count, batch_bytes=100)
        assert unflushed(log) < limit
        reached.add(unflushed(log))
    assert reached - {0} or limit == 1


@settings(max_examples=60)
@given(
    limit=st.integers(1, 12),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    segment_bytes=st.sampled_from((250, 1 << 20)),
    seed=st.integers(0, 2**32),
)
def test_a_power_cut_loses_fewer_than_flush_messages_records(
    limit: int, counts: list[int], segment_bytes: int, seed: int
) -> None:
    fs = SimulatedFileSystem()
    config = LogConfig(flush_messages=limit, segment_bytes=segment_bytes)
    log = open_log(fs, config=config)
    for count in counts:
        log.append(recs(count, first=log.log_end_offset), batch_bytes=120)
    survivor = fs.crash(random.Random(seed))
    again = open_log(survivor, config=config, clean=False, recovery_point=log.recovery_point)
    assert again.log_end_offset > log.log_end_offset - limit
    assert contents(again) == contents(log)[: again.log_end_offset]


def test_time_counts_from_the_oldest_unflushed_record() -> None:
    clock = ManualClock(NOW_MS)
    log = open_log(SimulatedFileSystem(), config=LogConfig(flush_ms=100), clock=clock)
    log.append(recs(1))
    clock.advance(60)
    log.append(recs(1))
    assert not log.flush_if_due()
    clock.advance(39)
    assert not log.flush_if_due()
    assert log.flush_if_due(within_ms=1)
    assert unflushed(log) == 0
    assert not log.flush_if_due(within_ms=10**9)  # there is nothing to flush
    log.append(recs(1))
    clock.advance(99)
    assert not log.flush_if_due()
    clock.advance(1)
    assert log.flush_if_due()


def test_an_append_that_comes_late_flushes_what_is_due_with_it() -> None:
    clock = ManualClock(NOW_MS)
    log = open_log(SimulatedFileSystem(), config=LogConfig(flush_ms=100), clock=clock)
    log.append(recs(1))
    clock.advance(100)
    log.append(recs(1))
    assert unflushed(log) == 0


def test_flush_ms_zero_flushes_every_append() -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(flush_ms=0))
    for _ in range(3):
        log.append(recs(2))
        assert unflushed(log) == 0


def test_what_an_earlier_process_left_unflushed_is_flushed_where_time_is_limited() -> None:
    fs = SimulatedFileSystem()
    open_log(fs).append(recs(3))
    log = open_log(fs.kill(), config=LogConfig(flush_ms=10**9), clean=False)
    assert unflushed(log) == 0


def test_a_flush_goes_up_to_an_offset_and_never_back() -> None:
    log = open_log(SimulatedFileSystem())
    log.append(recs(10))
    log.flush(up_to=4)
    assert log.recovery_point == 4
    log.flush(up_to=2)
    assert log.recovery_point == 4
    log.flush(up_to=99)
    assert log.recovery_point == 10


def test_data_is_on_disk_before_the_recovery_point_moves(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory, LogConfig(segment_bytes=300))
    for _ in range(7):
        log.append_batches(sized_batch(100))
    fs.calls.clear()
    points = []
    fs.before = lambda call: points.append(log.recovery_point)
    log.flush()
    assert set(points) == {0}
    assert log.recovery_point == 7
    synced = [str(call) for call in fs.calls if call.kind.startswith("fsync")]
    names = [f"{base:020d}" for base in (0, 3, 6)]
    logs = [line for line in synced if line.endswith(".log")]
    assert logs == [f"fsync {name}.log" for name in names]
    for name in names:
        at = synced.index(f"fsync {name}.log")
        assert synced.index(f"fsync {name}.index") > at
        assert synced.index(f"fsync {name}.timeindex") > at
    assert {f"fsync {name}.snapshot" for name in names[1:]} <= set(synced)
    assert synced[-1] == "fsync_dir orders-0", "names last, and before the recovery point"


def test_a_second_flush_syncs_only_what_was_written_since(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    log = open_log(fs, str(tmp_path / "orders-0"), LogConfig(segment_bytes=300))
    for _ in range(4):
        log.append_batches(sized_batch(100))
    log.flush()
    fs.calls.clear()
    log.flush()
    assert fs.texts() == []
    log.append_batches(sized_batch(100))
    fs.calls.clear()
    log.flush()
    assert {call.name for call in fs.calls} == {f"{3:020d}.{suffix}" for suffix in ("log", "index", "timeindex")}


def test_the_first_aborted_transaction_of_a_flushed_segment_syncs_the_name_of_its_index(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    log = open_log(fs, str(tmp_path / "orders-0"))
    log.append_batches(batch(recs(1), producer_id=1, producer_epoch=0, base_sequence=0, transactional=True))
    log.flush()
    log.append_marker(commit=False, producer_id=1, producer_epoch=0)
    fs.calls.clear()
    log.flush()
    synced = fs.texts()
    assert synced.index(f"fsync {0:020d}.txnindex") < synced.index("fsync_dir orders-0")


def test_a_clean_close_flushes_everything_and_says_so_last(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory)
    log.append(recs(3))
    fs.calls.clear()
    log.close()
    assert log.recovery_point == 3
    lines = fs.texts()
    assert f"fsync {0:020d}.log" in lines
    closing = lines.index("rename orders-0.tmp -> orders-0")
    assert [line for line in lines[closing + 1 :] if not line.startswith("fsync_dir")] == []
    state = read_state(fs, state_path(directory))
    assert state is not None
    assert state.closed


def test_an_unclean_close_flushes_nothing(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    log = open_log(fs, str(tmp_path / "orders-0"))
    log.append(recs(3))
    fs.calls.clear()
    log.close(clean=False)
    assert fs.texts() == []


# --- the background flusher -------------------------------------------------------------------------------------------


def wait_until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def test_the_flusher_keeps_flush_ms_while_nothing_is_appended(tmp_path: Path) -> None:
    log = open_log(
        TracingFileSystem(),
        str(tmp_path / "orders-0"),
        LogConfig(flush_ms=60),
        clock=SYSTEM_CLOCK,
        background_flush=True,
    )
    for n in range(3):
        log.append(recs(2))
        assert log.recovery_point >= 2 * n
        wait_until(lambda: unflushed(log) == 0)
    log.close()


def test_without_flush_ms_there_is_no_flusher_and_a_stopped_one_is_gone(tmp_path: Path) -> None:
    import threading

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("flush")]

    before = threads()
    open_log(TracingFileSystem(), str(tmp_path / "a" / "orders-0"), background_flush=True).close()
    assert threads() == before
    log = open_log(TracingFileSystem(), str(tmp_path / "b" / "orders-0"), LogConfig(flush_ms=50), background_flush=True)
    assert len(threads()) == len(before) + 1
    log.close()
    assert threads() == before


def failing_fsync(call: Call) -> None:
    if call.kind == "fsync" and call.name.endswith(".log"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), call.path)


def test_a_failed_background_flush_stops_appends_and_is_raised_on_close(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory, LogConfig(flush_ms=20), clock=SYSTEM_CLOCK, background_flush=True)
    log.append(recs(2))
    log.flush()
    fs.calls.clear()
    fs.before = failing_fsync
    log.append(recs(2, first=2))
    wait_until(lambda: any(call.kind == "fsync" for call in fs.calls))
    with pytest.raises(DamagedLog, match="Input/output"):
        log.append(recs(1))
    fs.before = None
    with pytest.raises(OSError, match="Input/output"):
        log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.segments[0].log.size()  # the files are closed all the same
    state = read_state(fs, state_path(directory))
    assert state is not None
    assert not state.closed
    again = open_log(fs, directory, clean=False, recovery_point=2)
    assert contents(again)[:4] == expected(recs(2)) + expected(recs(2, first=2), 2)


def test_after_a_failed_fsync_the_next_one_is_not_believed(tmp_path: Path) -> None:
    # the system may have dropped the pages it could not write: a second fsync would succeed and prove nothing
    fs = TracingFileSystem()
    directory = str(tmp_path / "orders-0")
    log = open_log(fs, directory, LogConfig(flush_messages=3))
    log.append(recs(2))
    fs.before = failing_fsync
    with pytest.raises(OSError, match="Input/output"):
        log.append(recs(2, first=2))
    fs.before = None
    with pytest.raises(DamagedLog):
        log.flush()
    with pytest.raises(DamagedLog):
        log.append(recs(1))
    assert log.recovery_point == 0
    log.close()
    assert contents(open_log(fs, directory, clean=False))[:2] == expected(recs(2))


def test_a_close_that_cannot_flush_closes_the_files_and_raises(tmp_path: Path) -> None:
    fs = TracingFileSystem()
    log = open_log(fs, str(tmp_path / "orders-0"))
    log.append(recs(2))
    fs.before = failing_fsync
    with pytest.raises(OSError, match="Input/output"):
        log.close()
    fs.before = None
    log.close()  # again is fine
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.segments[0].log.size()

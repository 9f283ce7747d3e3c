from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.state import read_state
from logstore.partition.retention import LogFacts
from reference.partition_writer import DeletedSegments, PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import (
    DIRECTORY,
    NOW_MS,
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

DAY_MS = 86_400_000


def filled(
    config: LogConfig,
    timestamps: list[int],
    *,
    fs: SimulatedFileSystem | TracingFileSystem | None = None,
    clock: ManualClock | None = None,
    **options: object,
) -> PartitionWriter:
    """One segment of 100 bytes for each timestamp."""
    log = open_log(
        fs or SimulatedFileSystem(),
        config=replace(config, segment_bytes=100),
        clock=clock or ManualClock(NOW_MS),
        **options,  # type: ignore[arg-type]
    )
    for at_ms in timestamps:
        log.append_batches(sized_batch(100, at_ms=at_ms))
    return log


def test_old_segments_go_by_time_and_the_log_starts_behind_them() -> None:
    fs = SimulatedFileSystem()
    log = filled(LogConfig(retention_ms=DAY_MS), [NOW_MS - 3 * DAY_MS, NOW_MS - 2 * DAY_MS, NOW_MS - DAY_MS], fs=fs)
    assert log.apply_retention() == [DeletedSegments("time", (0, 1), 200)]
    assert (bases(log), log.log_start_offset) == ([2], 2)
    assert [row[0] for row in contents(log)] == [2]
    names = set(directory_bytes(fs))
    assert {f"{n:020d}.{kind}.deleted" for n in (0, 1) for kind in ("log", "index", "timeindex")} <= names
    assert f"{1:020d}.snapshot.deleted" in names
    log.close()
    assert (open_log(fs).log_start_offset, bases(open_log(fs))) == (2, [2])


def test_the_active_segment_can_expire_behind_a_new_one() -> None:
    clock = ManualClock(NOW_MS)
    log = filled(LogConfig(retention_ms=DAY_MS), [NOW_MS, NOW_MS, NOW_MS], clock=clock)
    clock.advance(DAY_MS)
    assert log.apply_retention() == []
    clock.advance(1)
    assert log.apply_retention() == [DeletedSegments("time", (0, 1, 2), 300)]
    assert (bases(log), log.log_start_offset, log.log_end_offset, log.size_bytes) == ([3], 3, 3, 0)
    assert log.apply_retention() == []
    log.append([rec("goes on")])
    assert contents(log) == [(3, b"k", b"goes on", NOW_MS)]


def test_size_goes_before_time_and_both_after_the_log_start() -> None:
    old = NOW_MS - 5 * DAY_MS
    log = filled(LogConfig(retention_ms=DAY_MS, retention_bytes=300), [old, old, old, old, NOW_MS, NOW_MS])
    log.advance_log_start(1)
    assert log.apply_retention() == [
        DeletedSegments("log start", (0,), 100),
        DeletedSegments("size", (1, 2), 200),
        DeletedSegments("time", (3,), 100),
    ]
    assert bases(log) == [4, 5]


def test_a_timestamp_in_the_future_keeps_everything_behind_it() -> None:
    old = NOW_MS - 5 * DAY_MS
    config = LogConfig(retention_ms=DAY_MS, message_timestamp_after_max_ms=10 * DAY_MS)
    clock = ManualClock(NOW_MS)
    log = filled(config, [old, NOW_MS + 2 * DAY_MS, old, NOW_MS], clock=clock)
    log.apply_retention()
    assert bases(log) == [1, 2, 3]
    clock.advance(3 * DAY_MS + 1)
    log.apply_retention()
    assert bases(log) == [4]


def test_records_without_time_go_by_the_time_of_their_file() -> None:
    clock = ManualClock(NOW_MS)
    fs = SimulatedFileSystem(clock)
    log = filled(LogConfig(retention_ms=DAY_MS), [-1, -1], fs=fs, clock=clock)
    clock.advance(DAY_MS)
    assert log.apply_retention() == []
    clock.advance(1)
    assert log.apply_retention() == [DeletedSegments("time", (0, 1), 200)]


def test_nothing_above_the_high_watermark_goes() -> None:
    log = filled(LogConfig(retention_ms=0), [0, 0, 0], manual_high_watermark=True)
    assert log.apply_retention() == []
    log.set_high_watermark(2)
    log.apply_retention()
    assert bases(log) == [2]


@pytest.mark.parametrize("policy", [frozenset({"compact"}), frozenset()])
def test_other_policies_lose_only_what_lies_below_the_log_start(policy: frozenset[str]) -> None:
    config = LogConfig(retention_ms=0, retention_bytes=0, cleanup_policy=policy, segment_bytes=100)
    log = open_log(SimulatedFileSystem(), config=config)
    for _ in range(3):
        log.append([rec("x" * 20, "k", 5)])
    log.advance_log_start(1)
    assert [done.policy for done in log.apply_retention()] == ["log start"]
    assert bases(log) == [1, 2]


@dataclass(frozen=True)
class EverySecond:
    """A policy of one's own: half of the segments."""

    name: str = "half"

    def deletable(self, log: LogFacts, now_ms: int) -> int:
        return len(log.segments) // 2


def test_another_policy_is_one_more_object() -> None:
    log = filled(LogConfig(retention_ms=-1), [NOW_MS] * 6)
    assert log.apply_retention(policies=(EverySecond(),)) == [DeletedSegments("half", (0, 1, 2), 300)]
    assert bases(log) == [3, 4, 5]


@settings(max_examples=80)
@given(
    ages=st.lists(st.integers(-5, 30), min_size=1, max_size=8),
    retention_ms=st.integers(-1, 30),
    retention_bytes=st.sampled_from((-1, 0, 100, 250, 300, 1000)),
    log_start=st.integers(0, 8),
    high_watermark=st.integers(0, 8),
)
def test_a_dry_run_tells_what_the_real_one_does(
    ages: list[int], retention_ms: int, retention_bytes: int, log_start: int, high_watermark: int
) -> None:
    config = LogConfig(retention_ms=retention_ms, retention_bytes=retention_bytes)
    fs = SimulatedFileSystem()
    log = filled(config, [NOW_MS - age for age in ages], fs=fs, manual_high_watermark=True)
    log.set_high_watermark(high_watermark)
    log.advance_log_start(min(log_start, log.high_watermark))
    before = fs.files()
    told = log.apply_retention(dry_run=True)
    assert fs.files() == before
    assert log.apply_retention() == told
    assert bases(log) == (
        [n for n in range(len(ages)) if n not in {b for d in told for b in d.base_offsets}] or [len(ages)]
    )
    assert log.log_start_offset >= bases(log)[0] or bases(log)[0] == 0


def test_the_new_list_is_on_disk_before_any_file_loses_its_name(tmp_path: object) -> None:
    fs = TracingFileSystem()
    log = open_log(fs, f"{tmp_path}/orders-0", LogConfig(segment_bytes=100, retention_ms=0))
    for _ in range(3):
        log.append_batches(sized_batch(100, at_ms=5))
    fs.calls.clear()
    listed: list[tuple[int, tuple[int, ...]]] = []
    gone_names = {f"{base:020d}" for base in (0, 1, 2)}

    def look(call: Call) -> None:
        if call.kind == "rename" and call.name[:20] in gone_names:
            fs.before = None
            state = read_state(fs, state_path(f"{tmp_path}/orders-0"))
            fs.before = look
            assert state is not None
            listed.append((state.log_start_offset, tuple(entry.base_offset for entry in state.segments)))

    fs.before = look
    log.apply_retention()
    fs.before = None
    assert set(listed) == {(3, (3,))}
    lines = fs.texts()
    saved = lines.index("rename orders-0.tmp -> orders-0")
    assert lines[saved - 1].startswith("fsync orders-0.tmp")
    assert lines[saved + 1] == "fsync_dir state"
    first_gone = next(n for n, line in enumerate(lines) if line.endswith(f"{0:020d}.log.deleted"))
    assert first_gone > saved + 1
    gone = [line.split(" -> ")[1] for line in lines if line.endswith(".deleted") and f"{0:020d}" in line]
    assert [name.split(".")[1] for name in gone] == ["log", "index", "timeindex", "txnindex", "snapshot"]


def test_a_reader_of_this_process_finishes_in_a_segment_that_was_retained_meanwhile() -> None:
    log = filled(LogConfig(retention_ms=0), [5, 5, 5])
    reading = log.records()
    assert next(reading).offset == 0
    log.apply_retention()
    assert [record.offset for record in reading] == [1, 2]


def test_producers_are_remembered_when_their_records_are_retained() -> None:
    fs, clock = SimulatedFileSystem(), ManualClock(NOW_MS)
    config = LogConfig(retention_ms=0, segment_bytes=100)
    log = open_log(fs, config=config, clock=clock)
    sent = batch([rec()], producer_id=1, producer_epoch=0, base_sequence=0)
    log.append_batches(sent)
    log.append_batches(sized_batch(100, at_ms=NOW_MS + 100))
    clock.advance(1)
    assert log.apply_retention() == [DeletedSegments("time", (0,), len(sent))]
    assert log.append_batches(sent).duplicate
    log.close()
    assert open_log(fs, config=config, clock=clock).append_batches(sent).duplicate


# --- deleted files ----------------------------------------------------------------------------------------------------


def test_deleted_files_are_swept_once_their_change_time_is_old_enough() -> None:
    clock = ManualClock(NOW_MS)
    fs = SimulatedFileSystem(clock)
    config = LogConfig(retention_ms=0, file_delete_delay_ms=1000)
    log = filled(config, [5, NOW_MS], fs=fs, clock=clock)
    clock.advance(1)
    log.apply_retention()

    def deleted() -> list[str]:
        return [name for name in fs.listdir(DIRECTORY) if name.endswith(".deleted")]

    count = len(deleted())
    assert count >= 6
    clock.advance(999)
    log.apply_retention()
    assert len(deleted()) == count
    clock.advance(1)
    log.apply_retention(dry_run=True)
    assert len(deleted()) == count
    log.apply_retention()
    assert deleted() == []


def test_whoever_opens_the_log_next_sweeps_what_a_killed_process_left() -> None:
    clock = ManualClock(NOW_MS)
    fs = SimulatedFileSystem(clock)
    config = LogConfig(retention_ms=0, file_delete_delay_ms=1000)
    filled(config, [5, 5], fs=fs, clock=clock).apply_retention()
    clock.advance(500)
    early = open_log(fs.kill(), config=config, clock=clock, clean=False)
    assert [path for path in early.recovery.removed if path.endswith(".deleted")] == []
    clock.advance(500)
    late = open_log(fs.kill(), config=config, clock=clock, clean=False)
    removed = [path for path in late.recovery.removed if path.endswith(".deleted")]
    assert f"{DIRECTORY}/{0:020d}.log.deleted" in removed
    assert late.log_start_offset == 2


def test_retention_of_an_empty_log_is_nothing() -> None:
    log = open_log(SimulatedFileSystem(), config=LogConfig(retention_ms=0, retention_bytes=0))
    assert log.apply_retention() == []
    assert bases(log) == [0]


def test_what_was_appended_after_retention_continues_the_offsets() -> None:
    log = filled(LogConfig(retention_ms=0), [5, 5])
    log.apply_retention()
    log.append(recs(3, first=2))
    assert [row[0] for row in contents(log)] == [2, 3, 4]

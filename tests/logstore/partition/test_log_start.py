from __future__ import annotations

import pytest

from logstore.config import LogConfig
from logstore.directory.state import read_state
from logstore.errors import OffsetOutOfRange
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


def filled(fs: SimulatedFileSystem, **options: object) -> PartitionWriter:
    log = open_log(fs, config=LogConfig(segment_bytes=300), **options)  # type: ignore[arg-type]
    for _ in range(10):
        log.append_batches(sized_batch(100, count=3))
    return log


def test_an_advance_hides_records_at_once_and_files_go_with_the_next_retention() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    assert log.advance_log_start(13)
    assert contents(log)[0][0] == 13  # inside a batch
    assert bases(log) == [0, 9, 18, 27]
    log.apply_retention()
    assert bases(log) == [9, 18, 27]
    assert contents(log)[0][0] == 13


def test_it_never_goes_back_and_says_so() -> None:
    log = filled(SimulatedFileSystem())
    assert log.advance_log_start(5)
    assert not log.advance_log_start(5)
    assert not log.advance_log_start(4)
    assert log.log_start_offset == 5


def test_it_never_passes_the_high_watermark() -> None:
    log = filled(SimulatedFileSystem(), manual_high_watermark=True)
    log.set_high_watermark(10)
    with pytest.raises(OffsetOutOfRange, match="high watermark is 10"):
        log.advance_log_start(11)
    assert log.advance_log_start(10)


def test_it_may_reach_the_end() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.advance_log_start(30)
    assert contents(log) == []
    log.apply_retention()
    assert bases(log) == [27]
    log.append([rec("next")])
    assert [row[0] for row in contents(log)] == [30]
    log.close()
    again = open_log(fs)
    assert (again.log_start_offset, again.log_end_offset) == (30, 31)


def test_it_is_durable_when_the_call_returns() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.advance_log_start(7)
    state = read_state(fs.kill(), state_path(DIRECTORY))
    assert state is not None
    assert state.log_start_offset == 7
    assert open_log(fs.kill(), clean=False).log_start_offset == 7


def test_it_raises_the_recovery_point() -> None:
    log = filled(SimulatedFileSystem())
    log.advance_log_start(7)
    assert log.recovery_point == 7


def test_the_leader_epoch_in_force_begins_at_the_new_start() -> None:
    fs = SimulatedFileSystem()
    log = open_log(fs)
    for epoch in range(3):
        log.append(recs(4), leader_epoch=epoch)
    log.advance_log_start(6)
    assert directory_bytes(fs)["leader-epoch-checkpoint"] == b"0\n2\n1 6\n2 8\n"


def test_a_start_given_on_opening_counts_when_it_is_higher() -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    log = open_log(fs, log_start_offset=12)
    assert log.log_start_offset == 12
    log.close()
    assert open_log(fs, log_start_offset=3).log_start_offset == 12


def test_a_start_beyond_the_end_begins_the_log_anew_there() -> None:
    fs = SimulatedFileSystem()
    log = filled(fs)
    log.append_batches(batch([rec()], producer_id=1, producer_epoch=0, base_sequence=0))
    log.close()
    log = open_log(fs, log_start_offset=100)
    assert (log.log_start_offset, log.log_end_offset, bases(log)) == (100, 100, [100])
    assert any("started again" in note for note in log.recovery.notes)
    assert not log.append_batches(batch([rec()], producer_id=1, producer_epoch=0, base_sequence=5)).duplicate
    log.close()
    assert [row[0] for row in contents(open_log(fs))] == [100]


def test_the_high_watermark_is_kept_between_start_and_end() -> None:
    log = filled(SimulatedFileSystem(), manual_high_watermark=True)
    assert log.high_watermark == 0
    assert log.set_high_watermark(99) == 30
    assert log.set_high_watermark(20) == 20
    log.advance_log_start(15)
    assert log.set_high_watermark(3) == 15


@pytest.mark.parametrize(("given", "becomes"), [(None, 0), (12, 12), (99, 30), (0, 0)])
def test_a_manual_high_watermark_on_opening(given: int | None, becomes: int) -> None:
    fs = SimulatedFileSystem()
    filled(fs).close()
    log = open_log(fs, high_watermark=given, manual_high_watermark=True)
    assert log.high_watermark == becomes
    log.append([rec()])
    assert log.high_watermark == becomes

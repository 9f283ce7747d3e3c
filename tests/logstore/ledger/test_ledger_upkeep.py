"""The ledger stays small and quick, whatever is written to it; readers in flight keep their files for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from logstore.clock import ManualClock
from logstore.ledger import CommitRequest, Ledger, RunRow, SegmentRow, table
from logstore.ledger.data_file import MERGED_BYTES_MAX, DataFile, files_to_merge
from logstore.ledger.delta_log import GRACE_MS

RequestOf = Callable[..., CommitRequest]
COMMITS = 10_000 if os.environ.get("DURAMEN_SOAK") == "1" else 800


def directory(path: Path) -> tuple[int, int]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("rows", "merged"),
    [
        ([], 0),
        ([1], 0),
        ([1, 1], 2),
        ([2, 1], 0),
        ([5, 2, 1, 1], 3),
        ([4, 2, 1, 1], 4),
        ([40, 20] + [1] * 20, 22),
        ([41, 20, *([1] * 20)], 22 - 1),
    ],
)
def test_files_are_merged_in_doubling_tiers(rows: list[int], merged: int) -> None:
    assert files_to_merge([DataFile(f"{index}", 10, count) for index, count in enumerate(rows)]) == merged


def test_a_large_file_is_left_alone() -> None:
    files = [DataFile("0", MERGED_BYTES_MAX, 1), DataFile("1", 10, 1), DataFile("2", 10, 1)]
    assert files_to_merge(files) == 2


@pytest.mark.timeout(900)
def test_the_ledger_stays_small_and_a_look_cheap(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    most_files = 0
    for number in range(COMMITS):
        ledger.commit(request_of(number))
        if number % 50 == 0:
            ledger.record_run(RunRow(f"run-{number}", "compaction"))
            ledger.replace_segments("id-orders", number % 8, [SegmentRow(0, number, 1, 1, 0)])
            most_files = max(most_files, directory(tmp_path / "ledger")[0])
    assert ledger.commits_table.upkeep_error is None
    files, size_bytes = directory(tmp_path / "ledger")
    assert max(files, most_files) < 300
    assert size_bytes < 30_000_000

    fresh = Ledger(tmp_path / "ledger")
    progress = fresh.last_batch("app")
    assert progress is not None
    assert progress.batch_id == COMMITS - 1
    # What a look costs: the commits behind the last checkpoint, and the files there are.
    log = tmp_path / "ledger" / "commits" / "_delta_log"
    checkpoint = max(int(path.name[:20]) for path in log.glob("*.checkpoint.parquet"))
    assert sum(int(path.name[:20]) > checkpoint for path in log.glob("*.json")) <= 40
    assert len(fresh.commits_table.files()) <= 40
    assert [row.sequence for row in fresh.commits_after("id-orders", 0)] == list(range(1, COMMITS + 1))


def test_superseded_files_stay_for_a_grace_period(tmp_path: Path, request_of: RequestOf) -> None:
    clock = ManualClock(time.time_ns() // 1_000_000)
    ledger = Ledger(tmp_path / "ledger", clock=clock)
    for number in range(19):
        ledger.commit(request_of(number))
    reader = DeltaTable(ledger.commits_table.path)
    ledger.maintain()
    assert len(ledger.commits_table.files()) == 1
    assert reader.to_pyarrow_table().num_rows == 19  # its nineteen files are superseded, and still there
    clock.advance(GRACE_MS + 60_000)
    ledger.maintain()
    names = os.listdir(ledger.commits_table.path)
    assert [name for name in names if name.endswith(".parquet")] == [ledger.commits_table.files()[0].name]
    assert len(os.listdir(Path(ledger.commits_table.path, "_delta_log"))) == 3  # commit, checkpoint, hint
    assert len(ledger.commits()) == 19


def test_a_long_idle_ledger_does_not_drop_a_readers_log_at_once(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for number in range(15):
        ledger.commit(request_of(number))
    log = Path(ledger.commits_table.path, "_delta_log")
    for file in log.iterdir():
        os.utime(file, (0, 0))  # written long ago
    ledger.maintain()
    assert len(list(log.glob("*.json"))) == 17
    assert len(ledger.commits()) == 15


@pytest.mark.parametrize("steps", ["blmla", "albblabablaablmblmla", "lambalmlaaalbmalml"])
def test_a_ledger_held_open_outlasts_the_upkeep_of_others(
    tmp_path: Path, request_of: RequestOf, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    """What a loaded table goes back to may be gone when it is asked: a process may be idle, or stopped, for long."""
    monkeypatch.setattr(table, "GRACE_MS", -1)
    ledgers = {"a": Ledger(tmp_path / "ledger"), "b": Ledger(tmp_path / "ledger")}
    ends = {"a": 0, "b": 0}
    for step in steps:
        if step == "m":
            ledgers["b"].maintain()
        elif step == "l":
            for app, end in ends.items():
                last = ledgers["a"].last_batch(app)
                assert (last.batch_id if last else None) == (end - 1 if end else None)
        else:
            ledgers[step].commit(request_of(ends[step], topic=step, app=step))
            ends[step] += 1

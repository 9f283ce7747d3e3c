"""A failed fsync is not believed the second time: commits are written again, checkpoints made again, before anything
depends on them.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from logstore.clock import ManualClock
from logstore.directory import unsynced
from logstore.errors import CommitUnknown, LedgerError
from logstore.files import OS_FILES
from logstore.ledger import CommitRequest, Ledger
from logstore.ledger.delta_log import GRACE_MS
from logstore.ledger.rows import COMMITS
from logstore.ledger.salvage import salvage

RequestOf = Callable[..., CommitRequest]
FAILURES = {
    "commit file": lambda kind, path: kind == "fsync" and path.endswith(".json"),
    "its directory": lambda kind, path: kind == "fsync_dir" and path.endswith("commits/_delta_log"),
    "checkpoint": lambda kind, path: kind == "fsync" and path.endswith(".checkpoint.parquet"),
    "hint": lambda kind, path: kind == "fsync" and path.endswith("_last_checkpoint"),
    "data file": lambda kind, path: kind == "fsync" and path.endswith(".parquet") and "_delta_log" not in path,
}


def fail_once(powered: Any, what: Callable[[str, str], bool]) -> list[str]:
    """Have the next such sync fail; returns where it did."""
    failed: list[str] = []

    def step(kind: str, path: str) -> None:
        if not failed and what(kind, path):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    powered.on_step = step
    return failed


def check_left(powered: Any, source: Path, target: Path, commits: int, seed: int) -> None:
    """Nothing that was acknowledged is missing, wherever the power goes now."""
    rng = random.Random(seed)
    for draw in range(4):
        left = target / f"{draw}"
        left.parent.mkdir(exist_ok=True)
        powered.leave(str(source), str(left), rng)
        survivor = Ledger(left / "ledger")
        assert survivor.sequence("id-orders") == commits
        rows = survivor.commits_after("id-orders", 0)
        assert [row.plan_id for row in rows] == [f"plan-{number}" for number in range(commits)]


@pytest.mark.parametrize("forgets", [False, True], ids=["same process", "another process"])
@pytest.mark.parametrize("what", ["commit file", "its directory"])
def test_a_commit_whose_sync_failed_is_written_again_before_it_is_believed(
    tmp_path: Path,
    powered: Any,
    request_of: RequestOf,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    forgets: bool,
    seed: int,
) -> None:
    source = tmp_path / "store"
    source.mkdir()
    ledger = Ledger(source / "ledger", fs=powered)
    for number in range(3):
        ledger.commit(request_of(number))
    log = source / "ledger/commits/_delta_log"
    failed = fail_once(powered, lambda kind, path: FAILURES[what](kind, path) and (log / f"{4:020d}.json").exists())
    with pytest.raises(CommitUnknown):
        ledger.commit(request_of(3))
    assert failed
    if forgets:
        monkeypatch.setattr(unsynced, "_REMEMBERED", set())
        ledger = Ledger(source / "ledger", fs=powered)
    assert ledger.resolve(request_of(3)) == 4
    check_left(powered, source, tmp_path / "resolved", 4, seed)
    ledger.commit(request_of(4))
    check_left(powered, source, tmp_path / "next", 5, seed)
    assert [name for name in os.listdir(source / "ledger") if "unsynced" in name] == []


def test_another_process_that_loses_the_sync_of_a_commit_keeps_its_writer_from_believing_it(
    tmp_path: Path, powered: Any, request_of: RequestOf, seed: int
) -> None:
    """The system tells one of them only."""
    source = tmp_path / "store"
    source.mkdir()
    writer, other = Ledger(source / "ledger", fs=powered), Ledger(source / "ledger", fs=powered)
    reached: list[str] = []

    def step(kind: str, path: str) -> None:
        if kind == "fsync" and path.endswith(f"{1:020d}.json") and len(reached) < 2:
            reached.append(path)
            if len(reached) == 1:
                with pytest.raises(OSError, match="Input/output"):
                    other.sequence("id-orders")
            else:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    powered.on_step = step
    with pytest.raises(CommitUnknown):
        writer.commit(request_of(0))
    assert writer.resolve(request_of(0)) == 1
    check_left(powered, source, tmp_path / "left", 1, seed)


@pytest.mark.parametrize("forgets", [False, True], ids=["same process", "another process"])
@pytest.mark.parametrize("what", ["checkpoint", "hint", "its directory", "data file"])
def test_commits_stay_until_a_checkpoint_was_synced_without_an_error(
    tmp_path: Path,
    powered: Any,
    request_of: RequestOf,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    forgets: bool,
    seed: int,
) -> None:
    source = tmp_path / "store"
    source.mkdir()
    clock = ManualClock(1_800_000_000_000)
    ledger = Ledger(source / "ledger", fs=powered, clock=clock)
    for number in range(10):
        ledger.commit(request_of(number))
    failed = fail_once(powered, FAILURES[what])
    with pytest.raises(OSError, match="Input/output"):
        ledger.commits_table.maintain()
    assert failed
    if forgets:
        monkeypatch.setattr(unsynced, "_REMEMBERED", set())
        ledger = Ledger(source / "ledger", fs=powered, clock=clock)
    clock.advance(GRACE_MS + 600_000)
    ledger.commits_table.maintain()
    clock.advance(GRACE_MS + 600_000)
    ledger.commits_table.maintain()
    assert len(list((source / "ledger/commits/_delta_log").glob("*.json"))) == 1
    check_left(powered, source, tmp_path / "left", 10, seed)


def test_a_checkpoint_that_a_killed_process_never_synced_justifies_no_deletion(
    tmp_path: Path, powered: Any, request_of: RequestOf, seed: int
) -> None:
    class Killed(BaseException):
        pass

    source = tmp_path / "store"
    source.mkdir()
    clock = ManualClock(1_800_000_000_000)
    ledger = Ledger(source / "ledger", fs=powered, clock=clock)
    for number in range(10):
        ledger.commit(request_of(number))

    def step(kind: str, path: str) -> None:
        if kind == "fsync" and path.endswith(".checkpoint.parquet"):
            raise Killed

    powered.on_step = step
    with pytest.raises(Killed):
        ledger.commits_table.maintain()
    powered.on_step = lambda kind, path: None
    clock.advance(GRACE_MS + 600_000)
    for _ in range(2):
        Ledger(source / "ledger", fs=powered, clock=clock).commits_table.maintain()
        clock.advance(GRACE_MS + 600_000)
    assert len(list((source / "ledger/commits/_delta_log").glob("*.json"))) == 1
    check_left(powered, source, tmp_path / "left", 10, seed)


def test_a_checkpoint_that_decodes_but_is_not_the_one_that_was_synced_is_damaged(
    tmp_path: Path, request_of: RequestOf
) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for number in range(5):
        ledger.commit(request_of(number))
    ledger.maintain()
    log = path / "commits" / "_delta_log"
    checkpoint = max(log.glob("*.checkpoint.parquet"))
    rows = pq.read_table(checkpoint)
    pq.write_table(rows.slice(0, rows.num_rows - 1), checkpoint)
    assert [each.what for each in salvage(OS_FILES, str(path / "commits"), COMMITS).damage] == [
        "a checkpoint is damaged"
    ]
    again = Ledger(path)  # the commits are still there
    assert again.sequence("id-orders") == 5
    assert len(list((path / "torn").iterdir())) == 1
    again.maintain()
    assert salvage(OS_FILES, str(path / "commits"), COMMITS).damage == []
    for file in log.glob("*.json"):
        if file.name[:20] < max(log.glob("*.checkpoint.parquet")).name[:20]:
            file.unlink()
    checkpoint = max(log.glob("*.checkpoint.parquet"))
    pq.write_table(rows.slice(0, rows.num_rows - 1), checkpoint)
    with pytest.raises(LedgerError, match=r"checkpoint.*damaged.*duramen recover"):
        Ledger(path)

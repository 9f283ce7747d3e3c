"""The ledger as its callers see it: commits, progress, voids, runs and segments."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.errors import CommitConflict, CommitUnknown, InvalidCommit, InvalidTopic, LedgerError
from logstore.ledger import CommitRequest, Ledger, RunRow, SegmentRow, TopicCommit

RequestOf = Callable[..., CommitRequest]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_a_new_ledger_knows_nobody(ledger: Ledger) -> None:
    assert ledger.last_batch("app") is None
    assert ledger.sequence("id-orders") == 0
    assert ledger.commits_after("id-orders", 0) == []
    assert ledger.find_plan("plan-0") == []
    assert ledger.commits() == []
    assert ledger.runs() == []
    assert ledger.segments("id-orders", 0) == []
    ledger.maintain()


def test_a_commit_is_read_back_whole_by_another_ledger(tmp_path: Path, request_of: RequestOf) -> None:
    clock = ManualClock(1_700_000_000_000)
    first = dataclasses.replace(
        request_of(0),
        topics=(
            TopicCommit("id-a", "a", 0, (5, 0, 7), (9, 0, 8), records=5, size_bytes=300),
            TopicCommit("id-b", "b", 0, (0,), (1,), records=1, size_bytes=70),
        ),
        timings_ms={"encode": 12, "plan": 0},
        workers=("w1", "w2"),
    )
    version = Ledger(tmp_path / "ledger", clock=clock).commit(first)
    other = Ledger(tmp_path / "ledger")
    rows = other.find_plan("plan-0")
    assert rows == other.commits()
    assert [(row.topic_id, row.topic, row.sequence, row.void) for row in rows] == [
        ("id-a", "a", 1, False),
        ("id-b", "b", 1, False),
    ]
    row = rows[0]
    assert (row.base_offsets, row.end_offsets, row.records, row.size_bytes) == ((5, 0, 7), (9, 0, 8), 5, 300)
    assert (row.app_id, row.batch_id, row.query_id, row.plan_id) == ("app", 0, "query-1", "plan-0")
    assert (row.timings_ms, row.workers, row.engine) == ({"encode": 12, "plan": 0}, ("w1", "w2"), "test")
    assert (row.version, row.committed_ms) == (version, clock.now_ms())
    assert other.sequence("id-a") == other.sequence("id-b") == 1
    progress = other.last_batch("app")
    assert progress is not None
    assert (progress.batch_id, progress.query_id, progress.plan_id) == (0, "query-1", "plan-0")


def test_what_the_caller_saw_must_still_hold(ledger: Ledger, request_of: RequestOf) -> None:
    ledger.commit(request_of(0))
    before = ledger.commits()
    with pytest.raises(CommitConflict, match="batch 0, expected None"):
        ledger.commit(dataclasses.replace(request_of(0, topic="other", plan="late"), batch_id=1))
    with pytest.raises(CommitConflict, match="sequence 1, expected 0"):
        ledger.commit(request_of(0, app=None, plan="late"))
    with pytest.raises(CommitConflict, match="sequence 1, expected 2"):
        ledger.commit(request_of(2, app=None, plan="early"))
    assert ledger.commits() == before
    assert sorted(os.listdir(ledger.commits_table.path)) == [ledger.commits_table.files()[0].name, "_delta_log"]


def test_one_conflicting_topic_of_several_stops_all(ledger: Ledger, request_of: RequestOf) -> None:
    ledger.commit(request_of(0, topic="a", app=None))
    both = (request_of(0, topic="a").topics[0], request_of(0, topic="b").topics[0])
    with pytest.raises(CommitConflict):
        ledger.commit(dataclasses.replace(request_of(0, plan="both"), topics=both))
    assert ledger.sequence("id-b") == 0
    assert ledger.last_batch("app") is None


def test_settle_gets_every_row_above_the_applied_sequence_in_order(ledger: Ledger, request_of: RequestOf) -> None:
    for number in range(45):  # through two rounds of upkeep
        ledger.commit(request_of(number))
        ledger.commit(request_of(number, topic="other", app=None))
    assert ledger.commits_table.upkeep_error is None
    assert [row.sequence for row in ledger.commits_after("id-orders", 0)] == list(range(1, 46))
    assert [row.plan_id for row in ledger.commits_after("id-orders", 43)] == ["plan-43", "plan-44"]
    assert ledger.commits_after("id-orders", 45) == []
    with pytest.raises(LedgerError, match="46 of topic id-orders was applied, but the ledger ends at 45"):
        ledger.commits_after("id-orders", 46)


def test_batch_ids_may_go_back_when_the_caller_says_so(ledger: Ledger, request_of: RequestOf) -> None:
    for number in range(3):
        ledger.commit(request_of(number))
    adopted = dataclasses.replace(request_of(3), batch_id=1, query_id="query-2", expected_batch_id=2)
    ledger.commit(adopted)
    progress = ledger.last_batch("app")
    assert progress is not None
    assert (progress.batch_id, progress.query_id, progress.plan_id) == (1, "query-2", "plan-3")


def test_an_unknown_outcome_is_settled_by_a_void_row(ledger: Ledger, request_of: RequestOf) -> None:
    ledger.commit(request_of(0))
    assert ledger.resolve(request_of(1)) is None
    assert [(row.sequence, row.void, row.records, row.end_offsets) for row in ledger.commits_after("id-orders", 1)] == [
        (2, True, 0, (1, 0))
    ]
    with pytest.raises(CommitConflict):  # the commit that was on its way arrives late
        ledger.commit(request_of(1))
    progress = ledger.last_batch("app")
    assert progress is not None
    assert progress.batch_id == 0
    assert ledger.resolve(request_of(1)) is None  # asked again: the same answer, no second void
    assert ledger.sequence("id-orders") == 2
    assert ledger.resolve(request_of(0)) == 1
    assert ledger.resolve(request_of(0, plan="never")) is None  # its sequence went to somebody else


def test_a_commit_that_cannot_be_synced_is_unknown_and_then_found(
    tmp_path: Path, powered: Any, request_of: RequestOf
) -> None:
    ledger = Ledger(tmp_path / "ledger", fs=powered)

    def fail(kind: str, path: str) -> None:
        if kind == "fsync" and path.endswith("1.json"):
            raise OSError(errno.EIO, "input/output error", path)

    powered.on_step = fail
    with pytest.raises(CommitUnknown):
        ledger.commit(request_of(0))
    powered.on_step = lambda kind, path: None
    assert ledger.resolve(request_of(0)) == 1


def test_a_full_disk_before_the_commit_changes_nothing(tmp_path: Path, powered: Any, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger", fs=powered)

    def full(kind: str, path: str) -> None:
        if kind == "pwrite":
            raise OSError(errno.ENOSPC, "no space left on device", path)

    powered.on_step = full
    with pytest.raises(OSError, match="no space"):
        ledger.commit(request_of(0))
    powered.on_step = lambda kind, path: None
    assert os.listdir(ledger.commits_table.path) == ["_delta_log"]
    assert ledger.commit(request_of(0)) == 1


def test_upkeep_that_fails_does_not_fail_the_commit(tmp_path: Path, powered: Any, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger", fs=powered)

    def fail(kind: str, path: str) -> None:
        if kind == "fsync" and "checkpoint" in path:
            raise OSError(errno.EIO, "input/output error", path)

    powered.on_step = fail
    for number in range(25):
        ledger.commit(request_of(number))
    assert isinstance(ledger.commits_table.upkeep_error, OSError)
    powered.on_step = lambda kind, path: None
    ledger.maintain()
    assert len(Ledger(tmp_path / "ledger").commits()) == 25


@pytest.mark.parametrize(
    "change",
    [
        {"plan_id": ""},
        {"plan_id": "x" * 5000},
        {"plan_id": "\ud800"},
        {"app_id": "\udfff"},
        {"app_id": None},
        {"batch_id": -1},
        {"batch_id": 1 << 63},
        {"topics": (), "app_id": None, "batch_id": None},
        {"topics": (TopicCommit("id", "t", 0, (0,), (1,)),) * 2},
        {"topics": (TopicCommit("id", "t", -1, (0,), (1,)),)},
        {"topics": (TopicCommit("id", "t", 0, (0, 1), (1,)),)},
        {"topics": (TopicCommit("id", "t", 0, (2,), (1,)),)},
        {"topics": (TopicCommit("id", "t", 0, (0,), (1 << 63,)),)},
        {"topics": (TopicCommit("", "t", 0, (0,), (1,)),)},
        {"topics": (TopicCommit("id", "../t", 0, (0,), (1,)),)},
        {"topics": (TopicCommit("id", "t", 0, (0,), (1,), records=-1),)},
        {"workers": ("",)},
        {"timings_ms": {"encode": -1}},
    ],
)
def test_a_request_that_cannot_be_right_is_refused(
    ledger: Ledger, request_of: RequestOf, change: dict[str, Any]
) -> None:
    with pytest.raises((InvalidCommit, InvalidTopic)):
        ledger.commit(dataclasses.replace(request_of(0), **change))
    assert os.listdir(ledger.commits_table.path) == ["_delta_log"]


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return Ledger(tmp_path_factory.mktemp("hostile") / 'a b%#?"ü' / "ledger")


_text = st.text(min_size=1, max_size=60).filter(lambda text: not any(0xD800 <= ord(char) < 0xE000 for char in text))


@settings(max_examples=200)
@given(
    app=st.one_of(_text, st.sampled_from(["topic:id-x", "app:", "'", '"}\n{"txn"', "a\0b", "\x85\u2028\x0b"])),
    query=_text,
)
def test_any_text_comes_back_as_it_was_and_meets_nobody_else(long_lived: Ledger, app: str, query: str) -> None:
    sequence = long_lived.sequence("id-x")
    progress = long_lived.last_batch(app)
    batch_id = 0 if progress is None else progress.batch_id + 1
    request = CommitRequest(
        plan_id=f"{query}/{sequence}",
        topics=(TopicCommit("id-x", "x", sequence, (0,), (1,)),),
        app_id=app,
        batch_id=batch_id,
        query_id=query,
        expected_batch_id=None if progress is None else progress.batch_id,
        workers=(query,),
        timings_ms={query: 1},
    )
    long_lived.commit(request)
    assert long_lived.sequence("id-x") == sequence + 1
    progress = long_lived.last_batch(app)
    assert progress is not None
    assert (progress.batch_id, progress.query_id, progress.plan_id) == (batch_id, query, request.plan_id)
    assert long_lived.commits_after("id-x", sequence)[0].workers == (query,)


def test_several_threads_share_a_ledger(ledger: Ledger, request_of: RequestOf) -> None:
    failures: list[BaseException] = []

    def work(topic: str) -> None:
        try:
            for number in range(15):
                ledger.commit(request_of(number, topic=topic, app=topic))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [len(ledger.commits_after(f"id-t{index}", 0)) for index in range(3)] == [15] * 3


def test_the_newest_row_of_a_run_is_its_state(ledger: Ledger) -> None:
    started = RunRow("run-1", "compaction", "id-a", "a", 3, engine="spark", started_ms=10, result="running")
    ended = dataclasses.replace(
        started,
        ended_ms=20,
        result="done",
        before_bytes=1000,
        after_bytes=10,
        removed={"superseded": 7, "tombstone": 1},
        map_fill=0.25,
        seconds=0.01,
        workers=("w1",),
        airflow_run_id="scheduled__1",
        details='{"groups": 2}',
    )
    ledger.record_run(started)
    ledger.record_run(RunRow("run-2", "retention"))
    for _ in range(12):  # through an upkeep
        ledger.record_run(ended)
    assert ledger.runs_table.upkeep_error is None
    assert ledger.runs() == [ended, RunRow("run-2", "retention")]
    assert len(ledger.runs(latest=False)) == 14
    assert ledger.runs(latest=False)[0] == started
    with pytest.raises(InvalidCommit):
        ledger.record_run(RunRow("", "compaction"))


def test_segment_statistics_are_replaced_a_partition_at_a_time(ledger: Ledger) -> None:
    def rows(count: int, run_id: str | None = None) -> list[SegmentRow]:
        return [SegmentRow(base * 100, 5000, 100, 40, 3, run_id) for base in range(count)]

    for partition in range(12):
        ledger.replace_segments("id-a", partition, rows(partition + 1))
    ledger.replace_segments("id-b", 3, rows(2))
    ledger.replace_segments("id-a", 3, rows(1, "run-9"))
    ledger.replace_segments("id-a", 4, [])
    assert ledger.segments_table.upkeep_error is None
    assert ledger.segments("id-a", 3) == rows(1, "run-9")
    assert ledger.segments("id-a", 4) == []
    assert ledger.segments("id-a", 11) == rows(12)
    assert ledger.segments("id-b", 3) == rows(2)


def test_the_tables_are_plain_delta_tables(ledger: Ledger, request_of: RequestOf) -> None:
    for number in range(25):
        ledger.commit(request_of(number))
    table = DeltaTable(ledger.commits_table.path)
    assert table.protocol().min_reader_version == 1
    rows = table.to_pyarrow_table().sort_by("sequence").to_pylist()
    assert [row["sequence"] for row in rows] == list(range(1, 26))
    assert table.transaction_version("app:app") == 24


@pytest.mark.parametrize("name", ["a%20b", "a\\b", "a\nb"])
def test_a_path_delta_rs_would_take_for_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LedgerError, match="cannot open a path"):
        Ledger(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_foreign_table_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    os.rename(ledger.runs_table.path, tmp_path / "runs")
    os.rename(ledger.commits_table.path, tmp_path / "commits")
    os.rename(tmp_path / "runs", ledger.commits_table.path)
    with pytest.raises(LedgerError, match="other columns"):
        Ledger(ledger.path)

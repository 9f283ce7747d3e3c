"""A pass is planned once: under its lock the plan is used as it is, or made again where the partition changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compaction_job.job as job
from compaction_job import compact
from compaction_job.job import Progress
from logstore.clock import ManualClock
from logstore.compaction import passes
from logstore.compaction.planning import PartitionPlan, PlanOptions, plan_partition
from logstore.ledger.rows import DONE, SKIPPED
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.retention import delete_records

NOW_MS = 1_700_000_000_000
SETTINGS = {"cleanup.policy": "compact", "segment.bytes": 2000, "file.delete.delay.ms": 0}


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    store = LogStore(tmp_path / "store", create=True, clock=ManualClock(NOW_MS))
    store.create_topic("t", partitions=2, configs=SETTINGS)
    fill(store, 1)
    return store


def fill(store: LogStore, seed: int) -> None:
    rng = random.Random(seed)
    for turn in range(20):
        store.append("t", [Record(b"k%d" % rng.randrange(9), b"%d-%d" % (seed, turn) * 9, NOW_MS) for _ in range(20)])


def state_of(store: LogStore) -> dict[bytes | None, bytes | None]:
    found = {}
    for number in range(2):
        reader = store.reader(store.topic("t"), number)
        found.update({each.key: each.value for each in reader.records(reader.log_start_offset())})
    return found


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which partitions were planned, as often as they were."""
    numbers: list[int] = []

    def noting(*given: Any, **named: Any) -> PartitionPlan:
        numbers.append(given[2])
        return plan_partition(*given, **named)

    monkeypatch.setattr(job, "plan_partition", noting)
    monkeypatch.setattr(passes, "plan_partition", noting)
    return numbers


def test_a_partition_that_did_not_change_is_planned_once(store: LogStore, planned: list[int]) -> None:
    report = compact(store, force=True)
    assert [run.result for run in report.runs] == [DONE, DONE]
    assert sorted(planned) == [0, 1]


def test_records_that_come_meanwhile_need_no_second_plan(store: LogStore, planned: list[int]) -> None:
    def append(_plans: object) -> None:
        store.append("t", [Record(b"k0", b"new", NOW_MS)])

    report = compact(store, force=True, progress=Progress(planned=append))
    assert len(report.done) == 2
    assert sorted(planned) == [0, 1]
    assert state_of(store)[b"k0"] == b"new"


def rolled(store: LogStore) -> None:
    fill(store, 2)


def deleted(store: LogStore) -> None:
    for number in range(2):
        start = store.partition_state(store.topic("t"), number).segments[2].base_offset
        delete_records(store, store.topic("t"), number, before_offset=start)


@pytest.mark.parametrize("change", [rolled, deleted])
def test_a_partition_that_changed_is_planned_again(
    store: LogStore, planned: list[int], change: Callable[[LogStore], None]
) -> None:
    report = compact(store, force=True, progress=Progress(planned=lambda _plans: change(store)))
    assert len(report.done) == 2
    assert sorted(planned) == [0, 0, 1, 1]
    for before, run in zip(report.plans, sorted(report.runs, key=lambda run: run.plan.partition), strict=False):
        assert run.report is not None
        state = store.partition_state(store.topic("t"), run.plan.partition)
        assert run.report.first_dirty_offset == max(before.cleanable.first_dirty_offset, state.log_start_offset)
        assert state.first_dirty_offset == run.report.end_offset
    assert {key for key in state_of(store) if key is not None} <= {b"k%d" % number for number in range(9)}


def test_what_is_no_longer_due_under_the_lock_is_left_alone(store: LogStore, planned: list[int]) -> None:
    """Another run was faster, between this one's plan and its pass."""

    def overtaken(_plans: object) -> None:
        assert len(compact(store, force=True, roll_active=True).done) == 2

    report = compact(store, progress=Progress(planned=overtaken))
    assert [run.result for run in report.runs] == [SKIPPED, SKIPPED]


def test_settings_that_change_meanwhile_count(store: LogStore, planned: list[int]) -> None:
    def paused(_plans: object) -> None:
        store.alter_topic("t", configs={"duramen.compaction.paused": "true"})

    report = compact(store, force=True, progress=Progress(planned=paused))
    assert [run.reason.split(";")[0] for run in report.runs] == ["paused", "paused"]
    assert sorted(planned) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("threads", "job_bytes", "free", "groups", "largest", "expected"),
    [
        (1, 0, None, 10, 100, (2, 8 << 20)),  # one is written while another is swapped in
        (4, 0, None, 3, 100, (3, 8 << 20)),  # never more than there are
        (1, 1000, None, 50, 100, (20, 8 << 20)),  # ten in a row
        (4, 0, 250, 10, 100, (2, 0)),  # what the disk has room for
        (4, 0, 10, 10, 100, (1, 0)),  # one at least: the pass says that it has no room
        (4, 0, 10, 0, 0, (1, 0)),
    ],
)
def test_groups_at_once(
    store: LogStore,
    threads: int,
    job_bytes: int,
    free: int | None,
    groups: int,
    largest: int,
    expected: tuple[int, int],
) -> None:
    from dataclasses import replace

    found = plan_partition(store, store.topic("t"), 0, PlanOptions(NOW_MS))
    options = PlanOptions(NOW_MS, threads=threads, job_bytes=job_bytes, free_bytes=free)
    sized = replace(found, groups=groups, largest_group_bytes=largest).with_room(options)
    assert (sized.groups_at_once, sized.swap_bytes) == expected

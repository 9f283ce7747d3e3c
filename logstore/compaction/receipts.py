"""What is written down of a pass: the row in the ledger, and the document that commands print."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum

from logstore.cleaner.work import PassReport
from logstore.compaction.failures import KIND
from logstore.compaction.planning import PartitionPlan
from logstore.errors import CleaningAborted, DuramenError
from logstore.ledger import RunRow
from logstore.ledger.rows import ABANDONED, DONE, FAILED, RUNNING
from logstore.topic import TopicPartition

#: characters of the reason of a failure
REASON_MAX = 4000


class Skip(Enum):
    """Why a partition had no pass."""

    NOT_DUE = "not_due"
    #: another process is at work on it
    TAKEN = "taken"
    #: the run was stopped
    STOPPING = "stopping"
    DRY_RUN = "dry_run"
    #: by an earlier job of the same Airflow run
    DONE_BEFORE = "done_before"


@dataclass(slots=True)
class Run:
    """One pass, or why there was none."""

    plan: PartitionPlan
    result: str
    reason: str = ""
    run_id: str = ""
    report: PassReport | None = None
    rolled: bool = False
    error: DuramenError | None = None
    #: with the result SKIPPED
    skip: Skip | None = None

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.plan.topic, self.plan.partition)


def plan_details(plan: PartitionPlan) -> dict[str, object]:
    found = plan.cleanable
    return {
        "first_dirty_offset": found.first_dirty_offset,
        "first_uncleanable_offset": found.first_uncleanable_offset,
        "dirty_ratio": round(found.ratio, 6),
        "clean_bytes": found.clean_bytes,
        "cleanable_bytes": found.cleanable_bytes,
        "late_ms": found.late_ms,
        "groups": plan.groups,
        "read_bytes": plan.read_bytes,
        "extra_bytes": plan.extra_bytes,
    }


def begun_row(
    plan: PartitionPlan, run_id: str, *, engine: str, airflow_run_id: str | None = None, started_ms: int
) -> RunRow:
    """Of a pass that begins."""
    return RunRow(
        run_id=run_id,
        kind=KIND,
        topic_id=plan.topic_id,
        topic=plan.topic,
        partition=plan.partition,
        engine=engine,
        started_ms=started_ms,
        result=RUNNING,
        reason=plan.why,
        airflow_run_id=airflow_run_id,
        details=json.dumps(plan_details(plan)),
    )


def failed_row(row: RunRow, error: DuramenError, seconds: float, ended_ms: int) -> RunRow:
    """Of a pass that failed, or was told to stop."""
    result = ABANDONED if isinstance(error, CleaningAborted) else FAILED
    return replace(row, ended_ms=ended_ms, result=result, reason=str(error)[:REASON_MAX], seconds=seconds)


def finished_row(row: RunRow, report: PassReport, plan: PartitionPlan, ended_ms: int) -> RunRow:
    return replace(
        row,
        ended_ms=ended_ms,
        result=DONE,
        before_bytes=report.before_bytes,
        after_bytes=report.after_bytes,
        removed=dict(report.removed),
        map_fill=report.map_keys / report.map_keys_max if report.map_keys_max else 0.0,
        seconds=report.seconds,
        workers=report.workers,
        details=json.dumps(plan_details(plan) | report_details(report)),
    )


def report_details(report: PassReport) -> dict[str, object]:
    return {
        "end_offset": report.end_offset,
        "groups": report.groups,
        "groups_changed": report.groups_changed,
        "segments_before": report.segments_before,
        "segments_after": report.segments_after,
        "read_bytes": report.read_bytes,
        "written_bytes": report.written_bytes,
        "records": report.counts.records,
        "tombstones": report.counts.tombstones,
        "map_keys": report.map_keys,
        "map_full": report.map_full,
        "map_buffer_wanted": report.map_buffer_wanted,
        "map_threads_wanted": report.map_threads_wanted,
        "index_seconds": round(report.index_seconds, 3),
        "next_horizon_ms": report.next_horizon_ms,
    }


def describe_run(run: Run) -> dict[str, object]:
    """A run as JSON: the contract of `compact` and of the job's report."""
    answer: dict[str, object] = {
        "topic": run.plan.topic,
        "partition": run.plan.partition,
        "result": run.result,
        "reason": run.reason,
        "skip": None if run.skip is None else run.skip.value,
        "run_id": run.run_id or None,
        "rolled": run.rolled,
        "plan": plan_details(run.plan),
    }
    if run.report is not None:
        report = run.report
        answer["receipt"] = {
            "before_bytes": report.before_bytes,
            "after_bytes": report.after_bytes,
            "removed": dict(report.removed),
            "map_fill": report.map_keys / report.map_keys_max if report.map_keys_max else 0.0,
            "seconds": round(report.seconds, 3),
            "workers": list(report.workers),
        } | report_details(report)
    return answer

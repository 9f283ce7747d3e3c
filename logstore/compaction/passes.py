"""One pass over one partition, under its locks and with its receipt in the ledger."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from logstore.cleaner.cleaner import Engine, run_pass
from logstore.cleaner.filter import LastRecord
from logstore.cleaner.transactions import find_transactions
from logstore.cleaner.work import Cleaned, PassReport
from logstore.clock import ManualClock
from logstore.commit.writing import writing
from logstore.compaction.budget import Budget, map_advice
from logstore.compaction.planning import KIND, PartitionPlan, SetAside, _work, plan_partition
from logstore.compaction.receipts import Run, Skip, finished_row, plan_details
from logstore.compaction.run_folders import remove_run_folder, run_folder
from logstore.compaction.segment_counts import SegmentCounts
from logstore.directory.state import read_state
from logstore.directory.swap import finish_swap
from logstore.errors import CleaningAborted, DiskFull, DuramenError, LockHeld, RetriableError, is_disk_full
from logstore.ledger import Ledger, RunRow
from logstore.ledger.rows import ABANDONED, DONE, FAILED, RUNNING, SKIPPED
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


@dataclass(slots=True)
class Context:
    """What all passes of a run share."""

    store: OpenStore
    ledger: Ledger
    engine: Callable[[PartitionPlan], Engine]
    engine_name: str
    now_ms: int
    budget: Budget
    run_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    force: bool = False
    roll_active: bool = False
    threads: int = 1
    #: whether several threads or tasks work at one pass, where its log allows it
    in_parallel: bool = False
    job_bytes: int = 0
    airflow_run_id: str | None = None
    #: where the counts of segments go; each pass writes its own without
    counts: SegmentCounts | None = None
    failures: Mapping[tuple[str, int], SetAside] = field(default_factory=dict)
    stopping: Callable[[], bool] = lambda: False
    started: Callable[[PartitionPlan], None] = lambda _: None
    swapped: Callable[[PartitionPlan, Cleaned], None] = lambda _plan, _group: None


def compact_partition(context: Context, topic: Topic, number: int) -> Run:
    """One pass over one partition, if it is due; never raises what is the partition's own fault, but records it."""
    store = context.store
    what = f"compact {topic.name}-{number}"
    try:
        with store.locks.maintenance(topic.id, number, what=what, wait_ms=0):
            store.check_exists(topic)
            return _compact_locked(context, topic, number, what)
    except LockHeld as error:
        why = f"another process is at work on it: {error.what}"
        return Run(_plan(context, topic, number), SKIPPED, why, skip=Skip.TAKEN)


def _plan(context: Context, topic: Topic, number: int) -> PartitionPlan:
    return plan_partition(
        context.store,
        topic,
        number,
        now_ms=context.now_ms,
        force=context.force,
        failures={} if context.force else context.failures,
        threads=context.threads,
        job_bytes=context.job_bytes,
        free_bytes=context.store.free_bytes(),
    )


def _compact_locked(context: Context, topic: Topic, number: int, what: str) -> Run:
    store = context.store
    with store.locks.partition(topic.id, number, what=what):
        finish_swap_of(store, topic, number)
    plan = _plan(context, topic, number)
    rolled = False
    if plan.compacted and not plan.paused and plan.set_aside is None and (plan.rolls_active or context.roll_active):
        rolled = roll(store, topic, number, what=what)
        plan = _plan(context, topic, number)
    if plan.cleanable.due is None or not plan.is_due:
        return Run(plan, SKIPPED, plan.why, rolled=rolled, skip=Skip.NOT_DUE)
    if context.stopping():
        return Run(plan, SKIPPED, "the run was told to stop", rolled=rolled, skip=Skip.STOPPING)
    run_id = f"{context.run_name}-{topic.name}-{number}"
    context.started(plan)
    row = RunRow(
        run_id=run_id,
        kind=KIND,
        topic_id=topic.id,
        topic=topic.name,
        partition=number,
        engine=context.engine_name,
        started_ms=store.clock.now_ms(),
        result=RUNNING,
        reason=plan.why,
        airflow_run_id=context.airflow_run_id,
        details=json.dumps(plan_details(plan)),
    )
    context.ledger.record_run(row)
    began = time.monotonic()
    try:
        report = _pass(context, topic, number, plan, what)
    except (DuramenError, OSError) as error:
        failed = error if isinstance(error, DuramenError) else _as_ours(error)
        stopped = isinstance(failed, CleaningAborted)
        context.ledger.record_run(
            replace(
                row,
                ended_ms=store.clock.now_ms(),
                result=ABANDONED if stopped else FAILED,
                reason=str(failed)[:4000],
                seconds=time.monotonic() - began,
            )
        )
        return Run(plan, ABANDONED if stopped else FAILED, str(failed), run_id, rolled=rolled, error=failed)
    context.ledger.record_run(finished_row(row, report, plan, store.clock.now_ms()))
    (context.counts or SegmentCounts(context.ledger)).add(store, topic, number, report, run_id)
    return Run(plan, DONE, plan.why, run_id, report, rolled)


def _as_ours(error: OSError) -> DuramenError:
    if is_disk_full(error):
        return DiskFull(
            f"no space left: {error.strerror}",
            file=error.filename,
            hint="The old segments stand as they were; make room and run it again",
        )
    return RetriableError(f"{type(error).__name__}: {error}", file=error.filename)


def _pass(context: Context, topic: Topic, number: int, plan: PartitionPlan, what: str) -> PassReport:
    store = context.store
    free = store.free_bytes()
    if free is not None and plan.extra_bytes > free:
        raise DiskFull(
            f"compacting {plan.name} needs {plan.extra_bytes} bytes, {free} are free",
            partition=topic.partition(number),
            hint="Nothing was touched; make room, or lower segment.bytes",
        )
    config = store.log_config(topic)
    producers: Mapping[int, LastRecord] = {}
    if store.partition_state(topic, number).producers:
        producers = producers_of(store, topic, number, context.now_ms, what)
    state = store.partition_state(topic, number)
    work = _work(store, topic, number, state, config, plan.cleanable, context.now_ms, context.budget, producers)
    folder, owner = run_folder(store, topic.partition(number), what)
    try:
        if work.has_transactions and context.in_parallel:
            work = replace(work, has_transactions=find_transactions(store.fs, work, stopping=context.stopping))

        def swapped(done: Cleaned) -> None:
            context.swapped(plan, done)
            if context.stopping():
                raise CleaningAborted("the run was told to stop", partition=topic.partition(number))

        report = run_pass(
            store.fs,
            work,
            engine=context.engine(plan),
            state_path=store.layout.partition_state(topic.id, number),
            folder=folder,
            locked=lambda: store.locks.partition(topic.id, number, what=what),
            swapped=swapped,
            swap_bytes=plan.swap_bytes,
        )
        if report.map_buffer_wanted is not None:
            advice = map_advice(report.map_buffer_wanted, context.budget)
            report.map_buffer_wanted, report.map_threads_wanted = advice.buffer_bytes, advice.threads
        return report
    finally:
        remove_run_folder(folder)
        owner.release()


def finish_swap_of(store: OpenStore, topic: Topic, number: int) -> None:
    """Finish a replacement that a killed process left; the caller holds the partition lock."""
    path = store.layout.partition_state(topic.id, number)
    state = read_state(store.fs, path, limits=store.limits)
    if state is not None and state.swap is not None:
        finish_swap(store.fs, store.layout.partition(topic.partition(number)), path, state)


def roll(store: OpenStore, topic: Topic, number: int, *, what: str) -> bool:
    """Close the active segment, so that it can be compacted; False when it is empty."""
    with writing(store, topic, number, what=what) as log:
        before = len(log.segments)
        log.roll()
        return len(log.segments) > before


def producers_of(store: OpenStore, topic: Topic, number: int, now_ms: int, what: str) -> dict[int, LastRecord]:
    """Last records of the producers that are still known; opens the log, as only that tells."""
    with writing(store, topic, number, what=what, clock=ManualClock(now_ms)) as log:
        return {producer: LastRecord(*last) for producer, last in log.last_records.items()}

"""One pass over one partition, under its locks and with its receipt in the ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from logstore.cleaner.cleaner import run_pass
from logstore.cleaner.filter import LastRecord
from logstore.cleaner.transactions import find_transactions
from logstore.cleaner.work import Cleaned, PassReport, PassWork
from logstore.clock import ManualClock
from logstore.commit.writing import writing
from logstore.compaction.budget import Budget, map_advice, with_budget
from logstore.compaction.maintenance import Context
from logstore.compaction.partition_view import PartitionView
from logstore.compaction.planning import PartitionPlan, plan_partition
from logstore.compaction.receipts import Run, Skip, begun_row, failed_row, finished_row
from logstore.compaction.run_folders import remove_run_folder, run_folder
from logstore.compaction.segment_counts import SegmentCounts
from logstore.directory.state import read_state
from logstore.directory.swap import finish_swap
from logstore.errors import CleaningAborted, DiskFull, DuramenError, LockHeld, RetriableError, is_disk_full
from logstore.ledger import Ledger
from logstore.ledger.rows import DONE, SKIPPED
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class PassRoom:
    """Where a pass works: the store, its ledger, and where the counts of segments go."""

    store: OpenStore
    ledger: Ledger
    counts: SegmentCounts


def compact_partition(room: PassRoom, context: Context, plan: PartitionPlan) -> Run:
    """One pass over one partition, if it is due; errors of the partition itself are recorded, not raised.

    The plan was made without a lock. Under the lock it is used as it is, unless the log or its settings changed.
    """
    store = room.store
    topic = store.topic(plan.topic)
    what = f"compact {plan.name}"
    try:
        with store.locks.maintenance(topic.id, plan.partition, what=what, wait_ms=0):
            store.check_exists(topic)
            return _compact_locked(room, context, topic, plan)
    except LockHeld as error:
        why = f"another process is at work on it: {error.what}"
        return Run(plan, SKIPPED, why, skip=Skip.TAKEN)


def _current(store: OpenStore, context: Context, topic: Topic, plan: PartitionPlan) -> PartitionPlan:
    """The plan, made again where it no longer holds; with the room there is on the disk now."""
    options = replace(context.planning, free_bytes=store.free_bytes())
    if plan.holds(topic, PartitionView.of(store, topic, plan.partition)):
        return plan.with_room(options)
    return plan_partition(store, topic, plan.partition, options)


def _compact_locked(room: PassRoom, context: Context, topic: Topic, plan: PartitionPlan) -> Run:
    store, number, what = room.store, plan.partition, f"compact {plan.name}"
    with store.locks.partition(topic.id, number, what=what):
        finish_swap_of(store, topic, number)
    plan = _current(store, context, topic, plan)
    rolled = False
    if plan.compacted and not plan.paused and plan.set_aside is None and (plan.rolls_active or context.roll_active):
        rolled = roll(store, topic, number, what=what)
        plan = _current(store, context, topic, plan)
    if plan.cleanable.due is None or not plan.is_due:
        return Run(plan, SKIPPED, plan.why, rolled=rolled, skip=Skip.NOT_DUE)
    if context.stopping():
        return Run(plan, SKIPPED, "the run was stopped", rolled=rolled, skip=Skip.STOPPING)
    run_id = f"{context.run_name}-{topic.name}-{number}"
    context.started(plan)
    row = begun_row(
        plan,
        run_id,
        engine=context.workers.name,
        airflow_run_id=context.airflow_run_id,
        started_ms=store.clock.now_ms(),
    )
    room.ledger.record_run(row)
    began = time.monotonic()
    try:
        report = _pass(store, context, topic, plan)
    except (DuramenError, OSError) as error:
        failed = error if isinstance(error, DuramenError) else as_ours(error)
        ended = failed_row(row, failed, time.monotonic() - began, store.clock.now_ms())
        room.ledger.record_run(ended)
        return Run(plan, ended.result, str(failed), run_id, rolled=rolled, error=failed)
    room.ledger.record_run(finished_row(row, report, plan, store.clock.now_ms()))
    room.counts.add(store, topic, number, report, run_id)
    return Run(plan, DONE, plan.why, run_id, report, rolled)


def as_ours(error: OSError) -> DuramenError:
    if is_disk_full(error):
        return DiskFull(
            f"no space left: {error.strerror}",
            file=error.filename,
            hint="The old segments stand as they were; make room and run it again",
        )
    return RetriableError(f"{type(error).__name__}: {error}", file=error.filename)


def _work(store: OpenStore, context: Context, topic: Topic, plan: PartitionPlan) -> PassWork:
    """The planned work with its share of the budget and its producers' last records."""
    number, now_ms = plan.partition, context.planning.now_ms
    producers: Mapping[int, LastRecord] = {}
    if store.partition_state(topic, number).producers:
        producers = producers_of(store, topic, number, now_ms, f"compact {plan.name}")
    view, work = PartitionView.of(store, topic, number), plan.work
    if work is None or not plan.holds(topic, view):  # opening the log may have repaired it
        work = view.work(plan.cleanable, now_ms=now_ms, budget=context.budget)
    return replace(with_budget(work, context.budget), last_records=producers)


def _pass(store: OpenStore, context: Context, topic: Topic, plan: PartitionPlan) -> PassReport:
    number, what = plan.partition, f"compact {plan.name}"
    free = store.free_bytes()
    if free is not None and plan.extra_bytes > free:
        raise DiskFull(
            f"compacting {plan.name} needs {plan.extra_bytes} bytes, {free} are free",
            partition=topic.partition(number),
            hint="Nothing was touched; make room, or lower segment.bytes",
        )
    work = _work(store, context, topic, plan)
    folder, owner = run_folder(store, topic.partition(number), what)
    try:
        if work.has_transactions and context.in_parallel:
            work = replace(work, has_transactions=find_transactions(store.fs, work, stopping=context.stopping))

        def swapped(done: Cleaned) -> None:
            context.swapped(plan, done)
            if context.stopping():
                raise CleaningAborted("the run was stopped", partition=topic.partition(number))

        report = run_pass(
            store.fs,
            work,
            engine=context.workers.engine(plan, store.fs),
            state_path=store.layout.partition_state(topic.id, number),
            folder=folder,
            locked=lambda: store.locks.partition(topic.id, number, what=what),
            swapped=swapped,
            swap_bytes=plan.swap_bytes,
        )
        advise(report, context.budget)
        return report
    finally:
        remove_run_folder(store.fs, folder)
        owner.release()


def advise(report: PassReport, budget: Budget) -> None:
    """Say of a pass whose map was full what to set."""
    if report.map_buffer_wanted is not None:
        advice = map_advice(report.map_buffer_wanted, budget)
        report.map_buffer_wanted, report.map_threads_wanted = advice.buffer_bytes, advice.threads


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

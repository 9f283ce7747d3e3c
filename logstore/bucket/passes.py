"""One pass over one partition in a bucket, planned and noted as in a directory; the worker is whoever the run has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from logstore.bucket.compacting import CleanedCopy, FetchedPass, PartitionAtHand
from logstore.bucket.looking import look_at
from logstore.bucket.reader import Looked, PartitionSource, look
from logstore.bucket.replacing import note_run
from logstore.bucket.sealing import MaintenanceEnvironment, SealRules, seal_partition
from logstore.cleaner.engine import LocalEngine
from logstore.compaction.budget import with_budget
from logstore.compaction.maintenance import Context, Worker
from logstore.compaction.partition_view import PartitionView
from logstore.compaction.passes import advise, as_ours
from logstore.compaction.planning import PartitionPlan, plan_view
from logstore.compaction.receipts import Run, Skip, begun_row, failed_row, finished_row
from logstore.config import LogConfig
from logstore.errors import DuramenError, ObjectMissing, SegmentsChanged
from logstore.ledger.rows import DONE, SKIPPED, RunRow
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class PassRoom:
    """One partition that is to be compacted: how to reach it, its settings, and the server's time."""

    environment: MaintenanceEnvironment
    source: PartitionSource
    topic: Topic
    config: LogConfig
    now_ms: Callable[[], int]


def compact_partition(room: PassRoom, context: Context, plan: PartitionPlan) -> Run:
    """One pass, if one is due; what is to be sealed first is, as a directory rolls. Failures are noted, not raised."""
    rolled = False
    try:
        if plan.compacted and not plan.paused and plan.set_aside is None:
            rolled = _seal(room, context, plan)
        return _planned_anew(room, context, rolled)
    except SegmentsChanged as error:
        return Run(plan, SKIPPED, f"another process is at work on it: {error.what}", rolled=rolled, skip=Skip.TAKEN)


def _seal(room: PassRoom, context: Context, plan: PartitionPlan) -> bool:
    if not (plan.rolls_active or context.roll_active):
        return False
    rules, sealed = SealRules(force=context.roll_active), False
    while seal_partition(room.environment, room.source, room.topic.id, rules, room.now_ms()) is not None:
        sealed = True
    return sealed


def plan_pass_of(room: PassRoom, context: Context, looked: Looked) -> PartitionPlan:
    """Of a partition that was looked at."""
    view = PartitionView(look_at(room.environment, room.source, looked, SealRules()), room.config)
    return plan_view(view, room.topic, context.planning, context.budget)


def _planned_anew(room: PassRoom, context: Context, rolled: bool) -> Run:
    looked = look(room.source)
    plan = plan_pass_of(room, context, looked)
    if plan.cleanable.due is None or not plan.is_due or plan.work is None:
        return Run(plan, SKIPPED, plan.why, rolled=rolled, skip=Skip.NOT_DUE)
    if context.stopping():
        return Run(plan, SKIPPED, "the run was stopped", rolled=rolled, skip=Skip.STOPPING)
    context.started(plan)
    row = begun_row(
        plan,
        f"{context.run_name}-{plan.name}",
        engine=context.workers.name,
        airflow_run_id=context.airflow_run_id,
        started_ms=room.now_ms(),
    )
    began = time.monotonic()
    at_hand = PartitionAtHand(room.environment, room.source, room.topic.id, looked)
    try:
        fetched = at_hand.fetched(with_budget(plan.work, context.budget))
        task = partial(_clean, fetched, plan.groups_at_once, context.in_parallel, room.environment.folder)
        copy = context.workers.run(plan, task)
        advise(copy.report, context.budget)
        at_hand.finished(copy, finished_row(row, copy.report, plan, room.now_ms()))
    except SegmentsChanged:
        raise
    except (DuramenError, OSError) as error:
        failed = _failed(at_hand, error)
        ended = failed_row(row, failed, time.monotonic() - began, room.now_ms())
        _note(room, ended)
        return Run(plan, ended.result, str(failed), row.run_id, rolled=rolled, error=failed)
    for group in copy.report.cleaned:
        context.swapped(plan, group)
    return Run(plan, DONE, plan.why, row.run_id, copy.report, rolled)


def _clean(
    fetched: FetchedPass, groups_at_once: int, in_parallel: bool, folder: str | None, worker: Worker
) -> CleanedCopy:
    """The pass by one worker, wherever that is."""
    copy = fetched.done_by(
        lambda fs: LocalEngine(fs, threads=worker.threads, groups_at_once=groups_at_once, progress=worker.progress),
        folder=worker.folder or folder,
        in_parallel=in_parallel,
    )
    copy.report.workers = (worker.name,)
    return copy


def _failed(at_hand: PartitionAtHand, error: DuramenError | OSError) -> DuramenError:
    """The error as ours. Raises SegmentsChanged where a source is gone because others replaced it."""
    if isinstance(error, ObjectMissing):
        found = at_hand.gone(error)
        if isinstance(found, SegmentsChanged):
            raise found from error
        return found
    return error if isinstance(error, DuramenError) else as_ours(error)


def _note(room: PassRoom, run: RunRow) -> None:
    """One that cannot be noted costs no more than a pass that is tried again at once."""
    with contextlib.suppress(DuramenError):
        room.environment.manifests.change(
            room.topic.id, room.source.number, lambda seen, _, nonce: note_run(seen, run, nonce=nonce)
        )

"""The job: finish what is committed, plan, compact what is due, most urgent first, then retention for every policy.

Partitions are compacted side by side, and so are the groups inside one. A partition that fails is set aside with its
reason in the ledger and stops neither the others nor its own retention. Several jobs may run on one store at once: a
job that finds a partition taken skips it and says so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from compaction_job.activity import Activity
from compaction_job.choice import Choice
from compaction_job.due import explain, opened_store, passes_at_once, plan, threads_of
from compaction_job.report import Report
from compaction_job.retention import project, retain_all
from compaction_job.tasks import JOB_BYTES
from logstore.cleaner.work import Cleaned
from logstore.compaction.budget import budget_of, cleaner_threads
from logstore.compaction.local_workers import LocalWorkers
from logstore.compaction.maintenance import Context, MaintainedStore, Maintenance, Workers
from logstore.compaction.planning import PartitionPlan, PlanOptions, most_urgent_first, plan_partition
from logstore.compaction.receipts import Run, Skip
from logstore.errors import CleaningAborted, DuramenError
from logstore.ledger.rows import DONE, FAILED, SKIPPED
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(slots=True)
class Progress:
    """Callbacks of a run at work; each may be called from several threads."""

    planned: Callable[[Sequence[PartitionPlan]], None] = lambda _plans: None
    started: Callable[[PartitionPlan], None] = lambda _plan: None
    #: partition, step (index, rewrite, write), bytes since the last call
    moved: Callable[[str, str, int], None] = lambda _name, _step, _bytes: None
    swapped: Callable[[PartitionPlan, Cleaned], None] = lambda _plan, _group: None
    ended: Callable[[Run], None] = lambda _run: None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is made. `compact` takes each of these as a keyword of its own, too."""

    #: the current time for this run; None: the store's clock
    now_ms: int | None = None
    #: passes and groups at once; None: log.cleaner.threads
    threads: int | None = None
    run_name: str | None = None
    #: recorded in the receipts; a second run with the same id repeats nothing
    airflow_run_id: str | None = None
    retention: bool = True
    #: started by the daemon: log.cleaner.enable=false leaves compaction out
    scheduled: bool = False
    stopping: Callable[[], bool] = lambda: False
    progress: Progress | None = None
    #: of a store in a bucket that is given by its URL
    storage_options: Mapping[str, str] | None = None


def compact(
    store: str | PathLike[str] | MaintainedStore,
    *,
    spark: SparkSession | None = None,
    topics: Sequence[str] | Mapping[str, Collection[int]] | None = None,
    partitions: Sequence[int] | None = None,
    dry_run: bool = False,
    force: bool = False,
    roll_active: bool = False,
    options: RunOptions | None = None,
    **more: Any,
) -> Report:
    """Compact all partitions that are due; without `spark` in this process alone.

    `topics` may also name the partitions of each; `partitions` are those of every topic.
    `force` ignores the dirty ratio, never min.compaction.lag.ms; `roll_active` closes active segments first. Fields of
    RunOptions are keywords as well: `now_ms`, `threads`, `run_name`, `airflow_run_id`, `retention`, `scheduled`,
    `stopping`, `progress`, `storage_options`.
    Raises UnknownTopic, NotCompacted, InvalidConfig; what goes wrong with one partition is in the report.

        report = compact("/data/store", topics=["orders"], threads=4)
        print(len(report.done), [run.reason for run in report.failed])
    """
    given = replace(options or RunOptions(), **more)
    with opened_store(store, given.storage_options) as opened:
        maintenance = opened.maintenance()
        began = time.monotonic()
        now_ms = maintenance.now_ms(working=not dry_run) if given.now_ms is None else given.now_ms
        report = Report(given.run_name or uuid.uuid4().hex, "local" if spark is None else "spark", now_ms, dry_run)
        if given.now_ms is None and (doubt := maintenance.clock_doubt()):
            report.notes.append(doubt)
        with Activity(opened) as activity:
            given = replace(given, progress=_watched(given.progress or Progress(), activity, report))
            job = _Job(opened, maintenance, spark, Choice(topics, partitions), given, report)
            job.run(force=force, roll_active=roll_active)
        report.seconds = time.monotonic() - began
        return report


def _watched(progress: Progress, activity: Activity, report: Report) -> Progress:
    """The same, and other processes can see how far each pass is."""

    def started(plan: PartitionPlan) -> None:
        activity.begun(plan, f"{report.run_name}-{plan.name}", report.engine)
        progress.started(plan)

    def moved(name: str, step: str, size_bytes: int) -> None:
        activity.moved(name, step, size_bytes)
        progress.moved(name, step, size_bytes)

    def ended(run: Run) -> None:
        activity.ended(run.plan.name)
        progress.ended(run)

    return Progress(progress.planned, started, moved, progress.swapped, ended)


class _Job:
    """One run over one store."""

    def __init__(
        self,
        store: MaintainedStore,
        maintenance: Maintenance,
        spark: SparkSession | None,
        choice: Choice,
        options: RunOptions,
        report: Report,
    ) -> None:
        self._store = store
        self._maintenance = maintenance
        self._spark = spark
        self._choice = choice
        self._options = options
        self._stopping = options.stopping
        self._progress = options.progress or Progress()
        self._report = report
        self._threads = max(options.threads or threads_of(store), 1)
        #: unless the number of threads is set, Spark decides how many tasks run at once
        self._bounded = options.threads is not None or cleaner_threads(store) is not None

    def run(self, *, force: bool, roll_active: bool) -> None:
        store, report, options = self._store, self._report, self._options
        chosen = self._choice.compacted(store)
        if options.scheduled and not store.broker_config.log_cleaner_enable:
            chosen = []
        if not report.dry_run:
            prepared = self._maintenance.prepare(self._choice.topics_of(store), self._stopping)
            report.abandoned = prepared.abandoned
            report.problems += prepared.problems
            report.notes += prepared.notes
        planning = PlanOptions(
            report.now_ms,
            force,
            {} if force else self._maintenance.set_aside(report.now_ms),
            self._threads,
            0 if self._spark is None else JOB_BYTES,
            self._maintenance.free_bytes(),
            flushed=report.dry_run,
        )
        report.plans = most_urgent_first(self._plans(chosen, planning))
        self._progress.planned(report.plans)
        if report.dry_run:
            report.runs = [Run(each, SKIPPED, f"dry run; {each.why}", skip=Skip.DRY_RUN) for each in report.plans]
            return
        self._compact(planning, roll_active)
        if options.retention and not self._stopping():
            retain_all(store, self._choice, report, self._stopping, maintenance=self._maintenance)
        # The daemon looks every few seconds, mostly for nothing; its retention job writes them in any case.
        if not self._stopping() and (report.done or report.retained or not options.scheduled):
            project(store, report, maintenance=self._maintenance)

    def _plans(self, chosen: Sequence[tuple[Topic, int]], planning: PlanOptions) -> list[PartitionPlan]:
        plans = []
        for topic, number in chosen:
            try:
                plans.append(plan_partition(self._store, topic, number, planning))
            except DuramenError as error:
                self._report.problems.append(f"{topic.name}-{number} could not be planned: {error}")
        return plans

    def _compact(self, planning: PlanOptions, roll_active: bool) -> None:
        report = self._report
        done_before = self._done_before()
        to_do = [each for each in report.plans if (each.topic_id, each.partition) not in done_before]
        report.runs = [
            Run(each, SKIPPED, "done already under this Airflow run id", skip=Skip.DONE_BEFORE)
            for each in report.plans
            if (each.topic_id, each.partition) in done_before
        ]
        at_once = passes_at_once(to_do, self._threads, roll_active=roll_active)
        inside = max(self._threads // at_once, 1)
        context = Context(
            workers=self._workers(inside),
            planning=replace(planning, threads=inside),
            budget=budget_of(self._store).divided(at_once),
            run_name=report.run_name,
            roll_active=roll_active,
            in_parallel=inside > 1 or (self._spark is not None and not self._bounded),
            airflow_run_id=self._options.airflow_run_id,
            stopping=self._stopping,
            started=self._progress.started,
            swapped=self._progress.swapped,
        )
        try:
            with ThreadPoolExecutor(at_once) as pool:
                each_in_turn = pool.map if at_once > 1 else map
                report.runs += each_in_turn(lambda each: self._pass(context, each), to_do)
        finally:
            report.problems += self._maintenance.end_passes()

    def _workers(self, threads: int) -> Workers:
        def moved(name: str, step: str, size_bytes: int) -> None:
            self._progress.moved(name, step, size_bytes)
            if self._stopping():
                raise CleaningAborted("the run was stopped")

        if self._spark is None:
            return LocalWorkers(threads, moved)
        from compaction_job.spark_engine import SparkWorkers

        return SparkWorkers(self._spark, threads if self._bounded else None, moved)

    def _pass(self, context: Context, each: PartitionPlan) -> Run:
        if self._stopping():
            return Run(each, SKIPPED, "the run was stopped", skip=Skip.STOPPING)
        if not each.may_run(roll_active=context.roll_active) and not each.unfinished:
            run = Run(each, SKIPPED, each.why, skip=Skip.NOT_DUE)  # no lock, and no second look
        else:
            try:
                run = self._maintenance.compact(context, each)
            except DuramenError as error:
                run = Run(each, FAILED, str(error), error=error)
        self._progress.ended(run)
        return run

    def _done_before(self) -> set[tuple[str, int]]:
        mine = self._options.airflow_run_id
        if mine is None:
            return set()
        done = (run for run in self._maintenance.runs() if run.airflow_run_id == mine and run.result == DONE)
        return {(run.topic_id or "", run.partition or 0) for run in done}


__all__ = ["Progress", "Report", "RunOptions", "compact", "explain", "plan"]

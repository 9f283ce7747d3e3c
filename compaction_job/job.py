"""The job: flush, plan, compact what is due, most urgent first, then retention for every policy, then tidy up.

Partitions are compacted side by side, and so are the groups inside one. A partition that fails is set aside with its
reason in the ledger and stops neither the others nor its own retention. Several jobs may run on one store at once: who
finds a partition taken skips it and says so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from os import PathLike, cpu_count
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from compaction_job.estimate import Estimate, estimate_partition
from compaction_job.tasks import JOB_BYTES
from logstore.cleaner.cleaner import Engine, LocalEngine
from logstore.cleaner.work import Cleaned
from logstore.commit.committer import Committer
from logstore.compaction.budget import budget_of, cleaner_threads
from logstore.compaction.passes import Context, compact_partition
from logstore.compaction.planning import (
    PartitionPlan,
    compacted_partitions,
    failures_of,
    most_urgent_first,
    plan_partition,
    still_set_aside,
)
from logstore.compaction.receipts import Run, Skip, describe_run
from logstore.compaction.run_folders import abandon_runs, sweep_runs
from logstore.compaction.segment_counts import SegmentCounts
from logstore.config import LogConfig, hold_back
from logstore.directory.shared_clock import doubt_of
from logstore.errors import CleaningAborted, DuramenError, LockHeld
from logstore.ledger import Ledger
from logstore.ledger.rows import DONE, FAILED, SKIPPED
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.maintenance import Retention, flush_before_retention, retain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: partitions whose counts are recorded together
_COUNTS_EVERY = 64


@dataclass(slots=True)
class Progress:
    """Who wants to see a run at work; every method may be called from several threads."""

    planned: Callable[[Sequence[PartitionPlan]], None] = lambda _plans: None
    started: Callable[[PartitionPlan], None] = lambda _plan: None
    #: partition, step (index, rewrite, write), bytes since the last call
    moved: Callable[[str, str, int], None] = lambda _name, _step, _bytes: None
    swapped: Callable[[PartitionPlan, Cleaned], None] = lambda _plan, _group: None
    ended: Callable[[Run], None] = lambda _run: None


@dataclass(slots=True)
class Report:
    """What a job did. `runs` has one entry for each partition that was looked at."""

    run_name: str
    engine: str
    now_ms: int
    dry_run: bool = False
    plans: list[PartitionPlan] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    retained: list[Retention] = field(default_factory=list)
    #: what failed outside of a partition's pass, in words
    problems: list[str] = field(default_factory=list)
    #: what was left to others, in words
    notes: list[str] = field(default_factory=list)
    #: runs of killed processes that were closed
    abandoned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.result == FAILED]

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.result == DONE]

    def as_dict(self) -> dict[str, Any]:
        """JSON, the same for every engine."""
        return {
            "run": self.run_name,
            "engine": self.engine,
            "now_ms": self.now_ms,
            "dry_run": self.dry_run,
            "seconds": round(self.seconds, 3),
            "runs": [describe_run(run) for run in self.runs],
            "retained": [
                {
                    "topic": each.partition.topic,
                    "partition": each.partition.partition,
                    "log_start_offset": each.log_start_offset,
                    "passes": [
                        {"policy": one.policy, "segments": len(one.base_offsets), "bytes": one.size_bytes}
                        for one in each.passes
                    ],
                }
                for each in self.retained
                if each.passes
            ],
            "problems": self.problems,
            "notes": self.notes,
            "abandoned": self.abandoned,
        }


def plan(
    store: str | PathLike[str] | LogStore,
    *,
    topics: Sequence[str] | None = None,
    config: Mapping[str, object] | None = None,
    force: bool = False,
    now_ms: int | None = None,
    estimate: bool = True,
) -> list[tuple[PartitionPlan, Estimate | None]]:
    """For each partition why it is due, why not, or when next; with an estimate of what would go. Changes nothing.

    `config` overrules settings of the topics: what if? Raises UnknownTopic, UnknownConfig, InvalidConfig.

        for found, estimate in plan("/data/store", config={"min.cleanable.dirty.ratio": 0.1}):
            print(found.name, found.why, estimate)
    """
    with _opened(store) as opened:
        now = opened.clock.now_ms() if now_ms is None else now_ms
        failures = still_set_aside(failures_of(opened, _ledger(opened)), now)
        plans: list[tuple[Topic, LogConfig, PartitionPlan]] = []
        free = opened.free_bytes()
        for topic, number in _chosen(opened, topics, config):
            settings = _what_if(opened, topic, config)
            found = plan_partition(
                opened,
                topic,
                number,
                now_ms=now,
                config=settings,
                force=force,
                failures=failures,
                threads=_threads(opened),
                free_bytes=free,
                flushed=True,
            )
            plans.append((topic, settings, found))
        # A run has one buffer for all the passes it makes at once.
        budget = budget_of(opened).divided(_side_by_side([found for _, _, found in plans], _threads(opened)))
        return [
            (
                found,
                estimate_partition(opened, topic, found.partition, found, config=settings, now_ms=now, budget=budget)
                if estimate and found.cleanable.due is not None
                else None,
            )
            for topic, settings, found in plans
        ]


def _what_if(store: LogStore, topic: Topic, config: Mapping[str, object] | None) -> LogConfig:
    if not config:
        return store.log_config(topic)
    resolved = store.resolve({**topic.configs, **config})
    return LogConfig.from_resolved(hold_back(resolved) if topic.settings_unknown else resolved)


def _chosen(
    store: LogStore, topics: Sequence[str] | None, config: Mapping[str, object] | None = None
) -> list[tuple[Topic, int]]:
    if topics is None and config and "compact" in str(config.get("cleanup.policy", "")):
        return [(topic, number) for topic in store.topics() for number in range(topic.partitions)]
    if config and topics is not None:
        return [(topic, number) for topic in map(store.topic, topics) for number in range(topic.partitions)]
    return list(compacted_partitions(store, topics))


def explain(
    store: str | PathLike[str] | LogStore, *, topics: Sequence[str] | None = None, now_ms: int | None = None
) -> list[PartitionPlan]:
    """For each partition why it is due, why not, or when next: `.why` is a sentence. Changes nothing, reads no records.

    Raises UnknownTopic.

        for found in explain("/data/store", topics=["orders"]):
            print(found.name, found.why)
    """
    return [found for found, _ in plan(store, topics=topics, now_ms=now_ms, estimate=False)]


def _wanted(
    topics: Sequence[str] | Mapping[str, Collection[int]] | None, partitions: Sequence[int] | None
) -> Callable[[str, int], bool]:
    """Whether a partition of a topic that was asked for was asked for itself."""
    of_topic = topics if isinstance(topics, Mapping) else {}

    def wanted(topic: str, number: int) -> bool:
        return (partitions is None or number in partitions) and (topic not in of_topic or number in of_topic[topic])

    return wanted


def compact(
    store: str | PathLike[str] | LogStore,
    *,
    spark: SparkSession | None = None,
    topics: Sequence[str] | Mapping[str, Collection[int]] | None = None,
    partitions: Sequence[int] | None = None,
    dry_run: bool = False,
    force: bool = False,
    roll_active: bool = False,
    now_ms: int | None = None,
    threads: int | None = None,
    run_name: str | None = None,
    airflow_run_id: str | None = None,
    retention: bool = True,
    scheduled: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Report:
    """Compact all partitions that are due; without `spark` in this process alone.

    `topics` may also name the partitions of each; `partitions` are those of every topic.
    `force` ignores the dirty ratio, never min.compaction.lag.ms; `roll_active` closes active segments first. With
    `scheduled`, log.cleaner.enable=false leaves compaction out. The same `airflow_run_id` again does nothing twice.
    Raises UnknownTopic, NotCompacted, InvalidConfig; what goes wrong with one partition is in the report.

        report = compact("/data/store", topics=["orders"])
        print(len(report.done), [run.reason for run in report.failed])
    """
    progress = progress or Progress()
    with _opened(store) as opened:
        began = time.monotonic()
        now = opened.clock.now_ms() if now_ms is None else now_ms
        name = run_name or uuid.uuid4().hex
        report = Report(name, "local" if spark is None else "spark", now, dry_run)
        if now_ms is None and (doubt := doubt_of(opened.clock)):
            report.notes.append(doubt)
        wanted = _wanted(topics, partitions)
        topics = None if topics is None else list(topics)
        chosen = [each for each in _chosen(opened, topics) if wanted(each[0].name, each[1])]
        if scheduled and not opened.broker_config.log_cleaner_enable:
            chosen = []
        ledger = _ledger(opened)
        if not dry_run:
            _prepare(opened, topics, ledger, report, stopping)
        failures = failures_of(opened, ledger)
        aside = {} if force else still_set_aside(failures, now)
        at_once = max(threads or _threads(opened), 1)
        bounded = threads is not None or cleaner_threads(opened) is not None
        job_bytes = 0 if spark is None else JOB_BYTES
        plans = _plans(opened, chosen, now, force, aside, at_once, job_bytes, report)
        report.plans = plans
        progress.planned(plans)
        if dry_run:
            report.runs = [Run(each, SKIPPED, f"dry run; {each.why}", skip=Skip.DRY_RUN) for each in plans]
        else:
            done_before = _done_before(ledger, airflow_run_id)
            to_do = [each for each in plans if (each.topic_id, each.partition) not in done_before]
            report.runs = [
                Run(each, SKIPPED, "done already under this Airflow run id", skip=Skip.DONE_BEFORE)
                for each in plans
                if (each.topic_id, each.partition) in done_before
            ]
            side_by_side = _side_by_side(to_do, at_once, roll_active)
            inside = max(at_once // side_by_side, 1)
            context = Context(
                store=opened,
                ledger=ledger,
                engine=_engines(opened, spark, inside, bounded, progress, stopping),
                engine_name=report.engine,
                now_ms=now,
                budget=budget_of(opened).divided(side_by_side),
                run_name=name,
                force=force,
                roll_active=roll_active,
                threads=inside,
                in_parallel=inside > 1 or (spark is not None and not bounded),
                job_bytes=job_bytes,
                airflow_run_id=airflow_run_id,
                counts=SegmentCounts(ledger, every=_COUNTS_EVERY),
                failures=aside,
                stopping=stopping,
                started=progress.started,
                swapped=progress.swapped,
            )
            try:
                report.runs += _run_all(context, opened, to_do, side_by_side, progress)
            finally:
                _write_counts(context, report)
            if retention and not stopping():
                retain_all(opened, topics, wanted, now, report, stopping)
            sweep_runs(opened)
            # The daemon looks every few seconds, mostly for nothing; its retention job writes them in any case.
            if not stopping() and (report.done or report.retained or not scheduled):
                project(opened, report)
        report.seconds = time.monotonic() - began
        return report


def _side_by_side(plans: Sequence[PartitionPlan], at_once: int, roll_active: bool = False) -> int:
    """How many passes are made at once, which share the run's map memory and rate."""
    return max(min(at_once, sum(_may_run(each, roll_active) for each in plans)), 1)


def _write_counts(context: Context, report: Report) -> None:
    try:
        if context.counts is not None:
            context.counts.write()
    except (DuramenError, OSError) as error:
        report.problems.append(f"the counts of segments could not be recorded: {error}")


def _may_run(each: PartitionPlan, roll_active: bool) -> bool:
    return each.is_due or (roll_active and each.compacted and not each.paused)


def _prepare(
    store: LogStore,
    topics: Sequence[str] | None,
    ledger: Ledger,
    report: Report,
    stopping: Callable[[], bool],
) -> None:
    """Settle and flush first: only what is committed and durable is compacted or deleted. Killed runs are closed."""
    report.abandoned = abandon_runs(ledger, store)
    sweep_runs(store)
    committer = Committer(store)
    for topic in store.topics() if topics is None else map(store.topic, topics):
        if stopping():
            return
        try:
            committer.flush(topic)
        except DuramenError as error:
            report.problems.append(f"{topic.name} could not be flushed first: {error}")


def _plans(
    store: LogStore,
    chosen: Sequence[tuple[Topic, int]],
    now_ms: int,
    force: bool,
    aside: Mapping[tuple[str, int], Any],
    threads: int,
    job_bytes: int,
    report: Report,
) -> list[PartitionPlan]:
    plans = []
    free = store.free_bytes()
    for topic, number in chosen:
        try:
            plans.append(
                plan_partition(
                    store,
                    topic,
                    number,
                    now_ms=now_ms,
                    force=force,
                    failures=aside,
                    threads=threads,
                    job_bytes=job_bytes,
                    free_bytes=free,
                    flushed=report.dry_run,
                )
            )
        except DuramenError as error:
            report.problems.append(f"{topic.name}-{number} could not be planned: {error}")
    return most_urgent_first(plans)


def _run_all(
    context: Context, store: LogStore, plans: Sequence[PartitionPlan], side_by_side: int, progress: Progress
) -> list[Run]:
    def run_one(each: PartitionPlan) -> Run:
        if context.stopping():
            return Run(each, SKIPPED, "the run was told to stop", skip=Skip.STOPPING)
        if not _may_run(each, context.roll_active) and not each.unfinished:
            # Nothing to do: no lock, and no second look.
            run = Run(each, SKIPPED, each.why, skip=Skip.NOT_DUE)
            progress.ended(run)
            return run
        try:
            topic = store.topic(each.topic)
            run = compact_partition(context, topic, each.partition)
        except DuramenError as error:
            run = Run(each, FAILED, str(error), error=error)
        progress.ended(run)
        return run

    if side_by_side == 1:
        return [run_one(each) for each in plans]
    with ThreadPoolExecutor(side_by_side) as pool:
        return list(pool.map(run_one, plans))


def _engines(
    store: LogStore,
    spark: SparkSession | None,
    threads: int,
    bounded: bool,
    progress: Progress,
    stopping: Callable[[], bool],
) -> Callable[[PartitionPlan], Engine]:
    """Unless somebody has set the number of threads, Spark decides how many tasks there are at once."""

    def engine(each: PartitionPlan) -> Engine:
        def moved(step: str, size: int) -> None:
            progress.moved(each.name, step, size)
            if stopping():
                raise CleaningAborted("the run was told to stop")

        if spark is None:
            return LocalEngine(store.fs, threads=threads, groups_at_once=each.groups_at_once, progress=moved)
        from compaction_job.spark_engine import SparkEngine

        return SparkEngine(
            spark,
            store.path,
            groups_at_once=each.groups_at_once,
            tasks_max=threads if bounded else None,
            progress=moved,
        )

    return engine


def retain_all(
    store: LogStore,
    topics: Sequence[str] | None,
    wanted: Callable[[str, int], bool] | None,
    now_ms: int,
    report: Report,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Retention of every policy, also of partitions whose compaction failed. Flushes first: only what is on disk in
    the logs may go, and what is staged goes with a flush.
    """
    named = store.topics() if topics is None else [store.topic(name) for name in topics]
    for topic in named:
        if not stopping():
            _flush_first(store, topic, report)
        for number in range(topic.partitions):
            if wanted is not None and not wanted(topic.name, number):
                continue
            if stopping():
                return
            try:
                if retain(store, topic, number, now_ms=now_ms, dry_run=True).passes:
                    report.retained.append(retain(store, topic, number, now_ms=now_ms, wait_ms=0))
                else:
                    store.sweep_deleted(topic, number, now_ms=now_ms)
            except LockHeld as error:
                report.notes.append(f"retention of {topic.name}-{number} is left to another process: {error.what}")
            except DuramenError as error:
                report.problems.append(f"retention of {topic.name}-{number}: {error}")


def project(store: LogStore, report: Report) -> None:
    """Kafka's checkpoint files, at the end of every run."""
    try:
        store.project_checkpoints()
    except (DuramenError, OSError) as error:
        report.problems.append(f"Kafka's checkpoint files could not be written: {error}")


def _flush_first(store: LogStore, topic: Topic, report: Report) -> None:
    try:
        flush_before_retention(store, topic)
    except LockHeld as error:
        report.notes.append(f"{topic.name} is flushed by another process: {error.what}")
    except DuramenError as error:
        report.problems.append(f"{topic.name} could not be flushed first: {error}")


def _done_before(ledger: Ledger, airflow_run_id: str | None) -> set[tuple[str, int]]:
    if airflow_run_id is None:
        return set()
    mine = (pc.field("airflow_run_id") == airflow_run_id) & (pc.field("result") == DONE)
    return {(run.topic_id or "", run.partition or 0) for run in ledger.runs(mine)}


def _threads(store: LogStore) -> int:
    return cleaner_threads(store) or max(cpu_count() or 1, 1)


def _ledger(store: LogStore) -> Ledger:
    return store.ledger()


def _opened(store: str | PathLike[str] | LogStore) -> AbstractContextManager[LogStore]:
    return nullcontext(store) if isinstance(store, LogStore) else LogStore(store)

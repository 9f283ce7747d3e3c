"""The work of a pass as Spark tasks: ranges are indexed side by side, one task merges the maps, groups are rewritten by
jobs of a few of them, several at once. Only counts come back to the driver, which swaps them in, in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from compaction_job.tasks import JOB_BYTES, Part, Rewritten, index_task, merge_task, rewrite_task
from logstore.cleaner.engine import Groups
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import Progress, no_progress, split_dirty
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import Cleaned, Indexed, PassWork
from logstore.compaction.maintenance import Worker
from logstore.compaction.planning import PartitionPlan
from logstore.errors import DuramenError
from logstore.files import OS_FILES, FileSystem, spark_local_dir
from logstore.python_workers import use_this_python
from logstore.spark_tasks import Task, cores_of, executor_name, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_RANGE_BYTES_MIN = 64 << 20  # a range smaller than this is not worth a task of its own


class SparkEngine:
    """One pass; `groups_at_once` is how many outputs may lie in staging before they are swapped in."""

    def __init__(
        self,
        spark: SparkSession,
        *,
        groups_at_once: int = 1,
        tasks_max: int | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """`tasks_max` bounds the tasks at once; None: Spark does, by its cores."""
        self._tasks_max = tasks_max
        use_this_python(spark)
        self._spark = spark
        self._groups_at_once = groups_at_once
        self._progress = progress
        self._part: Part | None = None

    def index(self, work: PassWork, folder: str) -> Indexed:
        count = min(self.tasks_at_once(), max(sum(s.size_bytes for s in work.dirty) // _RANGE_BYTES_MIN, 1))
        ranges = split_dirty(OS_FILES, work, count)
        share = None if len(ranges) == 1 else max(work.map_settings.keys_max // len(ranges), 1)
        parts: list[Part] = self._run(
            lambda number: index_task(work, folder, ranges, number, keys_max=share), len(ranges)
        )
        self._part = parts[0]
        if len(parts) > 1:
            if parts[0].indexed.is_full:  # its share was too small: in order, then
                ranges = split_dirty(OS_FILES, work, 1)
                parts = self._run(lambda number: index_task(work, folder, ranges, number, keys_max=None), 1)
                self._part = parts[0]
            else:
                self._part = self._run(lambda number: merge_task(work, folder, parts, number), 1)[0]
                for each in parts:
                    if each.path != self._part.path:
                        os.unlink(each.path)
        self._progress("index", self._part.indexed.read_bytes)
        return self._part.indexed

    def rewrite(self, work: PassWork, indexed: Indexed, groups: Groups, folder: str) -> Iterator[Cleaned]:
        assert self._part is not None
        part = replace(self._part, indexed=indexed)
        task = partial(rewrite_task, work, folder, part)
        if work.has_transactions:  # what one left in a group matters in the next
            transactions = Transactions()
            for job in _jobs(groups, 1, self._groups_at_once):
                done = self._run(partial(task, job, tasks=1, transactions=transactions), 1)
                yield from self._cleaned(done)
                transactions = done[0].transactions
            return
        cores = self.tasks_at_once()
        jobs = _jobs(groups, cores, self._groups_at_once)
        tasks = min(len(jobs), cores, self._groups_at_once)
        # One more waits, planned, for a core; where tasks are bounded, none does.
        with ThreadPoolExecutor(cores + (self._tasks_max is None)) as pool:
            waiting: deque[tuple[int, Future[list[Rewritten]]]] = deque()
            try:
                for job in jobs:
                    while waiting and sum(count for count, _ in waiting) + len(job) > self._groups_at_once:
                        yield from self._cleaned(waiting.popleft()[1].result())
                    future = pool.submit(self._run, partial(task, job, tasks=tasks), 1)
                    waiting.append((len(job), future))
                while waiting:
                    yield from self._cleaned(waiting.popleft()[1].result())
            finally:
                for _, future in waiting:
                    future.cancel()

    def _cleaned(self, done: list[Rewritten]) -> Iterator[Cleaned]:
        for cleaned in done[0].groups:
            if isinstance(cleaned, Exception):
                raise cleaned
            self._progress("rewrite", cleaned.read_bytes)
            yield cleaned

    def _run(self, task: Task, count: int) -> list[Any]:
        try:
            return run_tasks(self._spark, task, count, (DuramenError, OSError))
        except Exception:
            self._progress("wait", 0)  # cancelled because the run was stopped: that raises, and says so
            raise

    def tasks_at_once(self) -> int:
        """Spark's cores, or fewer where they are bounded."""
        cores = cores_of(self._spark)
        return cores if self._tasks_max is None else min(cores, self._tasks_max)


class SparkWorkers:
    """Spark's tasks as the workers of a run's passes. `moved` is told the partition, the step and its bytes."""

    name = "spark"

    def __init__(self, spark: SparkSession, tasks_max: int | None, moved: Callable[[str, str, int], None]) -> None:
        """`tasks_max` bounds the tasks of one pass at once; None: Spark does, by its cores."""
        self._spark = spark
        self._tasks_max = tasks_max
        self._moved = moved

    def engine(self, plan: PartitionPlan, fs: FileSystem) -> SparkEngine:
        """All executors see the store's files, through the system's own calls."""
        return SparkEngine(
            self._spark,
            groups_at_once=plan.groups_at_once,
            tasks_max=self._tasks_max,
            progress=partial(self._moved, plan.name),
        )

    def run(self, plan: PartitionPlan, task: Callable[[Worker], T]) -> T:
        """One task; it ends with its Spark job, when that is cancelled."""
        use_this_python(self._spark)
        try:
            done: list[T] = run_tasks(self._spark, lambda _: task(executor()), 1, (DuramenError, OSError))
        except Exception:
            self._moved(plan.name, "wait", 0)  # cancelled because the run was stopped: that raises, and says so
            raise
        self._moved(plan.name, "rewrite", plan.read_bytes)
        return done[0]


def executor() -> Worker:
    """This process, in a task of Spark's; copies go where Spark keeps its own."""
    return Worker(executor_name(), folder=spark_local_dir())


def _jobs(groups: Groups, cores: int, groups_at_once: int) -> list[Groups]:
    """Neighbours together, so that a job has more to do than Spark has to start it, but no core is without one."""
    sizes = [sum(source.size_bytes for source in group) for group in groups]
    share = sum(sizes) / max(sum(sizes) // JOB_BYTES, cores)
    longest = len(groups) if groups_at_once >= len(groups) else max(groups_at_once // cores, 1)
    jobs: list[list[tuple[SourceSegment, ...]]] = []
    room = 0.0
    for group, size in zip(groups, sizes, strict=True):
        if room <= 0 or len(jobs[-1]) == longest:
            jobs.append([])
            room += share
        jobs[-1].append(group)
        room -= size
    return list(jobs)

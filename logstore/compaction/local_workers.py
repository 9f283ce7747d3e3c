"""This process as the worker of a run's passes. Spark's tasks as such are in `spark_engine`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from logstore.cleaner.engine import LocalEngine
from logstore.compaction.maintenance import Worker
from logstore.compaction.planning import PartitionPlan
from logstore.files import FileSystem

T = TypeVar("T")


class LocalWorkers:
    """`moved` is told the partition, the step and its bytes, and may raise to end the pass."""

    name = "local"

    def __init__(self, threads: int, moved: Callable[[str, str, int], None]) -> None:
        self._threads = threads
        self._moved = moved

    def engine(self, plan: PartitionPlan, fs: FileSystem) -> LocalEngine:
        moved = partial(self._moved, plan.name)
        return LocalEngine(fs, threads=self._threads, groups_at_once=plan.groups_at_once, progress=moved)

    def run(self, plan: PartitionPlan, task: Callable[[Worker], T]) -> T:
        name = f"{os.uname().nodename}:{os.getpid()}"
        return task(Worker(name, threads=self._threads, progress=partial(self._moved, plan.name)))

"""Duramen's tasks as a Spark job: a number or rows in, one report a task out. Imports no Spark.

A report is whatever the task returns. A DuramenError travels as the report, not as a failed task: Spark would run the
task three more times for nothing and bury the message. Any other error fails the task, and Spark's retries apply.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from logstore.errors import DuramenError, UnsuitableFileSystem
from logstore.python_workers import explained

SCHEMA = "task int, report binary"
_SCHEMA = pa.schema([("task", pa.int32()), ("report", pa.binary())])
#: of a session that does not say
_CORES = 4

Batches = Iterator[pa.RecordBatch]
Task = Callable[[int], object]
Errors = tuple[type[Exception], ...]


# --- on an executor -------------------------------------------------------------------------------------------------


def reported(number: int, work: Callable[[], object], errors: Errors = (DuramenError,)) -> pa.RecordBatch:
    """One row with what `work` returned, or with the error it raised if that is one of `errors`."""
    try:
        report = work()
    except errors as error:
        report = error
    data = zlib.compress(pickle.dumps(report))
    return pa.RecordBatch.from_arrays([pa.array([number], pa.int32()), pa.array([data], pa.binary())], schema=_SCHEMA)


def numbers(batches: Batches) -> Iterator[int]:
    """The tasks that an executor was given."""
    for batch in batches:
        yield from batch.column(0).to_pylist()


def executor_name() -> str:
    """The executor this process works for, host:pid: executors may share a host, its processes have one parent."""
    return f"{os.uname().nodename}:{os.getppid()}"


def check_seen(path: str, is_seen: bool) -> None:
    """Raises UnsuitableFileSystem when this process does not see what the driver sees at `path`."""
    if not is_seen:
        raise UnsuitableFileSystem(
            f"executor {os.uname().nodename} does not see the driver's store",
            file=path,
            hint="Put the store on a file system that all executors share, under the same path",
        )


# --- on the driver --------------------------------------------------------------------------------------------------


def read_report(data: bytes) -> Any:
    """What a task reported; raises the error it met."""
    report = pickle.loads(zlib.decompress(data))
    if isinstance(report, Exception):
        raise report
    return report


def numbered(spark: Any, count: int) -> Any:
    """Rows 0 to `count` - 1, each a task of its own."""
    return spark.range(0, count, 1, count)


def run_tasks(spark: Any, task: Task, count: int, errors: Errors = (DuramenError,)) -> list[Any]:
    """What tasks 0 to `count` - 1 reported, in order; raises the first error among them."""

    def run(batches: Batches) -> Batches:
        for number in numbers(batches):
            yield reported(number, lambda number=number: task(number), errors)  # type: ignore[misc]

    return run_rows(numbered(spark, count), run)


def run_rows(rows: Any, run: Callable[[Batches], Batches]) -> list[Any]:
    """What the tasks over `rows` reported, in the order of the rows' partitions; raises the first error among them."""
    with explained():
        done = rows.mapInArrow(run, SCHEMA).collect()
    return [read_report(bytes(row.report)) for row in sorted(done, key=lambda row: row.task)]


def cores_of(spark: Any) -> int:
    """How many tasks run at once."""
    try:
        return max(int(spark.sparkContext.defaultParallelism), 1)
    except Exception:  # Spark Connect has no context
        return _CORES


def cancel_jobs(spark: Any) -> None:
    """End what runs of the session. Raises what Spark raises, as for a session that is gone."""
    spark.sparkContext.cancelAllJobs()

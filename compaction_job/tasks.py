"""What compaction's tasks do on executors: index a range, merge maps, rewrite a group. Imports no Spark.

A task reads the logs and writes only into a folder of its own below the run's; its report names it, so what a twin or
a zombie wrote is never looked at. An error that is ours travels back as the report.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from logstore.cleaner.dedupe_map import DedupeMap
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import DirtyRange, index_range, merge_ranges, weigh_older
from logstore.cleaner.rewrite import GroupWriter
from logstore.cleaner.throttle import Throttle
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import Cleaned, Indexed, PassWork
from logstore.errors import DuramenError, UnsuitableFileSystem
from logstore.files import OS_FILES
from logstore.records.marks import ORDER_OFFSET

REPORT_SCHEMA = "number int, report binary"
_REPORT = pa.schema([("number", pa.int32()), ("report", pa.binary())])

JOB_BYTES = 512 << 20
"""What a job rewrites at least, where there is as much: to start one takes Spark as long as a hundred megabytes do."""

Batches = Iterator[pa.RecordBatch]
Task = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Part:
    """A range's keys, saved at `path`."""

    indexed: Indexed
    path: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Groups in order, the last one an error if it failed, and what is known of transactions behind them."""

    groups: Sequence[Cleaned | Exception]
    transactions: Transactions


def run_tasks(task: Task) -> Callable[[Batches], Batches]:
    """Each row of the input is the number of a task; each row of the output what it reported."""

    def run(batches: Batches) -> Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                try:
                    report: object = task(number)
                except (DuramenError, OSError) as error:
                    report = error
                yield pa.RecordBatch.from_arrays(
                    [pa.array([number], pa.int32()), pa.array([pickle.dumps(report)], pa.binary())], schema=_REPORT
                )

    return run


def check_sees(work: PassWork, folder: str) -> None:
    """Raises UnsuitableFileSystem when this process does not see the run's folder or the log."""
    for path in (folder, work.directory):
        if not os.path.isdir(path):
            raise UnsuitableFileSystem(
                f"executor {os.uname().nodename} does not see the driver's store",
                file=path,
                hint="Put the store on a file system that all executors share, under the same path",
            )


def index_task(work: PassWork, folder: str, ranges: Sequence[DirtyRange], number: int, *, keys_max: int | None) -> Part:
    check_sees(work, folder)
    mine = ranges[number]
    offset_map = DedupeMap(work.map_settings, keys_max=keys_max, records=mine.offsets)
    throttle = Throttle(work.bytes_per_second / len(ranges))
    indexed = index_range(OS_FILES, work, offset_map, mine, throttle=throttle)
    if len(ranges) == 1 and work.map_settings.order != ORDER_OFFSET:
        weigh_older(OS_FILES, work, offset_map, throttle=throttle)
    return Part(indexed, _saved(offset_map, folder))


def merge_task(work: PassWork, folder: str, parts: Sequence[Part], number: int) -> Part:
    """One map of all ranges, made by one process."""
    check_sees(work, folder)
    whole = DedupeMap(work.map_settings, records=DirtyRange.of(work, work.first_dirty_offset).offsets)
    maps = [DedupeMap.load(part.path, work.map_settings) for part in parts]
    if parts[0].indexed.is_full or not whole.merge(maps[0]):
        return parts[0]
    maps[0] = whole
    throttle = Throttle(work.bytes_per_second)
    indexed = merge_ranges(OS_FILES, work, maps, [part.indexed for part in parts], throttle=throttle)
    if work.map_settings.order != ORDER_OFFSET:
        weigh_older(OS_FILES, work, whole, throttle=throttle)
    return Part(replace(indexed, keys=whole.used), _saved(whole, folder))


def rewrite_task(
    work: PassWork,
    folder: str,
    part: Part,
    groups: Sequence[tuple[SourceSegment, ...]],
    number: int,
    *,
    tasks: int,
    transactions: Transactions | None = None,
) -> Rewritten:
    """The groups of one task, one after the other, into a folder of its own; `tasks` are at work at the same time."""
    check_sees(work, folder)
    mine = os.path.join(folder, uuid.uuid4().hex)
    os.mkdir(mine)
    offset_map = DedupeMap.load(part.path, work.map_settings)
    throttle = Throttle(work.bytes_per_second / tasks)
    transactions = transactions or Transactions()
    writer = GroupWriter(OS_FILES, work, part.indexed, offset_map, mine, throttle=throttle, transactions=transactions)
    # The executor's name: its Python processes have one parent, and executors may share a host.
    executor = f"{os.uname().nodename}:{os.getppid()}"
    done: list[Cleaned | Exception] = []
    for group in groups:
        try:
            done.append(replace(writer.clean(group), worker=executor))
        except (DuramenError, OSError) as error:
            done.append(error)
            break
    return Rewritten(done, transactions)


def _saved(offset_map: DedupeMap, folder: str) -> str:
    path = os.path.join(folder, f"{uuid.uuid4().hex}.map")
    offset_map.save(OS_FILES, path)
    return path

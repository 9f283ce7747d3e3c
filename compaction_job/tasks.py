"""What compaction's tasks do on executors: index a range, merge maps, rewrite a group. Imports no Spark.

A task reads the logs and writes only into a folder of its own below the run's; its report names it, so what a
speculative or zombie task wrote is never looked at.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import DirtyRange, index_older_versions, index_range, merge_ranges
from logstore.cleaner.rewrite import GroupWriter, Pace
from logstore.cleaner.throttle import Throttle
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import Cleaned, Indexed, PassWork
from logstore.errors import DuramenError
from logstore.files import OS_FILES
from logstore.records.marks import ORDER_OFFSET
from logstore.records.offset_map import OffsetMap
from logstore.spark_tasks import check_seen, executor_name

JOB_BYTES = 512 << 20
"""The least a job rewrites, if there is that much: starting one takes Spark as long as rewriting a hundred
megabytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range's keys, saved at `path`."""

    indexed: Indexed
    path: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Groups in order, the last one an error if it failed, and what is known of transactions after them."""

    groups: Sequence[Cleaned | Exception]
    transactions: Transactions


def check_sees(work: PassWork, folder: str) -> None:
    """Raises UnsuitableFileSystem when this process does not see the run's folder or the log."""
    for path in (folder, work.directory):
        check_seen(path, os.path.isdir(path))


def index_task(work: PassWork, folder: str, ranges: Sequence[DirtyRange], number: int, *, keys_max: int | None) -> Part:
    check_sees(work, folder)
    mine = ranges[number]
    offset_map = OffsetMap(work.map_settings, keys_max=keys_max, records=mine.offsets)
    throttle = Throttle(work.bytes_per_second / len(ranges))
    indexed = index_range(OS_FILES, work, offset_map, mine, throttle=throttle)
    if len(ranges) == 1 and work.map_settings.order != ORDER_OFFSET:
        index_older_versions(OS_FILES, work, offset_map, throttle=throttle)
    return Part(indexed, _saved(offset_map, folder))


def merge_task(work: PassWork, folder: str, parts: Sequence[Part], number: int) -> Part:
    """One map of all ranges, made by one process."""
    check_sees(work, folder)
    whole = OffsetMap(work.map_settings, records=DirtyRange.of(work, work.first_dirty_offset).offsets)
    maps = [OffsetMap.load(part.path, work.map_settings) for part in parts]
    if parts[0].indexed.is_full or not whole.merge(maps[0]):
        return parts[0]
    maps[0] = whole
    throttle = Throttle(work.bytes_per_second)
    indexed = merge_ranges(OS_FILES, work, maps, [part.indexed for part in parts], throttle=throttle)
    if work.map_settings.order != ORDER_OFFSET:
        index_older_versions(OS_FILES, work, whole, throttle=throttle)
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
    offset_map = OffsetMap.load(part.path, work.map_settings)
    throttle = Throttle(work.bytes_per_second / tasks)
    transactions = transactions or Transactions()
    writer = GroupWriter(OS_FILES, work, part.indexed, offset_map, mine, pace=Pace(throttle), transactions=transactions)
    done: list[Cleaned | Exception] = []
    for group in groups:
        try:
            done.append(replace(writer.clean(group), worker=executor_name()))
        except (DuramenError, OSError) as error:
            done.append(error)
            break
    return Rewritten(done, transactions)


def _saved(offset_map: OffsetMap, folder: str) -> str:
    path = os.path.join(folder, f"{uuid.uuid4().hex}.map")
    offset_map.save(OS_FILES, path)
    return path

"""Retention and deletion of records in one partition of a store, under its locks and with a report.

A dry run decides by the same facts and rules, but reads the files only: opening a log repairs it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from logstore.clock import ManualClock
from logstore.commit.writing import writing
from logstore.errors import DamagedLog, LedgerError, OffsetOutOfRange
from logstore.partition.retention import (
    DeletedRecords,
    LogFacts,
    Retention,
    SegmentFacts,
    policies_of,
    retention_passes,
)
from logstore.segment.names import FileKind, file_name
from logstore.segment.segment import LogSegment
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.commit.committer import Committer

#: a replacement takes milliseconds
_LOOKS_MAX, _LOOK_AGAIN_S = 20, 0.05


def retain(
    store: OpenStore, topic: Topic, number: int, *, now_ms: int, dry_run: bool = False, wait_ms: int | None = None
) -> Retention:
    """Run the topic's retention over one partition. Raises LockHeld, CorruptState, DamagedLog.

    `wait_ms` is how long to wait for a compaction of the partition; None: as long as the store waits for any lock.
    """
    if dry_run:
        return _would_retain(store, topic, number, now_ms)
    what = f"retain {topic.name}-{number}"
    with (
        store.locks.maintenance(topic.id, number, what=what, wait_ms=wait_ms),
        writing(store, topic, number, what=what, clock=ManualClock(now_ms)) as log,
    ):
        done = log.apply_retention()
        return Retention(topic.partition(number), log.log_start_offset, tuple(done))


def flush_before_retention(store: OpenStore, topic: Topic, *, wait_ms: int | None = None) -> None:
    """Settle and flush the topic if a commit is not wholly in its logs, or not on disk there. Raises LockHeld,
    DamagedLog, CorruptState.
    """
    committer = committer_of(store)
    if committer is None:
        return
    ends = store.ends(topic)
    if (
        ends.recovery_points != ends.high_watermarks
        or ends.flushed_sequence != ends.applied_sequence
        or committer.ledger.sequence(topic.id) != ends.applied_sequence
    ):
        committer.flush(topic, wait_ms=wait_ms)


def _would_retain(store: OpenStore, topic: Topic, number: int, now_ms: int) -> Retention:
    """What a run would do. Without a lock: a segment may be replaced, or the topic deleted; then it looks again."""
    for _ in range(_LOOKS_MAX):
        try:
            return _judged_by_files(store, topic, number, now_ms)
        except FileNotFoundError as error:
            store.check_exists(topic)
            missing = error
            time.sleep(_LOOK_AGAIN_S)
    raise DamagedLog(
        "a segment of the list is missing",
        file=missing.filename,
        partition=topic.partition(number),
        hint="Run `duramen recover`",
    ) from missing


def _judged_by_files(store: OpenStore, topic: Topic, number: int, now_ms: int) -> Retention:
    """By the rule and the facts a run goes by; read from the files, because opening a log repairs it."""
    state = store.partition_state(topic, number)
    high_watermark = store.high_watermark(topic, number)
    directory = store.layout.partition(topic.partition(number))

    @contextlib.contextmanager
    def opened(base_offset: int) -> Iterator[LogSegment]:
        segment = LogSegment(store.fs, directory, base_offset, limits=store.limits)
        try:
            yield segment
        finally:
            segment.close(clean=False)

    def newest_ms(base_offset: int) -> int:
        with opened(base_offset) as segment:
            return segment.newest_timestamp_ms()

    segments = []
    for entry in state.segments:
        size, timestamp_ms = entry.size_bytes, entry.largest_timestamp_ms
        if entry is state.segments[-1]:  # the list has it as it was when it was written
            with opened(entry.base_offset) as active:
                size, timestamp_ms = active.size_bytes, active.scan_largest(high_watermark).timestamp_ms
        if timestamp_ms < 0:
            path = os.path.join(directory, file_name(entry.base_offset, FileKind.LOG))
            timestamp_ms = store.fs.stat(path).mtime_ms
        segments.append(SegmentFacts(entry.base_offset, size, timestamp_ms, partial(newest_ms, entry.base_offset)))
    # No log is open: its end is not known, but what is committed ends here.
    log = LogFacts(tuple(segments), state.log_start_offset, high_watermark, high_watermark)
    passes = list(retention_passes(policies_of(store.log_config(topic)), log, now_ms))
    gone = sum(len(each.segments) for each in passes)
    start = high_watermark if gone and gone == len(segments) else segments[gone].base_offset if gone else 0
    return Retention(topic.partition(number), max(start, state.log_start_offset), tuple(passes))


def delete_records(
    store: OpenStore, topic: Topic, number: int, *, before_offset: int | None, dry_run: bool = False
) -> DeletedRecords:
    """Raise the log start to `before_offset` (None: to the high watermark); files go with the next retention.

    Raises OffsetOutOfRange beyond the high watermark, LockHeld, CorruptState, DamagedLog.
    """
    partition = topic.partition(number)
    high_watermark = store.high_watermark(topic, number)
    target = high_watermark if before_offset is None else before_offset
    if not 0 <= target <= high_watermark:
        raise OffsetOutOfRange(
            f"cannot delete up to {target}: the high watermark is {high_watermark}", partition=partition, offset=target
        )
    start = store.partition_state(topic, number).log_start_offset
    if dry_run:
        return DeletedRecords(partition, start, max(start, target))
    what = f"delete records of {partition}"
    with store.locks.maintenance(topic.id, number, what=what), writing(store, topic, number, what=what) as log:
        start = log.log_start_offset
        log.advance_log_start(target)
        return DeletedRecords(partition, start, log.log_start_offset)


def committer_of(store: OpenStore) -> Committer | None:
    """None where there is no ledger, or none that can be opened."""
    from logstore.commit.committer import Committer

    try:
        return Committer(store) if store.has_ledger else None
    except LedgerError:
        return None  # `repair` says what is wrong with it

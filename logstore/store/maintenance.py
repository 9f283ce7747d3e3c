"""Retention, deletion of records and recovery of one partition of a store, each under its locks and with its report.

A dry run decides by the same facts and rules, but reads the files only: opening a log repairs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from logstore.clock import ManualClock
from logstore.errors import CorruptState, DamagedLog, LedgerError, OffsetOutOfRange
from logstore.partition.retention import LogFacts, SegmentFacts, policies_of, retention_passes
from logstore.segment.names import FileKind, file_name
from logstore.segment.segment import LogSegment
from logstore.store.ends import TopicEnds
from logstore.store.placing import place_partitions
from logstore.store.registry import Topic
from logstore.store.store import LogStore, published
from logstore.topic import TopicPartition

if TYPE_CHECKING:
    from logstore.ledger import CommitRow
    from logstore.partition.log import PartitionLog
    from logstore.store.committer import Committer


@dataclass(frozen=True, slots=True)
class RetainedBy:
    """What one pass of retention removed, or would remove."""

    policy: str
    base_offsets: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Retention:
    partition: TopicPartition
    log_start_offset: int
    passes: tuple[RetainedBy, ...]


@dataclass(frozen=True, slots=True)
class DeletedRecords:
    partition: TopicPartition
    log_start_offset_before: int
    log_start_offset: int


@dataclass(slots=True)
class Recovery:
    """What recovery found; `lost_from` to `lost_to` are committed offsets that no record has any more."""

    partition: TopicPartition
    log_end_offset: int
    segments_scanned: int = 0
    bytes_scanned: int = 0
    dropped_bytes: int = 0
    cuts: list[dict[str, object]] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost_from: int | None = None
    lost_to: int | None = None

    @property
    def found_damage(self) -> bool:
        return bool(self.cuts or self.quarantined or self.lost_from is not None)


def retain(
    store: LogStore, topic: Topic, number: int, *, now_ms: int, dry_run: bool = False, wait_ms: int | None = None
) -> Retention:
    """Run the topic's retention over one partition. Raises LockHeld, CorruptState, DamagedLog.

    `wait_ms` is for whoever compacts the partition at the moment; None: as long as the store waits for any lock.
    """
    if dry_run:
        return _would_retain(store, topic, number, now_ms)
    what = f"retain {topic.name}-{number}"
    with (
        store.locks.maintenance(topic.id, number, what=what, wait_ms=wait_ms),
        store.writing(topic, number, what=what, clock=ManualClock(now_ms)) as log,
    ):
        done = log.apply_retention()
        passes = tuple(RetainedBy(each.policy, each.base_offsets, each.bytes) for each in done)
        return Retention(topic.partition(number), log.log_start_offset, passes)


def _would_retain(store: LogStore, topic: Topic, number: int, now_ms: int) -> Retention:
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
    return Retention(
        topic.partition(number),
        max(start, state.log_start_offset),
        tuple(RetainedBy(each.policy, each.base_offsets, each.size_bytes) for each in passes),
    )


def delete_records(
    store: LogStore, topic: Topic, number: int, *, before_offset: int | None, dry_run: bool = False
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
    with store.locks.maintenance(topic.id, number, what=what), store.writing(topic, number, what=what) as log:
        start = log.log_start_offset
        log.advance_log_start(target)
        return DeletedRecords(partition, start, log.log_start_offset)


def recover(
    store: LogStore,
    topic: Topic,
    numbers: list[int] | None = None,
    *,
    done: Callable[[Recovery], None] = lambda _: None,
) -> list[Recovery]:
    """Check every byte of the topic's partitions, cut at damage, rebuild what is derived; go on behind what is lost.

    An offset once committed is never given to another record: where a log ends too early, it goes on at the committed
    end. If the topic's ends are damaged or missing, all records found are taken as committed, in all partitions.
    Raises LockHeld.
    """
    what = f"recover {topic.name}"
    notes: list[str] = []
    ends: TopicEnds | None = None
    committer = _committer(store)
    if committer is not None:
        try:
            committer.settle_topic(topic)  # what is staged still need not be lost
        except (CorruptState, DamagedLog, LedgerError) as error:
            notes.append(f"not everything that is staged could be appended: {error}")
    try:
        ends = store.ends(topic) if store.fs.exists(store.layout.ends(topic.id)) else None
    except CorruptState as error:
        notes.append(f"the topic's ends were made anew: {error}")
    chosen = list(range(topic.partitions)) if numbers is None or ends is None else numbers
    reports = []
    with contextlib.ExitStack() as held:
        held.enter_context(store.locks.maintenance_of(topic.id, sorted(set(chosen)), what=what))
        place_partitions(store, topic, chosen)
        held.enter_context(store.locks.lease(topic.id, what=what))
        store.check_exists(topic)
        result = ends or TopicEnds.empty(topic.partitions)
        for number in chosen:
            committed = None if ends is None else ends.high_watermarks[number]
            with store.locks.partition(topic.id, number, what=what):
                report, log = _recover(store, topic, number, committed)
            report.notes += notes
            result = published(result, number, log)
            if ends is not None:
                store.write_ends(topic, result)
            reports.append(report)
            done(report)
        if ends is None:
            applied = 0 if committer is None else _applied(committer.ledger.commits_after(topic.id, 0), result)
            store.write_ends(topic, replace(result, applied_sequence=applied, flushed_sequence=applied))
    return reports


def _committer(store: LogStore) -> Committer | None:
    from logstore.store.committer import Committer

    return Committer(store) if store.fs.exists(store.layout.ledger) else None


def _applied(rows: Sequence[CommitRow], ends: TopicEnds) -> int:
    """The last commit up to which the logs hold everything; later ones are appended by the next writer."""
    applied = 0
    for row in rows:
        if any(end > found for end, found in zip(row.end_offsets, ends.high_watermarks, strict=False)):
            break
        applied = row.sequence
    return applied


def _recover(store: LogStore, topic: Topic, number: int, committed: int | None) -> tuple[Recovery, PartitionLog]:
    """The report, and the log, closed. `committed` None: everything found is."""
    log = store.open_log(topic, number, clean=False)
    found = log.recovery
    report = Recovery(
        topic.partition(number),
        log.log_end_offset,
        segments_scanned=found.segments_scanned,
        bytes_scanned=found.bytes_scanned,
        dropped_bytes=found.dropped_bytes,
        cuts=[
            {"file": cut.file, "position": cut.position, "dropped_bytes": cut.dropped_bytes, "reason": cut.reason}
            for cut in found.cuts
        ],
        quarantined=list(found.quarantined),
        rebuilt=list(found.rebuilt),
        notes=list(found.notes),
    )
    if committed is not None and log.log_end_offset < committed:
        report.lost_from, report.lost_to = log.log_end_offset, committed
        log.close()
        _begin_segment(store, log.directory, committed)
        log = store.open_log(topic, number, clean=True)
    elif committed is not None:
        log.truncate_to(committed)  # what lies above was never published
    log.close()
    report.log_end_offset = log.log_end_offset
    return report, log


def _begin_segment(store: LogStore, directory: str, base_offset: int) -> None:
    """An empty segment behind a gap: the log goes on there."""
    file = store.fs.open(os.path.join(directory, file_name(base_offset, FileKind.LOG)), create=True)
    try:
        file.fsync()
    finally:
        file.close()
    store.fs.fsync_dir(directory)

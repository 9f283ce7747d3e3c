"""Retention, deletion of records and recovery of one partition of a store, each under its locks and with its report.

A dry run decides by the same facts and rules, but reads the files only: opening a log repairs it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from logstore.clock import ManualClock
from logstore.commit.writing import published, writing
from logstore.directory.ends import TopicEnds
from logstore.directory.state import Loss
from logstore.errors import CorruptState, DamagedLog, LedgerError, OffsetOutOfRange, RecoveryChanged, StrayDirectory
from logstore.partition.losses import subtract
from logstore.partition.retention import LogFacts, RetentionPass, SegmentFacts, policies_of, retention_passes
from logstore.partition.salvage import carry_out
from logstore.segment.names import FileKind, file_name
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic
from logstore.upkeep.salvage import Looked, look

if TYPE_CHECKING:
    from logstore.commit.committer import Committer
    from logstore.directory.finding import Finding
    from logstore.ledger import CommitRow
    from logstore.partition.log import PartitionLog


_ENDS_EVERY = 64
#: a replacement takes milliseconds
_LOOKS_MAX, _LOOK_AGAIN_S = 20, 0.05


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
    """What recovery found and did, or, of a dry run, would do."""

    partition: TopicPartition
    log_end_offset: int
    segments_scanned: int = 0
    bytes_scanned: int = 0
    dropped_bytes: int = 0
    cuts: list[dict[str, object]] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: small files that were lost or damaged, and what became of them
    repaired: list[str] = field(default_factory=list)
    #: committed offsets that no record has any more, since this recovery
    losses: tuple[Loss, ...] = ()
    #: batches that were put back: where from, first offset, end offset
    readmitted: list[tuple[str, int, int]] = field(default_factory=list)
    #: batches in quarantine that may not come back: first offset, end offset, why
    held_back: list[tuple[int, int, str]] = field(default_factory=list)
    #: what `verify` found before, where it was asked
    findings: list[Finding] = field(default_factory=list)

    @property
    def found_damage(self) -> bool:
        return bool(self.repaired or self.cuts or self.quarantined or self.losses or self.findings)


def retain(
    store: OpenStore, topic: Topic, number: int, *, now_ms: int, dry_run: bool = False, wait_ms: int | None = None
) -> Retention:
    """Run the topic's retention over one partition. Raises LockHeld, CorruptState, DamagedLog.

    `wait_ms` is for whoever compacts the partition at the moment; None: as long as the store waits for any lock.
    """
    if dry_run:
        return _would_retain(store, topic, number, now_ms)
    what = f"retain {topic.name}-{number}"
    with (
        store.locks.maintenance(topic.id, number, what=what, wait_ms=wait_ms),
        writing(store, topic, number, what=what, clock=ManualClock(now_ms)) as log,
    ):
        done = log.apply_retention()
        return Retention(topic.partition(number), log.log_start_offset, _retained_by(done))


def flush_before_retention(store: OpenStore, topic: Topic, *, wait_ms: int | None = None) -> None:
    """Settle and flush the topic if a commit is not wholly in its logs, or not on disk there. Raises LockHeld,
    DamagedLog, CorruptState.
    """
    committer = _committer(store)
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
    return Retention(
        topic.partition(number),
        max(start, state.log_start_offset),
        _retained_by(passes),
    )


def _retained_by(passes: Sequence[RetentionPass]) -> tuple[RetainedBy, ...]:
    return tuple(RetainedBy(each.policy, each.base_offsets, each.size_bytes) for each in passes)


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


def recover(
    store: OpenStore,
    topic: Topic,
    numbers: list[int] | None = None,
    *,
    done: Callable[[Recovery], None] = lambda _: None,
    dry_run: bool = False,
    readmit: bool = False,
    allowed: Mapping[TopicPartition, Sequence[Loss]] | None = None,
    ledger: RecoveryLedger | None = None,
) -> list[Recovery]:
    """Check every byte of the topic's partitions, take out what is damaged, rebuild what is derived.

    Damage costs the batches it hit and no others; the offsets they had are written down as losses. What staging still
    has is put back first, with `readmit` what quarantine has, too. An offset once committed is never given to another
    record: where a log ends too early, it goes on at the committed end. If the topic's ends are damaged or missing, all
    records found are taken as committed, in all partitions.

    With `dry_run` nothing is changed and the reports say what would be. `allowed` are the losses somebody agreed to:
    Raises RecoveryChanged when there are others by now, with nothing done. Raises LockHeld. `ledger` is shared by
    whoever recovers several topics.
    """
    from logstore.upkeep.topic_repair import repair_partition

    what = f"recover {topic.name}"
    notes: list[str] = []
    wanted = range(topic.partitions) if numbers is None else numbers
    repaired = {number: repair_partition(store, topic, number, dry_run=dry_run) for number in wanted}
    committer = (ledger or RecoveryLedger(store)).committer(dry_run=dry_run)
    if committer is not None and not dry_run:
        try:
            committer.settle_topic(topic)  # what is staged still need not be lost
        except (CorruptState, DamagedLog, LedgerError, StrayDirectory) as error:
            notes.append(f"not everything that is staged could be appended: {error}")
    known = _known_ends(store, topic, committer, notes)
    chosen = list(range(topic.partitions)) if numbers is None or known.ends is None else numbers
    reports: list[Recovery] = []
    with contextlib.ExitStack() as held:
        held.enter_context(store.locks.maintenance_of(topic.id, sorted(set(chosen)), what=what))
        for number in chosen:
            if number not in repaired:
                repaired[number] = repair_partition(store, topic, number, dry_run=dry_run)
        held.enter_context(store.locks.lease(topic.id, what=what))
        store.check_exists(topic)
        known = _known_ends(store, topic, committer, [])
        if len(chosen) < topic.partitions:
            known = known.published_only()  # a commit is taken for applied in all partitions or in none
        result = known.ends or TopicEnds.empty(topic.partitions)
        for number in chosen:
            with store.locks.partition(topic.id, number, what=what):
                looked = look(
                    store,
                    topic,
                    number,
                    committed=None if known.ends is None else known.decided[number],
                    at_least=known.decided[number],
                    rows=known.rows,
                    readmit=readmit,
                    dry_run=dry_run,
                )
                report = _planned(topic.partition(number), looked)
                if not dry_run:
                    if allowed is not None:
                        _check_allowed(report, allowed.get(report.partition, ()))
                    log = _carry_out(store, topic, number, looked, report)
                    result = published(result, number, log)
            report.notes += notes
            report.repaired += repaired[number]
            # All of them lie in one file: not written again for each of many partitions.
            is_last = number == chosen[-1]
            if known.ends is not None and not dry_run and (is_last or len(reports) % _ENDS_EVERY == 0):
                store.write_ends(topic, result)
            reports.append(report)
            done(report)
        if known.ends is None and any(report.log_end_offset for report in reports):
            reports[0].repaired.append("the topic's ends were missing or damaged; all records found are committed")
        if dry_run:
            return reports
        if known.ends is None:
            applied = 0 if committer is None else _applied(known.rows, result)
            store.write_ends(topic, replace(result, applied_sequence=applied, flushed_sequence=applied))
        elif len(chosen) == topic.partitions and known.sequence > result.applied_sequence:
            # Every partition has what was committed, or its loss is written down.
            store.write_ends(topic, replace(result, applied_sequence=known.sequence, flushed_sequence=known.sequence))
    return reports


@dataclass(frozen=True, slots=True)
class _KnownEnds:
    """Where the topic's partitions end, by its `ends` and by the ledger."""

    ends: TopicEnds | None
    #: the high watermarks, or what the ledger decided beyond them
    decided: tuple[int, ...] = ()
    #: the last commit that `decided` speaks of
    sequence: int = 0
    #: commits whose staged files may still be there
    rows: tuple[CommitRow, ...] = ()

    def published_only(self) -> _KnownEnds:
        assert self.ends is not None
        applied = self.ends.applied_sequence
        rows = tuple(row for row in self.rows if row.sequence <= applied)
        return _KnownEnds(self.ends, self.ends.high_watermarks, applied, rows)


def _known_ends(store: OpenStore, topic: Topic, committer: Committer | None, notes: list[str]) -> _KnownEnds:
    ends: TopicEnds | None = None
    try:
        ends = store.ends(topic) if store.fs.exists(store.layout.ends(topic.id)) else None
    except CorruptState as error:
        notes.append(f"the topic's ends were made anew: {error}")
    rows: tuple[CommitRow, ...] = ()
    if committer is not None:
        try:
            rows = tuple(committer.ledger.commits_after(topic.id, 0 if ends is None else ends.flushed_sequence))
        except LedgerError as error:
            notes.append(f"the ledger could not be asked: {error}")
    decided = [0] * topic.partitions if ends is None else list(ends.high_watermarks)
    for row in rows:
        for number, end in enumerate(row.end_offsets[: topic.partitions] if not row.void else ()):
            decided[number] = max(decided[number], end)
    sequence = max([0 if ends is None else ends.applied_sequence, *(row.sequence for row in rows)])
    return _KnownEnds(ends, tuple(decided), sequence, rows)


class RecoveryLedger:
    """The ledger as recovery asks it, opened once for all topics: that costs more than most partitions do."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._committer: Committer | None = None

    def committer(self, *, dry_run: bool) -> Committer | None:
        """None where there is no ledger, or none that can be opened."""
        # Opening a ledger sets aside what is torn; a dry run leaves a damaged one alone.
        if self._committer is None and (not dry_run or _has_sound_ledger(self._store)):
            self._committer = _committer(self._store)
        return self._committer


def _committer(store: OpenStore) -> Committer | None:
    from logstore.commit.committer import Committer

    try:
        return Committer(store) if store.has_ledger else None
    except LedgerError:
        return None  # `repair` says what is wrong with it


def _has_sound_ledger(store: OpenStore) -> bool:
    from logstore.upkeep.repair import examine

    return store.has_ledger and examine(store, deep=False).sound


def _applied(rows: Sequence[CommitRow], ends: TopicEnds) -> int:
    """The last commit up to which the logs hold everything; later ones are appended by the next writer."""
    applied = 0
    for row in rows:
        if any(end > found for end, found in zip(row.end_offsets, ends.high_watermarks, strict=False)):
            break
        applied = row.sequence
    return applied


def _planned(partition: TopicPartition, looked: Looked) -> Recovery:
    """The report of a plan; what is only found while it is carried out is added then."""
    plan = looked.plan
    ends = [piece.end_offset for segment in plan.segments for piece in segment.pieces]
    return Recovery(
        partition,
        plan.committed if plan.committed is not None else max(ends, default=plan.log_start_offset),
        segments_scanned=len(plan.segments),
        bytes_scanned=plan.bytes_scanned,
        dropped_bytes=sum(each.size_bytes for each in plan.damages),
        cuts=[
            {
                "file": each.file,
                "position": each.position,
                "dropped_bytes": each.size_bytes,
                "reason": each.reason,
                "lost_from": each.base_offset,
                "lost_to": each.end_offset,
                "at_most": each.at_most,
            }
            for each in plan.damages
        ],
        notes=list(looked.notes),
        losses=plan.losses,
        readmitted=list(plan.refilled),
        held_back=list(looked.held_back),
    )


def _check_allowed(report: Recovery, allowed: Sequence[Loss]) -> None:
    agreed = [(each.base_offset, each.end_offset) for each in allowed]
    more = subtract([(each.base_offset, each.end_offset) for each in report.losses], agreed)
    if more:
        raise RecoveryChanged(
            f"offsets {more[0][0]} to {more[0][1]} would be lost as well by now; nothing was changed",
            partition=report.partition,
            offset=more[0][0],
            hint="Look again with `duramen recover --dry-run`",
        )


def _carry_out(store: OpenStore, topic: Topic, number: int, looked: Looked, report: Recovery) -> PartitionLog:
    """Make the directory sound, then let the log itself rebuild the rest; the log, closed."""
    committed = looked.partition.committed
    state_path = store.layout.partition_state(topic.id, number)
    if looked.plan.changes or looked.partition.state is None:
        _, report.quarantined = carry_out(looked.partition, looked.plan, state_path)
    log = store.open_log(topic, number, clean=False, keep_offset=committed or 0)
    found = log.recovery
    report.rebuilt += found.rebuilt
    report.notes += found.notes
    if committed is not None:
        log.truncate_to(committed)  # what lies above was never published
    log.close()
    report.segments_scanned = found.segments_scanned
    report.log_end_offset = log.log_end_offset
    return log

"""The redo log: committed batches lie in `staging/` until they were flushed, and what a log lost meanwhile is restored
from there.

A log may lose unflushed bytes with the power, and also without it: a storage box that restarts, a volume put back to a
snapshot, a write-back that failed. `cut_short` is the cheap question that every writer asks before it commits.
`first_damage` reads everything above the recovery point; a flush asks it before it lets the staged files go.
`restore_partition` keeps the plans that are whole and applies the others again, which gives the same bytes at the same
offsets.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from logstore.commit.apply import apply_partition
from logstore.commit.plan import Plan, read_plan
from logstore.directory.ends import TopicEnds
from logstore.directory.state import Loss, PartitionState, read_state, write_state
from logstore.directory.tails import PartitionTail
from logstore.errors import BufferLimit, CorruptBatch, CorruptState, DamagedLog, UnappliablePlan
from logstore.files import read_whole
from logstore.ledger import CommitRow, Ledger
from logstore.limits import INT64_MAX
from logstore.partition.appender import tail_of
from logstore.partition.environment import LastKnown
from logstore.partition.log import PartitionLog
from logstore.records.scan import scan_batches
from logstore.records.table import BASE_OFFSET, LAST_OFFSET
from logstore.segment.names import FileKind, file_name
from logstore.segment.segment import LogSegment
from logstore.topics.opened import OpenStore
from logstore.topics.placing import place_partition
from logstore.topics.registry import Topic

#: a log up to this size is read as a whole
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Damage:
    """The first offset above the recovery point that cannot be read, and why."""

    offset: int
    reason: str


def unflushed(ledger: Ledger, topic: Topic, ends: TopicEnds) -> list[CommitRow]:
    """The commits that were applied and not flushed since: their staged files are the redo log."""
    return [
        row
        for row in ledger.commits_after(topic.id, ends.flushed_sequence)
        if not row.void and row.sequence <= ends.applied_sequence
    ]


def committed_plan(store: OpenStore, topic: Topic, row: CommitRow) -> Plan:
    """Raises DamagedLog when it is gone, CorruptState when it is not the one that was committed."""
    folder = store.layout.plan(row.plan_id)
    try:
        plan = read_plan(store.fs, folder, limits=store.limits)
    except FileNotFoundError:
        raise UnappliablePlan(
            f"the staged files of commit {row.sequence} of topic {topic.name} are gone before they were appended",
            file=folder,
            hint="The store is from an older copy, or was copied while it was written. `duramen recover` takes what "
            "the logs hold and continues after the rest; `duramen set-aside` gives up this batch alone",
        ) from None
    mine = plan.topic(topic.id)
    if mine is None or (mine.sequence, mine.base_offsets, mine.end_offsets) != (
        row.sequence,
        row.base_offsets,
        row.end_offsets,
    ):
        raise CorruptState(f"the plan does not match commit {row.sequence} of topic {topic.name}", file=folder)
    return plan


# --- looking ----------------------------------------------------------------------------------------------------------


def cut_short(store: OpenStore, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> list[int]:
    """Those of the partitions whose log is shorter than it was left: one read for all, a stat for each.

    A slot without a tail is not counted as shorter; the next append looks for its end.
    """
    with store.tails(topic) as tails:
        found = tails.read_many(numbers)
    short = []
    for number, tail in zip(numbers, found, strict=True):
        if tail is None or not tail.is_current:
            continue
        path = os.path.join(
            store.layout.partition(topic.partition(number)), file_name(tail.tail.base_offset, FileKind.LOG)
        )
        try:
            size_bytes = store.fs.stat(path).size_bytes if tail.tail.size_bytes else 0
        except FileNotFoundError:
            size_bytes = -1
        if size_bytes < tail.tail.size_bytes or tail.end_offset < ends.high_watermarks[number]:
            short.append(number)
    return short


def first_damage(store: OpenStore, topic: Topic, number: int, ends: TopicEnds) -> Damage | None:
    """Read everything from the recovery point to the high watermark. None when every batch is there and sound.

    Nothing above the recovery point was compacted, so a gap is a loss. Writes nothing; an error of the system goes up.
    """
    expected, end = ends.recovery_points[number], ends.high_watermarks[number]
    state = store.partition_state(topic, number)
    expected = max(expected, state.log_start_offset)
    directory = store.layout.partition(topic.partition(number))
    for at, entry in enumerate(state.segments):
        following = state.segments[at + 1].base_offset if at + 1 < len(state.segments) else None
        if following is not None and following <= expected:
            continue
        if len(state.segments) == 1 and _is_small_and_sound(store, directory, entry.base_offset, expected, end):
            return None
        try:
            segment = LogSegment(store.fs, directory, entry.base_offset, limits=store.limits)
        except FileNotFoundError:
            return Damage(expected, f"the segment at {entry.base_offset} is gone")
        except CorruptBatch as error:
            return Damage(expected, error.what)
        try:
            if following is not None and segment.size_bytes != entry.size_bytes:
                return Damage(expected, f"a segment of {segment.size_bytes} bytes, where {entry.size_bytes} are listed")
            expected, reason = _read_through(segment, expected, end, state.losses)
        finally:
            segment.close(clean=False)
        if reason:
            return Damage(expected, reason)
        if following is not None and _over(expected, following, state.losses) < following:
            return Damage(expected, f"offsets {expected} to {following} are missing")
    return Damage(expected, "the log ends there") if _over(expected, end, state.losses) < end else None


def _is_small_and_sound(store: OpenStore, directory: str, base_offset: int, expected: int, end: int) -> bool:
    """Whether a small file holds every batch from `expected` to `end`, without its indexes; False says nothing."""
    try:
        data = read_whole(store.fs, os.path.join(directory, file_name(base_offset, FileKind.LOG)), limit=_SMALL_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.EFBIG:
            return False
        raise
    scan = scan_batches(np.frombuffer(data, dtype=np.uint8))
    begins, lasts = scan.table[:, BASE_OFFSET], scan.table[:, LAST_OFFSET]
    first = int(np.searchsorted(lasts, expected))  # of offsets that increase, which is looked at next
    return (
        first < len(lasts)
        and bool((begins[1:] == lasts[:-1] + 1).all())
        and int(begins[first]) <= expected
        and int(lasts[-1]) + 1 >= end
    )


def _over(offset: int, begin: int, losses: Sequence[Loss]) -> int:
    """`begin`, if all that lies between is known to be lost; else `offset`."""
    at = offset
    for loss in sorted(losses, key=lambda loss: loss.base_offset):
        if loss.base_offset <= at < loss.end_offset:
            at = loss.end_offset
    return begin if at >= begin else offset


def _read_through(segment: LogSegment, expected: int, end: int, losses: Sequence[Loss]) -> tuple[int, str]:
    """How far batches follow one another from `expected` on, and what is wrong with the next one, if anything is."""
    try:
        first = segment.find_batch(expected)
        for chunk in segment.chunks(first.position) if first is not None else ():
            begins, lasts = chunk.table[:, BASE_OFFSET], chunk.table[:, LAST_OFFSET]
            behind = np.concatenate(([expected], lasts[:-1] + 1))
            for row in np.nonzero(begins > behind)[0].tolist():
                if _over(int(behind[row]), int(begins[row]), losses) < int(begins[row]):
                    return int(behind[row]), "offsets do not follow one another"
            if bool((begins[1:] < behind[1:]).any()):
                return expected, "offsets do not follow one another"
            expected = int(lasts[-1]) + 1
            if expected >= end:  # what lies after was never published
                break
    except CorruptBatch as error:
        return expected, error.what
    except BufferLimit:
        # Too large to look into, and nothing that staging could not say better; `apply` refuses such a batch.
        return end, ""
    return expected, ""


# --- putting back -----------------------------------------------------------------------------------------------------


def restore_partition(
    store: OpenStore,
    topic: Topic,
    number: int,
    ends: TopicEnds,
    rows: Sequence[CommitRow],
) -> None:
    """Check the log from its recovery point on, and apply the plans again that are not whole. `rows` are `unflushed`.

    The caller holds the topic's lease and no partition lock. It can be run again after any error, and changes nothing
    where everything is whole. Raises DamagedLog when flushed records are damaged, or staged files that are needed gone.
    """
    # A row from before the topic was widened has nothing for a partition that came later.
    rows = [row for row in rows if number < len(row.end_offsets)]
    recovery_point = ends.recovery_points[number]
    place_partition(store, topic, topic.partition(number), wait_ms=0)
    with store.locks.partition(topic.id, number, what=f"check {topic.name}-{number}"):
        log = store.open_log(
            topic,
            number,
            # What lies above the recovery point is still in staging.
            LastKnown(False, recovery_point, keep_offset=recovery_point, unsynced_offset=recovery_point),
        )
        try:
            if log.log_end_offset < recovery_point:
                raise DamagedLog(
                    f"flushed up to {recovery_point}, but the log ends at {log.log_end_offset}",
                    partition=topic.partition(number),
                    offset=log.log_end_offset,
                    hint="`duramen recover` continues after the loss",
                )
            losses = store.partition_state(topic, number).losses
            sound_end = _dense_end(log, recovery_point, losses)
            sound_end = _over(sound_end, log.log_end_offset, losses)
            intact = ends.flushed_sequence
            end = rows[0].base_offsets[number] if rows else recovery_point
            for row in rows:
                if row.end_offsets[number] > sound_end:
                    break
                intact, end = row.sequence, row.end_offsets[number]
            log.truncate_to(end)
        finally:
            log.close()
        tail = PartitionTail.of_now(intact, end, tail_of(log.segments[-1]))
        with store.tails(topic) as tails:
            tails.write(number, tail)
    for row in rows:
        if row.sequence > intact:
            apply_partition(store, committed_plan(store, topic, row), topic, number)


def continue_at(store: OpenStore, topic: Topic, number: int, losses: tuple[Loss, ...], offset: int) -> PartitionLog:
    """An empty segment after what is lost, and the losses written down. The caller holds the partition lock."""
    directory = store.layout.partition(topic.partition(number))
    file = store.fs.open(os.path.join(directory, file_name(offset, FileKind.LOG)), create=True)
    try:
        file.fsync()
    finally:
        file.close()
    store.fs.fsync_dir(directory)
    path = store.layout.partition_state(topic.id, number)
    state = read_state(store.fs, path, limits=store.limits) or PartitionState()
    write_state(store.fs, path, replace(state, losses=(*state.losses, *losses)))
    return store.open_log(topic, number, LastKnown(clean=True))


def _dense_end(log: PartitionLog, offset: int, losses: Sequence[Loss]) -> int:
    """Where offsets from `offset` on have their first gap that is not a known loss.

    Recovery takes a gap for compaction, but nothing above the recovery point was compacted: there it is a loss.
    """
    if offset < log.log_start_offset:
        return offset
    ends = [*(segment.base_offset for segment in log.segments[1:]), INT64_MAX]
    for segment, end in zip(log.segments, ends, strict=True):
        if end <= offset:
            continue  # flushed, and not looked at: it may be damaged
        first = segment.find_batch(offset)
        for header in segment.headers(first.position) if first is not None else ():
            if header.begin_offset != offset and _over(offset, header.begin_offset, losses) != header.begin_offset:
                return offset
            offset = header.next_offset
    return offset

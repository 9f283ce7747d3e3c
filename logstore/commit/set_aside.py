"""The way out of a committed batch that cannot be appended: staged files that are damaged or gone, or a batch that is
larger than a reader can hold.

What can be read of it is appended at its offsets, so nothing that is still there is given up. The rest is recorded as a
loss in the partition's state, the log goes on at the committed end, and the staged files are kept in
`staging/PLAN-aside/`. This never happens by itself: a person has to ask for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from logstore.commit.apply import apply_partition, check_continues, current_tail
from logstore.commit.committer import Committer
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.redo import committed_plan, continue_at
from logstore.commit.staged_reader import Piece, StagedReader
from logstore.directory.state import Loss, PartitionState, write_state
from logstore.directory.swap import finish_swap
from logstore.directory.tails import PartitionTail
from logstore.errors import (
    AppendTooLarge,
    BufferLimit,
    CorruptBatch,
    CorruptState,
    DuramenError,
    UnappliablePlan,
)
from logstore.files import File
from logstore.ledger import CommitRow
from logstore.partition.appender import Appender, tail_of
from logstore.partition.environment import LastKnown
from logstore.records.header import read_header
from logstore.records.table import COUNT, POSITION, SIZE
from logstore.segment.batches import Chunk, read_batches
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic

#: what is wrong with a plan's own bytes; anything else (a lock, a full disk, a damaged log) does not justify giving it
#: up
UNAPPLIABLE = (AppendTooLarge, BufferLimit, CorruptBatch, CorruptState, UnappliablePlan)


@dataclass(frozen=True, slots=True)
class SetAsideBatch:
    """What setting a commit aside costs. `kept` is where its staged files lie; None where there are none."""

    topic: str
    sequence: int
    plan_id: str
    reason: str
    losses: dict[int, tuple[Loss, ...]] = field(default_factory=dict)
    kept: str | None = None

    @property
    def lost_records(self) -> int:
        return sum(loss.end_offset - loss.base_offset for losses in self.losses.values() for loss in losses)


@dataclass(frozen=True, slots=True)
class _Gap:
    """Records that cannot be appended."""

    records: int
    reason: str


def set_aside(committer: Committer, topic: Topic, *, dry_run: bool = False) -> SetAsideBatch | None:
    """Set aside the commit that keeps the topic from being written; None when there is none.

    Raises LockHeld, UnknownTopic, LedgerError; DamagedLog when it is the log that is damaged (`duramen recover`).
    """
    store = committer.store
    with store.locks.lease(topic.id, what=f"set aside a batch of {topic.name}"):
        store.check_exists(topic)
        try:
            committer.settle(topic)
            return None
        except UnappliablePlan as error:
            reason = str(error.__cause__ or error)
        ends = store.ends(topic)
        row = committer.ledger.commits_after(topic.id, ends.applied_sequence)[0]
        plan = _readable_plan(store, topic, row)
        losses = {}
        for number, (base, end) in enumerate(zip(row.base_offsets, row.end_offsets, strict=True)):
            lost = _put_what_is_left(store, topic, number, row, plan, dry_run) if end > base else ()
            if lost:
                losses[number] = lost
        if dry_run:
            return SetAsideBatch(topic.name, row.sequence, row.plan_id, reason, losses)
        kept = _keep(store, row.plan_id)
        committer.publish(topic, ends, plan_of(topic, row))
    committer.flush(topic)  # a plan that is not whole cannot be replayed
    return SetAsideBatch(topic.name, row.sequence, row.plan_id, reason, losses, kept)


def _readable_plan(store: OpenStore, topic: Topic, row: CommitRow) -> Plan | None:
    try:
        return committed_plan(store, topic, row)
    except (UnappliablePlan, CorruptState):
        return None


def plan_of(topic: Topic, row: CommitRow) -> TopicPlan:
    """What the ledger alone says of a plan."""
    return TopicPlan(
        topic.name,
        topic.id,
        len(row.end_offsets),
        topic.config_version,
        {},
        row.sequence,
        row.base_offsets,
        row.end_offsets,
        0,
        0,
    )


def _put_what_is_left(
    store: OpenStore, topic: Topic, number: int, row: CommitRow, plan: Plan | None, dry_run: bool
) -> tuple[Loss, ...]:
    """Bring one partition to the commit's end; returns the offsets for which there is no record."""
    if plan is not None and not dry_run:
        try:
            apply_partition(store, plan, topic, number)
            return ()
        except UNAPPLIABLE:
            pass
    base, end = row.base_offsets[number], row.end_offsets[number]
    with store.locks.partition(topic.id, number, what=f"set aside a batch of {topic.name}-{number}"):
        known = current_tail(store, topic, number)
        if known.sequence >= row.sequence:
            return ()
        check_continues(topic.partition(number), known, base)
        state = store.partition_state(topic, number)
        found: Iterator[Chunk | _Gap] = iter([_Gap(end - base, "its staged files are gone")])
        if plan is not None and state.producers:  # their state cannot be kept over a gap in the middle
            found = iter([_Gap(end - base, "the partition has idempotent producers")])
        elif plan is not None:
            found = _what_is_left(store, plan, topic.id, number)
        if dry_run:
            return _losses(found, base, end, store.clock.now_ms())
        return _append(store, topic, number, row, plan, known, state, found)


def _append(
    store: OpenStore,
    topic: Topic,
    number: int,
    row: CommitRow,
    plan: Plan | None,
    known: PartitionTail,
    state: PartitionState,
    found: Iterator[Chunk | _Gap],
) -> tuple[Loss, ...]:
    path = store.layout.partition_state(topic.id, number)
    directory = store.layout.partition(topic.partition(number))
    if state.swap is not None:
        state = finish_swap(store.fs, directory, path, state)
    base, end = row.base_offsets[number], row.end_offsets[number]
    mine = None if plan is None else plan.topic(topic.id)
    if plan is None or mine is None or state.producers:
        losses = _losses(found, base, end, store.clock.now_ms())
        recovery_point = store.ends(topic).recovery_points[number]
        log = store.open_log(topic, number, LastKnown(False, recovery_point, unsynced_offset=recovery_point))
        log.truncate_to(base)  # an interrupted append may have got further
        log.close()
        log = continue_at(store, topic, number, losses, end)
        log.close()
        tail = tail_of(log.segments[-1])
    else:
        place, config = store.layout.place(topic.id, topic.partition(number)), mine.log_config()
        appender = Appender(store.fs, place, known, state=state, config=config, now_ms=plan.now_ms, limits=store.limits)
        try:
            losses = _losses(found, base, end, store.clock.now_ms(), appender)
            appender.continue_at(end)  # a log that ends in a gap says where by its last segment
        except BaseException:
            appender.close()
            raise
        tail, changed = appender.finish()
        changed = changed or state
        write_state(store.fs, path, replace(changed, losses=(*changed.losses, *losses)))
    with store.tails(topic) as tails:
        tails.write(number, PartitionTail.of_now(row.sequence, end, tail))
    return losses


def _losses(
    found: Iterator[Chunk | _Gap], base: int, end: int, now_ms: int, appender: Appender | None = None
) -> tuple[Loss, ...]:
    """The offsets that get no record; what can be read is appended on the way."""
    losses = []
    offset = base
    for each in found:
        if isinstance(each, _Gap):
            stop = min(offset + each.records, end)
            if stop > offset:
                losses.append(Loss(offset, stop, f"set aside: {each.reason}", now_ms))
            offset = stop
            if appender is not None:
                appender.end_offset = offset
        else:
            if appender is not None:
                appender.append([each])
            offset += int(each.table[:, COUNT].sum())
    if offset < end:
        losses.append(Loss(offset, end, "set aside: the staged files have fewer records", now_ms))
    return tuple(losses)


def _what_is_left(store: OpenStore, plan: Plan, topic_id: str, number: int) -> Iterator[Chunk | _Gap]:
    """A partition's batches in order, with gaps for those that cannot be appended.

    What a missing file held is not known: only the total is known, from the end of the commit.
    """
    mine = plan.topic(topic_id)
    assert mine is not None
    segment_bytes = mine.log_config().segment_bytes
    for name in plan.files:
        path = os.path.join(store.layout.plan(plan.plan_id), name)
        try:
            reader = StagedReader(store.fs, path, topic_id=topic_id, limits=store.limits)
        except (FileNotFoundError, CorruptState):
            return  # how many records it had is not known, so nothing after it has a known offset
        try:
            for piece in reader.pieces(number):
                for each in _of_piece(reader.file(), piece, store):
                    yield from _fitting(each, segment_bytes) if isinstance(each, Chunk) else [each]
        finally:
            reader.release()


def _of_piece(file: File, piece: Piece, store: OpenStore) -> Iterator[Chunk | _Gap]:
    position, end, left = piece.position, piece.position + piece.size_bytes, piece.records
    while position < end:
        try:
            for chunk in read_batches(file, position, end, limits=store.limits):
                left -= int(chunk.table[:, COUNT].sum())
                position = chunk.position + int(chunk.table[-1, POSITION] + chunk.table[-1, SIZE])
                yield chunk
        except (BufferLimit, CorruptBatch) as error:
            header = _header(file, position, end)
            if header is None or not 0 < header[1] <= left:
                break
            position, left = header[0], left - header[1]
            yield _Gap(header[1], error.what)
    if left:
        yield _Gap(left, "the rest of a staged piece cannot be read")


def _header(file: File, position: int, end: int) -> tuple[int, int] | None:
    """Where the batch at `position` ends and how many records it has; None when it does not say."""
    try:
        header = read_header(file, position, end)
    except DuramenError:
        return None
    if header is None or header.magic != 2 or header.count is None:
        return None
    return header.end_position, header.count


def _fitting(chunk: Chunk, segment_bytes: int) -> Iterator[Chunk | _Gap]:
    """The chunk without batches that no segment takes."""
    first = 0
    for row in (chunk.table[:, SIZE] > segment_bytes).nonzero()[0].tolist():
        if row > first:
            yield Chunk(chunk.data, chunk.table[first:row], chunk.position, chunk.file)
        yield _Gap(
            int(chunk.table[row, COUNT]),
            f"a batch of {int(chunk.table[row, SIZE])} bytes; segment.bytes is {segment_bytes}",
        )
        first = row + 1
    if first < len(chunk.table):
        yield Chunk(chunk.data, chunk.table[first:], chunk.position, chunk.file)


def _keep(store: OpenStore, plan_id: str) -> str | None:
    """Second names for the staged files: the first ones go once the plan's other topics are flushed."""
    folder = store.layout.plan(plan_id)
    kept = os.path.join(store.layout.staging, f"{plan_id}-aside")
    try:
        names = store.fs.listdir(folder)
    except FileNotFoundError:
        return None
    store.fs.mkdir(kept)
    for name in names:
        target = os.path.join(kept, name)
        if not store.fs.exists(target):
            store.fs.link(os.path.join(folder, name), target)
    store.fs.fsync_dir(kept)
    store.fs.fsync_dir(store.layout.staging)
    return kept

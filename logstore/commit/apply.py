"""Applying a committed plan to partitions: plain functions that may run twice, late, or in two processes at once.

Under the partition lock: applied already → nothing to do. Ends at the plan's base → append. Ends in between → the
rest of an interrupted try is cut first. Below the base → the caller skipped a plan. After a power cut the caller
repairs first. A task on another host than its driver's syncs what it wrote. Many partitions are taken some at a time:
what they share (the topic's files, the staged files, the sync of their segment lists) is done once for all of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from logstore.clock import ManualClock
from logstore.commit.durable import sync_partition
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.small_appends import PARTITIONS_MIN, Group, SmallAppend, append_small
from logstore.commit.staged_reader import StagedReaders
from logstore.config import LogConfig
from logstore.directory.checkpoint import partition_metadata
from logstore.directory.ends import JointEnds, TopicEnds, read_applied_sequence
from logstore.directory.state import PartitionState, encode_state, owner_of, read_state
from logstore.directory.swap import finish_swap
from logstore.directory.tail import Tail
from logstore.directory.tails import PartitionTail, is_here
from logstore.errors import CorruptBatch, CorruptIndex, CorruptState, DamagedLog
from logstore.files import read_whole
from logstore.partition.appender import Appender, tail_of
from logstore.partition.environment import LastKnown
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.log import PartitionLog
from logstore.partition.producer_append import ProducerAppender
from logstore.segment.names import PARTITION_METADATA, FileKind, file_name
from logstore.syncing import each_side_by_side, replace_files
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore
from logstore.topics.placing import place_partitions
from logstore.topics.registry import Topic

#: Runs `apply_partition` for partitions of one topic of a plan; the sink spreads large ones over executors.
ApplyMany = Callable[[Plan, Topic, Sequence[int]], None]
#: partitions whose locks are held together; a second or so at most
_PARTITIONS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Applied:
    partition: int
    end_offset: int
    tail: Tail
    was_done: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """What all partitions of a plan's topic share."""

    store: OpenStore
    plan: Plan
    topic_plan: TopicPlan
    topic: Topic
    config: LogConfig
    staged: StagedReaders
    #: of the driver by whose order this is done; None: this host's
    boot: str | None = None

    def is_known(self, tail: PartitionTail | None) -> bool:
        """Whether the slot is to be believed."""
        if tail is None:
            return False
        return tail.is_current if self.boot is None else tail.is_of(self.boot)

    def tail_after(self, sequence: int, end_offset: int, tail: Tail, leader_epoch: int | None) -> PartitionTail:
        """The slot behind what was appended."""
        slot = PartitionTail.of_now(sequence, end_offset, tail, leader_epoch)
        return slot if self.boot is None else replace(slot, boot_id=self.boot)

    @property
    def syncs(self) -> bool:
        """Whether the driver's own fsync would not be for what is written here."""
        return self.boot is not None and not is_here(self.boot)


class Applier:
    """Appends committed plans of one open store, and publishes them."""

    def __init__(self, store: OpenStore) -> None:
        store.check_writable()
        self.store = store
        self._fs = store.fs

    def _apply(
        self,
        plan: Plan,
        topic: Topic,
        ends: TopicEnds | None = None,
        *,
        apply_many: ApplyMany | None = None,
        placed: bool = False,
    ) -> None:
        """Append a plan to the partitions of one of its topics.

        A caller that holds the topic's lease passes its `ends`; then unflushed bytes that a log lost are restored
        first.
        """
        topic_plan = plan.topic(topic.id)
        assert topic_plan is not None
        numbers = list(numbers_of(topic_plan))
        if not placed:
            self._place(topic, numbers)

        def run() -> None:
            if apply_many is not None:
                apply_many(plan, topic, numbers)
            else:
                apply_partitions(self.store, plan, topic, numbers)

        try:
            run()
        except (CorruptBatch, CorruptIndex, DamagedLog):
            if ends is None or not self._mend(topic, numbers, ends):
                raise
            run()

    def _mend(self, topic: Topic, numbers: Sequence[int], ends: TopicEnds) -> bool:
        """Restore unflushed bytes that the logs lost; False where that was not the reason."""
        return False

    def _place(self, topic: Topic, numbers: Iterable[int]) -> None:
        """Make directories that are missing. A partition that was appended to since the machine was started has one."""
        numbers = list(numbers)
        with self.store.tails(topic) as tails:
            unknown = set(tails.not_of_this_boot(numbers))
        wanted = [number for number in numbers if number in unknown or not self._is_marked(topic, number)]
        place_partitions(self.store, topic, wanted, wait_ms=0)

    def _is_marked(self, topic: Topic, number: int) -> bool:
        path = os.path.join(self.store.layout.partition(topic.partition(number)), PARTITION_METADATA)
        mark = partition_metadata(topic.id)
        try:
            return read_whole(self._fs, path, limit=len(mark)) == mark
        except OSError:  # the full check reports what is wrong
            return False

    def publish(
        self, topic: Topic, ends: TopicEnds, plan: TopicPlan, joint: Mapping[str, JointEnds] | None = None
    ) -> TopicEnds:
        """Readers see the batch from here on; readers of several topics see it in those of `joint`, too."""
        while True:
            published = replace(
                ends.advanced(plan.end_offsets, plan.sequence, plan.stable_offsets),
                joint={**self._still_behind(ends.joint), **(joint or {})},
            )
            if self.store.replace_ends(topic, ends, published):
                return published
            ends = self.store.ends(topic)  # the lease was lost meanwhile
            if ends.applied_sequence >= plan.sequence:
                return ends  # another has published this, and perhaps more

    def _still_behind(self, joint: Mapping[str, JointEnds]) -> dict[str, JointEnds]:
        """The `joint` entries to keep: topics that are not published that far themselves."""
        behind = {}
        for topic_id, told in joint.items():
            applied: int | None = 0
            with contextlib.suppress(CorruptState):
                applied = read_applied_sequence(self._fs, self.store.layout.ends(topic_id), limits=self.store.limits)
            if applied is not None and applied < told.sequence:
                behind[topic_id] = told
        return behind


def apply_partition(store: OpenStore, plan: Plan, topic: Topic, number: int) -> Applied:
    """Bring one partition to the plan's end. It can be run again after any error. Raises UnknownTopic, DamagedLog."""
    return apply_partitions(store, plan, topic, (number,))[0]


def apply_partitions(
    store: OpenStore, plan: Plan, topic: Topic, numbers: Sequence[int], *, boot: str | None = None
) -> list[Applied]:
    """The same for several partitions, in ascending order.

    `boot` is that of the driver that ordered it and holds the topic's lease: slots are written in its name, and those
    it wrote are believed. On another host, all that is appended is on disk when this returns.
    """
    topic_plan = plan.topic(topic.id)
    assert topic_plan is not None
    applied: list[Applied] = []
    folder = store.layout.plan(plan.plan_id)
    with StagedReaders(store.fs, folder, plan.files, topic_id=topic.id, limits=store.limits) as staged:
        batch = _Batch(store, plan, topic_plan, topic, topic_plan.log_config(), staged, boot)
        for first in range(0, len(numbers), _PARTITIONS_AT_ONCE):
            some = numbers[first : first + _PARTITIONS_AT_ONCE]
            what = f"append to {topic.name}-{some[0]}" + (f" to {some[-1]}" if len(some) > 1 else "")
            with store.locks.partitions(topic.id, some, what=what):
                store.check_exists(topic)  # a late task must not make files for a topic that was deleted
                applied += _apply_some(batch, some)
    return applied


def _apply_some(batch: _Batch, numbers: Sequence[int]) -> list[Applied]:
    """The caller holds the partitions' locks."""
    store, topic, sequence = batch.store, batch.topic, batch.topic_plan.sequence
    applied: list[Applied] = []
    new: list[tuple[int, PartitionTail]] = []
    states: dict[str, bytes] = {}
    ends: TopicEnds | None = None
    with store.tails(topic) as tails:
        found = dict(zip(numbers, tails.read_many(numbers), strict=True))
        unknown = [number for number, tail in found.items() if not batch.is_known(tail)]
        if unknown:
            ends = store.ends(topic)
            fresh = _fresh_tails(batch, unknown, ends)
            tails.write_many(fresh)  # whoever finds the rest of an interrupted try cuts it to this
            found.update(fresh)
        small = _append_small(batch, found)
        for number, known in found.items():
            if known is None or not (batch.is_known(known) or _is_published(known, sequence, ends)):
                ends = ends or store.ends(topic)
                known = current_tail(store, topic, number, ends=ends)
            if known.sequence >= sequence:
                applied.append(Applied(number, known.end_offset, known.tail, was_done=True))
                continue
            base, end = batch.topic_plan.base_offsets[number], batch.topic_plan.end_offsets[number]
            check_continues(topic.partition(number), known, base)
            tail, epoch = known.tail, known.leader_epoch
            if end > base:
                done = small.get(number)
                if done is not None:
                    tail, epoch, state = done.tail, done.leader_epoch, done.state
                else:
                    tail, epoch, state = _append(batch, number, known)
                if state is not None:
                    path = store.layout.partition_state(topic.id, number)
                    states[path] = encode_state(state, owner_of(path))
            applied.append(Applied(number, end, tail))
            new.append((number, batch.tail_after(sequence, end, tail, epoch)))
        replace_files(store.fs, states)  # the lists are on disk before a tail names what they must have
        if batch.syncs:
            offsets = batch.topic_plan.base_offsets
            each_side_by_side(lambda each: sync_partition(store, topic, each[0], offsets[each[0]]), new)
        tails.write_many(new)
        if batch.syncs:
            tails.sync()
    return applied


def _is_published(tail: PartitionTail, sequence: int, ends: TopicEnds | None) -> bool:
    """Whether the plan was finished by others, on another host: whoever comes late leaves the log alone."""
    return ends is not None and tail.sequence >= sequence and ends.applied_sequence >= sequence


def _append_small(batch: _Batch, found: Mapping[int, PartitionTail | None]) -> dict[int, SmallAppend]:
    """Append to the partitions that `append_small` can serve."""
    store, topic_plan = batch.store, batch.topic_plan
    known = {
        number: tail
        for number, tail in found.items()
        if tail is not None
        and batch.is_known(tail)
        and tail.sequence < topic_plan.sequence
        and tail.end_offset == topic_plan.base_offsets[number]
    }
    if len(known) < PARTITIONS_MIN:
        return {}
    group = Group(
        store.fs,
        store.layout,
        batch.topic,
        batch.config,
        store.limits,
        batch.plan.now_ms,
        topic_plan.end_offsets,
        known,
    )
    return append_small(group, batch.staged)


def _fresh_tails(batch: _Batch, numbers: Sequence[int], ends: TopicEnds) -> list[tuple[int, PartitionTail]]:
    """Of partitions that were never appended to, as `current_tail` has them."""
    if len(numbers) < PARTITIONS_MIN:
        return []
    tail = batch.tail_after(ends.applied_sequence, 0, Tail(), None)
    return [(number, tail) for number in numbers if _is_new(batch.store, batch.topic, number, ends)]


def check_continues(partition: TopicPartition, tail: PartitionTail, base_offset: int) -> None:
    """Raises DamagedLog where a commit that begins at `base_offset` does not continue the log."""
    if tail.end_offset != base_offset:
        raise DamagedLog(
            f"the log ends at {tail.end_offset}, the commit begins at {base_offset}",
            partition=partition,
            offset=tail.end_offset,
            hint="Run `duramen recover` first",
        )


def current_tail(store: OpenStore, topic: Topic, number: int, *, ends: TopicEnds | None = None) -> PartitionTail:
    """Where the log ends, from its slot or by looking; the caller holds the partition lock.

    Looking keeps everything up to the high watermark and cuts off the rest, which was never published.
    """
    ends = ends or store.ends(topic)
    found = store.tail(topic, number)
    if found is not None and (found.is_current or _is_all_flushed(store, topic, number, found, ends)):
        return found
    if _is_new(store, topic, number, ends):
        tail = PartitionTail.of_now(ends.applied_sequence, 0, Tail())
        with store.tails(topic) as tails:
            tails.write(number, tail)  # whoever finds the rest of an interrupted try cuts it to this
        return tail
    high_watermark = ends.high_watermarks[number]
    store.partition_state(topic, number)  # it holds the log start and more: a lost one is not invented here
    log = store.open_log(topic, number, store.last_known(topic, number, ends))
    try:
        store.cut_unpublished(log, topic, high_watermark)
    except BaseException:
        log.close(clean=False)
        raise
    log.close()
    tail = PartitionTail.of_now(ends.applied_sequence, log.log_end_offset, tail_of(log.segments[-1]))
    with store.tails(topic) as tails:
        tails.write(number, tail)
    return tail


def _is_new(store: OpenStore, topic: Topic, number: int, ends: TopicEnds) -> bool:
    """Whether nothing was ever appended: no list, nothing published, no first segment."""
    if ends.high_watermarks[number] or ends.recovery_points[number]:
        return False
    try:
        state = read_state(store.fs, store.layout.partition_state(topic.id, number), limits=store.limits)
    except CorruptState:
        return False
    if state is None or not state.is_as_made or state.swap is not None or state.log_start_offset:
        return False
    directory = store.layout.partition(topic.partition(number))
    try:
        return not store.fs.stat(os.path.join(directory, file_name(0, FileKind.LOG))).size_bytes
    except FileNotFoundError:
        return not state.segments


def _is_all_flushed(store: OpenStore, topic: Topic, number: int, tail: PartitionTail, ends: TopicEnds) -> bool:
    """Whether a tail from before the machine was started counts: list and file agree with it, all of it was synced."""
    if not tail.end_offset == ends.recovery_points[number] == ends.high_watermarks[number]:
        return False
    try:
        state = store.partition_state(topic, number)
    except CorruptState:
        return False
    return (
        bool(state.segments)
        and state.segments[-1].base_offset == tail.tail.base_offset
        and store.active_bytes(topic, number, state) == tail.tail.size_bytes
    )


def _append(batch: _Batch, number: int, known: PartitionTail) -> tuple[Tail, int | None, PartitionState | None]:
    """The new tail, the leader epoch if it is known, and the list that is to be written if it changed."""
    store, topic = batch.store, batch.topic
    directory = store.layout.partition(topic.partition(number))
    state = store.partition_state(topic, number)
    if state.swap is not None:  # a compaction was killed in the middle
        state = finish_swap(store.fs, directory, store.layout.partition_state(topic.id, number), state)
    if state.producers:
        return _append_with_producers(batch, number), None, None
    place = store.layout.place(topic.id, topic.partition(number))
    now_ms, limits = batch.plan.now_ms, store.limits
    appender = Appender(store.fs, place, known, state=state, config=batch.config, now_ms=now_ms, limits=limits)
    try:
        appender.append(batch.staged.chunks(number))
        _check_end(topic, number, appender.end_offset, batch.topic_plan.end_offsets[number])
    except BaseException:
        appender.close()
        raise
    tail, changed = appender.finish()
    return tail, appender.leader_epoch, changed


def _append_with_producers(batch: _Batch, number: int) -> Tail:
    """Logs that know idempotent producers (imported ones) keep their state: the long way."""
    store, plan, topic_plan, topic = batch.store, batch.plan, batch.topic_plan, batch.topic
    epochs = LeaderEpochs.load(store.fs, store.layout.partition(topic.partition(number)), limits=store.limits)
    log: PartitionLog = store.open_log(
        topic,
        number,
        LastKnown(clean=True, recovery_point=store.ends(topic).recovery_points[number]),
        clock=ManualClock(plan.now_ms),
        config=batch.config,
    )
    try:
        log.truncate_to(topic_plan.base_offsets[number])  # an interrupted append may have got further
        appender = ProducerAppender(log, leader_epoch=epochs.latest.epoch if epochs.latest else 0)
        appender.append(batch.staged.chunks(number))
        _check_end(topic, number, log.log_end_offset, topic_plan.end_offsets[number])
    finally:
        log.close()
    return tail_of(log.segments[-1])


def _check_end(topic: Topic, number: int, end_offset: int, planned: int) -> None:
    if end_offset != planned:
        raise CorruptState(
            f"the staged batches end at {end_offset}, the plan at {planned}", partition=topic.partition(number)
        )


def numbers_of(topic_plan: TopicPlan) -> Iterable[int]:
    """Partitions the plan has something for."""
    pairs = zip(topic_plan.base_offsets, topic_plan.end_offsets, strict=True)
    return [number for number, (base, end) in enumerate(pairs) if end > base]

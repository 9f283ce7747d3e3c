"""Applying a committed plan to one partition: a plain function that may run twice, late, or in two processes at once.

Under the partition lock: applied already → nothing to do. Ends at the plan's base → append. Ends in between → the
rest of an interrupted try is cut first. Below the base → the caller skipped a plan. After a power cut the caller
repairs first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from logstore.clock import ManualClock
from logstore.errors import CorruptState, DamagedLog
from logstore.partition.appender import Appender, tail_of
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.log import PartitionLog
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.swap import finish_swap
from logstore.partition.tail import Tail
from logstore.segment.batches import Chunk
from logstore.store.ends import TopicEnds
from logstore.store.plan import Plan, TopicPlan
from logstore.store.registry import Topic
from logstore.store.staging import StagedReader
from logstore.store.store import LogStore
from logstore.store.tails import PartitionTail, read_tail, write_tail


@dataclass(frozen=True, slots=True)
class Applied:
    partition: int
    end_offset: int
    tail: Tail
    was_done: bool = False


def apply_partition(store: LogStore, plan: Plan, topic: Topic, number: int) -> Applied:
    """Bring one partition to the plan's end. It can be run again after any error. Raises UnknownTopic, DamagedLog."""
    topic_plan = plan.topic(topic.id)
    assert topic_plan is not None
    with store.locks.partition(topic.id, number, what=f"append to {topic.name}-{number}"):
        store.check_exists(topic)  # who comes late must not make files for a topic that is no more
        known = current_tail(store, topic, number)
        if known.sequence >= topic_plan.sequence:
            return Applied(number, known.end_offset, known.tail, was_done=True)
        base = topic_plan.base_offsets[number]
        if known.end_offset != base:
            raise DamagedLog(
                f"the log ends at {known.end_offset}, the plan begins at {base}",
                partition=topic.partition(number),
                offset=known.end_offset,
                hint="Run `duramen recover`",
            )
        tail = known.tail
        end = topic_plan.end_offsets[number]
        if end > base:
            tail = _append(store, plan, topic_plan, topic, number, known)
        path = store.layout.tail(topic.id, number)
        write_tail(store.fs, path, PartitionTail.of_now(topic_plan.sequence, end, tail))
        return Applied(number, end, tail)


def current_tail(store: LogStore, topic: Topic, number: int) -> PartitionTail:
    """Where the log ends, from the tail file or by looking; the caller holds the partition lock.

    Looking takes everything up to the high watermark and cuts off the rest: it was never published.
    """
    ends = store.ends(topic)
    found = read_tail(store.fs, store.layout.tail(topic.id, number), limits=store.limits)
    if found is not None and (found.is_current or _is_all_flushed(store, topic, number, found, ends)):
        return found
    high_watermark = ends.high_watermarks[number]
    store.partition_state(topic, number)  # log start and more are in it: a lost one is not made up here
    log = store.open_log(
        topic,
        number,
        clean=store.closed_cleanly(topic, number, ends),
        recovery_point=ends.recovery_points[number],
        high_watermark=high_watermark,
    )
    try:
        if log.log_end_offset < high_watermark:
            raise DamagedLog(
                f"committed up to {high_watermark}, but the log ends at {log.log_end_offset}",
                partition=topic.partition(number),
                offset=log.log_end_offset,
                hint="`duramen recover` goes on behind the loss",
            )
        store.cut_unpublished(log, topic, high_watermark)
    except BaseException:
        log.close(clean=False)
        raise
    log.close()
    tail = PartitionTail.of_now(ends.applied_sequence, log.log_end_offset, tail_of(log.segments[-1]))
    write_tail(store.fs, store.layout.tail(topic.id, number), tail)
    return tail


def _is_all_flushed(store: LogStore, topic: Topic, number: int, tail: PartitionTail, ends: TopicEnds) -> bool:
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


def _append(
    store: LogStore, plan: Plan, topic_plan: TopicPlan, topic: Topic, number: int, known: PartitionTail
) -> Tail:
    directory = store.layout.partition(topic.partition(number))
    state = store.partition_state(topic, number)
    if state.swap is not None:  # a compaction was killed in the middle
        state = finish_swap(store.fs, directory, store.layout.partition_state(topic.id, number), state)
    config = topic_plan.log_config()
    end = topic_plan.end_offsets[number]
    if state.producers:
        return _append_with_producers(store, plan, topic_plan, topic, number)
    appender = Appender(
        store.fs,
        directory,
        partition=topic.partition(number),
        config=config,
        state=state,
        state_path=store.layout.partition_state(topic.id, number),
        tail=known.tail,
        end_offset=known.end_offset,
        now_ms=plan.now_ms,
        limits=store.limits,
    )
    try:
        appender.append(_chunks(store, plan, topic.id, number))
        _check_end(topic, number, appender.end_offset, end)
    except BaseException:
        appender.close()
        raise
    return appender.finish()


def _append_with_producers(store: LogStore, plan: Plan, topic_plan: TopicPlan, topic: Topic, number: int) -> Tail:
    """Logs that know idempotent producers (imported ones) keep their state: the long way."""
    epochs = LeaderEpochs.load(store.fs, store.layout.partition(topic.partition(number)), limits=store.limits)
    log: PartitionLog = store.open_log(
        topic,
        number,
        clean=True,
        recovery_point=store.ends(topic).recovery_points[number],
        clock=ManualClock(plan.now_ms),
        config=topic_plan.log_config(),
    )
    try:
        log.truncate_to(topic_plan.base_offsets[number])  # an interrupted try may have come further
        for chunk in _chunks(store, plan, topic.id, number):
            log.append_batches(
                chunk.data.data,
                origin=AppendOrigin.COORDINATOR,
                leader_epoch=epochs.latest.epoch if epochs.latest else 0,
            )
        _check_end(topic, number, log.log_end_offset, topic_plan.end_offsets[number])
    finally:
        log.close()
    return tail_of(log.segments[-1])


def _check_end(topic: Topic, number: int, end_offset: int, planned: int) -> None:
    if end_offset != planned:
        raise CorruptState(
            f"the staged batches end at {end_offset}, the plan at {planned}", partition=topic.partition(number)
        )


def _chunks(store: LogStore, plan: Plan, topic_id: str, number: int) -> Iterator[Chunk]:
    folder = store.layout.plan(plan.plan_id)
    for name in plan.files:
        reader = StagedReader(store.fs, os.path.join(folder, name), limits=store.limits)
        try:
            yield from reader.chunks(topic_id, number)
        finally:
            reader.close()


def numbers_of(topic_plan: TopicPlan) -> Iterable[int]:
    """Partitions the plan has something for."""
    pairs = zip(topic_plan.base_offsets, topic_plan.end_offsets, strict=True)
    return [number for number, (base, end) in enumerate(pairs) if end > base]

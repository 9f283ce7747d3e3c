"""A partition's log for its one writer: what was committed is settled first, and the new end published last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from logstore.clock import Clock
from logstore.commit.settling import Settler
from logstore.directory.ends import TopicEnds
from logstore.partition.log import PartitionLog
from logstore.topics.opened import OpenStore
from logstore.topics.placing import place_partition
from logstore.topics.registry import Topic


@contextlib.contextmanager
def writing(
    store: OpenStore, topic: Topic, number: int, *, what: str, clock: Clock | None = None
) -> Iterator[PartitionLog]:
    """The partition's log for its one writer, under the topic's lease; its end is published when all went well.

    What was committed and not published yet is settled first, because readers of several topics may see it already.
    Bytes above the high watermark that no commit names are cut off. Raises LockHeld, CorruptState, DamagedLog.
    """
    place_partition(store, topic, topic.partition(number))
    with contextlib.ExitStack() as held:
        held.enter_context(store.locks.lease(topic.id, what=what))
        store.check_exists(topic)
        _settle_unpublished(store, topic, number)
        held.enter_context(store.locks.partition(topic.id, number, what=what))
        ends = store.ends(topic)
        store.partition_state(topic, number)  # it holds the log start and more: a lost one is not invented here
        log = store.open_log(topic, number, store.last_known(topic, number, ends), clock=clock)
        try:
            store.cut_unpublished(log, topic, ends.high_watermarks[number])
            yield log
        except BaseException:
            log.close(clean=False)
            raise
        log.close()
        store.forget_tail(topic, number)  # before the ends: a tail that lags behind them would be believed
        store.write_ends(topic, published(ends, number, log))


def _settle_unpublished(store: OpenStore, topic: Topic, number: int) -> None:
    """Publish what the log may hold above its high watermark; the caller holds the topic's lease."""
    ends, tail = store.ends(topic), store.tail(topic, number)
    if tail is not None and tail.is_current:
        if tail.sequence <= ends.applied_sequence:
            return
    elif store.closed_cleanly(topic, number, ends) or not store.log_bytes(topic, number):
        return
    if store.has_ledger:
        if store.settler is None:
            store.settler = Settler(store)
        store.settler.settle(topic)


def published(ends: TopicEnds, number: int, log: PartitionLog) -> TopicEnds:
    """The ends once the log is closed, all of it durable."""
    return ends.with_partition(
        number,
        high_watermark=log.high_watermark,
        last_stable_offset=log.last_stable_offset,
        recovery_point=log.recovery_point,
    )

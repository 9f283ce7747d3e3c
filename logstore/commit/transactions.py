"""Transactions that came with an imported log and have no end: which there are, and ending them with an ABORT marker.

Duramen writes no transactions, so an open one belongs to a producer of the cluster the log came from, which will
never come back: it holds read_committed readers and compaction at its first offset forever. This does what Kafka's
`kafka-transactions --abort` does: a marker in the producer's name, by the commit path of every append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from logstore.commit.committer import Committer
from logstore.commit.driver import Encoded, append_batch
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.commit.writing import writing
from logstore.directory.ends import TopicEnds
from logstore.errors import UnknownTransaction
from logstore.partition.producer_state import ProducerState
from logstore.records.control import encode_marker
from logstore.topic import TopicPartition
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    first_offset: int
    #: of the producer's last batch
    last_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class AbortMarker:
    """A marker that was written, and where read_committed readers stop now."""

    transaction: OpenTransaction
    marker_offset: int
    last_stable_offset: int


def open_transactions(store: OpenStore, topic: Topic, number: int) -> list[OpenTransaction]:
    """By first offset. Opens the log only where something holds it back. Raises LockHeld, CorruptState, DamagedLog."""
    ends = store.ends(topic)
    if ends.last_stable_offsets[number] >= ends.high_watermarks[number]:
        return []
    with writing(store, topic, number, what=f"list transactions of {topic.name}-{number}") as log:
        return [_of(topic.partition(number), state) for state in log.open_transactions]


def find_transaction(store: OpenStore, topic_name: str, number: int, producer_id: int) -> OpenTransaction:
    """Raises UnknownTopic, UnknownTransaction, and as `open_transactions`."""
    topic = store.topic(topic_name)
    partition = topic.partition(number)
    return _named(open_transactions(store, topic, number), partition, producer_id)


def abort_transaction(store: OpenStore, topic_name: str, number: int, producer_id: int) -> AbortMarker:
    """End a producer's transaction in one partition. Raises UnknownTopic, UnknownTransaction, LockHeld, DiskFull:
    nothing was changed then. AppendUnfinished: the marker is committed, and the next writer appends it.
    """
    ending = _Ending(Committer(store), topic_name, number, producer_id)
    done = append_batch(ending.committer, ending.encode, stable_offsets=ending.stable_offsets)
    assert ending.transaction is not None
    plan = done.topics[topic_name]
    return AbortMarker(ending.transaction, plan.base_offsets[number], plan.stable_offsets[number])


@dataclass(slots=True)
class _Ending:
    """A marker being committed: the transaction it ends, and the last stable offset after it."""

    committer: Committer
    topic: str
    number: int
    producer_id: int
    transaction: OpenTransaction | None = None

    def encode(self, staging: Staging) -> Encoded:
        store = self.committer.store
        self.transaction = find_transaction(store, self.topic, self.number, self.producer_id)
        target, now_ms = self.committer.target(self.topic), store.clock.now_ms()
        writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=now_ms)
        writer.write_batch(target, self.number, _marker(self.transaction, now_ms))
        return Encoded([writer.finish()], [target])

    def stable_offsets(self, topic: Topic, ends: TopicEnds) -> dict[int, int]:
        """Called under the topic's lease, so that no other transaction ends meanwhile."""
        assert self.transaction is not None
        store, number = self.committer.store, self.number
        found = [_of(self.transaction.partition, state) for state in _states(store, topic, number, ends)]
        _same(found, self.transaction)
        others = [each.first_offset for each in found if each.producer_id != self.producer_id]
        stable = min(others, default=ends.high_watermarks[number] + 1)
        return {number: max(stable, store.partition_state(topic, number).log_start_offset)}


def _states(store: OpenStore, topic: Topic, number: int, ends: TopicEnds) -> Sequence[ProducerState]:
    """The caller holds the lease, and the topic is settled."""
    with store.locks.partition(topic.id, number, what=f"abort a transaction of {topic.name}-{number}"):
        log = store.open_log(topic, number, store.last_known(topic, number, ends))
        try:
            return log.open_transactions
        finally:
            log.close()


def _of(partition: TopicPartition, state: ProducerState) -> OpenTransaction:
    assert state.current_txn_first_offset is not None
    return OpenTransaction(
        partition,
        state.producer_id,
        state.producer_epoch,
        state.coordinator_epoch,
        state.current_txn_first_offset,
        state.last_timestamp_ms,
    )


def _named(found: Sequence[OpenTransaction], partition: TopicPartition, producer_id: int) -> OpenTransaction:
    for each in found:
        if each.producer_id == producer_id:
            return each
    known = ", ".join(str(each.producer_id) for each in found[:5])
    raise UnknownTransaction(
        f"producer {producer_id} has no open transaction in {partition}",
        partition=partition,
        hint=f"Open are those of: {known}" if known else "No transaction is open there",
    )


def _same(found: Sequence[OpenTransaction], transaction: OpenTransaction) -> None:
    if transaction not in found:
        raise UnknownTransaction(
            f"the transaction of producer {transaction.producer_id} at offset {transaction.first_offset} was ended"
            " meanwhile",
            partition=transaction.partition,
        )


def _marker(transaction: OpenTransaction, now_ms: int) -> bytes:
    """In the producer's own epoch, as Kafka's tool sends it; a coordinator that wrote no marker has epoch 0."""
    return encode_marker(
        commit=False,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        coordinator_epoch=max(transaction.coordinator_epoch, 0),
        timestamp_ms=now_ms,
    )

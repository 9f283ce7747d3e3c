"""Transactions that came with an imported log and have no end: which there are, and ending them with an ABORT marker.

Duramen writes no transactions, so an open one belongs to a producer of the cluster the log came from, which will
never come back: it holds read_committed readers and compaction at its first offset forever. This does what Kafka's
`kafka-transactions --abort` does: a marker in the producer's name, by the commit path of every append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from logstore.commit.driver import Batch, Encoded, append_batch
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.commit.store_face import Store
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


def open_transactions(
    store: OpenStore, topic: Topic, number: int, *, ends: TopicEnds | None = None
) -> list[OpenTransaction]:
    """Of a store in a directory. Opens the log only where something holds it back. With `ends`, the caller holds the
    topic's lease, and the topic is settled. Raises LockHeld, CorruptState, DamagedLog.
    """
    partition = topic.partition(number)
    if ends is not None:
        with store.locks.partition(topic.id, number, what=f"abort a transaction of {partition}"):
            log = store.open_log(topic, number, store.last_known(topic, number, ends))
            try:
                return [open_transaction(partition, state) for state in log.open_transactions]
            finally:
                log.close()
    found = store.ends(topic)
    if found.last_stable_offsets[number] >= found.high_watermarks[number]:
        return []
    with writing(store, topic, number, what=f"list transactions of {partition}") as log:
        return [open_transaction(partition, state) for state in log.open_transactions]


def find_transaction(store: Store, topic_name: str, number: int, producer_id: int) -> OpenTransaction:
    """Raises UnknownTopic, UnknownTransaction, and as `open_transactions`."""
    topic = store.topic(topic_name)
    partition = topic.partition(number)
    return _named(store.open_transactions(topic, number), partition, producer_id)


def abort_transaction(store: Store, topic_name: str, number: int, producer_id: int) -> AbortMarker:
    """End a producer's transaction in one partition. Raises UnknownTopic, UnknownTransaction, LockHeld, DiskFull:
    nothing was changed then. AppendUnfinished: the marker is committed, and the next writer appends it.
    """
    ending = _Ending(store, topic_name, number, producer_id)
    done = append_batch(store.commits(), ending.encode, ending=ending)
    plan = done.topics[topic_name]
    return AbortMarker(ending.transaction, plan.base_offsets[number], plan.stable_offsets[number])


class _Ending:
    """A marker being committed: the transaction it ends, and the last stable offset after it. Implements `Ending`."""

    def __init__(self, store: Store, topic: str, number: int, producer_id: int) -> None:
        self._store = store
        self._topic = topic
        self._number = number
        self.producer_id = producer_id
        self.transaction = find_transaction(store, topic, number, producer_id)

    @property
    def first_offset(self) -> int:
        return self.transaction.first_offset

    def encode(self, batch: Batch) -> Encoded:
        store, committer = self._store, self._store.commits()
        self.transaction = find_transaction(store, self._topic, self._number, self.producer_id)
        target, now_ms = committer.target(self._topic), store.clock.now_ms()
        writer = StagedWriter(batch.output(), options=EncodeOptions(), now_ms=now_ms)
        writer.write_batch(target, self._number, _marker(self.transaction, now_ms))
        return Encoded([writer.finish()], [target])

    def stable_offsets(self, topic: Topic, ends: TopicEnds) -> dict[int, int]:
        store, number = self._store, self._number
        found = store.open_transactions(topic, number, ends=ends)
        _same(found, self.transaction)
        others = [each.first_offset for each in found if each.producer_id != self.producer_id]
        stable = min(others, default=ends.high_watermarks[number] + 1)
        return {number: max(stable, store.partition_state(topic, number).log_start_offset)}


def open_transaction(partition: TopicPartition, state: ProducerState) -> OpenTransaction:
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

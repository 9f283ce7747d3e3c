"""Producer state of one partition: who wrote last, with which epoch and sequence, and which transactions are open.

Owns the rules that accept or refuse an idempotent or transactional batch, the transactions that hold the last stable
offset back, and the `.snapshot` files. It sees one small object a batch, never records, and never writes the log or the
transaction index: an append is *prepared* (checked against a copy of the state), written by the caller, then *applied*.
Batches without a producer id do not concern it.

What the origins demand:

    origin        lower producer epoch    sequence    older coordinator    plain batch in a transaction
    CLIENT        refused                 checked     refused              refused
    COORDINATOR   refused                 -           refused              refused
    REPLICATION   taken                   -           taken                refused
    RECOVERY      taken                   -           taken                taken
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from logstore.errors import InvalidProducerEpoch, OutOfOrderSequence
from logstore.limits import INT32_MAX
from logstore.partition.snapshot import SnapshotEntry

NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_COORDINATOR_EPOCH = -1

#: A client has at most this many unanswered batches, so no older one can be repeated.
BATCHES_REMEMBERED = 5
DEFAULT_EXPIRATION_MS = 86_400_000


class AppendOrigin(Enum):
    """Where a batch comes from, which decides how strictly it is checked."""

    CLIENT = "client"
    COORDINATOR = "coordinator"
    REPLICATION = "replication"
    RECOVERY = "recovery"

    @property
    def is_trusted(self) -> bool:
        """The batch was accepted once already; refusing it now would lose it."""
        return self in (AppendOrigin.REPLICATION, AppendOrigin.RECOVERY)


@dataclass(frozen=True, slots=True)
class ProducerBatch:
    """A data batch with a producer id, as it will stand in the log. An emptied batch counts like any other."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    max_timestamp_ms: int
    transactional: bool = False


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """A COMMIT or ABORT marker. (An empty control batch is not one: its transaction has been cleaned away.)"""

    producer_id: int
    producer_epoch: int
    offset: int
    timestamp_ms: int
    commit: bool
    coordinator_epoch: int


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """What is remembered of a batch."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int

    @property
    def first_sequence(self) -> int:
        return decrement_sequence(self.last_sequence, self.offset_delta)

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta


@dataclass(frozen=True, slots=True)
class ProducerState:
    """One producer; `batches` are those of its present epoch, oldest first."""

    producer_id: int
    producer_epoch: int = NO_PRODUCER_EPOCH
    coordinator_epoch: int = NO_COORDINATOR_EPOCH
    last_timestamp_ms: int = -1
    current_txn_first_offset: int | None = None
    batches: tuple[BatchMetadata, ...] = ()

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_data_offset(self) -> int:
        """Offset of its last record, -1 when unknown."""
        return self.batches[-1].last_offset if self.batches else -1


@dataclass(frozen=True, slots=True)
class CompletedTransaction:
    producer_id: int
    first_offset: int
    last_offset: int
    aborted: bool


# --- the rules ---------------------------------------------------------------------------------------------------


def increment_sequence(sequence: int, increment: int) -> int:
    """Sequences wrap from 2147483647 to 0."""
    return (sequence + increment) & INT32_MAX


def decrement_sequence(sequence: int, decrement: int) -> int:
    return (sequence - decrement) & INT32_MAX


def find_duplicate(state: ProducerState, batch: ProducerBatch) -> BatchMetadata | None:
    """The remembered batch that `batch` repeats: same epoch and exactly the same sequences."""
    if batch.producer_epoch != state.producer_epoch:
        return None
    for known in state.batches:
        if known.first_sequence == batch.first_sequence and known.last_sequence == batch.last_sequence:
            return known
    return None


def check_producer_epoch(
    state: ProducerState, producer_epoch: int, offset: int, *, partition: object, strictly_newer: bool = False
) -> None:
    """Raise InvalidProducerEpoch when the producer has been replaced by one with a higher epoch.

    Markers of transaction protocol 2 carry an epoch above that of their data (`strictly_newer`); one that repeats the
    present epoch is a retry when no transaction is open, and a late marker of an older one when there is.
    """
    if producer_epoch > state.producer_epoch or (producer_epoch == state.producer_epoch and not strictly_newer):
        return
    if producer_epoch == state.producer_epoch and state.current_txn_first_offset is None:
        return
    raise InvalidProducerEpoch(
        f"producer {state.producer_id} comes with epoch {producer_epoch}, epoch {state.producer_epoch} has been seen",
        partition=partition,
        offset=offset,
        hint="A newer instance of this producer has taken over, or the transaction has ended",
    )


def check_sequence(
    state: ProducerState, batch: ProducerBatch, *, partition: object, zero_for_unknown: bool = False
) -> None:
    """Raise OutOfOrderSequence unless `batch` follows the producer's last one.

    A new epoch starts at 0. An unknown producer may start anywhere (its state may have expired) unless transaction
    protocol 2 vouches that it has not (`zero_for_unknown`).
    """
    if state.producer_epoch == NO_PRODUCER_EPOCH and not zero_for_unknown:
        return
    if batch.producer_epoch == state.producer_epoch and state.last_sequence != NO_SEQUENCE:
        expected = increment_sequence(state.last_sequence, 1)
    else:
        expected = 0
    if batch.first_sequence != expected:
        raise OutOfOrderSequence(
            f"producer {batch.producer_id} (epoch {batch.producer_epoch}) sends sequence {batch.first_sequence} where "
            f"{expected} is next",
            partition=partition,
            offset=batch.first_offset,
        )


def with_batch(state: ProducerState, batch: ProducerBatch) -> ProducerState:
    """`state` after a data batch. Another epoch forgets the batches of the last one."""
    metadata = BatchMetadata(
        batch.last_sequence, batch.last_offset, batch.last_offset - batch.first_offset, batch.max_timestamp_ms
    )
    older = state.batches if batch.producer_epoch == state.producer_epoch else ()
    opens = batch.transactional and state.current_txn_first_offset is None
    return replace(
        state,
        producer_epoch=batch.producer_epoch,
        last_timestamp_ms=batch.max_timestamp_ms,
        current_txn_first_offset=batch.first_offset if opens else state.current_txn_first_offset,
        batches=(*older[-(BATCHES_REMEMBERED - 1) :], metadata),
    )


def with_marker(state: ProducerState, marker: EndTransaction) -> ProducerState:
    """`state` after a transaction marker."""
    return replace(
        state,
        producer_epoch=marker.producer_epoch,
        coordinator_epoch=marker.coordinator_epoch,
        last_timestamp_ms=marker.timestamp_ms,
        current_txn_first_offset=None,
        batches=state.batches if marker.producer_epoch == state.producer_epoch else (),
    )


def is_expired(state: ProducerState, now_ms: int, expiration_ms: int) -> bool:
    """A producer with an open transaction never expires."""
    return state.current_txn_first_offset is None and now_ms - state.last_timestamp_ms >= expiration_ms


def stray_snapshots(snapshot_offsets: Iterable[int], segment_base_offsets: Collection[int]) -> list[int]:
    """Snapshots to delete at load: those at no segment's base, but for the largest if it is above all bases.

    That one was written at a clean close. Without segments only the largest is kept.
    """
    bases = set(segment_base_offsets)
    strays = sorted(offset for offset in snapshot_offsets if offset not in bases)
    if strays and strays[-1] > max(bases, default=-1):
        strays.pop()
    return strays


def to_snapshot_entry(state: ProducerState) -> SnapshotEntry:
    return SnapshotEntry(
        producer_id=state.producer_id,
        producer_epoch=state.producer_epoch,
        last_sequence=state.last_sequence,
        last_offset=state.last_data_offset,
        offset_delta=state.batches[-1].offset_delta if state.batches else 0,
        timestamp_ms=state.last_timestamp_ms,
        coordinator_epoch=state.coordinator_epoch,
        current_txn_first_offset=-1 if state.current_txn_first_offset is None else state.current_txn_first_offset,
    )


def from_snapshot_entry(entry: SnapshotEntry) -> ProducerState:
    newest = BatchMetadata(entry.last_sequence, entry.last_offset, entry.offset_delta, entry.timestamp_ms)
    return ProducerState(
        producer_id=entry.producer_id,
        producer_epoch=entry.producer_epoch,
        coordinator_epoch=entry.coordinator_epoch,
        last_timestamp_ms=entry.timestamp_ms,
        current_txn_first_offset=entry.current_txn_first_offset if entry.current_txn_first_offset >= 0 else None,
        batches=(newest,) if entry.last_offset >= 0 else (),
    )

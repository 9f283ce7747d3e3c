"""The producers of one partition up to an offset: the state that appends are checked against, and its snapshots.

An append is *prepared* (checked against a copy of the state), written by the caller, then *applied*. Owns the
transactions that hold the last stable offset back. It never writes the log or the transaction index.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from logstore.errors import CorruptSnapshot, InvalidRecord, InvalidTransactionState, TransactionCoordinatorFenced
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.partition.producer_state import (
    DEFAULT_EXPIRATION_MS,
    AppendOrigin,
    BatchMetadata,
    CompletedTransaction,
    EndTransaction,
    ProducerBatch,
    ProducerState,
    check_producer_epoch,
    check_sequence,
    find_duplicate,
    from_snapshot_entry,
    is_expired,
    stray_snapshots,
    to_snapshot_entry,
    with_batch,
    with_marker,
)
from logstore.partition.snapshot import read_snapshot, write_snapshot
from logstore.segment.names import FileKind, Transient, file_name, parse_file_name
from logstore.segment.txn_index import AbortedTransaction
from logstore.topic import TopicPartition


@dataclass(frozen=True, slots=True)
class PreparedAppend:
    """What an append will change. With `duplicate` set nothing must be written: answer with that batch's offsets."""

    states: Mapping[int, ProducerState] = field(default_factory=dict)
    started: tuple[tuple[int, int], ...] = ()
    completed: tuple[CompletedTransaction, ...] = ()
    duplicate: BatchMetadata | None = None


@dataclass(slots=True)
class _Before:
    """What an append under way has to restore; `states` only of the producers it touched."""

    states: dict[int, ProducerState | None]
    ongoing: list[tuple[int, int]]
    unreplicated: list[tuple[int, int]]
    map_end_offset: int


class ProducerStateManager:
    """The producers of one partition, up to `map_end_offset`, and their snapshot files. Not thread-safe."""

    def __init__(
        self,
        directory: str,
        fs: FileSystem,
        partition: TopicPartition,
        expiration_ms: int = DEFAULT_EXPIRATION_MS,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._directory = directory
        self._fs = fs
        self._partition = partition
        self._expiration_ms = expiration_ms
        self._limits = limits
        self._producers: dict[int, ProducerState] = {}
        # (first offset, producer id) of open transactions, ascending
        self._ongoing: list[tuple[int, int]] = []
        # (first offset, marker's offset) of completed ones whose marker the high watermark has not passed, ascending
        self._unreplicated: list[tuple[int, int]] = []
        self._snapshots: list[int] = self._listed_snapshots()
        self._map_end_offset = 0
        self._snapshot_offset = 0
        self._before = _Before({}, [], [], 0)

    # ----- looking

    @property
    def map_end_offset(self) -> int:
        """The state covers everything below this offset."""
        return self._map_end_offset

    @property
    def producers(self) -> Mapping[int, ProducerState]:
        return MappingProxyType(self._producers)

    @property
    def is_empty(self) -> bool:
        return not self._producers and not self._unreplicated

    def first_unstable_offset(self) -> int | None:
        """Where the oldest transaction began that is open, or whose marker the high watermark has not passed."""
        candidates = [entries[0][0] for entries in (self._ongoing, self._unreplicated) if entries]
        return min(candidates, default=None)

    # ----- appending

    def prepare(
        self,
        batches: Iterable[ProducerBatch | EndTransaction],
        origin: AppendOrigin = AppendOrigin.CLIENT,
        *,
        transaction_version: int = 0,
    ) -> PreparedAppend:
        """Check one append's batches, in order, and work out what they change; nothing changes yet.

        Raises InvalidProducerEpoch, OutOfOrderSequence, TransactionCoordinatorFenced, InvalidTransactionState or
        InvalidRecord as the origin demands.
        """
        states: dict[int, ProducerState] = {}
        started: list[tuple[int, int]] = []
        completed: list[CompletedTransaction] = []
        for batch in batches:
            producer_id = batch.producer_id
            if producer_id < 0:
                raise InvalidRecord(f"{producer_id} is not a producer id", partition=self._partition)
            known = self._producers.get(producer_id)
            if origin is AppendOrigin.CLIENT and known is not None and isinstance(batch, ProducerBatch):
                duplicate = find_duplicate(known, batch)
                if duplicate is not None:
                    return PreparedAppend(duplicate=duplicate)
            state = states.get(producer_id) or known or ProducerState(producer_id)
            if isinstance(batch, ProducerBatch):
                self._check_batch(state, batch, origin, transaction_version)
                states[producer_id] = with_batch(state, batch)
                if batch.transactional and state.current_txn_first_offset is None:
                    started.append((batch.first_offset, producer_id))
            else:
                self._check_marker(state, batch, origin, transaction_version)
                states[producer_id] = with_marker(state, batch)
                if state.current_txn_first_offset is not None:  # a marker without data changes nothing for readers
                    completed.append(
                        CompletedTransaction(
                            producer_id, state.current_txn_first_offset, batch.offset, not batch.commit
                        )
                    )
        return PreparedAppend(states, tuple(started), tuple(completed))

    def _check_batch(
        self, state: ProducerState, batch: ProducerBatch, origin: AppendOrigin, transaction_version: int
    ) -> None:
        if not origin.is_trusted:
            check_producer_epoch(state, batch.producer_epoch, batch.first_offset, partition=self._partition)
        if origin is AppendOrigin.CLIENT:
            if batch.first_sequence < 0:
                raise InvalidRecord(
                    f"producer {batch.producer_id} sends no sequence number",
                    partition=self._partition,
                    offset=batch.first_offset,
                )
            zero_for_unknown = transaction_version >= 2 and not state.batches
            check_sequence(state, batch, partition=self._partition, zero_for_unknown=zero_for_unknown)
        if (
            state.current_txn_first_offset is not None
            and not batch.transactional
            and origin is not AppendOrigin.RECOVERY
        ):
            raise InvalidTransactionState(
                f"producer {batch.producer_id} writes outside its transaction, open since offset "
                f"{state.current_txn_first_offset}",
                partition=self._partition,
                offset=batch.first_offset,
            )

    def _check_marker(
        self, state: ProducerState, marker: EndTransaction, origin: AppendOrigin, transaction_version: int
    ) -> None:
        if origin.is_trusted:
            return
        check_producer_epoch(
            state,
            marker.producer_epoch,
            marker.offset,
            partition=self._partition,
            strictly_newer=transaction_version >= 2,
        )
        if marker.coordinator_epoch < state.coordinator_epoch:
            raise TransactionCoordinatorFenced(
                f"marker of producer {marker.producer_id} from coordinator epoch {marker.coordinator_epoch}, epoch "
                f"{state.coordinator_epoch} has been seen",
                partition=self._partition,
                offset=marker.offset,
            )

    def apply(self, prepared: PreparedAppend) -> list[AbortedTransaction]:
        """Take a written append into the state; returns the entries for the transaction index, in order.

        All transactions the append began count as open before the first of those it ended is looked at, as in Kafka;
        the last stable offsets in the index depend on it.
        """
        if prepared.duplicate is not None:
            raise ValueError("a duplicate is never written, so there is nothing to apply")
        for producer_id in prepared.states:
            self._before.states.setdefault(producer_id, self._producers.get(producer_id))
        self._producers.update(prepared.states)
        for begun in prepared.started:
            insort(self._ongoing, begun)
        aborted: list[AbortedTransaction] = []
        for done in prepared.completed:
            if done.aborted:
                aborted.append(
                    AbortedTransaction(
                        done.producer_id, done.first_offset, done.last_offset, self.last_stable_offset(done)
                    )
                )
            self._complete(done)
        return aborted

    def begin(self) -> None:
        """Remember the state as it is: an append that fails after `apply` can be taken back to here."""
        self._before = _Before({}, list(self._ongoing), list(self._unreplicated), self._map_end_offset)

    def take_back(self) -> None:
        """Forget what was applied since `begin`. A reload from snapshots would know less: they hold one batch each."""
        for producer_id, state in self._before.states.items():
            if state is None:
                self._producers.pop(producer_id, None)
            else:
                self._producers[producer_id] = state
        self._ongoing = list(self._before.ongoing)
        self._unreplicated = list(self._before.unreplicated)
        self._map_end_offset = self._before.map_end_offset

    def last_stable_offset(self, completed: CompletedTransaction) -> int:
        """Where the oldest open transaction of another producer began, else just after the marker."""
        for first_offset, producer_id in self._ongoing:
            if producer_id != completed.producer_id:
                return first_offset
        return completed.last_offset + 1

    def _complete(self, completed: CompletedTransaction) -> None:
        at = bisect_left(self._ongoing, (completed.first_offset, completed.producer_id))
        if at < len(self._ongoing) and self._ongoing[at] == (completed.first_offset, completed.producer_id):
            del self._ongoing[at]
        insort(self._unreplicated, (completed.first_offset, completed.last_offset))

    def update_map_end_offset(self, offset: int) -> None:
        """Say that everything below `offset` has been applied."""
        self._map_end_offset = offset

    def on_high_watermark_updated(self, high_watermark: int) -> None:
        """Completed transactions whose marker lies below hold nothing back any more."""
        self._unreplicated = [entry for entry in self._unreplicated if entry[1] >= high_watermark]

    def on_log_start_offset_incremented(self, log_start_offset: int) -> None:
        self.on_high_watermark_updated(log_start_offset)
        self._map_end_offset = max(self._map_end_offset, log_start_offset)
        self._snapshot_offset = self._snapshots[-1] if self._snapshots else log_start_offset

    # ----- snapshots

    def _listed_snapshots(self) -> list[int]:
        try:
            names = self._fs.listdir(self._directory)
        except FileNotFoundError:
            return []
        files = (parse_file_name(name) for name in names)
        return sorted(
            file.base_offset
            for file in files
            if file and file.kind is FileKind.SNAPSHOT and file.transient is Transient.NONE
        )

    def snapshot_path(self, offset: int) -> str:
        return os.path.join(self._directory, file_name(offset, FileKind.SNAPSHOT))

    @property
    def snapshot_offsets(self) -> tuple[int, ...]:
        """Offsets of the snapshot files, ascending."""
        return tuple(self._snapshots)

    def take_snapshot(self, *, sync: bool = True) -> str | None:
        """Write a snapshot at `map_end_offset`; returns its path, None when the last one is as new."""
        if self._map_end_offset <= self._snapshot_offset:
            return None
        path = self.snapshot_path(self._map_end_offset)
        write_snapshot(self._fs, path, map(to_snapshot_entry, self._producers.values()), sync=sync)
        if self._map_end_offset not in self._snapshots:
            insort(self._snapshots, self._map_end_offset)
        self._snapshot_offset = self._map_end_offset
        return path

    def remove_stray_snapshots(self, segment_base_offsets: Collection[int]) -> list[int]:
        """Delete the snapshots that belong to no segment; returns their offsets. Lists the directory again."""
        self._snapshots = self._listed_snapshots()
        strays = stray_snapshots(self._snapshots, segment_base_offsets)
        for offset in strays:
            self.delete_snapshot(offset)
        return strays

    def delete_snapshot(self, offset: int) -> bool:
        """Unlink a snapshot; False when there was none."""
        self.forget_snapshot(offset)
        try:
            self._fs.unlink(self.snapshot_path(offset))
        except FileNotFoundError:
            return False
        return True

    def forget_snapshot(self, offset: int) -> None:
        if offset in self._snapshots:
            self._snapshots.remove(offset)

    # ----- loading and truncating

    def sync_snapshots(self, from_offset: int) -> None:
        """Those from `from_offset` on were written without a sync."""
        for offset in self.snapshot_offsets:
            if offset >= from_offset:
                file = self._fs.open(self.snapshot_path(offset))
                try:
                    file.fsync()
                finally:
                    file.close()

    def truncate_and_reload(self, log_start_offset: int, log_end_offset: int, now_ms: int) -> list[CorruptSnapshot]:
        """Bring the state to what the newest snapshot in (log start, log end] says; the caller replays the log from
        `map_end_offset` on.

        Snapshots out of that range are deleted, corrupt ones as well; the errors of those are returned. If the state
        ends at `log_end_offset` already it is kept as it is.
        """
        in_range = range(bisect_right(self._snapshots, log_start_offset), bisect_right(self._snapshots, log_end_offset))
        for offset in [offset for at, offset in enumerate(self._snapshots) if at not in in_range]:
            self.delete_snapshot(offset)
        if log_end_offset == self._map_end_offset:
            self.on_log_start_offset_incremented(log_start_offset)
            return []
        self._clear()
        return self._load_newest_snapshot(log_start_offset, now_ms)

    def _load_newest_snapshot(self, log_start_offset: int, now_ms: int) -> list[CorruptSnapshot]:
        corrupt: list[CorruptSnapshot] = []
        while self._snapshots:
            offset = self._snapshots[-1]
            try:
                entries = read_snapshot(self._fs, self.snapshot_path(offset), limits=self._limits)
            except CorruptSnapshot as error:
                corrupt.append(error)
                self.delete_snapshot(offset)
                continue
            except FileNotFoundError:  # deleted meanwhile: the next older one will do
                self.forget_snapshot(offset)
                continue
            for state in map(from_snapshot_entry, entries):
                if not is_expired(state, now_ms, self._expiration_ms):
                    self._producers[state.producer_id] = state
                    if state.current_txn_first_offset is not None:
                        insort(self._ongoing, (state.current_txn_first_offset, state.producer_id))
            self._map_end_offset = self._snapshot_offset = offset
            return corrupt
        self._map_end_offset = self._snapshot_offset = log_start_offset
        return corrupt

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Forget every producer and delete every snapshot; the log starts again at `offset`."""
        self._clear()
        for snapshot in list(self._snapshots):
            self.delete_snapshot(snapshot)
        self._snapshot_offset = 0
        self._map_end_offset = offset

    def _clear(self) -> None:
        self._producers.clear()
        self._ongoing.clear()
        self._unreplicated.clear()

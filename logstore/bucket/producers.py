"""The producers of a partition, as Kafka's producer snapshot in its manifest has them.

Only imports bring producers: what is written here has none. They matter to compaction, which keeps each producer's last
batch, and to transactions that have no end.
"""

from __future__ import annotations

from logstore.cleaner.filter import LastRecord
from logstore.limits import Limits
from logstore.partition.producer_state import (
    DEFAULT_EXPIRATION_MS,
    EndTransaction,
    ProducerState,
    from_snapshot_entry,
    is_expired,
    to_snapshot_entry,
    with_marker,
)
from logstore.partition.producers import producer_entries
from logstore.partition.snapshot import decode_snapshot, encode_snapshot
from logstore.segment.batches import Chunk


class Producers:
    """As of an offset; `take` moves it on."""

    def __init__(self, snapshot: bytes) -> None:
        """Raises CorruptSnapshot."""
        self._snapshot = snapshot
        self._states = {e.producer_id: from_snapshot_entry(e) for e in decode_snapshot(snapshot)} if snapshot else {}

    def take(self, chunk: Chunk, limits: Limits) -> None:
        """Markers that end transactions."""
        for entry in producer_entries(chunk.data, chunk.table, limits):
            if isinstance(entry, EndTransaction):
                state = self._states.get(entry.producer_id) or ProducerState(entry.producer_id)
                self._states[entry.producer_id] = with_marker(state, entry)
        self._snapshot = encode_snapshot(map(to_snapshot_entry, self._states.values()))

    def snapshot(self) -> bytes:
        return self._snapshot

    def open_transactions(self) -> list[ProducerState]:
        """By where they begin."""
        found = [state for state in self._states.values() if state.current_txn_first_offset is not None]
        return sorted(found, key=lambda state: state.current_txn_first_offset or 0)

    def last_records(self, now_ms: int) -> dict[int, LastRecord]:
        """Of each producer that has not expired: where its last batch is."""
        known = [state for state in self._states.values() if not is_expired(state, now_ms, DEFAULT_EXPIRATION_MS)]
        return {
            state.producer_id: LastRecord(
                state.last_data_offset if state.last_data_offset >= 0 else None, state.producer_epoch
            )
            for state in known
        }

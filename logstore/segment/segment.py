"""One segment that grows and is cut: batches are placed into its `.log`, and its indexes follow.

It knows its size and the bookkeeping that decides when an index entry is written. It decides nothing about other
segments, offsets to assign or when to roll: that is the partition's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.copying import make_own
from logstore.errors import CorruptIndex, OffsetOverflow
from logstore.limits import INT64_MAX, RELATIVE_OFFSET_MAX
from logstore.records import slots
from logstore.records.codes import OK, ROLL_OFFSET_OVERFLOW
from logstore.records.native import address_of, kernels
from logstore.records.record import NO_TIMESTAMP
from logstore.records.table import LAST_OFFSET, POSITION, SIZE, BatchTable
from logstore.segment.batches import Chunk
from logstore.segment.names import FileKind
from logstore.segment.segment_reader import SegmentReader
from logstore.segment.time_index import TimestampOffset

_NEVER = INT64_MAX // 2  # a limit that no size or age reaches, safe to subtract from


@dataclass(frozen=True, slots=True)
class RollLimits:
    """What the place kernel needs of the topic's settings; `max_segment_ms` has the jitter taken off."""

    segment_bytes: int = _NEVER
    max_segment_ms: int = _NEVER
    now_ms: int = 0
    #: the segment was rolled for the first of the batches
    fresh: bool = False
    indexes_may_fill: bool = False


NEVER_ROLL = RollLimits(indexes_may_fill=True)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The offsets that batches get, from `next_offset` on, and their leader epoch."""

    next_offset: int
    leader_epoch: int = -1


class LogSegment(SegmentReader):
    """A segment whose files this process may change."""

    # --- appending --------------------------------------------------------------------------------------------------

    def _unshare_log(self) -> None:
        """Before the `.log` is changed in place: backups and exports share it by hard links, and get to keep it."""
        path = self.path(FileKind.LOG)
        if make_own(self._fs, path):
            # The old one is not closed: a reader of this process may still use it.
            self.log = self._fs.open(path, writable=True)
        self._owned = True

    def place(
        self,
        data: npt.NDArray[np.uint8],
        table: BatchTable,
        first: int,
        numbering: Numbering | None = None,
        roll: RollLimits = NEVER_ROLL,
        *,
        lies_at: int | None = None,
    ) -> tuple[int, int]:
        """Append batches [first, …) until a roll is due; returns how many went in and why it stopped (OK at the end).

        Index entries are written with them. Without `numbering` they keep their offsets. With `lies_at` they are in
        the file already, at that position plus their own, and are only indexed (recovery).
        """
        last = len(table)
        block = np.zeros(slots.A_SLOTS, dtype=np.int64)
        # At most one entry of each index a batch.
        index_out = np.empty((last - first) * 8, dtype=np.uint8)
        time_out = np.empty((last - first) * 12, dtype=np.uint8)
        start = self.size_bytes if lies_at is None else lies_at + int(table[first, POSITION])
        largest = self.largest
        block[slots.A_SIZE] = start
        block[slots.A_BASE_OFFSET] = self.base_offset
        if numbering is not None:
            block[slots.A_NEXT_OFFSET] = numbering.next_offset
            block[slots.A_EPOCH] = numbering.leader_epoch
        block[slots.A_MAX_TS] = largest.timestamp_ms
        block[slots.A_MAX_TS_OFFSET] = largest.offset
        block[slots.A_FIRST_TS] = self.first_timestamp_ms if start > 0 else NO_TIMESTAMP
        block[slots.A_CREATED_MS] = self.created_ms
        block[slots.A_NOW_MS] = roll.now_ms
        block[slots.A_BYTES_SINCE] = self.bytes_since_index_entry
        block[slots.A_INDEX_ENTRIES] = self.offset_index.entries
        block[slots.A_TIME_ENTRIES] = self.time_index.entries
        block[slots.A_LAST_TIME_TS] = self.time_index.last_entry().timestamp_ms
        block[slots.A_SEGMENT_BYTES] = roll.segment_bytes
        block[slots.A_MAX_SEGMENT_MS] = roll.max_segment_ms
        block[slots.A_INDEX_INTERVAL] = self.index_interval_bytes
        block[slots.A_INDEX_MAX] = _NEVER if roll.indexes_may_fill else self.offset_index.max_entries
        block[slots.A_TIME_MAX] = _NEVER if roll.indexes_may_fill else self.time_index.max_entries
        block[slots.A_FRESH] = roll.fresh
        block[slots.A_INDEX_OUT] = address_of(index_out)
        block[slots.A_TIME_OUT] = address_of(time_out)
        assign = int(numbering is not None)
        placed = kernels().place(address_of(data), address_of(table), first, last, assign, address_of(block))
        if placed:
            if lies_at is None:
                if not self._owned:
                    self._unshare_log()
                begin = int(table[first, POSITION])
                end = int(table[first + placed - 1, POSITION] + table[first + placed - 1, SIZE])
                self.log.pwrite(data[begin:end].data, start)
            entries, time_entries = int(block[slots.A_INDEX_OUT_N]), int(block[slots.A_TIME_OUT_N])
            self.offset_index.append_raw(index_out[: entries * 8].data, entries)
            self.time_index.append_raw(time_out[: time_entries * 12].data, time_entries)
            # Last, so that a failed write leaves the segment as it was; what it wrote is cut by the caller.
            self.size_bytes = max(self.size_bytes, int(block[slots.A_SIZE]))
            self.bytes_since_index_entry = int(block[slots.A_BYTES_SINCE])
            self._largest = TimestampOffset(int(block[slots.A_MAX_TS]), int(block[slots.A_MAX_TS_OFFSET]))
            self._first_timestamp_ms = int(block[slots.A_FIRST_TS])
        return placed, int(block[slots.A_REASON])

    def index_room(self) -> int:
        """How many batches can be placed, however many index entries they need."""
        offset, time = self.offset_index, self.time_index
        return max(min(offset.max_entries - offset.entries, time.max_entries - 1 - time.entries), 0)

    def lacks_entry(self, max_timestamp_ms: int) -> bool:
        """Whether a batch, the next one, needs an entry in an index that is full."""
        if self.bytes_since_index_entry <= self.index_interval_bytes:
            return False
        newer = max(self.largest.timestamp_ms, max_timestamp_ms) > self.time_index.last_entry().timestamp_ms
        return self.offset_index.is_full or (newer and self.time_index.is_full)

    def restore(self, largest: TimestampOffset, bytes_since_index_entry: int) -> None:
        """Continue where another process stopped, as if the segment had never been closed."""
        self._largest = largest
        self.bytes_since_index_entry = bytes_since_index_entry

    def seal(self) -> None:
        """Stop being active: final time-index entry, files cut to what they hold."""
        if self.size_bytes:
            self.time_index.maybe_append(self.largest.timestamp_ms, self.largest.offset)
        self.trim()

    def trim(self) -> None:
        self.offset_index.trim()
        self.time_index.trim()
        self.trim_log()

    def trim_log(self) -> None:
        """Cut what a failed write left behind the logical end."""
        if self.log.size() != self.size_bytes:
            self._unshare_log()
            self.log.truncate(self.size_bytes)

    def flush(self) -> None:
        """Fsync data first, then what is derived from it."""
        self.log.fsync()
        self.offset_index.flush()
        self.time_index.flush()
        self.txn_index.flush()

    # --- cutting and rebuilding -------------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> int:
        """Drop everything from the batch that holds `offset` on; returns how many bytes went."""
        header = self.find_batch(offset)
        self.offset_index.truncate_to(offset)
        self.time_index.truncate_to(offset)
        self.txn_index.truncate_to(offset)
        dropped = 0
        self._owned = False  # it may have been sealed, and linked, since it was written to
        if header is not None:
            self._unshare_log()
            dropped = self.size_bytes - header.position
            self.log.truncate(header.position)
            self.size_bytes = header.position
        if self.size_bytes == 0:
            self._first_timestamp_ms = None
        self.bytes_since_index_entry = 0
        self._largest = self.scan_largest()
        return dropped

    def reset_indexes(self) -> None:
        """Empty all three, before a rebuild."""
        self.offset_index.keep(0)
        self.time_index.keep(0)
        self.txn_index.reset()
        self.bytes_since_index_entry = 0
        self._largest = TimestampOffset(NO_TIMESTAMP, self.base_offset)

    def index_batches(self, chunk: Chunk) -> None:
        """Index batches that are in the file already; raises OffsetOverflow when one does not belong here."""
        placed, reason = self.place(chunk.data, chunk.table, 0, lies_at=chunk.position)
        if reason == ROLL_OFFSET_OVERFLOW:
            raise OffsetOverflow(
                f"offset {int(chunk.table[placed, LAST_OFFSET])} is not within 2^31 of the base {self.base_offset}",
                file=chunk.file,
                position=chunk.position + int(chunk.table[placed, POSITION]),
                offset=int(chunk.table[placed, LAST_OFFSET]),
            )
        assert reason == OK

    def cut_bytes(self, size_bytes: int) -> int:
        """Keep the first `size_bytes` of the log file; returns how many went. Indexes are the caller's."""
        dropped = self.log.size() - size_bytes
        if dropped:
            self._unshare_log()
            self.log.truncate(size_bytes)
        self.size_bytes = size_bytes
        if size_bytes == 0:
            self._first_timestamp_ms = None
        return dropped

    def sanity_check(self) -> None:
        """Raises CorruptIndex when the indexes cannot belong to the log."""
        self.offset_index.sanity_check(self.size_bytes)
        self.time_index.sanity_check()
        self.txn_index.sanity_check()
        if self.offset_index.entries and self.offset_index.last_offset() - self.base_offset > RELATIVE_OFFSET_MAX:
            raise CorruptIndex("an entry beyond the segment's range", file=self.offset_index.path)

    # --- files ------------------------------------------------------------------------------------------------------

    def close(self, *, clean: bool = True) -> None:
        """Close the files; a clean close of a writable segment seals it first (see `seal`)."""
        if clean:
            self.seal()
        self.log.close()
        self.offset_index.close()
        self.time_index.close()
        self.txn_index.close()

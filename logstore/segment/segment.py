"""One segment: the `.log` and its indexes, as one thing.

A segment knows its files, its size and the bookkeeping that decides when an index entry is written. It appends
batches that were placed (see `place`), finds positions, truncates, rebuilds its indexes, renames and removes itself.
It decides nothing about other segments, offsets to assign or when to roll: that is the partition's.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from logstore.config import LogConfig
from logstore.copying import make_own
from logstore.errors import CorruptBatch, CorruptIndex, OffsetOverflow
from logstore.files import File, FileSystem
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, RELATIVE_OFFSET_MAX, SEGMENT_BYTES_MAX, Limits
from logstore.records import slots
from logstore.records.codes import OK, ROLL_OFFSET_OVERFLOW
from logstore.records.header import BatchHeader, read_header
from logstore.records.native import address_of, kernels
from logstore.records.record import NO_TIMESTAMP
from logstore.records.table import LAST_OFFSET, POSITION, SIZE, BatchTable
from logstore.segment.batches import SCAN_BYTES, Chunk, read_batches
from logstore.segment.names import FileKind, Transient, file_name
from logstore.segment.offset_index import OffsetIndex
from logstore.segment.time_index import TimeIndex, TimestampOffset
from logstore.segment.txn_index import TxnIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@dataclass(frozen=True, slots=True)
class SegmentSettings:
    """What a segment takes from its topic's settings, and when it was made."""

    index_interval_bytes: int = 4096
    index_bytes: int = 10 << 20
    created_ms: int = 0
    jitter_ms: int = 0

    @classmethod
    def under(cls, config: LogConfig, *, created_ms: int = 0, jitter_ms: int = 0) -> SegmentSettings:
        return cls(config.index_interval_bytes, config.segment_index_bytes, created_ms, jitter_ms)


class LogSegment:
    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        base_offset: int,
        *,
        settings: SegmentSettings = SegmentSettings(),  # noqa: B008 (frozen)
        writable: bool = False,
        suffix: Transient = Transient.NONE,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Opens the files; a writable segment's are created when missing."""
        self._fs = fs
        self._directory = directory
        self._suffix = suffix
        self._limits = limits
        self.writable = writable
        self.base_offset = base_offset
        self.created_ms = settings.created_ms
        self.jitter_ms = settings.jitter_ms
        self.index_interval_bytes = settings.index_interval_bytes
        path = self.path(FileKind.LOG)
        existed = not writable or fs.exists(path)
        self.log: File = fs.open(path, create=True) if writable else fs.open(path)
        self.size_bytes = self.log.size()
        if self.size_bytes > SEGMENT_BYTES_MAX:
            raise CorruptBatch(
                f"a segment of {self.size_bytes} bytes; the largest legal one has {SEGMENT_BYTES_MAX}", file=path
            )
        index_bytes = settings.index_bytes
        self.offset_index = OffsetIndex(fs, self.path(FileKind.INDEX), base_offset, index_bytes, writable=writable)
        self.time_index = TimeIndex(fs, self.path(FileKind.TIME_INDEX), base_offset, index_bytes, writable=writable)
        self.txn_index = TxnIndex(fs, self.path(FileKind.TXN_INDEX), base_offset, writable=writable)
        self.bytes_since_index_entry = 0
        self._owned = not existed  # whether the `.log` has no other name
        self._largest: TimestampOffset | None = None
        self._largest_confirmed = False
        self._first_timestamp_ms: int | None = None

    # --- names ------------------------------------------------------------------------------------------------------

    def path(self, kind: FileKind) -> str:
        return os.path.join(self._directory, file_name(self.base_offset, kind, self._suffix))

    def __repr__(self) -> str:
        return f"LogSegment({self.path(FileKind.LOG)}, {self.size_bytes} bytes)"

    # --- what it holds ----------------------------------------------------------------------------------------------

    @property
    def largest(self) -> TimestampOffset:
        """Largest record timestamp and the last offset of its batch; from the time index after opening."""
        if self._largest is None:
            self._largest = self.time_index.last_entry()
        return self._largest

    def scan_largest(self, end_offset: int = INT64_MAX) -> TimestampOffset:
        """The same from the log below `end_offset`: the time index of an active segment lags behind its log.

        The index only says where to begin; see `_confirmed`.
        """
        largest, position = self._confirmed(self.time_index.last_below(end_offset))
        for header in self.headers(position):
            if header.base_offset is not None and header.base_offset >= end_offset:
                break
            if header.max_timestamp_ms > largest.timestamp_ms:
                largest = TimestampOffset(header.max_timestamp_ms, header.last_offset)
            if header.next_offset >= end_offset:
                break
        return largest

    def confirm_largest(self) -> None:
        """Take `largest` from the log, once. If the log cannot be read, the index's value stays: others report
        damage."""
        if not self._largest_confirmed:
            with contextlib.suppress(CorruptBatch):
                self._largest = self.scan_largest()
            self._largest_confirmed = True

    def newest_timestamp_ms(self) -> int:
        """The age that retention uses, from the batch headers alone; raises CorruptBatch where they cannot be read.

        Deleting by time must not depend on an index.
        """
        newest_ms, end = NO_TIMESTAMP, 0
        for header in self.headers():
            newest_ms, end = max(newest_ms, header.max_timestamp_ms), header.end_position
        if end < self.size_bytes:
            raise CorruptBatch("the file ends inside a batch", file=self.log.path, position=end)
        return newest_ms if newest_ms >= 0 else self._fs.stat(self.path(FileKind.LOG)).mtime_ms

    @property
    def largest_timestamp_ms(self) -> int:
        """The age that retention uses: the largest record timestamp, or the file's time where no record has one."""
        if self.largest.timestamp_ms >= 0:
            return self.largest.timestamp_ms
        return self._fs.stat(self.path(FileKind.LOG)).mtime_ms

    @property
    def first_timestamp_ms(self) -> int:
        """Largest timestamp of the first batch, from which a segment's age counts; -1 while there is none."""
        if self._first_timestamp_ms is None:
            header = read_header(self.log, 0, self.size_bytes)
            if header is None:
                return NO_TIMESTAMP
            self._first_timestamp_ms = header.max_timestamp_ms
        return self._first_timestamp_ms

    def next_offset(self) -> int:
        """One past the last offset, found by a scan from the last index entry."""
        return self.tail()[0]

    def tail(self) -> tuple[int, int]:
        """One past the last offset, and where the last whole batch ends. Raises CorruptBatch."""
        for headers in self._walks(INT64_MAX, 0):
            next_offset, end = self.base_offset, 0
            try:
                for header in headers:
                    next_offset, end = header.next_offset, header.end_position
                return next_offset, end
            except CorruptIndex:
                continue
        raise AssertionError("a walk from the start does not ask the index")

    def headers(self, position: int = 0, end: int | None = None) -> Iterator[BatchHeader]:
        """Headers from `position` on, one read each; raises CorruptBatch at damage, ends before a cut-off batch."""
        end = self.size_bytes if end is None else min(end, self.size_bytes)
        while (header := read_header(self.log, position, end)) is not None:
            yield header
            position = header.end_position

    def chunks(
        self, position: int = 0, end: int | None = None, *, chunk_bytes: int = SCAN_BYTES, verify_crc: bool = True
    ) -> Iterator[Chunk]:
        """Whole batches from `position` up to `end`, about `chunk_bytes` at a time; the buffer is reused.

        Raises CorruptBatch at damage (a batch cut off at the end is damage too), BufferLimit when one batch is larger
        than the limits' read buffer.
        """
        end = self.size_bytes if end is None else min(end, self.size_bytes)
        return read_batches(
            self.log, position, end, limits=self._limits, chunk_bytes=chunk_bytes, verify_crc=verify_crc
        )

    # --- appending --------------------------------------------------------------------------------------------------

    def _own_log(self) -> None:
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
                    self._own_log()
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
            self._own_log()
            self.log.truncate(self.size_bytes)

    def flush(self) -> None:
        """Fsync data first, then what is derived from it."""
        self.log.fsync()
        self.offset_index.flush()
        self.time_index.flush()
        self.txn_index.flush()

    # --- finding ----------------------------------------------------------------------------------------------------

    def find_batch(self, offset: int, start_position: int = 0, *, sealed: bool = False) -> BatchHeader | None:
        """The first batch whose last offset is >= `offset`. Raises CorruptBatch, also where offsets do not increase.

        A `sealed` segment ends with a whole batch, or that is damage as well.
        """
        for headers in self._walks(offset, start_position, sealed=sealed):
            try:
                return next((header for header in headers if header.last_offset >= offset), None)
            except CorruptIndex:
                continue
        raise AssertionError("a walk from the start does not ask the index")

    def _walks(self, offset: int, start_position: int, *, sealed: bool = False) -> Iterator[Iterator[BatchHeader]]:
        """Headers from the index's answer for `offset` on, then, if that does not help, from `start_position` on.

        The answer is a hint, since an index has no checksum: a batch must lie there and one must end at its offset.
        """
        with contextlib.suppress(CorruptIndex):
            entry = self.offset_index.lookup(offset)
            if entry.position > start_position:
                yield self.ordered_headers(entry.position, through=entry.offset, sealed=sealed)
        yield self.ordered_headers(start_position, sealed=sealed)

    def ordered_headers(
        self, position: int, *, through: int | None = None, sealed: bool = False
    ) -> Iterator[BatchHeader]:
        """Headers with increasing offsets; raises CorruptBatch for others, CorruptIndex when none ends at `through`."""
        previous = self.base_offset - 1
        end = position
        try:
            for header in self.headers(position):
                if header.begin_offset <= previous:
                    raise CorruptBatch(
                        f"offsets {header.begin_offset} to {header.last_offset} do not follow {previous}",
                        file=self.log.path,
                        position=header.position,
                        offset=header.begin_offset,
                    )
                if through is not None and header.last_offset >= through:
                    if header.last_offset > through:
                        break
                    through = None
                yield header
                previous, end = header.last_offset, header.end_position
        except CorruptBatch:
            if through is None:
                raise
        if through is not None:
            raise CorruptIndex(
                f"no batch from {position} on ends at offset {through}", file=self.offset_index.path, offset=through
            )
        if sealed and end != self.size_bytes:
            raise CorruptBatch("the file ends inside a batch", file=self.log.path, position=end, offset=previous + 1)

    def cuts(self, spacing_bytes: int) -> list[int]:
        """Where batches begin, about so many bytes apart and none at the start, as far as the index can be believed."""
        cuts = [0]
        for entry in self.offset_index.each_beyond(range(spacing_bytes, self.size_bytes, spacing_bytes)):
            with contextlib.suppress(CorruptBatch):
                header = read_header(self.log, entry.position, self.size_bytes)
                if header is not None and header.last_offset == entry.offset and header.position > cuts[-1]:
                    cuts.append(header.position)
        return cuts[1:]

    def last_indexed_offset(self) -> int:
        """The largest offset in either index, the base when they are empty."""
        return max(self.offset_index.last_offset(), self.time_index.last_entry().offset)

    def find_timestamp(
        self, timestamp_ms: int, start_offset: int, end_offset: int = INT64_MAX, *, sealed: bool = False
    ) -> BatchHeader | None:
        """The batch at which a search for the first record at or after a time must begin; None when it lies after
        `end_offset`.
        """
        hint, position = self._confirmed(self.time_index.lookup(timestamp_ms))
        if start_offset >= end_offset or (position and hint.offset >= end_offset):
            return None
        if not position or hint.offset < start_offset:
            return self.find_batch(max(hint.offset, start_offset), sealed=sealed)
        return read_header(self.log, position, self.size_bytes)

    def _confirmed(self, entry: TimestampOffset) -> tuple[TimestampOffset, int]:
        """A time-index entry with the position of its batch, if the batch with that offset has that timestamp.

        Else (-1, base offset) at the segment's start: an entry is a hint, since an index has no checksum. One that
        fits its batch can be believed, whatever is wrong with the others: nothing before it is newer.
        """
        if entry.timestamp_ms >= 0:
            with contextlib.suppress(CorruptBatch):
                found = self.find_batch(entry.offset)
                # Brokers before 3.x noted the record's own offset, not its batch's last.
                if (
                    found is not None
                    and found.max_timestamp_ms == entry.timestamp_ms
                    and (found.base_offset is None or found.base_offset <= entry.offset)
                ):
                    return entry, found.position
        return TimestampOffset(NO_TIMESTAMP, self.base_offset), 0

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
            self._own_log()
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
            self._own_log()
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

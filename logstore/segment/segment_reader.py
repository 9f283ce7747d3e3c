"""One segment as readers see it: its files, what the batches in them say, and where an offset or a time begins.

An index has no checksum, so whatever it answers is a hint: it is confirmed in the log, or the log is walked.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.config import LogConfig
from logstore.errors import CorruptBatch, CorruptIndex
from logstore.files import File, FileSystem
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, SEGMENT_BYTES_MAX, Limits
from logstore.records.header import BatchHeader, read_header
from logstore.records.record import NO_TIMESTAMP
from logstore.segment.batches import SCAN_BYTES, Chunk, read_batches
from logstore.segment.names import FileKind, Transient, file_name
from logstore.segment.offset_index import OffsetIndex
from logstore.segment.time_index import TimeIndex, TimestampOffset
from logstore.segment.txn_index import TxnIndex

if TYPE_CHECKING:
    from collections.abc import Iterator


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


class SegmentReader:
    """Files are opened by whoever makes it, and closed by `LogSegment.close`."""

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
        return f"{type(self).__name__}({self.path(FileKind.LOG)}, {self.size_bytes} bytes)"

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

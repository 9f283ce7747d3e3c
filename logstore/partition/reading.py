"""Reading a log by position: scan, look up by time.

Everything works on a `LogView`: the segments at one moment and how far a reader may see. A position is an offset,
never a file; gaps are compaction. The view of the writing process and that of other processes (see `reader`) are read
by the same functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
import numpy.typing as npt

from logstore.errors import BufferLimit, CorruptBatch, DamagedLog, OffsetOutOfRange
from logstore.limits import INT64_MAX, Limits
from logstore.records.codes import EXPLAINED
from logstore.records.decoder import Decoder
from logstore.records.header import BatchHeader
from logstore.records.record import NO_TIMESTAMP
from logstore.records.scan import scan_batches
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    LAST_OFFSET,
    POSITION,
    PRODUCER_ID,
    SIZE,
    SKIP,
    TRANSACTIONAL_BIT,
    BatchTable,
)
from logstore.segment.batches import Chunk, begin_after, earliest_begins, ordered_batches
from logstore.segment.segment import LogSegment
from logstore.segment.time_index import TimestampOffset
from logstore.segment.txn_index import AbortedTransaction
from logstore.topic import TopicPartition

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP_QUERY = -3
EARLIEST_LOCAL = -4

_CHUNK_BYTES = 4 << 20


class OnOutOfRange(Enum):
    """What a reader does at a position outside the log."""

    FAIL = "fail"
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class LogView:
    """A log at one moment. `open_segment` gives the segment of a base offset; readers of other processes open it by
    name.
    """

    partition: TopicPartition
    bases: tuple[int, ...]
    open_segment: Callable[[int], LogSegment]
    log_start_offset: int
    end_offset: int
    log_end_offset: int
    #: largest timestamps of sealed segments by base offset, as the segment list has them
    listed_timestamps_ms: Mapping[int, int] = field(default_factory=dict)

    def segment_at(self, offset: int) -> int:
        """Which segment holds `offset`, or would: the number of the greatest base at or below it."""
        return max(bisect_right(self.bases, offset) - 1, 0)

    def segment_end(self, number: int) -> int:
        """One past the last offset the segment can hold."""
        return self.bases[number + 1] if number + 1 < len(self.bases) else INT64_MAX

    def is_sealed(self, number: int) -> bool:
        """Whether nothing is written to the segment any more."""
        return number + 1 < len(self.bases)

    def check(self, offset: int) -> None:
        """Raises OffsetOutOfRange for a position below the log start or beyond the log end."""
        if offset < self.log_start_offset:
            raise OffsetOutOfRange(
                f"position {offset} is below the log start {self.log_start_offset}",
                partition=self.partition,
                offset=offset,
                hint="The records are gone; start at the earliest offset, or pass on_out_of_range",
            )
        if offset > self.log_end_offset:
            raise OffsetOutOfRange(
                f"position {offset} is beyond the log end {self.log_end_offset}",
                partition=self.partition,
                offset=offset,
            )

    def start(self, offset: int, on_out_of_range: OnOutOfRange) -> int:
        """`offset`, or where a reader that is out of range begins instead."""
        if self.log_start_offset <= offset <= self.log_end_offset or on_out_of_range is OnOutOfRange.FAIL:
            self.check(offset)
            return offset
        return self.log_start_offset if on_out_of_range is OnOutOfRange.EARLIEST else self.end_offset


def aborted_transactions(view: LogView, number: int, start: int, end: int) -> list[AbortedTransaction]:
    """Aborted transactions that overlap [start, end), from the transaction indexes of segment `number` on."""
    found: list[AbortedTransaction] = []
    for at in range(number, len(view.bases)):
        entries, complete = view.open_segment(view.bases[at]).txn_index.collect_aborted(start, end)
        found += entries
        if complete:
            break
    return found


# --- scan -------------------------------------------------------------------------------------------------------------


def read_chunks(
    view: LogView,
    start: int,
    end: int | None = None,
    *,
    limits: Limits,
    committed: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
    verify_crc: bool = True,
) -> Iterator[Chunk]:
    """Batches that hold offsets of [start, end), a buffer at a time; aborted ones are marked SKIP when `committed`.

    The buffer is reused between steps and grows to hold one batch, up to the limits' read buffer. Nothing after
    `end` is judged: there a writer may be at work. Raises OffsetOutOfRange, BufferLimit, DamagedLog.
    """
    view.check(start)
    end = view.end_offset if end is None else min(end, view.end_offset)
    chunk_bytes = min(chunk_bytes, limits.read_buffer_bytes)
    position = start
    after = -1  # the last offset delivered; a reader may begin inside a batch
    buffer = np.empty(0, dtype=np.uint8)
    number = view.segment_at(start)
    hidden: dict[int, list[tuple[int, int]]] = {}
    if committed and start < end:
        for txn in aborted_transactions(view, number, start, end):
            hidden.setdefault(txn.producer_id, []).append((txn.first_offset, txn.last_offset))
    while position < end and number < len(view.bases):
        if view.bases[number] >= end:
            break
        segment = view.open_segment(view.bases[number])
        stop = min(end, view.segment_end(number))
        first = segment.find_batch(position, sealed=view.is_sealed(number))
        at = segment.size_bytes if first is None else first.position
        while position < stop and at < segment.size_bytes:
            wanted = min(chunk_bytes, segment.size_bytes - at)
            if len(buffer) < wanted:
                buffer = np.empty(wanted, dtype=np.uint8)
            got = segment.log.pread_into(buffer[: min(len(buffer), segment.size_bytes - at)].data, at)
            scan = scan_batches(buffer[:got], verify_crc=verify_crc)
            sound = ordered_batches(
                scan.table,
                after=after,
                expected=position,
                low=segment.base_offset,
                high=view.segment_end(number),
                following=partial(begin_after, segment.log, at + scan.next_position, segment.size_bytes),
            )
            table = scan.table[: int(np.searchsorted(earliest_begins(scan.table[:sound]), stop))]
            if not len(table):
                if sound:
                    break  # the next batch begins after the end
                if len(scan.table):
                    row = scan.table[0]
                    what = f"a batch that ends at offset {row[LAST_OFFSET]} contradicts its neighbours or its segment"
                    raise _damaged(view, segment, what, at + int(row[POSITION]), position)
                buffer = _grown(view, segment, at, position, len(buffer), got, scan.code, limits)
                continue
            if hidden:
                _hide(table, hidden)
            yield Chunk(buffer, table, at, segment.log.path)
            position = int(table[-1, LAST_OFFSET]) + 1
            after = position - 1
            at += int(table[-1, POSITION] + table[-1, SIZE])
        number += 1
        if number == len(view.bases) and position < stop and at >= segment.size_bytes:
            # After the last batch nothing was compacted away: it ends the log.
            what = f"the log ends at {position}, below {end}, up to which it can be read"
            raise _damaged(view, segment, what, segment.size_bytes, position)


def _damaged(view: LogView, segment: LogSegment, what: str, position: int, offset: int) -> DamagedLog:
    return DamagedLog(
        what,
        partition=view.partition,
        file=segment.log.path,
        position=position,
        offset=offset,
        hint="Run `duramen recover`",
    )


def _grown(
    view: LogView, segment: LogSegment, at: int, position: int, size: int, got: int, code: int, limits: Limits
) -> npt.NDArray[np.uint8]:
    """A larger buffer for the batch at `at`; an error when no buffer would help."""
    header = next(segment.headers(at), None)
    if header is None or header.size_bytes <= got:
        what = f"committed records cannot be read: {EXPLAINED.get(code, 'the file ends early')}"
        raise _damaged(view, segment, what, at, position)
    if header.size_bytes > limits.read_buffer_bytes:
        raise _too_large(view, segment, header, limits)
    while size < header.size_bytes:
        size = max(2 * size, 1 << 16)
    return np.empty(min(size, limits.read_buffer_bytes), dtype=np.uint8)


def _too_large(view: LogView, segment: LogSegment, header: BatchHeader, limits: Limits) -> BufferLimit:
    return BufferLimit(
        f"a batch of {header.size_bytes} bytes; the read buffer may have {limits.read_buffer_bytes}",
        partition=view.partition,
        file=segment.log.path,
        position=header.position,
        offset=header.last_offset,
        hint="Raise read_buffer_bytes of the reader's limits",
    )


def _hide(table: BatchTable, hidden: dict[int, list[tuple[int, int]]]) -> None:
    """Mark the data of aborted transactions; their markers are control batches and never delivered."""
    for row in np.nonzero((table[:, ATTRIBUTES] & TRANSACTIONAL_BIT) != 0)[0].tolist():
        base = int(table[row, BASE_OFFSET])
        spans = hidden.get(int(table[row, PRODUCER_ID]), ())
        if any(first <= base < last for first, last in spans):
            table[row, SKIP] = 1


# --- by time ----------------------------------------------------------------------------------------------------------


def offset_for_timestamp(
    view: LogView, timestamp_ms: int, limits: Limits, *, exact: bool = False
) -> TimestampOffset | None:
    """As Kafka answers a list-offsets request; None when no record qualifies or none is visible.

    Kafka gives up at the first segment that seems new enough, also where that is empty, or what qualifies in it lies
    below the log start, or none of its records has a time and only the file is new. With `exact` the search goes on.
    """
    if timestamp_ms == LATEST:
        return TimestampOffset(NO_TIMESTAMP, view.end_offset)
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        return TimestampOffset(NO_TIMESTAMP, view.log_start_offset)
    if timestamp_ms == MAX_TIMESTAMP_QUERY:
        return _visible(view, _largest_timestamp(view, limits))
    if timestamp_ms < 0:
        return None
    for number, segment in _searched(view):
        largest_ms = _largest(view, number, segment).timestamp_ms
        if (largest_ms if largest_ms >= 0 else segment.largest_timestamp_ms) >= timestamp_ms:
            sealed = view.is_sealed(number)
            first = segment.find_timestamp(timestamp_ms, view.log_start_offset, view.end_offset, sealed=sealed)
            position = segment.size_bytes if first is None else first.position
            headers = segment.ordered_headers(position, sealed=sealed)
            found = _first_at_or_after(view, segment, headers, timestamp_ms, limits)
            if found is not None or not exact:
                return _visible(view, found)
    return None


def _searched(view: LogView) -> Iterator[tuple[int, LogSegment]]:
    """The segments with their numbers. Nothing after the end is judged where another process may be writing it."""
    for number, base in enumerate(view.bases):
        segment = view.open_segment(base)
        if base >= view.end_offset and not segment.writable:
            return
        yield number, segment


def _largest(view: LogView, number: int, segment: LogSegment) -> TimestampOffset:
    """The segment's largest timestamp; where another process writes, the last segment's index may not have it yet.

    Of other segments the index is believed where the list, which has a checksum, says the same.
    """
    if segment.writable:
        return segment.largest
    if number + 1 == len(view.bases):
        return segment.scan_largest(view.end_offset)
    if view.listed_timestamps_ms.get(segment.base_offset) != segment.largest.timestamp_ms:
        segment.confirm_largest()
    return segment.largest


def _visible(view: LogView, found: TimestampOffset | None) -> TimestampOffset | None:
    return found if found is not None and found.offset < view.end_offset else None


def _first_at_or_after(
    view: LogView, segment: LogSegment, headers: Iterator[BatchHeader], timestamp_ms: int, limits: Limits
) -> TimestampOffset | None:
    for header in headers:
        if header.last_offset < view.log_start_offset or header.max_timestamp_ms < timestamp_ms:
            if header.next_offset >= view.end_offset:  # nothing after the end is judged: a writer may be at work there
                return None
            continue
        for offset, timestamp in _timestamps(view, segment, header, limits):
            if timestamp >= timestamp_ms and offset >= view.log_start_offset:
                return TimestampOffset(timestamp, offset)
        if header.next_offset >= view.end_offset:
            return None
    return None


def _largest_timestamp(view: LogView, limits: Limits) -> TimestampOffset | None:
    best: LogSegment | None = None
    largest = TimestampOffset(NO_TIMESTAMP, -1)
    for number, segment in _searched(view):
        found = _largest(view, number, segment)
        if segment.size_bytes and found.timestamp_ms > largest.timestamp_ms:
            best, largest = segment, found
    if best is None:
        return None
    largest = best.scan_largest(view.end_offset)
    first = best.find_batch(largest.offset)
    if first is None:
        return None
    for header in best.ordered_headers(first.position):
        if header.max_timestamp_ms == largest.timestamp_ms:
            for offset, timestamp in _timestamps(view, best, header, limits):
                if timestamp == largest.timestamp_ms:
                    return TimestampOffset(timestamp, offset)
            return None
        if header.next_offset >= view.end_offset:
            return None
    return None


def _timestamps(view: LogView, segment: LogSegment, header: BatchHeader, limits: Limits) -> Iterator[tuple[int, int]]:
    """(offset, timestamp) of the records of one batch. Raises CorruptBatch, BufferLimit, DecompressionLimit."""
    if header.size_bytes > limits.read_buffer_bytes:
        raise _too_large(view, segment, header, limits)
    if header.next_offset < view.end_offset:  # no checksum covers the offset, but the batch after may contradict it
        following = begin_after(segment.log, header.end_position, segment.size_bytes)
        if following is not None and following <= header.last_offset:
            raise CorruptBatch(
                f"the batch up to offset {header.last_offset} is followed by one that begins at {following}",
                partition=view.partition,
                file=segment.log.path,
                position=header.position,
                offset=header.begin_offset,
            )
    data = np.frombuffer(segment.log.pread(header.size_bytes, header.position), dtype=np.uint8)
    scan = scan_batches(data)
    if not len(scan.table):
        raise scan.error(file=segment.log.path, base_position=header.position)
    decoder = Decoder(limits=limits, headers=False, control=True)
    for columns in decoder.columns(data, scan.table, file=segment.log.path, base_position=header.position):
        yield from zip(columns.offsets.tolist(), columns.timestamps_ms.tolist(), strict=True)

"""Kafka's fetch: where the bytes from an offset on lie, as a broker answers its consumers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from logstore.files import File
from logstore.partition.reading import LogView, aborted_transactions
from logstore.records.header import BatchHeader
from logstore.segment.segment import LogSegment
from logstore.segment.txn_index import AbortedTransaction
from reference.delivery import FileRange


class Isolation(Enum):
    """How far a reader may see."""

    LOG_END = "log_end"
    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A byte range of one segment's `.log`. The first batch may begin below the asked offset, the last may be cut."""

    offset: int
    segment_base_offset: int
    position: int
    size_bytes: int
    file: File | None
    first_batch_incomplete: bool = False
    aborted: tuple[AbortedTransaction, ...] = ()

    def range(self) -> FileRange | None:
        """For zero-copy delivery; None when there is nothing."""
        return (
            FileRange(self.file, self.position, self.size_bytes) if self.file is not None and self.size_bytes else None
        )


def fetch(
    view: LogView, offset: int, max_bytes: int, *, min_one_batch: bool = True, committed: bool = False
) -> Fetched:
    """The bytes a consumer at `offset` gets: at most `max_bytes` of one segment, one whole batch if `min_one_batch`.

    Raises OffsetOutOfRange. At the end there is nothing to fetch: an empty range.
    """
    view.check(offset)
    nothing = Fetched(offset, view.bases[-1], 0, 0, None)
    if offset >= view.end_offset:
        return nothing
    for number in range(view.segment_at(offset), len(view.bases)):
        if view.bases[number] >= view.end_offset:
            return nothing
        segment = view.open_segment(view.bases[number])
        first = segment.find_batch(offset, sealed=view.is_sealed(number))
        if first is None:  # all of it was compacted away: go on in the next segment
            continue
        limit = _end_position(view, number, segment, first)
        budget = max(max_bytes, first.size_bytes) if min_one_batch else max_bytes
        incomplete = 0 < budget < first.size_bytes  # for want of bytes, not of permission to see it
        size = max(min(limit - first.position, budget), 0)
        aborted: tuple[AbortedTransaction, ...] = ()
        if committed:
            aborted = tuple(
                aborted_transactions(view, number, offset, _upper_offset(view, number, segment, first.position + size))
            )
        return Fetched(offset, segment.base_offset, first.position, size, segment.log, incomplete, aborted)
    return nothing


def _end_position(view: LogView, number: int, segment: LogSegment, first: BatchHeader) -> int:
    if view.segment_end(number) <= view.end_offset:
        return segment.size_bytes
    last = segment.find_batch(view.end_offset, first.position)
    return segment.size_bytes if last is None else last.position


def _upper_offset(view: LogView, number: int, segment: LogSegment, end_position: int) -> int:
    """An offset no fetched record reaches: of the first index entry behind the range, else the next segment's base."""
    beyond = segment.offset_index.each_beyond([end_position])
    if beyond:
        return beyond[0].offset
    return min(view.segment_end(number), view.log_end_offset)

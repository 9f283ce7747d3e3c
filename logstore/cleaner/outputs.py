"""The segments that a group becomes, written in the order of the log into a folder of the run.

What does not fit one segment continues in the next, as appends do. Each output is complete and synced before the next
one begins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from logstore.cleaner.filter import FilterSettings
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import Progress
from logstore.cleaner.throttle import Throttle
from logstore.cleaner.work import Output, PassWork
from logstore.errors import OffsetOverflow
from logstore.files import FileSystem
from logstore.limits import INT64_MAX, RELATIVE_OFFSET_MAX, SEGMENT_BYTES_MAX
from logstore.records.codes import OK
from logstore.records.encoder import EncodedBatches
from logstore.records.table import BASE_OFFSET, COUNT, LAST_OFFSET, MAGIC, MAX_TIMESTAMP, SIZE, BatchTable
from logstore.segment.names import FileKind, file_name
from logstore.segment.output import discard_output, new_output
from logstore.segment.segment import LogSegment, RollLimits
from logstore.segment.segment_reader import SegmentSettings
from logstore.segment.txn_index import AbortedTransaction

_WRITEBACK_BYTES = 8 << 20  # handed to the device at once; many small requests fill its queue and block


class GroupOutputs:
    """`begin`, `append` in the order of the log, then `finish` or `discard`."""

    def __init__(
        self,
        fs: FileSystem,
        folder: str,
        work: PassWork,
        sources: Sequence[SourceSegment],
        settings: FilterSettings,
        *,
        throttle: Throttle,
        progress: Progress,
    ) -> None:
        self._fs = fs
        self._folder = folder
        self._work = work
        self._sources = sources
        self._throttle = throttle
        self._progress = progress
        self._bytes_max = output_bytes_max(settings, work.segment_bytes)
        #: segments that are full, and durable
        self.done: list[Output] = []
        #: the segment that is written, not durable yet
        self._open: LogSegment | None = None
        #: how many bytes of it were handed to the device
        self._begun_bytes = 0
        #: how many records it has
        self._records = 0
        #: after the last batch that was written
        self._next_offset = sources[0].base_offset
        #: of markers that stay, from where the open segment begins on
        self._aborted: list[AbortedTransaction] = []

    @property
    def is_begun(self) -> bool:
        """Whether anything is written; until then nothing has changed."""
        return self._open is not None

    def begin(self, base_offset: int) -> None:
        settings = SegmentSettings(self._work.index_interval_bytes, self._work.segment_index_bytes)
        self._open = new_output(self._fs, self._folder, base_offset, settings, self._work.limits)

    def note_aborted(self, aborted: Sequence[AbortedTransaction]) -> None:
        """They go with the output that has their marker, so note them before it is appended."""
        self._aborted += aborted

    def append(self, batches: EncodedBatches) -> None:
        at = 0
        while at < len(batches.table):
            placed, fits = self._fill(batches, at)
            at += placed
            if not fits:
                self._roll(batches.table[at : at + 1])
        self._throttle.take(len(batches.data))
        self._progress("write", len(batches.data))

    def finish(self, records: int) -> None:
        """Make the last output durable; `records` are those of all of them."""
        if self._open is not None:
            self._records = records - sum(output.records for output in self.done)
            self._seal(self._open, INT64_MAX)

    def close(self) -> None:
        if self._open is not None:
            self._open.close(clean=False)

    def discard(self) -> None:
        """Remove everything that was written; it is closed."""
        written = {self._sources[0].base_offset, *(output.base_offset for output in self.done)}
        if self._open is not None:
            written.add(self._open.base_offset)
        for base_offset in written:
            discard_output(self._fs, self._folder, base_offset)

    def _fill(self, batches: EncodedBatches, first: int) -> tuple[int, bool]:
        """Append some batches from `first` on; returns how many, and whether there is room for the next one."""
        output = self._open
        assert output is not None
        room = output.index_room()
        # Kafka's cleaner minds a full index only where a batch needs an entry in it.
        if not room and output.lacks_entry(int(batches.table[first, MAX_TIMESTAMP])):
            return 0, False
        table, bytes_max = batches.table[: first + max(room, 1)], self._bytes_max
        if not output.size_bytes and int(table[first, SIZE]) > bytes_max:  # it has a segment for itself
            table, bytes_max = table[: first + 1], SEGMENT_BYTES_MAX
        roll = RollLimits(bytes_max, INT64_MAX, indexes_may_fill=True)
        placed, reason = output.place(batches.data, table, first, roll=roll)
        if placed:
            self._records += int(table[first : first + placed, COUNT].clip(0).sum())
            self._next_offset = int(table[first + placed - 1, LAST_OFFSET]) + 1
        if output.size_bytes - self._begun_bytes >= _WRITEBACK_BYTES:
            output.log.start_writeback(self._begun_bytes, output.size_bytes - self._begun_bytes)
            self._begun_bytes = output.size_bytes
        return placed, reason == OK

    def _roll(self, following: BatchTable) -> None:
        """Continue in a new output, for this batch."""
        full = self._open
        assert full is not None
        base_offset = first_base(following, self._next_offset)
        if base_offset <= full.base_offset:
            raise OffsetOverflow(
                f"the batch that ends at {int(following[0, LAST_OFFSET])} does not fit the segment at"
                f" {full.base_offset}, nor one of its own",
                file=full.log.path,
                partition=self._work.partition,
            )
        self._seal(full, base_offset)
        self._open = None
        full.close(clean=False)
        self.begin(base_offset)

    def _seal(self, segment: LogSegment, end_offset: int) -> None:
        """Make an output durable that ends below `end_offset`."""
        for entry in self._aborted:
            if entry.last_offset < end_offset:
                segment.txn_index.append(entry)
        self._aborted = [entry for entry in self._aborted if entry.last_offset >= end_offset]
        segment.seal()
        segment.flush()
        mtime_ms = mtime_ms_of(self._fs, self._work, self._sources[-1])
        for kind in (FileKind.LOG, FileKind.INDEX, FileKind.TIME_INDEX):
            if self._fs.exists(segment.path(kind)):
                self._fs.set_mtime(segment.path(kind), mtime_ms)
        largest_ms = segment.largest.timestamp_ms if segment.size_bytes else -1
        self.done.append(Output(segment.base_offset, segment.size_bytes, largest_ms, self._records))
        self._records = self._begun_bytes = 0


def mtime_ms_of(fs: FileSystem, work: PassWork, source: SourceSegment) -> int:
    """The file time of a source's `.log`; outputs keep it."""
    return fs.stat(os.path.join(work.directory, file_name(source.base_offset, FileKind.LOG))).mtime_ms


def output_bytes_max(settings: FilterSettings, segment_bytes: int) -> int:
    """How large an output may become. By Kafka's rules a group only shrinks, or grows by a few bytes where horizons
    are stamped, and stays one segment; what is recompressed or joined may grow many times over.
    """
    rewritten = settings.codec_id is not None or settings.merge_bytes > 0
    return min(segment_bytes, SEGMENT_BYTES_MAX) if rewritten else SEGMENT_BYTES_MAX


def first_base(batch: BatchTable, next_offset: int) -> int:
    """The base of a segment that begins with this batch. One of the old formats does not say where it begins."""
    if int(batch[0, MAGIC]) == 2:
        return int(batch[0, BASE_OFFSET])
    return max(next_offset, int(batch[0, LAST_OFFSET]) - RELATIVE_OFFSET_MAX)

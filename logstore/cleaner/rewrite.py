"""Writing one group of segments anew, into a folder of the run; the log itself is not touched.

A single segment in which nothing changes is not written at all. The output is complete and synced when this returns.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from logstore.cleaner.dedupe_map import DedupeMap
from logstore.cleaner.filter import Counts, Filter, Filtered, FilterSettings
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import Progress, aborted_between, no_progress, open_source
from logstore.cleaner.throttle import UNTHROTTLED, Throttle
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import Cleaned, Indexed, PassWork
from logstore.errors import OffsetOverflow
from logstore.files import FileSystem
from logstore.records.codes import OK
from logstore.records.encoder import EncodedBatches
from logstore.records.marks import ORDER_OFFSET
from logstore.records.survivors import Survivors
from logstore.segment.batches import Chunk
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name
from logstore.segment.segment import LogSegment
from logstore.segment.txn_index import AbortedTransaction

_CHUNK_BYTES = 8 << 20  # verdicts are quick, so that what is done once a chunk counts


@dataclass(frozen=True, slots=True)
class Written:
    """A group as it was filtered; what of it is to be written lies in an open segment that is not durable yet."""

    sources: tuple[SourceSegment, ...]
    counts: Counts
    aborted: Sequence[AbortedTransaction]
    segment: LogSegment | None
    seconds: float


class GroupWriter:
    """Rewrites the groups of one pass, in the order of the log where it has transactions, in any order where not."""

    def __init__(
        self,
        fs: FileSystem,
        work: PassWork,
        indexed: Indexed,
        offset_map: DedupeMap,
        folder: str,
        *,
        throttle: Throttle = UNTHROTTLED,
        progress: Progress = no_progress,
        indexed_here: bool = False,
    ) -> None:
        """With `indexed_here` this very process has just read all that was indexed, and checked it."""
        self._fs = fs
        self._work = work
        self._indexed_here = indexed_here
        self._indexed = indexed
        self._map = offset_map
        self._folder = folder
        self._throttle = throttle
        self._progress = progress
        self._transactions = Transactions()
        self._legacy_horizon_ms = self._legacy_horizon()
        self._survivors: Survivors | None = None
        # Records without key are no key's last either, but are counted apart; and older records may win by version.
        if work.map_settings.order == ORDER_OFFSET and not indexed.keyless:
            self._survivors = offset_map.survivors(work.first_dirty_offset, indexed.end_offset)

    def _legacy_horizon(self) -> int:
        """Tombstones of formats 0 and 1 have no horizon of their own: the age of the last clean segment decides."""
        clean = [s for s in self._work.segments if s.base_offset < self._work.first_dirty_offset]
        if not clean:
            return 0
        return self._mtime_ms(clean[-1]) - self._work.delete_retention_ms

    def _mtime_ms(self, source: SourceSegment) -> int:
        path = os.path.join(self._work.directory, file_name(source.base_offset, FileKind.LOG))
        return self._fs.stat(path).mtime_ms

    def _settings(self, sources: Sequence[SourceSegment]) -> FilterSettings:
        work, options = self._work, self._work.options
        codec_id = options.recompress_codec_id
        if codec_id is not None and options.recompress_after_ms:
            newest = max(self._mtime_ms(source) for source in sources)
            if newest > work.now_ms - options.recompress_after_ms:
                codec_id = None
        return FilterSettings(
            now_ms=work.now_ms,
            delete_retention_ms=work.delete_retention_ms,
            end_offset=self._indexed.end_offset,
            first_uncleanable_offset=work.first_uncleanable_offset,
            last_records=work.last_records,
            expired_before_ms=work.expired_before_ms,
            merge_bytes=options.merge_bytes,
            codec_id=codec_id,
            survivors=self._survivors,
        )

    def clean(self, sources: tuple[SourceSegment, ...]) -> Cleaned:
        """Raises CorruptBatch, CorruptIndex, OSError; then nothing of the group is left in the folder."""
        return self.finish(self.write(sources))

    def write(self, sources: tuple[SourceSegment, ...]) -> Written:
        """The work of a thread of its own; `finish` or `discard` what it gives. Raises as `clean`."""
        began = time.monotonic()
        work = self._work
        rules = Filter(self._map.view(), self._settings(sources), self._transactions, limits=work.limits)
        output = self._open(sources[0].base_offset) if len(sources) > 1 else None
        try:
            for source in sources:
                segment = open_source(self._fs, work, source.base_offset)
                try:
                    for chunk, part in self._filtered(source, segment, rules):
                        if output is None and part.changed:
                            output = self._open(source.base_offset)
                            self._copy(segment, part.position, output)
                        if output is not None:
                            self._append(output, rules.written(chunk, part))
                finally:
                    segment.close(clean=False)
        except BaseException:
            self._discard(sources, output)
            raise
        return Written(sources, rules.counts, rules.aborted, output, time.monotonic() - began)

    def _filtered(self, source: SourceSegment, segment: LogSegment, rules: Filter) -> Iterator[tuple[Chunk, Filtered]]:
        work = self._work
        following = work.following(source)
        self._transactions.add(aborted_between(self._fs, work, source.base_offset, following))
        keep_legacy = self._mtime_ms(source) > self._legacy_horizon_ms
        verify_crc = not self._is_checked(source.base_offset, following)
        for chunk in segment.chunks(0, source.size_bytes, chunk_bytes=_CHUNK_BYTES, verify_crc=verify_crc):
            self._throttle.take(len(chunk.data))
            self._progress("rewrite", len(chunk.data))
            for part in rules.parts(chunk, keep_legacy_tombstones=keep_legacy):
                yield chunk, part

    def finish(self, written: Written) -> Cleaned:
        """Make the output durable. Raises OSError; then nothing of the group is left in the folder."""
        began = time.monotonic()
        sources, segment, counts = written.sources, written.segment, written.counts
        size, largest_ms = sources[0].size_bytes, -1
        if segment is not None:
            try:
                self._seal(segment, written)
            except BaseException:
                self._discard(sources, segment)
                raise
            size = segment.size_bytes
            largest_ms = segment.largest.timestamp_ms if size else -1
            segment.close(clean=False)
        return Cleaned(
            sources,
            segment is not None,
            counts,
            size,
            largest_ms,
            sum(source.size_bytes for source in sources),
            size if segment is not None else 0,
            _distinct(counts, sources, self._work, self._indexed),
            seconds=written.seconds + time.monotonic() - began,
            worker=worker_name(),
            folder=self._folder,
        )

    def discard(self, written: Written) -> None:
        self._discard(written.sources, written.segment)

    def _discard(self, sources: Sequence[SourceSegment], segment: LogSegment | None) -> None:
        if segment is not None:
            segment.close(clean=False)
        discard_output(self._fs, self._folder, sources[0].base_offset)

    def _seal(self, segment: LogSegment, written: Written) -> None:
        for entry in written.aborted:
            segment.txn_index.append(entry)
        segment.seal()
        segment.flush()
        mtime_ms = self._mtime_ms(written.sources[-1])
        for kind in (FileKind.LOG, FileKind.INDEX, FileKind.TIME_INDEX):
            if self._fs.exists(segment.path(kind)):
                self._fs.set_mtime(segment.path(kind), mtime_ms)

    def _is_checked(self, base_offset: int, following: int) -> bool:
        """Whether the whole segment was read, and its checksums compared, for the map."""
        within = base_offset >= self._work.first_dirty_offset and following <= self._indexed.end_offset
        return self._indexed_here and within

    def _open(self, base_offset: int) -> LogSegment:
        discard_output(self._fs, self._folder, base_offset)
        return LogSegment(
            self._fs,
            self._folder,
            base_offset,
            index_interval_bytes=self._work.index_interval_bytes,
            index_bytes=self._work.segment_index_bytes,
            writable=True,
            suffix=Transient.CLEANED,
            limits=self._work.limits,
        )

    def _copy(self, segment: LogSegment, end: int, output: LogSegment) -> None:
        """What was found unchanged so far, as it is."""
        if end:
            for chunk in segment.chunks(0, end, verify_crc=False):
                self._throttle.take(len(chunk.data))
                self._append(output, EncodedBatches(chunk.data, chunk.table))

    def _append(self, output: LogSegment, batches: EncodedBatches | None) -> None:
        if batches is None:
            return
        placed, reason = output.place(
            batches.data, batches.table, 0, next_offset=0, assign=False, indexes_may_fill=True
        )
        if reason != OK:
            raise OffsetOverflow(
                f"batch {placed} does not fit the segment at {output.base_offset}",
                file=output.log.path,
                partition=self._work.partition,
            )
        output.log.start_writeback(output.size_bytes - len(batches.data), len(batches.data))
        self._throttle.take(len(batches.data))
        self._progress("write", len(batches.data))


def _distinct(counts: Counts, sources: Sequence[SourceSegment], work: PassWork, indexed: Indexed) -> int | None:
    """Distinct keys of a group: one a record where all of it was cleaned, unknown where the map ended before it."""
    return counts.records if work.following(sources[-1]) <= indexed.end_offset else None


def discard_output(fs: FileSystem, folder: str, base_offset: int) -> None:
    for kind in SEGMENT_KINDS:
        path = os.path.join(folder, file_name(base_offset, kind, Transient.CLEANED))
        if fs.exists(path):
            fs.unlink(path)


def worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"

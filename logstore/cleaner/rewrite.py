"""Writing one group of segments anew, into a folder of the run; the log itself is not touched.

A single segment in which nothing changes is not written at all. The output is complete and synced when this returns.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from logstore.cleaner.dedupe_map import DedupeMap
from logstore.cleaner.filter import Counts, Filter, FilterSettings, Survivors
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
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name
from logstore.segment.segment import LogSegment


class GroupWriter:
    """Rewrites the groups of one pass, in the order of the log where it has producers, in any order where not."""

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
            self._survivors = Survivors.of(offset_map, work.first_dirty_offset, indexed.end_offset)

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
            expired_before_ms=work.now_ms - options.key_ttl_ms if options.key_ttl_ms else 0,
            merge_bytes=options.merge_bytes,
            codec_id=codec_id,
            survivors=self._survivors,
        )

    def clean(self, sources: tuple[SourceSegment, ...]) -> Cleaned:
        """Raises CorruptBatch, CorruptIndex, OSError; then nothing of the group is left in the folder."""
        began = time.monotonic()
        try:
            cleaned = self._clean(sources)
        except BaseException:
            discard_output(self._fs, self._folder, sources[0].base_offset)
            raise
        return Cleaned(
            sources,
            cleaned.changed,
            cleaned.counts,
            cleaned.size_bytes,
            cleaned.largest_timestamp_ms,
            cleaned.read_bytes,
            cleaned.written_bytes,
            cleaned.keys,
            time.monotonic() - began,
            worker_name(),
            self._folder,
        )

    def _clean(self, sources: tuple[SourceSegment, ...]) -> Cleaned:
        work = self._work
        rules = Filter(self._map.view(), self._settings(sources), self._transactions, limits=work.limits)
        output: LogSegment | None = self._open(sources[0].base_offset) if len(sources) > 1 else None
        read_bytes = 0
        bases = [s.base_offset for s in work.segments]
        try:
            for source in sources:
                following = _following(bases, source.base_offset, work.first_uncleanable_offset)
                self._transactions.add(aborted_between(self._fs, work, source.base_offset, following))
                keep_legacy = self._mtime_ms(source) > self._legacy_horizon_ms
                segment = open_source(self._fs, work, source.base_offset)
                try:
                    for chunk in segment.chunks(
                        0, source.size_bytes, verify_crc=not self._is_checked(source.base_offset, following)
                    ):
                        read_bytes += len(chunk.data)
                        self._throttle.take(len(chunk.data))
                        self._progress("rewrite", len(chunk.data))
                        for part in rules.parts(chunk, keep_legacy_tombstones=keep_legacy):
                            if output is None and part.changed:
                                output = self._open(source.base_offset)
                                self._copy(segment, part.position, output)
                            if output is not None:
                                self._append(output, rules.written(chunk, part))
                finally:
                    segment.close(clean=False)
            counts = rules.counts
            keys = _distinct(counts, sources, bases, work, self._indexed)
            if output is None:
                only = sources[0]
                return Cleaned(sources, False, counts, only.size_bytes, -1, read_bytes, 0, keys)
            for entry in rules.aborted:
                output.txn_index.append(entry)
            output.seal()
            output.flush()
            mtime_ms = self._mtime_ms(sources[-1])
            for kind in (FileKind.LOG, FileKind.INDEX, FileKind.TIME_INDEX):
                if self._fs.exists(output.path(kind)):
                    self._fs.set_mtime(output.path(kind), mtime_ms)
            size = output.size_bytes
            largest = output.largest.timestamp_ms if size else -1
            return Cleaned(sources, True, counts, size, largest, read_bytes, size, keys)
        finally:
            if output is not None:
                output.close(clean=False)

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
        self._throttle.take(len(batches.data))
        self._progress("write", len(batches.data))


def _following(bases: Sequence[int], base_offset: int, end: int) -> int:
    at = bases.index(base_offset)
    return bases[at + 1] if at + 1 < len(bases) else end


def _distinct(
    counts: Counts, sources: Sequence[SourceSegment], bases: Sequence[int], work: PassWork, indexed: Indexed
) -> int | None:
    """Distinct keys of a group: one a record where all of it was cleaned, unknown where the map ended before it."""
    end = _following(bases, sources[-1].base_offset, work.first_uncleanable_offset)
    return counts.records if end <= indexed.end_offset else None


def discard_output(fs: FileSystem, folder: str, base_offset: int) -> None:
    for kind in SEGMENT_KINDS:
        path = os.path.join(folder, file_name(base_offset, kind, Transient.CLEANED))
        if fs.exists(path):
            fs.unlink(path)


def worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"

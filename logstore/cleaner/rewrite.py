"""Rewrites groups of segments into a folder of the run; the log itself is not touched.

A group is filtered in pieces, side by side, and what stays is appended in their order. A single segment in which
nothing changes is not written at all. The outputs are complete and synced when a group is finished.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from logstore.cleaner.filter import Counts, Filter, FilterBuffers, Filtered, FilterSettings
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import Progress, aborted_between, no_progress, open_source
from logstore.cleaner.ordered_work import OrderedWork
from logstore.cleaner.outputs import GroupOutputs, mtime_ms_of
from logstore.cleaner.throttle import UNTHROTTLED, Throttle
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import PIECE_BYTES, Cleaned, Indexed, PassWork
from logstore.files import File, FileSystem
from logstore.records.encoder import EncodedBatches
from logstore.records.marks import ORDER_OFFSET
from logstore.records.memory import Memory
from logstore.records.offset_map import OffsetMap
from logstore.records.survivors import Survivors
from logstore.segment.batches import Chunk, OrderCheck, misplaced, read_batches
from logstore.segment.names import FileKind, file_name
from logstore.segment.txn_index import AbortedTransaction

_AHEAD = 2  # pieces that may be done while one before them is not


class Source:
    """A segment of a group, open while its pieces are read."""

    def __init__(
        self, fs: FileSystem, path: str, segment: SourceSegment, *, keep_legacy_tombstones: bool, verify_crc: bool
    ) -> None:
        self.segment = segment
        self.keep_legacy_tombstones = keep_legacy_tombstones
        self.verify_crc = verify_crc
        self._fs = fs
        self.path = path
        self._file: File | None = None
        self._lock = threading.Lock()

    def file(self) -> File:
        with self._lock:
            if self._file is None:
                self._file = self._fs.open(self.path)
            return self._file

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole batches of a source."""

    source: Source
    position: int
    end_position: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring batches as they are to be written. Without `batches` they are either gone, or, not being changed,
    to be copied if the group is written at all.
    """

    position: int
    end_position: int
    changed: bool
    batches: EncodedBatches | None


@dataclass(frozen=True, slots=True)
class _Filtered:
    """The result of filtering a piece."""

    piece: Piece
    order: OrderCheck
    parts: Sequence[_Part]
    counts: Counts
    aborted: list[AbortedTransaction]
    seconds: float


class OpenGroup:
    """A group being rewritten; `finish` or `discard` it. Its pieces may be rewritten by several threads, begun in
    order."""

    def __init__(
        self,
        segments: tuple[SourceSegment, ...],
        pieces: Sequence[Piece],
        settings: FilterSettings,
        order: OrderedWork[_Filtered],
        outputs: GroupOutputs,
    ) -> None:
        self.segments = segments
        self.pieces = pieces
        self.settings = settings
        self.order = order
        self.counts = Counts()
        self.outputs = outputs
        self.seconds = 0.0
        #: of the last batch that was read
        self.read_offset = -1

    def close(self) -> None:
        """Call it when no piece is being worked on."""
        for piece in self.pieces:
            piece.source.close()
        self.outputs.close()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast groups are rewritten; `threads` may rewrite pieces of one group at once."""

    throttle: Throttle = UNTHROTTLED
    progress: Progress = no_progress
    threads: int = 1


class GroupWriter:
    """Rewrites the groups of one pass, in the order of the log where it has transactions, in any order where not."""

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        fs: FileSystem,
        work: PassWork,
        indexed: Indexed,
        offset_map: OffsetMap,
        folder: str,
        *,
        pace: Pace = Pace(),  # noqa: B008 (frozen)
        indexed_here: bool = False,
        transactions: Transactions | None = None,
    ) -> None:
        """With `indexed_here` this very process has just read all that was indexed, and checked it.
        `transactions` is what is known of them where the first group begins.
        """
        self._ahead = pace.threads + _AHEAD
        self.piece_bytes = min(self.piece_bytes, work.piece_bytes)
        self._chunk_bytes = self.piece_bytes * 3 // 2  # a piece, and room for the batch it ends with
        self._fs = fs
        self._work = work
        self._indexed_here = indexed_here
        self._indexed = indexed
        self._map = offset_map
        self._folder = folder
        self._throttle = pace.throttle
        self._progress = pace.progress
        self._transactions = Transactions() if transactions is None else transactions
        self._idle: list[FilterBuffers] = []
        self._legacy_horizon_ms = self._legacy_horizon()
        self._survivors: Survivors | None = None
        # Records without a key are counted apart, and with versions an older record may win: the bitmap knows neither.
        if work.map_settings.order == ORDER_OFFSET and not indexed.keyless:
            self._survivors = offset_map.survivors(work.first_dirty_offset, indexed.end_offset)

    def _legacy_horizon(self) -> int:
        """Tombstones of formats 0 and 1 have no horizon of their own: the age of the last clean segment decides."""
        clean = [s for s in self._work.segments if s.base_offset < self._work.first_dirty_offset]
        if not clean:
            return 0
        return self._mtime_ms(clean[-1]) - self._work.delete_retention_ms

    def _mtime_ms(self, source: SourceSegment) -> int:
        return mtime_ms_of(self._fs, self._work, source)

    def _settings(self, sources: Sequence[SourceSegment]) -> FilterSettings:
        work, options = self._work, self._work.options
        codec_id = options.recompress_codec_id
        if codec_id is not None and options.recompress_after_ms:
            newest = max(self._mtime_ms(source) for source in sources)
            if newest > work.now_ms - options.recompress_after_ms:
                codec_id = None
        return replace(
            work.filter_settings(self._indexed.end_offset),
            merge_bytes=options.merge_bytes,
            codec_id=codec_id,
            wanted_codec_id=options.recompress_codec_id,
            survivors=self._survivors,
        )

    def clean(self, sources: tuple[SourceSegment, ...]) -> Cleaned:
        """Raises CorruptBatch, CorruptIndex, OSError; then nothing of the group is left in the folder."""
        group = self.begin(sources)
        try:
            for number in range(len(group.pieces)):
                self.rewrite(group, number)
        except BaseException:
            self.discard(group)
            raise
        return self.finish(group)

    def begin(self, segments: tuple[SourceSegment, ...]) -> OpenGroup:
        """`rewrite` each of its pieces then."""
        pieces = [piece for segment in segments for piece in self._pieces(segment)]
        settings = self._settings(segments)
        outputs = GroupOutputs(
            self._fs,
            self._folder,
            self._work,
            segments,
            settings,
            throttle=self._throttle,
            progress=self._progress,
        )
        if len(segments) > 1:
            outputs.begin(segments[0].base_offset)
        return OpenGroup(segments, pieces, settings, OrderedWork(self._ahead), outputs)

    def _pieces(self, segment: SourceSegment) -> list[Piece]:
        cuts: list[int] = []
        if segment.size_bytes > self._chunk_bytes:
            opened = open_source(self._fs, self._work, segment.base_offset)
            try:
                cuts = [cut for cut in opened.cuts(self.piece_bytes) if cut < segment.size_bytes]
            finally:
                opened.close(clean=False)
        source = Source(
            self._fs,
            os.path.join(self._work.directory, file_name(segment.base_offset, FileKind.LOG)),
            segment,
            keep_legacy_tombstones=self._mtime_ms(segment) > self._legacy_horizon_ms,
            verify_crc=not self._is_checked(segment),
        )
        return [Piece(source, begin, end) for begin, end in pairwise([0, *cuts, segment.size_bytes])]

    def rewrite(self, group: OpenGroup, number: int) -> None:
        """Filter a piece, and append what stays, or leave that to the thread that finishes the piece before. Raises as
        `clean`, and CancelledError when another piece has failed.
        """
        try:
            group.order.begin(number)
            began = time.monotonic()
            piece = group.pieces[number]
            order = OrderCheck(piece.source.segment.base_offset, self._work.following(piece.source.segment))
            parts, rules = self._filter(group, number, order)
            done = _Filtered(piece, order, parts, rules.counts, rules.aborted, time.monotonic() - began)
            for each in group.order.hand_in(number, done):
                self._put(group, each)
        except BaseException:
            group.order.fail()
            raise

    def _filter(self, group: OpenGroup, number: int, order: OrderCheck) -> tuple[list[_Part], Filter]:
        piece = group.pieces[number]
        buffers = self._buffers()
        try:
            rules = Filter(buffers, group.settings, self._transactions)
            parts: list[_Part] = []
            size = 0
            for chunk, part in self._judged(piece, order, rules, buffers):
                batches = None
                if part.changed or group.outputs.is_begun:
                    batches = rules.written(chunk, part)
                parts.append(_Part(part.position, part.end_position, part.changed, batches))
                size += 0 if batches is None else len(batches.data)
                if size > self.piece_bytes:  # larger than a piece should be in memory
                    group.order.await_turn(number)
                    self._put_parts(group, piece.source, parts, rules.aborted)
                    rules.aborted = []
                    parts, size = [], 0
        finally:
            self._idle.append(buffers)
        return parts, rules

    def _buffers(self) -> FilterBuffers:
        try:
            return self._idle.pop()
        except IndexError:
            return FilterBuffers(self._map.view(), limits=self._work.limits)

    def _judged(
        self, piece: Piece, order: OrderCheck, rules: Filter, buffers: FilterBuffers
    ) -> Iterator[tuple[Chunk, Filtered]]:
        work, source = self._work, piece.source
        if piece.position == 0:
            base_offset = source.segment.base_offset
            self._transactions.add(aborted_between(self._fs, work, base_offset, work.following(source.segment)))
        begin, end = piece.position, piece.end_position
        for chunk in self._chunks(source, begin, end, verify_crc=source.verify_crc, memory=buffers.memory):
            order.see(chunk)
            self._throttle.take(len(chunk.data))
            self._progress("rewrite", len(chunk.data))
            for part in rules.parts(chunk, keep_legacy_tombstones=source.keep_legacy_tombstones):
                yield chunk, part

    def _chunks(
        self, source: Source, position: int, end: int, *, verify_crc: bool, memory: Memory | None = None
    ) -> Iterator[Chunk]:
        return read_batches(
            source.file(),
            position,
            end,
            limits=self._work.limits,
            chunk_bytes=self._chunk_bytes,
            verify_crc=verify_crc,
            memory=memory,
        )

    def _put(self, group: OpenGroup, done: _Filtered) -> None:
        source, order = done.piece.source, done.order
        if order.first_offset is not None:
            if order.first_offset <= group.read_offset:
                raise misplaced(source.path, done.piece.position, order.first_offset)
            group.read_offset = order.last_offset
        self._put_parts(group, source, done.parts, done.aborted)
        group.counts.add(done.counts)
        group.seconds += done.seconds
        if done.piece.end_position == source.segment.size_bytes:
            source.close()

    def _put_parts(
        self, group: OpenGroup, source: Source, parts: Sequence[_Part], aborted: list[AbortedTransaction]
    ) -> None:
        outputs = group.outputs
        outputs.note_aborted(aborted)
        for part in parts:
            if not outputs.is_begun and part.changed:
                outputs.begin(source.segment.base_offset)
                self._copy(outputs, source, 0, part.position)
            if part.batches is not None:
                outputs.append(part.batches)
            elif outputs.is_begun and not part.changed:
                self._copy(outputs, source, part.position, part.end_position)

    def finish(self, group: OpenGroup) -> Cleaned:
        """Make the outputs durable. Raises OSError; then nothing of the group is left in the folder."""
        began = time.monotonic()
        sources, counts = group.segments, group.counts
        try:
            group.outputs.finish(counts.records)
        except BaseException:
            self.discard(group)
            raise
        group.close()
        other_codec_ms = max(map(self._mtime_ms, sources)) if counts.other_codec else None
        return Cleaned(
            sources,
            tuple(group.outputs.done),
            counts,
            sum(source.size_bytes for source in sources),
            _distinct(counts, sources, self._work, self._indexed),
            other_codec_ms=other_codec_ms,
            seconds=group.seconds + time.monotonic() - began,
            worker=worker_name(),
            folder=self._folder,
        )

    def discard(self, group: OpenGroup) -> None:
        """Call it when no piece is being worked on."""
        group.close()
        group.outputs.discard()

    def _is_checked(self, segment: SourceSegment) -> bool:
        """Whether the whole segment was read, and its checksums compared, for the map."""
        within = segment.base_offset >= self._work.first_dirty_offset
        within = within and self._work.following(segment) <= self._indexed.end_offset
        return self._indexed_here and within

    def _copy(self, outputs: GroupOutputs, source: Source, position: int, end: int) -> None:
        """Copy valid batches that did not change."""
        for chunk in self._chunks(source, position, end, verify_crc=False):
            self._throttle.take(len(chunk.data))
            outputs.append(EncodedBatches(chunk.data, chunk.table))


def _distinct(counts: Counts, sources: Sequence[SourceSegment], work: PassWork, indexed: Indexed) -> int | None:
    """Distinct keys of a group: one a record where all of it was cleaned, unknown where the map ended before it."""
    return counts.records if work.following(sources[-1]) <= indexed.end_offset else None


def worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"

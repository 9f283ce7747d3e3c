"""Writing groups of segments anew, into a folder of the run; the log itself is not touched.

A group is filtered in pieces, side by side, and what stays is appended in their order. A single segment in which
nothing changes is not written at all. What does not fit one segment goes on in the next, as appends do. The outputs
are complete and synced when a group is finished.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from logstore.cleaner.dedupe_map import DedupeMap
from logstore.cleaner.filter import Counts, Filter, Filtered, FilterSettings, Workshop
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.index import Progress, aborted_between, no_progress, open_source
from logstore.cleaner.throttle import UNTHROTTLED, Throttle
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.turns import Turns
from logstore.cleaner.work import Cleaned, Indexed, Output, PassWork
from logstore.errors import OffsetOverflow
from logstore.files import File, FileSystem
from logstore.limits import INT64_MAX, RELATIVE_OFFSET_MAX, SEGMENT_BYTES_MAX
from logstore.records.codes import OK
from logstore.records.encoder import EncodedBatches
from logstore.records.marks import ORDER_OFFSET
from logstore.records.memory import Memory
from logstore.records.survivors import Survivors
from logstore.records.table import BASE_OFFSET, COUNT, LAST_OFFSET, MAGIC, MAX_TIMESTAMP, SIZE, BatchTable
from logstore.segment.batches import Chunk, OrderCheck, misplaced, read_batches
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name
from logstore.segment.segment import LogSegment, RollLimits
from logstore.segment.txn_index import AbortedTransaction

_WRITEBACK_BYTES = 8 << 20  # given to the device at once; with many small requests its queue is full, and one waits
_AHEAD = 2  # pieces that may lie there, done, while one before them is not


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
    """What came of a piece."""

    piece: Piece
    order: OrderCheck
    parts: Sequence[_Part]
    counts: Counts
    aborted: list[AbortedTransaction]
    seconds: float


class OpenGroup:
    """A group on its way; `finish` or `discard` it. Its pieces may be rewritten by several threads, begun in order."""

    def __init__(
        self,
        segments: tuple[SourceSegment, ...],
        pieces: Sequence[Piece],
        settings: FilterSettings,
        turns: Turns[_Filtered],
    ) -> None:
        self.segments = segments
        self.pieces = pieces
        self.settings = settings
        self.turns = turns
        self.counts = Counts()
        #: of markers that stay, from where the output begins on
        self.aborted: list[AbortedTransaction] = []
        self.seconds = 0.0
        #: segments that are full, and durable
        self.outputs: list[Output] = []
        #: what is to be written goes there, not durable yet
        self.output: LogSegment | None = None
        #: so many of it were given to the device
        self.begun_bytes = 0
        #: in the output
        self.records = 0
        #: of the last batch that was read
        self.read_offset = -1
        #: behind the last batch that was written
        self.next_offset = segments[0].base_offset

    def close(self) -> None:
        """No piece of it is in work any more."""
        for piece in self.pieces:
            piece.source.close()
        if self.output is not None:
            self.output.close(clean=False)


class GroupWriter:
    """Rewrites the groups of one pass, in the order of the log where it has transactions, in any order where not."""

    piece_bytes = 4 << 20  # verdicts are quick, so that what is done once a piece counts

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
        threads: int = 1,
        transactions: Transactions | None = None,
    ) -> None:
        """With `indexed_here` this very process has just read all that was indexed, and checked it. `threads` may
        rewrite pieces of one group at once. `transactions` is what is known of them where the first group begins.
        """
        self._ahead = threads + _AHEAD
        self._chunk_bytes = self.piece_bytes * 3 // 2  # a piece, and what it is longer since it ends with a batch
        self._fs = fs
        self._work = work
        self._indexed_here = indexed_here
        self._indexed = indexed
        self._map = offset_map
        self._folder = folder
        self._throttle = throttle
        self._progress = progress
        self._transactions = Transactions() if transactions is None else transactions
        self._idle: list[Workshop] = []
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
        group = OpenGroup(segments, pieces, self._settings(segments), Turns(self._ahead))
        if len(segments) > 1:
            group.output = self._open(segments[0].base_offset)
        return group

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
        """Filter a piece, and append what stays of it, or leave that to who is at the one before. Raises as `clean`,
        and CancelledError when another piece has failed.
        """
        try:
            group.turns.begin(number)
            began = time.monotonic()
            piece = group.pieces[number]
            order = OrderCheck(piece.source.segment.base_offset, self._work.following(piece.source.segment))
            parts, rules = self._filter(group, number, order)
            done = _Filtered(piece, order, parts, rules.counts, rules.aborted, time.monotonic() - began)
            for each in group.turns.hand_in(number, done):
                self._put(group, each)
        except BaseException:
            group.turns.fail()
            raise

    def _filter(self, group: OpenGroup, number: int, order: OrderCheck) -> tuple[list[_Part], Filter]:
        piece = group.pieces[number]
        shop = self._workshop()
        try:
            rules = Filter(shop, group.settings, self._transactions)
            parts: list[_Part] = []
            size = 0
            for chunk, part in self._judged(piece, order, rules, shop):
                batches = None
                if part.changed or group.output is not None:
                    batches = rules.written(chunk, part)
                parts.append(_Part(part.position, part.end_position, part.changed, batches))
                size += 0 if batches is None else len(batches.data)
                if size > self.piece_bytes:  # more than there should be in memory
                    group.turns.await_turn(number)
                    self._put_parts(group, piece.source, parts, rules.aborted)
                    rules.aborted = []
                    parts, size = [], 0
        finally:
            self._idle.append(shop)
        return parts, rules

    def _workshop(self) -> Workshop:
        try:
            return self._idle.pop()
        except IndexError:
            return Workshop(self._map.view(), limits=self._work.limits)

    def _judged(
        self, piece: Piece, order: OrderCheck, rules: Filter, shop: Workshop
    ) -> Iterator[tuple[Chunk, Filtered]]:
        work, source = self._work, piece.source
        if piece.position == 0:
            base_offset = source.segment.base_offset
            self._transactions.add(aborted_between(self._fs, work, base_offset, work.following(source.segment)))
        begin, end = piece.position, piece.end_position
        for chunk in self._chunks(source, begin, end, verify_crc=source.verify_crc, memory=shop.memory):
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
        group.aborted += aborted  # first: they go with the output that has their marker
        for part in parts:
            if group.output is None and part.changed:
                group.output = self._open(source.segment.base_offset)
                self._copy(group, source, 0, part.position)
            if group.output is not None:
                if part.changed or part.batches is not None:
                    self._append(group, part.batches)
                else:
                    self._copy(group, source, part.position, part.end_position)

    def finish(self, group: OpenGroup) -> Cleaned:
        """Make the outputs durable. Raises OSError; then nothing of the group is left in the folder."""
        began = time.monotonic()
        sources, counts = group.segments, group.counts
        if group.output is not None:
            try:
                group.records = counts.records - sum(output.records for output in group.outputs)
                self._seal(group.output, group, INT64_MAX)
            except BaseException:
                self.discard(group)
                raise
        group.close()
        other_codec_ms = max(map(self._mtime_ms, sources)) if counts.other_codec else None
        return Cleaned(
            sources,
            tuple(group.outputs),
            counts,
            sum(source.size_bytes for source in sources),
            _distinct(counts, sources, self._work, self._indexed),
            other_codec_ms=other_codec_ms,
            seconds=group.seconds + time.monotonic() - began,
            worker=worker_name(),
            folder=self._folder,
        )

    def discard(self, group: OpenGroup) -> None:
        """No piece of it is in work any more."""
        group.close()
        written = {group.segments[0].base_offset, *(output.base_offset for output in group.outputs)}
        if group.output is not None:
            written.add(group.output.base_offset)
        for base_offset in written:
            discard_output(self._fs, self._folder, base_offset)

    def _seal(self, segment: LogSegment, group: OpenGroup, end_offset: int) -> None:
        """Make an output durable that ends below `end_offset`."""
        for entry in group.aborted:
            if entry.last_offset < end_offset:
                segment.txn_index.append(entry)
        group.aborted = [entry for entry in group.aborted if entry.last_offset >= end_offset]
        segment.seal()
        segment.flush()
        mtime_ms = self._mtime_ms(group.segments[-1])
        for kind in (FileKind.LOG, FileKind.INDEX, FileKind.TIME_INDEX):
            if self._fs.exists(segment.path(kind)):
                self._fs.set_mtime(segment.path(kind), mtime_ms)
        largest_ms = segment.largest.timestamp_ms if segment.size_bytes else -1
        group.outputs.append(Output(segment.base_offset, segment.size_bytes, largest_ms, group.records))
        group.records = group.begun_bytes = 0

    def _is_checked(self, segment: SourceSegment) -> bool:
        """Whether the whole segment was read, and its checksums compared, for the map."""
        within = segment.base_offset >= self._work.first_dirty_offset
        within = within and self._work.following(segment) <= self._indexed.end_offset
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

    def _copy(self, group: OpenGroup, source: Source, position: int, end: int) -> None:
        """What was found unchanged, and sound, as it is."""
        for chunk in self._chunks(source, position, end, verify_crc=False):
            self._throttle.take(len(chunk.data))
            self._append(group, EncodedBatches(chunk.data, chunk.table))

    def _append(self, group: OpenGroup, batches: EncodedBatches | None) -> None:
        if batches is None:
            return
        at = 0
        while at < len(batches.table):
            placed, fits = self._fill(group, batches, at)
            at += placed
            if not fits:
                self._roll(group, batches.table[at : at + 1])
        self._throttle.take(len(batches.data))
        self._progress("write", len(batches.data))

    def _fill(self, group: OpenGroup, batches: EncodedBatches, first: int) -> tuple[int, bool]:
        """Append some batches from `first` on; returns how many, and whether there is room for the next one."""
        output = group.output
        assert output is not None
        room = output.index_room()
        # Kafka's cleaner minds a full index only where a batch needs an entry in it.
        if not room and output.lacks_entry(int(batches.table[first, MAX_TIMESTAMP])):
            return 0, False
        table = batches.table[: first + max(room, 1)]
        bytes_max = output_bytes_max(group.settings, self._work.segment_bytes)
        if not output.size_bytes and int(table[first, SIZE]) > bytes_max:  # it has a segment for itself
            table, bytes_max = table[: first + 1], SEGMENT_BYTES_MAX
        placed, reason = output.place(
            batches.data,
            table,
            first,
            next_offset=0,
            assign=False,
            roll_limits=RollLimits(bytes_max, INT64_MAX),
            indexes_may_fill=True,
        )
        if placed:
            group.records += int(table[first : first + placed, COUNT].clip(0).sum())
            group.next_offset = int(table[first + placed - 1, LAST_OFFSET]) + 1
        if output.size_bytes - group.begun_bytes >= _WRITEBACK_BYTES:
            output.log.start_writeback(group.begun_bytes, output.size_bytes - group.begun_bytes)
            group.begun_bytes = output.size_bytes
        return placed, reason == OK

    def _roll(self, group: OpenGroup, following: BatchTable) -> None:
        """Go on in a new output, for this batch."""
        full = group.output
        assert full is not None
        base_offset = first_base(following, group.next_offset)
        if base_offset <= full.base_offset:
            raise OffsetOverflow(
                f"the batch that ends at {int(following[0, LAST_OFFSET])} does not fit the segment at"
                f" {full.base_offset}, nor one of its own",
                file=full.log.path,
                partition=self._work.partition,
            )
        self._seal(full, group, base_offset)
        group.output = None
        full.close(clean=False)
        group.output = self._open(base_offset)


def output_bytes_max(settings: FilterSettings, segment_bytes: int) -> int:
    """How large an output may become. By Kafka's rules a group only shrinks, or grows by a few bytes where horizons
    are stamped, and stays one segment; what is compressed anew or joined may grow many times over.
    """
    rewritten = settings.codec_id is not None or settings.merge_bytes > 0
    return min(segment_bytes, SEGMENT_BYTES_MAX) if rewritten else SEGMENT_BYTES_MAX


def first_base(batch: BatchTable, next_offset: int) -> int:
    """The base of a segment that begins with this batch. One of the old formats does not say where it begins."""
    if int(batch[0, MAGIC]) == 2:
        return int(batch[0, BASE_OFFSET])
    return max(next_offset, int(batch[0, LAST_OFFSET]) - RELATIVE_OFFSET_MAX)


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

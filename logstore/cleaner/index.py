"""Building the offset map of a pass: the keys of all dirty records, read in order.

Ranges of segments can be indexed side by side, into one map by threads, into maps that are merged by tasks elsewhere.
When the keys do not fit, the pass ends where reading them one after the other would have ended, and everything after
is left for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise

import numpy as np

from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.shared_map import Filler, SharedMap
from logstore.cleaner.throttle import UNTHROTTLED, Throttle
from logstore.cleaner.transactions import Transactions
from logstore.cleaner.work import Indexed, PassWork
from logstore.files import FileSystem
from logstore.records.decoder import Decoder
from logstore.records.marks import ORDER_OFFSET
from logstore.records.offset_map import MapSettings, OffsetMap
from logstore.records.table import (
    LAST_OFFSET,
    SKIP,
    BatchTable,
)
from logstore.segment.batches import Chunk, OrderCheck
from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings
from logstore.segment.txn_index import AbortedTransaction

_PARTIAL_BYTES = 64 << 20
_CHUNK_BYTES = 2 << 20  # stays near the cache beside what the map needs of it


@dataclass(frozen=True, slots=True)
class DirtyRange:
    """Neighbouring dirty segments, of which the first and the last may belong to the next range as well.

    Both offsets follow a batch, or are where the pass begins and ends, or where a map was full.
    """

    segments: tuple[SourceSegment, ...]
    start_offset: int
    end_offset: int
    #: whether no batch reaches across its start
    begins_a_batch: bool = False

    @classmethod
    def of(cls, work: PassWork, start_offset: int, end_offset: int | None = None) -> DirtyRange:
        end_offset = work.end_offset if end_offset is None else end_offset
        segments = tuple(s for s in work.dirty if work.following(s) > start_offset and s.base_offset < end_offset)
        return cls(segments, start_offset, end_offset)

    @property
    def offsets(self) -> int:
        """Records it may hold."""
        return self.end_offset - max(self.start_offset, self.segments[0].base_offset) if self.segments else 0


Progress = Callable[[str, int], None]
"""Called with the step and the bytes done since the last call; may raise to end the pass."""


def no_progress(step: str, size_bytes: int) -> None:
    pass


def open_source(fs: FileSystem, work: PassWork, base_offset: int) -> LogSegment:
    """A segment of the log, read-only."""
    settings = SegmentSettings(work.index_interval_bytes, work.segment_index_bytes)
    return LogSegment(fs, work.directory, base_offset, settings=settings, limits=work.limits)


def aborted_between(fs: FileSystem, work: PassWork, start: int, end: int) -> list[AbortedTransaction]:
    """Aborted transactions that overlap [start, end), from the indexes of the segments from `start` on."""
    found: list[AbortedTransaction] = []
    if not work.has_transactions:
        return found
    at = max(int(np.searchsorted(np.array(work.bases), start, side="right")) - 1, 0)
    for base in work.bases[at:]:
        segment = open_source(fs, work, base)
        try:
            entries, complete = segment.txn_index.collect_aborted(start, end)
        finally:
            segment.close(clean=False)
        found += entries
        if complete:
            break
    return found


def build_map(
    fs: FileSystem,
    work: PassWork,
    *,
    pool: Executor | None = None,
    threads: int = 1,
    throttle: Throttle = UNTHROTTLED,
    progress: Progress = no_progress,
) -> tuple[OffsetMap, Indexed]:
    """The map of all keys from the first dirty offset on, as far as it reaches. Raises CorruptBatch, CorruptIndex."""
    began = time.monotonic()
    ranges = split_dirty(fs, work, threads if pool is not None else 1)
    read_bytes = 0

    def index(target: OffsetMap | Filler, part: DirtyRange) -> Indexed:
        return index_range(fs, work, target, part, throttle=throttle, progress=progress)

    def new_map() -> OffsetMap:
        return OffsetMap(work.map_settings, records=sum(part.offsets for part in ranges))

    if len(ranges) == 1 or pool is None:
        offset_map = new_map()
        found = index(offset_map, ranges[0])
    else:
        shared = SharedMap(new_map()) if work.map_settings.order == ORDER_OFFSET else None
        parts = [] if shared is None else list(pool.map(index, [Filler(shared) for _ in ranges], ranges))
        if shared is not None and shared.close():
            offset_map = shared.map
            found = reduce(partial(_added, offset_map), parts)
        else:
            if shared is not None:
                shared.map.release()
                read_bytes = sum(part.read_bytes for part in parts)
            offset_map = new_map()
            share = partial_keys(work.map_settings, len(ranges) - 1)
            others = [OffsetMap(work.map_settings, keys_max=share, records=part.offsets) for part in ranges[1:]]
            maps = [offset_map, *others]
            parts = list(pool.map(index, maps, ranges))
            found = merge_ranges(fs, work, maps, parts, throttle=throttle, progress=progress)
    if work.map_settings.order != ORDER_OFFSET:
        read_bytes += index_older_versions(fs, work, offset_map, throttle=throttle, progress=progress)
    return offset_map, replace(found, read_bytes=found.read_bytes + read_bytes, seconds=time.monotonic() - began)


def partial_keys(settings: MapSettings, maps: int) -> int:
    """How many keys the maps beside the first may hold: until they are merged they are memory beyond the budget."""
    keys = int(_PARTIAL_BYTES // settings.entry_bytes * settings.load_factor)
    return max(min(keys, settings.keys_max // 2) // maps, 1)


def merge_ranges(
    fs: FileSystem,
    work: PassWork,
    maps: Sequence[OffsetMap],
    parts: Sequence[Indexed],
    *,
    throttle: Throttle = UNTHROTTLED,
    progress: Progress = no_progress,
) -> Indexed:
    """All ranges' keys into the first map. From where one ended early, or may not fit, the log is read in order."""
    done = parts[0]
    for number in range(1, len(parts)):
        if done.is_full:
            break
        fits = maps[0].merge(maps[number])
        if fits:
            done = _added(maps[0], done, parts[number])
        if not fits or parts[number].is_full:
            for other in maps[number:]:
                other.release()
            rest = DirtyRange.of(work, done.end_offset)
            again = index_range(fs, work, maps[0], rest, throttle=throttle, progress=progress)
            return _added(maps[0], done, again)
    return done


def _added(offset_map: OffsetMap, before: Indexed, after: Indexed) -> Indexed:
    return Indexed(
        after.end_offset,
        offset_map.used,
        after.is_full,
        before.records + after.records,
        before.keyless + after.keyless,
        before.read_bytes + after.read_bytes,
    )


def index_range(
    fs: FileSystem,
    work: PassWork,
    offset_map: OffsetMap | Filler,
    part: DirtyRange,
    *,
    throttle: Throttle = UNTHROTTLED,
    progress: Progress = no_progress,
) -> Indexed:
    """Put the keys of a range into the map; ends early when it is full."""
    records = keyless = read_bytes = 0
    start, segments = part.start_offset, part.segments
    decoder = Decoder(limits=work.limits, headers=False)
    transactions = Transactions()
    latest = start - 1
    if segments:
        latest = max(latest, segments[0].base_offset - 1)  # what lies before them is indexed already
        transactions.add(aborted_between(fs, work, max(start, segments[0].base_offset), work.first_uncleanable_offset))
    for source in segments:
        following = min(work.following(source), part.end_offset)
        segment = open_source(fs, work, source.base_offset)
        order = OrderCheck(source.base_offset, work.following(source), after=start - 1 if part.begins_a_batch else -1)
        try:
            position = _position(segment, source, start)
            end = source.size_bytes if following == work.following(source) else _position(segment, source, following)
            for chunk in segment.chunks(position, end, chunk_bytes=min(_CHUNK_BYTES, work.piece_bytes)):
                order.see(chunk)
                size = len(chunk.data)
                throttle.take(size)
                progress("index", size)
                read_bytes += size
                table = chunk.table
                table[:, SKIP] = 0
                if work.has_transactions:
                    _skip_aborted(chunk, table, transactions, decoder)
                for first_row, last_row in decoder.opened(
                    chunk.data, table, file=chunk.file, base_position=chunk.position
                ):
                    put = offset_map.put(
                        table,
                        first_row,
                        last_row,
                        min_offset=start,
                        file=chunk.file,
                        base_position=chunk.position,
                    )
                    records += put.records
                    keyless += put.keyless
                    if put.stopped_at is not None:
                        # whole batches before the one that did not fit count, and what of it did fit
                        before = table[table[:, LAST_OFFSET] < put.stopped_at, LAST_OFFSET]
                        if len(before) and int(before[-1]) >= start:
                            latest = max(latest, int(before[-1]))
                        latest = max(latest, put.last_offset)
                        return Indexed(latest + 1, offset_map.used, True, records, keyless, read_bytes)
                last = int(table[-1, LAST_OFFSET])
                if last >= start:
                    latest = last
        finally:
            segment.close(clean=False)
        latest = following - 1
    end_offset = max(latest + 1, start)
    return Indexed(end_offset, offset_map.used, False, records, keyless, read_bytes)


def index_older_versions(
    fs: FileSystem,
    work: PassWork,
    offset_map: OffsetMap,
    *,
    throttle: Throttle = UNTHROTTLED,
    progress: Progress = no_progress,
) -> int:
    """Where another order than that of offsets decides, an older record may win: let those compete, too."""
    read_bytes = 0
    decoder = Decoder(limits=work.limits, headers=False)
    transactions = Transactions()
    for source in work.segments:
        if source.base_offset >= work.first_dirty_offset:
            break
        segment = open_source(fs, work, source.base_offset)
        order = OrderCheck(source.base_offset, work.following(source))
        try:
            for chunk in segment.chunks(0, source.size_bytes, chunk_bytes=min(_CHUNK_BYTES, work.piece_bytes)):
                order.see(chunk)
                read_bytes += len(chunk.data)
                throttle.take(len(chunk.data))
                progress("index", len(chunk.data))
                table = chunk.table
                table[:, SKIP] = table[:, LAST_OFFSET] >= work.first_dirty_offset
                if work.has_transactions:
                    _skip_aborted(chunk, table, transactions, decoder)
                for first, last in decoder.opened(chunk.data, table, file=chunk.file, base_position=chunk.position):
                    offset_map.put(
                        table,
                        first,
                        last,
                        min_offset=0,
                        only_known=True,
                        file=chunk.file,
                        base_position=chunk.position,
                    )
        finally:
            segment.close(clean=False)
    return read_bytes


def _skip_aborted(chunk: Chunk, table: BatchTable, transactions: Transactions, decoder: Decoder) -> None:
    """Mark data of aborted transactions; control batches, which tell when one ends, are skipped in any case."""
    may_go, _ = transactions.read(chunk, table, decoder)
    table[may_go, SKIP] = 1


def _position(segment: LogSegment, source: SourceSegment, offset: int) -> int:
    """Where the batch begins that holds the offset or comes next."""
    if offset <= source.base_offset:
        return 0
    found = segment.find_batch(offset)
    return source.size_bytes if found is None else found.position


def split_dirty(fs: FileSystem, work: PassWork, parts: int) -> list[DirtyRange]:
    """The dirty part as at most `parts` ranges of about the same size. Transactions are read in order, as one."""
    if parts == 1 or work.has_transactions:
        return [DirtyRange.of(work, work.first_dirty_offset)]
    total = sum(source.size_bytes for source in work.dirty)
    cuts = {_cut(fs, work, total * number // parts) for number in range(1, parts)}
    starts = sorted({work.first_dirty_offset} | {cut for cut in cuts if cut > work.first_dirty_offset})
    ranges = [DirtyRange.of(work, start, end) for start, end in pairwise([*starts, work.end_offset])]
    return [ranges[0], *(replace(part, begins_a_batch=True) for part in ranges[1:])]


def _cut(fs: FileSystem, work: PassWork, before_bytes: int) -> int:
    """The offset after a batch that ends after about so many bytes of dirty segments."""
    for source in work.dirty:
        if before_bytes < source.size_bytes:
            break
        before_bytes -= source.size_bytes
    else:
        return work.first_dirty_offset
    offsets = work.following(source) - source.base_offset
    segment = open_source(fs, work, source.base_offset)
    try:
        found = segment.find_batch(source.base_offset + offsets * before_bytes // source.size_bytes)
    finally:
        segment.close(clean=False)
    return work.following(source) if found is None else found.next_offset

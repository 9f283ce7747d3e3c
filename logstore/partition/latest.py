"""The latest record of each key in a range of a partition's log, in bounded memory and two passes over the files.

The first pass fills a map of key to last offset, the second delivers the records the map names. All files are opened,
and the segment list is seen to be the same before and after, so compaction in the meantime changes nothing: a deleted
key cannot come back. When the keys do not fit the memory given, they are taken in buckets by hash, two passes each.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from logstore.directory.state import PartitionState
from logstore.errors import DamagedLog
from logstore.limits import INT64_MAX, Limits
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import LogView, read_chunks
from logstore.records.columns import DecodedColumns
from logstore.records.decoder import Decoder
from logstore.records.offset_map import MapSettings, OffsetMap, new_secret
from logstore.records.survivors import Survivors
from logstore.records.table import LAST_OFFSET
from logstore.segment.batches import Chunk
from logstore.segment.segment import LogSegment

DEFAULT_MEMORY_BYTES = 512 << 20
_MEMORY_BYTES_MIN = 24 << 16
_LOAD_FACTOR = 0.75
_NO_KEYS = MapSettings(buffer_bytes=48)
_LOOKS_MAX = 50
_LOOK_AGAIN_S = 0.02
_FILES_PER_SEGMENT = 3
_FILES_BESIDE = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records, and with how much memory: deleted keys only with `tombstones`."""

    tombstones: bool = False
    committed: bool = False
    headers: bool = False
    memory_bytes: int = DEFAULT_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class _Span:
    """The offsets [low, high) of a view whose files are open."""

    view: LogView
    low: int
    high: int
    committed: bool
    limits: Limits
    progress: Callable[[int], None]

    def chunks(self, *, verify_crc: bool = True) -> Iterator[Chunk]:
        at = self.low
        for chunk in read_chunks(
            self.view, self.low, self.high, limits=self.limits, committed=self.committed, verify_crc=verify_crc
        ):
            reached = min(int(chunk.table[-1, LAST_OFFSET]) + 1, self.high)
            yield chunk
            self.progress(max(reached - at, 0))
            at = max(reached, at)
        self.progress(self.high - at)


def latest_records(
    reader: PartitionReader,
    start: int | None = None,
    end: int | None = None,
    *,
    wanted: Wanted = Wanted(),  # noqa: B008 (frozen)
    limits: Limits,
    held: Callable[[PartitionState, LogView], None] = lambda state, view: None,
    winners: Callable[[LogView, int, int], Survivors] | None = None,
    progress: Callable[[int], None] = lambda offsets: None,
) -> Iterator[DecodedColumns]:
    """The last record of each key among offsets [start, end), in offset order.

    Where another than the last counts, `winners` tells the offsets of those that do.

    Where the keys are taken in buckets, the order holds within each. `held` is called with the state and view that are
    read, once nothing can change them any more, and may raise. `progress` is called with the offsets each pass has gone
    through. Raises OffsetOutOfRange, DamagedLog.
    """
    secret = new_secret()
    view, low, high = _pinned(reader, start, end, wanted.committed, held)
    if low >= high:
        return
    span = _Span(view, low, high, wanted.committed, limits, progress)
    if winners is not None:
        yield from _deliver(span, OffsetMap(_NO_KEYS), winners(view, low, high), wanted)
        return
    buckets = [(0, 1)]
    while buckets:
        bucket, of = buckets.pop()
        filled = _fill(span, secret, bucket, of, wanted.memory_bytes)
        if filled is None:  # the halves of a bucket are buckets of twice as many
            buckets += [(2 * bucket + 1, 2 * of), (2 * bucket, 2 * of)]
            continue
        if filled.used:
            yield from _deliver(span, filled, filled.survivors(low, high), wanted)


def _pinned(
    reader: PartitionReader,
    start: int | None,
    end: int | None,
    committed: bool,
    held: Callable[[PartitionState, LogView], None],
) -> tuple[LogView, int, int]:
    """A view whose files are open already, all of one generation of the segment list, and the offsets to read of it."""
    damage: DamagedLog | None = None
    for look in range(_LOOKS_MAX):
        if look:
            time.sleep(_LOOK_AGAIN_S)
        seen = reader.frozen()
        before = seen.state()
        view = seen.view(committed=committed)
        low = view.log_start_offset if start is None else max(start, view.log_start_offset)
        high = view.end_offset if end is None else min(end, view.end_offset)
        # Transactions that were aborted may be noted in any later segment.
        needed = [base for base in view.bases[view.segment_at(low) :] if committed or base < high]
        _allow_files(_FILES_PER_SEGMENT * len(needed))
        try:
            segments: dict[int, LogSegment] = {base: view.open_segment(base) for base in needed}
        except FileNotFoundError as error:  # replaced since we saw the list
            reader.gone(error)
            continue
        except DamagedLog as error:  # the same, or really damaged
            damage = error
            continue
        after = seen.state()
        if (before.generation, before.dropped_tombstones) == (after.generation, after.dropped_tombstones):
            pinned = LogView(
                view.partition,
                view.bases,
                segments.__getitem__,
                view.log_start_offset,
                view.end_offset,
                view.log_end_offset,
            )
            held(after, pinned)
            return pinned, low, high
    raise damage or DamagedLog(
        "the segment list names missing files, or keeps changing",
        partition=reader.partition,
        hint="Run `duramen recover`",
    )


def _allow_files(count: int) -> None:
    """Let the process hold that many more files open, as far as the system allows: the usual 1,024 are few segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _FILES_BESIDE
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _fill(span: _Span, secret: tuple[int, int], bucket: int, buckets: int, memory_bytes: int) -> OffsetMap | None:
    """A map of the bucket's keys; None when they do not fit the memory."""
    settings = MapSettings(max(memory_bytes, _MEMORY_BYTES_MIN), _LOAD_FACTOR, secret=secret)
    records = (span.high - span.low) // buckets
    # Sparse from the start: few keys are then found at once.
    offset_map = OffsetMap(settings, records=records, slots_min=records // 6, bucket=bucket, buckets=buckets)
    decoder = Decoder(limits=span.limits, headers=False)
    for chunk in span.chunks():
        for first, last in decoder.opened(chunk.data, chunk.table, file=chunk.file, base_position=chunk.position):
            put = offset_map.put(chunk.table, first, last, min_offset=span.low, max_offset=span.high, file=chunk.file)
            if put.stopped_at is not None:
                return None
    return offset_map


def _deliver(
    span: _Span, offset_map: OffsetMap, survivors: Survivors | None, wanted: Wanted
) -> Iterator[DecodedColumns]:
    """The records that `survivors` name, or the map where there are none."""
    decoder = Decoder(limits=span.limits, headers=wanted.headers)
    for chunk in span.chunks(verify_crc=False):
        if survivors is not None:
            survivors.skip_superseded(chunk.table)
        for first, last in decoder.opened(chunk.data, chunk.table, file=chunk.file, base_position=chunk.position):
            keep, kept = offset_map.keep(
                chunk.table,
                first,
                last,
                min_offset=span.low,
                max_offset=span.high,
                tombstones=wanted.tombstones,
                survivors=survivors,
                file=chunk.file,
            )
            if kept:
                yield decoder.decode(chunk.table, first, last, 0, INT64_MAX, chunk.file, chunk.position, keep=keep)

"""The latest record of each key in a range of a partition's log, in bounded memory and two passes over the files.

The first pass fills a map of key to last offset, the second delivers the records the map names. All files are opened,
and the segment list is seen to be the same before and after, so compaction in the meantime changes nothing: a deleted
key cannot come back. When the keys do not fit the memory given, they are taken in buckets by hash, two passes each.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator

from logstore.directory.state import PartitionState
from logstore.errors import DamagedLog
from logstore.limits import INT64_MAX, Limits
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import LogView, read_chunks
from logstore.records.columns import DecodedColumns
from logstore.records.decoder import Decoder
from logstore.records.offset_map import SLOT_BYTES, OffsetMap, new_secret
from logstore.records.survivors import Survivors
from logstore.segment.segment import LogSegment

DEFAULT_MEMORY_BYTES = 512 << 20
_SLOTS_MIN = 1 << 16
_NO_KEYS = 2
_LOAD_FACTOR = 0.75
_LOOKS_MAX = 50
_LOOK_AGAIN_S = 0.02
_FILES_PER_SEGMENT = 3
_FILES_BESIDE = 256


def latest_records(
    reader: PartitionReader,
    start: int | None = None,
    end: int | None = None,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    tombstones: bool = False,
    committed: bool = False,
    headers: bool = False,
    limits: Limits,
    held: Callable[[PartitionState, LogView], None] = lambda state, view: None,
    winners: Callable[[LogView, int, int], Survivors] | None = None,
) -> Iterator[DecodedColumns]:
    """The last record of each key among offsets [start, end), in offset order; deleted keys only with `tombstones`.

    Where another than the last counts, `winners` tells the offsets of those that do.

    Where the keys are taken in buckets, the order holds within each. `held` is told the state and view that are read,
    once nothing can change them any more, and may raise.
    Raises OffsetOutOfRange, DamagedLog.
    """
    secret = new_secret()
    view, low, high = _pinned(reader, start, end, committed, held)
    if low >= high:
        return
    if winners is not None:
        chosen = winners(view, low, high)
        yield from _deliver(view, low, high, OffsetMap(_NO_KEYS), chosen, tombstones, committed, headers, limits)
        return
    buckets = [(0, 1)]
    while buckets:
        bucket, of = buckets.pop()
        filled = _fill(view, low, high, secret, bucket, of, memory_bytes, committed, limits)
        if filled is None:  # the halves of a bucket are buckets of twice as many
            buckets += [(2 * bucket + 1, 2 * of), (2 * bucket, 2 * of)]
            continue
        if filled.used:
            last = filled.survivors(low, high)
            yield from _deliver(view, low, high, filled, last, tombstones, committed, headers, limits)


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
        before = reader.state()
        view = reader.view(committed=committed)
        low = view.log_start_offset if start is None else max(start, view.log_start_offset)
        high = view.end_offset if end is None else min(end, view.end_offset)
        # Transactions that were aborted may be noted in any later segment.
        needed = [base for base in view.bases[view.segment_at(low) :] if committed or base < high]
        _allow_files(_FILES_PER_SEGMENT * len(needed))
        try:
            segments: dict[int, LogSegment] = {base: view.open_segment(base) for base in needed}
        except (FileNotFoundError, DamagedLog) as error:  # replaced since we saw the list, or really damaged
            damage = error if isinstance(error, DamagedLog) else None
            continue
        after = reader.state()
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
        "the segment list names files that are not there, or changes all the time",
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


def _fill(
    view: LogView,
    low: int,
    high: int,
    secret: tuple[int, int],
    bucket: int,
    buckets: int,
    memory_bytes: int,
    committed: bool,
    limits: Limits,
) -> OffsetMap | None:
    """A map of the bucket's keys; None when they do not fit the memory."""
    slots_max = max(memory_bytes // SLOT_BYTES, _SLOTS_MIN)
    wanted = int((high - low) / _LOAD_FACTOR / 8) + _SLOTS_MIN
    offset_map = OffsetMap(
        min(wanted, slots_max), load_factor=_LOAD_FACTOR, secret=secret, bucket=bucket, buckets=buckets
    )
    decoder = Decoder(limits=limits, headers=False)
    for chunk in read_chunks(view, low, high, limits=limits, committed=committed):
        for first, last in decoder.opened(chunk.data, chunk.table, file=chunk.file, base_position=chunk.position):
            begin = low
            while True:
                stopped = offset_map.put(chunk.table, first, last, min_offset=begin, max_offset=high, file=chunk.file)
                if stopped is None:
                    break
                if offset_map.slots >= slots_max:
                    return None
                # Growing needs the old and the new map at once; what was put before `stopped` is in already.
                offset_map = offset_map.grown(min(offset_map.slots * 2, slots_max))
                begin = stopped
    return offset_map


def _deliver(
    view: LogView,
    low: int,
    high: int,
    offset_map: OffsetMap,
    survivors: Survivors | None,
    tombstones: bool,
    committed: bool,
    headers: bool,
    limits: Limits,
) -> Iterator[DecodedColumns]:
    """The records that `survivors` name, or the map where there are none."""
    decoder = Decoder(limits=limits, headers=headers)
    for chunk in read_chunks(view, low, high, limits=limits, committed=committed, verify_crc=False):
        if survivors is not None:
            survivors.skip_superseded(chunk.table)
        for first, last in decoder.opened(chunk.data, chunk.table, file=chunk.file, base_position=chunk.position):
            keep, kept = offset_map.keep(
                chunk.table,
                first,
                last,
                min_offset=low,
                max_offset=high,
                tombstones=tombstones,
                survivors=survivors,
                file=chunk.file,
            )
            if kept:
                yield decoder.decode(chunk.table, first, last, 0, INT64_MAX, chunk.file, chunk.position, keep=keep)

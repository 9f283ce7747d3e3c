"""The latest record of each key in a range of a partition's log, in bounded memory and two passes over the files.

The first pass fills a map of key to last offset, the second delivers the records the map names. The files are held
open from the first look on, so compaction in the meantime changes nothing. When the keys do not fit the memory given,
they are taken in buckets by hash, with two passes each.
"""

from __future__ import annotations

from collections.abc import Iterator

from logstore.errors import DamagedLog
from logstore.limits import INT64_MAX, Limits
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import LogView, read_chunks
from logstore.records.columns import DecodedColumns
from logstore.records.decoder import Decoder
from logstore.records.offset_map import SLOT_BYTES, OffsetMap, new_secret
from logstore.segment.segment import LogSegment

DEFAULT_MEMORY_BYTES = 512 << 20
_SLOTS_MIN = 1 << 16
_LOAD_FACTOR = 0.75
_LOOKS_MAX = 20


class _Pinned:
    """A view whose files stay open until it is dropped."""

    def __init__(self, reader: PartitionReader, *, committed: bool) -> None:
        view = reader.view(committed=committed)
        self._open = view.open_segment
        self._segments: dict[int, LogSegment] = {}
        self.view = LogView(
            view.partition, view.bases, self._segment, view.log_start_offset, view.end_offset, view.log_end_offset
        )

    def _segment(self, base_offset: int) -> LogSegment:
        segment = self._segments.get(base_offset)
        if segment is None:
            segment = self._segments[base_offset] = self._open(base_offset)
        return segment


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
) -> Iterator[DecodedColumns]:
    """The last record of each key among offsets [start, end), in offset order; deleted keys only with `tombstones`.

    Raises OffsetOutOfRange, DamagedLog.
    """
    secret = new_secret()
    for _ in range(_LOOKS_MAX):
        pinned = _Pinned(reader, committed=committed)
        view = pinned.view
        low = view.log_start_offset if start is None else max(start, view.log_start_offset)
        high = view.end_offset if end is None else min(end, view.end_offset)
        try:
            buckets, filled = _filled(view, low, high, secret, memory_bytes, committed, limits)
        except FileNotFoundError:
            continue  # replaced before we held it: look at the list again
        break
    else:
        raise DamagedLog("the segment list names a file that is not there", partition=reader.partition)
    for bucket in range(buckets):
        if bucket or filled is None:
            filled = _fill(view, low, high, secret, bucket, buckets, memory_bytes, committed, limits)
        assert filled is not None, "a bucket holds fewer keys than all of them together"
        yield from _deliver(view, low, high, filled, tombstones, committed, headers, limits)
        filled = None


def _filled(
    view: LogView, low: int, high: int, secret: tuple[int, int], memory_bytes: int, committed: bool, limits: Limits
) -> tuple[int, OffsetMap | None]:
    """How many buckets the keys need, and the map of the first; found by trying."""
    buckets = 1
    while True:
        filled = _fill(view, low, high, secret, 0, buckets, memory_bytes, committed, limits)
        if filled is not None:
            return buckets, filled
        buckets *= 2


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
                stopped = offset_map.put(
                    chunk.table, first, last, min_offset=begin, max_offset=high, file=chunk.file
                )
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
    tombstones: bool,
    committed: bool,
    headers: bool,
    limits: Limits,
) -> Iterator[DecodedColumns]:
    if not offset_map.used:
        return
    decoder = Decoder(limits=limits, headers=headers)
    for chunk in read_chunks(view, low, high, limits=limits, committed=committed, verify_crc=False):
        for first, last in decoder.opened(chunk.data, chunk.table, file=chunk.file, base_position=chunk.position):
            keep, kept = offset_map.keep(
                chunk.table, first, last, min_offset=low, max_offset=high, tombstones=tombstones, file=chunk.file
            )
            if kept:
                yield decoder.decode(
                    chunk.table, first, last, 0, INT64_MAX, chunk.file, chunk.position, keep=keep
                )

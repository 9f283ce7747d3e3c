"""A segment as one object: Kafka's `.log` bytes, then the offset, time and transaction index as a footer.

The object has no frame of its own. The manifest names it with the size of each part, so one request writes it, and a
reader finds any part without asking. What protects it is what protects a segment anywhere: the CRC of every batch, and
indexes that are believed only where a batch confirms them.

    object = log offsetIndex timeIndex txnIndex
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from logstore.bucket.manifest import Segment
from logstore.errors import CorruptState
from logstore.files import File, FileSystem
from logstore.limits import Limits
from logstore.objects.objects import Bytes, Objects
from logstore.records.decoder import Decoder
from logstore.records.table import ATTRIBUTES, CONTROL_BIT, COUNT
from logstore.segment.batches import OrderCheck
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name
from logstore.segment.segment import LogSegment
from logstore.syncing import each_side_by_side

_PART_BYTES = 4 << 20


def part_spans(segment: Segment) -> dict[FileKind, tuple[int, int]]:
    """Where each file of the segment begins and ends in its object."""
    sizes = (
        segment.log_bytes,
        segment.offset_index_bytes,
        segment.time_index_bytes,
        segment.txn_index_bytes,
    )
    spans, at = {}, 0
    for kind, size in zip(SEGMENT_KINDS, sizes, strict=True):
        spans[kind] = (at, at + size)
        at += size
    return spans


def object_bytes(segment: Segment) -> int:
    return part_spans(segment)[SEGMENT_KINDS[-1]][1]


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """The files of a finished segment in a local folder; each may be read more than once, as a retry needs."""

    fs: FileSystem
    directory: str
    base_offset: int
    suffix: Transient = Transient.NONE

    def path(self, kind: FileKind) -> str:
        return os.path.join(self.directory, file_name(self.base_offset, kind, self.suffix))

    def sizes(self) -> tuple[int, ...]:
        """Bytes of the four files; an index that is not there has none."""
        paths = [self.path(kind) for kind in SEGMENT_KINDS]
        return tuple(self.fs.stat(path).size_bytes if self.fs.exists(path) else 0 for path in paths)

    def __iter__(self) -> Iterator[Bytes]:
        for kind, size in zip(SEGMENT_KINDS, self.sizes(), strict=True):
            if size:
                yield from FileParts(self.fs, self.path(kind), size)


@dataclass(frozen=True, slots=True)
class FileParts:
    """The first bytes of a file; they may be read more than once, as a retry needs."""

    fs: FileSystem
    path: str
    size_bytes: int

    def __iter__(self) -> Iterator[Bytes]:
        return _parts(self.fs.open(self.path), self.size_bytes)


def _parts(file: File, size: int) -> Iterator[Bytes]:
    try:
        for at in range(0, size, _PART_BYTES):
            part = file.pread(min(_PART_BYTES, size - at), at)
            if len(part) < min(_PART_BYTES, size - at):
                raise OSError(f"{file.path}: fewer bytes than the file had")
            yield part
    finally:
        file.close()


def measured(local: LocalSegment, entry: Segment, limits: Limits) -> Segment:
    """The entry with what only its batches say, and with the time of its file. Raises CorruptBatch."""
    segment = LogSegment(local.fs, local.directory, entry.base_offset, limits=limits, suffix=local.suffix)
    try:
        records, largest_ms = content_of(segment, limits)
    finally:
        segment.close(clean=False)
    appended_ms = local.fs.stat(local.path(FileKind.LOG)).mtime_ms
    return replace(entry, largest_timestamp_ms=largest_ms, appended_ms=appended_ms, records=records)


def content_of(segment: LogSegment, limits: Limits, order: OrderCheck | None = None) -> tuple[int, int]:
    """Records without markers, and the newest timestamp (-1: none). Every batch is checked. Raises CorruptBatch."""
    records = 0
    for chunk in segment.chunks():
        if order is not None:
            order.see(chunk)
        told = chunk.table[:, COUNT] >= 0
        data = (chunk.table[:, ATTRIBUTES] & CONTROL_BIT) == 0
        records += int(chunk.table[told & data, COUNT].sum())
        if not told.all():  # formats before the second one: a wrapper does not say how many it holds
            decoder = Decoder(limits=limits, headers=False)
            records += sum(len(each) for each in decoder.columns(chunk.data, chunk.table[~told], file=chunk.file))
    return records, max((header.max_timestamp_ms for header in segment.headers()), default=-1)


def put_segment(objects: Objects, source: LocalSegment, entry: Segment) -> Segment:
    """Put the files under `entry.key`; returns the entry with their sizes. It has to be listed to count."""
    log, offsets, times, transactions = source.sizes()
    objects.put(entry.key, source)
    return replace(
        entry,
        log_bytes=log,
        offset_index_bytes=offsets,
        time_index_bytes=times,
        txn_index_bytes=transactions,
    )


def fetch_segment(objects: Objects, segment: Segment, fs: FileSystem, directory: str) -> LocalSegment:
    """The segment's files in a local folder. Raises ObjectMissing, ObjectTruncated."""
    return fetch_segments(objects, (segment,), fs, directory)[0]


def fetch_segments(objects: Objects, segments: Sequence[Segment], fs: FileSystem, directory: str) -> list[LocalSegment]:
    """The files of segments in a local folder, by requests of some MiB, several at once.

    Raises ObjectMissing, ObjectTruncated.
    """
    found = [LocalSegment(fs, directory, segment.base_offset) for segment in segments]
    pieces: list[tuple[Segment, LocalSegment, int]] = []
    for segment, local in zip(segments, found, strict=True):
        for kind in SEGMENT_KINDS:
            _write(fs, local.path(kind), b"", 0)  # what was there is gone
        pieces += [(segment, local, at) for at in range(0, object_bytes(segment), _PART_BYTES)]
    each_side_by_side(lambda piece: _fetch(objects, *piece), pieces)
    for segment, local in zip(segments, found, strict=True):
        if local.sizes() != tuple(end - begin for begin, end in part_spans(segment).values()):
            raise CorruptState("the local copy of a segment has other sizes than the manifest", file=segment.key)
    return found


def _fetch(objects: Objects, segment: Segment, local: LocalSegment, at: int) -> None:
    """A piece of the object, into the files that it is of."""
    stop = min(at + _PART_BYTES, object_bytes(segment))
    (answer,) = objects.ranges(segment.key, [(at, stop)])
    data = memoryview(answer)
    for kind, (begin, end) in part_spans(segment).items():
        first, last = max(at, begin), min(stop, end)
        if first < last:
            _write(local.fs, local.path(kind), data[first - at : last - at], first - begin)


def _write(fs: FileSystem, path: str, data: Bytes, position: int) -> None:
    file = fs.open(path, create=True)
    try:
        if not len(data):
            file.truncate(0)
        file.pwrite(data, position)
    finally:
        file.close()

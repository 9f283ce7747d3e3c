"""Reads a partition as it lies on disk and says everything that is wrong with it; changes nothing.

Below the high watermark every byte must hold: checksums, records as readers decode them, order of offsets, the segment
list, the indexes, the side files. What lies above it belongs to a writer that may be working now, and is left alone.
Compaction and retention may be at work as well: what is wrong with a file counts only if the list still means that
file, else it is looked at again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from logstore.directory.checkpoint import read_partition_metadata
from logstore.directory.finding import Finding
from logstore.directory.state import Loss, PartitionState, SegmentEntry, read_state
from logstore.errors import CorruptBatch, DuramenError
from logstore.files import FileSystem, NotRegularFile
from logstore.limits import DEFAULT_LIMITS, INT64_MAX, Limits
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.snapshot import read_snapshot
from logstore.records.decoder import Decoder
from logstore.records.table import LAST_OFFSET, MAX_TIMESTAMP, POSITION, BatchTable
from logstore.segment.batches import Chunk, begin_offsets
from logstore.segment.names import PARTITION_METADATA, FileKind, Transient, file_name, parse_file_name
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition

#: after this many findings in one segment the rest adds nothing
_FINDINGS_MAX = 20
_LOOKS_MAX = 50
#: a small file with an error is read this often: it may be in the middle of its replacement
_SIDE_LOOKS_MIN = 3
_LOOK_AGAIN_S = 0.02
#: what is wrong with a file: gone, not a file, too large. Any other error is the system's, and says nothing about it
_OF_THE_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EFBIG, errno.ELOOP)


@dataclass(slots=True)
class Verification:
    partition: TopicPartition
    segments: int = 0
    batches: int = 0
    size_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    #: earlier losses; they are recorded, so they are not findings
    losses: tuple[Loss, ...] = ()
    #: the topic was created or widened by a process that died before it made this partition; nothing was ever in it
    unplaced: bool = False

    @property
    def sound(self) -> bool:
        return not self.findings


def verify_partition(
    fs: FileSystem,
    directory: str,
    *,
    partition: TopicPartition,
    topic_id: str,
    state_path: str,
    high_watermark: int,
    limits: Limits = DEFAULT_LIMITS,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Verification:
    """Never raises for damage: it is in the findings. `progress` is called with the bytes read since last time."""
    result = Verification(partition)
    found = result.findings
    state = None
    with _noting(found):
        state = read_state(fs, state_path, limits=limits)
        if state is None and high_watermark > 0:
            found.append(Finding(f"there are records up to {high_watermark} but no segment list", file=state_path))
        # The list comes first and the directory last; both come before the first record.
        if high_watermark == 0 and (state is None or state.is_as_made) and not fs.exists(directory):
            result.unplaced = True
            return result
    with _noting(found):
        path = os.path.join(directory, PARTITION_METADATA)
        metadata = read_partition_metadata(fs, path, limits=limits)
        if metadata is None or metadata.topic_id != topic_id:
            found.append(Finding(f"the directory does not belong to topic id {topic_id}", file=path))
    if state is not None:
        result.losses = state.losses
        where = _Where(fs, directory, state_path, high_watermark, limits, progress)
        end_offset = _verify_segments(where, state, result)
        if end_offset is not None and end_offset < high_watermark:
            found.append(
                Finding(
                    f"committed up to {high_watermark}, but the log ends at {end_offset}",
                    file=directory,
                    offset=end_offset,
                )
            )
    found += _verify_side_files(fs, directory, state, state_path, limits)
    return result


@contextlib.contextmanager
def _noting(found: list[Finding]) -> Iterator[None]:
    try:
        yield
    except DuramenError as error:
        found.append(Finding(error.what, error.file, error.position, error.offset))
    except OSError as error:
        if error.errno not in _OF_THE_FILE and not isinstance(error, NotRegularFile):
            raise
        found.append(Finding(error.strerror or str(error), file=error.filename))


@dataclass(frozen=True, slots=True)
class _Where:
    """The partition that is verified, and up to where."""

    fs: FileSystem
    directory: str
    state_path: str
    high_watermark: int
    limits: Limits
    progress: Callable[[int], None]


def _verify_segments(where: _Where, state: PartitionState, result: Verification) -> int | None:
    """The offset after the last batch, None when the last segment could not be read to its end.

    Goes by offset, not by the list it began with: that one may be replaced on the way, segment by segment.
    """
    # Whole segments below the log start are deleted already: nobody reads them, and the next retention removes them.
    first = state.segments[0].base_offset if state.segments else 0
    next_offset: int | None = max(first, state.log_start_offset)
    position = next_offset if state.segments else None
    looks = 0
    while position is not None and state.segments:
        number = max(bisect_right(state.segments, position, key=lambda entry: entry.base_offset) - 1, 0)
        entry = state.segments[number]
        if entry.base_offset > where.high_watermark:
            break
        upper = state.segments[number + 1].base_offset if number + 1 < len(state.segments) else None
        look = Verification(result.partition)
        reached = _verify_segment(where, entry, upper, state, look)
        ends_early = upper is None and reached is not None and reached < where.high_watermark
        if (look.findings or ends_early) and looks < _LOOKS_MAX:
            again = read_state(where.fs, where.state_path, limits=where.limits)
            if again is not None and _may_have_moved(state, again, entry, upper):
                state, looks = again, looks + 1
                time.sleep(_LOOK_AGAIN_S)
                continue
        looks = 0
        result.findings += look.findings
        result.segments += look.segments
        result.batches += look.batches
        result.size_bytes += look.size_bytes
        # What a sealed segment lacks at its end was compacted away.
        next_offset = reached if upper is None or reached is None else upper
        position = upper
    return next_offset


def _may_have_moved(before: PartitionState, after: PartitionState, entry: SegmentEntry, upper: int | None) -> bool:
    """Whether the files of a segment may be others than the list said when it was read."""
    if before.swap is not None or after.swap is not None:
        return True  # in the middle of a replacement names change, whatever the list says
    if before.generation == after.generation:
        return False
    bases = [each.base_offset for each in after.segments]
    if entry.base_offset not in bases:
        return True
    at = bases.index(entry.base_offset)
    following = bases[at + 1] if at + 1 < len(bases) else None
    same_size = after.segments[at].size_bytes == entry.size_bytes
    return not (same_size if upper is not None else True) or following != upper


def _verify_segment(
    where: _Where, entry: SegmentEntry, upper_offset: int | None, state: PartitionState, result: Verification
) -> int | None:
    """The offset after its last committed batch, None when it could not be read that far."""
    high_watermark = where.high_watermark
    path = os.path.join(where.directory, file_name(entry.base_offset, FileKind.LOG))
    next_offset, complete = entry.base_offset, False
    decoder = Decoder(limits=where.limits, control=True)
    with _noting(result.findings):
        try:
            segment = _opened(where, entry, state)
        except FileNotFoundError:
            result.findings.append(Finding("a segment of the list is missing", file=path, offset=entry.base_offset))
            return None
        result.segments += 1
        try:
            sealed = upper_offset is not None
            if segment.size_bytes < entry.size_bytes or (sealed and segment.size_bytes != entry.size_bytes):
                result.findings.append(
                    Finding(f"{segment.size_bytes} bytes where the list has {entry.size_bytes}", file=path)
                )
            indexes = _IndexCheck(where.fs, segment, result.findings) if sealed else None
            # An offset is under no checksum: one above the high watermark may be that of a committed batch.
            end_offset = INT64_MAX if upper_offset is not None and upper_offset <= high_watermark else high_watermark
            for chunk in _committed_chunks(segment, end_offset):
                below = np.nonzero(begin_offsets(chunk.table) < end_offset)[0]
                rows = chunk.table[: int(below[-1]) + 1 if len(below) else 0]
                # A batch is committed as a whole: none reaches across the high watermark.
                limit = end_offset if upper_offset is None else min(upper_offset, end_offset)
                _verify_order(chunk, rows, next_offset, limit, result.findings)
                _verify_records(decoder, chunk, rows, next_offset, result.findings)
                if len(rows):
                    next_offset = max(next_offset, int(rows[:, LAST_OFFSET].max()) + 1)
                if indexes is not None:
                    indexes.see(chunk)
                result.batches += len(rows)
                result.size_bytes += len(chunk.data)
                where.progress(len(chunk.data))
            complete = True
            if indexes is not None and upper_offset is not None and upper_offset <= high_watermark:
                indexes.finish()
        finally:
            segment.close(clean=False)
    return next_offset if complete else None


def _opened(where: _Where, entry: SegmentEntry, state: PartitionState) -> LogSegment:
    """The segment the list means: while it is replaced it may be `.deleted` already. Raises FileNotFoundError."""
    open_as = partial(LogSegment, where.fs, where.directory, entry.base_offset, limits=where.limits)
    if state.swap is not None and entry.base_offset in state.swap.old_bases:
        for suffix in (Transient.NONE, Transient.DELETED):
            with contextlib.suppress(FileNotFoundError):
                segment = open_as(suffix=suffix)
                if segment.size_bytes == entry.size_bytes:
                    return segment
                segment.close(clean=False)
    return open_as()


def _verify_records(decoder: Decoder, chunk: Chunk, rows: BatchTable, next_offset: int, found: list[Finding]) -> None:
    """Decode what readers decode: a checksum says nothing of a count that was wrong when it was written."""
    if len(found) >= _FINDINGS_MAX:
        return
    with _noting(found):
        for _ in decoder.columns(
            chunk.data, rows.copy(), file=chunk.file, base_position=chunk.position, after=next_offset - 1
        ):
            pass


def _committed_chunks(segment: LogSegment, high_watermark: int) -> Iterator[Chunk]:
    """Chunks with committed batches; damage above the high watermark is not judged."""
    committed = segment.base_offset < high_watermark
    if not committed:
        return
    try:
        for chunk in segment.chunks():
            if not committed:
                return
            committed = int(chunk.table[-1, LAST_OFFSET]) < high_watermark - 1
            yield chunk
    except CorruptBatch:
        if committed:
            raise


def _verify_order(chunk: Chunk, rows: BatchTable, next_offset: int, limit: int, found: list[Finding]) -> None:
    """Each batch begins after the one before it and ends below `limit`."""
    if not len(rows):
        return
    before = np.concatenate(([next_offset - 1], rows[:-1, LAST_OFFSET]))
    wrong = (begin_offsets(rows) <= before) | (rows[:, LAST_OFFSET] < begin_offsets(rows))
    wrong |= rows[:, LAST_OFFSET] >= limit
    for at in np.nonzero(wrong)[0][:_FINDINGS_MAX].tolist():
        position, last = chunk.position + int(rows[at, POSITION]), int(rows[at, LAST_OFFSET])
        found.append(
            Finding(f"offsets out of order: up to {last} after {int(before[at])}", chunk.file, position, offset=last)
        )


class _IndexCheck:
    """Each entry of a sealed segment's indexes must lead to the batch it names."""

    def __init__(self, fs: FileSystem, segment: LogSegment, found: list[Finding]) -> None:
        self._found = found
        self._offsets = segment.offset_index
        self._times = segment.time_index
        if segment.size_bytes and not fs.exists(self._offsets.path):
            found.append(Finding("a sealed segment has no offset index", file=self._offsets.path))
        for index in (self._offsets, self._times):
            # Only an active segment's index is longer than its entries; a broker would take zeros for entries.
            tail = fs.stat(index.path).size_bytes - index.size_bytes if fs.exists(index.path) else 0
            if tail:
                found.append(
                    Finding(f"a sealed index has {tail} bytes after its entries", index.path, index.size_bytes)
                )
        with _noting(found):
            self._offsets.sanity_check(segment.size_bytes)
        with _noting(found):
            self._times.sanity_check()
        with _noting(found):
            segment.txn_index.sanity_check()
        by_position = np.frombuffer(self._offsets.raw(), dtype=">i4").astype(np.int64).reshape(-1, 2)
        self._entry_offsets, self._entry_positions = by_position[:, 0] + segment.base_offset, by_position[:, 1]
        by_time = np.frombuffer(self._times.raw(), dtype=[("timestamp", ">i8"), ("offset", ">i4")])
        self._time_stamps = by_time["timestamp"].astype(np.int64)
        self._time_offsets = by_time["offset"].astype(np.int64) + segment.base_offset
        self._offset_seen = np.zeros(len(self._entry_offsets), dtype=bool)
        self._time_seen = np.zeros(len(self._time_stamps), dtype=bool)

    def see(self, chunk: Chunk) -> None:
        table = chunk.table
        at = _match(table[:, POSITION] + chunk.position, self._entry_positions)
        self._offset_seen |= (at >= 0) & (table[at, LAST_OFFSET] == self._entry_offsets)
        at = _match(table[:, LAST_OFFSET], self._time_offsets)
        self._time_seen |= (at >= 0) & (table[at, MAX_TIMESTAMP] == self._time_stamps)

    def finish(self) -> None:
        for at in np.nonzero(~self._offset_seen)[0][:_FINDINGS_MAX].tolist():
            offset, position = int(self._entry_offsets[at]), int(self._entry_positions[at])
            self._found.append(
                Finding(
                    f"entry {at} ({offset}, {position}) does not lead to a batch that ends there",
                    file=self._offsets.path,
                    position=at * self._offsets.entry_bytes,
                    offset=offset,
                )
            )
        for at in np.nonzero(~self._time_seen)[0][:_FINDINGS_MAX].tolist():
            timestamp_ms, offset = int(self._time_stamps[at]), int(self._time_offsets[at])
            self._found.append(
                Finding(
                    f"entry {at} ({timestamp_ms}, {offset}) is not the largest timestamp of a batch that ends there",
                    file=self._times.path,
                    position=at * self._times.entry_bytes,
                    offset=offset,
                )
            )


def _match(sorted_values: BatchTable, wanted: BatchTable) -> BatchTable:
    """Where each wanted value stands among the sorted ones, -1 where it does not."""
    at = np.minimum(np.searchsorted(sorted_values, wanted), len(sorted_values) - 1)
    return np.where(sorted_values[at] == wanted, at, -1)


def _verify_side_files(
    fs: FileSystem, directory: str, state: PartitionState | None, state_path: str, limits: Limits
) -> list[Finding]:
    """What is wrong with them, and stays so while the list stays as it is."""
    for look in range(_LOOKS_MAX):
        if look:
            time.sleep(_LOOK_AGAIN_S)
        found: list[Finding] = []
        before = _readable_state(fs, state_path, limits) or state
        _look_at_side_files(fs, directory, before, limits, found)
        after = _readable_state(fs, state_path, limits) or state
        still = before is None or after is None or before.generation == after.generation
        if not found or (still and look + 1 >= _SIDE_LOOKS_MIN):
            break
    return found


def _readable_state(fs: FileSystem, state_path: str, limits: Limits) -> PartitionState | None:
    with contextlib.suppress(DuramenError):
        return read_state(fs, state_path, limits=limits)
    return None


def _look_at_side_files(
    fs: FileSystem, directory: str, state: PartitionState | None, limits: Limits, found: list[Finding]
) -> None:
    bases = {entry.base_offset for entry in state.segments} if state else set()
    if state is not None and state.swap is not None:
        bases |= {*state.swap.new_bases, *state.swap.old_bases}
    # Below the first segment lies what retention gave up and has not renamed yet; the next pass does.
    oldest, newest = min(bases, default=0), max(bases, default=0)
    with _noting(found):
        for name in fs.listdir(directory):
            numbered = parse_file_name(name)
            path = os.path.join(directory, name)
            if numbered is None or numbered.transient is not Transient.NONE:
                continue
            if numbered.kind is FileKind.SNAPSHOT:
                with _noting(found), contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    read_snapshot(fs, path, limits=limits)
            elif numbered.base_offset not in bases and oldest < numbered.base_offset < newest:
                found.append(Finding("a file of no segment of the list", file=path, offset=numbered.base_offset))
    with _noting(found):
        LeaderEpochs.load(fs, directory, limits=limits)

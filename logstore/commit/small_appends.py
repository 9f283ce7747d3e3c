"""Appending a little to many partitions: all batches of a group are read and checked at once, each log gets one write.

Only the plain case is taken: the log ends where its slot says, the batches fit its active segment and no index entry is
due. Everything else (a roll, a longer file, one that a backup shares, producers, a replacement under way) is left to
`Appender`, which writes the same bytes. A log that has no index files gets none here: an index without entries and none
are the same. The caller holds the partitions' locks, and writes lists and slots.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logstore.commit.staged_reader import StagedReaders
from logstore.config import LogConfig
from logstore.directory.layout import Layout
from logstore.directory.state import PartitionState, SegmentEntry, read_state
from logstore.directory.tail import Tail
from logstore.directory.tails import PartitionTail
from logstore.errors import CorruptState
from logstore.files import FileSystem
from logstore.limits import RELATIVE_OFFSET_MAX, Limits
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.roll import jitter_ms, max_segment_ms
from logstore.records.header import read_header
from logstore.records.native import address_of, kernels
from logstore.records.scan import is_damage, scan_batches
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, MAX_TIMESTAMP, POSITION, SIZE
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, FileKind, file_name
from logstore.topics.registry import Topic

#: with fewer partitions the usual path costs no more
PARTITIONS_MIN = 16
#: what is read at once, all partitions together
_GROUP_BYTES_MAX = 32 << 20
_EPOCH = 0
_BASE_OFFSET_BYTES = np.arange(8)
_EPOCH_BYTES = np.arange(12, 16)


@dataclass(frozen=True, slots=True)
class SmallAppend:
    """What became of a partition: its tail, its leader epoch, and the list if that is to be written."""

    tail: Tail
    leader_epoch: int
    state: PartitionState | None


@dataclass(frozen=True, slots=True)
class Group:
    """Partitions of one topic of a plan, and where each of them ends now."""

    fs: FileSystem
    layout: Layout
    topic: Topic
    config: LogConfig
    limits: Limits
    now_ms: int
    end_offsets: Sequence[int]
    known: Mapping[int, PartitionTail]


def append_small(group: Group, staged: StagedReaders) -> dict[int, SmallAppend]:
    """Append what is plain; returns those partitions. Nothing was changed in the others."""
    numbers = [number for number, tail in group.known.items() if group.end_offsets[number] > tail.end_offset]
    if len(numbers) < PARTITIONS_MIN:
        return {}
    gathered = staged.gather(numbers, bytes_max=_GROUP_BYTES_MAX)
    if gathered is None:
        return {}
    data, sizes = gathered
    scan = scan_batches(data)
    if is_damage(scan.code) or scan.next_position != len(data):
        return {}  # reading them one by one says what is wrong, and in which partition
    table = scan.table
    if group.config.message_timestamp_type == "LogAppendTime":
        kernels().stamp_append_time(address_of(data), address_of(table), len(table), group.now_ms)
    batches = _batches(table[:, [POSITION, SIZE, MAX_TIMESTAMP]], table[:, LAST_OFFSET] - table[:, BASE_OFFSET] + 1)
    bases = np.empty(len(table), dtype=">i8")
    epochs = np.empty(len(table), dtype=">i4")
    plain: list[tuple[int, PartitionTail, Tail, int, int]] = []
    row = position = 0
    for number, size in zip(numbers, sizes, strict=True):
        first, begin, position = row, position, position + size
        while row < len(batches) and batches[row][0] < position:
            row += 1
        known = group.known[number]
        epochs[first:row] = _EPOCH if known.leader_epoch is None else known.leader_epoch
        tail = _placed(group, number, known, batches[first:row], bases[first:row])
        if tail is not None and row > first:
            plain.append((number, known, tail, begin, position))
    at = table[:, POSITION][:, np.newaxis]
    data[at + _BASE_OFFSET_BYTES] = bases.view(np.uint8).reshape(-1, 8)
    data[at + _EPOCH_BYTES] = epochs.view(np.uint8).reshape(-1, 4)
    done = {}
    for number, known, tail, begin, end in plain:
        appended = _append(group, number, known, tail, data[begin:end])
        if appended is not None:
            done[number] = appended
    return done


Batch = tuple[int, int, int, int]  # position, size, largest timestamp, offsets


def _batches(columns: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[Batch]:
    return list(zip(*columns.T.tolist(), counts.tolist(), strict=True))


def _placed(
    group: Group, number: int, known: PartitionTail, batches: Sequence[Batch], bases: npt.NDArray[np.int64]
) -> Tail | None:
    """The tail after the batches, whose base offsets are noted; None where a roll or an index entry may be due.

    The rules are those of the `place` kernel.
    """
    config, tail = group.config, known.tail
    size, since, offset = tail.size_bytes, tail.bytes_since_index_entry, known.end_offset
    largest_ms, largest_at = tail.largest_timestamp_ms, tail.largest_timestamp_offset
    for at, (_, batch_bytes, timestamp_ms, count) in enumerate(batches):
        if since > config.index_interval_bytes or size > config.segment_bytes - batch_bytes:
            return None
        bases[at] = offset
        offset += count
        if timestamp_ms > largest_ms:
            largest_ms, largest_at = timestamp_ms, offset - 1
        since += batch_bytes
        size += batch_bytes
    has_room = (
        offset - 1 - tail.base_offset <= RELATIVE_OFFSET_MAX
        and tail.index_entries < config.segment_index_bytes // 8
        and tail.time_index_entries < config.segment_index_bytes // 12 - 1
    )
    if not has_room or offset != group.end_offsets[number]:
        return None
    if not tail.size_bytes and _outlives(group, number, tail.base_offset, batches[0][2], batches):
        return None
    return Tail(tail.base_offset, size, largest_ms, largest_at, since, tail.index_entries, tail.time_index_entries)


def _outlives(group: Group, number: int, base_offset: int, first_ms: int, batches: Sequence[Batch]) -> bool:
    """Whether a segment whose first batch has that timestamp is too old for one of the others."""
    if first_ms < 0:
        return False  # its age counts from when it was opened
    oldest_ms = max_segment_ms(group.config)
    if group.config.segment_jitter_ms:
        oldest_ms -= jitter_ms(group.config, str(group.topic.partition(number)), base_offset)
    return any(timestamp_ms - first_ms > oldest_ms for _, _, timestamp_ms, _ in batches)


def _append(
    group: Group, number: int, known: PartitionTail, tail: Tail, data: npt.NDArray[np.uint8]
) -> SmallAppend | None:
    """Write the batches after the log's end; None, and nothing is changed, where the log is not plain."""
    fs, before = group.fs, known.tail
    directory = group.layout.partition(group.topic.partition(number))
    path = os.path.join(directory, file_name(before.base_offset, FileKind.LOG))
    state = _plain_state(fs, group.layout.partition_state(group.topic.id, number), group.limits)
    is_first = not known.end_offset and not before.size_bytes and not before.base_offset
    if state is None or (not state.segments and not is_first):
        return None
    if state.segments and state.segments[-1].base_offset != before.base_offset:
        return None
    epoch = known.leader_epoch
    if epoch is None:
        if not is_first or not _is_empty(fs, os.path.join(directory, LEADER_EPOCH_CHECKPOINT)):
            return None
        epoch = _EPOCH
    if before.size_bytes:
        found = fs.stat(path)
        if found.size_bytes != before.size_bytes or found.links > 1:
            return None
        file = fs.open(path, writable=True)
    else:
        try:
            file = fs.open(path, create=True, exclusive=not state.segments)
        except FileExistsError:  # the rest of an interrupted append
            return None
    try:
        if before.size_bytes:
            header = read_header(file, 0, before.size_bytes)
            if header is None or _is_too_old(group, number, before, header.max_timestamp_ms, tail):
                return None
        elif state.segments and file.size():
            return None
        file.pwrite(data.data, before.size_bytes)
    finally:
        file.close()
    if known.leader_epoch is None:
        epochs = LeaderEpochs(fs, os.path.join(directory, LEADER_EPOCH_CHECKPOINT))
        epochs.assign(epoch, known.end_offset, store=False)
        epochs.begin()
    if state.segments:
        return SmallAppend(tail, epoch, None)
    listed = (SegmentEntry(tail.base_offset, tail.size_bytes, tail.largest_timestamp_ms),)
    return SmallAppend(tail, epoch, state.with_segments(listed, log_start_offset=state.log_start_offset))


def _is_empty(fs: FileSystem, path: str) -> bool:
    try:
        return not fs.stat(path).size_bytes
    except FileNotFoundError:
        return True


def _is_too_old(group: Group, number: int, before: Tail, first_ms: int, tail: Tail) -> bool:
    """Whether the segment may have to roll by time: nothing appended is newer than the new tail's largest timestamp."""
    return _outlives(group, number, before.base_offset, first_ms, [(0, 0, tail.largest_timestamp_ms, 0)])


def _plain_state(fs: FileSystem, path: str, limits: Limits) -> PartitionState | None:
    """The segment list, unless it is missing, damaged, or says that the log is anything but plain."""
    try:
        state = read_state(fs, path, limits=limits)
    except (CorruptState, OSError):
        return None  # the usual path reports what is wrong
    return None if state is None or state.swap is not None or state.producers else state

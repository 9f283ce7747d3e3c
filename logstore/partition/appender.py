"""The short way to append: batches of a decided plan onto a partition whose end is known exactly.

A `PartitionLog` looks through its directory when it is opened; a micro-batch every second cannot afford that. An
appender opens the active segment alone, at the tail its caller knows from the topic's `ends`: whatever lies after
that tail was left by an interrupted append and is cut first. It writes what a log that had never been closed would
hold. Logs with idempotent or transactional producers go through `producer_append`, by the same loop, `place_batches`.
The caller holds the partition lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import PartitionState, SegmentEntry
from logstore.directory.tail import Tail
from logstore.directory.tails import PartitionTail
from logstore.directory.unsynced import marking_unsynced
from logstore.errors import AppendTooLarge, CorruptCheckpoint, DamagedLog
from logstore.files import FileSystem
from logstore.limits import Limits
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.roll import RollReason, jitter_ms, roll_limits
from logstore.partition.snapshot import write_snapshot
from logstore.records.codes import OK, ROLL_APPEND_TOO_LARGE
from logstore.records.native import address_of, kernels
from logstore.records.table import LAST_OFFSET, SIZE, BatchTable
from logstore.segment.batches import Chunk
from logstore.segment.names import (
    LEADER_EPOCH_CHECKPOINT,
    SEGMENT_KINDS,
    FileKind,
    Transient,
    file_name,
    parse_file_name,
)
from logstore.segment.segment import LogSegment, Numbering
from logstore.segment.segment_reader import SegmentSettings
from logstore.segment.time_index import TimestampOffset
from logstore.topic import TopicPartition


def tail_of(segment: LogSegment) -> Tail:
    largest = segment.largest
    return Tail(
        segment.base_offset,
        segment.size_bytes,
        largest.timestamp_ms,
        largest.offset,
        segment.bytes_since_index_entry,
        segment.offset_index.entries,
        segment.time_index.entries,
    )


class Placing(Protocol):
    """A log that batches are appended to."""

    end_offset: int
    leader_epoch: int
    now_ms: int

    @property
    def partition(self) -> TopicPartition: ...

    @property
    def config(self) -> LogConfig: ...

    @property
    def active(self) -> LogSegment: ...

    def roll(self, reason: RollReason) -> None: ...


def stamp(log: Placing, chunk: Chunk) -> None:
    """Give the batches the time of the append, where the topic wants that."""
    if log.config.message_timestamp_type == "LogAppendTime":
        kernels().stamp_append_time(address_of(chunk.data), address_of(chunk.table), len(chunk.table), log.now_ms)


def place_batches(log: Placing, data: npt.NDArray[np.uint8], table: BatchTable) -> None:
    """The append loop: batches get their offsets and go into the active segment, which rolls where due.

    Raises AppendTooLarge for a batch that no segment takes.
    """
    first, fresh = 0, False
    while first < len(table):
        roll = roll_limits(log.config, log.active.jitter_ms, now_ms=log.now_ms, fresh=fresh)
        placed, reason = log.active.place(data, table, first, Numbering(log.end_offset, log.leader_epoch), roll)
        if placed:
            first += placed
            log.end_offset = int(table[first - 1, LAST_OFFSET]) + 1
        if reason == ROLL_APPEND_TOO_LARGE:
            raise AppendTooLarge(
                f"a batch of {int(table[first, SIZE])} bytes; segment.bytes is {log.config.segment_bytes}",
                partition=log.partition,
                offset=log.end_offset,
            )
        fresh = reason != OK
        if fresh:
            log.roll(RollReason(reason))


class Appender:
    """Open, `append`, `finish`."""

    def __init__(
        self,
        fs: FileSystem,
        place: PartitionPlace,
        known: PartitionTail,
        *,
        state: PartitionState,
        config: LogConfig,
        now_ms: int,
        limits: Limits,
    ) -> None:
        """Cut the log to its known tail. Raises DamagedLog when the files end before it.

        The leader epoch is read from its checkpoint unless it is known.
        """
        tail = known.tail
        self._fs = fs
        self._directory = place.directory
        self.partition = place.partition
        self.config = config
        self._state = state
        self._state_path = place.state_path
        self.now_ms = now_ms
        self._limits = limits
        self.end_offset = known.end_offset
        self._rolled: list[SegmentEntry] = []
        self._sealed = tuple(entry for entry in state.segments if entry.base_offset < tail.base_offset)
        self._list_changed = not state.segments or state.segments[-1].base_offset != tail.base_offset
        self.active = self._open_active(tail)
        self.leader_epoch = self._epoch() if known.leader_epoch is None else known.leader_epoch

    def _epoch(self) -> int:
        """The latest leader epoch; the first one is noted. Not synced: until the flush, it can be rebuilt from
        staging."""
        try:
            epochs = LeaderEpochs.load(self._fs, self._directory, limits=self._limits)
        except CorruptCheckpoint:
            if self.end_offset:
                raise
            # A power cut came before anything was published: the epoch belongs to no batch.
            epochs = LeaderEpochs(self._fs, os.path.join(self._directory, LEADER_EPOCH_CHECKPOINT))
        if epochs.latest is None:
            epochs.assign(0, self.end_offset, store=False)
            epochs.begin()
        return epochs.latest.epoch if epochs.latest else 0

    def _open_active(self, tail: Tail) -> LogSegment:
        path = os.path.join(self._directory, file_name(tail.base_offset, FileKind.LOG))
        fresh = not self._fs.exists(path)
        segment = self._segment(tail.base_offset)
        if segment.size_bytes < tail.size_bytes or (fresh and tail.size_bytes):
            raise DamagedLog(
                f"the log has {segment.size_bytes} bytes where {tail.size_bytes} were committed",
                partition=self.partition,
                file=path,
                offset=self.end_offset,
                hint="Run `duramen recover`",
            )
        if segment.size_bytes > tail.size_bytes or segment.offset_index.entries != tail.index_entries:
            self._remove_later_segments(tail.base_offset)
            segment.cut_bytes(tail.size_bytes)
        if segment.offset_index.entries > tail.index_entries:
            segment.offset_index.keep(tail.index_entries)
        if segment.time_index.entries > tail.time_index_entries:
            segment.time_index.keep(tail.time_index_entries)
        segment.restore(
            TimestampOffset(tail.largest_timestamp_ms, tail.largest_timestamp_offset), tail.bytes_since_index_entry
        )
        return segment

    def _remove_later_segments(self, base_offset: int) -> None:
        """What an interrupted append rolled into; its bytes were never visible."""
        for name in self._fs.listdir(self._directory):
            file = parse_file_name(name)
            if file and file.transient is Transient.NONE and file.base_offset > base_offset:
                self._fs.unlink(os.path.join(self._directory, name))

    def _segment(self, base_offset: int) -> LogSegment:
        jitter = jitter_ms(self.config, str(self.partition), base_offset)
        settings = SegmentSettings.under(self.config, created_ms=self.now_ms, jitter_ms=jitter)
        return LogSegment(self._fs, self._directory, base_offset, settings=settings, writable=True, limits=self._limits)

    def append(self, chunks: Iterable[Chunk]) -> None:
        """Place batches, rolling where due. Raises AppendTooLarge, and whatever reading the chunks raises."""
        for chunk in chunks:
            stamp(self, chunk)
            place_batches(self, chunk.data, chunk.table)

    def roll(self, reason: RollReason | None = None) -> None:
        """Begin a segment at the end."""
        old = self.active
        base_offset = self.end_offset
        if old.base_offset != base_offset:
            old.seal()
            with marking_unsynced(self._fs, self._state_path):
                old.time_index.flush()  # the last entry: if the rest is flushed already, no later flush looks here
            self._rolled.append(_entry(old))
        old.close(clean=False)
        for kind in SEGMENT_KINDS:
            stale = os.path.join(self._directory, file_name(base_offset, kind))
            if self._fs.exists(stale):
                self._fs.unlink(stale)
        self.active = self._segment(base_offset)
        if old.base_offset != base_offset:  # else only an index without any room made it roll
            path = os.path.join(self._directory, file_name(base_offset, FileKind.SNAPSHOT))
            write_snapshot(self._fs, path, (), sync=False)  # as a log without producers has it; synced by the flush
        self._list_changed = True

    def continue_at(self, offset: int) -> None:
        """Let the log end at `offset`, above its last record: a segment begins there, which says so."""
        self.end_offset = offset
        if self.active.base_offset != offset:
            self.roll()

    def finish(self) -> tuple[Tail, PartitionState | None]:
        """Close the files; returns the new tail and, if the list changed, the state that is to be written."""
        tail = tail_of(self.active)
        state = None
        if self._list_changed:
            segments = (*self._sealed, *self._rolled, _entry(self.active))
            state = self._state.with_segments(segments, log_start_offset=self._state.log_start_offset)
        self.close()
        return tail, state

    def close(self) -> None:
        self.active.close(clean=False)


def _entry(segment: LogSegment) -> SegmentEntry:
    return SegmentEntry(segment.base_offset, segment.size_bytes, segment.largest.timestamp_ms)

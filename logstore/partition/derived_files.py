"""What recovery rebuilds from the log: indexes, leader epochs, and the state of producers.

None of it decides anything about the log; what cannot be read of the log is left to the check of the batches.
"""

from __future__ import annotations

import os

import numpy as np

from logstore.errors import BufferLimit, CorruptBatch, CorruptCheckpoint, OffsetOverflow
from logstore.limits import INT64_MAX
from logstore.partition.environment import LogEnvironment
from logstore.partition.leader_epochs import LeaderEpochs
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.producer_state_manager import ProducerStateManager
from logstore.partition.producers import producer_entries, replay
from logstore.partition.recovery_report import RecoveryReport
from logstore.partition.soundness import MALFORMED, in_order
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, LEADER_EPOCH, BatchTable
from logstore.segment.batches import Chunk
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT, FileKind
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition


class DerivedFiles:
    """The segments of one directory that is being opened, and what is derived from them."""

    def __init__(
        self,
        directory: str,
        partition: TopicPartition,
        environment: LogEnvironment,
        log_start_offset: int,
        report: RecoveryReport,
    ) -> None:
        self._fs = environment.fs
        self._directory = directory
        self._partition = partition
        self._clock = environment.clock
        self._limits = environment.limits
        self._expiration_ms = environment.producer_expiration_ms
        self._log_start = log_start_offset
        self._segments: list[LogSegment] = []
        self.report = report

    # --- indexes ------------------------------------------------------------------------------------------------------

    def _rebuild_indexes(self, segment: LogSegment, reason: str) -> None:
        """Indexes from the log; stops quietly at damage, which recovery or a reader deals with.

        Raises OffsetOverflow for a segment that is sound and can be split: one that was put in its place cannot.
        """
        segment.reset_indexes()
        producers = ProducerStateManager(self._directory, self._fs, self._partition, self._expiration_ms, self._limits)
        self._rebuild_producers(producers, segment.base_offset)
        producers.take_snapshot()
        try:
            for chunk in segment.chunks():
                segment.index_batches(chunk)
                self._apply_producers(producers, segment, chunk)
                producers.update_map_end_offset(int(chunk.table[-1, LAST_OFFSET]) + 1)
        except (BufferLimit, *MALFORMED) as error:
            self.report.notes.append(f"index of {segment.path(FileKind.LOG)} rebuilt up to damage only: {error}")
        except OffsetOverflow as error:
            at = self._segments.index(segment)
            if is_whole(segment, self._segments[at + 1].base_offset if at + 1 < len(self._segments) else None):
                raise
            self.report.notes.append(f"index of {segment.path(FileKind.LOG)} rebuilt up to damage only: {error}")
        segment.seal()
        segment.flush()  # no recovery point would make recovery do this
        producers.take_snapshot()  # those above the segment's base have been dropped
        self.report.rebuilt.append(f"{segment.offset_index.path}: {reason}")

    def _apply_producers(self, producers: ProducerStateManager, segment: LogSegment, chunk: Chunk) -> None:
        for entry in producer_entries(chunk.data, chunk.table, self._limits):
            prepared = producers.prepare([entry], AppendOrigin.RECOVERY)
            for aborted in producers.apply(prepared):
                segment.txn_index.append(aborted)

    # --- leader epochs ----------------------------------------------------------------------------------------------

    def _load_epochs(self) -> tuple[LeaderEpochs, bool]:
        """The epochs, and whether they were lost and must be found in the log again."""
        try:
            return LeaderEpochs.load(self._fs, self._directory, limits=self._limits), False
        except CorruptCheckpoint as error:
            self.report.notes.append(f"leader epochs read from the log: {error}")
            epochs = LeaderEpochs(self._fs, os.path.join(self._directory, LEADER_EPOCH_CHECKPOINT))
            return epochs, True

    def _find_epochs(self, epochs: LeaderEpochs) -> None:
        epochs.clear(store=False)
        for segment in self._segments:
            try:
                for chunk in segment.chunks(verify_crc=False):
                    self._note_epochs(epochs, chunk.table, store=False)
            except (CorruptBatch, BufferLimit) as error:
                self.report.notes.append(f"leader epochs of {segment.path(FileKind.LOG)} up to damage only: {error}")
        epochs.store()

    def _note_epochs(self, epochs: LeaderEpochs, table: BatchTable, *, store: bool = True) -> None:
        latest = epochs.latest.epoch if epochs.latest else -1
        for row in np.nonzero(table[:, LEADER_EPOCH] > latest)[0].tolist():
            epoch = int(table[row, LEADER_EPOCH])
            if epoch > latest:
                base = int(table[row, BASE_OFFSET])
                epochs.assign(epoch, base if base >= 0 else int(table[row, LAST_OFFSET]), store=store)
                latest = epoch

    # --- producer state ---------------------------------------------------------------------------------------------

    def _rebuild_producers(self, producers: ProducerStateManager, end_offset: int) -> None:
        """Producer state as of `end_offset`: the newest usable snapshot, then the headers after it."""
        for error in producers.truncate_and_reload(self._log_start, end_offset, self._clock.now_ms()):
            self.report.notes.append(f"snapshot dropped: {error}")
        start = max(producers.map_end_offset, self._log_start)
        for at, segment in enumerate(self._segments):
            following = self._segments[at + 1].base_offset if at + 1 < len(self._segments) else None
            if segment.base_offset >= end_offset or (following is not None and following <= start):
                continue
            producers.update_map_end_offset(max(segment.base_offset, start))
            if at + 2 >= len(self._segments):  # so that the next start, or a truncation, need not replay this again
                producers.take_snapshot()
            try:
                replay(producers, segment, start, end_offset, self._limits)
            except MALFORMED as error:  # below the recovery point, which is a reader's to find
                self.report.notes.append(f"producer state is incomplete: {error}")
        producers.update_map_end_offset(end_offset)


def in_order_in(segment: LogSegment, chunk: Chunk, last_offset: int, upper: int | None) -> tuple[int, str]:
    high = INT64_MAX if upper is None else upper
    return in_order(segment.log, chunk, after=last_offset, low=segment.base_offset, high=high)


def is_whole(segment: LogSegment, upper: int | None) -> bool:
    """Whether every batch of the segment is sound and in order."""
    last_offset = segment.base_offset - 1
    try:
        for chunk in segment.chunks():
            if in_order_in(segment, chunk, last_offset, upper)[1]:
                return False
            last_offset = int(chunk.table[-1, LAST_OFFSET])
    except (CorruptBatch, BufferLimit):
        return False
    return True

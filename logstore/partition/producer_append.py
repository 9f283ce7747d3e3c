"""Appends batches of a decided plan to a log opened whole, because it knows idempotent or transactional producers.

Such logs were imported. Their producers' state must go with the log, and a marker that ends a transaction (see
`commit.transactions`) changes it; so the log is opened whole. Batches are placed by the loop of `appender`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from logstore.config import LogConfig
from logstore.partition.appender import place_batches, stamp
from logstore.partition.log import PartitionLog
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.producers import producer_entries
from logstore.partition.roll import RollReason
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, PRODUCER_ID, BatchTable
from logstore.segment.batches import Chunk
from logstore.segment.segment import LogSegment
from logstore.topic import TopicPartition


class ProducerAppender:
    def __init__(self, log: PartitionLog, *, leader_epoch: int) -> None:
        self._log = log
        self.leader_epoch = leader_epoch
        self.now_ms = log.clock.now_ms()

    @property
    def partition(self) -> TopicPartition:
        return self._log.partition

    @property
    def config(self) -> LogConfig:
        return self._log.config

    @property
    def active(self) -> LogSegment:
        return self._log.active

    @property
    def end_offset(self) -> int:
        return self._log.log_end_offset

    @end_offset.setter
    def end_offset(self, offset: int) -> None:
        self._log.extend_to(offset)

    def roll(self, reason: RollReason) -> None:
        self._log.roll_at(self.end_offset, reason)

    def append(self, chunks: Iterable[Chunk]) -> None:
        """Append all of it or, when an error is raised, nothing.

        Raises AppendTooLarge, what the producers refuse, and whatever reading the chunks raises.
        """
        log = self._log
        log.check_writable()
        end, epochs = log.log_end_offset, log.epochs.entries
        log.producers.begin()
        try:
            log.epochs.assign(self.leader_epoch, end)
            for chunk in chunks:
                stamp(self, chunk)
                for table in _by_producer(chunk.table):
                    self._append(chunk, table)
        except BaseException as error:
            log.take_back(end, epochs, error)
            raise
        log.save_new_segments()

    def _append(self, chunk: Chunk, table: BatchTable) -> None:
        log = self._log
        assigned = table.copy()  # one row, if it is a producer's
        assigned[:, LAST_OFFSET] += self.end_offset - table[:, BASE_OFFSET]
        assigned[:, BASE_OFFSET] = self.end_offset
        prepared = log.producers.prepare(producer_entries(chunk.data, assigned, log.limits), AppendOrigin.COORDINATOR)
        place_batches(self, chunk.data, table)
        for aborted in log.producers.apply(prepared):
            log.note_aborted(aborted)


def _by_producer(table: BatchTable) -> Iterator[BatchTable]:
    """Each batch of a producer by itself, and those between two of them together."""
    first = 0
    for row in np.nonzero(table[:, PRODUCER_ID] >= 0)[0].tolist():
        if row > first:
            yield table[first:row]
        yield table[row : row + 1]
        first = row + 1
    if first < len(table):
        yield table[first:]

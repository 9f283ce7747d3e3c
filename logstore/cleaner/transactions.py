"""What compaction knows of transactions while it goes through a log in order.

Data of aborted transactions goes at once; a marker goes when no batch of its transaction was met any more, and then
only after its delete horizon. Knows batch headers and marker kinds, never records of data.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from logstore.errors import CleaningAborted
from logstore.files import FileSystem
from logstore.limits import INT64_MAX
from logstore.records.control import ControlType, parse_control_record
from logstore.records.decoder import Decoder
from logstore.records.table import (
    ATTRIBUTES,
    CONTROL_BIT,
    LAST_OFFSET,
    MAGIC,
    PRODUCER_ID,
    SKIP,
    TRANSACTIONAL_BIT,
    BatchTable,
)
from logstore.segment.batches import Chunk
from logstore.segment.segment import LogSegment
from logstore.segment.txn_index import AbortedTransaction

if TYPE_CHECKING:
    from logstore.cleaner.work import PassWork


def find_transactions(fs: FileSystem, work: PassWork, *, stopping: Callable[[], bool] = lambda: False) -> bool:
    """Whether a pass meets any batch of a transaction; what an earlier one found to have none is not read again.

    A log that was imported, or that has idempotent producers, may have none although its state does not say so. Raises
    CorruptBatch, CleaningAborted.
    """
    for source in work.segments:
        if work.clean_part_plain and work.following(source) <= work.first_dirty_offset:
            continue
        segment = LogSegment(fs, work.directory, source.base_offset, limits=work.limits)
        try:
            for chunk in segment.chunks(0, source.size_bytes, verify_crc=False):
                if stopping():
                    raise CleaningAborted("the run was stopped", partition=work.partition)
                table = chunk.table
                if ((table[:, MAGIC] == 2) & (table[:, ATTRIBUTES] & (CONTROL_BIT | TRANSACTIONAL_BIT) != 0)).any():
                    return True
        finally:
            segment.close(clean=False)
    return False


class Transactions:
    """Fed with every transactional or control batch of a log, in order."""

    def __init__(self) -> None:
        self._waiting: list[
            tuple[int, int, AbortedTransaction]
        ] = []  # by first offset, then in the order they were added
        self._told = 0
        self._aborted: dict[int, AbortedTransaction] = {}
        self._aborted_with_batches: set[int] = set()
        self._committed_with_batches: set[int] = set()

    def add(self, aborted: Iterable[AbortedTransaction]) -> None:
        """Aborted transactions that overlap what comes next; one may be added several times."""
        for txn in aborted:
            self._told += 1
            heapq.heappush(self._waiting, (txn.first_offset, self._told, txn))

    def read(
        self, chunk: Chunk, table: BatchTable, decoder: Decoder
    ) -> tuple[npt.NDArray[np.bool_], list[AbortedTransaction]]:
        """Which batches of the chunk may go, and the index entries of markers that must stay. Raises CorruptBatch."""
        may_go = np.zeros(len(table), dtype=bool)
        entries: list[AbortedTransaction] = []
        special = (table[:, MAGIC] == 2) & ((table[:, ATTRIBUTES] & (CONTROL_BIT | TRANSACTIONAL_BIT)) != 0)
        for row in np.nonzero(special)[0].tolist():
            producer_id, last_offset = int(table[row, PRODUCER_ID]), int(table[row, LAST_OFFSET])
            if not int(table[row, ATTRIBUTES]) & CONTROL_BIT:
                may_go[row] = self.data_batch(producer_id, last_offset)
                continue
            kind = _marker_kind(chunk, table[row : row + 1].copy(), decoder)
            may_go[row], entry = self.control_batch(kind, producer_id, last_offset)
            if entry is not None:
                entries.append(entry)
        return may_go, entries

    def data_batch(self, producer_id: int, last_offset: int) -> bool:
        """A transactional data batch; True when its transaction was aborted."""
        self._open_up_to(last_offset)
        if producer_id in self._aborted:
            self._aborted_with_batches.add(producer_id)
            return True
        self._committed_with_batches.add(producer_id)
        return False

    def control_batch(
        self, kind: ControlType | None, producer_id: int, last_offset: int
    ) -> tuple[bool, AbortedTransaction | None]:
        """A control batch (`kind` None: emptied); whether it may go, and the index entry that must stay with it."""
        self._open_up_to(last_offset)
        if kind is None:
            return True, None
        if kind is ControlType.ABORT:
            txn = self._aborted.pop(producer_id, None)
            if txn is None or producer_id not in self._aborted_with_batches:
                return True, None
            self._aborted_with_batches.discard(producer_id)
            return False, txn
        if kind is ControlType.COMMIT:
            seen = producer_id in self._committed_with_batches
            self._committed_with_batches.discard(producer_id)
            return not seen, None
        return False, None

    def _open_up_to(self, offset: int) -> None:
        while self._waiting and self._waiting[0][0] <= offset:
            _, _, txn = heapq.heappop(self._waiting)
            if txn.producer_id not in self._aborted:
                self._aborted[txn.producer_id] = txn
                self._aborted_with_batches.discard(txn.producer_id)


def _marker_kind(chunk: Chunk, row: BatchTable, decoder: Decoder) -> ControlType | None:
    """What a control batch says; None when it was emptied."""
    row[:, SKIP] = 0
    last = decoder.open(chunk.data, row, 0, file=chunk.file, base_position=chunk.position)
    for record in decoder.decode(row, 0, last, 0, INT64_MAX, chunk.file, chunk.position).records():
        return parse_control_record(record).kind
    return None

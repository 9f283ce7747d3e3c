"""From batches to what producer state needs of them: data batches with a producer id, and transaction markers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from logstore.errors import CorruptBatch
from logstore.limits import Limits
from logstore.partition.producer_state import AppendOrigin, EndTransaction, ProducerBatch
from logstore.partition.producer_state_manager import ProducerStateManager
from logstore.records.control import ControlType, parse_control_record
from logstore.records.decoder import Decoder
from logstore.records.header import BatchHeader
from logstore.records.scan import scan_batches
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_SEQUENCE,
    CONTROL_BIT,
    COUNT,
    LAST_OFFSET,
    MAX_TIMESTAMP,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    SKIP,
    TRANSACTIONAL_BIT,
    BatchTable,
)
from logstore.segment.segment import LogSegment


def producer_entries(
    data: npt.NDArray[np.uint8], table: BatchTable, limits: Limits
) -> Iterator[ProducerBatch | EndTransaction]:
    """Entries in log order; batches without a producer id give none, nor do emptied control batches."""
    for row in np.nonzero(table[:, PRODUCER_ID] >= 0)[0].tolist():
        entry = _entry(data, table[row : row + 1], limits)
        if entry is not None:
            yield entry


def producer_entry(segment: LogSegment, header: BatchHeader, limits: Limits) -> ProducerBatch | EndTransaction | None:
    """The same for one batch in a file; only a marker is read beyond its header."""
    if header.producer_id < 0 or header.base_offset is None:
        return None
    if not header.control:
        return ProducerBatch(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.last_sequence,
            header.base_offset,
            header.last_offset,
            header.max_timestamp_ms,
            header.transactional,
        )
    if header.size_bytes > limits.read_buffer_bytes:
        raise CorruptBatch(
            f"a control batch of {header.size_bytes} bytes",
            file=segment.log.path,
            position=header.position,
            offset=header.base_offset,
        )
    data = np.frombuffer(segment.log.pread(header.size_bytes, header.position), dtype=np.uint8)
    scan = scan_batches(data, verify_crc=False)
    return _entry(data, scan.table, limits) if len(scan.table) else None


def replay(producers: ProducerStateManager, segment: LogSegment, start: int, end_offset: int, limits: Limits) -> None:
    """Take the batches of a segment from `start` up to `end_offset` into the state, by their headers."""
    first = segment.find_batch(start)
    for header in segment.headers(first.position) if first is not None else ():
        if header.last_offset >= end_offset:
            break
        entry = producer_entry(segment, header, limits)
        if entry is not None and header.last_offset >= start:
            producers.apply(producers.prepare([entry], AppendOrigin.RECOVERY))


def _entry(data: npt.NDArray[np.uint8], row: BatchTable, limits: Limits) -> ProducerBatch | EndTransaction | None:
    batch = row[0]
    attributes = int(batch[ATTRIBUTES])
    producer_id, epoch = int(batch[PRODUCER_ID]), int(batch[PRODUCER_EPOCH])
    if attributes & CONTROL_BIT:
        if int(batch[COUNT]) == 0:
            return None
        row = row.copy()
        row[:, SKIP] = 0
        for columns in Decoder(limits=limits, control=True).columns(data, row):
            for record in columns.records():
                marker = parse_control_record(record)
                if marker.kind not in (ControlType.ABORT, ControlType.COMMIT):
                    return None
                commit = marker.kind is ControlType.COMMIT
                return EndTransaction(
                    producer_id, epoch, record.offset, record.timestamp_ms, commit, marker.coordinator_epoch
                )
        return None
    base, last = int(batch[BASE_OFFSET]), int(batch[LAST_OFFSET])
    sequence = int(batch[BASE_SEQUENCE])
    last_sequence = -1 if sequence < 0 else (sequence + last - base) & 0x7FFFFFFF
    transactional = bool(attributes & TRANSACTIONAL_BIT)
    return ProducerBatch(
        producer_id, epoch, sequence, last_sequence, base, last, int(batch[MAX_TIMESTAMP]), transactional
    )

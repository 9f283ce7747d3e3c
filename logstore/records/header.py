"""One batch header at a time, without kernels: for seeking in a file and for tools.

baseOffset:8 batchLength:4 leaderEpoch:4 magic:1 crc:4 attributes:2 lastOffsetDelta:4 baseTimestamp:8 maxTimestamp:8
producerId:8 producerEpoch:2 baseSequence:4 recordsCount:4
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from logstore.errors import CorruptBatch
from logstore.files import File
from logstore.limits import INT64_MAX
from logstore.records.record import NO_TIMESTAMP, TimestampType
from logstore.records.table import (
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_BYTES,
    LEGACY_OVERHEAD_MIN,
    LEGACY_V1_BYTES_MIN,
    PREFIX_BYTES,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
)

HEADER = struct.Struct(">qiibIhiqqqhii")
_LEGACY = struct.Struct(">qiIbb")
_INT64 = struct.Struct(">q")
_READABLE_MIN = 18  # Kafka's reader stops where fewer bytes are left

assert HEADER.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """A header with the position it was found at. `base_offset` is None for legacy batches: only opening them tells."""

    position: int
    size_bytes: int
    magic: int
    base_offset: int | None
    last_offset: int
    leader_epoch: int
    crc: int
    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int | None

    @property
    def begin_offset(self) -> int:
        """The first offset as far as the header says: a legacy one only has its last."""
        return self.last_offset if self.base_offset is None else self.base_offset

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes

    @property
    def codec_id(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def timestamp_type(self) -> TimestampType:
        return TimestampType.LOG_APPEND_TIME if self.attributes & TIMESTAMP_TYPE_BIT else TimestampType.CREATE_TIME

    @property
    def transactional(self) -> bool:
        return self.magic == 2 and bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def control(self) -> bool:
        return self.magic == 2 and bool(self.attributes & CONTROL_BIT)

    @property
    def delete_horizon_ms(self) -> int | None:
        return self.base_timestamp_ms if self.magic == 2 and self.attributes & DELETE_HORIZON_BIT else None

    @property
    def last_sequence(self) -> int:
        if self.base_sequence < 0 or self.base_offset is None:
            return -1
        return (self.base_sequence + self.last_offset - self.base_offset) & 0x7FFFFFFF


def read_header(file: File, position: int, end: int) -> BatchHeader | None:
    """The header at `position`; None when no whole batch lies before `end`. Raises CorruptBatch."""
    if end - position < _READABLE_MIN:
        return None
    data = file.pread(min(HEADER_BYTES, end - position), position)
    if len(data) < _READABLE_MIN:
        return None
    return parse_header(data, position, end, file=file.path)


def parse_header(data: bytes, position: int, end: int, *, file: str | None = None) -> BatchHeader | None:
    """Like `read_header`, from at least 18 bytes already read at `position`."""
    offset, length, word, magic, _ = _LEGACY.unpack_from(data)
    size = length + PREFIX_BYTES
    # The same rules in the same order as the scan kernel's: a seek and a scan must agree on what a batch is.
    if length < LEGACY_OVERHEAD_MIN:
        raise CorruptBatch(f"the batch length {length} is impossible", file=file, position=position)
    if not 0 <= magic <= 2:
        raise CorruptBatch(f"the magic byte is {magic}, not 0, 1 or 2", file=file, position=position)
    if size < (LEGACY_OVERHEAD_MIN + PREFIX_BYTES, LEGACY_V1_BYTES_MIN, HEADER_BYTES)[magic]:
        raise CorruptBatch(f"the batch length {length} is impossible", file=file, position=position)
    if position + size > end or len(data) < (_READABLE_MIN, _READABLE_MIN + _INT64.size, HEADER_BYTES)[magic]:
        return None
    if not 0 <= offset < INT64_MAX:  # the offset after the last one must exist, too
        raise CorruptBatch(f"the batch's offset is {offset}", file=file, position=position)
    if magic < 2:
        timestamp = _INT64.unpack_from(data, 18)[0] if magic == 1 else NO_TIMESTAMP
        attributes = data[17]
        return BatchHeader(
            position, size, magic, None, offset, -1, word, attributes, timestamp, timestamp, -1, -1, -1, None
        )
    (base, _, epoch, _, crc, attributes, delta, base_ts, max_ts, producer, producer_epoch, sequence, count) = (
        HEADER.unpack_from(data)
    )
    if delta < 0 or count < 0 or base + delta >= INT64_MAX:
        raise CorruptBatch(
            "the batch's offsets or record count are impossible", file=file, position=position, offset=base
        )
    return BatchHeader(
        position,
        size,
        2,
        base,
        base + delta,
        epoch,
        crc,
        attributes,
        base_ts,
        max_ts,
        producer,
        producer_epoch,
        sequence,
        count,
    )

"""Messages of the formats before record batches, magic 0 and 1: read only.

One message on disk is either one record or a wrapper, whose value is a compressed run of messages. Owns their layout
and the rules by which a wrapper's records get their offsets and timestamps. Never writes them, and reads no format 2.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from logstore.errors import BufferLimit, CorruptBatch, DecompressionLimit, UnsupportedFormat
from logstore.records.compression import codec_by_id
from logstore.records.compression.codec import byte_view
from logstore.records.record import NO_TIMESTAMP, Record, TimestampType

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from logstore.limits import Limits

# message := int64 offset, int32 size of the rest, uint32 crc, int8 magic, int8 attributes, [int64 timestamp: magic 1],
#            int32 key length, key, int32 value length, value; a length of -1 is null
PREFIX = struct.Struct(">qiIbB")
TIMESTAMP = struct.Struct(">q")
LENGTH = struct.Struct(">i")
SIZE_COUNTS_FROM = 12
CRC_COVERS_FROM = 16
#: bytes before the key length, by magic
HEADER_BYTES = (PREFIX.size, PREFIX.size + TIMESTAMP.size)
NULL_LENGTH = -1

CODEC_MASK = 0x07
LOG_APPEND_TIME_BIT = 0x08
#: zstd came with format 2
CODEC_ID_MAX = 3

#: what one message of a wrapper is assumed to take in memory; the smallest has 26 bytes
MESSAGE_MEMORY_BYTES = 512


class LegacyHeader(NamedTuple):
    """What comes before a message's key; `offset` is the last one of a wrapper."""

    offset: int
    size_bytes: int
    magic: int
    attributes: int
    crc: int
    timestamp: int

    @property
    def codec_id(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def timestamp_type(self) -> TimestampType:
        stamped = self.magic > 0 and self.attributes & LOG_APPEND_TIME_BIT
        return TimestampType.LOG_APPEND_TIME if stamped else TimestampType.CREATE_TIME


@dataclass(frozen=True, slots=True)
class LegacyBatch:
    """One message on disk with the records in it.

    `last_offset` and `max_timestamp_ms` are the header's, as for Kafka. Some clients left a wrapper's offset 0; then,
    and only then, records lie above `last_offset`.
    """

    size_bytes: int
    magic: int
    codec_id: int
    timestamp_type: TimestampType
    first_offset: int
    last_offset: int
    max_timestamp_ms: int
    crc: int
    records: tuple[Record, ...]


def decode_legacy(
    data: Buffer, *, limits: Limits, verify_crc: bool = True, verify_inner_crc: bool = False
) -> LegacyBatch:
    """Decodes the message at the start of `data`; what follows it is left alone.

    Raises CorruptBatch, UnsupportedFormat for another magic or codec, BufferLimit and DecompressionLimit for what is
    larger than `limits`. Positions count from the start of `data`.
    """
    view = byte_view(data)
    header = _read_header(view, 0)
    if header.size_bytes > limits.batch_bytes:
        raise BufferLimit(
            f"a message of {header.size_bytes} bytes is above the limit of {limits.batch_bytes} bytes",
            position=0,
            offset=header.offset,
        )
    key, value, value_at = _read_key_value(view, 0, header, verify_crc=verify_crc)
    if header.codec_id:
        records = _unwrap(header, value, value_at, limits=limits, verify_inner_crc=verify_inner_crc)
    else:
        records = (_record(header, header.offset, header.timestamp, header.timestamp_type, key, value),)
    return LegacyBatch(
        size_bytes=header.size_bytes,
        magic=header.magic,
        codec_id=header.codec_id,
        timestamp_type=header.timestamp_type,
        first_offset=records[0].offset,
        last_offset=header.offset,
        max_timestamp_ms=header.timestamp,
        crc=header.crc,
        records=records,
    )


def absolute_base_offset(magic: int, wrapper_offset: int, last_inner_offset: int) -> int:
    """What to add to the inner offsets of a wrapper. Raises CorruptBatch when the two offsets contradict each other.

    Format 0 stores absolute offsets. Format 1 counts them from the wrapper's first record, and the wrapper has the last
    record's; compaction leaves gaps, so only the last inner offset tells where counting began. An offset of 0 was never
    assigned.
    """
    if magic == 0 or wrapper_offset == 0:
        return 0
    if wrapper_offset < last_inner_offset:
        raise CorruptBatch(f"wrapper offset is below the offset {last_inner_offset} of its last message")
    return wrapper_offset - last_inner_offset


def _read_header(view: memoryview, start: int) -> LegacyHeader:
    if len(view) - start < PREFIX.size:
        raise CorruptBatch("message is cut short in its header", position=start)
    offset, size, crc, magic, attributes = PREFIX.unpack_from(view, start)
    if not 0 <= magic < len(HEADER_BYTES):
        raise UnsupportedFormat(f"message format {magic} is not a legacy one", position=start, offset=offset)
    header_bytes = HEADER_BYTES[magic]
    if offset < 0:
        raise CorruptBatch(f"message offset {offset} is negative", position=start)
    if size + SIZE_COUNTS_FROM < header_bytes + 2 * LENGTH.size:
        raise CorruptBatch(f"message size {size} is below what format {magic} needs", position=start, offset=offset)
    timestamp = NO_TIMESTAMP
    if magic:
        if len(view) - start < header_bytes:
            raise CorruptBatch("message is cut short in its header", position=start, offset=offset)
        (timestamp,) = TIMESTAMP.unpack_from(view, start + PREFIX.size)
        if timestamp < NO_TIMESTAMP:
            raise CorruptBatch(f"message timestamp {timestamp} is negative", position=start, offset=offset)
    return LegacyHeader(offset, size + SIZE_COUNTS_FROM, magic, attributes, crc, timestamp)


def _read_key_value(
    view: memoryview, start: int, header: LegacyHeader, *, verify_crc: bool
) -> tuple[memoryview | None, memoryview | None, int]:
    """Returns key, value and the value's position of the message at `start`, which they must fill exactly."""
    end = start + header.size_bytes
    if end > len(view):
        raise CorruptBatch(
            f"message of {header.size_bytes} bytes where {len(view) - start} are left",
            position=start,
            offset=header.offset,
        )
    if verify_crc and (computed := zlib.crc32(view[start + CRC_COVERS_FROM : end])) != header.crc:
        raise CorruptBatch(
            f"message checksum {header.crc:#010x} does not match the content's {computed:#010x}",
            position=start,
            offset=header.offset,
        )
    # The value's length comes last of the fixed fields, so the key must leave room for it.
    key, position = _read_bytes(view, start + HEADER_BYTES[header.magic], end - LENGTH.size, header.offset)
    value_at = position + LENGTH.size
    value, position = _read_bytes(view, position, end, header.offset)
    if position != end:
        raise CorruptBatch(
            f"message has {end - position} bytes after its value", position=position, offset=header.offset
        )
    return key, value, value_at


def _read_bytes(view: memoryview, position: int, end: int, offset: int) -> tuple[memoryview | None, int]:
    (length,) = LENGTH.unpack_from(view, position)
    start = position + LENGTH.size
    if length == NULL_LENGTH:
        return None, start
    if not 0 <= length <= end - start:
        raise CorruptBatch(f"length {length} where {end - start} bytes are left", position=position, offset=offset)
    return view[start : start + length], start + length


def _unwrap(
    wrapper: LegacyHeader, value: memoryview | None, value_at: int, *, limits: Limits, verify_inner_crc: bool
) -> tuple[Record, ...]:
    """The records inside a wrapper; errors name the wrapper's place, since the inner messages have none on disk."""
    try:
        codec = codec_by_id(wrapper.codec_id)
        if wrapper.codec_id > CODEC_ID_MAX:
            raise CorruptBatch(f"{codec.name} does not exist in message format {wrapper.magic}")
        if value is None:
            raise CorruptBatch("compressed message without a value")
        payload = codec.decompress(value, limit=limits.decompressed_bytes, magic=wrapper.magic)
    except (CorruptBatch, DecompressionLimit, UnsupportedFormat) as error:
        error.at(position=value_at + (error.position or 0), offset=wrapper.offset)
        raise
    try:
        return _inner_records(
            wrapper,
            memoryview(payload),
            messages_max=limits.decompressed_bytes // MESSAGE_MEMORY_BYTES,
            verify_inner_crc=verify_inner_crc,
        )
    except DecompressionLimit as error:
        error.at(position=value_at, offset=wrapper.offset)
        raise
    except (CorruptBatch, UnsupportedFormat) as error:
        inner = "" if error.position is None else f" (byte {error.position} of the decompressed messages)"
        raise CorruptBatch(f"{error.what}{inner}", position=value_at, offset=wrapper.offset) from None


def _inner_records(
    wrapper: LegacyHeader, payload: memoryview, *, messages_max: int, verify_inner_crc: bool
) -> tuple[Record, ...]:
    last_offset = _check_messages(payload, messages_max, verify_inner_crc)
    base_offset = absolute_base_offset(wrapper.magic, wrapper.offset, last_offset)
    stamped = wrapper.timestamp_type is TimestampType.LOG_APPEND_TIME
    records = []
    position = 0
    while position < len(payload):
        header = _read_header(payload, position)
        key, value, _ = _read_key_value(payload, position, header, verify_crc=False)
        timestamp_ms = wrapper.timestamp if stamped else header.timestamp
        offset = base_offset + header.offset
        records.append(_record(header, offset, timestamp_ms, wrapper.timestamp_type, key, value))
        position += header.size_bytes
    return tuple(records)


def _check_messages(payload: memoryview, messages_max: int, verify_crc: bool) -> int:
    """The last message's offset; raises for any malformed one before the first is kept."""
    count, position, previous_offset = 0, 0, -1
    while position < len(payload):
        header = _read_header(payload, position)
        if count >= messages_max:
            raise DecompressionLimit(
                f"more than {messages_max} messages in a compressed one",
                hint="Raise the limit on decompressed bytes if the data is trusted",
            )
        if header.codec_id:
            raise CorruptBatch("compressed message inside a compressed one", position=position)
        if header.offset <= previous_offset:
            raise CorruptBatch(f"offset {header.offset} follows {previous_offset}", position=position)
        _read_key_value(payload, position, header, verify_crc=verify_crc)
        count, previous_offset = count + 1, header.offset
        position += header.size_bytes
    if not count:
        raise CorruptBatch("compressed message with no messages inside")
    return previous_offset


def _record(
    header: LegacyHeader,
    offset: int,
    timestamp_ms: int,
    timestamp_type: TimestampType,
    key: memoryview | None,
    value: memoryview | None,
) -> Record:
    return Record(
        key=None if key is None else bytes(key),
        value=None if value is None else bytes(value),
        timestamp_ms=timestamp_ms if header.magic else NO_TIMESTAMP,
        offset=offset,
        timestamp_type=timestamp_type,
    )

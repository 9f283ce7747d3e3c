"""A plain-Python twin of every kernel: the same question, the same answer, written for reading rather than speed.

A twin works on bytes and lists where its kernel works on addresses. A row of the batch table is a list in the table's
order; its payload address is counted from the start of the buffer it lies in. Integers wrap at 64 bits, as Java's do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import wire

from logstore.records import codes, table

INT64_MAX = (1 << 63) - 1
Row = list[int]


def int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def int32(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


# --- checksums --------------------------------------------------------------------------------------------------------


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


CRC_OF_BYTE = [_crc_of_byte(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_OF_BYTE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


crc32c_striped = crc32c_tables = crc32c


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Everything the encode kernel is told, as plain values."""

    keys: list[bytes | None]
    values: list[bytes | None]
    timestamps: list[int | None] | None = None
    headers: list[list[wire.Header] | None] | None = None
    offset_deltas: list[int] | None = None
    selection: list[int] | None = None
    start: int = 0
    default_timestamp: int = -1
    batch_bytes: int = 16384
    batch_records: int = 1 << 31
    out_capacity: int = 1 << 20
    table_capacity: int = 1000
    attributes: int = 0
    leader_epoch: int = -1
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    base_offset: int = 0
    delete_horizon: int = 0


@dataclass
class Encoded:
    code: int
    data: bytes
    table: list[Row]
    row: int
    base_offset: int
    base_sequence: int


def encode(given: Rows) -> Encoded:
    order = given.selection if given.selection is not None else range(len(given.keys))
    out = b""
    rows: list[Row] = []
    i, base_offset, sequence = given.start, given.base_offset, given.base_sequence
    while i < len(order):
        if len(rows) == given.table_capacity:
            return Encoded(codes.FULL, out, rows, i, base_offset, sequence)
        payload = b""
        count = base_ts = max_ts = delta = 0
        while i + count < len(order) and count < given.batch_records:
            row = order[i + count]
            timestamp = given.timestamps[row] if given.timestamps is not None else None
            timestamp = given.default_timestamp if timestamp is None else timestamp
            if count == 0:
                base_ts = given.delete_horizon if given.attributes & 0x40 else timestamp
                max_ts = timestamp
            next_delta = given.offset_deltas[row] if given.offset_deltas is not None else count
            encoded = wire.record(
                given.keys[row],
                given.values[row],
                timestamp_delta=int64(timestamp - base_ts),
                offset_delta=next_delta,
                headers=(given.headers[row] if given.headers is not None else None) or (),
            )
            if count and 61 + len(payload) + len(encoded) > given.batch_bytes:
                break
            if len(out) + 61 + len(payload) + len(encoded) > given.out_capacity:
                return Encoded(codes.FULL, out, rows, i, base_offset, sequence)
            payload += encoded
            max_ts = max(max_ts, timestamp)
            delta = next_delta
            count += 1
        batch = wire.batch(
            payload,
            count=count,
            base_offset=base_offset,
            last_offset_delta=delta,
            attributes=given.attributes,
            base_timestamp=base_ts,
            max_timestamp=max_ts,
            leader_epoch=given.leader_epoch,
            producer_id=given.producer_id,
            producer_epoch=given.producer_epoch,
            base_sequence=sequence,
        )
        crc = crc32c(batch[21:])
        if given.attributes & 7:  # the checksum of what is yet to be compressed is not written
            batch, crc = batch[:17] + bytes(4) + batch[21:], 0
        place_, offsets = [len(out), len(batch)], [base_offset, int64(base_offset + delta)]
        producer = [given.producer_id, given.producer_epoch, sequence]
        rows.append(
            [*place_, *offsets, given.leader_epoch, 2, given.attributes, base_ts, max_ts, *producer, count, crc]
        )
        rows[-1] += [len(out) + 61, len(payload), 0]
        out += batch
        i += count
        base_offset = int64(base_offset + delta + 1)
        if sequence >= 0:
            sequence = (sequence + delta + 1) % (1 << 31)
    return Encoded(codes.OK, out, rows, i, base_offset, sequence)


def finish_batch(batch: bytes) -> tuple[bytes, int]:
    sized = batch[:8] + struct.pack(">i", len(batch) - 12) + batch[12:]
    crc = crc32c(sized[21:])
    return sized[:17] + struct.pack(">I", crc) + sized[21:], crc


# --- scanning ---------------------------------------------------------------------------------------------------------


@dataclass
class Scanned:
    code: int
    table: list[Row]
    next_position: int


def scan(data: bytes, *, start: int, capacity: int, verify: bool) -> Scanned:
    rows: list[Row] = []
    position = start
    while position < len(data):
        if len(rows) == capacity:
            return Scanned(codes.FULL, rows, position)
        row = _scan_one(data, position, verify)
        if isinstance(row, int):
            return Scanned(row, rows, position)
        rows.append(row)
        position += row[table.SIZE]
    return Scanned(codes.OK, rows, position)


def _scan_one(data: bytes, position: int, verify: bool) -> Row | int:
    left = len(data) - position
    if left < 18:
        return codes.PARTIAL
    offset, length, word, magic, attributes = struct.unpack_from(">qiIbB", data, position)
    size = length + 12
    if length < 14:
        return codes.BAD_LENGTH
    if magic not in (0, 1, 2):
        return codes.BAD_MAGIC
    if size < (26, 34, 61)[magic]:
        return codes.BAD_LENGTH
    if size > left:
        return codes.PARTIAL
    if not 0 <= offset < INT64_MAX:
        return codes.BAD_OFFSET
    if magic < 2:
        timestamp = struct.unpack_from(">q", data, position + 18)[0] if magic else -1
        return [position, size, -1, offset, -1, magic, attributes, timestamp, timestamp, -1, -1, -1, -1, word, 0, 0, 0]
    (_, _, epoch, _, crc, attributes, delta, base_ts, max_ts, pid, producer_epoch, sequence, count) = (
        wire.HEADER.unpack_from(data, position)
    )
    if verify and crc != crc32c(data[position + 21 : position + size]):
        return codes.BAD_CRC
    if delta < 0 or offset + delta >= INT64_MAX:
        return codes.BAD_OFFSET
    if count < 0 or (attributes & 7 == 0 and count > (size - 61) // 7):
        return codes.BAD_COUNT
    row = [position, size, offset, offset + delta, epoch, 2, attributes, base_ts, max_ts, pid, producer_epoch, sequence]
    return [*row, count, crc, position + 61, size - 61, 0]


# --- reading records --------------------------------------------------------------------------------------------------


class Malformed(Exception):
    pass


@dataclass
class Parsed:
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    value: bytes | None
    header_count: int
    #: reading them is a step of its own, since it can fail after the room for them was found too small
    headers: Callable[[], list[wire.Header]]


class Cursor:
    """Reads within [0, len(data)); anything that does not fit is Malformed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def varint(self, bytes_max: int = 5) -> int:
        bits = 0
        for i in range(bytes_max):
            byte = self.take(1)[0]
            bits |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                bits %= 1 << (32 if bytes_max == 5 else 64)
                return bits >> 1 ^ -(bits & 1)
        raise Malformed

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Malformed
        self.at += size
        return self.data[self.at - size : self.at]

    def field(self) -> bytes | None:
        length = self.varint()
        return None if length < 0 else self.take(length)


def parse_record(cursor: Cursor) -> Parsed:
    length = cursor.varint()
    if length < 1:
        raise Malformed
    body = Cursor(cursor.take(length))
    body.take(1)
    timestamp_delta, offset_delta = body.varint(10), body.varint()
    key, value = body.field(), body.field()
    count = body.varint()
    if count < 0 or 2 * count > body.left or (count == 0 and body.left):
        raise Malformed

    def headers() -> list[wire.Header]:
        found = []
        for _ in range(count):
            name = body.field()
            if name is None:
                raise Malformed
            found.append((name, body.field()))
        if body.left:
            raise Malformed
        return found

    return Parsed(timestamp_delta, offset_delta, key, value, count, headers)


@dataclass
class Decoded:
    """Records in the order they were read; `batch` is the one to blame, or the end."""

    code: int = codes.OK
    batch: int = 0
    offsets: list[int] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    timestamp_types: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[list[wire.Header]] = field(default_factory=list)


def decode(
    rows: Sequence[Row],
    payloads: Sequence[bytes],
    first: int,
    last: int,
    *,
    min_offset: int,
    max_offset: int,
    header_capacity: int,
    keep: Sequence[int] | None = None,
) -> Decoded:
    """`payloads[i]` are the records of row i. A header capacity below zero: headers are checked, not kept. With `keep`
    only records whose flag is set count; there is one for each record of the batches that are not skipped.
    """
    result = Decoded()
    flags = iter(keep) if keep is not None else None
    for b in range(first, last):
        result.batch = b
        row = rows[b]
        if row[table.SKIP]:
            continue
        stamped = row[table.ATTRIBUTES] & 8
        cursor = Cursor(payloads[b])
        previous = -1
        try:
            for _ in range(row[table.COUNT]):
                record = parse_record(cursor)
                offset = row[table.BASE_OFFSET] + record.offset_delta
                if not previous < record.offset_delta or offset > row[table.LAST_OFFSET]:
                    raise Malformed
                previous = record.offset_delta
                wanted = min_offset <= offset < max_offset
                if flags is not None:
                    wanted = bool(next(flags)) and wanted
                if wanted and 0 <= header_capacity < sum(map(len, result.headers)) + record.header_count:
                    result.code = codes.FULL
                    return result
                headers = record.headers()
                if wanted:
                    result.offsets.append(offset)
                    result.timestamps.append(
                        row[table.MAX_TIMESTAMP]
                        if stamped
                        else int64(row[table.BASE_TIMESTAMP] + record.timestamp_delta)
                    )
                    result.timestamp_types.append(1 if stamped else 0)
                    result.keys.append(record.key)
                    result.values.append(record.value)
                    result.headers.append(headers)
            if cursor.left:
                raise Malformed
        except Malformed:
            result.code = codes.BAD_RECORD
            return result
    result.batch = max(first, last)
    return result


# --- placing ----------------------------------------------------------------------------------------------------------


def stamp_append_time(buffer: bytes, rows: Sequence[Row], n: int, now_ms: int) -> tuple[bytes, list[Row]]:
    data = bytearray(buffer)
    stamped = [list(row) for row in rows]
    for row in stamped[:n]:
        at, end = row[table.POSITION], row[table.POSITION] + row[table.SIZE]
        row[table.ATTRIBUTES] |= 8
        row[table.MAX_TIMESTAMP] = now_ms
        struct.pack_into(">h", data, at + 21, row[table.ATTRIBUTES])
        struct.pack_into(">q", data, at + 35, now_ms)
        row[table.CRC] = crc32c(bytes(data[at + 21 : end]))
        struct.pack_into(">I", data, at + 17, row[table.CRC])
    return bytes(data), stamped


def set_max_timestamp(batch: bytes, row: Row, max_ts: int) -> tuple[bytes, Row]:
    changed = batch[:35] + struct.pack(">q", max_ts) + batch[43:]
    after = list(row)
    after[table.MAX_TIMESTAMP] = max_ts
    after[table.CRC] = crc32c(changed[21 : row[table.SIZE]])
    return changed[:17] + struct.pack(">I", after[table.CRC]) + changed[21:], after


@dataclass
class Segment:
    """The place kernel's view of a segment, before and after."""

    size: int = 0
    base_offset: int = 0
    next_offset: int = 0
    leader_epoch: int = -1
    max_ts: int = -1
    max_ts_offset: int = -1
    first_ts: int = -1
    created_ms: int = 0
    now_ms: int = 0
    bytes_since: int = 0
    index_entries: int = 0
    time_entries: int = 0
    last_time_ts: int = -1
    segment_bytes: int = 1 << 30
    max_segment_ms: int = INT64_MAX
    index_interval: int = 4096
    index_max: int = 1 << 40
    time_max: int = 1 << 40
    fresh: bool = False


@dataclass
class Placed:
    count: int
    reason: int
    index: bytes
    time_index: bytes
    buffer: bytes
    table: list[Row]


def place(buffer: bytes, rows: Sequence[Row], first: int, last: int, assign: bool, segment: Segment) -> Placed:
    """Changes `segment` to what it is afterwards."""
    data = bytearray(buffer)
    after = [list(row) for row in rows]
    index = time_index = b""
    for b in range(first, last):
        row = after[b]
        delta = row[table.LAST_OFFSET] - row[table.BASE_OFFSET]
        base = segment.next_offset if assign else row[table.BASE_OFFSET]
        end = int64(base + delta)
        reason = _roll(segment, row, end, fresh=segment.fresh and b == first)
        if reason != codes.OK:
            return Placed(b - first, reason, index, time_index, bytes(data), after)
        if assign:
            struct.pack_into(">q", data, row[table.POSITION], base)
            struct.pack_into(">i", data, row[table.POSITION] + 12, segment.leader_epoch)
            row[table.BASE_OFFSET], row[table.LAST_OFFSET] = base, end
            row[table.LEADER_EPOCH] = segment.leader_epoch
        time = row[table.MAX_TIMESTAMP]
        if segment.size == 0:
            segment.first_ts = time
        if time > segment.max_ts:
            segment.max_ts, segment.max_ts_offset = time, end
        if segment.bytes_since > segment.index_interval:
            index += struct.pack(">ii", end - segment.base_offset, int32(segment.size))
            segment.index_entries += 1
            if segment.max_ts > segment.last_time_ts:
                relative = int32(segment.max_ts_offset - segment.base_offset)
                time_index += struct.pack(">qi", segment.max_ts, relative)
                segment.time_entries += 1
                segment.last_time_ts = segment.max_ts
            segment.bytes_since = 0
        segment.bytes_since += row[table.SIZE]
        segment.size += row[table.SIZE]
        segment.next_offset = int64(end + 1)
    return Placed(max(last - first, 0), codes.OK, index, time_index, bytes(data), after)


def _roll(segment: Segment, row: Row, last_offset: int, *, fresh: bool) -> int:
    size, time = row[table.SIZE], row[table.MAX_TIMESTAMP]
    if size > segment.segment_bytes:
        return codes.ROLL_APPEND_TOO_LARGE
    if segment.size + size > segment.segment_bytes:
        return codes.ROLL_SIZE
    if segment.size:
        waited = time - segment.first_ts if segment.first_ts >= 0 else segment.now_ms - segment.created_ms
        if int64(waited) > segment.max_segment_ms:
            return codes.ROLL_TIME
    if not fresh and segment.index_entries >= segment.index_max:
        return codes.ROLL_INDEX_FULL
    if not fresh and segment.time_entries >= segment.time_max - 1:
        return codes.ROLL_TIME_INDEX_FULL
    if not 0 <= last_offset - segment.base_offset < 1 << 31:
        return codes.ROLL_OFFSET_OVERFLOW
    return codes.OK


# --- routing ----------------------------------------------------------------------------------------------------------


def murmur2(key: bytes) -> int:
    factor, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(key)
    whole = len(key) // 4 * 4
    for (k,) in struct.iter_unpack("<I", key[:whole]):
        k = k * factor & mask
        k = (k ^ k >> 24) * factor & mask
        h = h * factor & mask ^ k
    if whole < len(key):
        h = (h ^ int.from_bytes(key[whole:], "little")) * factor & mask
    h = (h ^ h >> 13) * factor & mask
    return h ^ h >> 15


@dataclass
class Routed:
    code: int
    bad_row: int = 0
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    selection: list[int] = field(default_factory=list)


def route(keys: Sequence[bytes | None], given: Sequence[int | None] | None, partitions: int, sticky: int) -> Routed:
    ids = []
    for row, key in enumerate(keys):
        asked = given[row] if given is not None else None
        if asked is not None:
            if not 0 <= asked < partitions:
                return Routed(codes.BAD_OFFSET, row)
            ids.append(asked)
        else:
            ids.append(sticky if key is None else (murmur2(key) & 0x7FFFFFFF) % partitions)
    groups = [[row for row, partition in enumerate(ids) if partition == p] for p in range(partitions)]
    starts = [sum(map(len, groups[:p])) for p in range(partitions + 1)]
    return Routed(codes.OK, 0, ids, starts, [row for group in groups for row in group])


# --- the offset map ---------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def siphash128(data: bytes, k0: int, k1: int, *, compressions: int, finalizations: int) -> tuple[int, int]:
    """SipHash-c-d with a result of 128 bits, as two unsigned numbers."""

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> 64 - bits) & _MASK

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = v[0] + v[1] & _MASK
            v[1] = rotated(v[1], 13) ^ v[0]
            v[0] = rotated(v[0], 32)
            v[2] = v[2] + v[3] & _MASK
            v[3] = rotated(v[3], 16) ^ v[2]
            v[0] = v[0] + v[3] & _MASK
            v[3] = rotated(v[3], 21) ^ v[0]
            v[2] = v[2] + v[1] & _MASK
            v[1] = rotated(v[1], 17) ^ v[2]
            v[2] = rotated(v[2], 32)

    k0, k1 = k0 & _MASK, k1 & _MASK
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    whole = len(data) // 8 * 8
    last = data[whole:] + bytes(7 - len(data) % 8) + bytes([len(data) % 256])
    for (word,) in struct.iter_unpack("<Q", data[:whole] + last):
        v[3] ^= word
        rounds(compressions)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(finalizations)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(finalizations)
    return low, v[0] ^ v[1] ^ v[2] ^ v[3]


def sip_hash(data: bytes, k0: int, k1: int) -> tuple[int, int]:
    return siphash128(data, k0, k1, compressions=1, finalizations=3)

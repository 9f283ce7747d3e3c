"""Bytes to the batch table: headers found, lengths and checksums proved."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_COUNT, BAD_CRC, BAD_LENGTH, BAD_MAGIC, BAD_OFFSET, FULL, OK, PARTIAL
from logstore.records.kernels.checksum import crc_of
from logstore.records.kernels.intrinsics import (
    INT64_MAX,
    jit,
    load8,
    load16,
    load32,
    load64,
    load_i8,
    load_slot,
    load_u32,
    store_slot,
)
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_SEQUENCE,
    BASE_TIMESTAMP,
    CODEC_MASK,
    COUNT,
    CRC,
    HEADER_BYTES,
    LAST_OFFSET,
    LEADER_EPOCH,
    LEGACY_OVERHEAD_MIN,
    LEGACY_V1_BYTES_MIN,
    MAGIC,
    MAX_TIMESTAMP,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    POSITION,
    PREFIX_BYTES,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    RECORD_BYTES_MIN,
    ROW_BYTES,
    SIZE,
    SKIP,
)


@jit
def scan(address, size, table, block):
    """Batch headers from S_START on into the table; S_NEXT is where it stopped.

    OK: everything consumed. PARTIAL: what is left is the beginning of a batch. FULL: the table is. Else what is wrong
    with the batch at S_NEXT. Legacy batches are listed with their last offset; their CRC and content are not looked
    at here.
    """
    capacity = load_slot(block, slots.S_CAPACITY)
    verify = load_slot(block, slots.S_VERIFY)
    position = load_slot(block, slots.S_START)
    n = 0
    code = OK
    while position < size:
        if n == capacity:
            code = FULL
            break
        left = size - position
        if left < PREFIX_BYTES + 6:  # Kafka's reader, too, stops where fewer than 18 bytes are left
            code = PARTIAL
            break
        batch = address + position
        length = load32(batch + 8)
        if length < LEGACY_OVERHEAD_MIN:
            code = BAD_LENGTH
            break
        total = length + PREFIX_BYTES
        magic = load_i8(batch + 16)
        if magic < 0 or magic > 2:
            code = BAD_MAGIC
            break
        if (magic == 2 and total < HEADER_BYTES) or (magic == 1 and total < LEGACY_V1_BYTES_MIN):
            code = BAD_LENGTH
            break
        if total > left:
            code = PARTIAL
            break
        base = load64(batch)
        if base < 0 or base == INT64_MAX:  # the offset after the last one must exist, too
            code = BAD_OFFSET
            break
        row = table + n * ROW_BYTES
        store_slot(row, POSITION, position)
        store_slot(row, SIZE, total)
        store_slot(row, MAGIC, magic)
        store_slot(row, SKIP, 0)
        if magic == 2:
            crc = load_u32(batch + 17)
            if verify != 0 and crc != crc_of(batch + 21, total - 21):
                code = BAD_CRC
                break
            attributes = load16(batch + 21)
            last_delta = load32(batch + 23)
            count = load32(batch + 57)
            payload = total - HEADER_BYTES
            if last_delta < 0 or base >= INT64_MAX - last_delta:
                code = BAD_OFFSET
                break
            if count < 0 or (attributes & CODEC_MASK == 0 and count * RECORD_BYTES_MIN > payload):
                code = BAD_COUNT
                break
            store_slot(row, BASE_OFFSET, base)
            store_slot(row, LAST_OFFSET, base + last_delta)
            store_slot(row, LEADER_EPOCH, load32(batch + 12))
            store_slot(row, ATTRIBUTES, attributes)
            store_slot(row, BASE_TIMESTAMP, load64(batch + 27))
            store_slot(row, MAX_TIMESTAMP, load64(batch + 35))
            store_slot(row, PRODUCER_ID, load64(batch + 43))
            store_slot(row, PRODUCER_EPOCH, load16(batch + 51))
            store_slot(row, BASE_SEQUENCE, load32(batch + 53))
            store_slot(row, COUNT, count)
            store_slot(row, CRC, crc)
            store_slot(row, PAYLOAD_ADDRESS, batch + HEADER_BYTES)
            store_slot(row, PAYLOAD_SIZE, payload)
        else:
            timestamp = -1
            if magic == 1:
                timestamp = load64(batch + 18)
            store_slot(row, BASE_OFFSET, -1)
            store_slot(row, LAST_OFFSET, base)
            store_slot(row, LEADER_EPOCH, -1)
            store_slot(row, ATTRIBUTES, load8(batch + 17))
            store_slot(row, BASE_TIMESTAMP, timestamp)
            store_slot(row, MAX_TIMESTAMP, timestamp)
            store_slot(row, PRODUCER_ID, -1)
            store_slot(row, PRODUCER_EPOCH, -1)
            store_slot(row, BASE_SEQUENCE, -1)
            store_slot(row, COUNT, -1)
            store_slot(row, CRC, load_u32(batch + 12))
            store_slot(row, PAYLOAD_ADDRESS, 0)
            store_slot(row, PAYLOAD_SIZE, 0)
        n += 1
        position += total
    store_slot(block, slots.S_N, n)
    store_slot(block, slots.S_NEXT, position)
    return code

"""Batches into a segment: offsets, append time, index entries, and where a roll is due."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import (
    OK,
    ROLL_APPEND_TOO_LARGE,
    ROLL_INDEX_FULL,
    ROLL_OFFSET_OVERFLOW,
    ROLL_SIZE,
    ROLL_TIME,
    ROLL_TIME_INDEX_FULL,
)
from logstore.records.kernels.checksum import crc_of
from logstore.records.kernels.intrinsics import (
    add_wrapping,
    jit,
    load_slot,
    store16,
    store32,
    store64,
    store_slot,
    sub_wrapping,
)
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    CRC,
    LAST_OFFSET,
    LEADER_EPOCH,
    MAX_TIMESTAMP,
    POSITION,
    ROW_BYTES,
    SIZE,
    TIMESTAMP_TYPE_BIT,
)


@jit
def stamp_append_time(buffer, table, n, now_ms):
    """Make CreateTime batches LogAppendTime at `now_ms`: attribute bit, max timestamp, CRC. Record deltas stay."""
    for b in range(n):
        row = table + b * ROW_BYTES
        batch = buffer + load_slot(row, POSITION)
        size = load_slot(row, SIZE)
        attributes = load_slot(row, ATTRIBUTES) | TIMESTAMP_TYPE_BIT
        store16(batch + 21, attributes)
        store64(batch + 35, now_ms)
        crc = crc_of(batch + 21, size - 21)
        store32(batch + 17, crc)
        store_slot(row, ATTRIBUTES, attributes)
        store_slot(row, MAX_TIMESTAMP, now_ms)
        store_slot(row, CRC, crc)
    return OK


@jit
def set_max_timestamp(batch, row, max_ts):
    """Correct a batch whose header claims another maximum than its records have."""
    store64(batch + 35, max_ts)
    crc = crc_of(batch + 21, load_slot(row, SIZE) - 21)
    store32(batch + 17, crc)
    store_slot(row, MAX_TIMESTAMP, max_ts)
    store_slot(row, CRC, crc)
    return OK


@jit
def place(buffer, table, first, last, assign, block):
    """Give batches [first, last) their offsets and leader epoch, and decide the index entries, until a roll is due.

    The rule of rolling is `partition.roll.roll_reason`, the rule of indexing log-format's: both are applied batch by
    batch, as if each were an append of its own. Returns the number of batches placed; A_SIZE and the rest of the
    block are the segment's state after them. A_REASON says why it stopped: OK at the end, or a ROLL_ code.
    """
    size = load_slot(block, slots.A_SIZE)
    base = load_slot(block, slots.A_BASE_OFFSET)
    next_offset = load_slot(block, slots.A_NEXT_OFFSET)
    epoch = load_slot(block, slots.A_EPOCH)
    max_ts = load_slot(block, slots.A_MAX_TS)
    max_ts_offset = load_slot(block, slots.A_MAX_TS_OFFSET)
    first_ts = load_slot(block, slots.A_FIRST_TS)
    created_ms = load_slot(block, slots.A_CREATED_MS)
    now_ms = load_slot(block, slots.A_NOW_MS)
    bytes_since = load_slot(block, slots.A_BYTES_SINCE)
    entries = load_slot(block, slots.A_INDEX_ENTRIES)
    time_entries = load_slot(block, slots.A_TIME_ENTRIES)
    last_time_ts = load_slot(block, slots.A_LAST_TIME_TS)
    segment_bytes = load_slot(block, slots.A_SEGMENT_BYTES)
    max_segment_ms = load_slot(block, slots.A_MAX_SEGMENT_MS)
    interval = load_slot(block, slots.A_INDEX_INTERVAL)
    entries_max = load_slot(block, slots.A_INDEX_MAX)
    time_entries_max = load_slot(block, slots.A_TIME_MAX)
    index_out = load_slot(block, slots.A_INDEX_OUT)
    time_out = load_slot(block, slots.A_TIME_OUT)
    fresh = load_slot(block, slots.A_FRESH) != 0
    index_n = 0
    time_n = 0
    reason = OK
    b = first
    while b < last:
        row = table + b * ROW_BYTES
        batch_size = load_slot(row, SIZE)
        batch_max_ts = load_slot(row, MAX_TIMESTAMP)
        batch_base = load_slot(row, BASE_OFFSET)
        last_delta = load_slot(row, LAST_OFFSET) - batch_base
        if assign != 0:
            batch_base = next_offset
        last_offset = add_wrapping(batch_base, last_delta)
        if batch_size > segment_bytes:
            reason = ROLL_APPEND_TOO_LARGE
            break
        if size > segment_bytes - batch_size:
            reason = ROLL_SIZE
            break
        if size > 0:
            waited = sub_wrapping(now_ms, created_ms)
            if first_ts >= 0:
                waited = sub_wrapping(batch_max_ts, first_ts)
            if waited > max_segment_ms:
                reason = ROLL_TIME
                break
        if not (fresh and b == first):  # a segment made for this batch takes it even if its indexes hold nothing
            if entries >= entries_max:
                reason = ROLL_INDEX_FULL
                break
            if time_entries >= time_entries_max - 1:
                reason = ROLL_TIME_INDEX_FULL
                break
        if last_offset < base or last_offset - base > 0x7FFFFFFF:
            reason = ROLL_OFFSET_OVERFLOW
            break

        if assign != 0:
            batch = buffer + load_slot(row, POSITION)
            store64(batch, batch_base)
            store32(batch + 12, epoch)
            store_slot(row, BASE_OFFSET, batch_base)
            store_slot(row, LAST_OFFSET, last_offset)
            store_slot(row, LEADER_EPOCH, epoch)
        if size == 0:
            first_ts = batch_max_ts
        if batch_max_ts > max_ts:
            max_ts = batch_max_ts
            max_ts_offset = last_offset
        if bytes_since > interval:
            store32(index_out + index_n * 8, last_offset - base)
            store32(index_out + index_n * 8 + 4, size)
            index_n += 1
            entries += 1
            if max_ts > last_time_ts:
                store64(time_out + time_n * 12, max_ts)
                store32(time_out + time_n * 12 + 8, max_ts_offset - base)
                time_n += 1
                time_entries += 1
                last_time_ts = max_ts
            bytes_since = 0
        bytes_since += batch_size
        size += batch_size
        next_offset = add_wrapping(last_offset, 1)
        b += 1
    store_slot(block, slots.A_SIZE, size)
    store_slot(block, slots.A_NEXT_OFFSET, next_offset)
    store_slot(block, slots.A_MAX_TS, max_ts)
    store_slot(block, slots.A_MAX_TS_OFFSET, max_ts_offset)
    store_slot(block, slots.A_FIRST_TS, first_ts)
    store_slot(block, slots.A_BYTES_SINCE, bytes_since)
    store_slot(block, slots.A_INDEX_ENTRIES, entries)
    store_slot(block, slots.A_TIME_ENTRIES, time_entries)
    store_slot(block, slots.A_LAST_TIME_TS, last_time_ts)
    store_slot(block, slots.A_INDEX_OUT_N, index_n)
    store_slot(block, slots.A_TIME_OUT_N, time_n)
    store_slot(block, slots.A_REASON, reason)
    return b - first

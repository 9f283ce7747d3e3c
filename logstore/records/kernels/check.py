"""The records of batches as an append must have them."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_COUNT, BAD_OFFSET, BAD_RECORD, OK
from logstore.records.kernels.intrinsics import INT64_MAX, add_wrapping, jit, load_slot, store_slot
from logstore.records.kernels.record import headers_sound, parse_record
from logstore.records.table import (
    BASE_OFFSET,
    BASE_TIMESTAMP,
    COUNT,
    LAST_OFFSET,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    ROW_BYTES,
)


@jit
def check(table, first, last, block):
    """Walk the records of batches [first, last) as an append must: sound, deltas 0, 1, 2…; timestamps and null keys
    reported.

    OK, BAD_RECORD, or BAD_OFFSET when deltas are not consecutive from 0. C_BATCH is the batch to blame then.
    """
    null_keys = 0
    min_ts = INT64_MAX
    for b in range(first, last):
        row = table + b * ROW_BYTES
        address = load_slot(row, PAYLOAD_ADDRESS)
        end = address + load_slot(row, PAYLOAD_SIZE)
        base_ts = load_slot(row, BASE_TIMESTAMP)
        max_ts = -1
        max_ts_offset = -1
        count = load_slot(row, COUNT)
        if count == 0 or load_slot(row, LAST_OFFSET) - load_slot(row, BASE_OFFSET) != count - 1:
            store_slot(block, slots.C_BATCH, b)
            return BAD_COUNT
        consecutive = True
        for expected in range(count):
            address, ts_delta, delta, _key, key_length, _value, _value_length, headers, header_count = parse_record(
                address, end
            )
            if address == 0 or (header_count > 0 and not headers_sound(headers, address, header_count)):
                store_slot(block, slots.C_BATCH, b)
                return BAD_RECORD
            if delta != expected:
                consecutive = False
            if key_length < 0:
                null_keys += 1
            timestamp = add_wrapping(base_ts, ts_delta)
            if timestamp >= 0:
                min_ts = min(min_ts, timestamp)
            if timestamp > max_ts:
                max_ts = timestamp
                max_ts_offset = expected
        if address != end:
            store_slot(block, slots.C_BATCH, b)
            return BAD_RECORD
        if not consecutive:
            store_slot(block, slots.C_BATCH, b)
            return BAD_OFFSET
        store_slot(block, slots.C_MAX_TS, max_ts)
        store_slot(block, slots.C_MAX_TS_OFFSET, max_ts_offset)
    store_slot(block, slots.C_NULL_KEYS, null_keys)
    store_slot(block, slots.C_MIN_TS, min_ts)
    return OK

"""Which records are the last of their keys, by a map or by the bits made of one."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_RECORD, OK
from logstore.records.kernels.hashing import sip_pair
from logstore.records.kernels.intrinsics import jit, load64_le, load_slot, multiply_high, store8, store_slot
from logstore.records.kernels.offset_map import find_slot
from logstore.records.kernels.record import parse_record
from logstore.records.kernels.survivors import marked_record
from logstore.records.table import BASE_OFFSET, COUNT, LAST_OFFSET, PAYLOAD_ADDRESS, PAYLOAD_SIZE, ROW_BYTES, SKIP


@jit
def _keep_marked(row, bits, min_offset, max_offset, tombstones, keep):
    """`keep_latest` of a batch by the bits of its offsets: how many are kept, or -1."""
    address = load_slot(row, PAYLOAD_ADDRESS)
    end = address + load_slot(row, PAYLOAD_SIZE)
    n = 0
    for i in range(load_slot(row, COUNT)):
        begin = address
        address, kept = marked_record(begin, end, i, row, bits, min_offset, max_offset)
        if address == 0:
            return -1
        if kept != 0:
            after, _ts, _delta, _key, _key_length, _value, value_length, _headers, _n = parse_record(begin, end)
            if after == 0:
                return -1
            if value_length < 0 and not tombstones:
                kept = 0
        n += kept
        store8(keep + i, kept)
    return n if address == end else -1


@jit
def keep_latest(table, first, last, block):
    """One byte a record of batches [first, last) that are not marked SKIP, at K_KEEP: 1 for the last record of its key.

    A tombstone counts only with K_TOMBSTONES_TOO. OK, or BAD_RECORD with K_BATCH. K_RECORDS is how many are kept.
    """
    min_offset = load_slot(block, slots.K_MIN_OFFSET)
    max_offset = load_slot(block, slots.K_MAX_OFFSET)
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    k0 = load_slot(block, slots.K_SECRET_0)
    k1 = load_slot(block, slots.K_SECRET_1)
    bucket = load_slot(block, slots.K_BUCKET)
    buckets = load_slot(block, slots.K_BUCKETS)
    keep = load_slot(block, slots.K_KEEP)
    tombstones = load_slot(block, slots.K_TOMBSTONES_TOO) != 0
    bits = load_slot(block, slots.K_SURVIVORS)
    n = 0
    seen = 0
    for b in range(first, last):
        row = table + b * ROW_BYTES
        if load_slot(row, SKIP) != 0:
            continue
        if bits != 0:
            found = _keep_marked(row, bits, min_offset, max_offset, tombstones, keep + seen)
            if found < 0:
                store_slot(block, slots.K_BATCH, b)
                return BAD_RECORD
            n += found
            seen += load_slot(row, COUNT)
            continue
        address = load_slot(row, PAYLOAD_ADDRESS)
        end = address + load_slot(row, PAYLOAD_SIZE)
        base_offset = load_slot(row, BASE_OFFSET)
        last_delta = load_slot(row, LAST_OFFSET) - base_offset
        previous = -1
        for _ in range(load_slot(row, COUNT)):
            address, _ts, delta, key, key_length, _value, value_length, _headers, _n = parse_record(address, end)
            if address == 0 or delta <= previous or delta > last_delta:
                store_slot(block, slots.K_BATCH, b)
                return BAD_RECORD
            previous = delta
            offset = base_offset + delta
            kept = 0
            if key_length >= 0 and min_offset <= offset < max_offset and (value_length >= 0 or tombstones):
                low, high = sip_pair(key, key_length, k0, k1)
                if buckets <= 1 or multiply_high(high, buckets) == bucket:
                    slot = find_slot(map_address, map_slots, slot_bytes, low, high)
                    if load64_le(slot + 16) == offset + 1:
                        kept = 1
                        n += 1
            store8(keep + seen, kept)
            seen += 1
    store_slot(block, slots.K_RECORDS, n)
    return OK

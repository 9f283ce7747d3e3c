"""The map of a restore: each key's last offset, and which records those are.

An open-addressing table of 24-byte slots: 128 bits of a keyed hash of the key, and offset + 1 (0 is an empty slot).
"""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_RECORD, FULL, OK
from logstore.records.kernels.hashing import sip_pair
from logstore.records.kernels.intrinsics import (
    jit,
    load64_le,
    load_slot,
    multiply_high,
    prefetch_write,
    store8,
    store64_le,
    store_slot,
)
from logstore.records.kernels.record import parse_record
from logstore.records.kernels.survivors import marked_record
from logstore.records.table import BASE_OFFSET, COUNT, LAST_OFFSET, PAYLOAD_ADDRESS, PAYLOAD_SIZE, ROW_BYTES, SKIP

_MAP_SLOT_BYTES = 24
_AHEAD = 64  # keys hashed before their slots are touched, so that the memory is on its way


@jit
def _find_slot(map_address, map_slots, low, high):
    """Address of the key's slot, or of the empty one where it belongs. One slot at least is always empty."""
    at = multiply_high(low, map_slots)
    while True:
        slot = map_address + at * _MAP_SLOT_BYTES
        if load64_le(slot + 16) == 0 or (load64_le(slot) == low and load64_le(slot + 8) == high):
            return slot
        at += 1
        if at == map_slots:
            at = 0


@jit
def map_put(table, first, last, block):
    """Put the keys of batches [first, last) into the map with their offsets; later offsets replace earlier ones.

    Records without key, outside [M_MIN_OFFSET, M_MAX_OFFSET) or of another bucket (of M_BUCKETS, by hash) are passed
    over, as are batches marked SKIP. OK, BAD_RECORD with the batch in M_BATCH, or FULL: the map holds M_MAP_LIMIT keys
    and the record at M_STOP_OFFSET was not taken. M_SCRATCH has room for 24 bytes for each of 64 keys.
    """
    min_offset = load_slot(block, slots.M_MIN_OFFSET)
    max_offset = load_slot(block, slots.M_MAX_OFFSET)
    map_address = load_slot(block, slots.M_MAP)
    map_slots = load_slot(block, slots.M_MAP_SLOTS)
    used = load_slot(block, slots.M_MAP_USED)
    limit = load_slot(block, slots.M_MAP_LIMIT)
    k0 = load_slot(block, slots.M_SECRET_0)
    k1 = load_slot(block, slots.M_SECRET_1)
    scratch = load_slot(block, slots.M_SCRATCH)
    bucket = load_slot(block, slots.M_BUCKET)
    buckets = load_slot(block, slots.M_BUCKETS)
    n = 0
    null_keys = 0
    waiting = 0
    code = OK
    b = first
    while b < last and code == OK:
        row = table + b * ROW_BYTES
        if load_slot(row, SKIP) == 0:
            address = load_slot(row, PAYLOAD_ADDRESS)
            end = address + load_slot(row, PAYLOAD_SIZE)
            base_offset = load_slot(row, BASE_OFFSET)
            last_delta = load_slot(row, LAST_OFFSET) - base_offset
            previous = -1
            for _ in range(load_slot(row, COUNT)):
                address, _ts, delta, key, key_length, _value, _value_length, _headers, _count = parse_record(
                    address, end
                )
                if address == 0 or delta <= previous or delta > last_delta:
                    code = BAD_RECORD
                    break
                previous = delta
                offset = base_offset + delta
                if key_length < 0:
                    null_keys += 1
                    continue
                if offset < min_offset or offset >= max_offset:
                    continue
                low, high = sip_pair(key, key_length, k0, k1)
                if buckets > 1 and multiply_high(high, buckets) != bucket:
                    continue
                prefetch_write(map_address + multiply_high(low, map_slots) * _MAP_SLOT_BYTES)
                held = scratch + waiting * _MAP_SLOT_BYTES
                store64_le(held, low)
                store64_le(held + 8, high)
                store64_le(held + 16, offset + 1)
                waiting += 1
                if waiting == _AHEAD:
                    used, code = _put_waiting(block, map_address, map_slots, scratch, waiting, used, limit)
                    waiting = 0
                    if code != OK:
                        break
                n += 1
        if code == OK:
            b += 1
    if code == OK and waiting > 0:
        used, code = _put_waiting(block, map_address, map_slots, scratch, waiting, used, limit)
    store_slot(block, slots.M_MAP_USED, used)
    store_slot(block, slots.M_BATCH, b)
    store_slot(block, slots.M_N, n)
    store_slot(block, slots.M_NULL_KEYS, null_keys)
    return code


@jit
def _put_waiting(block, map_address, map_slots, scratch, count, used, limit):
    for i in range(count):
        held = scratch + i * _MAP_SLOT_BYTES
        low = load64_le(held)
        high = load64_le(held + 8)
        slot = _find_slot(map_address, map_slots, low, high)
        if load64_le(slot + 16) == 0:
            if used >= limit:
                store_slot(block, slots.M_STOP_OFFSET, load64_le(held + 16) - 1)
                return used, FULL
            store64_le(slot, low)
            store64_le(slot + 8, high)
            used += 1
        store64_le(slot + 16, load64_le(held + 16))
    return used, OK


@jit
def _keep_marked(row, bits, min_offset, max_offset, tombstones, keep):
    """`map_keep` of a batch by the bits of its offsets: how many are kept, or -1."""
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
def map_keep(table, first, last, block):
    """One byte a record of batches [first, last) that are not marked SKIP, at M_KEEP: 1 for the last record of its key.

    A key's last record that is a tombstone counts only with M_KEEP_TOMBSTONES. OK, or BAD_RECORD with M_BATCH. M_N is
    how many are kept.
    """
    min_offset = load_slot(block, slots.M_MIN_OFFSET)
    max_offset = load_slot(block, slots.M_MAX_OFFSET)
    map_address = load_slot(block, slots.M_MAP)
    map_slots = load_slot(block, slots.M_MAP_SLOTS)
    k0 = load_slot(block, slots.M_SECRET_0)
    k1 = load_slot(block, slots.M_SECRET_1)
    bucket = load_slot(block, slots.M_BUCKET)
    buckets = load_slot(block, slots.M_BUCKETS)
    keep = load_slot(block, slots.M_KEEP)
    tombstones = load_slot(block, slots.M_KEEP_TOMBSTONES) != 0
    bits = load_slot(block, slots.M_SURVIVORS)
    n = 0
    seen = 0
    for b in range(first, last):
        row = table + b * ROW_BYTES
        if load_slot(row, SKIP) != 0:
            continue
        if bits != 0:
            found = _keep_marked(row, bits, min_offset, max_offset, tombstones, keep + seen)
            if found < 0:
                store_slot(block, slots.M_BATCH, b)
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
                store_slot(block, slots.M_BATCH, b)
                return BAD_RECORD
            previous = delta
            offset = base_offset + delta
            kept = 0
            if key_length >= 0 and min_offset <= offset < max_offset and (value_length >= 0 or tombstones):
                low, high = sip_pair(key, key_length, k0, k1)
                if buckets <= 1 or multiply_high(high, buckets) == bucket:
                    slot = _find_slot(map_address, map_slots, low, high)
                    if load64_le(slot + 16) == offset + 1:
                        kept = 1
                        n += 1
            store8(keep + seen, kept)
            seen += 1
    store_slot(block, slots.M_N, n)
    return OK


@jit
def map_grow(source, source_slots, target, target_slots):
    """Move all entries into a larger, empty map; returns how many there are."""
    used = 0
    for i in range(source_slots):
        entry = source + i * _MAP_SLOT_BYTES
        if load64_le(entry + 16) != 0:
            low = load64_le(entry)
            high = load64_le(entry + 8)
            slot = _find_slot(target, target_slots, low, high)
            store64_le(slot, low)
            store64_le(slot + 8, high)
            store64_le(slot + 16, load64_le(entry + 16))
            used += 1
    return used

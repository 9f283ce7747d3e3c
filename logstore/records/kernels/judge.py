"""Verdicts on records: which stay, go, or lose their value."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_RECORD, OK
from logstore.records.kernels.hashing import md5_pair, sip_pair
from logstore.records.kernels.intrinsics import (
    add_wrapping,
    jit,
    load64_le,
    load_slot,
    multiply_high,
    prefetch_read,
    store8,
    store64_le,
    store_slot,
)
from logstore.records.kernels.offset_map import AHEAD, HELD_BYTES, MD5_AT, find_slot
from logstore.records.kernels.record import headers_sound, parse_record
from logstore.records.kernels.survivors import marked_record
from logstore.records.marks import (
    DROP_RECORD,
    KEEP_RECORD,
    MARK_BYTES,
    MARK_KEPT,
    MARK_NULLED,
    MARK_TOMBSTONES,
    NULL_RECORD,
    ORDER_OFFSET,
)
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_TIMESTAMP,
    COUNT,
    DELETE_HORIZON_BIT,
    LAST_OFFSET,
    MAGIC,
    MAX_TIMESTAMP,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    ROW_BYTES,
    SKIP,
    TIMESTAMP_TYPE_BIT,
)

_TOMBSTONE = 1
_HORIZON_PASSED = 2
_EXPIRED = 4


@jit
def _judge_held(block, held, count):
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    order = load_slot(block, slots.K_ORDER)
    marks = load_slot(block, slots.K_MARKS)
    keep = load_slot(block, slots.K_KEEP)
    superseded = load_slot(block, slots.K_SUPERSEDED)
    tombstones = load_slot(block, slots.K_TOMBSTONES)
    nulled = load_slot(block, slots.K_NULLED)
    for _ in range(count):
        slot = find_slot(map_address, map_slots, slot_bytes, load64_le(held), load64_le(held + 8))
        known = load64_le(slot + 16)
        mark = load64_le(held + 16) + 1
        flags = load64_le(held + 24)
        seen = load64_le(held + 32)
        batch = marks + load64_le(held + 40) * MARK_BYTES
        kept = KEEP_RECORD
        if known != 0 and (mark < known or (order != ORDER_OFFSET and mark != known)):
            kept = DROP_RECORD
            superseded += 1
        elif flags & _TOMBSTONE != 0:
            if flags & _HORIZON_PASSED != 0:
                kept = DROP_RECORD
                tombstones += 1
        elif flags & _EXPIRED != 0:
            kept = NULL_RECORD
            nulled += 1
            store_slot(batch, MARK_NULLED, load_slot(batch, MARK_NULLED) + 1)
        if kept != DROP_RECORD:
            store_slot(batch, MARK_KEPT, load_slot(batch, MARK_KEPT) + 1)
            if flags & _TOMBSTONE != 0 or kept == NULL_RECORD:
                store_slot(batch, MARK_TOMBSTONES, load_slot(batch, MARK_TOMBSTONES) + 1)
        store8(keep + seen, kept)
        held += HELD_BYTES
    store_slot(block, slots.K_SUPERSEDED, superseded)
    store_slot(block, slots.K_TOMBSTONES, tombstones)
    store_slot(block, slots.K_NULLED, nulled)


@jit
def _judge_marked(row, batch, block, keep, passed):
    """Verdicts on a batch whose survivors are known by their offsets; no key is looked for. OK or BAD_RECORD."""
    expired_before = load_slot(block, slots.K_EXPIRED_BEFORE)
    address = load_slot(row, PAYLOAD_ADDRESS)
    end = address + load_slot(row, PAYLOAD_SIZE)
    count = load_slot(row, COUNT)
    bits = load_slot(block, slots.K_SURVIVORS)
    first_offset = load_slot(block, slots.K_SURVIVORS_FIRST)
    end_offset = load_slot(block, slots.K_SURVIVORS_END)
    kept = 0
    tombstones = 0
    gone_tombstones = 0
    nulled = 0
    for i in range(count):
        begin = address
        address, survives = marked_record(begin, end, i, row, bits, first_offset, end_offset)
        if address == 0:
            return BAD_RECORD
        if survives == 0:
            store8(keep + i, DROP_RECORD)
            continue
        after, ts_delta, _delta, _key, _key_length, _value, value_length, _headers, _count = parse_record(begin, end)
        if after == 0:
            return BAD_RECORD
        verdict = KEEP_RECORD
        if value_length < 0:
            if passed:
                verdict = DROP_RECORD
                gone_tombstones += 1
            else:
                tombstones += 1
        elif expired_before > 0:
            timestamp = load_slot(row, MAX_TIMESTAMP)
            if load_slot(row, ATTRIBUTES) & TIMESTAMP_TYPE_BIT == 0:
                timestamp = add_wrapping(load_slot(row, BASE_TIMESTAMP), ts_delta)
            if 0 <= timestamp < expired_before:
                verdict = NULL_RECORD
                nulled += 1
                tombstones += 1
        if verdict != DROP_RECORD:
            kept += 1
        store8(keep + i, verdict)
    if address != end:
        return BAD_RECORD
    store_slot(batch, MARK_KEPT, kept)
    store_slot(batch, MARK_TOMBSTONES, tombstones)
    store_slot(batch, MARK_NULLED, nulled)
    store_slot(block, slots.K_SUPERSEDED, load_slot(block, slots.K_SUPERSEDED) + count - kept - gone_tombstones)
    store_slot(block, slots.K_TOMBSTONES, load_slot(block, slots.K_TOMBSTONES) + gone_tombstones)
    store_slot(block, slots.K_NULLED, load_slot(block, slots.K_NULLED) + nulled)
    return OK


@jit
def judge(table, first, last, block):
    """One byte for each record of batches [first, last) that are not marked SKIP, at K_KEEP: stays, goes, or loses its
    value; and the counts of each batch into its marks.

    Records from K_MAX_OFFSET on stay. OK, or BAD_RECORD with K_BATCH. K_KEYLESS, K_SUPERSEDED, K_TOMBSTONES and
    K_NULLED are added to.
    """
    max_offset = load_slot(block, slots.K_MAX_OFFSET)
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    k0 = load_slot(block, slots.K_SECRET_0)
    k1 = load_slot(block, slots.K_SECRET_1)
    use_md5 = load_slot(block, slots.K_MD5) != 0
    scratch = load_slot(block, slots.K_SCRATCH)
    now_ms = load_slot(block, slots.K_NOW_MS)
    keep_legacy = load_slot(block, slots.K_KEEP_LEGACY_TOMBSTONES) != 0
    expired_before = load_slot(block, slots.K_EXPIRED_BEFORE)
    marks = load_slot(block, slots.K_MARKS)
    keep = load_slot(block, slots.K_KEEP)
    keyless = load_slot(block, slots.K_KEYLESS)
    marked = load_slot(block, slots.K_SURVIVORS) != 0
    marked_from = load_slot(block, slots.K_SURVIVORS_FIRST)
    marked_to = load_slot(block, slots.K_SURVIVORS_END)
    waiting = 0
    seen = 0
    for b in range(first, last):
        row = table + b * ROW_BYTES
        if load_slot(row, SKIP) != 0:
            continue
        address = load_slot(row, PAYLOAD_ADDRESS)
        end = address + load_slot(row, PAYLOAD_SIZE)
        base_offset = load_slot(row, BASE_OFFSET)
        last_delta = load_slot(row, LAST_OFFSET) - base_offset
        base_ts = load_slot(row, BASE_TIMESTAMP)
        attributes = load_slot(row, ATTRIBUTES)
        max_ts = load_slot(row, MAX_TIMESTAMP)
        v2 = load_slot(row, MAGIC) == 2
        if v2:
            passed = _HORIZON_PASSED if attributes & DELETE_HORIZON_BIT != 0 and base_ts <= now_ms else 0
        else:
            passed = 0 if keep_legacy else _HORIZON_PASSED
        batch = marks + b * MARK_BYTES
        if (
            marked
            and load_slot(row, MAGIC) == 2
            and base_offset >= marked_from
            and base_offset + last_delta < marked_to
        ):
            if _judge_marked(row, batch, block, keep + seen, passed != 0) != OK:
                store_slot(block, slots.K_BATCH, b)
                return BAD_RECORD
            seen += load_slot(row, COUNT)
            continue
        previous = -1
        for _ in range(load_slot(row, COUNT)):
            address, ts_delta, delta, key, key_length, _value, value_length, headers, count = parse_record(address, end)
            if address == 0 or delta <= previous or delta > last_delta:
                store_slot(block, slots.K_BATCH, b)
                return BAD_RECORD
            if count > 0 and not headers_sound(headers, address, count):
                store_slot(block, slots.K_BATCH, b)
                return BAD_RECORD
            previous = delta
            offset = base_offset + delta
            if offset >= max_offset:
                store8(keep + seen, KEEP_RECORD)
                store_slot(batch, MARK_KEPT, load_slot(batch, MARK_KEPT) + 1)
                if value_length < 0:
                    store_slot(batch, MARK_TOMBSTONES, load_slot(batch, MARK_TOMBSTONES) + 1)
                seen += 1
                continue
            if key_length < 0:
                store8(keep + seen, DROP_RECORD)
                keyless += 1
                seen += 1
                continue
            flags = 0
            if value_length < 0:
                flags = _TOMBSTONE | passed
            elif expired_before > 0:
                timestamp = max_ts if attributes & TIMESTAMP_TYPE_BIT != 0 else add_wrapping(base_ts, ts_delta)
                if 0 <= timestamp < expired_before:
                    flags = _EXPIRED
            if use_md5:
                low, high = md5_pair(key, key_length, scratch + MD5_AT)
            else:
                low, high = sip_pair(key, key_length, k0, k1)
            prefetch_read(map_address + multiply_high(low, map_slots) * slot_bytes)
            held = scratch + waiting * HELD_BYTES
            store64_le(held, low)
            store64_le(held + 8, high)
            store64_le(held + 16, offset)
            store64_le(held + 24, flags)
            store64_le(held + 32, seen)
            store64_le(held + 40, b)
            seen += 1
            waiting += 1
            if waiting == AHEAD:
                _judge_held(block, scratch, waiting)
                waiting = 0
        if address != end:
            store_slot(block, slots.K_BATCH, b)
            return BAD_RECORD
    if waiting > 0:
        _judge_held(block, scratch, waiting)
    store_slot(block, slots.K_KEYLESS, keyless)
    return OK

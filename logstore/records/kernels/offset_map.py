"""The offset map: each key's latest record, put in by one thread or by several; and which records those are.

A slot is 16 bytes of hash and offset + 1 (0 is an empty slot); where another order than that of offsets decides, its
number follows.
"""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_RECORD, FULL, OK
from logstore.records.kernels.hashing import md5_pair, sip_pair
from logstore.records.kernels.intrinsics import (
    add_atomic,
    add_wrapping,
    compare_and_swap,
    inline,
    jit,
    load8,
    load64,
    load64_le,
    load_acquire,
    load_slot,
    multiply_high,
    prefetch_write,
    store64_le,
    store_release,
    store_slot,
)
from logstore.records.kernels.record import headers_sound, parse_header, parse_record
from logstore.records.marks import ORDER_OFFSET, ORDER_TIMESTAMP
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_TIMESTAMP,
    COUNT,
    LAST_OFFSET,
    MAX_TIMESTAMP,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    ROW_BYTES,
    SKIP,
    TIMESTAMP_TYPE_BIT,
)

AHEAD = 64  # keys hashed before their slots are touched, so that the memory is on its way
HELD_BYTES = 48  # what waits for its slot: hash, offset, version, number of the record, batch or flags
MD5_AT = AHEAD * HELD_BYTES  # after those, room for the last two blocks of a message
_CLAIMED = -1  # the mark of a slot whose hash is being written
_INT64_MIN = -0x7FFFFFFFFFFFFFFF - 1


@inline
def find_slot(map_address, map_slots, slot_bytes, low, high):
    """Address of the key's slot, or of the empty one where it belongs. One slot at least is always empty."""
    at = multiply_high(low, map_slots)
    while True:
        slot = map_address + at * slot_bytes
        if load64_le(slot + 16) == 0 or (load64_le(slot) == low and load64_le(slot + 8) == high):
            return slot
        at += 1
        if at == map_slots:
            at = 0


@jit
def _version(order, timestamp, headers, end, count, name, name_size):
    """What decides between two records of a key beside their offsets; a record without the header loses."""
    if order == ORDER_TIMESTAMP:
        return timestamp
    version = _INT64_MIN
    for _ in range(count):
        headers, key, key_length, value, value_length = parse_header(headers, end)
        if headers == 0:
            break
        if key_length == name_size and value_length == 8:
            same = True
            for i in range(name_size):
                if load8(key + i) != load8(name + i):
                    same = False
                    break
            if same:
                version = load64(value)
    return version


@jit
def _put_held(block, held, count, used):
    """Put what waits into the map, in order: (keys known then, OK or FULL)."""
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    limit = load_slot(block, slots.K_LIMIT)
    room = load_slot(block, slots.K_ROOM)
    order = load_slot(block, slots.K_ORDER)
    only_known = load_slot(block, slots.K_ONLY_KNOWN) != 0
    for i in range(count):
        low = load64_le(held)
        high = load64_le(held + 8)
        offset = load64_le(held + 16)
        if used >= limit and not only_known:  # Kafka stops here, too, even at a key it knows
            store_slot(block, slots.K_STOP_OFFSET, offset)
            store_slot(block, slots.K_NOT_TAKEN, count - i)
            return used, FULL
        slot = find_slot(map_address, map_slots, slot_bytes, low, high)
        known = load64_le(slot + 16)
        if known == 0:
            if not only_known:
                if used >= room:
                    store_slot(block, slots.K_STOP_OFFSET, offset)
                    store_slot(block, slots.K_NOT_TAKEN, count - i)
                    return used, FULL
                store64_le(slot, low)
                store64_le(slot + 8, high)
                store64_le(slot + 16, offset + 1)
                if order != ORDER_OFFSET:
                    store64_le(slot + 24, load64_le(held + 24))
                used += 1
        elif order == ORDER_OFFSET:
            store64_le(slot + 16, offset + 1)
        else:
            version = load64_le(held + 24)
            other = load64_le(slot + 24)
            if version > other or (version == other and offset >= known):
                store64_le(slot + 16, offset + 1)
                store64_le(slot + 24, version)
        store_slot(block, slots.K_LAST_OFFSET, offset)
        held += HELD_BYTES
    return used, OK


@jit
def _put_shared(block, held, count):
    """The same while other threads put keys into the map, too: OK or FULL. For the order of offsets only.

    A slot is claimed by its mark, and a thread that meets it waits until the hash is there; marks only grow.
    """
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    room = load_slot(block, slots.K_ROOM)
    shared_used = load_slot(block, slots.K_SHARED_USED)
    for i in range(count):
        low = load64_le(held)
        high = load64_le(held + 8)
        mark = load64_le(held + 16) + 1
        at = multiply_high(low, map_slots)
        while True:
            slot = map_address + at * slot_bytes
            known = load_acquire(slot + 16)
            if known == 0:
                if add_atomic(shared_used, 1) >= room:
                    add_atomic(shared_used, -1)
                    store_slot(block, slots.K_NOT_TAKEN, count - i)
                    return FULL
                known = compare_and_swap(slot + 16, 0, _CLAIMED)
                if known == 0:
                    store64_le(slot, low)
                    store64_le(slot + 8, high)
                    store_release(slot + 16, mark)
                    break
                add_atomic(shared_used, -1)
            while known == _CLAIMED:
                known = load_acquire(slot + 16)
            if load64_le(slot) == low and load64_le(slot + 8) == high:
                while known < mark:
                    before = compare_and_swap(slot + 16, known, mark)
                    if before == known:
                        break
                    known = before
                break
            at += 1
            if at == map_slots:
                at = 0
        held += HELD_BYTES
    return OK


@jit
def index_keys(table, first, last, block):
    """Put the keys of batches [first, last) into the map, of offsets from K_MIN_OFFSET up to K_MAX_OFFSET; batches
    marked SKIP are passed over, as are keys of another bucket (of K_BUCKETS, by hash).

    OK, BAD_RECORD with the batch in K_BATCH, or FULL: the record at K_STOP_OFFSET was not taken, K_LAST_OFFSET was the
    last that was. K_RECORDS and K_KEYLESS count what was taken or has no key. With K_ONLY_KNOWN no key is added. With
    K_SHARED_USED other threads may fill the map at the same time; then FULL does not tell where.
    """
    min_offset = load_slot(block, slots.K_MIN_OFFSET)
    max_offset = load_slot(block, slots.K_MAX_OFFSET)
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    used = load_slot(block, slots.K_USED)
    k0 = load_slot(block, slots.K_SECRET_0)
    k1 = load_slot(block, slots.K_SECRET_1)
    use_md5 = load_slot(block, slots.K_MD5) != 0
    scratch = load_slot(block, slots.K_SCRATCH)
    order = load_slot(block, slots.K_ORDER)
    name = load_slot(block, slots.K_HEADER)
    name_size = load_slot(block, slots.K_HEADER_SIZE)
    shared = load_slot(block, slots.K_SHARED_USED) != 0
    bucket = load_slot(block, slots.K_BUCKET)
    buckets = load_slot(block, slots.K_BUCKETS)
    records = 0
    keyless = 0
    waiting = 0
    code = OK
    b = first
    store_slot(block, slots.K_NOT_TAKEN, 0)
    while b < last and code == OK:
        row = table + b * ROW_BYTES
        if load_slot(row, SKIP) == 0:
            address = load_slot(row, PAYLOAD_ADDRESS)
            end = address + load_slot(row, PAYLOAD_SIZE)
            base_offset = load_slot(row, BASE_OFFSET)
            last_delta = load_slot(row, LAST_OFFSET) - base_offset
            base_ts = load_slot(row, BASE_TIMESTAMP)
            append_time = load_slot(row, ATTRIBUTES) & TIMESTAMP_TYPE_BIT
            max_ts = load_slot(row, MAX_TIMESTAMP)
            previous = -1
            for _ in range(load_slot(row, COUNT)):
                address, ts_delta, delta, key, key_length, _value, _value_length, headers, count = parse_record(
                    address, end
                )
                if address == 0 or delta <= previous or delta > last_delta:
                    code = BAD_RECORD
                    break
                if count > 0 and not headers_sound(headers, address, count):
                    code = BAD_RECORD
                    break
                previous = delta
                offset = base_offset + delta
                if offset < min_offset or offset >= max_offset:
                    continue
                if key_length < 0:
                    records += 1
                    keyless += 1
                    continue
                if use_md5:
                    low, high = md5_pair(key, key_length, scratch + MD5_AT)
                else:
                    low, high = sip_pair(key, key_length, k0, k1)
                if buckets > 1 and multiply_high(high, buckets) != bucket:
                    continue
                records += 1
                prefetch_write(map_address + multiply_high(low, map_slots) * slot_bytes)
                held = scratch + waiting * HELD_BYTES
                store64_le(held, low)
                store64_le(held + 8, high)
                store64_le(held + 16, offset)
                if order != ORDER_OFFSET:
                    timestamp = max_ts if append_time != 0 else add_wrapping(base_ts, ts_delta)
                    store64_le(held + 24, _version(order, timestamp, headers, address, count, name, name_size))
                waiting += 1
                if waiting == AHEAD:
                    if shared:
                        code = _put_shared(block, scratch, waiting)
                    else:
                        used, code = _put_held(block, scratch, waiting, used)
                    waiting = 0
                    if code != OK:
                        break
            if code == OK and address != end:
                code = BAD_RECORD
        if code == OK:
            b += 1
    if waiting > 0 and code == OK:
        if shared:
            code = _put_shared(block, scratch, waiting)
        else:
            used, code = _put_held(block, scratch, waiting, used)
    store_slot(block, slots.K_USED, used)
    store_slot(block, slots.K_BATCH, b)
    store_slot(block, slots.K_RECORDS, records - load_slot(block, slots.K_NOT_TAKEN))
    store_slot(block, slots.K_KEYLESS, keyless)
    return code


@jit
def merge_maps(source, source_slots, block):
    """Put all entries of another map of the same hash into this one, the greater winning; OK or FULL (no room)."""
    map_address = load_slot(block, slots.K_MAP)
    map_slots = load_slot(block, slots.K_MAP_SLOTS)
    slot_bytes = load_slot(block, slots.K_SLOT_BYTES)
    used = load_slot(block, slots.K_USED)
    room = load_slot(block, slots.K_ROOM)
    order = load_slot(block, slots.K_ORDER)
    code = OK
    for i in range(source_slots):
        entry = source + i * slot_bytes
        if i + AHEAD < source_slots:
            ahead = load64_le(entry + AHEAD * slot_bytes)
            prefetch_write(map_address + multiply_high(ahead, map_slots) * slot_bytes)
        mark = load64_le(entry + 16)
        if mark == 0:
            continue
        low = load64_le(entry)
        high = load64_le(entry + 8)
        slot = find_slot(map_address, map_slots, slot_bytes, low, high)
        known = load64_le(slot + 16)
        better = mark > known
        if known == 0:
            if used >= room:
                code = FULL
                break
            store64_le(slot, low)
            store64_le(slot + 8, high)
            used += 1
        elif order != ORDER_OFFSET:
            version = load64_le(entry + 24)
            other = load64_le(slot + 24)
            better = version > other or (version == other and mark > known)
        if better:
            store64_le(slot + 16, mark)
            if order != ORDER_OFFSET:
                store64_le(slot + 24, load64_le(entry + 24))
    store_slot(block, slots.K_USED, used)
    return code

# mypy: ignore-errors
"""The inner loops of compaction: keys into the offset map, verdicts on records, batches written anew.

The rules of `kernels` hold here as well: int64 in and out, every length checked before it is followed. A slot of the
map is 16 bytes of hash and offset + 1; where another order than that of offsets decides, its number follows.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from logstore.records.codes import BAD_RECORD, FULL, OK
from logstore.records.kernels import (
    _crc,
    _headers_sound,
    _marked_record,
    _parse_header,
    _parse_record,
    _read_varint,
    _set_slot,
    _sip_hash,
    _slot,
    _varint_size,
    _write_batch_header,
    _write_varint,
    add_atomic,
    add_wrapping,
    compare_and_swap,
    copy,
    load8,
    load32_le,
    load64,
    load64_le,
    load_acquire,
    multiply_high,
    prefetch,
    prefetch_read,
    store8,
    store32,
    store64_le,
    store_release,
    sub_wrapping,
)
from logstore.records.marks import (
    DELETE,
    DROP_RECORD,
    EMPTY,
    KEEP_RECORD,
    MARK_ACTION,
    MARK_BYTES,
    MARK_CODEC,
    MARK_HORIZON,
    MARK_JOIN,
    MARK_KEPT,
    MARK_MAY_GO,
    MARK_NULLED,
    MARK_STAYS,
    MARK_TOMBSTONES,
    NULL_RECORD,
    ORDER_OFFSET,
    ORDER_TIMESTAMP,
    REBUILD,
    VERBATIM,
)
from logstore.records.slots import (
    B_ABORTED,
    B_CHANGED,
    B_CODEC,
    B_DELETE_RETENTION_MS,
    B_FIRST_UNCLEANABLE,
    B_KEPT,
    B_MARKERS,
    B_MARKS,
    B_NEXT_HORIZON,
    B_NOW_MS,
    B_READ,
    B_SUPERSEDED,
    B_SURVIVORS,
    B_SURVIVORS_END,
    B_SURVIVORS_FIRST,
    B_TOMBSTONES,
    K_BATCH,
    K_EXPIRED_BEFORE,
    K_HEADER,
    K_HEADER_SIZE,
    K_KEEP,
    K_KEEP_LEGACY_TOMBSTONES,
    K_KEYLESS,
    K_LAST_OFFSET,
    K_LIMIT,
    K_MAP,
    K_MAP_SLOTS,
    K_MARKS,
    K_MAX_OFFSET,
    K_MD5,
    K_MIN_OFFSET,
    K_NOT_TAKEN,
    K_NOW_MS,
    K_NULLED,
    K_ONLY_KNOWN,
    K_ORDER,
    K_RECORDS,
    K_ROOM,
    K_SCRATCH,
    K_SECRET_0,
    K_SECRET_1,
    K_SHARED_USED,
    K_SLOT_BYTES,
    K_STOP_OFFSET,
    K_SUPERSEDED,
    K_SURVIVORS,
    K_SURVIVORS_END,
    K_SURVIVORS_FIRST,
    K_TOMBSTONES,
    K_USED,
    W_BATCH,
    W_KEEP,
    W_OUT,
    W_OUT_SIZE,
    W_TABLE,
    W_TABLE_N,
)
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_SEQUENCE,
    BASE_TIMESTAMP,
    CODEC_MASK,
    CONTROL_BIT,
    COUNT,
    CRC,
    DELETE_HORIZON_BIT,
    HEADER_BYTES,
    LAST_OFFSET,
    LEADER_EPOCH,
    MAGIC,
    MAX_TIMESTAMP,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    POSITION,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    ROW_BYTES,
    SIZE,
    SKIP,
    TIMESTAMP_TYPE_BIT,
)

_AHEAD = 64  # keys hashed before their slots are touched, so that the memory is on its way
_HELD_BYTES = 48  # what waits for its slot: hash, offset, version, number of the record, batch or flags
_MD5_AT = _AHEAD * _HELD_BYTES  # behind those, room for the last two blocks of a message
_CLAIMED = -1  # the mark of a slot whose hash is being written
_INT64_MIN = -0x7FFFFFFFFFFFFFFF - 1
_MASK = 0xFFFFFFFF

# --- MD5, which Kafka's own cleaner takes ---------------------------------------------------------------------------

_MD5_SINES = np.array([int(abs(np.sin(i + 1)) * 2**32) & _MASK for i in range(64)], dtype=np.int64)
_MD5_SHIFTS = np.array([7, 12, 17, 22, 5, 9, 14, 20, 4, 11, 16, 23, 6, 10, 15, 21], dtype=np.int64)


@njit(nogil=True, error_model="numpy")
def _md5_block(a0, b0, c0, d0, address):
    a, b, c, d = a0, b0, c0, d0
    for i in range(64):
        if i < 16:
            f = (b & c) | (~b & d)
            g = i
        elif i < 32:
            f = (d & b) | (~d & c)
            g = (5 * i + 1) & 15
        elif i < 48:
            f = b ^ c ^ d
            g = (3 * i + 5) & 15
        else:
            f = c ^ (b | (~d & _MASK))
            g = (7 * i) & 15
        f = (f + a + _MD5_SINES[i] + (load32_le(address + 4 * g) & _MASK)) & _MASK
        a = d
        d = c
        c = b
        shift = _MD5_SHIFTS[(i >> 4) * 4 + (i & 3)]
        b = (b + ((f << shift) | (f >> (32 - shift)))) & _MASK
    return (a0 + a) & _MASK, (b0 + b) & _MASK, (c0 + c) & _MASK, (d0 + d) & _MASK


@njit(nogil=True, error_model="numpy")
def _md5(address, size, scratch):
    """The digest as two numbers; `scratch` has room for 128 bytes."""
    a, b, c, d = 0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476
    left = size
    while left >= 64:
        a, b, c, d = _md5_block(a, b, c, d, address)
        address += 64
        left -= 64
    blocks = 1 if left < 56 else 2
    for i in range(8 * blocks):
        store64_le(scratch + 8 * i, 0)
    copy(scratch, address, left)
    store8(scratch + left, 0x80)
    store64_le(scratch + 64 * blocks - 8, size << 3)
    for i in range(blocks):
        a, b, c, d = _md5_block(a, b, c, d, scratch + 64 * i)
    return a | (b << 32), c | (d << 32)


@njit(nogil=True, error_model="numpy")
def md5(address, size, scratch, result):
    """For tests: 16 bytes at `result`."""
    low, high = _md5(address, size, scratch)
    store64_le(result, low)
    store64_le(result + 8, high)
    return OK


# --- the map --------------------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy", forceinline=True)
def _find(map_address, map_slots, slot_bytes, low, high):
    """Address of the key's slot, or of the empty one where it belongs. One slot at least is always empty."""
    at = multiply_high(low, map_slots)
    while True:
        slot = map_address + at * slot_bytes
        if load64_le(slot + 16) == 0 or (load64_le(slot) == low and load64_le(slot + 8) == high):
            return slot
        at += 1
        if at == map_slots:
            at = 0


@njit(nogil=True, error_model="numpy")
def _version(order, timestamp, headers, end, count, name, name_size):
    """What decides between two records of a key beside their offsets; a record without the header loses."""
    if order == ORDER_TIMESTAMP:
        return timestamp
    version = _INT64_MIN
    for _ in range(count):
        headers, key, key_length, value, value_length = _parse_header(headers, end)
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


@njit(nogil=True, error_model="numpy")
def _put_held(block, held, count, used):
    """Put what waits into the map, in order: (keys known then, OK or FULL)."""
    map_address = _slot(block, K_MAP)
    map_slots = _slot(block, K_MAP_SLOTS)
    slot_bytes = _slot(block, K_SLOT_BYTES)
    limit = _slot(block, K_LIMIT)
    room = _slot(block, K_ROOM)
    order = _slot(block, K_ORDER)
    only_known = _slot(block, K_ONLY_KNOWN) != 0
    for i in range(count):
        low = load64_le(held)
        high = load64_le(held + 8)
        offset = load64_le(held + 16)
        if used >= limit and not only_known:  # Kafka stops here, too, even at a key it knows
            _set_slot(block, K_STOP_OFFSET, offset)
            _set_slot(block, K_NOT_TAKEN, count - i)
            return used, FULL
        slot = _find(map_address, map_slots, slot_bytes, low, high)
        known = load64_le(slot + 16)
        if known == 0:
            if not only_known:
                if used >= room:
                    _set_slot(block, K_STOP_OFFSET, offset)
                    _set_slot(block, K_NOT_TAKEN, count - i)
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
        _set_slot(block, K_LAST_OFFSET, offset)
        held += _HELD_BYTES
    return used, OK


@njit(nogil=True, error_model="numpy")
def _put_shared(block, held, count):
    """The same while other threads put keys into the map, too: OK or FULL. For the order of offsets only.

    A slot is claimed by its mark, and whoever comes upon it waits until the hash is there; marks only grow.
    """
    map_address = _slot(block, K_MAP)
    map_slots = _slot(block, K_MAP_SLOTS)
    slot_bytes = _slot(block, K_SLOT_BYTES)
    room = _slot(block, K_ROOM)
    shared_used = _slot(block, K_SHARED_USED)
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
                    _set_slot(block, K_NOT_TAKEN, count - i)
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
        held += _HELD_BYTES
    return OK


@njit(nogil=True, error_model="numpy")
def index_keys(table, first, last, block):
    """Put the keys of batches [first, last) into the map, of offsets from K_MIN_OFFSET up to K_MAX_OFFSET; batches
    marked SKIP are passed over.

    OK, BAD_RECORD with the batch in K_BATCH, or FULL: the record at K_STOP_OFFSET was not taken, K_LAST_OFFSET was the
    last that was. K_RECORDS and K_KEYLESS count what was taken or has no key. With K_ONLY_KNOWN no key is added. With
    K_SHARED_USED other threads may fill the map at the same time; then FULL does not tell where.
    """
    min_offset = _slot(block, K_MIN_OFFSET)
    max_offset = _slot(block, K_MAX_OFFSET)
    map_address = _slot(block, K_MAP)
    map_slots = _slot(block, K_MAP_SLOTS)
    slot_bytes = _slot(block, K_SLOT_BYTES)
    used = _slot(block, K_USED)
    k0 = _slot(block, K_SECRET_0)
    k1 = _slot(block, K_SECRET_1)
    use_md5 = _slot(block, K_MD5) != 0
    scratch = _slot(block, K_SCRATCH)
    order = _slot(block, K_ORDER)
    name = _slot(block, K_HEADER)
    name_size = _slot(block, K_HEADER_SIZE)
    shared = _slot(block, K_SHARED_USED) != 0
    records = 0
    keyless = 0
    waiting = 0
    code = OK
    b = first
    _set_slot(block, K_NOT_TAKEN, 0)
    while b < last and code == OK:
        row = table + b * ROW_BYTES
        if _slot(row, SKIP) == 0:
            address = _slot(row, PAYLOAD_ADDRESS)
            end = address + _slot(row, PAYLOAD_SIZE)
            base_offset = _slot(row, BASE_OFFSET)
            last_delta = _slot(row, LAST_OFFSET) - base_offset
            base_ts = _slot(row, BASE_TIMESTAMP)
            append_time = _slot(row, ATTRIBUTES) & TIMESTAMP_TYPE_BIT
            max_ts = _slot(row, MAX_TIMESTAMP)
            previous = -1
            for _ in range(_slot(row, COUNT)):
                address, ts_delta, delta, key, key_length, _value, _value_length, headers, count = _parse_record(
                    address, end
                )
                if address == 0 or delta <= previous or delta > last_delta:
                    code = BAD_RECORD
                    break
                if count > 0 and not _headers_sound(headers, address, count):
                    code = BAD_RECORD
                    break
                previous = delta
                offset = base_offset + delta
                if offset < min_offset or offset >= max_offset:
                    continue
                records += 1
                if key_length < 0:
                    keyless += 1
                    continue
                if use_md5:
                    low, high = _md5(key, key_length, scratch + _MD5_AT)
                else:
                    low, high = _sip_hash(key, key_length, k0, k1)
                prefetch(map_address + multiply_high(low, map_slots) * slot_bytes)
                held = scratch + waiting * _HELD_BYTES
                store64_le(held, low)
                store64_le(held + 8, high)
                store64_le(held + 16, offset)
                if order != ORDER_OFFSET:
                    timestamp = max_ts if append_time != 0 else add_wrapping(base_ts, ts_delta)
                    store64_le(held + 24, _version(order, timestamp, headers, address, count, name, name_size))
                waiting += 1
                if waiting == _AHEAD:
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
    _set_slot(block, K_USED, used)
    _set_slot(block, K_BATCH, b)
    _set_slot(block, K_RECORDS, records - _slot(block, K_NOT_TAKEN))
    _set_slot(block, K_KEYLESS, keyless)
    return code


@njit(nogil=True, error_model="numpy")
def merge_maps(source, source_slots, block):
    """Put all entries of another map of the same hash into this one, the greater winning; OK or FULL (no room)."""
    map_address = _slot(block, K_MAP)
    map_slots = _slot(block, K_MAP_SLOTS)
    slot_bytes = _slot(block, K_SLOT_BYTES)
    used = _slot(block, K_USED)
    room = _slot(block, K_ROOM)
    order = _slot(block, K_ORDER)
    code = OK
    for i in range(source_slots):
        entry = source + i * slot_bytes
        if i + _AHEAD < source_slots:
            ahead = load64_le(entry + _AHEAD * slot_bytes)
            prefetch(map_address + multiply_high(ahead, map_slots) * slot_bytes)
        mark = load64_le(entry + 16)
        if mark == 0:
            continue
        low = load64_le(entry)
        high = load64_le(entry + 8)
        slot = _find(map_address, map_slots, slot_bytes, low, high)
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
    _set_slot(block, K_USED, used)
    return code


@njit(nogil=True, error_model="numpy")
def mark_offsets(source, source_slots, slot_bytes, first_offset, end_offset, bits):
    """Set the bits of those offsets of [first_offset, end_offset) that the map holds."""
    for i in range(source_slots):
        mark = load64_le(source + i * slot_bytes + 16)
        at = mark - 1 - first_offset
        if mark != 0 and 0 <= at < end_offset - first_offset:
            byte = bits + (at >> 3)
            store8(byte, load8(byte) | (1 << (at & 7)))
    return OK


# --- verdicts on batches ----------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy", forceinline=True)
def _add(block, slot, value):
    _set_slot(block, slot, _slot(block, slot) + value)


@njit(nogil=True, error_model="numpy")
def _none_survives(row, bits, known_from, known_to):
    """Whether it is known that no offset of the batch is a key's last."""
    first = _slot(row, BASE_OFFSET)
    last = _slot(row, LAST_OFFSET)
    if bits == 0 or _slot(row, MAGIC) != 2 or first < known_from or last >= known_to:
        return False
    found = 0
    for byte in range((first - known_from) >> 3, ((last - known_from) >> 3) + 1):  # others' bits may be in both ends
        found |= load8(bits + byte)
    return found == 0


@njit(nogil=True, error_model="numpy")
def skip_superseded(table, count, bits, known_from, known_to):
    """Mark the batches SKIP of which nothing survives; `bits` are as K_SURVIVORS."""
    for b in range(count):
        row = table + b * ROW_BYTES
        if _none_survives(row, bits, known_from, known_to):
            _set_slot(row, SKIP, 1)
    return OK


@njit(nogil=True, error_model="numpy")
def judge_batches(table, count, block):
    """What is decided without looking at records: batches that go as they are, or in which nothing is to be looked at,
    are marked SKIP. Reads MARK_MAY_GO; sets MARK_KEPT and MARK_CODEC, and MARK_STAYS where the last offset must stay.
    """
    now_ms = _slot(block, B_NOW_MS)
    marks = _slot(block, B_MARKS)
    bits = _slot(block, B_SURVIVORS)
    known_from = _slot(block, B_SURVIVORS_FIRST)
    known_to = _slot(block, B_SURVIVORS_END)
    for b in range(count):
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        attributes = _slot(row, ATTRIBUTES)
        v2 = _slot(row, MAGIC) == 2
        records = _slot(row, COUNT)
        control = v2 and attributes & CONTROL_BIT != 0
        passed = attributes & DELETE_HORIZON_BIT != 0 and _slot(row, BASE_TIMESTAMP) <= now_ms
        drop = _slot(mark, MARK_MAY_GO) != 0 and (not control or passed)
        skip = drop or control or (v2 and records == 0)
        if drop:
            _add(block, B_MARKERS if control else B_ABORTED, records)
        elif control:
            _set_slot(mark, MARK_KEPT, records)
        elif _none_survives(row, bits, known_from, known_to):
            skip = True
            _add(block, B_SUPERSEDED, records)
        _set_slot(row, SKIP, 1 if skip else 0)
        _set_slot(mark, MARK_CODEC, attributes & CODEC_MASK)  # opening a legacy set leaves none in the table
        if _slot(row, LAST_OFFSET) + 1 == _slot(block, B_FIRST_UNCLEANABLE):
            _set_slot(mark, MARK_STAYS, 1)
    return OK


@njit(nogil=True, error_model="numpy")
def choose_actions(table, first, last, block):
    """What becomes of batches [first, last), whose records have been judged, and the counts of what stays."""
    marks = _slot(block, B_MARKS)
    for b in range(first, last):
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        attributes = _slot(row, ATTRIBUTES)
        v2 = _slot(row, MAGIC) == 2
        control = attributes & CONTROL_BIT != 0
        kept = _slot(mark, MARK_KEPT)
        tombstones = _slot(mark, MARK_TOMBSTONES)
        codec = _slot(mark, MARK_CODEC)
        new_codec = codec if control or _slot(block, B_CODEC) < 0 else _slot(block, B_CODEC)
        _set_slot(mark, MARK_CODEC, new_codec)
        horizon = -1
        sets_horizon = False
        if v2 and attributes & DELETE_HORIZON_BIT != 0:
            horizon = _slot(row, BASE_TIMESTAMP)
        elif kept > 0 and (tombstones > 0 or (control and _slot(mark, MARK_MAY_GO) != 0)):
            horizon = _slot(block, B_NOW_MS) + _slot(block, B_DELETE_RETENTION_MS)
            sets_horizon = True
        _set_slot(mark, MARK_HORIZON, horizon)
        action = DELETE
        if kept > 0:
            whole = v2 and kept == _slot(row, COUNT) and _slot(mark, MARK_NULLED) == 0
            action = VERBATIM if whole and not sets_horizon and codec == new_codec else REBUILD
        elif _slot(mark, MARK_STAYS) != 0:
            is_empty = v2 and _slot(row, SIZE) == HEADER_BYTES and _slot(row, BASE_TIMESTAMP) == -1
            is_empty = is_empty and attributes & (CODEC_MASK | DELETE_HORIZON_BIT) == 0
            action = VERBATIM if is_empty else EMPTY
        _set_slot(mark, MARK_ACTION, action)
        if action != VERBATIM:
            _add(block, B_CHANGED, 1)
        if not control:
            _add(block, B_READ, max(_slot(row, COUNT), 0))
            _add(block, B_KEPT, kept)
            _add(block, B_TOMBSTONES, tombstones)
        if (tombstones > 0 or (control and kept > 0)) and 0 <= horizon < _slot(block, B_NEXT_HORIZON):
            _set_slot(block, B_NEXT_HORIZON, horizon)
    return OK


# --- verdicts on records ----------------------------------------------------------------------------------------------

_TOMBSTONE = 1
_HORIZON_PASSED = 2
_EXPIRED = 4


@njit(nogil=True, error_model="numpy")
def _judge_held(block, held, count):
    map_address = _slot(block, K_MAP)
    map_slots = _slot(block, K_MAP_SLOTS)
    slot_bytes = _slot(block, K_SLOT_BYTES)
    order = _slot(block, K_ORDER)
    marks = _slot(block, K_MARKS)
    keep = _slot(block, K_KEEP)
    superseded = _slot(block, K_SUPERSEDED)
    tombstones = _slot(block, K_TOMBSTONES)
    nulled = _slot(block, K_NULLED)
    for _ in range(count):
        slot = _find(map_address, map_slots, slot_bytes, load64_le(held), load64_le(held + 8))
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
            _set_slot(batch, MARK_NULLED, _slot(batch, MARK_NULLED) + 1)
        if kept != DROP_RECORD:
            _set_slot(batch, MARK_KEPT, _slot(batch, MARK_KEPT) + 1)
            if flags & _TOMBSTONE != 0 or kept == NULL_RECORD:
                _set_slot(batch, MARK_TOMBSTONES, _slot(batch, MARK_TOMBSTONES) + 1)
        store8(keep + seen, kept)
        held += _HELD_BYTES
    _set_slot(block, K_SUPERSEDED, superseded)
    _set_slot(block, K_TOMBSTONES, tombstones)
    _set_slot(block, K_NULLED, nulled)


@njit(nogil=True, error_model="numpy")
def _judge_marked(row, batch, block, keep, passed):
    """Verdicts on a batch whose survivors are known by their offsets; no key is looked for. OK or BAD_RECORD."""
    expired_before = _slot(block, K_EXPIRED_BEFORE)
    address = _slot(row, PAYLOAD_ADDRESS)
    end = address + _slot(row, PAYLOAD_SIZE)
    count = _slot(row, COUNT)
    bits = _slot(block, K_SURVIVORS)
    first_offset = _slot(block, K_SURVIVORS_FIRST)
    end_offset = _slot(block, K_SURVIVORS_END)
    kept = 0
    tombstones = 0
    gone_tombstones = 0
    nulled = 0
    for i in range(count):
        begin = address
        address, survives = _marked_record(begin, end, i, row, bits, first_offset, end_offset)
        if address == 0:
            return BAD_RECORD
        if survives == 0:
            store8(keep + i, DROP_RECORD)
            continue
        after, ts_delta, _delta, _key, _key_length, _value, value_length, _headers, _count = _parse_record(begin, end)
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
            timestamp = _slot(row, MAX_TIMESTAMP)
            if _slot(row, ATTRIBUTES) & TIMESTAMP_TYPE_BIT == 0:
                timestamp = add_wrapping(_slot(row, BASE_TIMESTAMP), ts_delta)
            if 0 <= timestamp < expired_before:
                verdict = NULL_RECORD
                nulled += 1
                tombstones += 1
        if verdict != DROP_RECORD:
            kept += 1
        store8(keep + i, verdict)
    if address != end:
        return BAD_RECORD
    _set_slot(batch, MARK_KEPT, kept)
    _set_slot(batch, MARK_TOMBSTONES, tombstones)
    _set_slot(batch, MARK_NULLED, nulled)
    _set_slot(block, K_SUPERSEDED, _slot(block, K_SUPERSEDED) + count - kept - gone_tombstones)
    _set_slot(block, K_TOMBSTONES, _slot(block, K_TOMBSTONES) + gone_tombstones)
    _set_slot(block, K_NULLED, _slot(block, K_NULLED) + nulled)
    return OK


@njit(nogil=True, error_model="numpy")
def judge(table, first, last, block):
    """One byte for each record of batches [first, last) that are not marked SKIP, at K_KEEP: stays, goes, or loses its
    value; and the counts of each batch into its marks.

    Records from K_MAX_OFFSET on stay. OK, or BAD_RECORD with K_BATCH. K_KEYLESS, K_SUPERSEDED, K_TOMBSTONES and
    K_NULLED are added to.
    """
    max_offset = _slot(block, K_MAX_OFFSET)
    map_address = _slot(block, K_MAP)
    map_slots = _slot(block, K_MAP_SLOTS)
    slot_bytes = _slot(block, K_SLOT_BYTES)
    k0 = _slot(block, K_SECRET_0)
    k1 = _slot(block, K_SECRET_1)
    use_md5 = _slot(block, K_MD5) != 0
    scratch = _slot(block, K_SCRATCH)
    now_ms = _slot(block, K_NOW_MS)
    keep_legacy = _slot(block, K_KEEP_LEGACY_TOMBSTONES) != 0
    expired_before = _slot(block, K_EXPIRED_BEFORE)
    marks = _slot(block, K_MARKS)
    keep = _slot(block, K_KEEP)
    keyless = _slot(block, K_KEYLESS)
    marked = _slot(block, K_SURVIVORS) != 0
    marked_from = _slot(block, K_SURVIVORS_FIRST)
    marked_to = _slot(block, K_SURVIVORS_END)
    waiting = 0
    seen = 0
    for b in range(first, last):
        row = table + b * ROW_BYTES
        if _slot(row, SKIP) != 0:
            continue
        address = _slot(row, PAYLOAD_ADDRESS)
        end = address + _slot(row, PAYLOAD_SIZE)
        base_offset = _slot(row, BASE_OFFSET)
        last_delta = _slot(row, LAST_OFFSET) - base_offset
        base_ts = _slot(row, BASE_TIMESTAMP)
        attributes = _slot(row, ATTRIBUTES)
        max_ts = _slot(row, MAX_TIMESTAMP)
        if _slot(row, MAGIC) == 2:
            passed = _HORIZON_PASSED if attributes & DELETE_HORIZON_BIT != 0 and base_ts <= now_ms else 0
        else:
            passed = 0 if keep_legacy else _HORIZON_PASSED
        batch = marks + b * MARK_BYTES
        if marked and _slot(row, MAGIC) == 2 and base_offset >= marked_from and base_offset + last_delta < marked_to:
            if _judge_marked(row, batch, block, keep + seen, passed != 0) != OK:
                _set_slot(block, K_BATCH, b)
                return BAD_RECORD
            seen += _slot(row, COUNT)
            continue
        previous = -1
        for _ in range(_slot(row, COUNT)):
            address, ts_delta, delta, key, key_length, _value, value_length, headers, count = _parse_record(
                address, end
            )
            if address == 0 or delta <= previous or delta > last_delta:
                _set_slot(block, K_BATCH, b)
                return BAD_RECORD
            if count > 0 and not _headers_sound(headers, address, count):
                _set_slot(block, K_BATCH, b)
                return BAD_RECORD
            previous = delta
            offset = base_offset + delta
            if offset >= max_offset:
                store8(keep + seen, KEEP_RECORD)
                _set_slot(batch, MARK_KEPT, _slot(batch, MARK_KEPT) + 1)
                if value_length < 0:
                    _set_slot(batch, MARK_TOMBSTONES, _slot(batch, MARK_TOMBSTONES) + 1)
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
                low, high = _md5(key, key_length, scratch + _MD5_AT)
            else:
                low, high = _sip_hash(key, key_length, k0, k1)
            prefetch_read(map_address + multiply_high(low, map_slots) * slot_bytes)
            held = scratch + waiting * _HELD_BYTES
            store64_le(held, low)
            store64_le(held + 8, high)
            store64_le(held + 16, offset)
            store64_le(held + 24, flags)
            store64_le(held + 32, seen)
            store64_le(held + 40, b)
            seen += 1
            waiting += 1
            if waiting == _AHEAD:
                _judge_held(block, scratch, waiting)
                waiting = 0
        if address != end:
            _set_slot(block, K_BATCH, b)
            return BAD_RECORD
    if waiting > 0:
        _judge_held(block, scratch, waiting)
    _set_slot(block, K_KEYLESS, keyless)
    return OK


# --- batches written anew ---------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
def _finished(out_row, position, batch, size, attributes, compressed):
    """Note a written batch in the output table; its CRC is made here unless it is yet to be compressed."""
    crc = 0
    if not compressed:
        crc = _crc(batch + 21, size - 21)
        store32(batch + 17, crc)
    _set_slot(out_row, POSITION, position)
    _set_slot(out_row, SIZE, size)
    _set_slot(out_row, MAGIC, 2)
    _set_slot(out_row, ATTRIBUTES, attributes)
    _set_slot(out_row, CRC, crc)
    _set_slot(out_row, PAYLOAD_ADDRESS, batch + HEADER_BYTES)
    _set_slot(out_row, PAYLOAD_SIZE, size - HEADER_BYTES)
    _set_slot(out_row, SKIP, 0 if compressed else 1)


@njit(nogil=True, error_model="numpy")
def rewrite_room(table, marks, first, last):
    """Bytes that `rewrite` needs at most: a record's length and deltas may take 16 bytes more than they did."""
    room = HEADER_BYTES * (last - first)
    for b in range(first, last):
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        if _slot(mark, MARK_ACTION) == VERBATIM:
            room += _slot(row, SIZE)
        elif _slot(mark, MARK_ACTION) == REBUILD:
            room += _slot(row, PAYLOAD_SIZE) + 16 * _slot(mark, MARK_KEPT)
    return room


@njit(nogil=True, error_model="numpy")
def rewrite(data, table, marks, first, last, block):
    """Write batches [first, last) as their marks say: as they are, emptied, or with the records that stay.

    A batch marked SKIP whose action is REBUILD keeps all its records. The output has room for everything (caller's
    promise). Rows of the output table whose SKIP is 0 are yet to be compressed. OK, or BAD_RECORD with W_BATCH.
    """
    keep = _slot(block, W_KEEP)
    out_start = _slot(block, W_OUT)
    out_table = _slot(block, W_TABLE)
    out = out_start
    made = 0
    seen = 0
    b = first
    while b < last:
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        action = _slot(mark, MARK_ACTION)
        judged = _slot(row, COUNT) if _slot(row, SKIP) == 0 else 0
        out_row = out_table + made * ROW_BYTES
        if action == DELETE:
            seen += judged
            b += 1
            continue
        if action == VERBATIM:
            size = _slot(row, SIZE)
            copy(out, data + _slot(row, POSITION), size)
            copy(out_row, row, ROW_BYTES)
            _set_slot(out_row, POSITION, out - out_start)
            _set_slot(out_row, SKIP, 1)
            out += size
            made += 1
            seen += judged
            b += 1
            continue
        base_offset = _slot(row, BASE_OFFSET)
        attributes = _slot(row, ATTRIBUTES) & ~(CODEC_MASK | DELETE_HORIZON_BIT)
        epoch = _slot(row, LEADER_EPOCH)
        producer_id = _slot(row, PRODUCER_ID)
        producer_epoch = _slot(row, PRODUCER_EPOCH)
        sequence = _slot(row, BASE_SEQUENCE)
        max_ts = _slot(row, MAX_TIMESTAMP)
        last_offset = _slot(row, LAST_OFFSET)
        base_ts = -1
        written = 0
        size = HEADER_BYTES
        if action == EMPTY:
            seen += judged
            b += 1
        else:
            attributes |= _slot(mark, MARK_CODEC)
            horizon = _slot(mark, MARK_HORIZON)
            if horizon >= 0:
                attributes |= DELETE_HORIZON_BIT
                base_ts = horizon
            legacy = _slot(row, MAGIC) < 2
            append_time = attributes & TIMESTAMP_TYPE_BIT != 0
            out_max_ts = max_ts if append_time else -1
            address_out = out + HEADER_BYTES
            last_written = base_offset
            going = True
            while going:
                all_kept = _slot(row, SKIP) != 0
                address = _slot(row, PAYLOAD_ADDRESS)
                end = address + _slot(row, PAYLOAD_SIZE)
                source_base = _slot(row, BASE_OFFSET)
                source_ts = _slot(row, BASE_TIMESTAMP)
                source_max_ts = _slot(row, MAX_TIMESTAMP)
                for _ in range(_slot(row, COUNT)):
                    kept = KEEP_RECORD
                    if not all_kept:
                        kept = load8(keep + seen)
                        seen += 1
                    length, body = _read_varint(address, end, 5)
                    if body == 0 or length < 1 or length > end - body:
                        _set_slot(block, W_BATCH, b)
                        return BAD_RECORD
                    record_end = body + length
                    if kept == DROP_RECORD:
                        address = record_end
                        continue
                    ts_delta, at = _read_varint(body + 1, record_end, 10)
                    if at == 0:
                        _set_slot(block, W_BATCH, b)
                        return BAD_RECORD
                    delta, at = _read_varint(at, record_end, 5)
                    if at == 0:
                        _set_slot(block, W_BATCH, b)
                        return BAD_RECORD
                    timestamp = source_max_ts if append_time else add_wrapping(source_ts, ts_delta)
                    offset = source_base + delta
                    if written == 0:
                        if horizon < 0:
                            base_ts = timestamp
                        if legacy:
                            base_offset = offset
                    new_ts_delta = sub_wrapping(timestamp, base_ts)
                    new_delta = offset - base_offset
                    rest = record_end - at
                    if kept == NULL_RECORD:
                        _end, _t, _d, key, key_length, value, value_length, _headers, _n = _parse_record(address, end)
                        before = key + max(key_length, 0) - at  # key length and key
                        after = value + max(value_length, 0)  # header count and headers
                        rest = before + 1 + record_end - after
                    new_length = 1 + _varint_size(new_ts_delta) + _varint_size(new_delta) + rest
                    address_out = _write_varint(address_out, new_length)
                    store8(address_out, 0)
                    address_out = _write_varint(address_out + 1, new_ts_delta)
                    address_out = _write_varint(address_out, new_delta)
                    if kept == NULL_RECORD:
                        copy(address_out, at, before)
                        address_out += before
                        store8(address_out, 1)  # the length -1
                        address_out += 1
                        copy(address_out, after, record_end - after)
                        address_out += record_end - after
                    else:
                        copy(address_out, at, rest)
                        address_out += rest
                    written += 1
                    last_written = offset
                    if not append_time and timestamp > out_max_ts:
                        out_max_ts = timestamp
                    address = record_end
                last_offset = _slot(row, LAST_OFFSET)
                b += 1
                # what is to be joined may lie behind batches of which nothing stays
                while b < last and _slot(marks + b * MARK_BYTES, MARK_ACTION) == DELETE:
                    skipped = table + b * ROW_BYTES
                    if _slot(skipped, SKIP) == 0:
                        seen += _slot(skipped, COUNT)
                    b += 1
                going = b < last and _slot(marks + b * MARK_BYTES, MARK_JOIN) != 0
                if going:
                    row = table + b * ROW_BYTES
            if legacy:
                last_offset = last_written
            max_ts = out_max_ts
            size = address_out - out
        _write_batch_header(
            out,
            size,
            base_offset,
            epoch,
            attributes,
            last_offset - base_offset,
            base_ts,
            max_ts,
            producer_id,
            producer_epoch,
            sequence,
            written,
        )
        _set_slot(out_row, BASE_OFFSET, base_offset)
        _set_slot(out_row, LAST_OFFSET, last_offset)
        _set_slot(out_row, LEADER_EPOCH, epoch)
        _set_slot(out_row, BASE_TIMESTAMP, base_ts)
        _set_slot(out_row, MAX_TIMESTAMP, max_ts)
        _set_slot(out_row, PRODUCER_ID, producer_id)
        _set_slot(out_row, PRODUCER_EPOCH, producer_epoch)
        _set_slot(out_row, BASE_SEQUENCE, sequence)
        _set_slot(out_row, COUNT, written)
        _finished(out_row, out - out_start, out, size, attributes, attributes & CODEC_MASK != 0)
        out += size
        made += 1
    _set_slot(block, W_OUT_SIZE, out - out_start)
    _set_slot(block, W_TABLE_N, made)
    return OK


#: name -> number of int64 parameters
KERNELS = {
    "md5": 4,
    "index_keys": 4,
    "merge_maps": 3,
    "mark_offsets": 6,
    "skip_superseded": 5,
    "judge_batches": 3,
    "judge": 4,
    "choose_actions": 4,
    "rewrite_room": 4,
    "rewrite": 6,
}

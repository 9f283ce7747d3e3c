"""The records of batches to columns."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_RECORD, FULL, OK
from logstore.records.kernels.intrinsics import (
    add_wrapping,
    copy,
    fill,
    jit,
    load8,
    load_slot,
    store8,
    store32_le,
    store64_le,
    store_slot,
)
from logstore.records.kernels.record import headers_sound, parse_header, parse_record
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


@jit
def _decode_plain(address, end, count, base_offset, last_delta, base_ts, n, columns, key_end, value_end):
    """The records of a batch up to the first that is not plain: (how many, next address, key end, value end).

    Plain: key and value are there and below 8 KiB, no headers, nothing wrong. Nearly every record is plain, and needs
    fewer checks; `decode` handles all others, malformed ones too.
    """
    offsets = load_slot(columns, slots.D_OFFSETS)
    timestamps = load_slot(columns, slots.D_TIMESTAMPS)
    key_offsets = load_slot(columns, slots.D_KEY_OFFSETS) + 4
    key_data = load_slot(columns, slots.D_KEY_DATA)
    value_offsets = load_slot(columns, slots.D_VALUE_OFFSETS) + 4
    value_data = load_slot(columns, slots.D_VALUE_DATA)
    stop_at = n + count
    first = n
    previous = -1
    while n < stop_at:
        if end - address < 2:
            break
        length = load8(address)
        at = address + 1
        if length >= 0x80:
            byte = load8(at)
            at += 1
            length = (length & 0x7F) | (byte << 7)
            if byte >= 0x80:
                break
        record_end = at + (length >> 1)
        # Eight bytes hold the attributes and the three varints up to the key at the lengths they may have here.
        if length & 1 != 0 or length < 2 * 8 or record_end > end:
            break
        ts_delta = load8(at + 1)
        at += 2
        if ts_delta >= 0x80:
            byte = load8(at)
            at += 1
            ts_delta = (ts_delta & 0x7F) | (byte << 7)
            if byte >= 0x80:
                byte = load8(at)
                at += 1
                ts_delta = (ts_delta & 0x3FFF) | (byte << 14)
                if byte >= 0x80:
                    break
        delta = load8(at)
        at += 1
        if delta >= 0x80:
            byte = load8(at)
            at += 1
            delta = (delta & 0x7F) | (byte << 7)
            if byte >= 0x80:
                break
        key_length = load8(at)
        at += 1
        if key_length >= 0x80:
            byte = load8(at)
            at += 1
            key_length = (key_length & 0x7F) | (byte << 7)
            if byte >= 0x80:
                break
        if (delta | key_length) & 1 != 0:
            break
        delta >>= 1
        key_length >>= 1
        key = at
        at += key_length
        if at + 2 > record_end or delta <= previous or delta > last_delta:
            break
        value_length = load8(at)
        at += 1
        if value_length >= 0x80:
            byte = load8(at)
            at += 1
            value_length = (value_length & 0x7F) | (byte << 7)
            if byte >= 0x80:
                break
        if value_length & 1 != 0:
            break
        value_length >>= 1
        if at + value_length + 1 != record_end or load8(record_end - 1) != 0:
            break
        previous = delta
        address = record_end
        store64_le(offsets + n * 8, base_offset + delta)
        store64_le(timestamps + n * 8, add_wrapping(base_ts, (ts_delta >> 1) ^ -(ts_delta & 1)))
        copy(key_data + key_end, key, key_length)
        key_end += key_length
        store32_le(key_offsets + n * 4, key_end)
        copy(value_data + value_end, at, value_length)
        value_end += value_length
        store32_le(value_offsets + n * 4, value_end)
        n += 1
    return n - first, address, key_end, value_end, previous


@jit
def decode(table, first, last, block):
    """Records of batches [first, last) into columns; OK, BAD_RECORD or FULL (headers), with D_N records written.

    Batches marked SKIP are passed over, and with D_KEEP (one byte a record of the others, see `map_keep`) records
    whose byte is 0. On failure D_BATCH is the batch at fault. Key and value data have room for all payload
    bytes (caller's promise).
    """
    min_offset = load_slot(block, slots.D_MIN_OFFSET)
    max_offset = load_slot(block, slots.D_MAX_OFFSET)
    offsets = load_slot(block, slots.D_OFFSETS)
    timestamps = load_slot(block, slots.D_TIMESTAMPS)
    timestamp_types = load_slot(block, slots.D_TIMESTAMP_TYPES)
    key_offsets = load_slot(block, slots.D_KEY_OFFSETS)
    key_data = load_slot(block, slots.D_KEY_DATA)
    key_valid = load_slot(block, slots.D_KEY_VALID)
    value_offsets = load_slot(block, slots.D_VALUE_OFFSETS)
    value_data = load_slot(block, slots.D_VALUE_DATA)
    value_valid = load_slot(block, slots.D_VALUE_VALID)
    header_offsets = load_slot(block, slots.D_HEADER_OFFSETS)
    header_capacity = load_slot(block, slots.D_HEADER_CAPACITY)
    header_key_offsets = load_slot(block, slots.D_HEADER_KEY_OFFSETS)
    header_key_data = load_slot(block, slots.D_HEADER_KEY_DATA)
    header_value_offsets = load_slot(block, slots.D_HEADER_VALUE_OFFSETS)
    header_value_data = load_slot(block, slots.D_HEADER_VALUE_DATA)
    header_value_valid = load_slot(block, slots.D_HEADER_VALUE_VALID)
    keep = load_slot(block, slots.D_KEEP)
    seen = 0
    n = 0
    headers_n = 0
    key_nulls = 0
    value_nulls = 0
    header_nulls = 0
    key_end = 0
    value_end = 0
    header_key_end = 0
    header_value_end = 0
    code = OK
    b = first
    while b < last:
        row = table + b * ROW_BYTES
        if load_slot(row, SKIP) != 0:
            b += 1
            continue
        address = load_slot(row, PAYLOAD_ADDRESS)
        end = address + load_slot(row, PAYLOAD_SIZE)
        base_offset = load_slot(row, BASE_OFFSET)
        last_delta = load_slot(row, LAST_OFFSET) - base_offset
        base_ts = load_slot(row, BASE_TIMESTAMP)
        append_time = load_slot(row, ATTRIBUTES) & TIMESTAMP_TYPE_BIT
        max_ts = load_slot(row, MAX_TIMESTAMP)
        previous = -1
        left = load_slot(row, COUNT)
        if keep == 0 and base_offset >= min_offset and base_offset + last_delta < max_offset:
            plain, address, key_end, value_end, previous = _decode_plain(
                address, end, left, base_offset, last_delta, base_ts, n, block, key_end, value_end
            )
            fill(timestamp_types + n, append_time >> 3, plain)
            if append_time != 0:
                for at in range(n, n + plain):
                    store64_le(timestamps + at * 8, max_ts)
            fill(key_valid + n, 1, plain)
            fill(value_valid + n, 1, plain)
            if header_capacity >= 0:
                for at in range(n + 1, n + plain + 1):
                    store32_le(header_offsets + at * 4, headers_n)
            n += plain
            left -= plain
        for _ in range(left):
            address, ts_delta, delta, key, key_length, value, value_length, headers, header_count = parse_record(
                address, end
            )
            if address == 0 or delta <= previous or delta > last_delta:
                code = BAD_RECORD
                break
            previous = delta
            offset = base_offset + delta
            seen += 1
            if offset < min_offset or offset >= max_offset or (keep != 0 and load8(keep + seen - 1) == 0):
                if header_count > 0 and not headers_sound(headers, address, header_count):
                    code = BAD_RECORD
                    break
                continue
            store64_le(offsets + n * 8, offset)
            store64_le(timestamps + n * 8, max_ts if append_time != 0 else add_wrapping(base_ts, ts_delta))
            store8(timestamp_types + n, append_time >> 3)
            if key_length >= 0:
                copy(key_data + key_end, key, key_length)
                key_end += key_length
                store8(key_valid + n, 1)
            else:
                store8(key_valid + n, 0)
                key_nulls += 1
            store32_le(key_offsets + (n + 1) * 4, key_end)
            if value_length >= 0:
                copy(value_data + value_end, value, value_length)
                value_end += value_length
                store8(value_valid + n, 1)
            else:
                store8(value_valid + n, 0)
                value_nulls += 1
            store32_le(value_offsets + (n + 1) * 4, value_end)
            if header_count > 0:
                if header_capacity < 0:
                    if not headers_sound(headers, address, header_count):
                        code = BAD_RECORD
                        break
                else:
                    if headers_n + header_count > header_capacity:
                        code = FULL
                        break
                    position = headers
                    for _h in range(header_count):
                        position, name, name_length, content, content_length = parse_header(position, address)
                        if position == 0:
                            break
                        copy(header_key_data + header_key_end, name, name_length)
                        header_key_end += name_length
                        store32_le(header_key_offsets + (headers_n + 1) * 4, header_key_end)
                        if content_length >= 0:
                            copy(header_value_data + header_value_end, content, content_length)
                            header_value_end += content_length
                            store8(header_value_valid + headers_n, 1)
                        else:
                            store8(header_value_valid + headers_n, 0)
                            header_nulls += 1
                        store32_le(header_value_offsets + (headers_n + 1) * 4, header_value_end)
                        headers_n += 1
                    if position != address:
                        code = BAD_RECORD
                        break
            n += 1
            if header_capacity >= 0:
                store32_le(header_offsets + n * 4, headers_n)
        if code != OK:
            break
        if address != end:
            code = BAD_RECORD
            break
        b += 1
    store_slot(block, slots.D_N, n)
    store_slot(block, slots.D_HEADER_N, headers_n)
    store_slot(block, slots.D_KEY_NULLS, key_nulls)
    store_slot(block, slots.D_VALUE_NULLS, value_nulls)
    store_slot(block, slots.D_HEADER_VALUE_NULLS, header_nulls)
    store_slot(block, slots.D_BATCH, b)
    return code

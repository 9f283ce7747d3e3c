"""Columns to finished v2 batches."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import FULL, OK
from logstore.records.kernels.checksum import crc_of
from logstore.records.kernels.intrinsics import (
    add_wrapping,
    copy,
    inline,
    is_valid,
    jit,
    load64_le,
    load_slot,
    prefetch_read,
    shift_right,
    store8,
    store16,
    store16_le,
    store32,
    store64,
    store_slot,
    sub_wrapping,
)
from logstore.records.kernels.varint import varint_size, write_varint, zigzag
from logstore.records.table import (
    ATTRIBUTES,
    BASE_OFFSET,
    BASE_SEQUENCE,
    BASE_TIMESTAMP,
    CODEC_MASK,
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
    PREFIX_BYTES,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    ROW_BYTES,
    SIZE,
    SKIP,
)


@jit
def _header_bytes(block, first, last):
    """Encoded size of headers [first, last) without their count."""
    key_offsets = load_slot(block, slots.E_HEADER_KEY_OFFSETS)
    value_offsets = load_slot(block, slots.E_HEADER_VALUE_OFFSETS)
    valid = load_slot(block, slots.E_HEADER_VALUE_VALID)
    valid_at = load_slot(block, slots.E_HEADER_VALUE_VALID_AT)
    size = 0
    for h in range(first, last):
        length = load64_le(key_offsets + (h + 1) * 8) - load64_le(key_offsets + h * 8)
        size += varint_size(length) + length
        if is_valid(valid, valid_at + h):
            length = load64_le(value_offsets + (h + 1) * 8) - load64_le(value_offsets + h * 8)
            size += varint_size(length) + length
        else:
            size += 1
    return size


@jit
def _write_headers(block, address, first, last):
    key_offsets = load_slot(block, slots.E_HEADER_KEY_OFFSETS)
    key_data = load_slot(block, slots.E_HEADER_KEY_DATA)
    value_offsets = load_slot(block, slots.E_HEADER_VALUE_OFFSETS)
    value_data = load_slot(block, slots.E_HEADER_VALUE_DATA)
    valid = load_slot(block, slots.E_HEADER_VALUE_VALID)
    valid_at = load_slot(block, slots.E_HEADER_VALUE_VALID_AT)
    for h in range(first, last):
        start = load64_le(key_offsets + h * 8)
        length = load64_le(key_offsets + (h + 1) * 8) - start
        address = write_varint(address, length)
        copy(address, key_data + start, length)
        address += length
        if is_valid(valid, valid_at + h):
            start = load64_le(value_offsets + h * 8)
            length = load64_le(value_offsets + (h + 1) * 8) - start
            address = write_varint(address, length)
            copy(address, value_data + start, length)
            address += length
        else:
            address = write_varint(address, -1)
    return address


@jit
def write_batch_header(
    batch, size, base_offset, epoch, attributes, last_delta, base_ts, max_ts, pid, pepoch, seq, count
):
    store64(batch, base_offset)
    store32(batch + 8, size - PREFIX_BYTES)
    store32(batch + 12, epoch)
    store8(batch + 16, 2)
    store16(batch + 21, attributes)
    store32(batch + 23, last_delta)
    store64(batch + 27, base_ts)
    store64(batch + 35, max_ts)
    store64(batch + 43, pid)
    store16(batch + 51, pepoch)
    store32(batch + 53, seq)
    store32(batch + 57, count)


@inline
def _write_short(address, bits):
    """A varint of one or two bytes; returns the next address."""
    if bits < 0x80:
        store8(address, bits)
        return address + 1
    store16_le(address, (bits & 0x7F) | 0x80 | (bits >> 7 << 8))
    return address + 2


@jit
def _encode_plain(block, i, rows, batch, limit):
    """Rows from i on after a batch's header, up to the first that is not plain or does not fit: (records, next
    address, base timestamp, largest timestamp).

    Plain: key and value below 2 KiB, a timestamp within a quarter of an hour of the first. Only for columns without
    nulls, headers and offsets of their own. It does what `encode` does, without most of the questions.
    """
    selection = load_slot(block, slots.E_SELECTION)
    key_offsets = load_slot(block, slots.E_KEY_OFFSETS)
    key_data = load_slot(block, slots.E_KEY_DATA)
    value_offsets = load_slot(block, slots.E_VALUE_OFFSETS)
    value_data = load_slot(block, slots.E_VALUE_DATA)
    timestamps = load_slot(block, slots.E_TIMESTAMPS)
    address = batch + HEADER_BYTES
    base_ts = load_slot(block, slots.E_DEFAULT_TIMESTAMP)
    if timestamps != 0:
        base_ts = load64_le(timestamps + (i if selection == 0 else load64_le(selection + i * 8)) * 8)
    max_ts = base_ts
    timestamp = base_ts
    count = 0
    while i < rows:
        row = i * 8
        if selection != 0:
            row = load64_le(selection + row) * 8
        key = load64_le(key_offsets + row)
        key_length = load64_le(key_offsets + row + 8) - key
        value = load64_le(value_offsets + row)
        value_length = load64_le(value_offsets + row + 8) - value
        if timestamps != 0:
            timestamp = load64_le(timestamps + row)
        ts_bits = zigzag(sub_wrapping(timestamp, base_ts))
        if shift_right(key_length | value_length, 11) != 0 or shift_right(ts_bits, 21) != 0:
            break
        body = 6 + key_length + value_length  # attributes, and a byte each of five varints
        body += (ts_bits >= 0x80) + (ts_bits >= 0x4000) + (count >= 0x40)
        body += (key_length >= 0x40) + (value_length >= 0x40)
        if address + 2 + body > limit:
            break
        prefetch_read(value_data + value + 1024)  # across the page's end, where the processor's own stops
        prefetch_read(value_data + value + 1088)
        address = _write_short(address, body << 1)
        store8(address, 0)
        if ts_bits < 0x4000:
            address = _write_short(address + 1, ts_bits)
        else:
            store16_le(address + 1, (ts_bits & 0x7F) | 0x80 | ((ts_bits >> 7 & 0x7F) | 0x80) << 8)
            store8(address + 3, ts_bits >> 14)
            address += 4
        address = _write_short(address, count << 1)
        address = _write_short(address, key_length << 1)
        copy(address, key_data + key, key_length)
        address = _write_short(address + key_length, value_length << 1)
        copy(address, value_data + value, value_length)
        address += value_length
        store8(address, 0)
        address += 1
        max_ts = max(max_ts, timestamp)
        count += 1
        i += 1
    return count, address, base_ts, max_ts


@jit
def encode(block):
    """Rows of columns to finished v2 batches, until the rows, the output or the table end; OK or FULL.

    The first record of a batch is always taken; another only while the batch stays within E_BATCH_BYTES and
    E_BATCH_RECORDS. FULL with no batch made: the output has no room for the first one, of one record or of all that
    belong to it. For a codec the records are left uncompressed after the header, and length and CRC are the caller's
    to finish (`finish_batch`). A delete horizon takes the base timestamp's place.
    """
    rows = load_slot(block, slots.E_ROWS)
    selection = load_slot(block, slots.E_SELECTION)
    key_offsets = load_slot(block, slots.E_KEY_OFFSETS)
    key_data = load_slot(block, slots.E_KEY_DATA)
    key_valid = load_slot(block, slots.E_KEY_VALID)
    key_valid_at = load_slot(block, slots.E_KEY_VALID_AT)
    value_offsets = load_slot(block, slots.E_VALUE_OFFSETS)
    value_data = load_slot(block, slots.E_VALUE_DATA)
    value_valid = load_slot(block, slots.E_VALUE_VALID)
    value_valid_at = load_slot(block, slots.E_VALUE_VALID_AT)
    timestamps = load_slot(block, slots.E_TIMESTAMPS)
    timestamp_valid = load_slot(block, slots.E_TIMESTAMP_VALID)
    timestamp_valid_at = load_slot(block, slots.E_TIMESTAMP_VALID_AT)
    default_timestamp = load_slot(block, slots.E_DEFAULT_TIMESTAMP)
    header_list = load_slot(block, slots.E_HEADER_LIST)
    header_list_valid = load_slot(block, slots.E_HEADER_LIST_VALID)
    header_list_valid_at = load_slot(block, slots.E_HEADER_LIST_VALID_AT)
    offset_deltas = load_slot(block, slots.E_OFFSET_DELTAS)
    batch_bytes = load_slot(block, slots.E_BATCH_BYTES)
    batch_records = load_slot(block, slots.E_BATCH_RECORDS)
    out_end = load_slot(block, slots.E_OUT) + load_slot(block, slots.E_OUT_CAPACITY)
    table = load_slot(block, slots.E_TABLE)
    capacity = load_slot(block, slots.E_TABLE_CAPACITY)
    attributes = load_slot(block, slots.E_ATTRIBUTES)
    producer_id = load_slot(block, slots.E_PRODUCER_ID)
    sequence = load_slot(block, slots.E_BASE_SEQUENCE)
    base_offset = load_slot(block, slots.E_BASE_OFFSET)
    delete_horizon = load_slot(block, slots.E_DELETE_HORIZON)

    plain = key_valid == 0 and value_valid == 0 and timestamp_valid == 0 and header_list == 0 and offset_deltas == 0
    plain = plain and attributes & DELETE_HORIZON_BIT == 0

    i = load_slot(block, slots.E_ROW)
    batch = load_slot(block, slots.E_OUT)
    made = 0
    code = OK
    while i < rows:
        if made == capacity:
            code = FULL
            break
        address = batch + HEADER_BYTES
        count = 0
        base_ts = 0
        max_ts = 0
        last_delta = 0
        if plain:
            limit = min(batch + batch_bytes, out_end)
            stop = min(rows, i + min(batch_records, 0x2000))  # so many have an offset delta of two bytes at most
            count, address, base_ts, max_ts = _encode_plain(block, i, stop, batch, limit)
            last_delta = max(count - 1, 0)
            i += count
        while i < rows and count < batch_records:
            row = i
            if selection != 0:
                row = load64_le(selection + i * 8)
            timestamp = default_timestamp
            if timestamps != 0 and is_valid(timestamp_valid, timestamp_valid_at + row):
                timestamp = load64_le(timestamps + row * 8)
            if count == 0:
                base_ts = timestamp
                if attributes & DELETE_HORIZON_BIT != 0:
                    base_ts = delete_horizon
                max_ts = timestamp
            key_start = load64_le(key_offsets + row * 8)
            key_length = load64_le(key_offsets + (row + 1) * 8) - key_start
            if not is_valid(key_valid, key_valid_at + row):
                key_length = -1
            value_start = load64_le(value_offsets + row * 8)
            value_length = load64_le(value_offsets + (row + 1) * 8) - value_start
            if not is_valid(value_valid, value_valid_at + row):
                value_length = -1
            first_header = 0
            last_header = 0
            if header_list != 0 and is_valid(header_list_valid, header_list_valid_at + row):
                first_header = load64_le(header_list + row * 8)
                last_header = load64_le(header_list + (row + 1) * 8)
            delta = count
            if offset_deltas != 0:
                delta = load64_le(offset_deltas + row * 8)

            timestamp_delta = sub_wrapping(timestamp, base_ts)
            body = 1 + varint_size(timestamp_delta) + varint_size(delta)
            body += varint_size(key_length) + max(key_length, 0)
            body += varint_size(value_length) + max(value_length, 0)
            body += varint_size(last_header - first_header)
            if last_header > first_header:
                body += _header_bytes(block, first_header, last_header)
            size = varint_size(body) + body
            if count > 0 and address + size - batch > batch_bytes:
                break
            if address + size > out_end:
                code = FULL
                break

            address = write_varint(address, body)
            store8(address, 0)
            address = write_varint(address + 1, timestamp_delta)
            address = write_varint(address, delta)
            address = write_varint(address, key_length)
            if key_length > 0:
                copy(address, key_data + key_start, key_length)
                address += key_length
            address = write_varint(address, value_length)
            if value_length > 0:
                copy(address, value_data + value_start, value_length)
                address += value_length
            address = write_varint(address, last_header - first_header)
            if last_header > first_header:
                address = _write_headers(block, address, first_header, last_header)
            max_ts = max(max_ts, timestamp)
            last_delta = delta
            count += 1
            i += 1
        if code == FULL:
            # The batch under way is given up: its rows come first in the next call, so batches never depend on buffer
            # sizes.
            i -= count
            break

        size = address - batch
        row = table + made * ROW_BYTES
        write_batch_header(
            batch,
            size,
            base_offset,
            load_slot(block, slots.E_EPOCH),
            attributes,
            last_delta,
            base_ts,
            max_ts,
            producer_id,
            load_slot(block, slots.E_PRODUCER_EPOCH),
            sequence,
            count,
        )
        crc = 0
        if attributes & CODEC_MASK == 0:
            crc = crc_of(batch + 21, size - 21)
            store32(batch + 17, crc)
        store_slot(row, POSITION, batch - load_slot(block, slots.E_OUT))
        store_slot(row, SIZE, size)
        store_slot(row, BASE_OFFSET, base_offset)
        store_slot(row, LAST_OFFSET, add_wrapping(base_offset, last_delta))
        store_slot(row, LEADER_EPOCH, load_slot(block, slots.E_EPOCH))
        store_slot(row, MAGIC, 2)
        store_slot(row, ATTRIBUTES, attributes)
        store_slot(row, BASE_TIMESTAMP, base_ts)
        store_slot(row, MAX_TIMESTAMP, max_ts)
        store_slot(row, PRODUCER_ID, producer_id)
        store_slot(row, PRODUCER_EPOCH, load_slot(block, slots.E_PRODUCER_EPOCH))
        store_slot(row, BASE_SEQUENCE, sequence)
        store_slot(row, COUNT, count)
        store_slot(row, CRC, crc)
        store_slot(row, PAYLOAD_ADDRESS, batch + HEADER_BYTES)
        store_slot(row, PAYLOAD_SIZE, size - HEADER_BYTES)
        store_slot(row, SKIP, 0)
        made += 1
        batch += size
        base_offset = add_wrapping(base_offset, last_delta + 1)
        if sequence >= 0:
            sequence = (sequence + last_delta + 1) & 0x7FFFFFFF
    store_slot(block, slots.E_ROW, i)
    store_slot(block, slots.E_TABLE_N, made)
    store_slot(block, slots.E_OUT_SIZE, batch - load_slot(block, slots.E_OUT))
    store_slot(block, slots.E_BASE_OFFSET, base_offset)
    store_slot(block, slots.E_BASE_SEQUENCE, sequence)
    return code


@jit
def finish_batch(batch, size):
    """Write length and CRC of a batch whose payload was put in place by the caller; returns the CRC."""
    store32(batch + 8, size - PREFIX_BYTES)
    crc = crc_of(batch + 21, size - 21)
    store32(batch + 17, crc)
    return crc

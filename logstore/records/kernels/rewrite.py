"""Batches rewritten as their marks say."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_RECORD, OK
from logstore.records.kernels.checksum import crc_of
from logstore.records.kernels.encode import write_batch_header
from logstore.records.kernels.intrinsics import (
    add_wrapping,
    copy,
    jit,
    load8,
    load_slot,
    store8,
    store32,
    store_slot,
    sub_wrapping,
)
from logstore.records.kernels.record import parse_record
from logstore.records.kernels.varint import read_varint, varint_size, write_varint
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
    NULL_RECORD,
    REBUILD,
    VERBATIM,
)
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
    PRODUCER_EPOCH,
    PRODUCER_ID,
    ROW_BYTES,
    SIZE,
    SKIP,
    TIMESTAMP_TYPE_BIT,
)


@jit
def _finished(out_row, position, batch, size, attributes, compressed):
    """Note a written batch in the output table; its CRC is made here unless it is yet to be compressed."""
    crc = 0
    if not compressed:
        crc = crc_of(batch + 21, size - 21)
        store32(batch + 17, crc)
    store_slot(out_row, POSITION, position)
    store_slot(out_row, SIZE, size)
    store_slot(out_row, MAGIC, 2)
    store_slot(out_row, ATTRIBUTES, attributes)
    store_slot(out_row, CRC, crc)
    store_slot(out_row, PAYLOAD_ADDRESS, batch + HEADER_BYTES)
    store_slot(out_row, PAYLOAD_SIZE, size - HEADER_BYTES)
    store_slot(out_row, SKIP, 0 if compressed else 1)


@jit
def rewrite_room(table, marks, first, last):
    """Bytes that `rewrite` needs at most: a record's length and deltas may take 16 bytes more than they did."""
    room = HEADER_BYTES * (last - first)
    for b in range(first, last):
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        if load_slot(mark, MARK_ACTION) == VERBATIM:
            room += load_slot(row, SIZE)
        elif load_slot(mark, MARK_ACTION) == REBUILD:
            room += load_slot(row, PAYLOAD_SIZE) + 16 * load_slot(mark, MARK_KEPT)
    return room


@jit
def rewrite(data, table, marks, first, last, block):
    """Write batches [first, last) as their marks say: as they are, emptied, or with the records that stay.

    A batch marked SKIP whose action is REBUILD keeps all its records. The output has room for everything (caller's
    promise). Rows of the output table whose SKIP is 0 are yet to be compressed. OK, or BAD_RECORD with W_BATCH.
    """
    keep = load_slot(block, slots.W_KEEP)
    out_start = load_slot(block, slots.W_OUT)
    out_table = load_slot(block, slots.W_TABLE)
    out = out_start
    made = 0
    seen = 0
    b = first
    while b < last:
        row = table + b * ROW_BYTES
        mark = marks + b * MARK_BYTES
        action = load_slot(mark, MARK_ACTION)
        judged = load_slot(row, COUNT) if load_slot(row, SKIP) == 0 else 0
        out_row = out_table + made * ROW_BYTES
        if action == DELETE:
            seen += judged
            b += 1
            continue
        if action == VERBATIM:
            size = load_slot(row, SIZE)
            copy(out, data + load_slot(row, POSITION), size)
            copy(out_row, row, ROW_BYTES)
            store_slot(out_row, POSITION, out - out_start)
            store_slot(out_row, SKIP, 1)
            out += size
            made += 1
            seen += judged
            b += 1
            continue
        base_offset = load_slot(row, BASE_OFFSET)
        attributes = load_slot(row, ATTRIBUTES) & ~(CODEC_MASK | DELETE_HORIZON_BIT)
        epoch = load_slot(row, LEADER_EPOCH)
        producer_id = load_slot(row, PRODUCER_ID)
        producer_epoch = load_slot(row, PRODUCER_EPOCH)
        sequence = load_slot(row, BASE_SEQUENCE)
        max_ts = load_slot(row, MAX_TIMESTAMP)
        last_offset = load_slot(row, LAST_OFFSET)
        base_ts = -1
        written = 0
        size = HEADER_BYTES
        if action == EMPTY:
            seen += judged
            b += 1
        else:
            attributes |= load_slot(mark, MARK_CODEC)
            horizon = load_slot(mark, MARK_HORIZON)
            if horizon >= 0:
                attributes |= DELETE_HORIZON_BIT
                base_ts = horizon
            legacy = load_slot(row, MAGIC) < 2
            append_time = attributes & TIMESTAMP_TYPE_BIT != 0
            out_max_ts = max_ts if append_time else -1
            address_out = out + HEADER_BYTES
            last_written = base_offset
            going = True
            while going:
                all_kept = load_slot(row, SKIP) != 0
                address = load_slot(row, PAYLOAD_ADDRESS)
                end = address + load_slot(row, PAYLOAD_SIZE)
                source_base = load_slot(row, BASE_OFFSET)
                source_ts = load_slot(row, BASE_TIMESTAMP)
                source_max_ts = load_slot(row, MAX_TIMESTAMP)
                for _ in range(load_slot(row, COUNT)):
                    kept = KEEP_RECORD
                    if not all_kept:
                        kept = load8(keep + seen)
                        seen += 1
                    length, body = read_varint(address, end, 5)
                    if body == 0 or length < 1 or length > end - body:
                        store_slot(block, slots.W_BATCH, b)
                        return BAD_RECORD
                    record_end = body + length
                    if kept == DROP_RECORD:
                        address = record_end
                        continue
                    ts_delta, at = read_varint(body + 1, record_end, 10)
                    if at == 0:
                        store_slot(block, slots.W_BATCH, b)
                        return BAD_RECORD
                    delta, at = read_varint(at, record_end, 5)
                    if at == 0:
                        store_slot(block, slots.W_BATCH, b)
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
                        _end, _t, _d, key, key_length, value, value_length, _headers, _n = parse_record(address, end)
                        before = key + max(key_length, 0) - at  # key length and key
                        after = value + max(value_length, 0)  # header count and headers
                        rest = before + 1 + record_end - after
                    new_length = 1 + varint_size(new_ts_delta) + varint_size(new_delta) + rest
                    address_out = write_varint(address_out, new_length)
                    store8(address_out, 0)
                    address_out = write_varint(address_out + 1, new_ts_delta)
                    address_out = write_varint(address_out, new_delta)
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
                last_offset = load_slot(row, LAST_OFFSET)
                b += 1
                # what is to be joined may lie after batches of which nothing stays
                while b < last and load_slot(marks + b * MARK_BYTES, MARK_ACTION) == DELETE:
                    skipped = table + b * ROW_BYTES
                    if load_slot(skipped, SKIP) == 0:
                        seen += load_slot(skipped, COUNT)
                    b += 1
                going = b < last and load_slot(marks + b * MARK_BYTES, MARK_JOIN) != 0
                if going:
                    row = table + b * ROW_BYTES
            if legacy:
                last_offset = last_written
            max_ts = out_max_ts
            size = address_out - out
        write_batch_header(
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
        store_slot(out_row, BASE_OFFSET, base_offset)
        store_slot(out_row, LAST_OFFSET, last_offset)
        store_slot(out_row, LEADER_EPOCH, epoch)
        store_slot(out_row, BASE_TIMESTAMP, base_ts)
        store_slot(out_row, MAX_TIMESTAMP, max_ts)
        store_slot(out_row, PRODUCER_ID, producer_id)
        store_slot(out_row, PRODUCER_EPOCH, producer_epoch)
        store_slot(out_row, BASE_SEQUENCE, sequence)
        store_slot(out_row, COUNT, written)
        _finished(out_row, out - out_start, out, size, attributes, attributes & CODEC_MASK != 0)
        out += size
        made += 1
    store_slot(block, slots.W_OUT_SIZE, out - out_start)
    store_slot(block, slots.W_TABLE_N, made)
    return OK

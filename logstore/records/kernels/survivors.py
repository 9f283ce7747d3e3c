"""Bits of offsets that are some key's last: set from a map, asked for batches and records."""

from __future__ import annotations

from logstore.records.codes import OK
from logstore.records.kernels.intrinsics import inline, jit, load8, load64_le, load_slot, store8, store_slot
from logstore.records.kernels.varint import read_varint
from logstore.records.table import BASE_OFFSET, COUNT, LAST_OFFSET, MAGIC, ROW_BYTES, SKIP


@inline
def marked_record(address, end, number, row, bits, first_offset, end_offset):
    """(next, 1 when the bit of the record's offset is set) for the batch's record at `address`; next 0 when malformed.

    Bits are those of [first_offset, end_offset). No more is read than that needs: every record was checked when the
    bits were set.
    """
    length, body = read_varint(address, end, 5)
    if body == 0 or length < 1 or length > end - body:
        return 0, 0
    address = body + length
    base_offset = load_slot(row, BASE_OFFSET)
    last_delta = load_slot(row, LAST_OFFSET) - base_offset
    delta = number
    if load_slot(row, COUNT) != last_delta + 1:  # else there is a record for every offset
        _ts_delta, body = read_varint(body + 1, address, 10)
        if body == 0:
            return 0, 0
        delta, body = read_varint(body, address, 5)
        if body == 0 or delta < 0 or delta > last_delta:
            return 0, 0
    at = base_offset + delta - first_offset
    if at < 0 or at >= end_offset - first_offset:
        return address, 0
    return address, (load8(bits + (at >> 3)) >> (at & 7)) & 1


@jit
def mark_offsets(source, source_slots, slot_bytes, first_offset, end_offset, bits):
    """Set the bits of those offsets of [first_offset, end_offset) that the map holds."""
    for i in range(source_slots):
        mark = load64_le(source + i * slot_bytes + 16)
        at = mark - 1 - first_offset
        if mark != 0 and 0 <= at < end_offset - first_offset:
            byte = bits + (at >> 3)
            store8(byte, load8(byte) | (1 << (at & 7)))
    return OK


@jit
def none_survives(row, bits, known_from, known_to):
    """Whether it is known that no offset of the batch is a key's last."""
    first = load_slot(row, BASE_OFFSET)
    last = load_slot(row, LAST_OFFSET)
    if bits == 0 or load_slot(row, MAGIC) != 2 or first < known_from or last >= known_to:
        return False
    found = 0
    for byte in range(
        (first - known_from) >> 3, ((last - known_from) >> 3) + 1
    ):  # both ends may hold bits of other batches
        found |= load8(bits + byte)
    return found == 0


@jit
def skip_superseded(table, count, bits, known_from, known_to):
    """Mark the batches SKIP of which nothing survives; `bits` are as K_SURVIVORS."""
    for b in range(count):
        row = table + b * ROW_BYTES
        if none_survives(row, bits, known_from, known_to):
            store_slot(row, SKIP, 1)
    return OK

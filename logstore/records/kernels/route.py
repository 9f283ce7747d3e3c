"""Rows to partitions, by Kafka's hash of the key."""

from __future__ import annotations

from logstore.records import slots
from logstore.records.codes import BAD_OFFSET, OK
from logstore.records.kernels.intrinsics import (
    is_valid,
    jit,
    load8,
    load32_le,
    load64_le,
    load_slot,
    store64_le,
    store_slot,
)


@jit
def murmur2(address, size):
    """Kafka's hash of a key: 32-bit MurmurHash2 with Kafka's seed, as an unsigned number."""
    m = 0x5BD1E995
    h = (0x9747B28C ^ size) & 0xFFFFFFFF
    end = address + (size & ~3)
    while address < end:
        k = (load32_le(address) & 0xFFFFFFFF) * m & 0xFFFFFFFF
        k ^= k >> 24
        k = k * m & 0xFFFFFFFF
        h = (h * m & 0xFFFFFFFF) ^ k
        address += 4
    rest = size & 3
    if rest == 3:
        h ^= load8(address + 2) << 16
    if rest >= 2:
        h ^= load8(address + 1) << 8
    if rest >= 1:
        h ^= load8(address)
        h = h * m & 0xFFFFFFFF
    h ^= h >> 13
    h = h * m & 0xFFFFFFFF
    return h ^ (h >> 15)


@jit
def route(block):
    """Which partition each row goes to, and the rows grouped by partition, in their order; OK or BAD_OFFSET.

    A given partition wins; else Kafka's hash of the key; rows with neither go to R_STICKY. R_STARTS has one entry more
    than there are partitions: rows [starts[p], starts[p + 1]) of R_SELECTION are those of partition p. BAD_OFFSET: the
    partition given for row R_BAD_ROW does not exist.
    """
    rows = load_slot(block, slots.R_ROWS)
    key_offsets = load_slot(block, slots.R_KEY_OFFSETS)
    key_data = load_slot(block, slots.R_KEY_DATA)
    key_valid = load_slot(block, slots.R_KEY_VALID)
    key_valid_at = load_slot(block, slots.R_KEY_VALID_AT)
    given = load_slot(block, slots.R_PARTITIONS)
    given_valid = load_slot(block, slots.R_PARTITION_VALID)
    given_valid_at = load_slot(block, slots.R_PARTITION_VALID_AT)
    count = load_slot(block, slots.R_PARTITION_COUNT)
    sticky = load_slot(block, slots.R_STICKY)
    ids = load_slot(block, slots.R_IDS)
    starts = load_slot(block, slots.R_STARTS)
    selection = load_slot(block, slots.R_SELECTION)
    for p in range(count + 1):
        store64_le(starts + p * 8, 0)
    for row in range(rows):
        partition = sticky
        if given != 0 and is_valid(given_valid, given_valid_at + row):
            partition = load64_le(given + row * 8)
            if partition < 0 or partition >= count:
                store_slot(block, slots.R_BAD_ROW, row)
                return BAD_OFFSET
        elif is_valid(key_valid, key_valid_at + row):
            start = load64_le(key_offsets + row * 8)
            size = load64_le(key_offsets + (row + 1) * 8) - start
            partition = (murmur2(key_data + start, size) & 0x7FFFFFFF) % count
        store64_le(ids + row * 8, partition)
        store64_le(starts + (partition + 1) * 8, load64_le(starts + (partition + 1) * 8) + 1)
    for p in range(count):
        store64_le(starts + (p + 1) * 8, load64_le(starts + (p + 1) * 8) + load64_le(starts + p * 8))
    # Filling moves each start to the next one's place; it is moved back afterwards, which saves a second array.
    for row in range(rows):
        partition = load64_le(ids + row * 8)
        at = load64_le(starts + partition * 8)
        store64_le(selection + at * 8, row)
        store64_le(starts + partition * 8, at + 1)
    for p in range(count, 0, -1):
        store64_le(starts + p * 8, load64_le(starts + (p - 1) * 8))
    store64_le(starts, 0)
    return OK

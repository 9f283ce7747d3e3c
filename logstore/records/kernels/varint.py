"""Zig-zag varints, as the records of a v2 batch have them."""

from __future__ import annotations

from logstore.records.kernels.intrinsics import inline, jit, leading_zeros, load8, shift_right, store8


@jit
def zigzag(value):
    return (value << 1) ^ (value >> 63)


@jit
def varint_size(value):
    return (63 - leading_zeros(zigzag(value) | 1)) // 7 + 1


@jit
def write_varint(address, value):
    bits = zigzag(value)
    while (bits & ~0x7F) != 0:
        store8(address, (bits & 0x7F) | 0x80)
        bits = shift_right(bits, 7)
        address += 1
    store8(address, bits)
    return address + 1


@inline
def read_varint(address, end, bytes_max):
    """(value, next address); next address 0 when it is cut off or longer than `bytes_max`."""
    if address < end:
        first = load8(address)
        if first < 0x80:
            return (first >> 1) ^ -(first & 1), address + 1
        if address + 1 < end:
            second = load8(address + 1)
            if second < 0x80:
                bits = (first & 0x7F) | (second << 7)
                return (bits >> 1) ^ -(bits & 1), address + 2
    return _read_long_varint(address, end, bytes_max)


@jit
def _read_long_varint(address, end, bytes_max):
    bits = 0
    shift = 0
    stop = min(end, address + bytes_max)
    while address < stop:
        byte = load8(address)
        address += 1
        bits |= (byte & 0x7F) << shift
        if byte < 0x80:
            if bytes_max == 5:
                bits &= 0xFFFFFFFF
            return shift_right(bits, 1) ^ -(bits & 1), address
        shift += 7
    return 0, 0

"""One record of a v2 batch, and one header of a record, found in untrusted bytes."""

from __future__ import annotations

from logstore.records.kernels.intrinsics import inline, jit
from logstore.records.kernels.varint import read_varint


@inline
def parse_record(address, end):
    """(next, timestamp delta, offset delta, key, key length, value, value length, headers, header count); next 0 when
    malformed.

    Lengths below zero mean null. Headers are only counted here; `parse_header` walks them.
    """
    length, address = read_varint(address, end, 5)
    if address == 0 or length < 1 or length > end - address:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    end = address + length
    timestamp_delta, address = read_varint(address + 1, end, 10)
    if address == 0:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    offset_delta, address = read_varint(address, end, 5)
    if address == 0:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    key_length, address = read_varint(address, end, 5)
    if address == 0 or key_length > end - address:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    key = address
    address += max(key_length, 0)
    value_length, address = read_varint(address, end, 5)
    if address == 0 or value_length > end - address:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    value = address
    address += max(value_length, 0)
    headers, address = read_varint(address, end, 5)
    # A header takes two bytes at least, so a count of more is a lie: nothing downstream needs room for it.
    if address == 0 or headers < 0 or headers * 2 > end - address or (headers == 0 and address != end):
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    return end, timestamp_delta, offset_delta, key, key_length, value, value_length, address, headers


@jit
def parse_header(address, end):
    """(next, key, key length, value, value length); next 0 when malformed."""
    key_length, address = read_varint(address, end, 5)
    if address == 0 or key_length < 0 or key_length > end - address:
        return 0, 0, 0, 0, 0
    key = address
    address += key_length
    value_length, address = read_varint(address, end, 5)
    if address == 0 or value_length > end - address:
        return 0, 0, 0, 0, 0
    return address + max(value_length, 0), key, key_length, address, value_length


@jit
def headers_sound(address, end, count):
    for _ in range(count):
        address, _key, _key_length, _value, _value_length = parse_header(address, end)
        if address == 0:
            return False
    return address == end

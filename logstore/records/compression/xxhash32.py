"""xxHash32, the checksum inside LZ4 frames.

Plain Python: Kafka's own frames need it for two bytes only, and block checksums come from foreign writers.
"""

from __future__ import annotations

import struct

MASK = 0xFFFFFFFF
PRIME_1, PRIME_2, PRIME_3, PRIME_4, PRIME_5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1

STRIPE = struct.Struct("<4I")
WORD = struct.Struct("<I")


def _rotated(value: int, bits: int) -> int:
    value &= MASK
    return ((value << bits) | (value >> (32 - bits))) & MASK


def xxhash32(data: bytes | bytearray | memoryview) -> int:
    """The hash of `data` with seed 0."""
    size = len(data)
    position = size - size % STRIPE.size
    if position:
        a, b, c, d = PRIME_1 + PRIME_2, PRIME_2, 0, -PRIME_1
        for w, x, y, z in STRIPE.iter_unpack(data[:position]):
            a = _rotated(a + w * PRIME_2, 13) * PRIME_1
            b = _rotated(b + x * PRIME_2, 13) * PRIME_1
            c = _rotated(c + y * PRIME_2, 13) * PRIME_1
            d = _rotated(d + z * PRIME_2, 13) * PRIME_1
        value = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
    else:
        value = PRIME_5
    value += size
    while position + WORD.size <= size:
        value = _rotated(value + WORD.unpack_from(data, position)[0] * PRIME_3, 17) * PRIME_4
        position += WORD.size
    for byte in data[position:]:
        value = _rotated(value + byte * PRIME_5, 11) * PRIME_1
    value &= MASK
    value = ((value ^ (value >> 15)) * PRIME_2) & MASK
    value = ((value ^ (value >> 13)) * PRIME_3) & MASK
    return value ^ (value >> 16)

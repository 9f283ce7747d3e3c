"""Hashes of keys, 128 bits as two numbers: SipHash with a secret, and MD5, which Kafka's own cleaner uses."""

from __future__ import annotations

import numpy as np

from logstore.records.codes import OK
from logstore.records.kernels.intrinsics import (
    add_wrapping,
    copy,
    jit,
    load8,
    load32_le,
    load64_le,
    shift_right,
    store8,
    store64_le,
)


@jit
def _rotate(value, bits):
    return (value << bits) | shift_right(value, 64 - bits)


@jit
def _sip_round(v0, v1, v2, v3):
    v0 = add_wrapping(v0, v1)
    v2 = add_wrapping(v2, v3)
    v1 = _rotate(v1, 13) ^ v0
    v3 = _rotate(v3, 16) ^ v2
    v0 = _rotate(v0, 32)
    v2 = add_wrapping(v2, v1)
    v0 = add_wrapping(v0, v3)
    v1 = _rotate(v1, 17) ^ v2
    v3 = _rotate(v3, 21) ^ v0
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@jit
def sip_pair(address, size, k0, k1):
    """SipHash-1-3 with 128 bits of result."""
    v0 = k0 ^ 0x736F6D6570736575
    v1 = k1 ^ 0x646F72616E646F6D ^ 0xEE
    v2 = k0 ^ 0x6C7967656E657261
    v3 = k1 ^ 0x7465646279746573
    end = address + (size & ~7)
    while address < end:
        word = load64_le(address)
        v3 ^= word
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        v0 ^= word
        address += 8
    word = size << 56
    for i in range(size & 7):
        word |= load8(address + i) << (8 * i)
    v3 ^= word
    v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    v0 ^= word
    v2 ^= 0xEE
    for _ in range(3):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v1 ^= 0xDD
    for _ in range(3):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@jit
def sip_hash(address, size, k0, k1, result):
    """The hash of the map, for tests: 16 bytes at `result`."""
    low, high = sip_pair(address, size, k0, k1)
    store64_le(result, low)
    store64_le(result + 8, high)
    return OK


_MASK = 0xFFFFFFFF
_MD5_SINES = np.array([int(abs(np.sin(i + 1)) * 2**32) & _MASK for i in range(64)], dtype=np.int64)
_MD5_SHIFTS = np.array([7, 12, 17, 22, 5, 9, 14, 20, 4, 11, 16, 23, 6, 10, 15, 21], dtype=np.int64)


@jit
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


@jit
def md5_pair(address, size, scratch):
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


@jit
def md5(address, size, scratch, result):
    """For tests: 16 bytes at `result`."""
    low, high = md5_pair(address, size, scratch)
    store64_le(result, low)
    store64_le(result + 8, high)
    return OK

"""CRC-32C, by the best way the processor has: carry-less multiplication, its CRC instruction, or tables."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from logstore.records.kernels.intrinsics import I8, I32, I64, i64, jit, load8, load64_le, shift_right
from logstore.records.processor import ARM_CRC, compiled_for

LEVEL = compiled_for()
HARDWARE_CRC = LEVEL is not None and LEVEL.has_crc
#: whether eight 64-bit polynomials are multiplied at once
WIDE_CRC = LEVEL is not None and LEVEL.has_wide_crc
ON_ARM = LEVEL is not None and LEVEL.machine == "aarch64"
_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_STRIPE = 1024  # bytes of each of the three interleaved streams


def _byte_table():
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ _POLYNOMIAL, table >> 1)
    return table


def _slices():
    """slices[k][b]: the CRC of byte b followed by k zero bytes."""
    first = _byte_table()
    rows = [first]
    for _ in range(7):
        previous = rows[-1]
        rows.append((previous >> np.uint64(8)) ^ first[(previous & np.uint64(0xFF)).astype(np.int64)])
    return np.array(rows, dtype=np.int64).reshape(-1)


def _stripe_shift():
    """shift[k][b]: what byte k of a CRC becomes after _STRIPE more zero bytes."""
    first = _byte_table()
    rows = []
    for byte in range(4):
        value = np.arange(256, dtype=np.uint64) << np.uint64(8 * byte)
        for _ in range(_STRIPE):
            value = (value >> np.uint64(8)) ^ first[(value & np.uint64(0xFF)).astype(np.int64)]
        rows.append(value)
    return np.array(rows, dtype=np.int64).reshape(-1)


_SLICES = _slices()
_SHIFT = _stripe_shift()
_WIDE = ir.VectorType(I64, 8)
_WIDE_BYTES = 64
_WIDE_STREAMS = 4
_WIDE_STEP = _WIDE_BYTES * _WIDE_STREAMS


@intrinsic
def crc_step8(typing_context, crc, value):
    """Eight bytes through the processor's CRC-32C instruction."""

    def codegen(context, builder, signature, args):
        if ON_ARM:
            kind = ir.FunctionType(I32, [I32, I64])
            function = cgutils.get_or_insert_function(builder.module, kind, ARM_CRC)
            return builder.zext(builder.call(function, [builder.trunc(args[0], I32), args[1]]), I64)
        name = "llvm.x86.sse42.crc32.64.64"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, [I64, I64]), name)
        return builder.call(function, args)

    return i64(i64, i64), codegen


def _fold_factors(bits):
    """What the two halves of each 16 bytes are multiplied with to move them `bits` further down the message:
    x^(bits + 32) and x^(bits - 32) modulo the polynomial, in the mirrored order the instruction takes them.
    """
    factors = []
    for exponent in (bits + 32, bits - 32):
        value = 1 << 31  # mirrored: x^0
        for _ in range(exponent):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        factors.append(value << 1)
    return ir.Constant(_WIDE, factors * 4)


@intrinsic
def fold_wide(typing_context, crc, address, end):
    """(CRC state, next address) after the whole _WIDE_STEPs of [address, end), of which there must be one.

    Multiplying without carries folds the message onto itself, step by step, until 64 bytes are left that have the same
    CRC as all of it.
    """

    def codegen(context, builder, signature, args):
        crc, address, end = args
        module = builder.module
        multiply = cgutils.get_or_insert_function(
            module, ir.FunctionType(_WIDE, [_WIDE, _WIDE, I8]), "llvm.x86.pclmulqdq.512"
        )
        step8 = cgutils.get_or_insert_function(module, ir.FunctionType(I64, [I64, I64]), "llvm.x86.sse42.crc32.64.64")

        def loaded(start, stream):
            at = builder.add(start, I64(stream * _WIDE_BYTES))
            return builder.load(builder.inttoptr(at, _WIDE.as_pointer()), align=1)

        def folded(value, factors, onto):
            low = builder.call(multiply, [value, factors, I8(0x00)])
            high = builder.call(multiply, [value, factors, I8(0x11)])
            return builder.xor(builder.xor(low, high), onto)

        first = [loaded(address, stream) for stream in range(_WIDE_STREAMS)]
        first[0] = builder.xor(first[0], builder.insert_element(ir.Constant(_WIDE, [0] * 8), crc, I32(0)))
        begun = builder.add(address, I64(_WIDE_STEP))
        before = builder.block
        head = builder.append_basic_block("fold.head")
        body = builder.append_basic_block("fold.body")
        done = builder.append_basic_block("fold.done")
        builder.branch(head)

        builder.position_at_end(head)
        at = builder.phi(I64)
        at.add_incoming(begun, before)
        streams = [builder.phi(_WIDE) for _ in first]
        for stream, value in zip(streams, first, strict=True):
            stream.add_incoming(value, before)
        after = builder.add(at, I64(_WIDE_STEP))
        builder.cbranch(builder.icmp_signed("<=", after, end), body, done)

        builder.position_at_end(body)
        at.add_incoming(after, body)
        factors = _fold_factors(8 * _WIDE_STEP)
        for number, stream in enumerate(streams):
            stream.add_incoming(folded(stream, factors, loaded(at, number)), body)
        builder.branch(head)

        builder.position_at_end(done)
        factors = _fold_factors(8 * _WIDE_BYTES)
        rest = streams[0]
        for stream in streams[1:]:
            rest = folded(rest, factors, stream)
        state = I64(0)
        for lane in range(8):
            state = builder.call(step8, [state, builder.extract_element(rest, I32(lane))])
        return context.make_tuple(builder, signature.return_type, [state, at])

    return types.UniTuple(i64, 2)(i64, i64, i64), codegen


@jit
def _skip_stripe(crc):
    return (
        _SHIFT[crc & 0xFF]
        ^ _SHIFT[256 + (shift_right(crc, 8) & 0xFF)]
        ^ _SHIFT[512 + (shift_right(crc, 16) & 0xFF)]
        ^ _SHIFT[768 + (shift_right(crc, 24) & 0xFF)]
    )


@jit
def _crc_wide(address, size):
    crc = 0xFFFFFFFF
    end = address + size
    if size >= _WIDE_STEP:
        crc, address = fold_wide(crc, address, end)
    return _crc_rest(crc, address, end)


@jit
def _crc_rest(crc, address, end):
    """A few more bytes, and the last touch."""
    while end - address >= 8:
        crc = crc_step8(crc, load64_le(address))
        address += 8
    while address < end:
        crc = shift_right(crc, 8) ^ _SLICES[(crc ^ load8(address)) & 0xFF]
        address += 1
    return crc ^ 0xFFFFFFFF


@jit
def _crc_striped(address, size):
    crc = 0xFFFFFFFF
    end = address + size
    # One CRC instruction takes three cycles but a new one can start each cycle: three streams hide the wait.
    while end - address >= 3 * _STRIPE:
        second = 0
        third = 0
        stop = address + _STRIPE
        while address < stop:
            crc = crc_step8(crc, load64_le(address))
            second = crc_step8(second, load64_le(address + _STRIPE))
            third = crc_step8(third, load64_le(address + 2 * _STRIPE))
            address += 8
        crc = _skip_stripe(_skip_stripe(crc) ^ second) ^ third
        address += 2 * _STRIPE
    return _crc_rest(crc, address, end)


@jit
def _crc_tables(address, size):
    crc = 0xFFFFFFFF
    end = address + size
    while end - address >= 8:
        word = load64_le(address) ^ crc
        crc = (
            _SLICES[1792 + (word & 0xFF)]
            ^ _SLICES[1536 + (shift_right(word, 8) & 0xFF)]
            ^ _SLICES[1280 + (shift_right(word, 16) & 0xFF)]
            ^ _SLICES[1024 + (shift_right(word, 24) & 0xFF)]
            ^ _SLICES[768 + (shift_right(word, 32) & 0xFF)]
            ^ _SLICES[512 + (shift_right(word, 40) & 0xFF)]
            ^ _SLICES[256 + (shift_right(word, 48) & 0xFF)]
            ^ _SLICES[shift_right(word, 56)]
        )
        address += 8
    while address < end:
        crc = shift_right(crc, 8) ^ _SLICES[(crc ^ load8(address)) & 0xFF]
        address += 1
    return crc ^ 0xFFFFFFFF


_crc_by_instruction = _crc_striped if HARDWARE_CRC else _crc_tables
crc_of = _crc_wide if WIDE_CRC else _crc_by_instruction


@jit
def crc32c(address, size):
    """CRC-32C of `size` bytes, by the processor where it can."""
    return crc_of(address, size)


@jit
def crc32c_striped(address, size):
    """CRC-32C by the processor's own instruction, where it has one; what most processors run."""
    return _crc_by_instruction(address, size)


@jit
def crc32c_tables(address, size):
    """CRC-32C without the instruction; what other processors run."""
    return _crc_tables(address, size)

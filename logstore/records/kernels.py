# mypy: ignore-errors
"""The inner loops, compiled by numba: encode, scan, decode, check, place.

Every kernel takes and returns int64 only. Addresses carry no bounds, so each kernel validates every length it reads
before it follows it, and never touches a byte outside [address, address + size). Parameters that are many travel in a
block of int64 whose slots are named below; results come back in the same block. Nothing here is imported at run time
unless the compiled object is missing (see `native`), and no kernel allocates.

v2 record batch, big endian:

    baseOffset:8 batchLength:4 leaderEpoch:4 magic:1 crc:4 | attributes:2 lastOffsetDelta:4 baseTimestamp:8
    maxTimestamp:8 producerId:8 producerEpoch:2 baseSequence:4 recordsCount:4 records…  (the CRC covers what follows |)

v2 record: length attributes:1 timestampDelta offsetDelta keyLength key valueLength value headerCount
           (keyLength key valueLength value)*, with all lengths, deltas and counts as zig-zag varints
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from logstore.records.codes import (
    BAD_COUNT,
    BAD_CRC,
    BAD_LENGTH,
    BAD_MAGIC,
    BAD_OFFSET,
    BAD_RECORD,
    FULL,
    OK,
    PARTIAL,
    ROLL_APPEND_TOO_LARGE,
    ROLL_INDEX_FULL,
    ROLL_OFFSET_OVERFLOW,
    ROLL_SIZE,
    ROLL_TIME,
    ROLL_TIME_INDEX_FULL,
)
from logstore.records.processor import ARM_CRC, compiled_for
from logstore.records.slots import (
    A_BASE_OFFSET,
    A_BYTES_SINCE,
    A_CREATED_MS,
    A_EPOCH,
    A_FIRST_TS,
    A_FRESH,
    A_INDEX_ENTRIES,
    A_INDEX_INTERVAL,
    A_INDEX_MAX,
    A_INDEX_OUT,
    A_INDEX_OUT_N,
    A_LAST_TIME_TS,
    A_MAX_SEGMENT_MS,
    A_MAX_TS,
    A_MAX_TS_OFFSET,
    A_NEXT_OFFSET,
    A_NOW_MS,
    A_REASON,
    A_SEGMENT_BYTES,
    A_SIZE,
    A_TIME_ENTRIES,
    A_TIME_MAX,
    A_TIME_OUT,
    A_TIME_OUT_N,
    C_BATCH,
    C_MAX_TS,
    C_MAX_TS_OFFSET,
    C_MIN_TS,
    C_NULL_KEYS,
    D_BATCH,
    D_HEADER_CAPACITY,
    D_HEADER_KEY_DATA,
    D_HEADER_KEY_OFFSETS,
    D_HEADER_N,
    D_HEADER_OFFSETS,
    D_HEADER_VALUE_DATA,
    D_HEADER_VALUE_NULLS,
    D_HEADER_VALUE_OFFSETS,
    D_HEADER_VALUE_VALID,
    D_KEEP,
    D_KEY_DATA,
    D_KEY_NULLS,
    D_KEY_OFFSETS,
    D_KEY_VALID,
    D_MAX_OFFSET,
    D_MIN_OFFSET,
    D_N,
    D_OFFSETS,
    D_TIMESTAMP_TYPES,
    D_TIMESTAMPS,
    D_VALUE_DATA,
    D_VALUE_NULLS,
    D_VALUE_OFFSETS,
    D_VALUE_VALID,
    E_ATTRIBUTES,
    E_BASE_OFFSET,
    E_BASE_SEQUENCE,
    E_BATCH_BYTES,
    E_BATCH_RECORDS,
    E_DEFAULT_TIMESTAMP,
    E_DELETE_HORIZON,
    E_EPOCH,
    E_HEADER_KEY_DATA,
    E_HEADER_KEY_OFFSETS,
    E_HEADER_LIST,
    E_HEADER_LIST_VALID,
    E_HEADER_LIST_VALID_AT,
    E_HEADER_VALUE_DATA,
    E_HEADER_VALUE_OFFSETS,
    E_HEADER_VALUE_VALID,
    E_HEADER_VALUE_VALID_AT,
    E_KEY_DATA,
    E_KEY_OFFSETS,
    E_KEY_VALID,
    E_KEY_VALID_AT,
    E_OFFSET_DELTAS,
    E_OUT,
    E_OUT_CAPACITY,
    E_OUT_SIZE,
    E_PRODUCER_EPOCH,
    E_PRODUCER_ID,
    E_ROW,
    E_ROWS,
    E_SELECTION,
    E_TABLE,
    E_TABLE_CAPACITY,
    E_TABLE_N,
    E_TIMESTAMP_VALID,
    E_TIMESTAMP_VALID_AT,
    E_TIMESTAMPS,
    E_VALUE_DATA,
    E_VALUE_OFFSETS,
    E_VALUE_VALID,
    E_VALUE_VALID_AT,
    M_BATCH,
    M_BUCKET,
    M_BUCKETS,
    M_KEEP,
    M_KEEP_TOMBSTONES,
    M_MAP,
    M_MAP_LIMIT,
    M_MAP_SLOTS,
    M_MAP_USED,
    M_MAX_OFFSET,
    M_MIN_OFFSET,
    M_N,
    M_NULL_KEYS,
    M_SCRATCH,
    M_SECRET_0,
    M_SECRET_1,
    M_STOP_OFFSET,
    M_SURVIVORS,
    R_BAD_ROW,
    R_IDS,
    R_KEY_DATA,
    R_KEY_OFFSETS,
    R_KEY_VALID,
    R_KEY_VALID_AT,
    R_PARTITION_COUNT,
    R_PARTITION_VALID,
    R_PARTITION_VALID_AT,
    R_PARTITIONS,
    R_ROWS,
    R_SELECTION,
    R_STARTS,
    R_STICKY,
    S_CAPACITY,
    S_N,
    S_NEXT,
    S_START,
    S_VERIFY,
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
    LEGACY_OVERHEAD_MIN,
    LEGACY_V1_BYTES_MIN,
    MAGIC,
    MAX_TIMESTAMP,
    PAYLOAD_ADDRESS,
    PAYLOAD_SIZE,
    POSITION,
    PREFIX_BYTES,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    RECORD_BYTES_MIN,
    ROW_BYTES,
    SIZE,
    SKIP,
    TIMESTAMP_TYPE_BIT,
)

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_i64 = types.int64
INT64_MAX = 0x7FFFFFFFFFFFFFFF
LEVEL = compiled_for()
HARDWARE_CRC = LEVEL is not None and LEVEL.has_crc
#: whether eight 64-bit polynomials are multiplied at once
WIDE_CRC = LEVEL is not None and LEVEL.has_wide_crc
ON_ARM = LEVEL is not None and LEVEL.machine == "aarch64"


# --- intrinsics: unaligned memory, byte order, a few instructions ---------------------------------------------------


def _loader(bits, swap, signed):
    kind = ir.IntType(bits)

    def load(typing_context, address):
        def codegen(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)
            if swap:
                value = builder.bswap(value)
            if bits == 64:
                return value
            return builder.sext(value, _I64) if signed else builder.zext(value, _I64)

        return _i64(_i64), codegen

    return intrinsic(load)


def _storer(bits, swap):
    kind = ir.IntType(bits)

    def store(typing_context, address, value):
        def codegen(context, builder, signature, args):
            value = args[1] if bits == 64 else builder.trunc(args[1], kind)
            if swap:
                value = builder.bswap(value)
            builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(_i64, _i64), codegen

    return intrinsic(store)


load8 = _loader(8, False, False)
load_i8 = _loader(8, False, True)
load16 = _loader(16, True, True)
load32 = _loader(32, True, True)
load_u32 = _loader(32, True, False)
load64 = _loader(64, True, True)
load32_le = _loader(32, False, True)
load64_le = _loader(64, False, True)
store8 = _storer(8, False)
store16 = _storer(16, True)
store16_le = _storer(16, False)
store32 = _storer(32, True)
store64 = _storer(64, True)
store32_le = _storer(32, False)
store64_le = _storer(64, False)


def _copier(size):
    kind = ir.VectorType(_I8, size)

    def move(typing_context, target, source):
        def codegen(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[1], kind.as_pointer()), align=1)
            builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(_i64, _i64), codegen

    return intrinsic(move)


copy4 = _copier(4)
copy8 = _copier(8)
copy16 = _copier(16)
copy32 = _copier(32)


@intrinsic
def copy_long(typing_context, target, source, size):
    def codegen(context, builder, signature, args):
        pointer = _I8.as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer), args[2], 1)
        return context.get_dummy_value()

    return types.void(_i64, _i64, _i64), codegen


@intrinsic
def load_acquire(typing_context, address):
    """An aligned word that other threads write; what was written before it by `store_release` is seen as well."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return _i64(_i64), codegen


@intrinsic
def store_release(typing_context, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(_i64, _i64), codegen


@intrinsic
def compare_and_swap(typing_context, address, expected, value):
    """What was there; it is replaced if it was what was expected."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire"), 0)

    return _i64(_i64, _i64, _i64), codegen


@intrinsic
def add_atomic(typing_context, address, value):
    """What was there before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "acq_rel")

    return _i64(_i64, _i64), codegen


@intrinsic
def add_wrapping(typing_context, left, right):
    """Sum modulo 2^64, as Java has it. Where + overflows the compiler may assume that it never does."""

    def codegen(context, builder, signature, args):
        return builder.add(args[0], args[1])

    return _i64(_i64, _i64), codegen


@intrinsic
def sub_wrapping(typing_context, left, right):
    def codegen(context, builder, signature, args):
        return builder.sub(args[0], args[1])

    return _i64(_i64, _i64), codegen


@njit(nogil=True, error_model="numpy", forceinline=True)
def copy(target, source, size):
    """memcpy, but what is short is moved in place: for most keys and values the call would cost more than the copy."""
    if size > 32:
        if size > 128:
            copy_long(target, source, size)
            return
        if size > 64:
            copy32(target + 32, source + 32)
            copy32(target + size - 64, source + size - 64)
        copy32(target, source)
        copy32(target + size - 32, source + size - 32)  # the end, over what may be there already
    elif size >= 16:
        copy16(target, source)
        copy16(target + size - 16, source + size - 16)
    elif size >= 8:
        copy8(target, source)
        copy8(target + size - 8, source + size - 8)
    elif size >= 4:
        copy4(target, source)
        copy4(target + size - 4, source + size - 4)
    else:
        for at in range(size):
            store8(target + at, load8(source + at))


@intrinsic
def shift_right(typing_context, value, bits):
    """Logical, where >> on int64 is arithmetic."""

    def codegen(context, builder, signature, args):
        return builder.lshr(args[0], args[1])

    return _i64(_i64, _i64), codegen


@intrinsic
def prefetch_read(typing_context, address):
    """Ask for a cache line that will be read soon; any address may be named."""

    def codegen(context, builder, signature, args):
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(_i64), codegen


@intrinsic
def leading_zeros(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return _i64(_i64), codegen


@intrinsic
def crc_step8(typing_context, crc, value):
    """Eight bytes through the processor's CRC-32C instruction."""

    def codegen(context, builder, signature, args):
        if ON_ARM:
            kind = ir.FunctionType(_I32, [_I32, _I64])
            function = cgutils.get_or_insert_function(builder.module, kind, ARM_CRC)
            return builder.zext(builder.call(function, [builder.trunc(args[0], _I32), args[1]]), _I64)
        name = "llvm.x86.sse42.crc32.64.64"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I64, [_I64, _I64]), name)
        return builder.call(function, args)

    return _i64(_i64, _i64), codegen


# --- CRC-32C ----------------------------------------------------------------------------------------------------------

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

_WIDE = ir.VectorType(_I64, 8)
_WIDE_BYTES = 64
_WIDE_STREAMS = 4
_WIDE_STEP = _WIDE_BYTES * _WIDE_STREAMS


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
            module, ir.FunctionType(_WIDE, [_WIDE, _WIDE, _I8]), "llvm.x86.pclmulqdq.512"
        )
        step8 = cgutils.get_or_insert_function(
            module, ir.FunctionType(_I64, [_I64, _I64]), "llvm.x86.sse42.crc32.64.64"
        )

        def loaded(start, stream):
            at = builder.add(start, _I64(stream * _WIDE_BYTES))
            return builder.load(builder.inttoptr(at, _WIDE.as_pointer()), align=1)

        def folded(value, factors, onto):
            low = builder.call(multiply, [value, factors, _I8(0x00)])
            high = builder.call(multiply, [value, factors, _I8(0x11)])
            return builder.xor(builder.xor(low, high), onto)

        first = [loaded(address, stream) for stream in range(_WIDE_STREAMS)]
        first[0] = builder.xor(first[0], builder.insert_element(ir.Constant(_WIDE, [0] * 8), crc, _I32(0)))
        begun = builder.add(address, _I64(_WIDE_STEP))
        before = builder.block
        head = builder.append_basic_block("fold.head")
        body = builder.append_basic_block("fold.body")
        done = builder.append_basic_block("fold.done")
        builder.branch(head)

        builder.position_at_end(head)
        at = builder.phi(_I64)
        at.add_incoming(begun, before)
        streams = [builder.phi(_WIDE) for _ in first]
        for stream, value in zip(streams, first, strict=True):
            stream.add_incoming(value, before)
        after = builder.add(at, _I64(_WIDE_STEP))
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
        state = _I64(0)
        for lane in range(8):
            state = builder.call(step8, [state, builder.extract_element(rest, _I32(lane))])
        return context.make_tuple(builder, signature.return_type, [state, at])

    return types.UniTuple(_i64, 2)(_i64, _i64, _i64), codegen


@njit(nogil=True, error_model="numpy")
def _skip_stripe(crc):
    return (
        _SHIFT[crc & 0xFF]
        ^ _SHIFT[256 + (shift_right(crc, 8) & 0xFF)]
        ^ _SHIFT[512 + (shift_right(crc, 16) & 0xFF)]
        ^ _SHIFT[768 + (shift_right(crc, 24) & 0xFF)]
    )


@njit(nogil=True, error_model="numpy")
def _crc_wide(address, size):
    crc = 0xFFFFFFFF
    end = address + size
    if size >= _WIDE_STEP:
        crc, address = fold_wide(crc, address, end)
    return _crc_rest(crc, address, end)


@njit(nogil=True, error_model="numpy")
def _crc_rest(crc, address, end):
    """A few more bytes, and the last touch."""
    while end - address >= 8:
        crc = crc_step8(crc, load64_le(address))
        address += 8
    while address < end:
        crc = shift_right(crc, 8) ^ _SLICES[(crc ^ load8(address)) & 0xFF]
        address += 1
    return crc ^ 0xFFFFFFFF


@njit(nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
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
_crc = _crc_wide if WIDE_CRC else _crc_by_instruction


@njit(nogil=True, error_model="numpy")
def crc32c(address, size):
    """CRC-32C of `size` bytes, by the processor where it can."""
    return _crc(address, size)


@njit(nogil=True, error_model="numpy")
def crc32c_striped(address, size):
    """CRC-32C by the processor's own instruction, where it has one; what most processors run."""
    return _crc_by_instruction(address, size)


@njit(nogil=True, error_model="numpy")
def crc32c_tables(address, size):
    """CRC-32C without the instruction; what other processors run."""
    return _crc_tables(address, size)


# --- varints ----------------------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
def _zigzag(value):
    return (value << 1) ^ (value >> 63)


@njit(nogil=True, error_model="numpy")
def _varint_size(value):
    return (63 - leading_zeros(_zigzag(value) | 1)) // 7 + 1


@njit(nogil=True, error_model="numpy")
def _write_varint(address, value):
    bits = _zigzag(value)
    while (bits & ~0x7F) != 0:
        store8(address, (bits & 0x7F) | 0x80)
        bits = shift_right(bits, 7)
        address += 1
    store8(address, bits)
    return address + 1


@njit(nogil=True, error_model="numpy", forceinline=True)
def _read_varint(address, end, bytes_max):
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


@njit(nogil=True, error_model="numpy")
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


# --- encode -----------------------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
def _slot(block, index):
    return load64_le(block + index * 8)


@njit(nogil=True, error_model="numpy")
def _set_slot(block, index, value):
    store64_le(block + index * 8, value)


@njit(nogil=True, error_model="numpy")
def _is_valid(bitmap, position):
    if bitmap == 0:
        return True
    return (load8(bitmap + (position >> 3)) >> (position & 7)) & 1 == 1


@njit(nogil=True, error_model="numpy")
def _header_bytes(block, first, last):
    """Encoded size of headers [first, last) without their count."""
    key_offsets = _slot(block, E_HEADER_KEY_OFFSETS)
    value_offsets = _slot(block, E_HEADER_VALUE_OFFSETS)
    valid = _slot(block, E_HEADER_VALUE_VALID)
    valid_at = _slot(block, E_HEADER_VALUE_VALID_AT)
    size = 0
    for h in range(first, last):
        length = load64_le(key_offsets + (h + 1) * 8) - load64_le(key_offsets + h * 8)
        size += _varint_size(length) + length
        if _is_valid(valid, valid_at + h):
            length = load64_le(value_offsets + (h + 1) * 8) - load64_le(value_offsets + h * 8)
            size += _varint_size(length) + length
        else:
            size += 1
    return size


@njit(nogil=True, error_model="numpy")
def _write_headers(block, address, first, last):
    key_offsets = _slot(block, E_HEADER_KEY_OFFSETS)
    key_data = _slot(block, E_HEADER_KEY_DATA)
    value_offsets = _slot(block, E_HEADER_VALUE_OFFSETS)
    value_data = _slot(block, E_HEADER_VALUE_DATA)
    valid = _slot(block, E_HEADER_VALUE_VALID)
    valid_at = _slot(block, E_HEADER_VALUE_VALID_AT)
    for h in range(first, last):
        start = load64_le(key_offsets + h * 8)
        length = load64_le(key_offsets + (h + 1) * 8) - start
        address = _write_varint(address, length)
        copy(address, key_data + start, length)
        address += length
        if _is_valid(valid, valid_at + h):
            start = load64_le(value_offsets + h * 8)
            length = load64_le(value_offsets + (h + 1) * 8) - start
            address = _write_varint(address, length)
            copy(address, value_data + start, length)
            address += length
        else:
            address = _write_varint(address, -1)
    return address


@njit(nogil=True, error_model="numpy")
def _write_batch_header(
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


@njit(nogil=True, error_model="numpy", forceinline=True)
def _write_short(address, bits):
    """A varint of one or two bytes; returns the next address."""
    if bits < 0x80:
        store8(address, bits)
        return address + 1
    store16_le(address, (bits & 0x7F) | 0x80 | (bits >> 7 << 8))
    return address + 2


@njit(nogil=True, error_model="numpy")
def _encode_plain(block, i, rows, batch, limit):
    """Rows from i on behind a batch's header, up to the first that is not plain or does not fit: (records, next
    address, base timestamp, largest timestamp).

    Plain: key and value below 2 KiB, a timestamp within a quarter of an hour of the first. Only for columns without
    nulls, headers and offsets of their own. It does what `encode` does, without most of the questions.
    """
    selection = _slot(block, E_SELECTION)
    key_offsets = _slot(block, E_KEY_OFFSETS)
    key_data = _slot(block, E_KEY_DATA)
    value_offsets = _slot(block, E_VALUE_OFFSETS)
    value_data = _slot(block, E_VALUE_DATA)
    timestamps = _slot(block, E_TIMESTAMPS)
    address = batch + HEADER_BYTES
    base_ts = _slot(block, E_DEFAULT_TIMESTAMP)
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
        ts_bits = _zigzag(sub_wrapping(timestamp, base_ts))
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


@njit(nogil=True, error_model="numpy")
def encode(block):
    """Rows of columns to finished v2 batches, until the rows, the output or the table end; OK or FULL.

    The first record of a batch is always taken; another only while the batch stays within E_BATCH_BYTES and
    E_BATCH_RECORDS. FULL with no batch made: the output has no room for the first one, of one record or of all that
    belong to it. For a codec the records are left uncompressed behind the header, and length and CRC are the caller's
    to finish (`finish_batch`). A delete horizon takes the base timestamp's place.
    """
    rows = _slot(block, E_ROWS)
    selection = _slot(block, E_SELECTION)
    key_offsets = _slot(block, E_KEY_OFFSETS)
    key_data = _slot(block, E_KEY_DATA)
    key_valid = _slot(block, E_KEY_VALID)
    key_valid_at = _slot(block, E_KEY_VALID_AT)
    value_offsets = _slot(block, E_VALUE_OFFSETS)
    value_data = _slot(block, E_VALUE_DATA)
    value_valid = _slot(block, E_VALUE_VALID)
    value_valid_at = _slot(block, E_VALUE_VALID_AT)
    timestamps = _slot(block, E_TIMESTAMPS)
    timestamp_valid = _slot(block, E_TIMESTAMP_VALID)
    timestamp_valid_at = _slot(block, E_TIMESTAMP_VALID_AT)
    default_timestamp = _slot(block, E_DEFAULT_TIMESTAMP)
    header_list = _slot(block, E_HEADER_LIST)
    header_list_valid = _slot(block, E_HEADER_LIST_VALID)
    header_list_valid_at = _slot(block, E_HEADER_LIST_VALID_AT)
    offset_deltas = _slot(block, E_OFFSET_DELTAS)
    batch_bytes = _slot(block, E_BATCH_BYTES)
    batch_records = _slot(block, E_BATCH_RECORDS)
    out_end = _slot(block, E_OUT) + _slot(block, E_OUT_CAPACITY)
    table = _slot(block, E_TABLE)
    capacity = _slot(block, E_TABLE_CAPACITY)
    attributes = _slot(block, E_ATTRIBUTES)
    producer_id = _slot(block, E_PRODUCER_ID)
    sequence = _slot(block, E_BASE_SEQUENCE)
    base_offset = _slot(block, E_BASE_OFFSET)
    delete_horizon = _slot(block, E_DELETE_HORIZON)

    plain = key_valid == 0 and value_valid == 0 and timestamp_valid == 0 and header_list == 0 and offset_deltas == 0
    plain = plain and attributes & DELETE_HORIZON_BIT == 0

    i = _slot(block, E_ROW)
    batch = _slot(block, E_OUT)
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
            if timestamps != 0 and _is_valid(timestamp_valid, timestamp_valid_at + row):
                timestamp = load64_le(timestamps + row * 8)
            if count == 0:
                base_ts = timestamp
                if attributes & DELETE_HORIZON_BIT != 0:
                    base_ts = delete_horizon
                max_ts = timestamp
            key_start = load64_le(key_offsets + row * 8)
            key_length = load64_le(key_offsets + (row + 1) * 8) - key_start
            if not _is_valid(key_valid, key_valid_at + row):
                key_length = -1
            value_start = load64_le(value_offsets + row * 8)
            value_length = load64_le(value_offsets + (row + 1) * 8) - value_start
            if not _is_valid(value_valid, value_valid_at + row):
                value_length = -1
            first_header = 0
            last_header = 0
            if header_list != 0 and _is_valid(header_list_valid, header_list_valid_at + row):
                first_header = load64_le(header_list + row * 8)
                last_header = load64_le(header_list + (row + 1) * 8)
            delta = count
            if offset_deltas != 0:
                delta = load64_le(offset_deltas + row * 8)

            timestamp_delta = sub_wrapping(timestamp, base_ts)
            body = 1 + _varint_size(timestamp_delta) + _varint_size(delta)
            body += _varint_size(key_length) + max(key_length, 0)
            body += _varint_size(value_length) + max(value_length, 0)
            body += _varint_size(last_header - first_header)
            if last_header > first_header:
                body += _header_bytes(block, first_header, last_header)
            size = _varint_size(body) + body
            if count > 0 and address + size - batch > batch_bytes:
                break
            if address + size > out_end:
                code = FULL
                break

            address = _write_varint(address, body)
            store8(address, 0)
            address = _write_varint(address + 1, timestamp_delta)
            address = _write_varint(address, delta)
            address = _write_varint(address, key_length)
            if key_length > 0:
                copy(address, key_data + key_start, key_length)
                address += key_length
            address = _write_varint(address, value_length)
            if value_length > 0:
                copy(address, value_data + value_start, value_length)
                address += value_length
            address = _write_varint(address, last_header - first_header)
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
        _write_batch_header(
            batch,
            size,
            base_offset,
            _slot(block, E_EPOCH),
            attributes,
            last_delta,
            base_ts,
            max_ts,
            producer_id,
            _slot(block, E_PRODUCER_EPOCH),
            sequence,
            count,
        )
        crc = 0
        if attributes & CODEC_MASK == 0:
            crc = _crc(batch + 21, size - 21)
            store32(batch + 17, crc)
        _set_slot(row, POSITION, batch - _slot(block, E_OUT))
        _set_slot(row, SIZE, size)
        _set_slot(row, BASE_OFFSET, base_offset)
        _set_slot(row, LAST_OFFSET, add_wrapping(base_offset, last_delta))
        _set_slot(row, LEADER_EPOCH, _slot(block, E_EPOCH))
        _set_slot(row, MAGIC, 2)
        _set_slot(row, ATTRIBUTES, attributes)
        _set_slot(row, BASE_TIMESTAMP, base_ts)
        _set_slot(row, MAX_TIMESTAMP, max_ts)
        _set_slot(row, PRODUCER_ID, producer_id)
        _set_slot(row, PRODUCER_EPOCH, _slot(block, E_PRODUCER_EPOCH))
        _set_slot(row, BASE_SEQUENCE, sequence)
        _set_slot(row, COUNT, count)
        _set_slot(row, CRC, crc)
        _set_slot(row, PAYLOAD_ADDRESS, batch + HEADER_BYTES)
        _set_slot(row, PAYLOAD_SIZE, size - HEADER_BYTES)
        _set_slot(row, SKIP, 0)
        made += 1
        batch += size
        base_offset = add_wrapping(base_offset, last_delta + 1)
        if sequence >= 0:
            sequence = (sequence + last_delta + 1) & 0x7FFFFFFF
    _set_slot(block, E_ROW, i)
    _set_slot(block, E_TABLE_N, made)
    _set_slot(block, E_OUT_SIZE, batch - _slot(block, E_OUT))
    _set_slot(block, E_BASE_OFFSET, base_offset)
    _set_slot(block, E_BASE_SEQUENCE, sequence)
    return code


@njit(nogil=True, error_model="numpy")
def finish_batch(batch, size):
    """Write length and CRC of a batch whose payload was put in place by the caller; returns the CRC."""
    store32(batch + 8, size - PREFIX_BYTES)
    crc = _crc(batch + 21, size - 21)
    store32(batch + 17, crc)
    return crc


# --- scan -------------------------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
def scan(address, size, table, block):
    """Batch headers from S_START on into the table; S_NEXT is where it stopped.

    OK: everything consumed. PARTIAL: what is left is the beginning of a batch. FULL: the table is. Else what is wrong
    with the batch at S_NEXT. Legacy batches are listed with their last offset; their CRC and content are not looked
    at here.
    """
    capacity = _slot(block, S_CAPACITY)
    verify = _slot(block, S_VERIFY)
    position = _slot(block, S_START)
    n = 0
    code = OK
    while position < size:
        if n == capacity:
            code = FULL
            break
        left = size - position
        if left < PREFIX_BYTES + 6:  # Kafka's reader, too, stops where fewer than 18 bytes are left
            code = PARTIAL
            break
        batch = address + position
        length = load32(batch + 8)
        if length < LEGACY_OVERHEAD_MIN:
            code = BAD_LENGTH
            break
        total = length + PREFIX_BYTES
        magic = load_i8(batch + 16)
        if magic < 0 or magic > 2:
            code = BAD_MAGIC
            break
        if (magic == 2 and total < HEADER_BYTES) or (magic == 1 and total < LEGACY_V1_BYTES_MIN):
            code = BAD_LENGTH
            break
        if total > left:
            code = PARTIAL
            break
        base = load64(batch)
        if base < 0 or base == INT64_MAX:  # the offset after the last one must exist, too
            code = BAD_OFFSET
            break
        row = table + n * ROW_BYTES
        _set_slot(row, POSITION, position)
        _set_slot(row, SIZE, total)
        _set_slot(row, MAGIC, magic)
        _set_slot(row, SKIP, 0)
        if magic == 2:
            crc = load_u32(batch + 17)
            if verify != 0 and crc != _crc(batch + 21, total - 21):
                code = BAD_CRC
                break
            attributes = load16(batch + 21)
            last_delta = load32(batch + 23)
            count = load32(batch + 57)
            payload = total - HEADER_BYTES
            if last_delta < 0 or base >= INT64_MAX - last_delta:
                code = BAD_OFFSET
                break
            if count < 0 or (attributes & CODEC_MASK == 0 and count * RECORD_BYTES_MIN > payload):
                code = BAD_COUNT
                break
            _set_slot(row, BASE_OFFSET, base)
            _set_slot(row, LAST_OFFSET, base + last_delta)
            _set_slot(row, LEADER_EPOCH, load32(batch + 12))
            _set_slot(row, ATTRIBUTES, attributes)
            _set_slot(row, BASE_TIMESTAMP, load64(batch + 27))
            _set_slot(row, MAX_TIMESTAMP, load64(batch + 35))
            _set_slot(row, PRODUCER_ID, load64(batch + 43))
            _set_slot(row, PRODUCER_EPOCH, load16(batch + 51))
            _set_slot(row, BASE_SEQUENCE, load32(batch + 53))
            _set_slot(row, COUNT, count)
            _set_slot(row, CRC, crc)
            _set_slot(row, PAYLOAD_ADDRESS, batch + HEADER_BYTES)
            _set_slot(row, PAYLOAD_SIZE, payload)
        else:
            timestamp = -1
            if magic == 1:
                timestamp = load64(batch + 18)
            _set_slot(row, BASE_OFFSET, -1)
            _set_slot(row, LAST_OFFSET, base)
            _set_slot(row, LEADER_EPOCH, -1)
            _set_slot(row, ATTRIBUTES, load8(batch + 17))
            _set_slot(row, BASE_TIMESTAMP, timestamp)
            _set_slot(row, MAX_TIMESTAMP, timestamp)
            _set_slot(row, PRODUCER_ID, -1)
            _set_slot(row, PRODUCER_EPOCH, -1)
            _set_slot(row, BASE_SEQUENCE, -1)
            _set_slot(row, COUNT, -1)
            _set_slot(row, CRC, load_u32(batch + 12))
            _set_slot(row, PAYLOAD_ADDRESS, 0)
            _set_slot(row, PAYLOAD_SIZE, 0)
        n += 1
        position += total
    _set_slot(block, S_N, n)
    _set_slot(block, S_NEXT, position)
    return code


# --- records of a batch -----------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy", forceinline=True)
def _parse_record(address, end):
    """(next, timestamp delta, offset delta, key, key length, value, value length, headers, header count); next 0 when
    malformed.

    Lengths below zero mean null. Headers are only counted here; `_parse_header` walks them.
    """
    length, address = _read_varint(address, end, 5)
    if address == 0 or length < 1 or length > end - address:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    end = address + length
    timestamp_delta, address = _read_varint(address + 1, end, 10)
    if address == 0:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    offset_delta, address = _read_varint(address, end, 5)
    if address == 0:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    key_length, address = _read_varint(address, end, 5)
    if address == 0 or key_length > end - address:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    key = address
    address += max(key_length, 0)
    value_length, address = _read_varint(address, end, 5)
    if address == 0 or value_length > end - address:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    value = address
    address += max(value_length, 0)
    headers, address = _read_varint(address, end, 5)
    # A header takes two bytes at least, so a count of more is a lie: nothing downstream needs room for it.
    if address == 0 or headers < 0 or headers * 2 > end - address or (headers == 0 and address != end):
        return 0, 0, 0, 0, 0, 0, 0, 0, 0
    return end, timestamp_delta, offset_delta, key, key_length, value, value_length, address, headers


@njit(nogil=True, error_model="numpy")
def _parse_header(address, end):
    """(next, key, key length, value, value length); next 0 when malformed."""
    key_length, address = _read_varint(address, end, 5)
    if address == 0 or key_length < 0 or key_length > end - address:
        return 0, 0, 0, 0, 0
    key = address
    address += key_length
    value_length, address = _read_varint(address, end, 5)
    if address == 0 or value_length > end - address:
        return 0, 0, 0, 0, 0
    return address + max(value_length, 0), key, key_length, address, value_length


@njit(nogil=True, error_model="numpy")
def _headers_sound(address, end, count):
    for _ in range(count):
        address, _key, _key_length, _value, _value_length = _parse_header(address, end)
        if address == 0:
            return False
    return address == end


@intrinsic
def fill(typing_context, target, byte, size):
    def codegen(context, builder, signature, args):
        pointer = _I8.as_pointer()
        cgutils.memset(builder, builder.inttoptr(args[0], pointer), args[2], builder.trunc(args[1], _I8))
        return context.get_dummy_value()

    return types.void(_i64, _i64, _i64), codegen


@njit(nogil=True, error_model="numpy")
def _decode_plain(address, end, count, base_offset, last_delta, base_ts, n, columns, key_end, value_end):
    """The records of a batch up to the first that is not plain: (how many, next address, key end, value end).

    Plain: key and value are there and below 8 KiB, no headers, nothing wrong. This is nearly every record, and what
    need not be looked at is left out here; whatever else comes is `decode`'s, judgement included.
    """
    offsets = _slot(columns, D_OFFSETS)
    timestamps = _slot(columns, D_TIMESTAMPS)
    key_offsets = _slot(columns, D_KEY_OFFSETS) + 4
    key_data = _slot(columns, D_KEY_DATA)
    value_offsets = _slot(columns, D_VALUE_OFFSETS) + 4
    value_data = _slot(columns, D_VALUE_DATA)
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


@njit(nogil=True, error_model="numpy")
def decode(table, first, last, block):
    """Records of batches [first, last) into columns; OK, BAD_RECORD or FULL (headers), with D_N records written.

    Batches marked SKIP are passed over, and with D_KEEP (one byte a record of the others, see `map_keep`) records
    whose byte is 0. On failure D_BATCH is the batch that is to blame. Key and value data have room for all payload
    bytes (caller's promise).
    """
    min_offset = _slot(block, D_MIN_OFFSET)
    max_offset = _slot(block, D_MAX_OFFSET)
    offsets = _slot(block, D_OFFSETS)
    timestamps = _slot(block, D_TIMESTAMPS)
    timestamp_types = _slot(block, D_TIMESTAMP_TYPES)
    key_offsets = _slot(block, D_KEY_OFFSETS)
    key_data = _slot(block, D_KEY_DATA)
    key_valid = _slot(block, D_KEY_VALID)
    value_offsets = _slot(block, D_VALUE_OFFSETS)
    value_data = _slot(block, D_VALUE_DATA)
    value_valid = _slot(block, D_VALUE_VALID)
    header_offsets = _slot(block, D_HEADER_OFFSETS)
    header_capacity = _slot(block, D_HEADER_CAPACITY)
    header_key_offsets = _slot(block, D_HEADER_KEY_OFFSETS)
    header_key_data = _slot(block, D_HEADER_KEY_DATA)
    header_value_offsets = _slot(block, D_HEADER_VALUE_OFFSETS)
    header_value_data = _slot(block, D_HEADER_VALUE_DATA)
    header_value_valid = _slot(block, D_HEADER_VALUE_VALID)
    keep = _slot(block, D_KEEP)
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
        if _slot(row, SKIP) != 0:
            b += 1
            continue
        address = _slot(row, PAYLOAD_ADDRESS)
        end = address + _slot(row, PAYLOAD_SIZE)
        base_offset = _slot(row, BASE_OFFSET)
        last_delta = _slot(row, LAST_OFFSET) - base_offset
        base_ts = _slot(row, BASE_TIMESTAMP)
        append_time = _slot(row, ATTRIBUTES) & TIMESTAMP_TYPE_BIT
        max_ts = _slot(row, MAX_TIMESTAMP)
        previous = -1
        left = _slot(row, COUNT)
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
            address, ts_delta, delta, key, key_length, value, value_length, headers, header_count = _parse_record(
                address, end
            )
            if address == 0 or delta <= previous or delta > last_delta:
                code = BAD_RECORD
                break
            previous = delta
            offset = base_offset + delta
            seen += 1
            if offset < min_offset or offset >= max_offset or (keep != 0 and load8(keep + seen - 1) == 0):
                if header_count > 0 and not _headers_sound(headers, address, header_count):
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
                    if not _headers_sound(headers, address, header_count):
                        code = BAD_RECORD
                        break
                else:
                    if headers_n + header_count > header_capacity:
                        code = FULL
                        break
                    position = headers
                    for _h in range(header_count):
                        position, name, name_length, content, content_length = _parse_header(position, address)
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
    _set_slot(block, D_N, n)
    _set_slot(block, D_HEADER_N, headers_n)
    _set_slot(block, D_KEY_NULLS, key_nulls)
    _set_slot(block, D_VALUE_NULLS, value_nulls)
    _set_slot(block, D_HEADER_VALUE_NULLS, header_nulls)
    _set_slot(block, D_BATCH, b)
    return code


@njit(nogil=True, error_model="numpy")
def check(table, first, last, block):
    """Walk the records of batches [first, last) as an append must: sound, deltas 0, 1, 2…; timestamps and null keys
    reported.

    OK, BAD_RECORD, or BAD_OFFSET when deltas are not consecutive from 0. C_BATCH is the batch to blame then.
    """
    null_keys = 0
    min_ts = INT64_MAX
    for b in range(first, last):
        row = table + b * ROW_BYTES
        address = _slot(row, PAYLOAD_ADDRESS)
        end = address + _slot(row, PAYLOAD_SIZE)
        base_ts = _slot(row, BASE_TIMESTAMP)
        max_ts = -1
        max_ts_offset = -1
        count = _slot(row, COUNT)
        if count == 0 or _slot(row, LAST_OFFSET) - _slot(row, BASE_OFFSET) != count - 1:
            _set_slot(block, C_BATCH, b)
            return BAD_COUNT
        consecutive = True
        for expected in range(count):
            address, ts_delta, delta, _key, key_length, _value, _value_length, headers, header_count = _parse_record(
                address, end
            )
            if address == 0 or (header_count > 0 and not _headers_sound(headers, address, header_count)):
                _set_slot(block, C_BATCH, b)
                return BAD_RECORD
            if delta != expected:
                consecutive = False
            if key_length < 0:
                null_keys += 1
            timestamp = add_wrapping(base_ts, ts_delta)
            if timestamp >= 0:
                min_ts = min(min_ts, timestamp)
            if timestamp > max_ts:
                max_ts = timestamp
                max_ts_offset = expected
        if address != end:
            _set_slot(block, C_BATCH, b)
            return BAD_RECORD
        if not consecutive:
            _set_slot(block, C_BATCH, b)
            return BAD_OFFSET
        _set_slot(block, C_MAX_TS, max_ts)
        _set_slot(block, C_MAX_TS_OFFSET, max_ts_offset)
    _set_slot(block, C_NULL_KEYS, null_keys)
    _set_slot(block, C_MIN_TS, min_ts)
    return OK


# --- place ------------------------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
def stamp_append_time(buffer, table, n, now_ms):
    """Make CreateTime batches LogAppendTime at `now_ms`: attribute bit, max timestamp, CRC. Record deltas stay."""
    for b in range(n):
        row = table + b * ROW_BYTES
        batch = buffer + _slot(row, POSITION)
        size = _slot(row, SIZE)
        attributes = _slot(row, ATTRIBUTES) | TIMESTAMP_TYPE_BIT
        store16(batch + 21, attributes)
        store64(batch + 35, now_ms)
        crc = _crc(batch + 21, size - 21)
        store32(batch + 17, crc)
        _set_slot(row, ATTRIBUTES, attributes)
        _set_slot(row, MAX_TIMESTAMP, now_ms)
        _set_slot(row, CRC, crc)
    return OK


@njit(nogil=True, error_model="numpy")
def set_max_timestamp(batch, row, max_ts):
    """Correct a batch whose header claims another maximum than its records have."""
    store64(batch + 35, max_ts)
    crc = _crc(batch + 21, _slot(row, SIZE) - 21)
    store32(batch + 17, crc)
    _set_slot(row, MAX_TIMESTAMP, max_ts)
    _set_slot(row, CRC, crc)
    return OK


@njit(nogil=True, error_model="numpy")
def place(buffer, table, first, last, assign, block):
    """Give batches [first, last) their offsets and leader epoch, and decide the index entries, until a roll is due.

    The rule of rolling is that of `partition.roll`, the rule of indexing log-format's: both are applied batch by
    batch, as if each were an append of its own. Returns the number of batches placed; A_SIZE and the rest of the
    block are the segment's state after them. A_REASON says why it stopped: OK at the end, or a ROLL_ code.
    """
    size = _slot(block, A_SIZE)
    base = _slot(block, A_BASE_OFFSET)
    next_offset = _slot(block, A_NEXT_OFFSET)
    epoch = _slot(block, A_EPOCH)
    max_ts = _slot(block, A_MAX_TS)
    max_ts_offset = _slot(block, A_MAX_TS_OFFSET)
    first_ts = _slot(block, A_FIRST_TS)
    created_ms = _slot(block, A_CREATED_MS)
    now_ms = _slot(block, A_NOW_MS)
    bytes_since = _slot(block, A_BYTES_SINCE)
    entries = _slot(block, A_INDEX_ENTRIES)
    time_entries = _slot(block, A_TIME_ENTRIES)
    last_time_ts = _slot(block, A_LAST_TIME_TS)
    segment_bytes = _slot(block, A_SEGMENT_BYTES)
    max_segment_ms = _slot(block, A_MAX_SEGMENT_MS)
    interval = _slot(block, A_INDEX_INTERVAL)
    entries_max = _slot(block, A_INDEX_MAX)
    time_entries_max = _slot(block, A_TIME_MAX)
    index_out = _slot(block, A_INDEX_OUT)
    time_out = _slot(block, A_TIME_OUT)
    fresh = _slot(block, A_FRESH) != 0
    index_n = 0
    time_n = 0
    reason = OK
    b = first
    while b < last:
        row = table + b * ROW_BYTES
        batch_size = _slot(row, SIZE)
        batch_max_ts = _slot(row, MAX_TIMESTAMP)
        batch_base = _slot(row, BASE_OFFSET)
        last_delta = _slot(row, LAST_OFFSET) - batch_base
        if assign != 0:
            batch_base = next_offset
        last_offset = add_wrapping(batch_base, last_delta)
        if batch_size > segment_bytes:
            reason = ROLL_APPEND_TOO_LARGE
            break
        if size > segment_bytes - batch_size:
            reason = ROLL_SIZE
            break
        if size > 0:
            waited = sub_wrapping(now_ms, created_ms)
            if first_ts >= 0:
                waited = sub_wrapping(batch_max_ts, first_ts)
            if waited > max_segment_ms:
                reason = ROLL_TIME
                break
        if not (fresh and b == first):  # a segment made for this batch takes it even if its indexes hold nothing
            if entries >= entries_max:
                reason = ROLL_INDEX_FULL
                break
            if time_entries >= time_entries_max - 1:
                reason = ROLL_TIME_INDEX_FULL
                break
        if last_offset < base or last_offset - base > 0x7FFFFFFF:
            reason = ROLL_OFFSET_OVERFLOW
            break

        if assign != 0:
            batch = buffer + _slot(row, POSITION)
            store64(batch, batch_base)
            store32(batch + 12, epoch)
            _set_slot(row, BASE_OFFSET, batch_base)
            _set_slot(row, LAST_OFFSET, last_offset)
            _set_slot(row, LEADER_EPOCH, epoch)
        if size == 0:
            first_ts = batch_max_ts
        if batch_max_ts > max_ts:
            max_ts = batch_max_ts
            max_ts_offset = last_offset
        if bytes_since > interval:
            store32(index_out + index_n * 8, last_offset - base)
            store32(index_out + index_n * 8 + 4, size)
            index_n += 1
            entries += 1
            if max_ts > last_time_ts:
                store64(time_out + time_n * 12, max_ts)
                store32(time_out + time_n * 12 + 8, max_ts_offset - base)
                time_n += 1
                time_entries += 1
                last_time_ts = max_ts
            bytes_since = 0
        bytes_since += batch_size
        size += batch_size
        next_offset = add_wrapping(last_offset, 1)
        b += 1
    _set_slot(block, A_SIZE, size)
    _set_slot(block, A_NEXT_OFFSET, next_offset)
    _set_slot(block, A_MAX_TS, max_ts)
    _set_slot(block, A_MAX_TS_OFFSET, max_ts_offset)
    _set_slot(block, A_FIRST_TS, first_ts)
    _set_slot(block, A_BYTES_SINCE, bytes_since)
    _set_slot(block, A_INDEX_ENTRIES, entries)
    _set_slot(block, A_TIME_ENTRIES, time_entries)
    _set_slot(block, A_LAST_TIME_TS, last_time_ts)
    _set_slot(block, A_INDEX_OUT_N, index_n)
    _set_slot(block, A_TIME_OUT_N, time_n)
    _set_slot(block, A_REASON, reason)
    return b - first


# --- route ------------------------------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
def route(block):
    """Which partition each row goes to, and the rows grouped by partition, in their order; OK or BAD_OFFSET.

    A given partition wins; else Kafka's hash of the key; rows with neither go to R_STICKY. R_STARTS has one entry more
    than there are partitions: rows [starts[p], starts[p + 1]) of R_SELECTION are those of partition p. BAD_OFFSET: the
    partition given for row R_BAD_ROW does not exist.
    """
    rows = _slot(block, R_ROWS)
    key_offsets = _slot(block, R_KEY_OFFSETS)
    key_data = _slot(block, R_KEY_DATA)
    key_valid = _slot(block, R_KEY_VALID)
    key_valid_at = _slot(block, R_KEY_VALID_AT)
    given = _slot(block, R_PARTITIONS)
    given_valid = _slot(block, R_PARTITION_VALID)
    given_valid_at = _slot(block, R_PARTITION_VALID_AT)
    count = _slot(block, R_PARTITION_COUNT)
    sticky = _slot(block, R_STICKY)
    ids = _slot(block, R_IDS)
    starts = _slot(block, R_STARTS)
    selection = _slot(block, R_SELECTION)
    for p in range(count + 1):
        store64_le(starts + p * 8, 0)
    for row in range(rows):
        partition = sticky
        if given != 0 and _is_valid(given_valid, given_valid_at + row):
            partition = load64_le(given + row * 8)
            if partition < 0 or partition >= count:
                _set_slot(block, R_BAD_ROW, row)
                return BAD_OFFSET
        elif _is_valid(key_valid, key_valid_at + row):
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


# --- the offset map ---------------------------------------------------------------------------------------------------

# An open-addressing table of 24-byte slots: 128 bits of a keyed hash of the key, and offset + 1 (0 is an empty slot).
_MAP_SLOT_BYTES = 24
_AHEAD = 64  # keys hashed before their slots are touched, so that the memory is on its way


@intrinsic
def multiply_high(typing_context, a, b):
    """The upper 64 bits of the unsigned product."""

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _I64)

    return _i64(_i64, _i64), codegen


@intrinsic
def prefetch(typing_context, address):
    def codegen(context, builder, signature, args):
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], pointer), _I32(1), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(_i64), codegen


@njit(nogil=True, error_model="numpy")
def _rotate(value, bits):
    return (value << bits) | shift_right(value, 64 - bits)


@njit(nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
def _sip_hash(address, size, k0, k1):
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


@njit(nogil=True, error_model="numpy")
def sip_hash(address, size, k0, k1, result):
    """The hash of the map, for tests: 16 bytes at `result`."""
    low, high = _sip_hash(address, size, k0, k1)
    store64_le(result, low)
    store64_le(result + 8, high)
    return OK


@njit(nogil=True, error_model="numpy")
def _find_slot(map_address, map_slots, low, high):
    """Address of the key's slot, or of the empty one where it belongs. One slot at least is always empty."""
    at = multiply_high(low, map_slots)
    while True:
        slot = map_address + at * _MAP_SLOT_BYTES
        if load64_le(slot + 16) == 0 or (load64_le(slot) == low and load64_le(slot + 8) == high):
            return slot
        at += 1
        if at == map_slots:
            at = 0


@njit(nogil=True, error_model="numpy")
def map_put(table, first, last, block):
    """Put the keys of batches [first, last) into the map with their offsets; later offsets replace earlier ones.

    Records without key, outside [M_MIN_OFFSET, M_MAX_OFFSET) or of another bucket (of M_BUCKETS, by hash) are passed
    over, as are batches marked SKIP. OK, BAD_RECORD with the batch in M_BATCH, or FULL: the map holds M_MAP_LIMIT keys
    and the record at M_STOP_OFFSET was not taken. M_SCRATCH has room for 24 bytes for each of 64 keys.
    """
    min_offset = _slot(block, M_MIN_OFFSET)
    max_offset = _slot(block, M_MAX_OFFSET)
    map_address = _slot(block, M_MAP)
    map_slots = _slot(block, M_MAP_SLOTS)
    used = _slot(block, M_MAP_USED)
    limit = _slot(block, M_MAP_LIMIT)
    k0 = _slot(block, M_SECRET_0)
    k1 = _slot(block, M_SECRET_1)
    scratch = _slot(block, M_SCRATCH)
    bucket = _slot(block, M_BUCKET)
    buckets = _slot(block, M_BUCKETS)
    n = 0
    null_keys = 0
    waiting = 0
    code = OK
    b = first
    while b < last and code == OK:
        row = table + b * ROW_BYTES
        if _slot(row, SKIP) == 0:
            address = _slot(row, PAYLOAD_ADDRESS)
            end = address + _slot(row, PAYLOAD_SIZE)
            base_offset = _slot(row, BASE_OFFSET)
            last_delta = _slot(row, LAST_OFFSET) - base_offset
            previous = -1
            for _ in range(_slot(row, COUNT)):
                address, _ts, delta, key, key_length, _value, _value_length, _headers, _count = _parse_record(
                    address, end
                )
                if address == 0 or delta <= previous or delta > last_delta:
                    code = BAD_RECORD
                    break
                previous = delta
                offset = base_offset + delta
                if key_length < 0:
                    null_keys += 1
                    continue
                if offset < min_offset or offset >= max_offset:
                    continue
                low, high = _sip_hash(key, key_length, k0, k1)
                if buckets > 1 and multiply_high(high, buckets) != bucket:
                    continue
                prefetch(map_address + multiply_high(low, map_slots) * _MAP_SLOT_BYTES)
                held = scratch + waiting * _MAP_SLOT_BYTES
                store64_le(held, low)
                store64_le(held + 8, high)
                store64_le(held + 16, offset + 1)
                waiting += 1
                if waiting == _AHEAD:
                    used, code = _put_waiting(block, map_address, map_slots, scratch, waiting, used, limit)
                    waiting = 0
                    if code != OK:
                        break
                n += 1
        if code == OK:
            b += 1
    if code == OK and waiting > 0:
        used, code = _put_waiting(block, map_address, map_slots, scratch, waiting, used, limit)
    _set_slot(block, M_MAP_USED, used)
    _set_slot(block, M_BATCH, b)
    _set_slot(block, M_N, n)
    _set_slot(block, M_NULL_KEYS, null_keys)
    return code


@njit(nogil=True, error_model="numpy")
def _put_waiting(block, map_address, map_slots, scratch, count, used, limit):
    for i in range(count):
        held = scratch + i * _MAP_SLOT_BYTES
        low = load64_le(held)
        high = load64_le(held + 8)
        slot = _find_slot(map_address, map_slots, low, high)
        if load64_le(slot + 16) == 0:
            if used >= limit:
                _set_slot(block, M_STOP_OFFSET, load64_le(held + 16) - 1)
                return used, FULL
            store64_le(slot, low)
            store64_le(slot + 8, high)
            used += 1
        store64_le(slot + 16, load64_le(held + 16))
    return used, OK


@njit(nogil=True, error_model="numpy", forceinline=True)
def _marked_record(address, end, number, row, bits, first_offset, end_offset):
    """(next, 1 when the bit of the record's offset is set) for the batch's record at `address`; next 0 when malformed.

    Bits are those of [first_offset, end_offset). No more is looked at than that takes: whoever set the bits has looked
    at all of every record.
    """
    length, body = _read_varint(address, end, 5)
    if body == 0 or length < 1 or length > end - body:
        return 0, 0
    address = body + length
    base_offset = _slot(row, BASE_OFFSET)
    last_delta = _slot(row, LAST_OFFSET) - base_offset
    delta = number
    if _slot(row, COUNT) != last_delta + 1:  # else there is a record for every offset
        _ts_delta, body = _read_varint(body + 1, address, 10)
        if body == 0:
            return 0, 0
        delta, body = _read_varint(body, address, 5)
        if body == 0 or delta < 0 or delta > last_delta:
            return 0, 0
    at = base_offset + delta - first_offset
    if at < 0 or at >= end_offset - first_offset:
        return address, 0
    return address, (load8(bits + (at >> 3)) >> (at & 7)) & 1


@njit(nogil=True, error_model="numpy")
def _keep_marked(row, bits, min_offset, max_offset, tombstones, keep):
    """`map_keep` of a batch by the bits of its offsets: how many are kept, or -1."""
    address = _slot(row, PAYLOAD_ADDRESS)
    end = address + _slot(row, PAYLOAD_SIZE)
    n = 0
    for i in range(_slot(row, COUNT)):
        begin = address
        address, kept = _marked_record(begin, end, i, row, bits, min_offset, max_offset)
        if address == 0:
            return -1
        if kept != 0:
            after, _ts, _delta, _key, _key_length, _value, value_length, _headers, _n = _parse_record(begin, end)
            if after == 0:
                return -1
            if value_length < 0 and not tombstones:
                kept = 0
        n += kept
        store8(keep + i, kept)
    return n if address == end else -1


@njit(nogil=True, error_model="numpy")
def map_keep(table, first, last, block):
    """One byte a record of batches [first, last) that are not marked SKIP, at M_KEEP: 1 for the last record of its key.

    A key's last record that is a tombstone counts only with M_KEEP_TOMBSTONES. OK, or BAD_RECORD with M_BATCH. M_N is
    how many are kept.
    """
    min_offset = _slot(block, M_MIN_OFFSET)
    max_offset = _slot(block, M_MAX_OFFSET)
    map_address = _slot(block, M_MAP)
    map_slots = _slot(block, M_MAP_SLOTS)
    k0 = _slot(block, M_SECRET_0)
    k1 = _slot(block, M_SECRET_1)
    bucket = _slot(block, M_BUCKET)
    buckets = _slot(block, M_BUCKETS)
    keep = _slot(block, M_KEEP)
    tombstones = _slot(block, M_KEEP_TOMBSTONES) != 0
    bits = _slot(block, M_SURVIVORS)
    n = 0
    seen = 0
    for b in range(first, last):
        row = table + b * ROW_BYTES
        if _slot(row, SKIP) != 0:
            continue
        if bits != 0:
            found = _keep_marked(row, bits, min_offset, max_offset, tombstones, keep + seen)
            if found < 0:
                _set_slot(block, M_BATCH, b)
                return BAD_RECORD
            n += found
            seen += _slot(row, COUNT)
            continue
        address = _slot(row, PAYLOAD_ADDRESS)
        end = address + _slot(row, PAYLOAD_SIZE)
        base_offset = _slot(row, BASE_OFFSET)
        last_delta = _slot(row, LAST_OFFSET) - base_offset
        previous = -1
        for _ in range(_slot(row, COUNT)):
            address, _ts, delta, key, key_length, _value, value_length, _headers, _n = _parse_record(address, end)
            if address == 0 or delta <= previous or delta > last_delta:
                _set_slot(block, M_BATCH, b)
                return BAD_RECORD
            previous = delta
            offset = base_offset + delta
            kept = 0
            if key_length >= 0 and min_offset <= offset < max_offset and (value_length >= 0 or tombstones):
                low, high = _sip_hash(key, key_length, k0, k1)
                if buckets <= 1 or multiply_high(high, buckets) == bucket:
                    slot = _find_slot(map_address, map_slots, low, high)
                    if load64_le(slot + 16) == offset + 1:
                        kept = 1
                        n += 1
            store8(keep + seen, kept)
            seen += 1
    _set_slot(block, M_N, n)
    return OK


@njit(nogil=True, error_model="numpy")
def map_grow(source, source_slots, target, target_slots):
    """Move all entries into a larger, empty map; returns how many there are."""
    used = 0
    for i in range(source_slots):
        entry = source + i * _MAP_SLOT_BYTES
        if load64_le(entry + 16) != 0:
            low = load64_le(entry)
            high = load64_le(entry + 8)
            slot = _find_slot(target, target_slots, low, high)
            store64_le(slot, low)
            store64_le(slot + 8, high)
            store64_le(slot + 16, load64_le(entry + 16))
            used += 1
    return used


#: name -> number of int64 parameters; everything `native` compiles and loads
KERNELS = {
    "crc32c": 2,
    "crc32c_striped": 2,
    "crc32c_tables": 2,
    "encode": 1,
    "finish_batch": 2,
    "scan": 4,
    "decode": 4,
    "check": 4,
    "stamp_append_time": 4,
    "set_max_timestamp": 3,
    "place": 6,
    "murmur2": 2,
    "route": 1,
    "sip_hash": 5,
    "map_put": 4,
    "map_keep": 4,
    "map_grow": 4,
}

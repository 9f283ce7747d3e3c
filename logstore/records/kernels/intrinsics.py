"""What kernels are made of: unaligned memory in either byte order, atomic words, a few instructions, parameter blocks.

`jit` and `inline` are how every function of the kernels is compiled.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
i64 = types.int64
INT64_MAX = 0x7FFFFFFFFFFFFFFF

jit = njit(nogil=True, error_model="numpy")
inline = njit(nogil=True, error_model="numpy", forceinline=True)


def _loader(bits, swap, signed):
    kind = ir.IntType(bits)

    def load(typing_context, address):
        def codegen(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)
            if swap:
                value = builder.bswap(value)
            if bits == 64:
                return value
            return builder.sext(value, I64) if signed else builder.zext(value, I64)

        return i64(i64), codegen

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

        return types.void(i64, i64), codegen

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
    kind = ir.VectorType(I8, size)

    def move(typing_context, target, source):
        def codegen(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[1], kind.as_pointer()), align=1)
            builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(i64, i64), codegen

    return intrinsic(move)


copy4 = _copier(4)
copy8 = _copier(8)
copy16 = _copier(16)
copy32 = _copier(32)


@intrinsic
def copy_long(typing_context, target, source, size):
    def codegen(context, builder, signature, args):
        pointer = I8.as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], pointer), builder.inttoptr(args[1], pointer), args[2], 1)
        return context.get_dummy_value()

    return types.void(i64, i64, i64), codegen


@intrinsic
def fill(typing_context, target, byte, size):
    def codegen(context, builder, signature, args):
        pointer = I8.as_pointer()
        cgutils.memset(builder, builder.inttoptr(args[0], pointer), args[2], builder.trunc(args[1], I8))
        return context.get_dummy_value()

    return types.void(i64, i64, i64), codegen


@intrinsic
def load_acquire(typing_context, address):
    """An aligned word that other threads write; what was written before it by `store_release` is seen as well."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return i64(i64), codegen


@intrinsic
def store_release(typing_context, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(i64, i64), codegen


@intrinsic
def compare_and_swap(typing_context, address, expected, value):
    """The value before; it is replaced if it was the expected one."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire"), 0)

    return i64(i64, i64, i64), codegen


@intrinsic
def add_atomic(typing_context, address, value):
    """The value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return i64(i64, i64), codegen


@intrinsic
def add_wrapping(typing_context, left, right):
    """Sum modulo 2^64, as Java has it. Where + overflows the compiler may assume that it never does."""

    def codegen(context, builder, signature, args):
        return builder.add(args[0], args[1])

    return i64(i64, i64), codegen


@intrinsic
def sub_wrapping(typing_context, left, right):
    def codegen(context, builder, signature, args):
        return builder.sub(args[0], args[1])

    return i64(i64, i64), codegen


@intrinsic
def shift_right(typing_context, value, bits):
    """Logical, where >> on int64 is arithmetic."""

    def codegen(context, builder, signature, args):
        return builder.lshr(args[0], args[1])

    return i64(i64, i64), codegen


@intrinsic
def multiply_high(typing_context, a, b):
    """The upper 64 bits of the unsigned product."""

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), I64)

    return i64(i64, i64), codegen


@intrinsic
def leading_zeros(typing_context, value):
    def codegen(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return i64(i64), codegen


def _prefetcher(to_write):
    def prefetch(typing_context, address):
        """Ask for a cache line that is needed soon; any address may be named."""

        def codegen(context, builder, signature, args):
            pointer = I8.as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(function, [builder.inttoptr(args[0], pointer), I32(to_write), I32(3), I32(1)])
            return context.get_dummy_value()

        return types.void(i64), codegen

    return intrinsic(prefetch)


prefetch_read = _prefetcher(0)
prefetch_write = _prefetcher(1)


@inline
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
        copy32(target + size - 32, source + size - 32)  # the end; it may overlap what was written
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


@jit
def load_slot(block, index):
    return load64_le(block + index * 8)


@jit
def store_slot(block, index, value):
    store64_le(block + index * 8, value)


@jit
def is_valid(bitmap, position):
    if bitmap == 0:
        return True
    return (load8(bitmap + (position >> 3)) >> (position & 7)) & 1 == 1

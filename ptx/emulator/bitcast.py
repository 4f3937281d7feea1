"""Small compiled building blocks: bit casts, fused multiply-add, raw loads and stores at a host address.

Numba has no reinterpretation of a scalar that LLVM can vectorise, and no load from an integer address; both
are one LLVM instruction, written here as intrinsics.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import inlined

U0, U1, U3, U5, U7, U8 = (np.uint64(n) for n in (0, 1, 3, 5, 7, 8))
U16, U31, U32, U63 = (np.uint64(n) for n in (16, 31, 32, 63))
M16, M32, M64 = np.uint64(0xFFFF), np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFFFFFFFFFF)


def _cast_intrinsic(source, result, build):
    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return build(builder, args[0])

        return result(source), codegen

    return cast


_I32, _I64, _F32, _F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()

#: float32 whose bits are the low half of a uint64
as_f32 = _cast_intrinsic(types.uint64, types.float32, lambda b, v: b.bitcast(b.trunc(v, _I32), _F32))
#: float64 whose bits are a uint64
as_f64 = _cast_intrinsic(types.uint64, types.float64, lambda b, v: b.bitcast(v, _F64))
#: bits of a float32, zero-extended
from_f32 = _cast_intrinsic(types.float32, types.uint64, lambda b, v: b.zext(b.bitcast(v, _I32), _I64))
#: bits of a float64
from_f64 = _cast_intrinsic(types.float64, types.uint64, lambda b, v: b.bitcast(v, _I64))


@intrinsic
def fma32(typingctx, a, b, c):
    """Correctly rounded float32 a*b+c."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def fma64(typingctx, a, b, c):
    """Correctly rounded float64 a*b+c."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float64(types.float64, types.float64, types.float64), codegen


@intrinsic
def popcount(typingctx, value):
    """Number of ones of an int64 or uint64, as int64."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(value), codegen


@intrinsic
def exp2(typingctx, value):
    """2**value in float64 (libm)."""

    def codegen(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.exp2", [_F64]), args)

    return types.float64(types.float64), codegen


def _load(bits):
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            kind = ir.IntType(bits)
            # Alignment 1: the emulated address was checked, the host buffer behind it may be anywhere.
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return value if bits == 64 else builder.zext(value, _I64)

        return types.uint64(types.uint64), codegen

    return load


def _store(bits):
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            kind = ir.IntType(bits)
            value = args[1] if bits == 64 else builder.trunc(args[1], kind)
            builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return store


load8, load16, load32, load64 = (_load(bits) for bits in (8, 16, 32, 64))
store8, store16, store32, store64 = (_store(bits) for bits in (8, 16, 32, 64))


@inlined
def load_bytes(address, size):
    """Little-endian value of 1, 2, 4 or 8 bytes at a host address."""
    if size == 4:
        return load32(address)
    if size == 8:
        return load64(address)
    if size == 2:
        return load16(address)
    return load8(address)


@inlined
def store_bytes(address, size, value):
    if size == 4:
        store32(address, value)
    elif size == 8:
        store64(address, value)
    elif size == 2:
        store16(address, value)
    else:
        store8(address, value)


@inlined
def signed(value, shift):
    """Sign-extend the low 64-`shift` bits of a uint64 to int64."""
    return np.int64(value << shift) >> np.int64(shift)

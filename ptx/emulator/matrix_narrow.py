"""mma.sync with 8 columns and f16, bf16 or tf32 operands, in 32-bit vectors.

The arithmetic is that of tensor_core._mma_window with its 25-bit window; here a whole instruction fits 32-bit
integers: inside the window a product stays below 2^27 and the sum of 16 of them below 2^31.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .bitcast import from_f64
from .jit import inlined
from .tensor_core import _ABSENT, _FINITE, _LAYOUT, D_F16, TF32, WINDOW, _decode_c, _round

#: Columns of the product, and of the vectors.
_N = 8
_I32 = ir.IntType(32)
_VECTOR = ir.VectorType(_I32, _N)


def _splat(builder, value):
    """A vector of `value` (an int32, or a Python int)."""
    if isinstance(value, int):
        return ir.Constant(_VECTOR, [value] * _N)
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_VECTOR, [0] * _N))


@intrinsic
def row_products(typingctx, mantissas, raws, columns, column_raws, depth, spare, tops, units):
    """One row of A with all columns of B: raises tops [8] to the largest raw exponent of the products and
    leaves in units [8] their sum, each cut to the window below its top. Addresses of int32 data; columns and
    column_raws are [depth, 8].

    Written as vectors: LLVM unrolls a loop over 8 columns before it could make vectors of it.
    """

    def codegen(context, builder, signature, args):
        scalars = [builder.inttoptr(a, _I32.as_pointer()) for a in args[:2]]
        vectors = [builder.inttoptr(a, _VECTOR.as_pointer()) for a in (*args[2:4], *args[6:])]
        spare_bits = _splat(builder, builder.trunc(args[5], _I32))

        def load(k, at=None):
            pointer = vectors[k] if at is None else builder.gep(vectors[k], [at])
            return builder.load(pointer, align=4)

        def scalar(k, at):
            return _splat(builder, builder.load(builder.gep(scalars[k], [at]), align=4))

        def least(a, b, order):
            return builder.select(builder.icmp_signed(order, a, b), a, b)

        top = cgutils.alloca_once_value(builder, load(2))
        total = cgutils.alloca_once_value(builder, _splat(builder, 0))
        with cgutils.for_range(builder, args[4]) as loop:
            raw = builder.add(scalar(1, loop.index), load(1, loop.index))
            builder.store(least(builder.load(top), raw, ">"), top)
        highest = builder.load(top)
        with cgutils.for_range(builder, args[4]) as loop:
            raw = builder.add(scalar(1, loop.index), load(1, loop.index))
            down = least(builder.sub(highest, raw), _splat(builder, 31), "<")
            product = builder.mul(scalar(0, loop.index), load(0, loop.index))
            sign = builder.ashr(product, _splat(builder, 31))
            magnitude = builder.sub(builder.xor(product, sign), sign)
            magnitude = builder.lshr(builder.shl(magnitude, spare_bits), down)
            cut = builder.sub(builder.xor(magnitude, sign), sign)
            builder.store(builder.add(builder.load(total), cut), total)
        builder.store(highest, vectors[2], align=4)
        builder.store(builder.load(total), vectors[3], align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@inlined
def decode_words(words, fmt, mantissa, raw):
    """Signed mantissas and raw exponents of operand words; True when a NaN or infinity is among them."""
    fraction_bits, exponent_bits = _LAYOUT[fmt, 0], _LAYOUT[fmt, 1]
    drop = np.uint32(13 if fmt == TF32 else 0)
    fraction_mask, exponent_mask = np.uint32((1 << fraction_bits) - 1), np.uint32((1 << exponent_bits) - 1)
    one, bias = np.uint32(1 << fraction_bits), np.int32(_LAYOUT[fmt, 2])
    up, sign_at = np.uint32(fraction_bits), np.uint32(fraction_bits + exponent_bits)
    special = np.uint32(0)
    for i in range(words.size):
        word = words[i] >> drop
        exponent = (word >> up) & exponent_mask
        magnitude = np.int32((word & fraction_mask) | (one if exponent else np.uint32(0)))
        negative = -np.int32((word >> sign_at) & np.uint32(1))
        mantissa[i] = (magnitude ^ negative) - negative
        r = np.int32(max(exponent, np.uint32(1))) - bias
        raw[i] = r if magnitude else np.int32(_ABSENT)
        special |= np.uint32(1) if exponent == exponent_mask else np.uint32(0)
    return special != np.uint32(0)


@inlined
def round_units(units, exponent, d_format):
    """tensor_core._round for magnitudes below 2^53."""
    if units == 0:
        return np.uint32(0)
    bits = from_f64(np.float64(units))
    top = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF)) - 1023 + exponent
    if d_format == D_F16 or top > 127 or top < -126:
        return _round(units, exponent, d_format)
    return np.uint32(((bits >> np.uint64(63)) << np.uint64(31)) | (np.uint64(top + 127) << np.uint64(23))
                     | ((bits >> np.uint64(29)) & np.uint64(0x7FFFFF)))


@inlined(allocates=True)
def multiply_narrow(a, b, c, m, k, fmt, d_format):
    """c := A B^T + C for words a [m * k], b [8 * k], c [m * 8]. False, with c unchanged: a NaN or an infinity
    is among the operands."""
    a_mantissa, a_raw = np.empty(m * k, np.int32), np.empty(m * k, np.int32)
    b_mantissa, b_raw = np.empty(_N * k, np.int32), np.empty(_N * k, np.int32)
    if decode_words(a, fmt, a_mantissa, a_raw) or decode_words(b, fmt, b_mantissa, b_raw):
        return False
    # The columns run innermost.
    bt_mantissa, bt_raw = np.empty((k, _N), np.int32), np.empty((k, _N), np.int32)
    for i in range(k):
        for column in range(_N):
            bt_mantissa[i, column] = b_mantissa[column * k + i]
            bt_raw[i, column] = b_raw[column * k + i]
    a2_mantissa, a2_raw, c2 = a_mantissa.reshape(m, k), a_raw.reshape(m, k), c.reshape(m, _N)
    c_mantissa, c_raw = np.empty((m, _N), np.int64), np.empty((m, _N), np.int32)
    c_fraction = 0
    for row in range(m):
        for column in range(_N):
            mantissa, raw, c_fraction, kind = _decode_c(c2[row, column], d_format)
            if kind != _FINITE:
                return False
            c_mantissa[row, column], c_raw[row, column] = mantissa, raw
    spare = WINDOW - 2 * _LAYOUT[fmt, 0]
    top, units = np.empty(_N, np.int32), np.empty(_N, np.int32)
    for row in range(m):
        for column in range(_N):
            top[column] = c_raw[row, column]
        row_products(a2_mantissa[row].ctypes.data, a2_raw[row].ctypes.data, bt_mantissa.ctypes.data,
                     bt_raw.ctypes.data, k, spare, top.ctypes.data, units.ctypes.data)
        for column in range(_N):
            total = np.int64(units[column])
            left = np.int64(c_raw[row, column] - top[column]) + WINDOW - c_fraction
            own = c_mantissa[row, column]
            if own:
                magnitude = abs(own)
                magnitude = magnitude << left if left >= 0 else magnitude >> min(-left, 63)
                total += -magnitude if own < 0 else magnitude
            c2[row, column] = round_units(total, np.int64(top[column]) - WINDOW, d_format)
    return True

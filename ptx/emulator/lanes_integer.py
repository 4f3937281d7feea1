"""Integer and bit operations on a warp.

Registers hold zero-extended bits. `w` is the mask of the result's width, `s` the shift (64 - width) that
brings the operand's sign to bit 63, `m` the 32-bit mask of executing lanes. The first function has one loop
per operation so that LLVM turns each into vector code; the second evaluates rarer operations lane by lane
through one scalar switch.
"""

from __future__ import annotations

import numpy as np

from .bitcast import M32, M64, U0, U1, U3, U7, U8, U16, U31, U32, U63, popcount, signed
from .jit import inlined, unit
from .opcodes import (
    ABS, ADD, ADD_SAT, ADDX2, AND, BFE, BFI, BFIND, BMSK, BREV, CLZ, CNOT, CVT_INT, CVT_PACK, DIV, DP2A, DP4A,
    FNS, MAD24, MAD_HI, MAD_HI_SAT, MAD_LO, MAD_WIDE_S, MAD_WIDE_U, MAX_S, MAX_U, MIN_S, MIN_U, MINX2, MOV,
    MUL24, MUL_HI, MUL_LO, MUL_WIDE_S, MUL_WIDE_U, NEG, NOT, OR, POPC, PRMT, PRMT_MODE, REM, SAD, SELP, SEXT,
    SHF, SHL, SHR_S, SHR_U, SLCT_F, SLCT_S, SUB, SUB_SAT, SZEXT, VIDEO, XOR,
)

U2, U4, U6, U15, U24, U64 = (np.uint64(n) for n in (2, 4, 6, 15, 24, 64))


@unit("void", "U2 i i i i i u u u")
def integer_fast(F, op, d, a, b, c, w, s, m):
    """d = op(a, b, c) in the lanes of `m`; a, b, c, d are rows of F."""
    if op == ADD:
        for i in range(32):
            F[d, i] = (F[a, i] + F[b, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MOV:
        for i in range(32):
            F[d, i] = F[a, i] & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MAD_LO:
        for i in range(32):
            F[d, i] = (F[a, i] * F[b, i] + F[c, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SUB:
        for i in range(32):
            F[d, i] = (F[a, i] - F[b, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MUL_LO:
        for i in range(32):
            F[d, i] = (F[a, i] * F[b, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == AND:
        for i in range(32):
            F[d, i] = F[a, i] & F[b, i] & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == OR:
        for i in range(32):
            F[d, i] = (F[a, i] | F[b, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == XOR:
        for i in range(32):
            F[d, i] = (F[a, i] ^ F[b, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == NOT:
        for i in range(32):
            F[d, i] = ~F[a, i] & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SHL:
        # Amounts of the width and beyond give 0: the amount is an unsigned 32-bit value, clamped (PTX "shl").
        for i in range(32):
            n = F[b, i] & M32
            r = (F[a, i] << (n & U63)) & w if n < U64 - s else U0
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SHR_U:
        for i in range(32):
            n = F[b, i] & M32
            r = F[a, i] >> (n & U63) if n < U64 - s else U0
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SHR_S:
        for i in range(32):
            n = F[b, i] & M32
            n = n if n < U63 - s else U63 - s
            r = np.uint64(signed(F[a, i], s) >> np.int64(n)) & w
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SELP:
        p = F[c, 0]
        for i in range(32):
            r = F[a, i] if (p >> np.uint64(i)) & U1 else F[b, i]
            F[d, i] = r & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MUL_WIDE_S:
        for i in range(32):
            r = np.uint64(signed(F[a, i], s) * signed(F[b, i], s)) & w
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MUL_WIDE_U:
        for i in range(32):
            F[d, i] = ((F[a, i] << s >> s) * (F[b, i] << s >> s)) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MAD_WIDE_S:
        for i in range(32):
            r = (np.uint64(signed(F[a, i], s) * signed(F[b, i], s)) + F[c, i]) & w
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MAD_WIDE_U:
        for i in range(32):
            r = ((F[a, i] << s >> s) * (F[b, i] << s >> s) + F[c, i]) & w
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MIN_S:
        for i in range(32):
            r = F[a, i] if signed(F[a, i], s) < signed(F[b, i], s) else F[b, i]
            F[d, i] = r & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MAX_S:
        for i in range(32):
            r = F[a, i] if signed(F[a, i], s) > signed(F[b, i], s) else F[b, i]
            F[d, i] = r & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MIN_U:
        for i in range(32):
            F[d, i] = min(F[a, i] & w, F[b, i] & w) if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == MAX_U:
        for i in range(32):
            F[d, i] = max(F[a, i] & w, F[b, i] & w) if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == NEG:
        for i in range(32):
            F[d, i] = (U0 - F[a, i]) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == ABS:
        for i in range(32):
            v = signed(F[a, i], s)
            r = np.uint64(v if v >= 0 else -v) & w
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SEXT:
        for i in range(32):
            F[d, i] = np.uint64(signed(F[a, i], s)) & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == PRMT:
        for i in range(32):
            both, n = F[b, i] << U32 | F[a, i], F[c, i]
            r = U0
            for k in range(4):
                j = np.uint64(k)
                byte = (both >> (((n >> (j * U4)) & U7) * U8)) & np.uint64(0xFF)
                # Bit 3 of a selector replicates the byte's sign.
                sign = (U0 - (byte >> U7)) & np.uint64(0xFF)
                r |= (sign if (n >> (j * U4)) & U8 else byte) << (j * U8)
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SLCT_S:
        for i in range(32):
            r = F[a, i] if np.int64(F[c, i] << U32) >= 0 else F[b, i]
            F[d, i] = r & w if (m >> np.uint64(i)) & U1 else F[d, i]
    elif op == SLCT_F:
        # slct.f32: a when c >= 0; -0.0 counts as zero, NaN selects b. `s` nonzero flushes subnormal c (.ftz).
        for i in range(32):
            z = F[c, i] & np.uint64(0x7FFFFFFF)
            z = U0 if s != U0 and z < np.uint64(0x00800000) else z
            negative = (F[c, i] >> U31) & U1 != U0 and z != U0
            r = F[b, i] if negative or z > np.uint64(0x7F800000) else F[a, i]
            F[d, i] = r & w if (m >> np.uint64(i)) & U1 else F[d, i]


@unit("void", "U2 i i i i u u")
def lop3(F, d, a, b, c, table, m):
    """Bitwise three-input function whose truth table is `table` (bit 4a+2b+c)."""
    f0 = M32 if table & U1 else U0
    f1 = M32 if table & U2 else U0
    f2 = M32 if table & U4 else U0
    f3 = M32 if table & U8 else U0
    f4 = M32 if table & np.uint64(16) else U0
    f5 = M32 if table & np.uint64(32) else U0
    f6 = M32 if table & np.uint64(64) else U0
    f7 = M32 if table & np.uint64(128) else U0
    for i in range(32):
        x, y, z = F[a, i], F[b, i], F[c, i]
        low = (~y & ((~z & f0) | (z & f1))) | (y & ((~z & f2) | (z & f3)))
        high = (~y & ((~z & f4) | (z & f5))) | (y & ((~z & f6) | (z & f7)))
        r = ((~x & low) | (x & high)) & M32
        F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]


@inlined
def high_product(x, y, is_signed):
    """Upper 64 bits of the 128-bit product of two 64-bit values."""
    x0, x1, y0, y1 = x & M32, x >> U32, y & M32, y >> U32
    low = x0 * y0
    mid = x1 * y0 + (low >> U32)
    mid2 = x0 * y1 + (mid & M32)
    high = x1 * y1 + (mid >> U32) + (mid2 >> U32)
    if is_signed:
        if x >> U63:
            high -= y
        if y >> U63:
            high -= x
    return high


@inlined
def multiply_high(x, y, s, is_signed):
    if s == U0:
        return high_product(x, y, is_signed)
    if is_signed:
        return np.uint64((signed(x, s) * signed(y, s)) >> np.int64(U64 - s))
    return (x * y) >> (U64 - s)


@inlined
def clamp_signed(v, s):
    """Saturate an int64 to the width 64 - s (s > 0)."""
    top = np.int64(M64 >> (s + U1))
    if v > top:
        return np.uint64(top)
    if v < -top - 1:
        return np.uint64(-top - 1)
    return np.uint64(v)


@inlined
def highest_bit(x):
    """Position of the most significant one, -1 for zero."""
    n = np.int64(-1)
    while x != U0:
        x >>= U1
        n += 1
    return n


@inlined
def byte_of(x, y, index):
    return ((x if index < U4 else y) >> ((index & U3) * U8)) & np.uint64(0xFF)


@inlined
def permute(x, y, selector, mode):
    """prmt with a mode: 1..6 are f4e b4e rc8 ecl ecr rc16 (PTX "prmt" tables)."""
    r = U0
    n = selector & U3
    for k in range(4):
        j = np.uint64(k)
        if mode == 1:
            index = n + j
        elif mode == 2:
            index = (n - j) & U7
        elif mode == 3:
            index = n
        elif mode == 4:
            index = max(n, j)
        elif mode == 5:
            index = min(n, j)
        else:
            index = (n & U1) * U2 + (j & U1)
        r |= byte_of(x, y, index) << (j * U8)
    return r


@inlined
def bit_field_extract(a, b, c, s, is_signed):
    """bfe: position and length are 8-bit fields; the sign replicates the field's (or the register's) top
    bit."""
    width = np.int64(U64 - s)
    position = np.int64(b & np.uint64(0xFF))
    length = np.int64(c & np.uint64(0xFF))
    if length == 0:
        return U0
    top = min(position + length - 1, width - 1)
    sign = (a >> np.uint64(top)) & U1 if is_signed else U0
    r = U0
    if position < width:
        r = a >> np.uint64(position)
    have = width - position if position < width else 0
    keep = min(length, have)
    if keep < 64:
        r &= (U1 << np.uint64(keep)) - U1
        if sign:
            r |= ~((U1 << np.uint64(keep)) - U1)
    return r


@inlined
def dot4(a, b, c, a_signed, b_signed, count, high):
    """dp4a (count 4) and dp2a (count 2: 16-bit fields of a, the low or high byte pair of b)."""
    total = np.int64(c)
    for k in range(count):
        if count == 4:
            x = (a >> np.uint64(8 * k)) & np.uint64(0xFF)
            xs = signed(x, np.uint64(56)) if a_signed else np.int64(x)
            y = (b >> np.uint64(8 * k)) & np.uint64(0xFF)
        else:
            x = (a >> np.uint64(16 * k)) & np.uint64(0xFFFF)
            xs = signed(x, np.uint64(48)) if a_signed else np.int64(x)
            y = (b >> np.uint64(8 * k + (16 if high else 0))) & np.uint64(0xFF)
        ys = signed(y, np.uint64(56)) if b_signed else np.int64(y)
        total += xs * ys
    return np.uint64(total)


@inlined
def find_nth_set(mask, base, offset):
    """fns: position of the offset-th set bit at or above (offset > 0) or at or below (offset < 0) bit
    `base`."""
    if offset == 0:
        return base if base < U32 and (mask >> (base & U31)) & U1 else M32
    step = 1 if offset > 0 else -1
    left = offset if offset > 0 else -offset
    position = np.int64(base)
    while 0 <= position < 32:
        if (mask >> np.uint64(position)) & U1:
            left -= 1
            if left == 0:
                return np.uint64(position)
        position += step
    return M32


@inlined
def convert_integer(a, x, y):
    """cvt between integers: x = source shift | signed source << 8 | destination width << 16, y bit 0 =
    saturate, bit 1 = signed destination."""
    s = x & np.uint64(0xFF)
    v = np.uint64(signed(a, s)) if (x >> U8) & U1 else (a << s) >> s
    if y & U1:
        width = (x >> U16) & np.uint64(0xFF)
        source_signed = (x >> U8) & U1 != U0
        if y & U2:
            top = M64 >> (U64 - width + U1)
            if source_signed:
                if np.int64(v) > np.int64(top):
                    v = top
                elif np.int64(v) < -np.int64(top) - 1:
                    v = ~top
            elif v > top:
                v = top
        else:
            top = M64 >> (U64 - width)
            if source_signed and np.int64(v) < 0:
                v = U0
            elif v > top:
                v = top
    return v


@inlined
def pack_pair(a, b, c, x, is_signed_result):
    """cvt.pack.sat: a and b are s32, saturated to `x` bits and packed below c's low bits (a above b)."""
    width = np.int64(x)
    if is_signed_result:
        high = (np.int64(1) << (width - 1)) - 1
        low = -high - 1
    else:
        high = (np.int64(1) << width) - 1
        low = np.int64(0)
    va = min(max(signed(a, U32), low), high)
    vb = min(max(signed(b, U32), low), high)
    keep = (U1 << np.uint64(width)) - U1
    pair = ((np.uint64(va) & keep) << np.uint64(width)) | (np.uint64(vb) & keep)
    return (c << np.uint64(2 * width)) | pair


@inlined
def packed_halfwords(op, a, b, is_signed):
    r = U0
    for k in range(2):
        shift = np.uint64(16 * k)
        x = (a >> shift) & np.uint64(0xFFFF)
        y = (b >> shift) & np.uint64(0xFFFF)
        if op == ADDX2:
            v = x + y
        else:
            less = signed(x, np.uint64(48)) < signed(y, np.uint64(48)) if is_signed else x < y
            v = x if less == (op == MINX2) else y
        r |= (v & np.uint64(0xFFFF)) << shift
    return r


@inlined
def integer_scalar(op, a, b, c, x, y, s):
    """One lane of a BITS operation. `s` is 64 - width; y is 1 for signed types, x is per operation."""
    is_signed = y & U1 != U0
    if op == MUL_HI:
        return multiply_high(a, b, s, is_signed)
    if op == MAD_HI:
        return multiply_high(a, b, s, is_signed) + c
    if op == MAD_HI_SAT:
        return clamp_signed(signed(multiply_high(a, b, s, True), s) + signed(c, s), s)
    if op == DIV:
        # Division by zero is unspecified in PTX; this returns all ones, as NVIDIA's own expansion does.
        if b == U0:
            return M64
        if is_signed:
            n, q = signed(a, s), signed(b, s)
            if q == -1:
                return U0 - np.uint64(n)
            # Unsigned magnitudes: the most negative number has no positive counterpart.
            magnitude = (np.uint64(n) if n >= 0 else U0 - np.uint64(n)) // (
                np.uint64(q) if q >= 0 else U0 - np.uint64(q)
            )
            return magnitude if (n < 0) == (q < 0) else U0 - magnitude
        return a // b
    if op == REM:
        if b == U0:
            return a
        if is_signed:
            n, q = signed(a, s), signed(b, s)
            if q == -1:
                return U0
            # Unsigned magnitudes: the most negative number has no positive counterpart.
            magnitude = (np.uint64(n) if n >= 0 else U0 - np.uint64(n)) % (
                np.uint64(q) if q >= 0 else U0 - np.uint64(q)
            )
            return magnitude if n >= 0 else U0 - magnitude
        return a % b
    if op == SAD:
        if is_signed:
            difference = np.uint64(abs(signed(a, s) - signed(b, s)))
        else:
            difference = a - b if a > b else b - a
        return c + difference
    if op == POPC:
        return np.uint64(popcount(a))
    if op == CLZ:
        return np.uint64(np.int64(U63 - s) - highest_bit(a))
    if op == BFIND:
        v = ~a & (M64 >> s) if is_signed and signed(a, s) < 0 else a
        n = highest_bit(v)
        if n >= 0 and x:
            return np.uint64(np.int64(U63 - s) - n)
        return np.uint64(n)
    if op == BREV:
        r = U0
        for k in range(64):
            r |= ((a >> np.uint64(k)) & U1) << np.uint64(63 - k)
        return r >> s
    if op == BFE:
        return bit_field_extract(a, b, c, s, is_signed)
    if op == SHF:
        # x: 0 left, 1 right; y: 0 clamp, 1 wrap. The funnel is b:a.
        n = c & M32
        n = n & U31 if y & U1 else min(n, U32)
        both = (b << U32) | a
        return (both >> n) & M32 if x else ((both << n) >> U32) & M32
    if op == PRMT_MODE:
        return permute(a, b, c, np.int64(x))
    if op == CNOT:
        return U1 if a == U0 else U0
    if op == SZEXT:
        # x: 0 clamp, 1 wrap
        n = b & M32
        n = n & U31 if x else min(n, U32)
        if n == U0:
            return U0
        if n >= U32:
            return a
        return np.uint64(signed(a, U64 - n)) if is_signed else a & ((U1 << n) - U1)
    if op == BMSK:
        start, width = a & M32, b & M32
        if x:
            start, width = start & U31, width & U31
        elif start > U31:
            return U0
        width = min(width, U32)
        return ((U1 << width) - U1) << start
    if op == DP4A:
        return dot4(a, b, np.uint64(signed(c, U32)), x & U1 != U0, x & U2 != U0, 4, False)
    if op == DP2A:
        return dot4(a, b, np.uint64(signed(c, U32)), x & U1 != U0, x & U2 != U0, 2, x & U4 != U0)
    if op == MUL24 or op == MAD24:
        p, q = a & np.uint64(0xFFFFFF), b & np.uint64(0xFFFFFF)
        if is_signed:
            product = np.uint64(signed(p, np.uint64(40)) * signed(q, np.uint64(40)))
        else:
            product = p * q
        product = product >> U16 if x & U1 else product
        if op == MUL24:
            return product
        if x & U2:
            return clamp_signed(signed(product, U32) + signed(c, U32), U32)
        return product + c
    if op == FNS:
        return find_nth_set(a, b & M32, signed(c, U32))
    if op == ADD_SAT:
        return clamp_signed(signed(a, s) + signed(b, s), s)
    if op == SUB_SAT:
        return clamp_signed(signed(a, s) - signed(b, s), s)
    if op == CVT_INT:
        return convert_integer(a, x, y)
    if op == CVT_PACK:
        return pack_pair(a, b, c, x, is_signed)
    return packed_halfwords(op, a, b, is_signed)


@inlined
def bit_field_insert(a, b, position, length, s):
    """bfi: `length` low bits of a replace those of b from `position` on."""
    width = U64 - s
    position, length = position & np.uint64(0xFF), length & np.uint64(0xFF)
    if length == U0 or position >= width:
        return b
    keep = M64 if length >= U64 else (U1 << length) - U1
    keep = (keep << position) & (M64 >> s)
    return (b & ~keep) | ((a << position) & keep)


@inlined
def video(a, b, c, x, y):
    """vabsdiff4/vadd4-style SIMD on four bytes or two halves without saturation of lanes beyond `.sat`.

    x: 0 add, 1 sub, 2 avrg, 3 abs difference, 4 min, 5 max | lanes (2 or 4) << 4 | signed a << 8 | signed b
    << 9 | signed result << 10 | saturate << 11 | accumulate (.add) << 12; y: byte mask of result lanes.
    """
    kind = x & U15
    count = (x >> U4) & U15
    bits = np.uint64(8) if count == U4 else U16
    shift = U64 - bits
    r, total = U0, c
    for k in range(np.int64(count)):
        at = np.uint64(k) * bits
        p, q = (a >> at) & (M64 >> shift), (b >> at) & (M64 >> shift)
        u = signed(p, shift) if (x >> U8) & U1 else np.int64(p)
        v = signed(q, shift) if (x >> np.uint64(9)) & U1 else np.int64(q)
        if kind == U0:
            t = u + v
        elif kind == U1:
            t = u - v
        elif kind == U2:
            t = (u + v + (1 if u + v >= 0 else 0)) >> 1
        elif kind == U3:
            t = abs(u - v)
        elif kind == U4:
            t = min(u, v)
        else:
            t = max(u, v)
        signed_result = (x >> np.uint64(10)) & U1 != U0
        if (x >> np.uint64(11)) & U1:
            high = (np.int64(1) << np.int64(bits - (U1 if signed_result else U0))) - 1
            low = -high - 1 if signed_result else np.int64(0)
            t = min(max(t, low), high)
        if (y >> np.uint64(k)) & U1:
            if (x >> np.uint64(12)) & U1:
                total += np.uint64(t)
            r |= (np.uint64(t) & (M64 >> shift)) << at
        else:
            r |= c & ((M64 >> shift) << at)
    return total & M32 if (x >> np.uint64(12)) & U1 else r


@unit("void", "U2 i i i i i i u u u u u")
def integer_lane(F, op, d, a, b, c, e, w, s, x, y, m):
    """BITS operations, one lane after the other."""
    for i in range(32):
        if (m >> np.uint64(i)) & U1:
            if op == BFI:
                r = bit_field_insert(F[a, i], F[b, i], F[c, i], F[e, i], s)
            elif op == VIDEO:
                r = video(F[a, i], F[b, i], F[c, i], x, y)
            else:
                r = integer_scalar(op, F[a, i], F[b, i], F[c, i], x, y, s)
            F[d, i] = r & w

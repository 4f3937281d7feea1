"""f32 and f64 arithmetic. Rounded operations are correctly rounded in all four modes, f32 results
NaN-canonical.

The approximate instructions (ex2, lg2, sin, cos, tanh, rcp, sqrt, rsqrt, div with `.approx` or `.full`)
return the exact value rounded to nearest: hardware is allowed, and differs by, a few units in the last place
(docs/emulator.md).
"""

from __future__ import annotations

import math

import numpy as np

from .bitcast import U0, U1, U31, U63, as_f32, as_f64, exp2, fma32, fma64, from_f32, from_f64
from .jit import inlined, unit
from .numerics import CANONICAL_F32, RM, RN, RP, RZ, flush_f32, is_nan_f32, is_nan_f64, round_f32, sum_to_odd
from .opcodes import (
    COS, EX2, FABS, FADD, FDIV, FDIV_APPROX, FFMA, FMAX, FMAX3, FMIN, FMIN3, FMUL, FNEG, FRCP, FRCP_APPROX,
    FRSQRT, FSQRT, FSQRT_APPROX, LG2, RCP64H, RSQRT64H, SIN, TANH,
)

#: bits of y
(F_FTZ, F_SAT, F_DOUBLE, F_NAN, F_XORSIGN, F_ABS, F_SUBTRACT, F_RELU) = (1, 2, 4, 8, 16, 32, 64, 128)
_SIGN32, _SIGN64 = np.uint64(1 << 31), np.uint64(1 << 63)
_NAN64 = np.uint64(0x7FF8000000000000)
_QUIET64 = np.uint64(1 << 51)
_TWO126 = np.float32(2.0**126)
_TWO600, _TINY = 2.0**600, 2.0**-960


@inlined
def saturate_f32(bits):
    """[0, 1]; NaN becomes +0."""
    if is_nan_f32(bits) or bits & _SIGN32:
        return U0
    return min(bits, np.uint64(0x3F800000))


@inlined
def finish_f32(bits, y):
    if y & F_FTZ:
        bits = flush_f32(bits)
    if y & F_SAT:
        bits = saturate_f32(bits)
    return bits


@inlined
def bits_of(value):
    return CANONICAL_F32 if value != value else from_f32(value)


@inlined
def quotient_to_odd(x, y):
    q = x / y
    rest = fma64(-q, y, x)
    # An infinite divisor makes rest a NaN, but the quotient is exact.
    if np.isfinite(q) and np.isfinite(y) and rest != 0.0:
        b = from_f64(q)
        if b & U1 == U0:
            above = (rest > 0.0) == (y > 0.0)
            return as_f64(b + U1) if above == (q > 0.0) else as_f64(b - U1)
    return q


@inlined
def root_to_odd(x):
    q = np.sqrt(x)
    rest = fma64(-q, q, x)
    if np.isfinite(q) and rest != 0.0:
        b = from_f64(q)
        if b & U1 == U0:
            return as_f64(b + U1) if rest > 0.0 else as_f64(b - U1)
    return q


@inlined
def directed_f32(op, u, v, t, mode):
    """add, mul, fma, div, sqrt, rcp of f32 bits in a directed rounding mode, through float64 rounded to
    odd."""
    x, y, z = np.float64(as_f32(u)), np.float64(as_f32(v)), np.float64(as_f32(t))
    if op == FADD:
        if x == 0.0 and y == 0.0 and u != v:
            return _SIGN32 if mode == RM else U0
        r = sum_to_odd(x, y)
        if r == 0.0 and x != 0.0:
            return _SIGN32 if mode == RM else U0
        return round_f32(r, mode)
    if op == FMUL:
        return round_f32(x * y, mode)
    if op == FFMA:
        p = x * y
        r = sum_to_odd(p, z)
        if r == 0.0 and (p != 0.0 or from_f64(p) >> U63 != t >> U31):
            return _SIGN32 if mode == RM else U0
        return round_f32(r, mode)
    if op == FDIV:
        return round_f32(quotient_to_odd(x, y), mode)
    if op == FRCP:
        return round_f32(quotient_to_odd(1.0, x), mode)
    return round_f32(root_to_odd(x), mode)


@inlined
def step(bits, up):
    """Neighbouring float64 toward +inf (`up`) or -inf."""
    negative = bits >> U63 != U0
    if bits & ~_SIGN64 == U0:
        return U1 if up else _SIGN64 | U1
    return bits + U1 if up != negative else bits - U1


@inlined
def nan_f64(op, x, y, z):
    """The NaN of an f64 operation: the first NaN operand made quiet, or the indefinite NaN (measured on an
    H200)."""
    if x != x:
        return from_f64(x) | _QUIET64
    if op != FSQRT and op != FRCP:
        if y != y:
            return from_f64(y) | _QUIET64
        if op == FFMA and z != z:
            return from_f64(z) | _QUIET64
    return _NAN64 | _SIGN64


@inlined
def tiny_product(x, y, mode):
    """Bits of x * y with directed rounding where the product is below 2^-960, so that its error has no
    float64.

    Both factors are scaled by 2^600 (exact: neither can exceed 2^115 here); rounding happens on the integer
    significand.
    """
    r = (x * _TWO600) * (y * _TWO600)
    error = fma64(x * _TWO600, y * _TWO600, -r)
    sign = from_f64(r) & _SIGN64
    bits = from_f64(r) & ~_SIGN64
    exponent = np.int64(bits >> np.uint64(52)) - 1200
    significand = (bits & np.uint64((1 << 52) - 1)) | np.uint64(1 << 52)
    if sign:
        error = -error
    if exponent >= 1:
        code = (bits & np.uint64((1 << 52) - 1)) | (np.uint64(exponent) << np.uint64(52))
        rest = U0
    else:
        shift = np.uint64(min(1 - exponent, 60))
        code = significand >> shift
        rest = significand & ((U1 << shift) - U1)
    if rest == U0 and error < 0.0:
        # The nearest product lies above the true one: truncation is one code lower.
        code -= U1
    inexact = rest != U0 or error != 0.0
    if inexact and (mode == RP and sign == U0 or mode == RM and sign != U0):
        code += U1
    return sign | code


@inlined
def directed_f64(op, x, y, z, mode):
    """float64 with directed rounding: nearest result, then the exact error decides about one step.

    The error terms are exact unless they underflow (results below 2^-969); there products are rounded by
    `tiny_product` and the other operations return the nearest result.
    """
    if op == FADD:
        r = x + y
        t = r - x
        error = (x - (r - t)) + (y - t)
    elif op == FMUL:
        r = x * y
        if mode != RN and abs(r) < _TINY and x != 0.0 and y != 0.0:
            return tiny_product(x, y, mode)
        error = fma64(x, y, -r)
    elif op == FFMA:
        r = fma64(x, y, z)
        p = x * y
        q = fma64(x, y, -p)
        # Boldo and Muller's exact error of a fused multiply-add.
        a1 = z + q
        t = a1 - z
        a2 = (z - (a1 - t)) + (q - t)
        b1 = p + a1
        t = b1 - p
        b2 = (p - (b1 - t)) + (a1 - t)
        error = ((b1 - r) + b2) + a2
    elif op == FDIV:
        r = x / y
        error = fma64(-r, y, x)
        error = error if y > 0.0 else -error
    elif op == FRCP:
        r = 1.0 / x
        error = fma64(-r, x, 1.0)
        error = error if x > 0.0 else -error
    else:
        r = np.sqrt(x)
        error = fma64(-r, r, x)
    bits = from_f64(r)
    if r != r:
        return nan_f64(op, x, y, z)
    if mode == RN:
        return bits
    if np.isinf(r):
        finite = np.isfinite(x) and np.isfinite(y) and (op != FFMA or np.isfinite(z)) and not (
            (op == FDIV and y == 0.0) or (op == FRCP and x == 0.0))
        if finite and (mode == RZ or (mode == RM and r > 0.0) or (mode == RP and r < 0.0)):
            return (bits & _SIGN64) | np.uint64(0x7FEFFFFFFFFFFFFF)
        return bits
    if error == 0.0 or error != error:
        if r == 0.0 and mode == RM and op == FADD and (x != 0.0 or from_f64(x) != from_f64(y)):
            return _SIGN64
        return bits
    if mode == RP:
        return step(bits, True) if error > 0.0 else bits
    if mode == RM:
        return step(bits, False) if error < 0.0 else bits
    if (r > 0.0 and error < 0.0) or (r < 0.0 and error > 0.0):
        return bits - U1
    return bits


@inlined
def pick_f32(u, v, y, want_min):
    """min/max on f32 bits: -0 < +0, NaN loses unless `.NaN`, `.xorsign.abs` compares magnitudes."""
    sign = (u ^ v) & _SIGN32
    if y & F_ABS:
        u, v = u & ~_SIGN32, v & ~_SIGN32
    if is_nan_f32(u) or is_nan_f32(v):
        if y & F_NAN or (is_nan_f32(u) and is_nan_f32(v)):
            return CANONICAL_F32
        r = v if is_nan_f32(u) else u
    else:
        # Order-preserving integers: negative numbers flip, so that -0 sorts below +0.
        p = ~u & np.uint64(0xFFFFFFFF) if u & _SIGN32 else u | _SIGN32
        q = ~v & np.uint64(0xFFFFFFFF) if v & _SIGN32 else v | _SIGN32
        r = u if (p < q) == want_min else v
    return (r & ~_SIGN32) | sign if y & F_XORSIGN else r


@inlined
def pick_f64(u, v, want_min):
    if is_nan_f64(u):
        return v if not is_nan_f64(v) else _NAN64
    if is_nan_f64(v):
        return u
    p = ~u if u & _SIGN64 else u | _SIGN64
    q = ~v if v & _SIGN64 else v | _SIGN64
    return u if (p < q) == want_min else v


@inlined
def approximate_f32(op, u, v, y):
    """Approximate functions on f32 bits: exact value, rounded to nearest."""
    if y & F_FTZ:
        u, v = flush_f32(u), flush_f32(v)
    x = np.float64(as_f32(u))
    if op == EX2:
        r = exp2(x)
    elif op == LG2:
        if x == 0.0:
            r = -np.inf
        elif x < 0.0 or x != x:
            r = np.nan
        else:
            r = math.log2(x) if np.isfinite(x) else np.inf
    elif op == SIN:
        r = math.sin(x) if np.isfinite(x) else np.nan
    elif op == COS:
        r = math.cos(x) if np.isfinite(x) else np.nan
    elif op == TANH:
        r = math.tanh(x)
    elif op == FRCP_APPROX:
        r = 1.0 / x
    elif op == FSQRT_APPROX:
        r = np.sqrt(x)
    elif op == FRSQRT:
        r = 1.0 / np.sqrt(x)
    else:
        d = as_f32(v)
        # div.approx: divisors beyond 2^126 give 0 (NaN for an infinite dividend); `.full` has no such gap.
        if not y & F_NAN and abs(d) > _TWO126 and np.isfinite(d):
            r = np.nan if np.isinf(x) else (0.0 if (x < 0.0) == (d < 0.0) else -0.0)
        else:
            r = x / np.float64(d)
    return finish_f32(bits_of(np.float32(r)), y)


@inlined
def float_double(F, op, d, a, b, c, x, y, m):
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        u, v, t = F[a, i], F[b, i], F[c, i]
        if op == FNEG:
            r = u if is_nan_f64(u) else u ^ _SIGN64
        elif op == FABS:
            r = u & ~_SIGN64
        elif op == FMIN or op == FMAX:
            r = pick_f64(u, v, op == FMIN)
        elif op == RCP64H or op == RSQRT64H:
            # Only the upper word of the operand is read, and the lower word of the result is zero.
            value = as_f64(u & ~np.uint64(0xFFFFFFFF))
            value = 1.0 / value if op == RCP64H else 1.0 / np.sqrt(value)
            r = _NAN64 if value != value else from_f64(value) & ~np.uint64(0xFFFFFFFF)
        else:
            if y & F_SUBTRACT and not is_nan_f64(v):
                v = v ^ _SIGN64
            r = directed_f64(op, as_f64(u), as_f64(v), as_f64(t), x)
            if y & F_SAT:
                r = U0 if is_nan_f64(r) or r & _SIGN64 else min(r, np.uint64(0x3FF0000000000000))
        F[d, i] = r


@inlined
def float_single(F, op, d, a, b, c, x, y, m):
    """f32 operations in their full generality, lane by lane."""
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        u, v, t = F[a, i], F[b, i], F[c, i]
        if op >= FRSQRT and op <= TANH or op >= FDIV_APPROX and op <= FSQRT_APPROX:
            F[d, i] = approximate_f32(op, u, v, y)
            continue
        if op == FNEG or op == FABS:
            u = flush_f32(u) if y & F_FTZ else u
            r = u ^ _SIGN32 if op == FNEG else u & ~_SIGN32
            F[d, i] = CANONICAL_F32 if is_nan_f32(u) else r
            continue
        if y & F_FTZ:
            u, v, t = flush_f32(u), flush_f32(v), flush_f32(t)
        if op == FMIN or op == FMAX:
            r = pick_f32(u, v, y, op == FMIN)
        elif op == FMIN3 or op == FMAX3:
            r = pick_f32(pick_f32(u, v, y, op == FMIN3), t, y, op == FMIN3)
        else:
            if y & F_SUBTRACT:
                v = v ^ _SIGN32
            if x != RN:
                r = directed_f32(op, u, v, t, x)
            elif op == FADD:
                r = bits_of(as_f32(u) + as_f32(v))
            elif op == FMUL:
                r = bits_of(as_f32(u) * as_f32(v))
            elif op == FFMA:
                r = bits_of(fma32(as_f32(u), as_f32(v), as_f32(t)))
            elif op == FDIV:
                r = bits_of(as_f32(u) / as_f32(v))
            elif op == FRCP:
                r = bits_of(np.float32(1.0) / as_f32(u))
            else:
                r = bits_of(np.sqrt(as_f32(u)))
            r = finish_f32(r, y)
            if y & F_RELU and (is_nan_f32(r) or r & _SIGN32):
                r = CANONICAL_F32 if is_nan_f32(r) else U0
        F[d, i] = r


@unit("void", "U2 i i i i i i i u")
def float_lanes(F, op, d, a, b, c, x, y, m):
    """FLOAT family. x: rounding mode, y: F_* bits. The common cases have loops of their own that
    vectorise."""
    if y & F_DOUBLE:
        float_double(F, op, d, a, b, c, x, y, m)
    elif x == RN and y & ~F_SUBTRACT == 0 and op == FFMA:
        for i in range(32):
            r = fma32(as_f32(F[a, i]), as_f32(F[b, i]), as_f32(F[c, i]))
            bits = CANONICAL_F32 if r != r else from_f32(r)
            F[d, i] = bits if (m >> np.uint64(i)) & U1 else F[d, i]
    elif x == RN and y & ~F_SUBTRACT == 0 and op == FADD:
        flip = _SIGN32 if y & F_SUBTRACT else U0
        for i in range(32):
            r = as_f32(F[a, i]) + as_f32(F[b, i] ^ flip)
            bits = CANONICAL_F32 if r != r else from_f32(r)
            F[d, i] = bits if (m >> np.uint64(i)) & U1 else F[d, i]
    elif x == RN and y == 0 and op == FMUL:
        for i in range(32):
            r = as_f32(F[a, i]) * as_f32(F[b, i])
            bits = CANONICAL_F32 if r != r else from_f32(r)
            F[d, i] = bits if (m >> np.uint64(i)) & U1 else F[d, i]
    elif x == RN and y == F_FTZ and op == FFMA:
        for i in range(32):
            r = fma32(as_f32(flush_f32(F[a, i])), as_f32(flush_f32(F[b, i])), as_f32(flush_f32(F[c, i])))
            bits = CANONICAL_F32 if r != r else flush_f32(from_f32(r))
            F[d, i] = bits if (m >> np.uint64(i)) & U1 else F[d, i]
    elif x == RN and y & ~F_SUBTRACT == F_FTZ and op == FADD:
        flip = _SIGN32 if y & F_SUBTRACT else U0
        for i in range(32):
            r = as_f32(flush_f32(F[a, i])) + as_f32(flush_f32(F[b, i] ^ flip))
            bits = CANONICAL_F32 if r != r else flush_f32(from_f32(r))
            F[d, i] = bits if (m >> np.uint64(i)) & U1 else F[d, i]
    elif x == RN and y == F_FTZ and op == FMUL:
        for i in range(32):
            r = as_f32(flush_f32(F[a, i])) * as_f32(flush_f32(F[b, i]))
            bits = CANONICAL_F32 if r != r else flush_f32(from_f32(r))
            F[d, i] = bits if (m >> np.uint64(i)) & U1 else F[d, i]
    elif y & ~F_FTZ == 0 and (op == FMIN or op == FMAX):
        for i in range(32):
            u, v = F[a, i], F[b, i]
            if y:
                u, v = flush_f32(u), flush_f32(v)
            # Order-preserving integers, so that -0 sorts below +0; a NaN gives way to the other operand.
            p = ~u & np.uint64(0xFFFFFFFF) if u & _SIGN32 else u | _SIGN32
            q = ~v & np.uint64(0xFFFFFFFF) if v & _SIGN32 else v | _SIGN32
            r = u if (p < q) == (op == FMIN) else v
            r = v if is_nan_f32(u) else r
            r = u if is_nan_f32(v) else r
            r = CANONICAL_F32 if is_nan_f32(r) else r
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
    else:
        float_single(F, op, d, a, b, c, x, y, m)

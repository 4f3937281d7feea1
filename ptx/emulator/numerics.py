"""Rounding between floating formats, in integer arithmetic, and sums rounded to odd.

Every narrow format passes through one function, `round_magnitude`, from a float64 that holds the value
exactly or rounded to odd (the last bit set whenever something was lost). Rounding to odd at 53 bits followed
by any rounding to at most 50 bits equals a single rounding, which is how fused operations stay correctly
rounded.
"""

from __future__ import annotations

import numpy as np

from .bitcast import U0, U1, U63, as_f32, as_f64, from_f32, from_f64
from .jit import inlined

#: rounding modes: nearest even, toward zero, down, up, nearest with ties away, stochastic
RN, RZ, RM, RP, RNA = range(5)
CANONICAL_F32 = np.uint64(0x7FFFFFFF)
_MANTISSA = np.uint64((1 << 52) - 1)
_HIDDEN = np.uint64(1 << 52)


@inlined
def sum_to_odd(x, y):
    """x + y rounded to odd at 53 bits (finite operands whose sum does not overflow)."""
    s = x + y
    if not np.isfinite(s):
        return s
    # Knuth's two-sum: exact error of the rounded sum.
    t = s - x
    error = (x - (s - t)) + (y - t)
    if error != 0.0:
        bits = from_f64(s)
        if bits & U1 == U0:
            # The even neighbour was chosen: step toward the exact value, which makes the last bit one.
            if (error > 0.0) == (s > 0.0):
                bits += U1
            else:
                bits -= U1
            if s == 0.0:
                return error
        return as_f64(bits)
    return s


@inlined
def round_magnitude(x, mantissa_bits, bias, mode):
    """Code of |x| in a format without regard to its largest value (sign of x only steers rm and rp).

    x is finite. The code grows past the format's top when x is too large, so the caller compares and
    saturates.
    """
    b = from_f64(x)
    negative = b >> U63 != U0
    e = np.int64((b >> np.uint64(52)) & np.uint64(0x7FF))
    significand = b & _MANTISSA
    if e == 0 and significand == U0:
        return U0
    if e == 0:
        e = 1
    else:
        significand |= _HIDDEN
    exponent = e - 1023
    lowest = 1 - bias
    shift = 52 - mantissa_bits
    if exponent < lowest:
        shift += lowest - exponent
    if shift > 60:
        shift = 60
        significand = U1
    if shift <= 0:
        kept, rest, half = significand << np.uint64(-shift), U0, U1
    else:
        kept = significand >> np.uint64(shift)
        rest = significand & ((U1 << np.uint64(shift)) - U1)
        half = U1 << np.uint64(shift - 1)
    if mode == RN:
        up = rest > half or (rest == half and kept & U1 != U0)
    elif mode == RZ:
        up = False
    elif mode == RM:
        up = negative and rest != U0
    elif mode == RP:
        up = not negative and rest != U0
    else:
        up = rest >= half and rest != U0
    if up:
        kept += U1
    if exponent < lowest:
        return kept
    return kept + (np.uint64(exponent - lowest) << np.uint64(mantissa_bits))


@inlined
def round_ieee(x, exponent_bits, mantissa_bits, mode):
    """Sign and code of x in an IEEE-like format (f16, bf16, f32, tf32, e5m2); NaN gives all ones without
    sign."""
    sign_at = np.uint64(exponent_bits + mantissa_bits)
    top = ((U1 << np.uint64(exponent_bits)) - U1) << np.uint64(mantissa_bits)
    if x != x:
        return (U1 << sign_at) - U1
    sign = (from_f64(x) >> U63) << sign_at
    if np.isinf(x):
        return sign | top
    code = round_magnitude(x, mantissa_bits, (1 << (exponent_bits - 1)) - 1, mode)
    if code >= top:
        toward_zero = mode == RZ or (mode == RM and sign == U0) or (mode == RP and sign != U0)
        code = top - U1 if toward_zero else top
    return sign | code


@inlined
def expand_ieee(code, exponent_bits, mantissa_bits):
    """Value of an IEEE-like code as float64 (exact)."""
    mantissa = code & ((U1 << np.uint64(mantissa_bits)) - U1)
    e = np.int64((code >> np.uint64(mantissa_bits)) & ((U1 << np.uint64(exponent_bits)) - U1))
    negative = (code >> np.uint64(exponent_bits + mantissa_bits)) & U1 != U0
    bias = (1 << (exponent_bits - 1)) - 1
    if e == (1 << exponent_bits) - 1:
        if mantissa != U0:
            return np.nan
        return -np.inf if negative else np.inf
    if e == 0:
        scale = as_f64(np.uint64(1 - bias - mantissa_bits + 1023) << np.uint64(52))
        value = np.float64(np.int64(mantissa)) * scale
    else:
        value = as_f64(
            (np.uint64(e - bias + 1023) << np.uint64(52)) | (mantissa << np.uint64(52 - mantissa_bits))
        )
    return -value if negative else value


@inlined
def single_from_half(code):
    """f32 bits of an f16 code (exact; a NaN keeps its payload)."""
    magnitude = code & np.uint64(0x7FFF)
    sign = (code & np.uint64(0x8000)) << np.uint64(16)
    if magnitude < np.uint64(0x0400):
        # Subnormal: the field counts units of 2^-24, the last place of numbers in [0.5, 1).
        return sign | from_f32(as_f32(magnitude | np.uint64(0x3F000000)) - np.float32(0.5))
    bits = (magnitude << np.uint64(13)) + np.uint64(0x38000000)
    if magnitude >= np.uint64(0x7C00):
        bits += np.uint64(0x38000000)
    return sign | bits


@inlined
def half_from_single(bits):
    """f16 code of f32 bits, rounded to nearest even; NaN gives 0x7FFF."""
    magnitude = bits & np.uint64(0x7FFFFFFF)
    sign = (bits >> np.uint64(16)) & np.uint64(0x8000)
    if magnitude > np.uint64(0x7F800000):
        return np.uint64(0x7FFF)
    if magnitude < np.uint64(0x38800000):
        return sign | (from_f32(as_f32(magnitude) + np.float32(0.5)) - np.uint64(0x3F000000))
    code = magnitude - np.uint64(0x38000000)
    code = (code + np.uint64(0xFFF) + ((code >> np.uint64(13)) & U1)) >> np.uint64(13)
    return sign | min(code, np.uint64(0x7C00))


@inlined
def bfloat_from_single(bits):
    """bf16 code of f32 bits, rounded to nearest even; NaN gives 0x7FFF."""
    if bits & np.uint64(0x7FFFFFFF) > np.uint64(0x7F800000):
        return np.uint64(0x7FFF)
    return (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & U1)) >> np.uint64(16)


@inlined
def single_to_odd(x):
    """f32 bits of a float64 rounded to odd at 24 bits, for |x| = 0 or >= 2^-120 (and NaN, which stays
    NaN)."""
    bits = from_f64(x)
    low = bits & np.uint64(0x1FFFFFFF)
    bits &= ~np.uint64(0x1FFFFFFF)
    if low != U0:
        bits |= np.uint64(0x20000000)
    return from_f32(np.float32(as_f64(bits)))


@inlined
def f16_value(code):
    return np.float64(as_f32(single_from_half(code)))


@inlined
def bf16_value(code):
    return np.float64(as_f32(code << np.uint64(16)))


@inlined
def round_f32(x, mode):
    """float64 (exact or rounded to odd) to f32 bits; NaN is canonical."""
    if x != x:
        return CANONICAL_F32
    if mode == RN:
        return from_f32(np.float32(x))
    return round_ieee(x, 8, 23, mode)


@inlined
def flush_f32(bits):
    """Subnormal f32 to zero of the same sign (.ftz)."""
    if bits & np.uint64(0x7F800000) == U0:
        return bits & np.uint64(0x80000000)
    return bits


@inlined
def is_nan_f32(bits):
    return bits & np.uint64(0x7FFFFFFF) > np.uint64(0x7F800000)


@inlined
def is_nan_f64(bits):
    return bits & np.uint64(0x7FFFFFFFFFFFFFFF) > np.uint64(0x7FF0000000000000)

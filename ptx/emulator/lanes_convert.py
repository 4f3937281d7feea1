"""cvt with a floating side: float to float, float to integer, integer to float, packed narrow formats."""

from __future__ import annotations

import numpy as np

from .bitcast import M16, M64, U0, U1, U16, U32, U63, as_f32, as_f64, from_f32, from_f64, signed
from .jit import inlined, unit
from .numerics import (
    CANONICAL_F32, RM, RN, RNA, RP, RZ, bf16_value, bfloat_from_single, expand_ieee, f16_value, flush_f32,
    half_from_single, round_ieee, round_magnitude, single_from_half,
)
from .opcodes import CVT_FF, CVT_FI, CVT_IF, CVT_PACK_F

#: formats
(T_F16, T_BF16, T_F32, T_F64, T_TF32, T_E4M3, T_E5M2, T_E2M1, T_E2M3, T_E3M2, T_UE8M0) = range(11)
FORMATS = {
    "f16": T_F16,
    "bf16": T_BF16,
    "f32": T_F32,
    "f64": T_F64,
    "tf32": T_TF32,
    "e4m3": T_E4M3,
    "e5m2": T_E5M2,
    "e2m1": T_E2M1,
    "e2m3": T_E2M3,
    "e3m2": T_E3M2,
    "ue8m0": T_UE8M0,
}
#: bits of y; the rounding mode is x & 15, "round to integral" x & 16
(C_FTZ, C_SAT, C_RELU, C_SATFINITE, C_SIGNED, C_SCALED) = (1, 2, 4, 8, 16, 32)
X_INTEGRAL = 16


@inlined
def to_integral(value, mode):
    """Round a float64 to an integral float64."""
    if mode == RN:
        return np.rint(value)
    if mode == RZ:
        return np.trunc(value)
    if mode == RM:
        return np.floor(value)
    return np.ceil(value)


@inlined
def value_of(code, form, ftz):
    if form == T_F32:
        return np.float64(as_f32(flush_f32(code) if ftz else code))
    if form == T_F64:
        return as_f64(code)
    if form == T_F16:
        return f16_value(code & M16)
    return bf16_value(code & M16)


@inlined
def encode(value, form, mode, y):
    """Code of a float64 in a format, with saturation to finite and relu as asked."""
    if y & C_RELU and (value < 0.0 or value == 0.0):
        # -0 becomes +0 too.
        value = 0.0
    if form == T_F64:
        return from_f64(value) if value == value else np.uint64(0x7FF8000000000000)
    if form <= T_TF32 or form == T_E5M2:
        if form == T_F16 or form == T_E5M2:
            exponent, mantissa = 5, 10 if form == T_F16 else 2
        else:
            exponent, mantissa = 8, 7 if form == T_BF16 else (23 if form == T_F32 else 10)
        code = round_ieee(value, exponent, mantissa, mode)
        width = np.uint64(exponent + mantissa)
        top = ((U1 << np.uint64(exponent)) - U1) << np.uint64(mantissa)
        if y & C_SATFINITE and code & ((U1 << width) - U1) == top:
            code -= U1
        if y & C_FTZ and form == T_F32:
            code = flush_f32(code)
        # The container of tf32 is an f32 whose low 13 bits are zero.
        return code << np.uint64(13) if form == T_TF32 else code
    if form == T_UE8M0:
        # Only rz and rp exist: the exponent of |x| rounded down or up; NaN is 0xFF, zero and tiny give 0.
        if value != value:
            return np.uint64(0xFF)
        magnitude = abs(value)
        if np.isinf(magnitude):
            return np.uint64(0xFE) if y & C_SATFINITE else np.uint64(0xFF)
        bits = from_f64(magnitude)
        power = np.int64(bits >> np.uint64(52)) - 1023
        if mode == RP and bits & np.uint64((1 << 52) - 1):
            power += 1
        power = max(power, -127) if magnitude > 0.0 else -127
        if power > 127:
            return np.uint64(0xFE) if y & C_SATFINITE else np.uint64(0xFF)
        return np.uint64(power + 127)
    if form == T_E4M3:
        exponent, mantissa, bias, top, nan = 4, 3, 7, np.uint64(0x7E), np.uint64(0x7F)
    elif form == T_E2M1:
        exponent, mantissa, bias, top, nan = 2, 1, 1, np.uint64(7), np.uint64(7)
    elif form == T_E2M3:
        exponent, mantissa, bias, top, nan = 2, 3, 1, np.uint64(0x1F), np.uint64(0x1F)
    else:
        exponent, mantissa, bias, top, nan = 3, 2, 3, np.uint64(0x1F), np.uint64(0x1F)
    if value != value:
        return nan
    sign = (from_f64(value) >> U63) << np.uint64(exponent + mantissa)
    if np.isinf(value):
        return sign | top
    return sign | min(round_magnitude(value, mantissa, bias, mode), top)


@inlined
def narrow_value(code, form):
    """Value of a packed narrow code as float64."""
    if form == T_E5M2:
        return expand_ieee(code, 5, 2)
    if form == T_UE8M0:
        return np.nan if code == np.uint64(0xFF) else as_f64((code + np.uint64(1023 - 127)) << np.uint64(52))
    if form == T_E4M3:
        if code & np.uint64(0x7F) == np.uint64(0x7F):
            return np.nan
        exponent, mantissa, bias = 4, 3, 7
    elif form == T_E2M1:
        exponent, mantissa, bias = 2, 1, 1
    elif form == T_E2M3:
        exponent, mantissa, bias = 2, 3, 1
    else:
        exponent, mantissa, bias = 3, 2, 3
    fraction = np.float64(np.int64(code & ((U1 << np.uint64(mantissa)) - U1)))
    e = np.int64((code >> np.uint64(mantissa)) & ((U1 << np.uint64(exponent)) - U1))
    scale = 2.0 ** np.float64((e if e > 0 else 1) - bias - mantissa)
    value = (fraction + (2.0**mantissa if e > 0 else 0.0)) * scale
    return -value if (code >> np.uint64(exponent + mantissa)) & U1 else value


@inlined
def narrow_bits(form):
    """Distance between two packed elements: 4 for e2m1, 8 for the other narrow formats, 16 for the halves."""
    if form == T_E2M1:
        return 4
    return 16 if form <= T_BF16 else 8


@inlined
def float_to_integer(value, mode, width, is_signed, wide_source):
    """Saturating conversion; NaN gives 0, or 1 << (width-1) when either side has 64 bits (PTX "cvt")."""
    if value != value:
        return U1 << np.uint64(width - 1) if wide_source or width == 64 else U0
    r = to_integral(value, mode)
    if is_signed:
        limit = 2.0 ** np.float64(width - 1)
        if r >= limit:
            return (U1 << np.uint64(width - 1)) - U1
        if r < -limit:
            return ~((U1 << np.uint64(width - 1)) - U1)
        return np.uint64(np.int64(r))
    if r <= 0.0:
        return U0
    if r >= 2.0 ** np.float64(width):
        return M64 >> np.uint64(64 - width)
    return np.uint64(np.int64(r)) if r < 2.0**63 else np.uint64(np.int64(r - 2.0**63)) | (U1 << U63)


@inlined
def integer_to_float(code, is_signed, shift, form, mode):
    negative = is_signed and signed(code, shift) < 0
    magnitude = U0 - np.uint64(signed(code, shift)) if negative else (code << shift) >> shift
    lost, scale = U0, 1.0
    while magnitude >> np.uint64(53):
        lost |= magnitude & U1
        magnitude >>= U1
        scale *= 2.0
    if form != T_F64:
        value = np.float64(np.int64(magnitude | lost)) * scale
        return encode(-value if negative else value, form, mode, 0)
    value = np.float64(np.int64(magnitude)) * scale
    if scale > 1.0:
        # float64 results need the dropped bits themselves, not a sticky bit.
        full = U0 - np.uint64(signed(code, shift)) if negative else (code << shift) >> shift
        rest = full - (magnitude * np.uint64(np.int64(scale)))
        half = np.uint64(np.int64(scale)) >> U1
        up = rest > half or (rest == half and magnitude & U1 != U0)
        if mode == RZ:
            up = False
        elif mode == RM:
            up = negative and rest != U0
        elif mode == RP:
            up = not negative and rest != U0
        if up:
            value = np.float64(np.int64(magnitude + U1)) * scale
    return from_f64(-value if negative else value)


@inlined
def narrow_nan(code, mantissa):
    """Quiet NaN of f32 (23) or f16 (10 mantissa bits) with the sign and the upper payload bits of an f64
    NaN."""
    width = 8 if mantissa == 23 else 5
    sign = (code >> U63) << np.uint64(width + mantissa)
    exponent = ((U1 << np.uint64(width)) - U1) << np.uint64(mantissa)
    payload = (code & np.uint64((1 << 52) - 1)) >> np.uint64(52 - mantissa)
    return sign | exponent | payload | (U1 << np.uint64(mantissa - 1))


@inlined
def convert_float(code, source, target, x, y):
    value = value_of(code, source, y & C_FTZ != 0)
    if value != value and y & C_SAT == 0:
        # Measured on an H200: these conversions move the NaN's payload, the others give the canonical NaN.
        if source == T_BF16 and target == T_F32:
            return code << U16
        if source == T_F64 and (target == T_F32 or target == T_F16):
            return narrow_nan(code, 23 if target == T_F32 else 10)
        if target == T_TF32 and x & 15 == RNA:
            return code & ~np.uint64(0x1FFF)
    if x & X_INTEGRAL:
        value = to_integral(value, x & 15)
    if y & C_SAT:
        value = 0.0 if value != value else min(max(value, 0.0), 1.0)
        value = 0.0 if value == 0.0 else value
    if target == T_F64:
        return encode(value, target, RN, y)
    return encode(value, target, x & 15, y)


@inlined
def frequent_conversion(F, op, d, a, b, source, target, x, y, s, m):
    """The conversions of inner loops, each in a loop of its own. Returns False for all others."""
    if op == CVT_PACK_F and source == T_F32 and x == RN and y == 0 and target <= T_BF16:
        for i in range(32):
            if target == T_BF16:
                r = (bfloat_from_single(F[a, i]) << U16) | bfloat_from_single(F[b, i])
            else:
                r = (half_from_single(F[a, i]) << U16) | half_from_single(F[b, i])
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
        return True
    if op == CVT_FF and source == T_F32 and x == RN and y == 0 and target <= T_BF16:
        for i in range(32):
            r = bfloat_from_single(F[a, i]) if target == T_BF16 else half_from_single(F[a, i])
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
        return True
    if op == CVT_FF and source == T_BF16 and target == T_F32 and x == RN and y == 0:
        for i in range(32):
            F[d, i] = (F[a, i] & M16) << U16 if (m >> np.uint64(i)) & U1 else F[d, i]
        return True
    if op == CVT_FF and source == T_F16 and target == T_F32 and x == RN and y == 0:
        for i in range(32):
            r = single_from_half(F[a, i] & M16)
            r = CANONICAL_F32 if r & np.uint64(0x7FFFFFFF) > np.uint64(0x7F800000) else r
            F[d, i] = r if (m >> np.uint64(i)) & U1 else F[d, i]
        return True
    if op == CVT_IF and target == T_F32 and x == RN and y & C_SAT == 0 and s >= U32:
        for i in range(32):
            value = signed(F[a, i], s) if y & C_SIGNED else np.int64((F[a, i] << s) >> s)
            F[d, i] = from_f32(np.float32(value)) if (m >> np.uint64(i)) & U1 else F[d, i]
        return True
    return False


@unit("void", "U2 i i i i i i i i i u u u")
def convert_lanes(F, op, d, a, b, c, e, x, y, z, w, s, m):
    """CONVERT family. z = source format | target format << 8 | integer width << 16; x rounding, y C_*
    bits."""
    source, target, width = z & 0xFF, (z >> 8) & 0xFF, (z >> 16) & 0xFF
    mode = x & 15
    if frequent_conversion(F, op, d, a, b, source, target, x, y, s, m):
        return
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        if op == CVT_FF:
            r = convert_float(F[a, i], source, target, x, y)
        elif op == CVT_FI:
            value = value_of(F[a, i], source, y & C_FTZ != 0)
            r = float_to_integer(value, mode, width, y & C_SIGNED != 0, source == T_F64)
        elif op == CVT_IF:
            r = integer_to_float(F[a, i], y & C_SIGNED != 0, s, target, mode)
            if y & C_SAT:
                r = convert_float(r, target, target, RN, C_SAT)
        elif op == CVT_PACK_F:
            bits = np.uint64(narrow_bits(target))
            if source == T_F32:
                high, low = value_of(F[a, i], T_F32, False), value_of(F[b, i], T_F32, False)
            else:
                high, low = value_of(F[a, i] >> U16, source, False), value_of(F[a, i], source, False)
            r = (encode(high, target, mode, y) << bits) | encode(low, target, mode, y)
        else:
            bits = np.uint64(narrow_bits(source))
            keep = (U1 << bits) - U1
            low, high = narrow_value(F[a, i] & keep, source), narrow_value((F[a, i] >> bits) & keep, source)
            r = encode(low, target, mode, y) | (encode(high, target, mode, y) << U16)
        F[d, i] = r & w

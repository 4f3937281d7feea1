"""f16, bf16, their packed pairs and f32x2: computed in float64 (rounded to odd where that is not exact),
rounded once."""

from __future__ import annotations

import math

import numpy as np

from .bitcast import M16, U0, U1, U16, as_f32, exp2, fma32, from_f32
from .jit import inlined, unit
from .lanes_float import bits_of, directed_f32, finish_f32
from .numerics import (
    RN, bf16_value, bfloat_from_single, f16_value, flush_f32, half_from_single, is_nan_f32, round_ieee,
    single_to_odd, sum_to_odd,
)
from .opcodes import (
    F2ADD, F2FMA, F2MUL, FADD, FFMA, FMUL, HABS, HADD, HEX2, HFMA, HMAX, HMAX3, HMIN, HMIN3, HMIXADD, HMIXFMA,
    HMIXSUB, HMUL, HNEG, HSUB,
)

#: bits of y
(H_BF16, H_PACKED, H_FTZ, H_SAT, H_RELU, H_NAN, H_XORSIGN, H_ABS, H_OOB) = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SIGN, _NAN = np.uint64(0x8000), np.uint64(0x7FFF)
_SMALL = 2.0**-120


@inlined
def half_value(code, y):
    return bf16_value(code) if y & H_BF16 else f16_value(code)


@inlined
def half_code(value, y, mode):
    return round_ieee(value, 8, 7, mode) if y & H_BF16 else round_ieee(value, 5, 10, mode)


@inlined
def half_flush(code, y):
    field = np.uint64(0x7F80) if y & H_BF16 else np.uint64(0x7C00)
    return code if code & field else code & _SIGN


@inlined
def half_is_nan(code, y):
    return code & np.uint64(0x7FFF) > (np.uint64(0x7F80) if y & H_BF16 else np.uint64(0x7C00))


@inlined
def half_pick(u, v, y, want_min):
    sign = (u ^ v) & _SIGN
    if y & H_ABS:
        u, v = u & ~_SIGN, v & ~_SIGN
    un, vn = half_is_nan(u, y), half_is_nan(v, y)
    if un or vn:
        if y & H_NAN or (un and vn):
            return _NAN
        r = v if un else u
    else:
        p = ~u & M16 if u & _SIGN else u | _SIGN
        q = ~v & M16 if v & _SIGN else v | _SIGN
        r = u if (p < q) == want_min else v
    return (r & ~_SIGN) | sign if y & H_XORSIGN else r


@inlined
def half_scalar(op, u, v, t, x, y):
    """One f16 or bf16 operation on 16-bit codes."""
    if op == HNEG or op == HABS:
        u = half_flush(u, y) if y & H_FTZ else u
        if half_is_nan(u, y):
            return _NAN
        return u ^ _SIGN if op == HNEG else u & ~_SIGN
    if y & H_FTZ:
        u, v, t = half_flush(u, y), half_flush(v, y), half_flush(t, y)
    if op == HMIN or op == HMAX:
        return half_pick(u, v, y, op == HMIN)
    if op == HMIN3 or op == HMAX3:
        return half_pick(half_pick(u, v, y, op == HMIN3), t, y, op == HMIN3)
    if y & H_OOB and (half_is_nan(u, y) or half_is_nan(v, y)):
        # fma.oob: the TMA out-of-bounds NaN 0x7FFF in a factor forces a zero result (PTX "fma", .oob).
        if u == _NAN or v == _NAN:
            return U0
    a, b = half_value(u, y), half_value(v, y)
    if op == HADD:
        r = sum_to_odd(a, b)
    elif op == HSUB:
        r = sum_to_odd(a, -b)
    elif op == HMUL:
        r = a * b
    elif op == HFMA:
        c = half_value(t, y)
        p = a * b
        r = sum_to_odd(p, c)
    elif op == HEX2:
        r = exp2(a)
    else:
        r = math.tanh(a)
    code = half_code(r, y, x)
    if half_is_nan(code, y):
        return U0 if y & H_SAT else _NAN
    if y & H_FTZ:
        code = half_flush(code, y)
    if y & H_SAT:
        one = np.uint64(0x3F80) if y & H_BF16 else np.uint64(0x3C00)
        code = U0 if code & _SIGN else min(code, one)
    if y & H_RELU and code & _SIGN:
        code = U0
    return code


@inlined
def half_plain(op, u, v, t, bfloat):
    """add, sub, mul and fma without modifiers, rounded to nearest: the same values as half_scalar, faster."""
    if bfloat:
        a, b, c = bf16_value(u), bf16_value(v), bf16_value(t)
    else:
        a, b, c = f16_value(u), f16_value(v), f16_value(t)
    if op == HFMA:
        r = sum_to_odd(a * b, c)
    elif op == HMUL:
        r = a * b
    elif op == HADD:
        r = sum_to_odd(a, b)
    else:
        r = sum_to_odd(a, -b)
    if bfloat and r != 0.0 and abs(r) < _SMALL:
        return half_code(r, H_BF16, RN)
    bits = single_to_odd(r)
    return bfloat_from_single(bits) if bfloat else half_from_single(bits)


@unit("void", "U2 i i i i i i i u")
def half_lanes(F, op, d, a, b, c, x, y, m):
    """HALF family. x: rounding mode, y: H_* bits (F_* bits of lanes_float for the f32x2 and mixed
    operations)."""
    if op == F2ADD or op == F2MUL or op == F2FMA:
        single = FADD if op == F2ADD else (FMUL if op == F2MUL else FFMA)
        for i in range(32):
            if (m >> np.uint64(i)) & U1 == U0:
                continue
            r = U0
            for k in range(2):
                shift = np.uint64(32 * k)
                u, v, t = F[a, i] >> shift, F[b, i] >> shift, F[c, i] >> shift
                u, v, t = u & np.uint64(0xFFFFFFFF), v & np.uint64(0xFFFFFFFF), t & np.uint64(0xFFFFFFFF)
                if y & 1:
                    u, v, t = flush_f32(u), flush_f32(v), flush_f32(t)
                if x != RN:
                    part = directed_f32(single, u, v, t, x)
                elif op == F2ADD:
                    part = bits_of(as_f32(u) + as_f32(v))
                elif op == F2MUL:
                    part = bits_of(as_f32(u) * as_f32(v))
                else:
                    part = bits_of(fma32(as_f32(u), as_f32(v), as_f32(t)))
                r |= finish_f32(part, y) << shift
            F[d, i] = r
        return
    if op == HMIXADD or op == HMIXSUB or op == HMIXFMA:
        # f32 result; the narrow operands are exact in f32 (PTX mixed-precision add, sub, fma).
        for i in range(32):
            if (m >> np.uint64(i)) & U1 == U0:
                continue
            u = from_f32(np.float32(half_value(F[a, i] & M16, y)))
            if op == HMIXFMA:
                v = from_f32(np.float32(half_value(F[b, i] & M16, y)))
                r = directed_f32(FFMA, u, v, F[c, i], x)
            else:
                v = F[b, i] ^ np.uint64(0x80000000) if op == HMIXSUB else F[b, i]
                r = directed_f32(FADD, u, v, U0, x)
            if y & H_SAT:
                r = U0 if is_nan_f32(r) or r & np.uint64(0x80000000) else min(r, np.uint64(0x3F800000))
            F[d, i] = r
        return
    if op <= HFMA and x == RN and y & ~(H_BF16 | H_PACKED) == 0:
        for i in range(32):
            if (m >> np.uint64(i)) & U1:
                u, v, t = F[a, i], F[b, i], F[c, i]
                r = half_plain(op, u & M16, v & M16, t & M16, y & H_BF16 != 0)
                if y & H_PACKED:
                    r |= (
                        half_plain(op, (u >> U16) & M16, (v >> U16) & M16, (t >> U16) & M16, y & H_BF16 != 0)
                        << U16
                    )
                F[d, i] = r
        return
    for i in range(32):
        if (m >> np.uint64(i)) & U1:
            r = half_scalar(op, F[a, i] & M16, F[b, i] & M16, F[c, i] & M16, x, y)
            if y & H_PACKED:
                high = half_scalar(
                    op, (F[a, i] >> U16) & M16, (F[b, i] >> U16) & M16, (F[c, i] >> U16) & M16, x, y
                )
                r |= high << U16
            F[d, i] = r

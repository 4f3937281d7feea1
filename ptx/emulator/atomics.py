"""The value an atomic operation leaves behind."""

from __future__ import annotations

import numpy as np

from .bitcast import M16, U0, U16, U32, as_f32, as_f64, from_f32, from_f64, signed
from .jit import inlined
from .numerics import CANONICAL_F32, RN, bf16_value, f16_value, flush_f32, round_ieee

#: operations
(A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_ADD, A_INC, A_DEC, A_MIN, A_MAX) = range(10)
ATOMIC_NAMES = {"and": A_AND, "or": A_OR, "xor": A_XOR, "exch": A_EXCH, "cas": A_CAS, "add": A_ADD,
                "inc": A_INC, "dec": A_DEC, "min": A_MIN, "max": A_MAX}
#: operand kinds: unsigned / signed of 4 or 8 bytes, and the floating formats
(K_U32, K_S32, K_U64, K_S64, K_F32, K_F64, K_F16, K_BF16, K_F16X2, K_BF16X2, K_B16) = range(11)
ATOMIC_KINDS = {"u32": K_U32, "b32": K_U32, "s32": K_S32, "u64": K_U64, "b64": K_U64, "s64": K_S64,
                "f32": K_F32, "f64": K_F64, "f16": K_F16, "bf16": K_BF16, "f16x2": K_F16X2,
                "bf16x2": K_BF16X2, "b16": K_B16}


@inlined
def atomic_half(op, old, x, bfloat):
    """add, min or max of one f16 or bf16 value; subnormals are kept (.noftz)."""
    p = bf16_value(old) if bfloat else f16_value(old)
    q = bf16_value(x) if bfloat else f16_value(x)
    if op == A_ADD:
        # Two 11-bit (8-bit) significands can be too far apart for one exact float64 sum only where the
        # smaller is far below half a unit of the larger, so rounding through float64 is still a single
        # rounding.
        return round_ieee(p + q, 8, 7, RN) if bfloat else round_ieee(p + q, 5, 10, RN)
    if p != p:
        return x
    if q != q:
        return old
    if op == A_MIN:
        return old if p < q or (p == q and old >> np.uint64(15)) else x
    return old if p > q or (p == q and not old >> np.uint64(15)) else x


@inlined
def atomic_result(op, kind, old, x, y, flush):
    """New memory content; `y` is the third operand (the value of a cas). `flush`: f32 add on global memory
    flushes subnormal inputs and results, on shared memory it does not (PTX "atom")."""
    if op == A_ADD:
        if kind == K_F32:
            if flush:
                old, x = flush_f32(old), flush_f32(x)
            total = as_f32(old) + as_f32(x)
            if total != total:
                return CANONICAL_F32
            bits = from_f32(total)
            return flush_f32(bits) if flush else bits
        if kind == K_F64:
            return from_f64(as_f64(old) + as_f64(x))
        if kind == K_F16 or kind == K_BF16:
            return atomic_half(op, old, x, kind == K_BF16)
        if kind == K_F16X2 or kind == K_BF16X2:
            bfloat = kind == K_BF16X2
            low = atomic_half(op, old & M16, x & M16, bfloat)
            return low | (atomic_half(op, old >> U16, x >> U16, bfloat) << U16)
        return old + x
    if op == A_AND:
        return old & x
    if op == A_OR:
        return old | x
    if op == A_XOR:
        return old ^ x
    if op == A_EXCH:
        return x
    if op == A_CAS:
        return y if old == x else old
    if op == A_INC:
        return U0 if old >= x else old + np.uint64(1)
    if op == A_DEC:
        return x if old == U0 or old > x else old - np.uint64(1)
    if kind == K_F16 or kind == K_BF16:
        return atomic_half(op, old, x, kind == K_BF16)
    if kind == K_F16X2 or kind == K_BF16X2:
        bfloat = kind == K_BF16X2
        low = atomic_half(op, old & M16, x & M16, bfloat)
        return low | (atomic_half(op, old >> U16, x >> U16, bfloat) << U16)
    if kind == K_S32:
        less = signed(old, U32) < signed(x, U32)
    elif kind == K_S64:
        less = np.int64(old) < np.int64(x)
    else:
        less = old < x
    return old if less == (op == A_MIN) else x

"""Comparisons, predicate logic and carry arithmetic. A predicate row keeps one bit for each lane in its
element 0."""

from __future__ import annotations

import numpy as np

from .bitcast import M16, M64, U0, U1, U16, U32, U63, as_f32, as_f64, signed
from .jit import inlined, unit
from .layout import CONST_WINDOW, LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from .numerics import bf16_value, f16_value, flush_f32
from .opcodes import (
    ADD_CC, ISSPACEP, MAD_CC, PRED_LOGIC, SET_F, SET_HALF, SET_INT, SETP_F, SETP_HALF, SETP_INT, SUB_CC,
    TESTP,
)

#: comparison numbers; the unordered forms follow the ordered ones
(EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN) = range(14)
COMPARISONS = {
    "eq": EQ,
    "ne": NE,
    "lt": LT,
    "le": LE,
    "gt": GT,
    "ge": GE,
    "lo": LT,
    "ls": LE,
    "hi": GT,
    "hs": GE,
    "equ": EQU,
    "neu": NEU,
    "ltu": LTU,
    "leu": LEU,
    "gtu": GTU,
    "geu": GEU,
    "num": NUM,
    "nan": NAN,
}
#: bits of y
(Y_SIGNED, Y_F64, Y_FTZ, Y_BF16, Y_NOT_C, Y_TWO) = (1, 2, 4, 8, 16, 32)
#: second word of x: how the third operand is combined
(BOOL_NONE, BOOL_AND, BOOL_OR, BOOL_XOR) = range(4)
TESTP_KINDS = {"finite": 0, "infinite": 1, "number": 2, "notanumber": 3, "normal": 4, "subnormal": 5}
SPACE_KINDS = {
    "global": 0,
    "shared": 1,
    "shared::cta": 1,
    "shared::cluster": 2,
    "local": 3,
    "const": 4,
    "param": 5,
    "param::entry": 5,
    "param::func": 3,
}


@inlined
def compare_float(x, y, comparison):
    unordered = x != x or y != y
    if comparison == NUM:
        return not unordered
    if comparison == NAN:
        return unordered
    if unordered:
        return comparison >= EQU
    comparison = comparison - EQU if comparison >= EQU else comparison
    if comparison == EQ:
        return x == y
    if comparison == NE:
        return x != y
    if comparison == LT:
        return x < y
    if comparison == LE:
        return x <= y
    if comparison == GT:
        return x > y
    return x >= y


@inlined
def integer_results(F, a, b, comparison, is_signed, s):
    """Bit mask of lanes where the comparison holds; values are biased so that one unsigned loop serves
    both."""
    r = U0
    flip = U1 << U63 if is_signed else U0
    if comparison == EQ:
        for i in range(32):
            r |= np.uint64(F[a, i] << s == F[b, i] << s) << np.uint64(i)
    elif comparison == NE:
        for i in range(32):
            r |= np.uint64(F[a, i] << s != F[b, i] << s) << np.uint64(i)
    elif comparison == LT:
        for i in range(32):
            r |= np.uint64((F[a, i] << s) ^ flip < (F[b, i] << s) ^ flip) << np.uint64(i)
    elif comparison == LE:
        for i in range(32):
            r |= np.uint64((F[a, i] << s) ^ flip <= (F[b, i] << s) ^ flip) << np.uint64(i)
    elif comparison == GT:
        for i in range(32):
            r |= np.uint64((F[a, i] << s) ^ flip > (F[b, i] << s) ^ flip) << np.uint64(i)
    else:
        for i in range(32):
            r |= np.uint64((F[a, i] << s) ^ flip >= (F[b, i] << s) ^ flip) << np.uint64(i)
    return r


@inlined
def float_results(F, a, b, comparison, y):
    r = U0
    for i in range(32):
        if y & Y_F64:
            p, q = as_f64(F[a, i]), as_f64(F[b, i])
        else:
            u, v = F[a, i], F[b, i]
            if y & Y_FTZ:
                u, v = flush_f32(u), flush_f32(v)
            p, q = np.float64(as_f32(u)), np.float64(as_f32(v))
        r |= np.uint64(compare_float(p, q, comparison)) << np.uint64(i)
    return r


@inlined
def half_results(F, a, b, comparison, y, shift):
    r = U0
    for i in range(32):
        u, v = (F[a, i] >> shift) & M16, (F[b, i] >> shift) & M16
        if y & Y_BF16:
            p, q = bf16_value(u), bf16_value(v)
        else:
            if y & Y_FTZ:
                u = u if u & np.uint64(0x7C00) else u & np.uint64(0x8000)
                v = v if v & np.uint64(0x7C00) else v & np.uint64(0x8000)
            p, q = f16_value(u), f16_value(v)
        r |= np.uint64(compare_float(p, q, comparison)) << np.uint64(i)
    return r


@inlined
def combine(r, F, c, boolean, y):
    if boolean == BOOL_NONE:
        return r
    p = ~F[c, 0] if y & Y_NOT_C else F[c, 0]
    if boolean == BOOL_AND:
        return r & p
    if boolean == BOOL_OR:
        return r | p
    return r ^ p


@inlined
def write_predicate(F, row, value, m):
    F[row, 0] = (F[row, 0] & ~m) | (value & m)


@inlined
def test_property(bits, kind, is_double):
    if is_double:
        magnitude, infinity, normal = (
            bits & (M64 >> U1),
            np.uint64(0x7FF) << np.uint64(52),
            U1 << np.uint64(52),
        )
    else:
        magnitude, infinity, normal = (
            bits & np.uint64(0x7FFFFFFF),
            np.uint64(0x7F800000),
            np.uint64(0x00800000),
        )
    if kind == 0:
        return magnitude < infinity
    if kind == 1:
        return magnitude == infinity
    if kind == 2:
        return magnitude <= infinity
    if kind == 3:
        return magnitude > infinity
    if kind == 4:
        # Zeros count as normal (PTX "testp").
        return normal <= magnitude < infinity or magnitude == U0
    return U0 < magnitude < normal


@inlined
def in_space(address, kind, own_rank):
    window = address >> np.uint64(40)
    if kind == 1:
        return (
            window == np.uint64(SHARED_WINDOW >> 40)
            and (address >> np.uint64(24)) & np.uint64(0xFF) == own_rank
        )
    if kind == 2:
        return window == np.uint64(SHARED_WINDOW >> 40)
    if kind == 3:
        return window == np.uint64(LOCAL_WINDOW >> 40)
    if kind == 4:
        return window == np.uint64(CONST_WINDOW >> 40)
    if kind == 5:
        return window == np.uint64(PARAMETER_WINDOW >> 40)
    # Global is what no window claims; kernel parameters can be read as global too.
    return window < np.uint64(CONST_WINDOW >> 40) or window == np.uint64(PARAMETER_WINDOW >> 40)


@inlined
def add_with_carry(F, op, d, a, b, c, e, x, w, s, m):
    """x: bit 0 reads the carry, bit 1 writes it, bit 2 takes the high half of a product (MAD_CC)."""
    carry_in, carry_out = F[e, 0], U0
    for i in range(32):
        if (m >> np.uint64(i)) & U1 == U0:
            continue
        carry = (carry_in >> np.uint64(i)) & U1 if x & 1 else U0
        p, q = F[a, i], F[b, i]
        if op == MAD_CC:
            product = p * q
            if x & 4:
                if s == U0:
                    p0, p1, q0, q1 = p & np.uint64(0xFFFFFFFF), p >> U32, q & np.uint64(0xFFFFFFFF), q >> U32
                    mid = p1 * q0 + ((p0 * q0) >> U32)
                    product = p1 * q1 + (mid >> U32) + ((p0 * q1 + (mid & np.uint64(0xFFFFFFFF))) >> U32)
                    if x & 8:
                        product -= (q if p >> U63 else U0) + (p if q >> U63 else U0)
                elif x & 8:
                    product = np.uint64((signed(p, s) * signed(q, s)) >> np.int64(np.uint64(64) - s))
                else:
                    product = product >> (np.uint64(64) - s)
            p, q = product & w, F[c, i]
        if op == SUB_CC:
            r = p - q - carry
            out = U1 if p < q or (p == q and carry != U0) else U0
        else:
            r = p + q + carry
            out = (
                (r >> (np.uint64(64) - s)) & U1
                if s != U0
                else (U1 if r < p or (r == p and carry != U0) else U0)
            )
        F[d, i] = r & w
        carry_out |= out << np.uint64(i)
    if x & 2:
        write_predicate(F, e, carry_out, m)


@unit("void", "U2 i i i i i i i i i u u u")
def predicate_lanes(F, op, d, a, b, c, e, x, y, z, w, s, m):
    """PREDICATE family. d, e: destination rows (-1 = none); c: predicate operand; x = comparison | boolean <<
    8."""
    comparison, boolean = x & 0xFF, (x >> 8) & 0xFF
    if op == SETP_INT or op == SETP_F:
        if op == SETP_INT:
            r = integer_results(F, a, b, comparison, y & Y_SIGNED != 0, s)
        else:
            r = float_results(F, a, b, comparison, y)
        if d >= 0:
            value = combine(r, F, c, boolean, y)
            if e >= 0:
                # Read c before d is written: they may be the same register.
                other = combine(~r, F, c, boolean, y)
                write_predicate(F, e, other, m)
            write_predicate(F, d, value, m)
        elif e >= 0:
            write_predicate(F, e, combine(~r, F, c, boolean, y), m)
    elif op == PRED_LOGIC:
        p = ~F[a, 0] if y & 1 else F[a, 0]
        q = ~F[b, 0] if y & 2 else F[b, 0]
        if x == 0:
            r = p & q
        elif x == 1:
            r = p | q
        elif x == 2:
            r = p ^ q
        elif x == 3:
            r = ~p
        else:
            r = p
        write_predicate(F, d, r, m)
    elif op == SET_INT or op == SET_F:
        if op == SET_INT:
            r = integer_results(F, a, b, comparison, y & Y_SIGNED != 0, s)
        else:
            r = float_results(F, a, b, comparison, y)
        r = combine(r, F, c, boolean, y)
        for i in range(32):
            if (m >> np.uint64(i)) & U1:
                F[d, i] = np.uint64(z) if (r >> np.uint64(i)) & U1 else U0
    elif op == SETP_HALF:
        low = combine(half_results(F, a, b, comparison, y, U0), F, c, boolean, y)
        if y & Y_TWO:
            high = combine(half_results(F, a, b, comparison, y, U16), F, c, boolean, y)
        else:
            high = combine(~half_results(F, a, b, comparison, y, U0), F, c, boolean, y)
        if e >= 0:
            write_predicate(F, e, high, m)
        if d >= 0:
            write_predicate(F, d, low, m)
    elif op == SET_HALF:
        low = combine(half_results(F, a, b, comparison, y, U0), F, c, boolean, y)
        high = combine(half_results(F, a, b, comparison, y, U16), F, c, boolean, y) if y & Y_TWO else U0
        for i in range(32):
            if (m >> np.uint64(i)) & U1:
                r = np.uint64(z) if (low >> np.uint64(i)) & U1 else U0
                F[d, i] = r | (np.uint64(z) << U16 if (high >> np.uint64(i)) & U1 else U0)
    elif op == TESTP or op == ISSPACEP:
        r = U0
        for i in range(32):
            if op == TESTP:
                truth = test_property(F[a, i], x, y & Y_F64 != 0)
            else:
                truth = in_space(F[a, i], x, F[b, i])
            r |= np.uint64(truth) << np.uint64(i)
        write_predicate(F, d, r, m)
    elif op == ADD_CC or op == SUB_CC or op == MAD_CC:
        add_with_carry(F, op, d, a, b, c, e, x, w, s, m)

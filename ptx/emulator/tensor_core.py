"""Bit-exact tensor-core arithmetic: dot products of raw operand words, in integers only.

A finite operand is a signed mantissa and a *raw* exponent (the encoded exponent without its bias; the least
normal exponent for subnormals).  An instruction picks one window for all the terms of an output element: the
quantum ``2**q`` lies a fixed number of bits below the largest raw exponent in sight, each term is cut toward
zero to a multiple of it, and the signed multiples are added exactly.  The sum is then rounded once.

Sources: the model published by the project sf-tensor/tcgen05 (https://github.com/sf-tensor/tcgen05,
MODEL.md), which reports bit-exact agreement with a B200, and for the unscaled kinds the independent study
https://arxiv.org/abs/2512.07004 .  The windows of ``mma.sync`` and ``wgmma`` on sm_90 were measured on an
H200 (see ``docs/emulator.md``).
"""

from __future__ import annotations

import numpy as np

from .jit import compiled

# Operand formats.  The numbers are private; descriptors.py maps the codes of the instruction descriptors to
# them.
F16, BF16, TF32, E4M3, E5M2, E2M3, E3M2, E2M1, U8, S8 = range(10)
FORMAT_NAMES = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "u8", "s8")
FORMAT_BITS = (16, 16, 32, 8, 8, 6, 6, 4, 8, 8)

# Scale formats of the block-scaled kinds.
UE8M0, UE4M3 = 0, 1

# Destination formats.
D_F32, D_F16 = 0, 1

#: Bits kept below the largest raw exponent by the unscaled kinds and by kind::mxf8f6f4.
WINDOW = 25

#: The window, and the fraction bits of the result, of 8-bit floats in wgmma on sm_90.
WGMMA_FP8_BITS = 13

_FINITE, _INFINITE, _NAN = 0, 1, 2
_ABSENT = -(1 << 20)  # raw exponent of a zero: never the largest, and two of them still fit an int32

# fraction bits, exponent bits, bias
_LAYOUT = np.array(
    [(10, 5, 15), (7, 8, 127), (10, 8, 127), (3, 4, 7), (2, 5, 15), (3, 2, 1), (2, 3, 3), (1, 2, 1)],
    dtype=np.int64,
)


@compiled
def _decode(word, fmt):
    """(signed mantissa, raw exponent, class) of one operand; value = mantissa * 2**(raw - fraction bits)."""
    fraction_bits = _LAYOUT[fmt, 0]
    exponent_bits = _LAYOUT[fmt, 1]
    bias = _LAYOUT[fmt, 2]
    word = np.int64(word)
    if fmt == TF32:
        # An F32 container: the low 13 bits are dropped before the value is classified.
        word = (word >> 13) & 0x7FFFF
    fraction = word & ((1 << fraction_bits) - 1)
    exponent = (word >> fraction_bits) & ((1 << exponent_bits) - 1)
    negative = (word >> (fraction_bits + exponent_bits)) & 1
    if fmt == E4M3:
        if exponent == 15 and fraction == 7:
            return np.int64(0), np.int64(0), _NAN
    elif (fmt <= TF32 or fmt == E5M2) and exponent == (1 << exponent_bits) - 1:
        if fraction != 0:
            return np.int64(0), np.int64(0), _NAN
        return np.int64(-1 if negative else 1), np.int64(0), _INFINITE
    if exponent == 0:
        mantissa = fraction
        raw = 1 - bias
    else:
        mantissa = fraction | (1 << fraction_bits)
        raw = exponent - bias
    if mantissa == 0:
        raw = np.int64(_ABSENT)
    return (-mantissa if negative else mantissa), raw, _FINITE


@compiled
def _decode_scale(byte, scale_format):
    """(mantissa, value exponent, raw exponent, is NaN) of one scale byte; bit 7 of UE4M3 is not looked at."""
    if scale_format == UE8M0:
        return np.int64(1), np.int64(byte) - 127, np.int64(byte) - 127, byte == 0xFF
    bits = np.int64(byte) & 0x7F
    exponent = bits >> 3
    fraction = bits & 7
    raw = max(exponent, 1) - 7
    mantissa = fraction if exponent == 0 else fraction | 8
    return mantissa, raw - 3, raw, bits == 0x7F


@compiled
def _shift_toward_zero(value, left):
    """value * 2**left with the discarded magnitude bits dropped."""
    if value == 0:
        return value
    if left >= 0:
        return value << left
    right = min(-left, 63)
    return -((-value) >> right) if value < 0 else value >> right


@compiled
def _bit_length(value):
    length = 0
    while value >= (1 << 16):
        value >>= 16
        length += 16
    while value:
        value >>= 1
        length += 1
    return length


@compiled
def _to_f32_toward_zero(units, exponent):
    """The F32 word of units * 2**exponent, rounded toward zero; zero is +0 and overflow is infinity."""
    if units == 0:
        return np.uint32(0)
    sign = np.uint32(0x80000000) if units < 0 else np.uint32(0)
    magnitude = -units if units < 0 else units
    top = _bit_length(magnitude) - 1 + exponent
    if top > 127:
        return sign | np.uint32(0x7F800000)
    if top >= -126:
        significand = _shift_toward_zero(magnitude, exponent - top + 23)
        return sign | np.uint32((top + 127) << 23) | np.uint32(significand & 0x7FFFFF)
    significand = _shift_toward_zero(magnitude, exponent + 149)
    if significand == 0:
        return np.uint32(0)
    return sign | np.uint32(significand)


@compiled
def _to_f16_nearest_even(units, exponent):
    """The F16 word of units * 2**exponent, rounded to nearest even."""
    if units == 0:
        return np.uint32(0)
    sign = np.uint32(0x8000) if units < 0 else np.uint32(0)
    magnitude = -units if units < 0 else units
    top = _bit_length(magnitude) - 1 + exponent
    if top > 15:
        return sign | np.uint32(0x7C00)
    # One ulp of the result: 2**(top - 10) for normal numbers, 2**-24 below them.
    right = max(top - 10, -24) - exponent
    if right <= 0:
        significand = magnitude << -right
    elif right > 62:
        significand = np.int64(0)
    else:
        significand = magnitude >> right
        rest = magnitude & ((np.int64(1) << right) - 1)
        half = np.int64(1) << (right - 1)
        if rest > half or (rest == half and significand & 1):
            significand += 1
    if significand == 0:
        return np.uint32(0)
    # A carry out of the fraction moves into the exponent field by itself, up to infinity.
    if top >= -14:
        return sign | np.uint32(((top + 14) << 10) + significand)
    return sign | np.uint32(significand)


@compiled
def _round(units, exponent, d_format):
    if d_format == D_F16:
        return _to_f16_nearest_even(units, exponent)
    return _to_f32_toward_zero(units, exponent)


@compiled
def _special_word(kind, negative, d_format):
    if kind == _NAN:
        return np.uint32(0x7FFF) if d_format == D_F16 else np.uint32(0x7FFFFFFF)
    if d_format == D_F16:
        return np.uint32(0xFC00) if negative else np.uint32(0x7C00)
    return np.uint32(0xFF800000) if negative else np.uint32(0x7F800000)


@compiled
def _decode_c(word, d_format):
    """(signed mantissa, raw exponent, fraction bits, class) of the accumulator."""
    if d_format == D_F16:
        mantissa, raw, kind = _decode(word & 0xFFFF, F16)
        return mantissa, raw, 10, kind
    word = np.int64(word)
    fraction = word & 0x7FFFFF
    exponent = (word >> 23) & 0xFF
    negative = word >> 31
    if exponent == 0xFF:
        if fraction:
            return np.int64(0), np.int64(0), 23, _NAN
        return np.int64(-1 if negative else 1), np.int64(0), 23, _INFINITE
    mantissa = fraction if exponent == 0 else fraction | 0x800000
    raw = np.int64(max(exponent, 1) - 127)
    if mantissa == 0:
        raw = np.int64(_ABSENT)
    return (-mantissa if negative else mantissa), raw, 23, _FINITE


@compiled
def _resolve_specials(a_mantissa, a_kind, b_mantissa, b_kind, c_mantissa, c_kind, d_format):
    """The result word of a dot product that holds at least one NaN or infinity."""
    plus = c_kind == _INFINITE and c_mantissa > 0
    minus = c_kind == _INFINITE and c_mantissa < 0
    if c_kind == _NAN:
        return _special_word(_NAN, False, d_format)
    for k in range(a_kind.size):
        if a_kind[k] == _NAN or b_kind[k] == _NAN:
            return _special_word(_NAN, False, d_format)
        if a_kind[k] == _INFINITE or b_kind[k] == _INFINITE:
            if a_mantissa[k] == 0 or b_mantissa[k] == 0:
                return _special_word(_NAN, False, d_format)
            if (a_mantissa[k] < 0) != (b_mantissa[k] < 0):
                minus = True
            else:
                plus = True
    if plus and minus:
        return _special_word(_NAN, False, d_format)
    return _special_word(_INFINITE, minus, d_format)


@compiled
def _decode_matrix(words, fmt, negate, scales, scaled):
    """Mantissas, raw exponents, classes of a [rows, K] matrix, and for each row whether a special is in it.
    """
    rows, depth = words.shape
    mantissa = np.empty((rows, depth), np.int32)
    raw = np.empty((rows, depth), np.int32)
    kind = np.empty((rows, depth), np.uint8)
    special = np.zeros(rows, np.bool_)
    for row in range(rows):
        shift = np.int64(0)
        scale_is_nan = False
        if scaled:
            _, _, shift, scale_is_nan = _decode_scale(scales[row], UE8M0)
        for k in range(depth):
            m, r, c = _decode(words[row, k], fmt)
            if scale_is_nan:
                # A NaN scale spoils the output even where all its data are zero.
                c = _NAN
            mantissa[row, k] = -m if negate else m
            raw[row, k] = r + shift
            kind[row, k] = c
            special[row] |= c != _FINITE
    return mantissa, raw, kind, special


@compiled
def _add_products(a_mantissa, a_raw, b_mantissa, b_raw, top, spare, units):
    """Add the products of one row of A with all columns, each cut to its column's window; b_* are [K, N].

    A product sits ``top - raw`` below the window's top and has ``spare`` bits of room, so its magnitude moves
    right by the first less the second.
    """
    for k in range(a_mantissa.size):
        am = np.int64(a_mantissa[k])
        if am == 0:
            continue
        ar = a_raw[k]
        for column in range(top.size):
            product = am * np.int64(b_mantissa[k, column])
            down = np.int64(top[column] - ar - b_raw[k, column])
            magnitude = (abs(product) << spare) >> min(down, 63)
            units[column] += -magnitude if product < 0 else magnitude


@compiled
def _mma_window(a, b, c, a_format, b_format, negate_a, negate_b, scale_a, scale_b, scaled, d_format, window,
                step):
    rows, depth = a.shape
    columns = b.shape[0]
    a_mantissa, a_raw, a_kind, a_special = _decode_matrix(a, a_format, negate_a, scale_a, scaled)
    b_mantissa, b_raw, b_kind, b_special = _decode_matrix(b, b_format, negate_b, scale_b, scaled)
    # The columns run innermost, so that the compiler makes vectors of them.
    bt_mantissa = b_mantissa.T.copy()
    bt_raw = b_raw.T.copy()
    product_fraction = _LAYOUT[a_format, 0] + _LAYOUT[b_format, 0]
    narrow = max(product_fraction - window, 0)
    spare = max(window - product_fraction, 0)
    out = c.copy()
    top = np.empty(columns, np.int32)
    units = np.empty(columns, np.int64)
    for start in range(0, depth, step):
        stop = min(start + step, depth)
        for row in range(rows):
            for column in range(columns):
                c_mantissa, c_raw, c_fraction, c_kind = _decode_c(out[row, column], d_format)
                top[column] = c_raw
            for k in range(start, stop):
                ar = a_raw[row, k]
                if a_mantissa[row, k] != 0:
                    for column in range(columns):
                        top[column] = max(top[column], ar + bt_raw[k, column])
            for column in range(columns):
                c_mantissa, c_raw, c_fraction, c_kind = _decode_c(out[row, column], d_format)
                units[column] = _shift_toward_zero(c_mantissa, c_raw - c_fraction - (top[column] - window))
            # Where the window is narrower than a product, the cut reaches into the product itself.
            for column in range(columns):
                top[column] += narrow
            _add_products(a_mantissa[row, start:stop], a_raw[row, start:stop], bt_mantissa[start:stop],
                          bt_raw[start:stop], top, spare, units)
            for column in range(columns):
                top[column] -= narrow
            for column in range(columns):
                c_mantissa, c_raw, c_fraction, c_kind = _decode_c(out[row, column], d_format)
                special = c_kind != _FINITE
                if a_special[row] or b_special[column]:
                    for k in range(start, stop):
                        special |= a_kind[row, k] != _FINITE or b_kind[column, k] != _FINITE
                if special:
                    out[row, column] = _resolve_specials(
                        a_mantissa[row, start:stop], a_kind[row, start:stop],
                        b_mantissa[column, start:stop], b_kind[column, start:stop],
                        c_mantissa, c_kind, d_format,
                    )
                elif units[column] == 0:
                    out[row, column] = 0
                else:
                    out[row, column] = _round(units[column], np.int64(top[column]) - window, d_format)
    return out


_NO_SCALES = np.zeros(0, np.uint8)


def mma_float(a, b, c, a_format, b_format, *, negate_a=False, negate_b=False, scale_a=None, scale_b=None,
              d_format=D_F32, window=WINDOW, step=None, kept_bits=23):
    """D = A B^T + C as the tensor core computes it, for f16, bf16, tf32, f8f6f4 and mxf8f6f4.

    Args:
        a: uint32 [M, K] raw operand words, one element a word (tf32: the F32 container).
        b: uint32 [N, K], likewise.
        c: uint32 [M, N] accumulator words (low 16 bits for ``D_F16``); pass zeros where D = A B.
        a_format, b_format: one of the format numbers of this module up to ``E2M1``.
        negate_a, negate_b: flip the sign of an operand.
        scale_a, scale_b: uint8 [M] and [N] UE8M0 bytes of kind::mxf8f6f4, one for the whole K; both or
            neither.
        d_format: ``D_F32`` (rounded toward zero) or ``D_F16`` (rounded to nearest even).
        window: bits kept below the largest raw exponent.
        step: K elements of one addition; more than that are added one step after the other, each rounded.
        kept_bits: fraction bits of an F32 result that survive (8-bit floats of wgmma keep
            ``WGMMA_FP8_BITS``).

    Returns:
        uint32 [M, N] result words.
    """
    a, b, c = (np.ascontiguousarray(x, dtype=np.uint32) for x in (a, b, c))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or c.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"A {a.shape}, B {b.shape} and C {c.shape} must be [M, K], [N, K] and [M, N]")
    if (scale_a is None) != (scale_b is None):
        raise ValueError("scale_a and scale_b come together")
    scaled = scale_a is not None
    sa = np.ascontiguousarray(scale_a, dtype=np.uint8) if scaled else _NO_SCALES
    sb = np.ascontiguousarray(scale_b, dtype=np.uint8) if scaled else _NO_SCALES
    if scaled and (sa.shape != (a.shape[0],) or sb.shape != (b.shape[0],)):
        raise ValueError(f"scales {sa.shape}, {sb.shape} must be [{a.shape[0]}] and [{b.shape[0]}]")
    out = _mma_window(a, b, c, a_format, b_format, bool(negate_a), bool(negate_b), sa, sb, scaled, d_format,
                      window, step or a.shape[1])
    if kept_bits < 23:
        number = out & np.uint32(0x7F800000) != np.uint32(0x7F800000)
        out = np.where(number, out & np.uint32(0x100000000 - (1 << (23 - kept_bits))), out)
    return out


# E2M1 code -> twice its value, and its raw exponent.
_E2M1_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
_NO_PRODUCT = np.int16(-1000)
_E2M1_RAW = np.array([_NO_PRODUCT, 0, 0, 0, 1, 1, 2, 2] * 2, np.int16)

# A group whose magnitude stays below this power of two vanishes from a subnormal result (UE8M0 scales).
_SUBNORMAL_GROUP_FLOOR = -174


@compiled
def _expand_e2m1(codes, negate):
    rows, depth = codes.shape
    halves = np.empty((rows, depth), np.int16)
    raw = np.empty((rows, depth), np.int16)
    for row in range(rows):
        for k in range(depth):
            code = codes[row, k] & 15
            halves[row, k] = -_E2M1_HALVES[code] if negate else _E2M1_HALVES[code]
            raw[row, k] = _E2M1_RAW[code]
    return halves, raw


@compiled
def _expand_scales(scales, scale_format):
    rows, blocks = scales.shape
    mantissa = np.empty((rows, blocks), np.int64)
    exponent = np.empty((rows, blocks), np.int64)
    raw = np.empty((rows, blocks), np.int64)
    spoiled = np.zeros(rows, np.bool_)
    for row in range(rows):
        for s in range(blocks):
            m, e, r, n = _decode_scale(scales[row, s], scale_format)
            mantissa[row, s] = m
            exponent[row, s] = e
            raw[row, s] = r
            spoiled[row] |= n
    return mantissa, exponent, raw, spoiled


@compiled
def _group_products(a_halves, a_raw, bt_halves, bt_raw, sums, tops):
    """For one row: the exact sum (in quarters) of each K=4 group, and the largest raw exponent of each K=16
    group.
    """
    depth, columns = bt_halves.shape
    sums[:] = 0
    tops[:] = _NO_PRODUCT
    for k in range(depth):
        value, raw = a_halves[k], a_raw[k]
        if value == 0:
            continue
        group_sum, group_top = sums[k // 4], tops[k // 16]
        halves, raws = bt_halves[k], bt_raw[k]
        for column in range(columns):
            group_sum[column] += np.int16(value * halves[column])
            group_top[column] = max(group_top[column], np.int16(raw + raws[column]))


@compiled
def _fp4_element(c_word, sums, tops, mantissas, exponents, scale_raws, scale_format, units16):
    """One output word of an FP4 product.

    sums: per K=4 group in quarters; tops: largest raw exponent per K=16 group, without scales; mantissas,
    exponents, scale_raws: the product of both scales per K=16 group.
    """
    merges = tops.size
    product_top = np.int64(_ABSENT)
    scale_top = np.int64(_ABSENT)
    for m in range(merges):
        if tops[m] >= 0 and mantissas[m] != 0:
            product_top = max(product_top, tops[m] + scale_raws[m])
            scale_top = max(scale_top, scale_raws[m])
    c_mantissa, c_raw, c_fraction, c_kind = _decode_c(c_word, D_F32)
    if c_kind == _NAN:
        return _special_word(_NAN, False, D_F32)
    if c_kind == _INFINITE:
        return c_word
    if product_top == _ABSENT:
        return np.uint32(0) if c_mantissa == 0 else c_word
    dominant = c_mantissa != 0 and c_raw >= product_top
    if dominant:
        quantum = c_raw - 35
    else:
        quantum = max(max(product_top, c_raw) - 39, scale_top - 35)
    c_units = _shift_toward_zero(c_mantissa, c_raw - c_fraction - quantum)
    units = c_units
    if scale_format == UE4M3 and not dominant:
        for g in range(4 * merges):
            m = g >> 2
            units += _shift_toward_zero(sums[g] * mantissas[m], exponents[m] - quantum)
        return _to_f32_toward_zero(units, quantum)
    for m in range(merges):
        total = np.int64(sums[4 * m]) + sums[4 * m + 1] + sums[4 * m + 2] + sums[4 * m + 3]
        cut = quantum
        # A group that C outranks loses its bits below C's own window first.
        if (scale_format == UE8M0 and not dominant and c_mantissa != 0 and tops[m] >= 0
                and c_raw >= tops[m] + scale_raws[m]):
            cut = max(quantum, c_raw - 35)
        units16[m] = _shift_toward_zero(total * mantissas[m], exponents[m] - cut) << (cut - quantum)
        units += units16[m]
    word = _to_f32_toward_zero(units, quantum)
    if scale_format == UE8M0 and not dominant and 0 < word & np.uint32(0x7FFFFFFF) < 0x800000:
        floor = np.int64(1) << max(_SUBNORMAL_GROUP_FLOOR - quantum, 0)
        units = c_units
        for m in range(merges):
            if tops[m] >= 0 and scale_raws[m] < scale_top and abs(units16[m]) < floor:
                continue
            units += units16[m]
        word = _to_f32_toward_zero(units, quantum)
    return word


@compiled
def _mma_fp4(a, b, c, scale_a, scale_b, scale_format, negate_a, negate_b, out):
    rows, depth = a.shape
    columns = b.shape[0]
    merges = depth // 16
    merges_per_block = merges // scale_a.shape[1]
    a_halves, a_raw = _expand_e2m1(a, negate_a)
    b_halves, b_raw = _expand_e2m1(b, negate_b)
    bt_halves, bt_raw = b_halves.T.copy(), b_raw.T.copy()
    a_mantissa, a_exponent, a_scale_raw, a_spoiled = _expand_scales(scale_a, scale_format)
    b_mantissa, b_exponent, b_scale_raw, b_spoiled = _expand_scales(scale_b, scale_format)
    sums = np.empty((depth // 4, columns), np.int16)
    tops = np.empty((merges, columns), np.int16)
    element_sums = np.empty(depth // 4, np.int64)
    element_tops = np.empty(merges, np.int64)
    mantissas = np.empty(merges, np.int64)
    exponents = np.empty(merges, np.int64)
    scale_raws = np.empty(merges, np.int64)
    units16 = np.empty(merges, np.int64)
    for row in range(rows):
        _group_products(a_halves[row], a_raw[row], bt_halves, bt_raw, sums, tops)
        for column in range(columns):
            if a_spoiled[row] or b_spoiled[column]:
                out[row, column] = _special_word(_NAN, False, D_F32)
                continue
            for g in range(4 * merges):
                element_sums[g] = sums[g, column]
            for m in range(merges):
                s = m // merges_per_block
                element_tops[m] = tops[m, column]
                mantissas[m] = a_mantissa[row, s] * b_mantissa[column, s]
                exponents[m] = a_exponent[row, s] + b_exponent[column, s] - 2
                scale_raws[m] = a_scale_raw[row, s] + b_scale_raw[column, s]
            out[row, column] = _fp4_element(c[row, column], element_sums, element_tops, mantissas, exponents,
                                            scale_raws, scale_format, units16)


def mma_fp4(a, b, c, scale_a, scale_b, scale_format, *, negate_a=False, negate_b=False):
    """D = (A * SFA) (B * SFB)^T + C for kind::mxf4 and kind::mxf4nvf4.

    Args:
        a: uint8 [M, K] E2M1 codes, one a byte (low four bits); K is a multiple of 16 (64 for one
            instruction).
        b: uint8 [N, K], likewise.
        c: uint32 [M, N] F32 words; zeros where D = A B.
        scale_a: uint8 [M, K / block] scale bytes, block 16 or 32.
        scale_b: uint8 [N, K / block].
        scale_format: ``UE8M0`` or ``UE4M3``.

    Returns:
        uint32 [M, N] F32 words, rounded toward zero.
    """
    a, b, scale_a, scale_b = (np.ascontiguousarray(x, dtype=np.uint8) for x in (a, b, scale_a, scale_b))
    c = np.ascontiguousarray(c, dtype=np.uint32)
    if a.shape[1] != b.shape[1] or c.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"A {a.shape}, B {b.shape} and C {c.shape} must be [M, K], [N, K] and [M, N]")
    blocks = scale_a.shape[1]
    fits = blocks > 0 and a.shape[1] % blocks == 0 and a.shape[1] // blocks in (16, 32)
    if scale_b.shape[1] != blocks or not fits:
        raise ValueError(f"scales {scale_a.shape} and {scale_b.shape} must hold one byte for 16 or 32 of "
                         f"K={a.shape[1]}")
    out = np.empty(c.shape, np.uint32)
    _mma_fp4(a, b, c, scale_a, scale_b, scale_format, bool(negate_a), bool(negate_b), out)
    return out


@compiled
def _mma_integer(a, b, c, saturate, out):
    rows, depth = a.shape
    for row in range(rows):
        for column in range(b.shape[0]):
            total = np.int64(c[row, column])
            for k in range(depth):
                total += np.int64(a[row, k]) * np.int64(b[column, k])
            if saturate:
                total = min(max(total, np.int64(-0x80000000)), np.int64(0x7FFFFFFF))
            out[row, column] = np.uint32(total & 0xFFFFFFFF)


def mma_integer(a, b, c, *, saturate=False):
    """D = A B^T + C in exact integers, modulo 2**32 or clamped once at the end.

    Args:
        a, b: int32 [M, K] and [N, K], already sign- or zero-extended.
        c: uint32 [M, N] words of S32.

    Returns:
        uint32 [M, N] words of S32.
    """
    a, b = (np.ascontiguousarray(x, dtype=np.int32) for x in (a, b))
    c = np.ascontiguousarray(c, dtype=np.uint32).view(np.int32)
    out = np.empty(c.shape, np.uint32)
    _mma_integer(a, b, c, bool(saturate), out)
    return out

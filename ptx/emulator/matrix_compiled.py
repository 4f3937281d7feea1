"""mma.sync as one compiled function over the register file.

``encode_mma`` turns the modifiers of an instruction into an int64 vector at decode time: a header and the
index maps of ``register_layouts``.  ``run_matrix`` unpacks the fragments with them, multiplies, and packs the
result.

Arithmetic (docs/emulator.md has the measurements): f16, bf16 and tf32 add the whole K of one instruction in
one 25-bit window; 8-bit floats of mma.sync are converted to f16 on sm_90 and multiplied in two halves with a
zero accumulator (the first two elements of every four, then the other two), and C is added by an ordinary
rounded addition.  An H200 agrees to the last bit.  For sm_80 the literature
(https://arxiv.org/abs/2512.07004) gives one bit less and smaller steps; the emulator uses the sm_90
arithmetic for every target.
"""

from __future__ import annotations

import re

import numpy as np

from . import register_layouts as layouts
from .jit import compiled
from .matrix_narrow import multiply_narrow
from .tensor_core import (BF16, D_F16, D_F32, E2M1, E2M3, E3M2, E4M3, E5M2, F16, S8, TF32, U8, WINDOW,
                          _mma_window)

_FLOATS = {"f16": (F16, 16), "bf16": (BF16, 16), "tf32": (TF32, 32), "e4m3": (E4M3, 8), "e5m2": (E5M2, 8),
           "e2m3": (E2M3, 8), "e3m2": (E3M2, 8), "e2m1": (E2M1, 8)}
_INTEGERS = {"u8": (U8, 8), "s8": (S8, 8), "u4": (U8, 4), "s4": (S8, 4)}
_SHAPES = {
    16: ("m16n8k8", "m16n8k16"), 32: ("m16n8k4", "m16n8k8"), 8: ("m16n8k16", "m16n8k32", "m8n8k16"),
    4: ("m16n8k32", "m16n8k64", "m8n8k32"), 64: ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
}
_D_S32, _D_F64 = 2, 3

#: Kinds of multiplication in the header.
FLOAT, HALVED, INTEGER, DOUBLE = range(4)
# Header slots.
H_KIND, H_M, H_N, H_K, H_A, H_B, H_D, H_SATURATE, H_BITS, H_NA, H_NB, H_NC, H_ND, H_SIZE = range(14)


def encode_mma(modifiers):
    """The attribute vector of an ``mma.sync`` instruction.

    Args:
        modifiers: the dotted words after ``mma``, in the order of the text.

    Returns:
        int64 vector for ``run_matrix``.

    Raises:
        ValueError: a form this emulator does not execute, with the reason.
    """
    words = [w for w in modifiers if w not in ("sync", "aligned")]
    shape = next((w for w in words if re.fullmatch(r"m\d+n\d+k\d+", w)), None)
    if shape is None:
        raise ValueError(f"mma.{'.'.join(modifiers)}: no shape")
    for word in words:
        if word in ("sp", "block_scale") or word.startswith(("sp::", "scale_vec", "xor", "and", "b1")):
            raise ValueError(f"mma.{'.'.join(modifiers)}: .{word} is not modelled")
    types = [w for w in words if w in _FLOATS or w in _INTEGERS or w in ("f32", "f64", "s32")]
    if len(types) != 4:
        raise ValueError(f"mma.{'.'.join(modifiers)}: four types are needed, found {types}")
    if "row" not in words or "col" not in words:
        raise ValueError(f"mma.{'.'.join(modifiers)}: only row-major A and column-major B exist for {shape}")
    d, a, b, c = types
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    if a == "f64":
        kind, a_format, b_format, bits, d_format = DOUBLE, 0, 0, 64, _D_F64
    elif a in _INTEGERS:
        a_format, bits = _INTEGERS[a]
        b_format = _INTEGERS.get(b, (None, 0))[0]
        kind, d_format = INTEGER, _D_S32
    else:
        a_format, bits = _FLOATS[a]
        b_format = _FLOATS.get(b, (None, 0))[0]
        native = any(w.startswith("kind::") for w in words)
        kind = HALVED if bits == 8 and not native else FLOAT
        d_format = D_F16 if d == "f16" else D_F32
    half_too = a in ("f16", "e4m3", "e5m2")
    accumulators = {INTEGER: ("s32",), DOUBLE: ("f64",)}.get(kind, ("f32", "f16") if half_too else ("f32",))
    if b_format is None or d != c or d not in accumulators or shape not in _SHAPES[bits]:
        raise ValueError(f"mma.{'.'.join(modifiers)}: {shape} with types {'.'.join(types)} does not exist or "
                         f"is not "
                         "modelled")
    d_bits = 16 if d_format == D_F16 and kind in (FLOAT, HALVED) else 32
    a_map, b_map = layouts.operand_a(m, k, bits), layouts.operand_b(n, k, bits)
    d_map = layouts.accumulator(m, n, d_bits)
    maps = [a_map[0] * k + a_map[1], b_map[0] * k + b_map[1], d_map[0] * n + d_map[1]]
    header = np.zeros(H_SIZE, np.int64)
    header[[H_KIND, H_M, H_N, H_K, H_A, H_B, H_D]] = kind, m, n, k, a_format, b_format, d_format
    header[[H_SATURATE, H_BITS]] = "satfinite" in words, bits
    header[[H_NA, H_NB, H_NC, H_ND]] = (len(a_map[0]), len(b_map[0]), len(d_map[0]), len(d_map[0]))
    return np.concatenate([header, *(x.ravel() for x in maps)]).astype(np.int64)


def register_counts(attributes):
    """Registers of the D, A, B and C operands."""
    return tuple(int(attributes[i]) for i in (H_ND, H_NA, H_NB, H_NC))


@compiled
def _unpack(F, rows, first, count, bits, index, out):
    """Spread packed registers over a flat matrix: element j of register r of a lane goes to index[r, lane,
    j].
    """
    per = 32 // bits
    mask = np.uint64((1 << bits) - 1)
    at = 0
    for r in range(count):
        row = rows[first + r]
        for lane in range(32):
            word = F[row, lane]
            for j in range(per):
                out[index[at]] = np.uint32((word >> np.uint64(j * bits)) & mask)
                at += 1


@compiled
def _pack(F, rows, first, count, bits, index, values):
    per = 32 // bits
    at = 0
    for r in range(count):
        row = rows[first + r]
        for lane in range(32):
            word = np.uint64(0)
            for j in range(per):
                word |= np.uint64(values[index[at]]) << np.uint64(j * bits)
                at += 1
            F[row, lane] = word


@compiled
def _extend(words, bits, is_signed):
    out = np.empty(words.shape, np.int32)
    flat, source = out.ravel(), words.ravel()
    for i in range(source.size):
        value = np.int64(source[i])
        if is_signed and value >> (bits - 1):
            value -= 1 << bits
        flat[i] = value
    return flat.reshape(words.shape)


@compiled
def _half_to_float(word):
    sign = (word >> 15) & 1
    exponent = (word >> 10) & 31
    fraction = word & 1023
    if exponent == 31:
        value = np.float32(np.nan) if fraction else np.float32(np.inf)
    elif exponent == 0:
        value = np.float32(fraction) * np.float32(2.0 ** -24)
    else:
        value = np.float32(fraction | 1024) * np.float32(2.0 ** (np.float64(exponent) - 25))
    return -value if sign else value


@compiled
def _float_to_half(value):
    """Nearest-even F16 word; exact for the sum of two F16 values, which F32 holds without rounding twice."""
    if np.isnan(value):
        return np.uint32(0x7FFF)
    negative = np.signbit(value)
    magnitude = np.float64(abs(value))
    if magnitude >= 65520.0:
        return np.uint32(0xFC00 if negative else 0x7C00)
    exponent = -14
    while magnitude >= 2.0 ** (exponent + 1):
        exponent += 1
    scaled = magnitude / 2.0 ** (exponent - 10)
    whole = np.int64(np.floor(scaled))
    rest = scaled - whole
    if rest > 0.5 or (rest == 0.5 and whole & 1):
        whole += 1
    word = whole if exponent == -14 and whole < 1024 else ((exponent + 14) << 10) + whole
    return np.uint32(word | (0x8000 if negative else 0))


@compiled
def _add_c(product, c, d_format):
    """product + c with one rounding to nearest even, element by element."""
    for row in range(product.shape[0]):
        for column in range(product.shape[1]):
            if d_format == D_F16:
                total = _half_to_float(np.int64(product[row, column]))
                total += _half_to_float(np.int64(c[row, column]))
                product[row, column] = _float_to_half(total)
            else:
                pair = np.empty(2, np.uint32)
                pair[0] = product[row, column]
                pair[1] = c[row, column]
                numbers = pair.view(np.float32)
                numbers[0] = numbers[0] + numbers[1]
                product[row, column] = np.uint32(0x7FFFFFFF) if np.isnan(numbers[0]) else pair[0]
    return product


@compiled
def _run_double(F, rows, attributes):
    """f64: products are added in the order of k by fused multiply-add, whose rounding is that of the host."""
    m, n, k = attributes[H_M], attributes[H_N], attributes[H_K]
    nd, na, nb = attributes[H_ND], attributes[H_NA], attributes[H_NB]
    words = np.empty(1, np.uint64)
    a, b, d = np.empty(m * k), np.empty(n * k), np.empty(m * n)
    a_at, b_at = H_SIZE, H_SIZE + na * 32
    d_at = b_at + nb * 32
    for r in range(na):
        for lane in range(32):
            words[0] = F[rows[nd + r], lane]
            a[attributes[a_at + r * 32 + lane]] = words.view(np.float64)[0]
    for r in range(nb):
        for lane in range(32):
            words[0] = F[rows[nd + na + r], lane]
            b[attributes[b_at + r * 32 + lane]] = words.view(np.float64)[0]
    for r in range(nd):
        for lane in range(32):
            words[0] = F[rows[nd + na + nb + r], lane]
            d[attributes[d_at + r * 32 + lane]] = words.view(np.float64)[0]
    for row in range(m):
        for column in range(n):
            total = d[row * n + column]
            for i in range(k):
                total = _fused(a[row * k + i], b[column * k + i], total)
            d[row * n + column] = total
    for r in range(nd):
        for lane in range(32):
            word = np.empty(1, np.float64)
            word[0] = d[attributes[d_at + r * 32 + lane]]
            F[rows[r], lane] = word.view(np.uint64)[0]


@compiled
def _two_sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@compiled
def _fused(a, b, c):
    """a * b + c with one rounding (Dekker product, then round-to-odd of the low parts), for moderate
    exponents.
    """
    p = a * b
    split = 134217729.0
    ah = split * a
    ah = ah - (ah - a)
    al = a - ah
    bh = split * b
    bh = bh - (bh - b)
    bl = b - bh
    e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    if not np.isfinite(e):
        return p + c
    high, low = _two_sum(p, c)
    low, tail = _two_sum(low, e)
    if tail != 0.0:
        # Make the last bit of the low part odd, so that the final addition rounds as the exact sum would.
        word = np.empty(1, np.float64)
        word[0] = low
        bits = word.view(np.int64)
        if bits[0] & 1 == 0:
            if (tail > 0.0) == (low > 0.0):
                bits[0] += 1
            else:
                bits[0] -= 1
            low = word[0]
    return high + low


@compiled
def run_matrix(code, F, codes, base, attributes):
    """Execute one mma.sync with all lanes active.

    Args:
        code: not looked at (one instruction so far).
        F: uint64 [register rows, 32 lanes], the register file.
        codes: int64, row codes of the D, A, B and C registers in this order (negative: constant row
            ``~code``).
        base: first row of the present frame.
        attributes: the vector of ``encode_mma``.
    """
    kind = attributes[H_KIND]
    rows = np.empty(codes.size, np.int64)
    for i in range(codes.size):
        rows[i] = codes[i] + base if codes[i] >= 0 else ~codes[i]
    if kind == DOUBLE:
        _run_double(F, rows, attributes)
        return 0
    m, n, k, bits = attributes[H_M], attributes[H_N], attributes[H_K], attributes[H_BITS]
    nd, na, nb = attributes[H_ND], attributes[H_NA], attributes[H_NB]
    d_format = attributes[H_D]
    d_bits = 16 if d_format == D_F16 and kind != INTEGER else 32
    a_size, b_size = na * 32 * (32 // bits), nb * 32 * (32 // bits)
    a_index = attributes[H_SIZE:H_SIZE + a_size]
    b_index = attributes[H_SIZE + a_size:H_SIZE + a_size + b_size]
    d_index = attributes[H_SIZE + a_size + b_size:]
    a = np.empty(m * k, np.uint32)
    b = np.empty(n * k, np.uint32)
    c = np.empty(m * n, np.uint32)
    _unpack(F, rows, nd, na, bits, a_index, a)
    _unpack(F, rows, nd + na, nb, bits, b_index, b)
    _unpack(F, rows, nd + na + nb, nd, d_bits, d_index, c)
    a2, b2, c2 = a.reshape(m, k), b.reshape(n, k), c.reshape(m, n)
    scales = np.zeros(0, np.uint8)
    if kind == INTEGER:
        ai = _extend(a2, bits, attributes[H_A] == S8)
        bi = _extend(b2, bits, attributes[H_B] == S8)
        for row in range(m):
            for column in range(n):
                total = np.int64(np.int32(c2[row, column]))
                for i in range(k):
                    total += np.int64(ai[row, i]) * np.int64(bi[column, i])
                if attributes[H_SATURATE]:
                    total = min(max(total, np.int64(-0x80000000)), np.int64(0x7FFFFFFF))
                c2[row, column] = np.uint32(total & 0xFFFFFFFF)
    elif kind == HALVED:
        ah, bh = np.empty_like(a2), np.empty_like(b2)
        for i in range(k):
            # Elements 0 and 1 of every four come first, then 2 and 3.
            to = (i // 4) * 2 + i % 2 + (k // 2 if i % 4 >= 2 else 0)
            ah[:, to] = a2[:, i]
            bh[:, to] = b2[:, i]
        product = _mma_window(ah, bh, np.zeros((m, n), np.uint32), attributes[H_A], attributes[H_B], False,
                              False, scales, scales, False, d_format, WINDOW, k // 2)
        c2 = _add_c(product, c2, d_format)
    elif bits >= 16 and n == 8 and k <= 16 and multiply_narrow(a, b, c, m, k, attributes[H_A], d_format):
        pass
    else:
        if bits == 8:
            # FP4 sits in bits 5:2 of its byte, FP6 in bits 5:0.
            for row in range(m):
                for i in range(k):
                    a2[row, i] = a2[row, i] >> (2 if attributes[H_A] == E2M1 else 0)
            for column in range(n):
                for i in range(k):
                    b2[column, i] = b2[column, i] >> (2 if attributes[H_B] == E2M1 else 0)
        c2 = _mma_window(a2, b2, c2, attributes[H_A], attributes[H_B], False, False, scales, scales, False,
                         d_format, WINDOW, k)
    _pack(F, rows, 0, nd, d_bits, d_index, c2.ravel())
    return 0

"""Tensor-core arithmetic against words captured on hardware, and against a slow exact model."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from msa_cudacore.ptx.emulator import tensor_core as tc

WORDS = json.loads((Path(__file__).parent / "data" / "b200_mma_words.json").read_text())["words"]


def evaluate(word):
    """The result of one recorded dot product, computed at M = N = 1."""
    a = np.array([word["a"]], np.uint32)
    b = np.array([word["b"]], np.uint32)
    c = np.array([[word["c"]]], np.uint32)
    kind = word["kind"]
    if kind == "i8":
        widen = {"u8": np.uint8, "s8": np.int8}
        a, b = (
            x.astype(np.uint8).view(widen[f]).astype(np.int32)
            for x, f in ((a, word["a_format"]), (b, word["b_format"]))
        )
        return int(tc.mma_integer(a, b, c, saturate=word["saturate"])[0, 0])
    if kind in ("mxf4", "mxf4nvf4"):
        sa, sb = (np.array([word[s]], np.uint8) for s in ("scale_a", "scale_b"))
        scale_format = {"ue8m0": tc.UE8M0, "ue4m3": tc.UE4M3}[word["scale_type"]]
        return int(tc.mma_fp4(a.astype(np.uint8), b.astype(np.uint8), c, sa, sb, scale_format)[0, 0])
    formats = [tc.FORMAT_NAMES.index(word[f]) for f in ("a_format", "b_format")]
    if word["a_format"] == "bf16":
        # The recording keeps BF16 in F32 containers; shared memory holds the high half.
        a, b = a >> 16, b >> 16
    scales = {}
    if kind == "mxf8f6f4":
        scales = {s: np.array(word[s], np.uint8) for s in ("scale_a", "scale_b")}
    d_format = {"f32": tc.D_F32, "f16": tc.D_F16}[word["d"]]
    return int(tc.mma_float(a, b, c, *formats, d_format=d_format, **scales)[0, 0])


@pytest.mark.parametrize("word", WORDS, ids=[w["name"] for w in WORDS])
def test_recorded_word_is_reproduced_to_the_last_bit(word):
    assert hex(evaluate(word)) == hex(word["result"])


FLOATS = {
    tc.F16: np.float16,
    tc.BF16: ml_dtypes.bfloat16,
    tc.E4M3: ml_dtypes.float8_e4m3fn,
    tc.E5M2: ml_dtypes.float8_e5m2,
    tc.E2M3: ml_dtypes.float6_e2m3fn,
    tc.E3M2: ml_dtypes.float6_e3m2fn,
    tc.E2M1: ml_dtypes.float4_e2m1fn,
}


def values(words, fmt):
    """float64 values of operand words; every finite operand is exact in float64."""
    if fmt == tc.TF32:
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    store = np.uint16 if tc.FORMAT_BITS[fmt] == 16 else np.uint8
    return words.astype(store).view(FLOATS[fmt]).astype(np.float64)


def raw_exponent(value, least):
    """Encoded exponent of a nonzero value: its binade, but never below that of the subnormals."""
    return max(int(np.floor(np.log2(abs(value)))), least)


LEAST = {
    tc.F16: -14,
    tc.BF16: -126,
    tc.TF32: -126,
    tc.E4M3: -6,
    tc.E5M2: -14,
    tc.E2M3: 0,
    tc.E3M2: -2,
    tc.E2M1: 0,
}


def cut(value: Fraction, quantum: int) -> Fraction:
    """A value truncated toward zero to a multiple of 2**quantum."""
    unit = Fraction(2) ** quantum
    return int(value / unit) * unit


def exact_word(total: Fraction) -> int:
    """F32 word of an exact value, rounded toward zero."""
    if total == 0:
        return 0
    if abs(total) >= Fraction(2) ** 128:
        return 0x7F800000 if total > 0 else 0xFF800000
    near = np.float32(min(abs(float(total)), float(np.finfo(np.float32).max)))
    while Fraction(float(near)) > abs(total):
        near = np.nextafter(near, np.float32(0))
    if near == 0:
        return 0
    return int(near.view(np.uint32)) | (0x80000000 if total < 0 else 0)


def finite_words(rng, fmt, shape):
    bits = tc.FORMAT_BITS[fmt]
    words = rng.integers(0, 1 << bits, shape, dtype=np.uint64).astype(np.uint32)
    if fmt in (tc.BF16, tc.TF32):
        # Moderate exponents, so that many terms meet in one window.
        width = 16 if fmt == tc.BF16 else 32
        exponent = rng.integers(112, 142, shape).astype(np.uint32)
        words = (words & np.uint32(((1 << width) - 1) ^ (0xFF << (width - 9)))) | exponent << np.uint32(
            width - 9
        )
    finite = np.isfinite(values(words, fmt))
    return np.where(finite, words, np.uint32(0))


@pytest.mark.parametrize(
    "a_format, b_format, depth",
    [
        (tc.F16, tc.F16, 16),
        (tc.BF16, tc.BF16, 16),
        (tc.TF32, tc.TF32, 8),
        (tc.E4M3, tc.E5M2, 32),
        (tc.E2M3, tc.E4M3, 32),
        (tc.E3M2, tc.E2M1, 32),
    ],
)
def test_window_arithmetic_agrees_with_exact_fractions(a_format, b_format, depth):
    rng = np.random.default_rng()
    a, b = finite_words(rng, a_format, (5, depth)), finite_words(rng, b_format, (7, depth))
    c = (rng.standard_normal((5, 7)) * 2.0 ** rng.integers(-20, 20, (5, 7))).astype(np.float32)
    got = tc.mma_float(a, b, c.view(np.uint32), a_format, b_format)
    va, vb = values(a, a_format), values(b, b_format)
    for m in range(5):
        for n in range(7):
            tops = [
                raw_exponent(x, LEAST[a_format]) + raw_exponent(y, LEAST[b_format])
                for x, y in zip(va[m], vb[n])
                if x and y
            ] + [raw_exponent(c[m, n], -126)]
            quantum = max(tops) - 25
            total = sum(cut(Fraction(x) * Fraction(y), quantum) for x, y in zip(va[m], vb[n]))
            total += cut(Fraction(float(c[m, n])), quantum)
            assert hex(got[m, n]) == hex(exact_word(total))


def test_negation_flips_the_product_only():
    rng = np.random.default_rng()
    a, b = finite_words(rng, tc.F16, (4, 16)), finite_words(rng, tc.F16, (3, 16))
    c = rng.standard_normal((4, 3)).astype(np.float32).view(np.uint32)
    flipped = tc.mma_float(a ^ np.uint32(0x8000), b, c, tc.F16, tc.F16)
    np.testing.assert_array_equal(tc.mma_float(a, b, c, tc.F16, tc.F16, negate_a=True), flipped)
    np.testing.assert_array_equal(tc.mma_float(a, b, c, tc.F16, tc.F16, negate_b=True), flipped)


def ue4m3(bytes_):
    return (bytes_ & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def test_nvfp4_product_is_exact_where_nothing_is_cut():
    # Scales of one binade and a zero accumulator: 39 bits below the top lose nothing, so only the last
    # rounding acts.
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 16, (n, 64)).astype(np.uint8) for n in (6, 9))
    sa, sb = (rng.integers(0x38, 0x40, (n, 4)).astype(np.uint8) for n in (6, 9))
    got = tc.mma_fp4(a, b, np.zeros((6, 9), np.uint32), sa, sb, tc.UE4M3)
    va = values(a, tc.E2M1) * np.repeat(ue4m3(sa), 16, axis=1)
    vb = values(b, tc.E2M1) * np.repeat(ue4m3(sb), 16, axis=1)
    exact = va @ vb.T
    assert [[hex(exact_word(Fraction(x))) for x in row] for row in exact] == [
        [hex(x) for x in row] for row in got
    ]


def test_nvfp4_keeps_the_accumulator_where_all_products_vanish():
    c = np.array([[0x80000000, 0x00000001, 0xC0490FDB]], np.uint32)
    a, b = np.zeros((1, 64), np.uint8), np.full((3, 64), 7, np.uint8)
    one = np.full((1, 4), 0x38, np.uint8)
    got = tc.mma_fp4(a, b, c, one, np.repeat(one, 3, axis=0), tc.UE4M3)
    assert got.tolist() == [[0, 1, 0xC0490FDB]]


def test_half_precision_result_rounds_to_nearest_even():
    one = np.array([[0x3C00] + [0] * 15], np.uint32)
    for words, expected in (
        ((0x3C00, 0x1000), 0x3C00),
        ((0x3C01, 0x1000), 0x3C02),
        ((0x7BFF, 0x4C00), 0x7C00),
    ):
        got = tc.mma_float(
            one,
            np.array([[words[0]] + [0] * 15], np.uint32),
            np.array([[words[1]]], np.uint32),
            tc.F16,
            tc.F16,
            d_format=tc.D_F16,
        )
        assert hex(got[0, 0]) == hex(expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((np.zeros((2, 16)), np.zeros((2, 8)), np.zeros((2, 2))), r"must be \[M, K\]"),
        ((np.zeros((2, 16)), np.zeros((2, 16)), np.zeros((2, 3))), r"must be \[M, K\]"),
    ],
)
def test_mismatched_shapes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tc.mma_float(*arguments, tc.F16, tc.F16)


def test_scales_of_the_wrong_block_are_refused():
    codes, c = np.zeros((1, 64), np.uint8), np.zeros((1, 1), np.uint32)
    with pytest.raises(ValueError, match="one byte for 16 or 32"):
        tc.mma_fp4(codes, codes, c, np.zeros((1, 8), np.uint8), np.zeros((1, 8), np.uint8), tc.UE8M0)


def slow_fp4(a, b, c_word, sa, sb, scale_format):
    """One FP4 output word by fractions: the rules of docs/emulator_hardware.md written down without any
    shift.
    """
    c = Fraction(float(np.uint32(c_word).view(np.float32)))
    c_raw = max((int(c_word) >> 23 & 255), 1) - 127
    block = 64 // len(sa)

    def scale(byte):
        if scale_format == tc.UE8M0:
            return Fraction(2) ** (int(byte) - 127), int(byte) - 127
        field = int(byte) >> 3 & 15
        value = Fraction(int(byte) & 7 | (8 if field else 0)) * Fraction(2) ** (max(field, 1) - 10)
        return value, max(field, 1) - 7

    halves = [0, 1, 2, 3, 4, 6, 8, 12]
    raws = [0, 0, 0, 0, 1, 1, 2, 2]
    products, product_raws, scale_raws = [], [], []
    for k in range(64):
        x, y = int(a[k]), int(b[k])
        (va, ra), (vb, rb) = scale(sa[k // block]), scale(sb[k // block])
        value = Fraction(halves[x & 7] * halves[y & 7], 4) * va * vb * (-1 if (x ^ y) & 8 else 1)
        products.append(value)
        product_raws.append(raws[x & 7] + raws[y & 7] + ra + rb if value else None)
        scale_raws.append(ra + rb if value else None)
    live = [r for r in product_raws if r is not None]
    if not live:
        return 0 if c == 0 else int(c_word)
    top, scale_top = max(live), max(r for r in scale_raws if r is not None)

    def group(size):
        return [sum(products[i : i + size]) for i in range(0, 64, size)]

    if c and c_raw >= top:
        q = c_raw - 35
        return exact_word(sum(cut(g, q) for g in group(16)) + cut(c, q))
    q = max(max(top, c_raw if c else top) - 39, scale_top - 35)
    if scale_format == tc.UE4M3:
        return exact_word(sum(cut(g, q) for g in group(4)) + cut(c, q))
    kept = []
    for i, g in enumerate(group(16)):
        mine = [r for r in product_raws[16 * i : 16 * i + 16] if r is not None]
        finer = max(q, c_raw - 35) if c and mine and c_raw >= max(mine) else q
        kept.append((cut(cut(g, finer), q), [r for r in scale_raws[16 * i : 16 * i + 16] if r is not None]))
    word = exact_word(sum(g for g, _ in kept) + cut(c, q))
    if 0 < word & 0x7FFFFFFF < 0x800000:
        least = Fraction(2) ** max(-174, q)
        word = exact_word(
            sum(g for g, s in kept if not (s and max(s) < scale_top and abs(g) < least)) + cut(c, q)
        )
    return word


@pytest.mark.parametrize("scale_format, blocks", [(tc.UE4M3, 4), (tc.UE8M0, 2), (tc.UE8M0, 4)])
@pytest.mark.parametrize("spread", [4, 40, 120])
def test_fp4_products_agree_with_a_slow_model(scale_format, blocks, spread):
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 16, (8, 64)).astype(np.uint8) * (rng.random((8, 64)) < 0.7) for _ in range(2))
    if scale_format == tc.UE8M0:
        sa, sb = (
            rng.integers(127 - spread // 2, 127 + spread // 2, (8, blocks)).astype(np.uint8) for _ in range(2)
        )
    else:
        sa, sb = (rng.integers(0, 0x7F, (8, blocks)).astype(np.uint8) for _ in range(2))
    exponents = rng.integers(-spread // 2, spread // 2 + 8, (8, 8))
    c = (rng.standard_normal((8, 8)) * 2.0**exponents * (rng.random((8, 8)) < 0.8)).astype(np.float32)
    got = tc.mma_fp4(a, b, c.view(np.uint32), sa, sb, scale_format)
    expected = [
        [slow_fp4(a[m], b[n], c.view(np.uint32)[m, n], sa[m], sb[n], scale_format) for n in range(8)]
        for m in range(8)
    ]
    assert [[hex(x) for x in row] for row in got] == [[hex(x) for x in row] for row in expected]


def test_tiny_groups_vanish_from_subnormal_results():
    """UE8M0: a K=16 group under 2**-174 with smaller scales than the largest is dropped where the result is
    subnormal.
    """
    rng = np.random.default_rng()
    for _ in range(20):
        a, b = (rng.integers(1, 8, (1, 64)).astype(np.uint8) for _ in range(2))
        sa = np.array([[50, 40 + rng.integers(0, 8)]], np.uint8)
        sb = np.array([[50, rng.integers(0, 12)]], np.uint8)
        a[0, :32] *= rng.random(32) < 0.1
        word = slow_fp4(a[0], b[0], 0, sa[0], sb[0], tc.UE8M0)
        assert hex(tc.mma_fp4(a, b, np.zeros((1, 1), np.uint32), sa, sb, tc.UE8M0)[0, 0]) == hex(word)

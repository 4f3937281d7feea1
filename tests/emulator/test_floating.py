"""Floating-point instructions against exact fractions, ml_dtypes, and every f16 and bf16 code."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from .snippet import evaluate

RNG = np.random.default_rng()
ALL16 = np.arange(1 << 16, dtype=np.uint16)


def floats(count: int, dtype=np.float32) -> np.ndarray:
    """Finite numbers of every exponent, subnormals and close neighbours among them."""
    integer = {np.float32: np.uint32, np.float64: np.uint64}[dtype]
    bits = np.frombuffer(RNG.bytes(count * dtype().itemsize), integer).copy()
    values = bits.view(dtype)
    values[~np.isfinite(values)] = 1.5
    small = RNG.integers(-40, 40, count // 4).astype(dtype) * dtype(2.0) ** -20 + 1
    values[: count // 4] = small
    return values


def neighbours(exact: Fraction, bits: int, lowest: int) -> tuple[Fraction, Fraction]:
    """The representable numbers around `exact` for `bits` of precision and smallest unit 2**lowest."""
    if exact == 0:
        return exact, exact
    exponent = max(exact.numerator.bit_length() - exact.denominator.bit_length() - bits, lowest)
    while abs(exact) / Fraction(2) ** exponent >= 1 << bits:
        exponent += 1
    while exponent > lowest and abs(exact) / Fraction(2) ** exponent < 1 << (bits - 1):
        exponent -= 1
    unit = Fraction(2) ** exponent
    below = exact // unit * unit
    return below, below if below == exact else below + unit


def rounded(exact: Fraction, mode: str, bits: int = 24, lowest: int = -149) -> Fraction:
    below, above = neighbours(exact, bits, lowest)
    if below == above:
        return below
    if mode == "rm" or mode == "rz" and exact > 0:
        return below
    if mode == "rp" or mode == "rz":
        return above
    if exact - below != above - exact:
        return below if exact - below < above - exact else above
    unit = above - below
    return below if (below / unit) % 2 == 0 else above


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_of_f32_rounds_once(mode):
    a, b, c = floats(2000), floats(2000), floats(2000)
    # Products that nearly cancel the addend, and halfway cases, are where a double rounding shows.
    with np.errstate(over="ignore"):
        c[::3] = -(a[::3].astype(np.float64) * b[::3]).astype(np.float32)
    a[1::3], b[1::3] = np.float32(9784713), np.float32(3)
    c[1::3] = np.float32(2.0) ** -RNG.integers(20, 60, len(c[1::3]))
    c = np.where(np.isfinite(c), c, np.float32(1))
    got = evaluate(f"fma.{mode}.f32 %d0, %a0, %a1, %a2;", a.view(np.uint32), b.view(np.uint32),
                   c.view(np.uint32)).view(np.float32)
    top = Fraction(2) ** 128
    for x, y, z, g in zip(a, b, c, got):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        expected = rounded(exact, mode)
        if abs(expected) >= top:
            assert np.isinf(g) or abs(g) == np.finfo(np.float32).max
        else:
            assert Fraction(float(g)) == expected, (mode, x, y, z, g)


@pytest.mark.parametrize("operation,function", [("add", lambda x, y: x + y), ("mul", lambda x, y: x * y)])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_sums_and_products_round_in_every_direction(operation, function, mode):
    a, b = floats(1500, np.float64), floats(1500, np.float64)
    a, b = np.frexp(a)[0], np.ldexp(np.frexp(b)[0], RNG.integers(-70, 70, 1500))
    got = evaluate(f"{operation}.{mode}.f64 %d0, %a0, %a1;", a.view(np.uint64), b.view(np.uint64),
                   result=64).view(np.float64)
    for x, y, g in zip(a, b, got):
        assert Fraction(float(g)) == rounded(
            function(Fraction(float(x)), Fraction(float(y))), mode, 53, -1074
        )


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_division_and_root_of_f32(mode):
    a, b = np.abs(floats(1000)), floats(1000)
    a, b = np.frexp(a)[0], np.frexp(b)[0]
    b = np.where(b == 0, np.float32(0.75), b)
    quotient = evaluate(f"div.{mode}.f32 %d0, %a0, %a1;", a.view(np.uint32), b.view(np.uint32)).view(
        np.float32
    )
    for x, y, g in zip(a, b, quotient):
        assert Fraction(float(g)) == rounded(Fraction(float(x)) / Fraction(float(y)), mode)
    root = evaluate(f"sqrt.{mode}.f32 %d0, %a0;", a.view(np.uint32)).view(np.float32)
    for x, g in zip(a, root):
        g, x = Fraction(float(g)), Fraction(float(x))
        unit = neighbours(g * Fraction(1000001, 1000000), 24, -149)
        step = unit[1] - unit[0]
        if mode in ("rz", "rm"):
            assert g * g <= x < (g + step) ** 2 or x == 0
        elif mode == "rp":
            assert g * g >= x
        else:
            assert (g - step / 2) ** 2 <= x <= (g + step / 2) ** 2 or x == 0


def test_every_f16_code_converts_to_f32_and_back():
    wide = evaluate("cvt.f32.f16 %d0, %a0;", ALL16)
    expected = ALL16.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert (wide.view(np.float32)[~nan] == expected[~nan]).all() and np.isnan(
        wide.view(np.float32)[nan]
    ).all()
    assert (np.signbit(wide.view(np.float32)) == np.signbit(expected))[~nan].all()
    back = evaluate("cvt.rn.f16.f32 %d0, %a0;", expected.view(np.uint32), result=16)
    assert (back[~nan] == ALL16[~nan]).all() and (back[nan] == 0x7FFF).all()


@pytest.mark.parametrize("kind,dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_narrowing_f32_agrees_with_a_library_at_every_halfway_point(kind, dtype):
    codes = ALL16[~np.isnan(ALL16.view(dtype).astype(np.float32))]
    exact = codes.view(dtype).astype(np.float32).view(np.uint32)
    span = np.uint32(1 << (13 if kind == "f16" else 16))
    around = np.concatenate(
        [exact + d for d in (np.uint32(0), np.uint32(1), span // 2 - 1, span // 2, span // 2 + 1)]
    )
    around = around[np.isfinite(around.view(np.float32))]
    with np.errstate(over="ignore"):
        expected = around.view(np.float32).astype(dtype).view(np.uint16)
    assert (evaluate(f"cvt.rn.{kind}.f32 %d0, %a0;", around, result=16) == expected).all()


@pytest.mark.parametrize("kind,dtype", [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_half_arithmetic_on_every_code(kind, dtype, operation):
    a, b = ALL16, RNG.permutation(ALL16)
    got = evaluate(f"{operation}.rn.{kind} %d0, %a0, %a1;", a, b, result=16)
    x, y = a.view(dtype).astype(np.float64), b.view(dtype).astype(np.float64)
    with np.errstate(all="ignore"):
        # Exact in float64 but for bf16 sums of far exponents, where a rounding to 53 bits changes nothing.
        value = {"add": x + y, "sub": x - y, "mul": x * y}[operation]
        single = value.astype(np.float32)
        expected = value.astype(dtype) if kind == "f16" else single.astype(dtype)
    ok = (single.astype(np.float64) == value) if kind == "bf16" else np.ones(len(a), bool)
    nan = np.isnan(value)
    assert (got[nan] == 0x7FFF).all()
    assert (got[~nan & ok] == expected.view(np.uint16)[~nan & ok]).all()


def test_fma_of_halves_rounds_once():
    a, b, c = (RNG.integers(0, 1 << 16, 20000).astype(np.uint16) for _ in range(3))
    keep = np.ones(len(a), bool)
    for x in (a, b, c):
        keep &= np.isfinite(x.view(np.float16))
    a, b, c = a[keep], b[keep], c[keep]
    got = evaluate("fma.rn.f16 %d0, %a0, %a1, %a2;", a, b, c, result=16)
    for x, y, z, g in zip(a.view(np.float16), b.view(np.float16), c.view(np.float16), got.view(np.float16)):
        expected = rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), "rn", 11, -24)
        assert np.isinf(g) if abs(expected) >= 65536 else Fraction(float(g)) == expected, (x, y, z, g)


@pytest.mark.parametrize("name,dtype", [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_fp8_both_ways(name, dtype):
    codes = np.arange(256, dtype=np.uint16)
    pairs = (codes << 8) | RNG.permutation(codes)
    got = evaluate(f"cvt.rn.f16x2.{name}x2 %d0, %a0;", pairs.astype(np.uint16))
    for part, shift in ((pairs & 0xFF, 0), (pairs >> 8, 16)):
        expected = part.astype(np.uint8).view(dtype).astype(np.float16)
        half = (got >> shift).astype(np.uint16).view(np.float16)
        assert ((half == expected) | (np.isnan(half) & np.isnan(expected))).all()
    values = np.concatenate([floats(3000), RNG.standard_normal(3000).astype(np.float32) * 50])
    packed = evaluate(
        f"cvt.rn.satfinite.{name}x2.f32 %h, %a0, %a0; cvt.u32.u16 %d0, %h;",
        values.view(np.uint32),
        registers=".reg .b16 %h;",
    )
    limit = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(values, -limit, limit).astype(dtype).view(np.uint8)
    assert ((packed & 0xFF) == expected).all() and ((packed >> 8) == expected).all()


def test_e2m1_both_ways():
    codes = np.arange(256, dtype=np.uint16)
    got = evaluate("cvt.u8.u16 %b, %a0; cvt.rn.f16x2.e2m1x2 %d0, %b;", codes, registers=".reg .b8 %b;")
    low = (codes & 15).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    high = (codes >> 4).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert ((got & 0xFFFF).astype(np.uint16).view(np.float16) == low).all()
    assert ((got >> 16).astype(np.uint16).view(np.float16) == high).all()
    steps = np.arange(-32, 33, dtype=np.float32) / 4
    values = np.concatenate([steps, np.nextafter(steps, np.float32(9)), np.nextafter(steps, np.float32(-9))])
    packed = evaluate("cvt.rn.satfinite.e2m1x2.f32 %b, %a0, %a1; cvt.u32.u8 %d0, %b;", values.view(np.uint32),
                      values[::-1].copy().view(np.uint32), registers=".reg .b8 %b;")
    expected = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert ((packed >> 4) == expected).all() and ((packed & 15) == expected[::-1]).all()


def test_minimum_and_maximum_know_nan_and_signed_zero():
    special = np.array(
        [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0x7FC00001, 0xFFC00000, 1], np.uint32
    )
    a, b = (x.ravel() for x in np.meshgrid(special, special))
    x, y = a.view(np.float32), b.view(np.float32)
    plain = evaluate("min.f32 %d0, %a0, %a1;", a, b)
    strict = evaluate("max.NaN.f32 %d0, %a0, %a1;", a, b)
    for i in range(len(a)):
        if np.isnan(x[i]) and np.isnan(y[i]):
            assert plain[i] == 0x7FFFFFFF
        elif np.isnan(x[i]) or np.isnan(y[i]):
            assert plain[i] == (b[i] if np.isnan(x[i]) else a[i]) and strict[i] == 0x7FFFFFFF
        elif x[i] == 0 and y[i] == 0:
            assert plain[i] == (a[i] | b[i]) and strict[i] == (a[i] & b[i])
        else:
            assert plain[i] == min(x[i], y[i]).view(np.uint32) and strict[i] == max(x[i], y[i]).view(
                np.uint32
            )


def test_flush_and_saturation():
    values = np.array([1, 0x807FFFFF, 0x00800000, 0x3FC00000, 0xBF800000, 0x7FC00000], np.uint32)
    assert evaluate("add.ftz.f32 %d0, %a0, %a0;", values)[:2].tolist() == [0, 0x80000000]
    assert evaluate("add.f32 %d0, %a0, 0f00000000;", values)[:2].tolist() == [1, 0x807FFFFF]
    assert evaluate("add.sat.f32 %d0, %a0, %a0;", values).tolist() == [2, 0, 0x01000000, 0x3F800000, 0, 0]


def test_approximations_stay_within_their_bounds():
    x = np.concatenate([RNG.uniform(-30, 30, 3000), RNG.uniform(-1e-3, 1e-3, 500)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    got = evaluate("ex2.approx.f32 %d0, %a0;", x.view(np.uint32)).view(np.float32)
    assert (np.abs(got - exact) <= exact * 2.0**-24).all()
    p = np.abs(x) + np.float32(1e-3)
    assert np.abs(evaluate("lg2.approx.f32 %d0, %a0;", p.view(np.uint32)).view(np.float32) - np.log2(
        p.astype(np.float64))).max() < 2.0**-21
    got = evaluate("rcp.approx.f32 %d0, %a0;", p.view(np.uint32)).view(np.float32)
    assert (np.abs(got * p.astype(np.float64) - 1) < 2.0**-23).all()

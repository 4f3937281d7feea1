"""Integer and bit instructions against Python integers, at the edges of every type and on random words."""

from __future__ import annotations

import numpy as np
import pytest
from .snippet import evaluate

RNG = np.random.default_rng()
EDGES = {
    16: [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 0xFFFE],
    32: [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 31, 32, 33],
    64: [0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 63, 64, 65, 1 << 32],
}


def words(width: int, count: int = 3) -> list[np.ndarray]:
    """Every combination of edges, then random words of all magnitudes."""
    grids = np.meshgrid(*[np.array(EDGES[width], np.uint64)] * count)
    arrays = []
    for grid in grids:
        noise = RNG.integers(0, 1 << 64, 500, np.uint64, endpoint=False) if width == 64 else RNG.integers(
            0, 1 << width, 500, np.uint64)
        noise >>= RNG.integers(0, width, 500).astype(np.uint64)
        arrays.append(np.concatenate([grid.ravel(), noise]).astype(f"uint{width}"))
    return arrays


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def check(
    body: str, width: int, function, count: int = 2, result: int | None = None, is_signed: bool = False
) -> None:
    """`function` takes Python integers (signed if asked) and returns one; compared modulo 2**result."""
    result = result or width
    operands = words(width, count)
    got = evaluate(body, *operands, result=result)
    for i, values in enumerate(zip(*(operand.tolist() for operand in operands))):
        arguments = [signed(v, width) for v in values] if is_signed else values
        expected = function(*arguments) & ((1 << result) - 1)
        assert int(got[i]) == expected, (
            f"{body} of {[hex(v) for v in values]}: {int(got[i]):#x}, not {expected:#x}"
        )


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


@pytest.mark.parametrize("width", [16, 32, 64])
def test_sums_and_products_wrap(width):
    check(f"add.s{width} %d0, %a0, %a1;", width, lambda a, b: a + b)
    check(f"sub.u{width} %d0, %a0, %a1;", width, lambda a, b: a - b)
    check(f"mul.lo.u{width} %d0, %a0, %a1;", width, lambda a, b: a * b)
    check(f"mad.lo.s{width} %d0, %a0, %a1, %a2;", width, lambda a, b, c: a * b + c, 3)


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("kind", ["u", "s"])
def test_high_and_wide_products(width, kind):
    is_signed = kind == "s"
    check(f"mul.hi.{kind}{width} %d0, %a0, %a1;", width, lambda a, b: a * b >> width, is_signed=is_signed)
    check(f"mad.hi.{kind}{width} %d0, %a0, %a1, %a2;", width, lambda a, b, c: (a * b >> width) + c, 3,
          is_signed=is_signed)
    if width < 64:
        check(f"mul.wide.{kind}{width} %d0, %a0, %a1;", width, lambda a, b: a * b, result=2 * width,
              is_signed=is_signed)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_division_truncates_toward_zero(width):
    check(f"div.u{width} %d0, %a0, %a1;", width, lambda a, b: a // b if b else -1)
    check(f"rem.u{width} %d0, %a0, %a1;", width, lambda a, b: a % b if b else a)
    low = -(1 << (width - 1))
    operands = [w for w in words(width, 2)]
    keep = (operands[1] != 0) & ~(
        (operands[0] == low & ((1 << width) - 1)) & (operands[1] == (1 << width) - 1)
    )
    a, b = operands[0][keep], operands[1][keep]
    quotient = evaluate(f"div.s{width} %d0, %a0, %a1;", a, b, result=width)
    rest = evaluate(f"rem.s{width} %d0, %a0, %a1;", a, b, result=width)
    for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), rest.tolist()):
        x, y = signed(x, width), signed(y, width)
        assert signed(q, width) == truncated(x, y) and signed(r, width) == x - y * truncated(x, y)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_extrema_signs_and_shifts(width):
    check(f"min.s{width} %d0, %a0, %a1;", width, min, is_signed=True)
    check(f"max.u{width} %d0, %a0, %a1;", width, max)
    check(f"abs.s{width} %d0, %a0;", width, abs, 1, is_signed=True)
    check(f"neg.s{width} %d0, %a0;", width, lambda a: -a, 1, is_signed=True)
    amounts = np.array([0, 1, 7, width - 1, width, width + 1, 200, 0xFFFFFFFF], np.uint32)
    values = words(width, 1)[0][:40]
    a, n = (x.ravel() for x in np.meshgrid(values, amounts))
    left = evaluate(f"shl.b{width} %d0, %a0, %a1;", a, n, result=width)
    right = evaluate(f"shr.u{width} %d0, %a0, %a1;", a, n, result=width)
    arithmetic = evaluate(f"shr.s{width} %d0, %a0, %a1;", a, n, result=width)
    for v, k, p, q, r in zip(a.tolist(), n.tolist(), left.tolist(), right.tolist(), arithmetic.tolist()):
        k = min(k, width)
        assert p == (v << k) & ((1 << width) - 1) and q == v >> k
        assert signed(r, width) == signed(v, width) >> k


@pytest.mark.parametrize("width", [32, 64])
def test_bit_counts_and_reversal(width):
    check(f"popc.b{width} %d0, %a0;", width, lambda a: a.bit_count(), 1, result=32)
    check(f"clz.b{width} %d0, %a0;", width, lambda a: width - a.bit_length(), 1, result=32)
    check(f"brev.b{width} %d0, %a0;", width, lambda a: int(f"{a:0{width}b}"[::-1], 2), 1)
    check(f"bfind.u{width} %d0, %a0;", width, lambda a: a.bit_length() - 1, 1, result=32)
    check(f"bfind.s{width} %d0, %a0;", width, lambda a: (a if a >= 0 else ~a).bit_length() - 1, 1, result=32,
          is_signed=True)


def test_logic_of_three_follows_its_table():
    for table in RNG.integers(0, 256, 12).tolist() + [0x96, 0xE8, 0xCA]:
        def function(a, b, c, table=table):
            result = 0
            for bit in range(32):
                index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
                result |= (table >> index & 1) << bit
            return result

        check(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", 32, function, 3)


def test_funnel_shifts():
    check("shf.l.wrap.b32 %d0, %a0, %a1, %a2;", 32, lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32, 3)
    check("shf.r.wrap.b32 %d0, %a0, %a1, %a2;", 32, lambda a, b, c: (b << 32 | a) >> (c & 31), 3)
    check("shf.l.clamp.b32 %d0, %a0, %a1, %a2;", 32, lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32, 3)
    check("shf.r.clamp.b32 %d0, %a0, %a1, %a2;", 32, lambda a, b, c: (b << 32 | a) >> min(c, 32), 3)


def test_permutation_of_bytes():
    def function(a, b, selector):
        data = (b << 32 | a).to_bytes(8, "little")
        result = bytearray()
        for k in range(4):
            nibble = selector >> 4 * k & 15
            byte = data[nibble & 7]
            result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        return int.from_bytes(result, "little")

    check("prmt.b32 %d0, %a0, %a1, %a2;", 32, function, 3)


def test_byte_dot_products():
    def dot(a, b, c, a_signed, b_signed):
        total = signed(c, 32)
        for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little")):
            total += (signed(x, 8) if a_signed else x) * (signed(y, 8) if b_signed else y)
        return total

    check("dp4a.s32.s32 %d0, %a0, %a1, %a2;", 32, lambda a, b, c: dot(a, b, c, True, True), 3)
    check("dp4a.u32.s32 %d0, %a0, %a1, %a2;", 32, lambda a, b, c: dot(a, b, c, False, True), 3)


def test_carry_chain_adds_128_bits():
    a0, a1, b0, b1 = (words(64, 1)[0] for _ in range(4))
    low, high = evaluate(
        "add.cc.u64 %d0, %a0, %a2; addc.u64 %d1, %a1, %a3;", a0, a1, b0, b1, result=64, outputs=2
    )
    for x0, x1, y0, y1, p, q in zip(*(v.tolist() for v in (a0, a1, b0, b1, low, high))):
        assert q << 64 | p == ((x1 << 64 | x0) + (y1 << 64 | y0)) & ((1 << 128) - 1)
    low, high = evaluate(
        "sub.cc.u64 %d0, %a0, %a2; subc.u64 %d1, %a1, %a3;", a0, a1, b0, b1, result=64, outputs=2
    )
    for x0, x1, y0, y1, p, q in zip(*(v.tolist() for v in (a0, a1, b0, b1, low, high))):
        assert q << 64 | p == ((x1 << 64 | x0) - (y1 << 64 | y0)) & ((1 << 128) - 1)


def test_conversions_saturate():
    values = words(32, 1)[0]
    got = evaluate("cvt.sat.s8.s32 %d0, %a0;", values, result=32)
    assert [signed(v, 32) for v in got.tolist()] == [
        min(max(signed(v, 32), -128), 127) for v in values.tolist()
    ]
    got = evaluate(
        "cvt.sat.u16.s32 %h, %a0; cvt.u32.u16 %d0, %h;", values, result=32, registers=".reg .b16 %h;"
    )
    assert got.tolist() == [min(max(signed(v, 32), 0), 65535) for v in values.tolist()]

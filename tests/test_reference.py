"""The oracle against a slow scalar loop written from the contract's text alone, and the measure of error
itself."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_cudacore.cases import Case, random_case
from msa_cudacore.exact_cases import exact_cases, fixture, odd_stride_cases
from msa_cudacore.reference import (
    compare,
    relative_error,
    round_to_bf16,
    rounding_floor,
)

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scalar_e4m3(byte: int) -> float:
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * math.ldexp(mantissa if exponent == 0 else 8 + mantissa, max(exponent, 1) - 10)


def scalar_element(codes, scale_byte: int, dim: int) -> float:
    byte = int(codes[dim // 2])
    code = byte >> 4 if dim % 2 else byte & 15
    return (-1 if code & 8 else 1) * MAGNITUDES[code & 7] * scalar_e4m3(int(scale_byte))


def scalar_decode(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """One key at a time, in plain Python; nothing is shared with the module under test."""
    softmax_scale = 1 / math.sqrt(128) if case.softmax_scale is None else case.softmax_scale
    group = case.num_q_heads // case.num_kv_heads
    out, lse = np.zeros(case.q.shape), np.full(case.q.shape[:2], -np.inf)
    k_scale, v_scale = case.k_scale.view(np.uint8), case.v_scale.view(np.uint8)
    for row, q_head in np.ndindex(case.q.shape[:2]):
        request, token = row // case.seqlen_q, row % case.seqlen_q
        position = int(case.seqused_k[request]) - case.seqlen_q + token
        head = q_head // group
        query = [float(x) for x in case.q[row, q_head]]
        scores, values = [], []
        for block in (int(i) for i in case.q2k_indices[head, row]):
            if block < 0 or block >= case.page_table.shape[1] or block * 128 > position:
                continue
            page = int(case.page_table[request, block])
            if page < 0 or page >= case.k.shape[0]:
                continue
            for t in range(128):
                if block * 128 + t > position:
                    break
                key = [
                    scalar_element(case.k[page, head, t], k_scale[page, head, t, d // 16], d)
                    for d in range(128)
                ]
                scores.append(
                    softmax_scale * case.k_global_scale * math.fsum(a * b for a, b in zip(query, key))
                )
                at = [(t // 4 * 4 + s // 2, s % 2 * 4 + t % 4) for s in range(8)]
                values.append(
                    [
                        scalar_element(case.v[page, head, t], v_scale[page, head][at[d // 16]], d)
                        for d in range(128)
                    ]
                )
        if scores:
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum(weights)
            lse[row, q_head] = top + math.log(total)
            for d in range(128):
                out[row, q_head, d] = (
                    case.v_global_scale * math.fsum(w * v[d] for w, v in zip(weights, values)) / total
                )
    return out, lse


def assert_close(got, exact, tolerance=1e-10):
    for name, a, b in zip(("out", "lse"), got, exact):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    seqlen_q=st.integers(1, 4),
    group=st.integers(1, 3),
    heads=st.integers(1, 2),
    length=st.integers(0, 300),
)
def test_oracle_agrees_with_the_scalar_loop(seed, seqlen_q, group, heads, length):
    case = random_case(
        np.random.default_rng(seed),
        group=group,
        num_kv_heads=heads,
        seqlen_q=seqlen_q,
        topk=4,
        lengths=np.array([length]),
    )
    assert_close(case.exact(), scalar_decode(case))


def test_oracle_agrees_with_the_scalar_loop_on_a_ragged_batch(rng):
    case = random_case(
        rng, group=1, num_kv_heads=2, seqlen_q=3, topk=5, lengths=np.array([260, 0, 1, 2, 129])
    )
    assert_close(case.exact(), scalar_decode(case))


@pytest.mark.parametrize("case", exact_cases() + odd_stride_cases(), ids=lambda case: case.name)
def test_oracle_gives_the_known_answers(case):
    assert_close(case.exact(), (case.expected_out, case.expected_lse), 1e-13)


def test_exact_cases_have_distinct_names():
    names = [case.name for case in exact_cases() + odd_stride_cases()]
    assert len(set(names)) == len(names)


def test_a_linear_reading_of_v_scales_would_be_noticed():
    """The fixture with a scale ramp: a reader that ignores the swizzle is far from the answer."""
    case = next(c for c in exact_cases() if c.name == "v scales are swizzled")
    scales = np.array([[scalar_e4m3(int(b)) for b in row] for row in case.v_scale.view(np.uint8)[2, 0, :4]])
    assert scales[:, 0].mean() == 1.328125 and scales[:, 7].mean() == 3.65234375
    assert case.expected_out[0, 0, ::16].tolist() == [1.1875 * 2.0 ** (s - 4) for s in range(8)]


def test_a_swizzled_reading_of_k_scales_would_be_noticed():
    case = next(c for c in exact_cases() if c.name == "k scales are token-major")
    tile = case.k_scale.view(np.uint8)[2, 0].reshape(-1)
    assert 16 * scalar_e4m3(int(tile[3 * 4])) / 8 == 2.25  # token 0, group 3 in V's order


def test_dead_tokens_and_unselected_pages_never_matter(rng):
    case = random_case(rng, batch=4, seqlen_q=2, layout="planar")
    exact = case.exact()
    live = np.zeros((case.k.shape[0], 128), bool)
    for request, length in enumerate(case.seqused_k):
        for block in range(min(-(-int(length) // 128), case.page_table.shape[1])):
            page = case.page_table[request, block]
            if 0 <= page < case.k.shape[0]:
                live[page, : int(length) - 128 * block] = True
    from msa_cudacore.nvfp4 import swizzle_v_scales, unswizzle_v_scales

    dead = np.broadcast_to(~live[:, None, :], case.k.shape[:3])
    for view in (case.k, case.v, case.k_scale.view(np.uint8)):
        view[dead] = rng.integers(0, 256, view[dead].shape, dtype=np.uint8)
    linear = unswizzle_v_scales(case.v_scale.view(np.uint8))
    linear[dead] = 0x7F
    case.v_scale.view(np.uint8)[...] = swizzle_v_scales(linear)
    for before, after in zip(exact, case.exact()):
        np.testing.assert_array_equal(before, after)


def test_a_nan_that_is_seen_is_reported():
    case = fixture()
    case.k_scale[2, 1, 0, 0] = 0x7F
    case.q[...] = 1.0
    out, lse = case.exact()
    assert np.isnan(lse[0, 16:32]).all() and np.isfinite(lse[0, :16]).all() and np.isfinite(lse[0, 32:]).all()


def test_two_halves_merge_to_the_whole():
    """lse is a natural logarithm: partial results weigh exp(lse)."""
    rng = np.random.default_rng(7)
    case = random_case(rng, batch=2, seqlen_q=1, topk=4, lengths=np.array([512, 400]), hostile=False)
    case.q2k_indices[...] = [0, 1, 2, 3]
    whole = case.exact()
    parts = []
    for ids in ([0, 2, -1, -1], [1, 3, -1, -1]):
        case.q2k_indices[...] = ids
        parts.append(case.exact())
    weights = np.exp(np.stack([lse for _, lse in parts]) - whole[1])
    np.testing.assert_allclose(weights.sum(axis=0), 1.0, rtol=1e-12)
    merged = sum(out * weight[..., None] for (out, _), weight in zip(parts, weights))
    np.testing.assert_allclose(merged, whole[0], rtol=1e-10, atol=1e-12)


def test_lengths_at_the_ends_of_int32():
    """Two query tokens, so that a 32-bit position would wrap around."""
    case = fixture(seqused=(2**31 - 1, -(2**31)), rows=[[0, 3], [0, 3], [0, 1], [0, 1]], seqlen_q=2)
    out, lse = case.exact()
    np.testing.assert_allclose(lse[:, 0], [math.log(256), math.log(256), -np.inf, -np.inf])
    assert (out[2:] == 0).all()


def test_no_rows_and_no_columns():
    case = fixture(seqused=())
    assert case.exact()[0].shape == (0, 64, 128)
    case = fixture()
    from dataclasses import replace

    out, lse = replace(case, page_table=np.zeros((1, 0), np.int32)).exact()
    assert (out == 0).all() and (lse == -np.inf).all()


# The measure


@settings(max_examples=300)
@given(st.floats(allow_nan=False, width=64))
def test_round_to_bf16_is_one_rounding(value):
    got = float(round_to_bf16(np.array([value]))[0])
    if np.isinf(got):
        assert abs(value) >= 2.0**128 - 2.0**119
        return
    bits = int(np.float32(got).view(np.uint32)) >> 16  # a neighbour's bits are one less or one more
    words = np.arange(max(bits - 2, 0), bits + 3, dtype=np.uint32) << 16
    near = [float(x) for x in words.view(np.float32) if np.isfinite(x)]
    best = min(abs(Fraction(x) - Fraction(value)) for x in near)
    assert abs(Fraction(got) - Fraction(value)) == best
    assert math.copysign(1, got) == math.copysign(1, value)


def test_round_to_bf16_avoids_the_double_rounding_of_a_cast():
    value = (
        1 + 2.0**-8 + 2.0**-40
    )  # just above a tie; float32 drops the last term and the tie then goes to even
    assert float(np.float64(value).astype(ml_dtypes.bfloat16)) == 1.0
    assert float(round_to_bf16(np.array(value))) == 1 + 2.0**-7


def test_round_to_bf16_keeps_special_values():
    got = round_to_bf16(np.array([np.nan, np.inf, -np.inf, -0.0, 2.0**-133, 2.0**-134]))
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got.astype(float), [np.nan, np.inf, -np.inf, -0.0, 2.0**-133, 0.0])


@pytest.fixture
def measured(rng):
    exact = rng.normal(size=(5, 3, 128))
    return exact, rng.normal(size=(5, 3))


def test_rounding_alone_passes(measured):
    exact, lse = measured
    report = compare(round_to_bf16(exact), lse.astype(np.float32), exact, lse)
    assert report and report.worst_ratio == 1.0 and report.relative_error == report.floor


def test_the_floor_is_that_of_eight_bits(rng):
    floor = rounding_floor(rng.normal(size=(50, 4096)))
    # Uniform rounding error over [2**-9, 2**-8] of the value: an RMS near 2**-9 / sqrt(3) * 1.4.
    assert (floor > 1.4e-3).all() and (floor < 1.9e-3).all()


def test_a_row_over_its_floor_is_named(measured):
    exact, lse = measured
    out = round_to_bf16(exact).astype(np.float64)
    out[3, 2] += 0.004 * np.abs(exact[3, 2])
    report = compare(out, lse, exact, lse)
    assert not report and report.worst_row == (3, 2) and "out row 3, query head 2" in str(report)
    assert compare(out, lse, exact, lse, ratio=10.0)


def test_what_no_fp32_weight_holds_is_not_asked_for(measured):
    """One key outweighs the others by 2^80, and half of its value is zero: there the exact row is theirs alone."""
    exact, lse = measured
    exact[1, 2, :64] = 1.0
    exact[1, 2, 64:] = 2.0**-80 * 1.23456789
    out = round_to_bf16(exact).astype(np.float64)
    out[1, 2, 64:] = 0.0
    assert compare(out, lse, exact, lse)
    out[1, 2, 64] = 2.0**-20
    assert compare(out, lse, exact, lse).worst_row == (1, 2) and not compare(out, lse, exact, lse)

    # A row of bf16 numbers is still to be met exactly.
    exact[1, 2, 64:] = 0.0
    out = round_to_bf16(exact).astype(np.float64)
    assert compare(out, lse, exact, lse)
    out[1, 2, 64] = 2.0**-80
    assert not compare(out, lse, exact, lse)


def test_one_element_out_of_bounds_is_named(measured):
    exact, lse = measured
    out = exact.copy()
    out[1, 0, 77] += 0.1
    assert "out[1, 0, 77]" in str(compare(out, lse, exact, lse, ratio=np.inf))
    bad = lse.copy()
    bad[4, 1] += 0.1
    assert "lse[4, 1]" in str(compare(exact, bad, exact, lse))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_special_values_must_stand_where_the_oracle_has_them(measured, value):
    exact, lse = measured
    lse[2, 1] = -np.inf
    exact[2, 1] = 0.0
    assert compare(exact, lse, exact, lse)
    bad = lse.copy()
    bad[2, 1] = value
    assert "lse[2, 1]" in str(compare(exact, bad, exact, lse))
    out = exact.copy()
    out[0, 0, 0] = value or np.nan
    report = compare(out, lse, exact, lse)
    assert "out[0, 0, 0]" in str(report)
    assert np.isfinite(out).all() or (report.worst_ratio == np.inf and report.worst_row == (0, 0))


def test_a_zero_row_must_be_exactly_zero(measured):
    exact, lse = measured
    exact[1, 1] = 0.0
    out = exact.copy()
    out[1, 1, 5] = 1e-30
    report = compare(out, lse, exact, lse)
    assert not report and report.worst_row == (1, 1) and report.worst_ratio == np.inf


def test_an_expected_nan_is_required(measured):
    exact, lse = measured
    exact[0, 0], lse[0, 0] = np.nan, np.nan
    assert compare(exact, lse, exact, lse)
    assert "out[0, 0, 0]" in str(compare(np.nan_to_num(exact), lse, exact, lse))


def test_shapes_must_agree(measured):
    exact, lse = measured
    with pytest.raises(ValueError, match="exact shapes"):
        compare(exact[:4], lse, exact, lse)


def test_relative_error_of_nothing():
    assert relative_error(np.zeros((2, 0)), np.zeros((2, 0))).tolist() == [0.0, 0.0]
    assert compare(np.zeros((0, 3, 128)), np.zeros((0, 3)), np.zeros((0, 3, 128)), np.zeros((0, 3)))

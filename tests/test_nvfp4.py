"""NVFP4 on the host: exhaustive over the formats, against independent spellings."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from msa_cudacore import nvfp4

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3_value(byte: int) -> float:
    """The OCP definition, spelled out: bias 7, subnormals below 2**-6, one NaN pattern for each sign."""
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest_even(value: float, table: list[float]) -> int:
    """Index of the nearest table entry by exact arithmetic; a tie goes to the even index; beyond the end, the
    end."""
    distance = [abs(Fraction(value) - Fraction(entry)) for entry in table]
    best = min(distance)
    tied = [i for i, d in enumerate(distance) if d == best]
    return tied[0] if len(tied) == 1 else next(i for i in tied if i % 2 == 0)


def test_e2m1_decodes_as_listed():
    assert nvfp4.decode_e2m1(np.arange(16)).tolist() == E2M1 + [-x for x in E2M1]
    assert np.signbit(nvfp4.decode_e2m1(np.array([8])))[0]


@pytest.mark.parametrize("codes", [[0, 16], [-1, 3]])
def test_codes_of_more_than_four_bits_are_refused(codes):
    for take in (nvfp4.decode_e2m1, nvfp4.pack_e2m1):
        with pytest.raises(ValueError, match="codes: E2M1 codes lie in 0..15"):
            take(np.array(codes))


@pytest.mark.parametrize("packed", [[300], [-1, 3]])
def test_packed_codes_of_more_than_eight_bits_are_refused(packed):
    with pytest.raises(ValueError, match="packed: pairs of E2M1 codes lie in 0..255"):
        nvfp4.unpack_e2m1(packed)


@pytest.mark.parametrize("dtype", [np.float64, bool, complex, "U1"])
def test_codes_that_are_no_integers_are_refused(dtype):
    codes = np.ones(2, dtype)
    for take, name in ((nvfp4.decode_e2m1, "codes"), (nvfp4.pack_e2m1, "codes"), (nvfp4.unpack_e2m1, "packed")):
        with pytest.raises(TypeError, match=f"{name}: .*E2M1 codes are integers, got {codes.dtype}"):
            take(codes)


@pytest.mark.parametrize("dtype", [bool, complex, "U1", object])
def test_values_that_are_no_real_numbers_are_refused(dtype):
    values = np.ones(16, dtype)
    for take in (nvfp4.encode_e2m1, nvfp4.encode_e4m3, lambda given: nvfp4.quantize(given, 1.0)):
        with pytest.raises(TypeError, match=f"values: real numbers are needed, got {values.dtype}"):
            take(values)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "bfloat16", "float8_e4m3fn"])
def test_real_numbers_of_every_type_are_quantised_alike(dtype):
    values = np.arange(-6, 10)
    small = values.astype(getattr(ml_dtypes, dtype, dtype))
    for expected, got in zip(nvfp4.quantize(values, 1.0), nvfp4.quantize(small, 1.0)):
        np.testing.assert_array_equal(got, expected)


def test_e4m3_decodes_every_byte():
    np.testing.assert_array_equal(
        nvfp4.decode_e4m3(np.arange(256, dtype=np.uint8)), [e4m3_value(b) for b in range(256)]
    )


def test_scale_views_of_both_types_decode_alike():
    bytes_ = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        nvfp4.decode_e4m3(bytes_), nvfp4.decode_e4m3(bytes_.view(ml_dtypes.float8_e4m3fn))
    )


def test_every_code_survives_a_round_trip():
    codes = np.arange(16, dtype=np.uint8)
    assert nvfp4.encode_e2m1(nvfp4.decode_e2m1(codes)).tolist() == codes.tolist()
    bytes_ = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    assert nvfp4.encode_e4m3(nvfp4.decode_e4m3(bytes_)).tolist() == bytes_.tolist()


def test_ties_go_to_even_and_neighbours_to_their_side():
    table = [e4m3_value(b) for b in range(127)]
    for values, encode in ((E2M1, nvfp4.encode_e2m1), (table, nvfp4.encode_e4m3)):
        for low, high in zip(range(len(values)), range(1, len(values))):
            middle = (values[low] + values[high]) / 2
            even = low if low % 2 == 0 else high
            below, at, above = encode(np.array([np.nextafter(middle, 0), middle, np.nextafter(middle, 1e9)]))
            assert (below, at, above) == (low, even, high), values[low]


def test_saturation_signs_and_nan():
    assert nvfp4.encode_e2m1(np.array([5.0, 7, 1e300, np.inf, -np.inf, -0.0, np.nan])).tolist() == [
        6,
        7,
        7,
        7,
        15,
        8,
        7,
    ]
    assert nvfp4.encode_e4m3(np.array([465.0, np.inf, -1e9, -0.0, np.nan])).tolist() == [
        0x7E,
        0x7E,
        0xFE,
        0x80,
        0x7F,
    ]


@given(npst.arrays(np.float64, 20, elements=st.floats(-600, 600)))
def test_rounding_agrees_with_exact_arithmetic(values):
    table = [e4m3_value(b) for b in range(127)]
    for encode, entries, sign in ((nvfp4.encode_e2m1, E2M1, 8), (nvfp4.encode_e4m3, table, 128)):
        expected = [nearest_even(abs(x), entries) + sign * bool(np.signbit(x)) for x in values]
        assert encode(values).tolist() == expected


def test_float32_conversions_agree_with_ml_dtypes(rng):
    values = (rng.normal(size=100_000) * 10 ** rng.uniform(-4, 2, 100_000)).astype(np.float32)
    np.testing.assert_array_equal(
        nvfp4.encode_e2m1(values), values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    )
    clipped = np.clip(values, -448, 448)
    np.testing.assert_array_equal(
        nvfp4.encode_e4m3(values), clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )


def test_even_element_is_the_low_nibble():
    assert nvfp4.pack_e2m1(np.array([2, 4])).tolist() == [0x42]
    assert nvfp4.unpack_e2m1(np.array([0x42])).tolist() == [2, 4]
    with pytest.raises(ValueError, match="even number"):
        nvfp4.pack_e2m1(np.zeros(3, np.uint8))


@given(npst.arrays(np.uint8, npst.array_shapes(max_dims=3)))
def test_unpack_inverts_pack(packed):
    np.testing.assert_array_equal(nvfp4.pack_e2m1(nvfp4.unpack_e2m1(packed)), packed)


def test_dequantize_is_code_times_scale_times_global(rng):
    packed = rng.integers(0, 256, (3, 5, 16), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (3, 5, 2), dtype=np.uint8)
    values = nvfp4.dequantize(packed, scales, 0.375)
    for place in np.ndindex(3, 5, 32):
        byte = int(packed[place[:2] + (place[2] // 2,)])
        code = byte >> 4 if place[2] % 2 else byte & 15
        expected = (
            E2M1[code & 7]
            * (-1 if code & 8 else 1)
            * e4m3_value(int(scales[place[:2] + (place[2] // 16,)]))
            * 0.375
        )
        assert values[place] == expected


def test_quantize_follows_the_formula(rng):
    values = rng.normal(size=(7, 64)) * 10 ** rng.uniform(-3, 3, (7, 1))
    global_scale = 0.01
    packed, scales = nvfp4.quantize(values, global_scale)
    assert packed.shape == (7, 32) and scales.shape == (7, 4) and packed.dtype == scales.dtype == np.uint8
    table = [e4m3_value(b) for b in range(127)]
    for row, block in np.ndindex(7, 4):
        x = values[row, block * 16 : block * 16 + 16]
        byte = nearest_even(float(np.abs(x).max() / (6 * global_scale)), table)
        assert scales[row, block] == byte
        codes = nvfp4.unpack_e2m1(packed[row, block * 8 : block * 8 + 8])
        for code, element in zip(codes, x):
            step = e4m3_value(byte) * global_scale
            assert code == nearest_even(abs(element / step), E2M1) + 8 * (element < 0)


def test_quantize_error_is_bounded_by_the_format(rng):
    values = rng.normal(size=(1000, 16))
    error = np.abs(nvfp4.dequantize(*nvfp4.quantize(values, 1 / 64), 1 / 64) - values)
    # Half the widest E2M1 step is 1 of 6; the E4M3 scale may be 1/16 too small, which clips the largest
    # element.
    assert (error.max(axis=1) <= np.abs(values).max(axis=1) * (1 / 6 + 1 / 16)).all()


def test_quantize_of_zeros_and_of_values_below_the_format():
    packed, scales = nvfp4.quantize(np.array([[0.0] * 16 + [1e-9, -1e-9] * 8]), 1.0)
    assert scales.tolist() == [[0, 0]] and not (packed & 0x77).any(), (
        "a block without a scale holds zero codes"
    )
    assert nvfp4.unpack_e2m1(packed).tolist() == [[0] * 16 + [0, 8] * 8], "signs are kept"
    assert nvfp4.dequantize(packed, scales).tolist() == [[0.0] * 32]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_refuses_what_the_format_cannot_hold(bad):
    values = np.zeros((2, 32))
    values[1, 17] = bad
    with pytest.raises(ValueError, match=r"values: element \(1, 17\)"):
        nvfp4.quantize(values, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan, True, "1", None, [1.0]])
def test_quantize_refuses_a_global_scale(bad):
    with pytest.raises(ValueError if type(bad) is float else TypeError, match="global_scale is "):
        nvfp4.quantize(np.zeros(16), bad)


@pytest.mark.filterwarnings("error")
def test_quantize_saturates_under_a_subnormal_global_scale():
    packed, scales = nvfp4.quantize(np.full(16, -1.0), 1e-320)
    assert scales.tolist() == [0x7E] and packed.tolist() == [0xFF] * 8


def test_quantize_refuses_a_ragged_last_axis():
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantize(np.zeros(20), 1.0)


def test_scales_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="float32"):
        nvfp4.decode_e4m3(np.zeros(4, np.float32))


def test_codes_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="codes: .*float64"):
        nvfp4.decode_e2m1([1.5])
    for dtype in (np.float64, np.int64):  # negative integers would count from the end of the table
        with pytest.raises(TypeError, match=f"packed: .*{np.dtype(dtype).name}"):
            nvfp4.dequantize(np.full((2, 8), -1, dtype), np.zeros((2, 1), np.uint8))


def test_swizzle_matches_an_independent_spelling():
    """The contract gives the place twice: as (row, column) of the [128, 8] tile and as a flat byte."""
    linear = np.arange(1024, dtype=np.uint16).reshape(128, 8)
    stored = nvfp4.swizzle_v_scales(linear)
    for t in range(128):
        for s in range(8):
            assert stored[(t // 4) * 4 + s // 2, (s % 2) * 4 + t % 4] == linear[t, s]
            assert stored.reshape(-1)[(t // 4) * 32 + s * 4 + t % 4] == linear[t, s]


def test_swizzle_by_reshaping_gives_the_same_order():
    linear = np.arange(1024).reshape(128, 8)
    by_axes = linear.reshape(32, 4, 8).transpose(0, 2, 1).reshape(128, 8)
    np.testing.assert_array_equal(nvfp4.swizzle_v_scales(linear), by_axes)


def test_unswizzle_inverts_swizzle(rng):
    scales = rng.integers(0, 256, (3, 2, 128, 8), dtype=np.uint8)
    np.testing.assert_array_equal(nvfp4.unswizzle_v_scales(nvfp4.swizzle_v_scales(scales)), scales)
    np.testing.assert_array_equal(nvfp4.swizzle_v_scales(nvfp4.unswizzle_v_scales(scales)), scales)
    assert not np.array_equal(nvfp4.swizzle_v_scales(scales), nvfp4.unswizzle_v_scales(scales))


def test_global_scale_is_not_rounded_to_float32():
    """The block's largest value stands on a tie of E4M3, which a global scale rounded to float32 would not
    leave."""
    values = np.zeros(16)
    values[0] = 6 * (1 + 3 / 16)  # between the scales 1 + 1/8 and 1 + 2/8; the even one is the upper
    scale_bytes = [nvfp4.quantize(values, 1 + sign * 2.0**-26)[1].tolist() for sign in (1, 0, -1)]
    assert scale_bytes == [[0x39], [0x3A], [0x3A]]


def test_positions_are_shared_and_so_cannot_be_written():
    assert not nvfp4.v_scale_positions().flags.writeable


def test_swizzle_needs_quads_of_tokens():
    with pytest.raises(ValueError, match="quads"):
        nvfp4.v_scale_positions(6)


@pytest.mark.parametrize("reorder", [nvfp4.swizzle_v_scales, nvfp4.unswizzle_v_scales])
def test_swizzle_needs_tokens_and_groups(reorder):
    with pytest.raises(ValueError, match=r"\[..., tokens, groups\] is needed, got shape \(1024,\)"):
        reorder(np.zeros(1024, np.uint8))

"""mma.sync and wgmma arithmetic and fragments against results recorded on an H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msa_cudacore.ptx.emulator import matrix_compiled as mc
from msa_cudacore.ptx.emulator import register_layouts as layouts
from msa_cudacore.ptx.emulator import tensor_core as tc

RECORDED = np.load(Path(__file__).parent / "data" / "h200_mma.npz")

FORMS = {
    "f16_k16": "m16n8k16.row.col.f32.f16.f16.f32",
    "bf16_k16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "tf32_k8": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "f16_k8": "m16n8k8.row.col.f32.f16.f16.f32",
    "bf16_k8": "m16n8k8.row.col.f32.bf16.bf16.f32",
    "tf32_k4": "m16n8k4.row.col.f32.tf32.tf32.f32",
    "f16h_k16": "m16n8k16.row.col.f16.f16.f16.f16",
    "e4m3_k32": "m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "e5m2_k32": "m16n8k32.row.col.f32.e5m2.e5m2.f32",
    "e4m3e5m2_k32": "m16n8k32.row.col.f32.e4m3.e5m2.f32",
    "e4m3h_k32": "m16n8k32.row.col.f16.e4m3.e4m3.f16",
    "e4m3_k16": "m16n8k16.row.col.f32.e4m3.e4m3.f32",
    "s8_k32": "m16n8k32.row.col.s32.s8.s8.s32",
    "u8s8_k32sat": "m16n8k32.row.col.satfinite.s32.u8.s8.s32",
    "f16_k16_any": "m16n8k16.row.col.f32.f16.f16.f32",
    "bf16_k16_any": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "e5m2_k32_any": "m16n8k32.row.col.f32.e5m2.e5m2.f32",
}


@pytest.mark.parametrize("name", FORMS)
def test_mma_sync_agrees_with_an_h200_to_the_last_bit(name):
    attributes = mc.encode_mma(("sync", "aligned", *FORMS[name].split(".")))
    nd, na, nb, nc = mc.register_counts(attributes)
    for a, b, c, d in zip(*(RECORDED[f"{name}.{x}"] for x in "abcd")):
        a, b, c, d = (x.reshape(-1, 32) for x in (a, b, c, d))
        registers = np.concatenate([np.full((nd, 32), 0xBAD, np.uint64), a[:na], b[:nb], c[:nc]]).astype(
            np.uint64
        )
        mc.run_matrix(0, registers, np.arange(len(registers)), 0, attributes)
        np.testing.assert_array_equal(registers[:nd], d[:nd])


def hard_words(rng, shape, fraction_bits, exponent_bits, scattered):
    """Operand words: exponents from all over the range, or near each other; some zeros and subnormals."""
    middle = 1 << (exponent_bits - 1)
    low, high = (0, 2 * middle - 1) if scattered else (middle - 4, middle + 4)
    exponent = rng.integers(low, high, shape) * (rng.random(shape) < 0.9)
    fraction = rng.integers(0, 1 << fraction_bits, shape) * (rng.random(shape) < 0.9)
    sign = rng.integers(0, 2, shape)
    return (sign << exponent_bits | exponent) << fraction_bits | fraction


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", ["f16_k16", "f16_k8", "f16h_k16", "bf16_k16", "tf32_k8", "tf32_k4"])
def test_narrow_vectors_give_what_the_window_model_gives(name, scattered, special, rng):
    """The 32-bit path of mma.sync against the general one, NaN and infinity included."""
    attributes = mc.encode_mma(("sync", "aligned", *FORMS[name].split(".")))
    m, n, k, bits = (int(attributes[i]) for i in (mc.H_M, mc.H_N, mc.H_K, mc.H_BITS))
    fmt, d_format = int(attributes[mc.H_A]), int(attributes[mc.H_D])
    layout = {tc.F16: (10, 5), tc.BF16: (7, 8), tc.TF32: (23, 8)}[fmt]
    d_layout, d_bits = ((10, 5), 16) if d_format == tc.D_F16 else ((23, 8), 32)
    a_at, b_at = layouts.operand_a(m, k, bits), layouts.operand_b(n, k, bits)
    d_at = layouts.accumulator(m, n, d_bits)

    def pack(words, at, width):
        shifts = width * np.arange(at[0].shape[-1], dtype=np.uint64)
        return (words[at].astype(np.uint64) << shifts).sum(axis=-1, dtype=np.uint64)

    for _ in range(50):
        a, b = (hard_words(rng, (rows, k), *layout, scattered) for rows in (m, n))
        c = hard_words(rng, (m, n), *d_layout, scattered)
        if special:
            for words, (fraction_bits, exponent_bits) in ((a, layout), (b, layout), (c, d_layout)):
                words[rng.random(words.shape) < 0.02] |= ((1 << exponent_bits) - 1) << fraction_bits
        expected = tc.mma_float(a, b, c, fmt, fmt, d_format=d_format)
        empty = np.zeros((attributes[mc.H_ND], 32), np.uint64)
        registers = np.concatenate([empty, pack(a, a_at, bits), pack(b, b_at, bits), pack(c, d_at, d_bits)])
        mc.run_matrix(0, registers, np.arange(len(registers)), 0, attributes)
        np.testing.assert_array_equal(registers[: len(empty)], pack(expected, d_at, d_bits))


WGMMA = {
    "wg_f16": (tc.F16, tc.F16, 16),
    "wg_bf16": (tc.BF16, tc.BF16, 16),
    "wg_tf32": (tc.TF32, tc.TF32, 32),
    "wg_e4m3": (tc.E4M3, tc.E4M3, 8),
    "wg_e5m2": (tc.E5M2, tc.E4M3, 8),
}


@pytest.mark.parametrize("name", WGMMA)
def test_wgmma_agrees_with_an_h200_to_the_last_bit(name):
    a_format, b_format, bits = WGMMA[name]
    word = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    row, column = layouts.accumulator(16, 8, 32)
    kb = np.arange(32)
    narrow = dict(window=tc.WGMMA_FP8_BITS, kept_bits=tc.WGMMA_FP8_BITS) if bits == 8 else {}
    for a, b, c, d in zip(*(RECORDED[f"{name}.{x}"] for x in "abcd")):
        matrices = []
        for image, rows in ((a, 64), (b, 8)):
            r = np.arange(rows)[:, None]
            at = r % 8 * 16 + r // 8 * 128 + kb % 16 + kb // 16 * (rows * 16)
            matrices.append(np.ascontiguousarray(image.view(np.uint8)[at]).view(word))
        for warp in range(4):
            before, after = (np.zeros((16, 8), np.uint32) for _ in range(2))
            lanes = slice(32 * warp, 32 * warp + 32)
            before[row[..., 0], column[..., 0]] = c.reshape(4, 128)[:, lanes]
            after[row[..., 0], column[..., 0]] = d.reshape(4, 128)[:, lanes]
            got = tc.mma_float(
                matrices[0][16 * warp : 16 * warp + 16], matrices[1], before, a_format, b_format, **narrow
            )
            np.testing.assert_array_equal(got, after)


@pytest.mark.parametrize(
    "m, n, k, bits",
    [(16, 8, 16, 16), (16, 8, 8, 32), (16, 8, 32, 8), (8, 8, 16, 8), (16, 8, 64, 4), (8, 8, 4, 64)],
)
def test_fragments_hold_every_element_once(m, n, k, bits):
    for (major, minor), rows in ((layouts.operand_a(m, k, bits), m), (layouts.operand_b(n, k, bits), n)):
        assert sorted((major * k + minor).ravel().tolist()) == list(range(rows * k))
    for d_bits in (16, 32):
        row, column = layouts.accumulator(m, n, d_bits)
        assert sorted((row * n + column).ravel().tolist()) == list(range(m * n))


def test_double_precision_products_round_once():
    attributes = mc.encode_mma("sync aligned m8n8k4 row col f64 f64 f64 f64".split())
    rng = np.random.default_rng()
    a, b, c = rng.standard_normal((8, 4)), rng.standard_normal((8, 4)), rng.standard_normal((8, 8))
    registers = np.zeros((6, 32), np.uint64)
    ar, ak = layouts.operand_a(8, 4, 64)
    bn, bk = layouts.operand_b(8, 4, 64)
    dr, dc = layouts.accumulator(8, 8, 32)
    registers[2] = a[ar[0, :, 0], ak[0, :, 0]].view(np.uint64)
    registers[3] = b[bn[0, :, 0], bk[0, :, 0]].view(np.uint64)
    registers[4:6] = c[dr[..., 0], dc[..., 0]].view(np.uint64)
    mc.run_matrix(0, registers, np.arange(6), 0, attributes)
    from fractions import Fraction

    for r in range(2):
        for lane in range(32):
            row, column = dr[r, lane, 0], dc[r, lane, 0]
            total = c[row, column]
            for i in range(4):
                total = float(Fraction(a[row, i]) * Fraction(b[column, i]) + Fraction(total))
            assert registers[r, lane : lane + 1].view(np.float64)[0] == total


@pytest.mark.parametrize(
    "form, message",
    [
        ("m16n8k16.row.col.f32.f16.f16", "four types"),
        ("m16n8k32.row.col.f32.f16.f16.f32", "does not exist"),
        ("m8n8k4.col.col.f32.f16.f16.f32", "row-major"),
        ("sp.m16n8k32.row.col.f32.f16.f16.f32", "not modelled"),
        ("row.col.f32.f16.f16.f32", "no shape"),
        ("m16n8k16.row.col.f16.bf16.bf16.f16", "does not exist"),
        ("m16n8k32.row.col.f32.s8.s8.f32", "does not exist"),
    ],
)
def test_forms_that_do_not_exist_are_refused(form, message):
    with pytest.raises(ValueError, match=message):
        mc.encode_mma(tuple(form.split(".")))

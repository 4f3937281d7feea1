"""Decoding of instruction and shared-memory descriptors."""

from __future__ import annotations

import numpy as np
import pytest

from msa_cudacore.ptx import descriptors as encoders
from msa_cudacore.ptx.emulator import matrix_descriptors as md
from msa_cudacore.ptx.emulator import tensor_core as tc

# Words printed by CUTLASS's descriptor builders for these cases.
KNOWN = [
    (0x08400010, "f16", {}, dict(m=128, n=256, a_format=tc.F16, d_format=tc.D_F32)),
    (0x04028490, "f16", {}, dict(m=64, n=8, a_format=tc.BF16, a_mn_major=True, b_mn_major=False)),
    (0x10050910, "tf32", dict(cta_group=2), dict(m=256, n=16, a_format=tc.TF32, b_mn_major=True)),
    (0x08100410, "f8f6f4", {}, dict(m=128, n=64, a_format=tc.E4M3, b_format=tc.E5M2)),
    (0x081004A0, "i8", {}, dict(m=128, n=64, a_format=tc.S8, b_format=tc.S8)),
    (
        0x08A00000,
        "mxf8f6f4",
        dict(scale_vector=1),
        dict(m=128, n=128, a_format=tc.E4M3, scale_format=tc.UE8M0),
    ),
    (0x08A00280, "mxf8f6f4", dict(scale_vector=1), dict(a_format=tc.E2M1, b_format=tc.E4M3)),
    (0x08A00480, "mxf4", dict(scale_vector=2), dict(m=128, n=128, k=64, a_format=tc.E2M1, b_format=tc.E2M1)),
    (0x10200480, "mxf4nvf4", dict(scale_vector=4, cta_group=2), dict(m=256, n=128, scale_format=tc.UE4M3)),
]


@pytest.mark.parametrize("word, kind, how, fields", KNOWN, ids=[hex(k[0]) for k in KNOWN])
def test_known_instruction_descriptors_are_decoded(word, kind, how, fields):
    decoded = md.decode_instruction_descriptor(word, kind, **how)
    assert {f: getattr(decoded, f) for f in fields} == fields


WRONG = [
    (0x08400010 | 1 << 2, "f16", {}, "sparsity"),
    (0x08400010 | 1 << 3, "f16", {}, "saturate"),
    (0x08400010 | 1 << 6, "f16", {}, "bit 6"),
    (0x08400010 | 1 << 23, "f16", {}, "bit 23"),
    (0x08400010 | 1 << 30, "f16", {}, "maximum shift"),
    (0x08400090, "f16", {}, "B format"),
    (0x08400090 | 1 << 10, "tf32", {}, "A format"),
    (0x08400000 | 1 << 7 | 1 << 10, "f16", {}, "D format"),
    (0x10400010, "f16", {}, "M is 256"),
    (0x08400010 + (1 << 17), "f16", {}, "N is 264"),
    (0x08020010, "f16", dict(cta_group=2), "N is 8"),
    (0x04A00000, "mxf8f6f4", dict(scale_vector=1), "M is 0|bits 26:24"),
    (0x08200480, "mxf4", dict(scale_vector=2), "scale type"),
    (0x08A00280, "mxf4", dict(scale_vector=2), "A format"),
    (0x08A00480 | 1 << 29, "mxf4", dict(scale_vector=2), "A scale id"),
    (0x08A00480 | 1 << 31, "mxf4", dict(scale_vector=2), "K size"),
    (0x08200480, "mxf4nvf4", dict(scale_vector=2), "scale_vec::4X"),
    (0x08A08480, "mxf4", dict(scale_vector=2), "K-major only"),
    (0x08400010, "f16", dict(weight_stationary=True, cta_group=2), ".ws"),
]


@pytest.mark.parametrize("word, kind, how, message", WRONG, ids=[w[3] for w in WRONG])
def test_illegal_instruction_descriptors_name_the_field(word, kind, how, message):
    with pytest.raises(md.DescriptorError, match=message):
        md.decode_instruction_descriptor(word, kind, **how)


def tcgen05_word(start=0, leading=0, stride=0, swizzle=0, version=1, base=0):
    return (
        start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | version << 46 | base << 49 | swizzle << 61
    )


@pytest.mark.parametrize(
    "word, message",
    [
        (tcgen05_word(version=0), "version"),
        (tcgen05_word(swizzle=3), "swizzle"),
        (tcgen05_word() | 1 << 14, "15:14"),
        (tcgen05_word() | 1 << 52, "absolute"),
        (tcgen05_word() | 1 << 53, "60:53"),
        (tcgen05_word(base=1), "base offset"),
    ],
)
def test_illegal_shared_descriptors_name_the_field(word, message):
    with pytest.raises(md.DescriptorError, match=message):
        md.decode_tcgen05_matrix_descriptor(word)


def test_a_tcgen05_descriptor_is_no_wgmma_descriptor():
    with pytest.raises(md.DescriptorError, match="46"):
        md.decode_wgmma_matrix_descriptor(tcgen05_word())


def canonical(shape, stride, coordinate):
    """Offset of a (possibly nested) CuTe layout at a coordinate given mode by mode."""
    offset = 0
    for extents, steps, c in zip(shape, stride, coordinate):
        for extent, step in zip(extents, steps):
            offset += c % extent * step
            c //= extent
    return offset


@pytest.mark.parametrize("code, width", [(6, 32), (4, 64), (2, 128)])
def test_swizzled_k_major_addresses_follow_the_canonical_layout(code, width):
    start, stride = 1024 * 3, 8 * width + 1024
    descriptor = md.decode_tcgen05_matrix_descriptor(tcgen05_word(start, 16, stride, code))
    for row in range(24):
        for kb in range(width):
            linear = start + canonical(((8, 3), (width,)), ((width, stride), (1,)), (row, kb))
            unit = (linear >> 4 & 7) ^ (linear >> 7 & {32: 1, 64: 3, 128: 7}[width])
            expected = linear & ~0x70 | unit << 4
            assert int(descriptor.address(np.int64(row), np.int64(kb))) == expected


def test_unswizzled_k_major_addresses_follow_the_canonical_layout():
    descriptor = md.decode_tcgen05_matrix_descriptor(tcgen05_word(2048, 512, 128))
    for row in range(32):
        for kb in range(64):
            expected = 2048 + canonical(((8, 4), (16, 4)), ((16, 128), (1, 512)), (row, kb))
            assert int(descriptor.address(np.int64(row), np.int64(kb))) == expected


def test_mn_major_addresses_follow_the_canonical_layout():
    descriptor = md.decode_tcgen05_matrix_descriptor(tcgen05_word(0, 4096, 1024, 2))
    for mn in range(128):
        for k in range(16):
            linear = canonical(((64, 2), (8, 2)), ((2, 4096), (128, 1024)), (mn, k))
            expected = linear ^ (linear >> 7 & 7) << 4
            assert int(descriptor.address_mn_major(np.int64(mn), np.int64(k), 2)) == expected
    plain = md.decode_tcgen05_matrix_descriptor(tcgen05_word(0, 256, 128))
    for mn in range(64):
        for k in range(16):
            expected = canonical(((8, 8), (8, 2)), ((2, 128), (16, 256)), (mn, k))
            assert int(plain.address_mn_major(np.int64(mn), np.int64(k), 2)) == expected


def test_a_base_offset_moves_the_start_of_the_pattern():
    at_zero = md.decode_tcgen05_matrix_descriptor(tcgen05_word(0, 0, 1024, 2))
    moved = md.decode_tcgen05_matrix_descriptor(tcgen05_word(384, 0, 1024, 2, base=3))
    row, kb = np.arange(16)[:, None], np.arange(128)[None, :]
    np.testing.assert_array_equal(moved.address(row, kb) - 384, at_zero.address(row, kb))


def test_layout_and_swizzle_must_fit():
    atom32 = md.decode_tcgen05_matrix_descriptor(tcgen05_word(swizzle=1))
    plain = md.decode_tcgen05_matrix_descriptor(tcgen05_word(swizzle=2))
    for descriptor, bits, mn_major in (
        (atom32, 16, False),
        (atom32, 16, True),
        (plain, 32, True),
        (plain, 4, True),
    ):
        with pytest.raises(md.DescriptorError):
            md.check_operand_layout(descriptor, element_bits=bits, mn_major=mn_major)
    md.check_operand_layout(atom32, element_bits=32, mn_major=True)
    md.check_operand_layout(plain, element_bits=16, mn_major=True)


def test_padded_units_ignore_their_pad_bytes():
    rng = np.random.default_rng()
    for fmt, bits in ((tc.E2M1, 4), (tc.E2M3, 6)):
        codes = rng.integers(0, 1 << bits, (5, 16)).astype(np.uint8)
        stream = sum(codes[:, i].astype(object) << (bits * i) for i in range(16))
        units = np.array([list(int(x).to_bytes(16, "little")) for x in stream], np.uint8)
        units[:, 2 * bits :] = rng.integers(0, 256, (5, 16 - 2 * bits))
        np.testing.assert_array_equal(md.padded_fp_elements(units, fmt), codes)


def test_every_descriptor_that_the_host_encodes_is_decoded_to_its_arguments():
    kinds = [
        (kind, a, b)
        for kind in encoders.KINDS
        for a in encoders.FORMATS[kind]
        for b in encoders.FORMATS[kind]
        if kind != "f16" or a == b
    ]
    for kind, a, b in kinds:
        scaled = kind.startswith("mx")
        for m in (128,) if scaled else (64, 128):
            for n in (16, 32, 256):
                for flags in range(16 if kind not in ("mxf4", "mxf4nvf4", "i8") else 1):
                    options = dict(
                        zip(
                            ("a_mn_major", "b_mn_major", "negate_a", "negate_b"),
                            (bool(flags >> i & 1) for i in range(4)),
                        )
                    )
                    if kind == "i8":
                        options = dict(accumulator="s32", saturate=n == 16)
                    word = encoders.instruction_descriptor(kind, m, n, a=a, b=b, **options)
                    vector = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}.get(kind)
                    decoded = md.decode_instruction_descriptor(word, kind, scale_vector=vector)
                    assert (decoded.m, decoded.n) == (m, n)
                    assert tc.FORMAT_NAMES[decoded.a_format] == a and tc.FORMAT_NAMES[decoded.b_format] == b
                    for name, value in options.items():
                        if name != "accumulator":
                            assert getattr(decoded, name) == value


def test_every_matrix_descriptor_that_the_host_encodes_is_decoded_to_its_arguments():
    rng = np.random.default_rng()
    modes = {
        "none": md.NO_SWIZZLE,
        "32B": md.SWIZZLE_32B,
        "64B": md.SWIZZLE_64B,
        "128B": md.SWIZZLE_128B,
        "128B_ATOM_32B": md.SWIZZLE_128B_ATOM_32B,
    }
    assert set(modes) == set(encoders.SWIZZLES)
    for name, mode in modes.items():
        for _ in range(20):
            address, stride, leading = (int(x) * 16 for x in rng.integers(0, 1 << 14, 3))
            word = encoders.matrix_descriptor(address, name, stride_bytes=stride, leading_bytes=leading)
            assert md.decode_tcgen05_matrix_descriptor(word) == md.MatrixDescriptor(
                address, leading, stride, mode, 0
            )
